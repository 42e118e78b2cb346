"""Hand-written policies for minipedia: the best one, whose score is the world's ceiling, and shortcuts.

Text in, text out, as the model's roles; they read prompts' contents only, never golds. One idea: a curve means nothing
without the score that is possible and the score that a trick gets. A policy is a function for each agent.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from rllib_mhgpo.data import Passage
from rllib_mhgpo.envs.minipedia.forms import ROLES
from rllib_mhgpo.envs.minipedia.records import SPOKEN

NAMED = re.compile(rf"\b({'|'.join(SPOKEN)}) ([A-Z]\w+ [A-Z]\w+)")
MADE = re.compile(r"^(\w+ \w+) \w+ it in (\d+)\.")
BORN = re.compile(r"born in (\w+) in (\d+)\.")

Policy = Mapping[str, Callable[..., str]]


def works_asked(question: str) -> list[str]:
    """The page titles of the works a question names.

    >>> works_asked("Is the movie Iron Crown older than the boat Paper Raven?")
    ['Iron Crown (film)', 'Paper Raven (ship)']
    """
    return [f"{title} ({SPOKEN[synonym]})" for synonym, title in NAMED.findall(question)]


def rewrite(question: str) -> str:
    """Asks for the page of each work, or for the work's page and for the people known for its title."""
    works = works_asked(question)
    return "\n".join(works if len(works) > 1 else [works[0], f"{bare(works[0])} known for"])


def rerank(question: str, queries: Sequence[str], passages: Sequence[Passage]) -> str:
    """Picks the works' pages and, for a single work, the page of the maker that it names."""
    numbers = {page.title: number for number, page in enumerate(passages)}
    wanted = works_asked(question)
    if len(wanted) == 1 and wanted[0] in numbers:
        wanted.append(MADE.findall(passages[numbers[wanted[0]]].text)[0][0])
    return " ".join(f"{title} #{numbers[title]}" for title in wanted if title in numbers)


def answer(question: str, passages: Sequence[Passage]) -> str:
    """Reads the answer off the pages; says nothing where they do not hold it."""
    texts = {page.title: page.text for page in passages}
    works = works_asked(question)
    made = [MADE.match(texts.get(work, "")) for work in works]
    if None in made:
        return ""
    makers, years = zip(*(match.groups() for match in made if match), strict=True)
    if len(works) == 1:
        town, born = next(iter(BORN.findall(texts.get(makers[0], ""))), ("", ""))
        return born if re.match("When|In which year", question) else town
    first = years[0] < years[1]
    return ("yes" if first else "no") if re.match("Is|Did", question) else bare(works[not first])


def bare(page_title: str) -> str:
    """Takes the kind off a title."""
    return page_title.rpartition(" (")[0]


PERFECT: Policy = MappingProxyType({"rewriter": rewrite, "reranker": rerank, "answerer": answer})


def first(question: str, queries: Sequence[str], passages: Sequence[Passage]) -> str:
    """Picks whatever was found first."""
    return f"{passages[0].title} #0"


SHORTCUTS: Mapping[str, Policy] = MappingProxyType(
    {
        "question as query": {**PERFECT, "rewriter": str},
        "titles as queries": {**PERFECT, "rewriter": lambda question: "\n".join(map(bare, works_asked(question)))},
        "first passage": {**PERFECT, "reranker": first},
        "title as answer": {**PERFECT, "answerer": lambda question, _: bare(works_asked(question)[0])},
        "majority answer": {**PERFECT, "answerer": lambda *_: "no"},
    }
)
"""Tricks, each with the other roles perfect."""


def play(policy: Policy, question: str, search: Callable[[Sequence[str], int], list[list[Passage]]]) -> str:
    """Answers one question as the search system does: ten pages over the queries, the chosen ones to the answerer."""
    queries, _ = ROLES["rewriter"].parse(policy["rewriter"](question))
    shares = [10 // len(queries) + (i < 10 % len(queries)) for i in range(len(queries))]
    found = (page for query, k in zip(queries, shares, strict=True) for page in search([query], k)[0])
    passages = list(dict.fromkeys(found))
    picked, _ = ROLES["reranker"].parse(policy["reranker"](question, queries, passages), passages)
    return policy["answerer"](question, [passages[i] for i in picked])
