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

Page = tuple[str, tuple[str, ...]]
"""A title and sentences, as HotpotQA holds paragraphs."""


@dataclass(frozen=True)
class Level:
    """How large and how confusing a world is.

    Attributes:
        train: titles whose questions are for training, at most 100; each title names one work of every kind.
        dev: titles of the development questions.
        test: titles of the held-out questions.
        hops: pages that bridge questions need, in turn: 2 asks about a work's maker, 3 about the maker's teacher.
        rare_words: half of the questions call a kind of work by a rarer word.
        admirers: people a title has besides its makers, whose pages mention it too.
        clubs: pages for each question word (movie, novel, ...) that attract queries made of the question's own words.
        taught: how a teacher's page mentions the title; with "known for" it is a look-alike of the maker's.
        top_k: passages that the search system should retrieve in all, so that every page can be found.
    """

    train: int = 100
    dev: int = 50
    test: int = 50
    hops: tuple[int, ...] = (2,)
    rare_words: bool = False
    admirers: int = 5
    clubs: int = 4
    taught: tuple[str, ...] = ("A pupil of {theirs} is known for", "In {town} a pupil of {theirs} is known for")
    top_k: int = 10

    @property
    def synonyms(self) -> tuple[str, ...]:
        """Words that questions use for kinds of works."""
        return tuple(word for kind in KINDS for word in kind.synonyms + (kind.rare if self.rare_words else ()))


HELD_OUT = 100
"""Titles from this one on are never trained on, at any level."""
STANDARD = Level()
LEVELS = {
    "standard": STANDARD,
    "hard": Level(
        train=80,
        hops=(2, 3),
        rare_words=True,
        taught=("A pupil of {theirs} is behind", "In {town} a pupil of {theirs} is behind"),
        top_k=12,
    ),
    "harder": Level(train=80, hops=(3,), rare_words=True, top_k=12),
}
MADE = ("{They} is known for", "In {town} {they} is known for", "In {town} {they} is well known for")
ADMIRES = ("{They} talks of", "{They} likes any {synonym} more than", "In {town} {they} talks of")


@dataclass(frozen=True)
class Person:
    """Someone with a page: a maker of a title, the teacher of one, or a mere admirer."""

    name: str
    pronoun: str
    town: str
    born: int
    title: str
    remark: str  # the last sentence up to the title
    teacher: "Person | None" = None

    @property
    def page(self) -> Page:
        """The page, which never says which kind of work the title is."""
        taught = () if self.teacher is None else (f"{self.teacher.name} once taught {OBJECT[self.pronoun]}.",)
        return self.name, (
            *taught,
            f"{self.pronoun} was born in {self.town} in {self.born}.",
            f"{self.remark} {self.title}.",
        )


OBJECT = {"She": "her", "He": "him"}
POSSESSIVE = {"She": "hers", "He": "his"}


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

    @property
    def people(self) -> tuple[Person, ...]:
        """Its maker, and the maker's teacher where the level has teachers."""
        return (self.maker,) if self.maker.teacher is None else (self.maker, self.maker.teacher)


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
        works[split] = tuple(work for title in titles for work in draw_works(facts, title, people, level))
        pages += [page for work in works[split] for page in (work.page, *(person.page for person in work.people))]
        pages += [
            draw_person(facts, people, title, ADMIRES, level).page for title in titles for _ in range(level.admirers)
        ]
    Random(f"order {facts_seed}").shuffle(pages)
    return World(works, tuple(pages))


def split_titles(level: Level = STANDARD) -> dict[str, list[str]]:
    """Deals the titles to the splits; they do not depend on the facts."""
    titles = [f"{adjective} {noun}" for adjective, noun in product(words.ADJECTIVES, words.NOUNS)]
    Random("titles").shuffle(titles)
    dev, test = titles[HELD_OUT:], titles[HELD_OUT + level.dev :]
    return {"train": titles[: level.train], "dev": dev[: level.dev], "test": test[: level.test]}


def draw_people(facts: Random) -> Iterator[tuple[str, str]]:
    """Yields distinct (name, pronoun) pairs in random order."""
    names = [(f"{first} {last}", "She") for first, last in product(words.WOMEN, words.SURNAMES)]
    names += [(f"{first} {last}", "He") for first, last in product(words.MEN, words.SURNAMES)]
    facts.shuffle(names)
    return iter(names)


def draw_person(
    facts: Random,
    people: Iterator[tuple[str, str]],
    title: str,
    remarks: tuple[str, ...],
    level: Level,
    teacher: Person | None = None,
) -> Person:
    """Draws one person; towns and year are independent of everything else."""
    name, pronoun = next(people)
    told = facts.choice(remarks).format(
        they=pronoun.lower(),
        They=pronoun,
        theirs=POSSESSIVE[pronoun],
        town=facts.choice(words.TOWNS),
        synonym=facts.choice(level.synonyms),
    )
    return Person(name, pronoun, facts.choice(words.TOWNS), facts.choice(words.BIRTH_YEARS), title, told, teacher)


def draw_maker(facts: Random, people: Iterator[tuple[str, str]], title: str, level: Level) -> Person:
    """Draws the maker of a title, at three hops with a teacher."""
    teacher = draw_person(facts, people, title, level.taught, level) if max(level.hops) > 2 else None
    return draw_person(facts, people, title, MADE, level, teacher)


def draw_works(facts: Random, title: str, people: Iterator[tuple[str, str]], level: Level) -> list[Work]:
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
            draw_maker(facts, people, title, level),
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
    for synonym in level.synonyms:
        for town in draw.sample(words.TOWNS, level.clubs):
            yield (
                f"{town} {synonym} club",
                (
                    f"Members ask when or in which town the person behind a {synonym} was born.",
                    "They also like to guess which is older or came first.",
                ),
            )
