"""Hand-written policies for minipedia: the best one, whose score is the world's ceiling, and shortcuts.

Text in, text out, as the model's roles: each is a function of what its role is told (question, queries so far, passages
shown) and never sees a gold. One idea: a curve means nothing without the score that is possible and the score that a
trick gets. ``rllib evaluate --roles perfect`` plays them by name.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from rllib_mhgpo.data import Passage
from rllib_mhgpo.envs.minipedia.records import SPOKEN
from rllib_mhgpo.envs.prompts import tagged

NAMED = re.compile(rf"\b({'|'.join(SPOKEN)}) ([A-Z]\w+ [A-Z]\w+)")
MADE = re.compile(r"^(\w+ \w+) \w+ it in (\d+)\.")
TAUGHT = re.compile(r"^(\w+ \w+) once taught ")
BORN = re.compile(r"born in (\w+) in (\d+)\.")

Write = Callable[[str, Sequence[str], Sequence[Passage]], str]
"""(question, queries so far, passages shown) -> what the role says."""
Policy = Mapping[str, Write]
"""By kind of role."""


def works_asked(question: str) -> list[str]:
    """The page titles of the works a question names.

    >>> works_asked("Is the movie Iron Crown older than the boat Paper Raven?")
    ['Iron Crown (film)', 'Paper Raven (ship)']
    """
    return [f"{title} ({SPOKEN[synonym]})" for synonym, title in NAMED.findall(question)]


def asks_teacher(question: str) -> bool:
    """Whether the question is about a maker's teacher."""
    return " the teacher of " in question


def chain(question: str, passages: Sequence[Passage]) -> list[str]:
    """The titles of the pages to read, as far as the passages tell: each page names the next."""
    texts, wanted = {page.title: page.text for page in passages}, works_asked(question)
    if len(wanted) == 1:
        for named in (MADE, TAUGHT)[: 1 + asks_teacher(question)]:
            match = named.match(texts.get(wanted[-1], ""))
            wanted += [match[1]] if match else []
    return wanted


def rewrite(question: str, queries: Sequence[str] = (), passages: Sequence[Passage] = ()) -> str:
    """Asks for the page of each work, or for the work's page and for the people whose pages name its title."""
    works = works_asked(question)
    if len(works) > 1:
        return "\n".join(works)
    # where makers have teachers their pages say "once taught"; elsewhere no page has these words
    people = people_asked(question) if asks_teacher(question) else [f"{bare(works[0])} known for once taught"]
    return "\n".join([works[0], *people])


def people_asked(question: str) -> list[str]:
    """Queries for the pages of makers and teachers, by the title they are known for."""
    title = bare(works_asked(question)[0])
    return [f"{title} once taught", f"{title} pupil"] if asks_teacher(question) else [f"{title} known for"]


def rerank(question: str, queries: Sequence[str], passages: Sequence[Passage]) -> str:
    """Picks the works' pages or, for a single work, its page and the pages of the people that lead to the answer."""
    numbers = {page.title: number for number, page in enumerate(passages)}
    return " ".join(f"{title} #{numbers[title]}" for title in chain(question, passages) if title in numbers)


def answer(question: str, queries: Sequence[str], passages: Sequence[Passage]) -> str:
    """Reads the answer off the pages; says nothing where they do not hold it."""
    texts = {page.title: page.text for page in passages}
    works, pages = works_asked(question), chain(question, passages)
    if len(works) == 1:
        known = len(pages) == 2 + asks_teacher(question)
        town, born = next(iter(BORN.findall(texts.get(pages[-1], ""))), ("", "")) if known else ("", "")
        return born if re.match("When|In which year", question) else town
    made = [match for work in works if (match := MADE.match(texts.get(work, "")))]
    if len(made) < 2:
        return ""
    first = made[0][2] < made[1][2]
    return ("yes" if first else "no") if re.match("Is|Did", question) else bare(works[not first])


def search_or_answer(question: str, queries: Sequence[str], passages: Sequence[Passage]) -> str:
    """One round of the single context: searches for the first page of the chain that is missing, else answers."""
    found = {page.title for page in passages}
    missing = [title for title in chain(question, passages) if title not in found]
    if missing and missing[0] not in queries:
        return tagged("search", missing[0])
    return tagged("answer", answer(question, queries, passages))


def bare(page_title: str) -> str:
    """Takes the kind off a title."""
    return page_title.rpartition(" (")[0]


PERFECT: Policy = MappingProxyType(
    {"rewriter": rewrite, "reranker": rerank, "answerer": answer, "searcher": search_or_answer}
)


def titles_alone(question: str, queries: Sequence[str], passages: Sequence[Passage]) -> str:
    """Searches for the titles without their kinds."""
    return "\n".join(map(bare, works_asked(question)))


def first(question: str, queries: Sequence[str], passages: Sequence[Passage]) -> str:
    """Picks whatever was found first."""
    return f"{passages[0].title} #0"


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "perfect": PERFECT,
        "question-as-query": {**PERFECT, "rewriter": lambda question, *_: question},
        "titles-as-queries": {**PERFECT, "rewriter": titles_alone},
        "first-passage": {**PERFECT, "reranker": first},
        "title-as-answer": {**PERFECT, "answerer": lambda question, *_: bare(works_asked(question)[0])},
        "majority-answer": {**PERFECT, "answerer": lambda *_: "no"},
    }
)
"""By name: the perfect policy, and tricks, each with the other roles perfect."""
