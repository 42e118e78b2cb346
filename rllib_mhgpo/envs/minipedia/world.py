"""The generated encyclopedia: which works exist, who made them, and what their pages say.

Not the questions (:mod:`.records`). One idea: what *exists* (titles, splits, pairs to compare) is fixed by the level,
and what is *true* (names, towns, years) is drawn from ``facts_seed``, so the same question can be asked of a world in
which its answer is another one. Look-alike pages are part of the design: four works share each title, as many people
who only talk of a title as people who made one, and clubs whose pages hold the words that questions use.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from random import Random

from rllib_mhgpo.envs.minipedia import words
from rllib_mhgpo.envs.minipedia.words import KINDS, Kind

Page = tuple[str, tuple[str, str]]
"""A title and two sentences, as HotpotQA holds paragraphs."""


@dataclass(frozen=True)
class Level:
    """How large and how confusing a world is.

    Attributes:
        train: titles whose questions are for training; each title names one work of every kind.
        dev: titles of the development questions.
        test: titles of the held-out questions.
        admirers: people a title has besides its makers, whose pages mention it too.
        clubs: pages for each question word (movie, novel, ...) that attract queries made of the question's own words.
    """

    train: int = 100
    dev: int = 50
    test: int = 50
    admirers: int = 5
    clubs: int = 4


STANDARD = Level()
SYNONYMS = tuple(synonym for kind in KINDS for synonym in kind.synonyms)
MADE = ("{They} is known for", "In {town} {they} is known for", "In {town} {they} is well known for")
ADMIRES = ("{They} talks of", "{They} likes any {synonym} more than", "In {town} {they} talks of")


@dataclass(frozen=True)
class Person:
    """Someone with a page: a maker of a title or a mere admirer."""

    name: str
    pronoun: str
    town: str
    born: int
    title: str
    remark: str  # the second sentence up to the title

    @property
    def page(self) -> Page:
        """The page, which never says which kind of work the title is."""
        return self.name, (
            f"{self.pronoun} was born in {self.town} in {self.born}.",
            f"{self.remark} {self.title}.",
        )


@dataclass(frozen=True)
class Work:
    """A film, book, band or ship."""

    title: str
    kind: Kind
    maker: Person
    year: int
    remark: str  # the second sentence up to the other kind
    other: Kind

    @property
    def page_title(self) -> str:
        """The title with its kind, ``Silver Lantern (film)``."""
        return f"{self.title} ({self.kind.name})"

    @property
    def page(self) -> Page:
        """The page, which names the maker and also the kind of a look-alike."""
        return self.page_title, (
            f"{self.maker.name} {self.kind.made} it in {self.year}.",
            f"{self.remark} the {self.other.name}.",
        )


@dataclass(frozen=True)
class World:
    """All works by split, and every page in one list."""

    works: dict[str, tuple[Work, ...]]
    pages: tuple[Page, ...]


@lru_cache(maxsize=8)
def build_world(facts_seed: int = 0, level: Level = STANDARD) -> World:
    """Draws the facts of a level's world; the same seed gives the same world in every process."""
    facts = Random(f"facts {facts_seed}")
    people = draw_people(facts)
    works: dict[str, tuple[Work, ...]] = {}
    pages: list[Page] = list(club_pages(level))
    for split, titles in split_titles(level).items():
        works[split] = tuple(work for title in titles for work in draw_works(facts, title, people))
        pages += [page for work in works[split] for page in (work.page, work.maker.page)]
        pages += [draw_person(facts, people, title, ADMIRES).page for title in titles for _ in range(level.admirers)]
    Random(f"order {facts_seed}").shuffle(pages)
    return World(works, tuple(pages))


def split_titles(level: Level = STANDARD) -> dict[str, list[str]]:
    """Deals the titles to the splits; they do not depend on the facts."""
    titles = [f"{adjective} {noun}" for adjective, noun in product(words.ADJECTIVES, words.NOUNS)]
    Random("titles").shuffle(titles)
    dev, test = level.train + level.dev, level.train + level.dev + level.test
    return {"train": titles[: level.train], "dev": titles[level.train : dev], "test": titles[dev:test]}


def draw_people(facts: Random) -> Iterator[tuple[str, str]]:
    """Yields distinct (name, pronoun) pairs in random order."""
    names = [(f"{first} {last}", "She") for first, last in product(words.WOMEN, words.SURNAMES)]
    names += [(f"{first} {last}", "He") for first, last in product(words.MEN, words.SURNAMES)]
    facts.shuffle(names)
    return iter(names)


def draw_person(facts: Random, people: Iterator[tuple[str, str]], title: str, remarks: tuple[str, ...]) -> Person:
    """Draws one person; towns and year are independent of everything else."""
    name, pronoun = next(people)
    told = facts.choice(remarks).format(
        they=pronoun.lower(), They=pronoun, town=facts.choice(words.TOWNS), synonym=facts.choice(SYNONYMS)
    )
    return Person(name, pronoun, facts.choice(words.TOWNS), facts.choice(words.BIRTH_YEARS), title, told)


def draw_works(facts: Random, title: str, people: Iterator[tuple[str, str]]) -> list[Work]:
    """Draws the works of one title.

    Each page mentions another kind and each kind is mentioned once, so that a query for one kind meets a look-alike.
    Even and odd kinds have even and odd years, so that two of them can be compared whatever the facts are.
    """
    order = facts.sample(KINDS, len(KINDS))
    others = dict(zip(order, order[1:] + order[:1], strict=True))
    return [
        Work(
            title,
            kind,
            draw_person(facts, people, title, MADE),
            facts.choice(words.WORK_YEARS[i % 2 :: 2]),
            facts.choice(
                (
                    "It came after",
                    "It came before",
                    f"It was first {kind.appeared} in {facts.choice(words.TOWNS)}, after",
                )
            ),
            others[kind],
        )
        for i, kind in enumerate(KINDS)
    ]


def club_pages(level: Level) -> Iterator[Page]:
    """Yields the look-alikes of questions: pages that hold a question's words but no title."""
    draw = Random("clubs")
    for synonym in SYNONYMS:
        for town in draw.sample(words.TOWNS, level.clubs):
            yield (
                f"{town} {synonym} club",
                (
                    f"Members ask when or in which town the person behind a {synonym} was born.",
                    "They also like to guess which is older or came first.",
                ),
            )
