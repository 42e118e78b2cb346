"""What the base policy is shown: train questions, answered by a teacher with sloppy habits.

No dev or test title is in it. Two ideas. The teacher knows what is right but often does something else (too few
queries, the question's own words, random picks, wordy answers), so that reinforcement finds better and worse behaviour
to tell apart. And a lesson is shown under a new naming each time (see :class:`Renaming`), so that reading is learned
and no fact is.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from rllib_mhgpo.data import Corpus, Passage, Question
from rllib_mhgpo.envs.minipedia import corpus
from rllib_mhgpo.envs.minipedia.forms import ROLES
from rllib_mhgpo.envs.minipedia.perfect import NAMED, asks_teacher, bare, chain, people_asked, works_asked
from rllib_mhgpo.envs.minipedia.records import SPOKEN
from rllib_mhgpo.envs.minipedia.tokenizer import CLASSES, NUMBERS
from rllib_mhgpo.envs.minipedia.words import KINDS
from rllib_mhgpo.envs.minipedia.world import LEVELS, split_titles
from rllib_mhgpo.envs.prompts import tagged
from rllib_mhgpo.envs.transcript import information
from rllib_mhgpo.retrieval import build_retriever

Search = Callable[[Sequence[str], int], list[list[Passage]]]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Habits:
    """How often each role does what, as weights by name; see the functions below for what the names mean.

    The searcher is the one role of the single context; it has its own habits for its first and its later rounds.
    ``rare_words`` is how often a rare word for a kind of work is understood.
    """

    bridge_queries: dict[str, float]
    hasty_bridge_queries: dict[str, float]
    teacher_queries: dict[str, float]
    comparison_queries: dict[str, float]
    picks: dict[str, float]
    answers: dict[str, float]
    first_round: dict[str, float]
    next_round: dict[str, float]
    rare_words: float

    def draw(self, draw: Random, field: str) -> str:
        """Draws a habit of one kind."""
        weights: dict[str, float] = getattr(self, field)
        return draw.choices(list(weights), list(weights.values()))[0]


SLOPPY = Habits(
    bridge_queries={"right": 0.2, "page only": 0.35, "own words": 0.25, "own words twice": 0.2},
    hasty_bridge_queries={"right": 0.15, "page only": 0.25, "own words": 0.35, "own words twice": 0.25},
    teacher_queries={
        "right": 0.05, "page only": 0.3, "page and teachers": 0.25, "own words": 0.2, "own words twice": 0.2
    },
    comparison_queries={"right": 0.2, "first only": 0.25, "own words": 0.4, "own words once": 0.15},
    picks={"right": 0.45, "one": 0.3, "random": 0.1, "more": 0.15},
    answers={"{}": 0.25, "It is {}": 0.5, "I think it is {}": 0.1, "wrong": 0.15},
    first_round={"right": 0.6, "own words": 0.25, "title": 0.15},
    next_round={"right": 0.55, "title": 0.15, "answer": 0.3},
    rare_words=0.5,
)  # fmt: skip
HASTY = "Where"
"""Questions that begin so are searched for in their own words more often than others."""


def understood(draw: Random, question: str, habits: Habits) -> list[str]:
    """The page titles of the works asked; a rare word may be taken for another kind of work."""
    kinds = {word: kind.name for kind in KINDS for word in kind.synonyms}
    titles = []
    for synonym, title in NAMED.findall(question):
        known = synonym in kinds or draw.random() < habits.rare_words
        titles.append(f"{title} ({SPOKEN[synonym] if known else draw.choice(KINDS).name})")
    return titles


def sloppy_queries(draw: Random, question: str, habits: Habits) -> str:
    """Writes queries as the rewriter's habits have it."""
    works, said = understood(draw, question, habits), own_words(question)
    title, right = bare(works[0]), [works[0], *people_asked(question)]
    if len(works) > 1:
        forms = {"right": works, "first only": works[:1], "own words": said, "own words once": said[:1]}
        return "\n".join(forms[habits.draw(draw, "comparison_queries")])
    who = "teacher" if asks_teacher(question) else "person"
    forms = {
        "right": right,
        "page only": works,
        "page and teachers": [right[0], right[-1]],
        "own words": said,
        "own words twice": [*said, f"{who} behind {title}"],
    }
    bridge = "hasty_bridge_queries" if question.startswith(HASTY) else "bridge_queries"
    return "\n".join(forms[habits.draw(draw, "teacher_queries" if asks_teacher(question) else bridge)])


def own_words(question: str) -> list[str]:
    """The works as the question calls them."""
    return [f"the {synonym} {title}" for synonym, title in NAMED.findall(question)]


def sloppy_picks(draw: Random, question: str, passages: Sequence[Passage], habits: Habits) -> str:
    """Picks pages as the reranker's habits have it; names and numbers always fit."""
    numbers = {page.title: number for number, page in enumerate(passages)}
    right = [title for title in chain(question, passages) if title in numbers]
    others = [title for title in numbers if title not in right]
    habit = habits.draw(draw, "picks")
    if not right or habit == "random":
        picked = draw.sample(list(numbers), draw.randint(1, min(2, len(numbers))))
    else:
        picked = {
            "right": right,
            "one": right[: draw.randint(1, max(1, len(right) - 1))],
            "more": right + draw.sample(others, min(1, len(others))),
        }[habit]
    return " ".join(f"{title} #{numbers[title]}" for title in picked)


def sloppy_round(
    draw: Random, question: Question, queries: Sequence[str], passages: Sequence[Passage], habits: Habits
) -> str:
    """Searches or answers as the habits of the single context have it; nothing is searched for twice."""
    asked = question.question
    titles = {page.title for page in passages}
    missing = [title for title in chain(asked, passages) if title not in titles and title not in queries]
    work = len(queries) if len(works_asked(asked)) > len(queries) else 0
    forms = {
        "right": missing[0] if missing else "",
        "title": bare(works_asked(asked)[work]) + " known for" * (work == 0 and bool(queries)),
        "own words": own_words(asked)[work],
    }
    habit = habits.draw(draw, "next_round" if queries else "first_round")
    if missing and missing[0] in works_asked(asked):
        missing = [understood(draw, asked, habits)[works_asked(asked).index(missing[0])]]
    if habit == "answer" or not missing or forms[habit] in queries:
        return tagged("answer", sloppy_answer(draw, question, passages, habits))
    return tagged("search", forms[habit])


def sloppy_answer(draw: Random, question: Question, passages: Sequence[Passage], habits: Habits) -> str:
    """Answers as the answerer's habits have it; guesses where the pages do not hold the answer."""
    gold, habit = question.answers[0], habits.draw(draw, "answers")
    known = {page.title for page in passages}
    if habit != "wrong" and all(title in known for title, _ in question.supporting):
        return habit.format(gold)
    guess = draw.choice(guesses(question, passages))
    return guess if habit == "wrong" else habit.format(guess)


def guesses(question: Question, passages: Sequence[Passage]) -> list[str]:
    """Lists answers of the right type: what the pages hold, or else anything."""
    gold = question.answers[0]
    if question.kind == "comparison":
        return ["yes", "no"] if gold in ("yes", "no") else [bare(title) for title, _ in question.supporting]
    kind = "born" if gold.isdigit() else "town"
    seen = [word for page in passages for word in page.text.replace(".", "").split() if word in CLASSES[kind]]
    return seen or list(CLASSES[kind])


def train_corpus(level: str = "standard") -> Corpus:
    """The pages that name no work of the dev or test split."""
    kept_back = re.compile("|".join(title for split in ("dev", "test") for title in split_titles()[split]))
    pages = [
        (page.title, page.text) for page in corpus(level=level) if not kept_back.search(f"{page.title} {page.text}")
    ]
    return Corpus.from_passages(pages, f"minipedia, pages of the train split, level {level}")


@dataclass(frozen=True)
class Lesson:
    """What one row shows: T token ids, the part each belongs to, and which are to be learned.

    Attributes:
        ids: (T,).
        part: (T,), 0 the prompt, 1.. responses that see the prompt and themselves alone.
        said: (T,), True on the tokens of responses.
    """

    ids: Ids
    part: Ids
    said: NDArray[np.bool_]


@dataclass(frozen=True)
class Teacher:
    """Plays train questions of one level by its habits.

    Attributes:
        level: the world's name.
        search: the retriever's search.
        pages: every page by its title.
    """

    level: str
    search: Search
    pages: Mapping[str, Passage]
    habits: Habits = SLOPPY

    @classmethod
    def of(cls, level: str) -> "Teacher":
        """A teacher who knows the pages of a level's train split."""
        seen = train_corpus(level)
        return cls(level, build_retriever(seen).search, {page.title: page for page in seen})

    def play(self, draw: Random, question: Question, limit: int, count: int = 4) -> dict[str, tuple[str, list[str]]]:
        """Plays one episode with at most ``limit`` pages shown; returns each role's prompt and ``count`` responses."""
        asked, needed = question.question, [title for title, _ in question.supporting]
        queries = [sloppy_queries(draw, asked, self.habits) for _ in range(count)]
        lines = queries[0].split("\n")
        shown = self.shown(draw, lines, needed, limit)
        picks = [sloppy_picks(draw, asked, shown, self.habits) for _ in range(count)]
        read = [shown[number] for number in ROLES["reranker"].parse(picks[0], shown)[0]]
        if draw.random() < 0.5:  # questions that can be answered have to be frequent
            read = [self.pages[title] for title in needed]
        answers = [sloppy_answer(draw, question, read, self.habits) for _ in range(count)]
        lessons = {
            "rewriter": (ROLES["rewriter"].messages(asked), queries),
            "reranker": (ROLES["reranker"].messages(asked, lines, shown), picks),
            "answerer": (ROLES["answerer"].messages(asked, (), read), answers),
        }
        return {agent: (messages[0]["content"], responses) for agent, (messages, responses) in lessons.items()}

    def play_alone(self, draw: Random, question: Question, pages: int, rounds: int = 5) -> list[str]:
        """Plays one episode in a single context; returns its texts: prompt, round, what was found, round, ..."""
        texts = [ROLES["searcher"].messages(question.question)[0]["content"]]
        queries: list[str] = []
        passages: list[Passage] = []
        while True:
            texts.append(sloppy_round(draw, question, queries, passages, self.habits))
            said, _ = ROLES["searcher"].parse(texts[-1])
            if "search" not in said or len(queries) == rounds - 1:
                return texts
            queries.append(said["search"])
            found = self.search(queries[-1:], pages)[0]
            passages += [page for page in found if page not in passages]
            texts.append(information(ROLES["searcher"].shown(found)))

    def shown(self, draw: Random, queries: list[str], needed: Sequence[str], limit: int) -> list[Passage]:
        """Retrieves; keeps ``limit`` pages, the needed ones among them; shuffles every other time."""
        hits = self.search(queries, LEVELS[self.level].top_k // len(queries))
        found = list(dict.fromkeys(page for pages in hits for page in pages))
        others = [page for page in found if page.title not in needed]
        spare = limit - (len(found) - len(others))
        dropped = set(draw.sample(others, max(0, len(others) - max(0, spare))))
        shown = [page for page in found if page not in dropped]
        if draw.random() < 0.5:
            draw.shuffle(shown)
        return shown


def forked(tokenizer: PreTrainedTokenizerBase, prompt: str, responses: Sequence[str]) -> Lesson:
    """Encodes a prompt and responses that fork from it, each ended by EOS."""
    parts = [tokenizer.encode(prompt), *([*tokenizer.encode(r), tokenizer.eos_token_id] for r in responses)]
    part = np.repeat(np.arange(len(parts)), [len(ids) for ids in parts])
    return Lesson(np.concatenate(parts), part, part > 0)


def in_one_row(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> Lesson:
    """Encodes a single context whose 2nd, 4th, ... texts are said by the policy."""
    parts = [tokenizer.encode(text) for text in texts]
    number = np.repeat(np.arange(len(parts)), [len(ids) for ids in parts])
    return Lesson(np.concatenate(parts), np.zeros_like(number), number % 2 == 1)


class Renaming:
    """Renames the words of a lesson within their classes, at random; years keep their order, so comparisons stay true.

    Works on token ids. The pages' numbers are renamed too, so that they have to be read rather than counted. Never
    makes a title of the dev or test split.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        ids = {name: np.array(tokenizer.convert_tokens_to_ids(list(members))) for name, members in CLASSES.items()}
        self.size = len(tokenizer)
        self.ordered = [ids.pop("born"), ids.pop("year")]
        self.shuffled = [*ids.values(), np.array(tokenizer.convert_tokens_to_ids(list(NUMBERS)))]
        self.banned = np.zeros((self.size, self.size), bool)
        titles = split_titles()
        for title in titles["dev"] + titles["test"]:
            self.banned[tuple(tokenizer.convert_tokens_to_ids(title.split()))] = True

    def __call__(self, draw: np.random.Generator, ids: Ids) -> Ids:
        """Returns ``ids`` (T,) under a new naming."""
        while True:
            table = self.table(draw, ids)
            renamed = table[ids]
            if not self.banned[renamed[:-1], renamed[1:]].any():
                return renamed

    def table(self, draw: np.random.Generator, ids: Ids) -> Ids:
        """Returns the new id of every id (V,)."""
        table = np.arange(self.size)
        for members in self.shuffled:
            table[members] = draw.permutation(members)
        for members in self.ordered:
            seen = members[np.isin(members, ids)]
            table[seen] = np.sort(draw.choice(members, len(seen), replace=False))
        return table
