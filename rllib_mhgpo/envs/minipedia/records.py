"""Multi-hop questions about the generated encyclopedia, as HotpotQA records.

One idea: questions speak other words than the pages do (movie for film, behind for directed), so that whoever searches
has to translate, and the page that holds the answer never says which work it belongs to, so that all pages of the chain
are needed.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

from rllib_mhgpo.envs.minipedia.words import KINDS
from rllib_mhgpo.envs.minipedia.world import STANDARD, Level, Page, Work, build_world

Record = dict[str, Any]

WHO = {2: "the person behind the {work}", 3: "the teacher of the person behind the {work}"}
"""By number of pages: whom a bridge question asks about."""
TOWN = ("In which town was {who} born?", "Where was {who} born?")
YEAR = ("In which year was {who} born?", "When was {who} born?")
OLDER = ("Which is older, the {work} or the {other}?", "Which came first, the {work} or the {other}?")
YES_NO = ("Is the {work} older than the {other}?", "Did the {work} come before the {other}?")
CONTEXT_PAGES = 10


def build_records(split: str, facts_seed: int = 0, level: Level = STANDARD) -> list[Record]:
    """Returns the split's questions in HotpotQA's layout, in an order that does not depend on the facts."""
    world = build_world(facts_seed, level)
    works, draw = world.works[split], Random(f"questions {split}")
    records = [record for i, work in enumerate(works) for record in bridge_records(draw, work, level, i)]
    even = [work for i, work in enumerate(works) if i % 2 == 0]
    odd = [work for i, work in enumerate(works) if i % 2]
    draw.shuffle(odd)
    for pair in zip(even, odd, strict=True):
        records += comparison_records(draw, draw.sample(pair, 2), level)
    draw.shuffle(records)
    fill = Random(f"context {split} {facts_seed}")
    for number, record in enumerate(records):
        record["_id"] = f"minipedia-{split}-{number:04d}"
        record["context"] = context(fill, record, world.pages)
    return records


def spoken(draw: Random, work: Work, level: Level) -> str:
    """Names a work as questions do: ``movie Silver Lantern``."""
    usual = not level.rare_words or draw.random() < 0.5
    return f"{draw.choice(work.kind.synonyms if usual else work.kind.rare)} {work.title}"


def bridge_records(draw: Random, work: Work, level: Level, turn: int) -> list[Record]:
    """Asks for town and birth year of a work's maker, or of the maker's teacher; ``turn`` says which comes first."""
    records = []
    for number, forms in enumerate((TOWN, YEAR)):
        hops = level.hops[(turn + number) % len(level.hops)]
        asked = work.people[hops - 2]
        pages = [work.page, *(person.page for person in work.people[: hops - 1])]
        question = draw.choice(forms).format(who=WHO[hops].format(work=spoken(draw, work, level)))
        records.append(record("bridge", question, asked.town if forms is TOWN else str(asked.born), pages))
    return records


def comparison_records(draw: Random, pair: Sequence[Work], level: Level) -> list[Record]:
    """Asks which of two works is older, and whether the first one is."""
    work, other = pair
    first = work.year < other.year
    names = {"work": spoken(draw, work, level), "other": spoken(draw, other, level)}
    asked = ((OLDER, work.title if first else other.title), (YES_NO, "yes" if first else "no"))
    return [
        record("comparison", draw.choice(forms).format(**names), answer, [work.page, other.page])
        for forms, answer in asked
    ]


def record(kind: str, question: str, answer: str, pages: list[Page]) -> Record:
    """Builds a record without id and context; the first sentence of each page is supporting, for a person the birth."""
    facts = [[title, len(sentences) - 2] for title, sentences in pages]
    return {
        "question": question,
        "answer": answer,
        "type": kind,
        "level": "medium" if len(pages) == 2 else "hard",
        "supporting_facts": facts,
        "pages": pages,
    }


def context(draw: Random, record: Record, pages: tuple[Page, ...]) -> list[list[Any]]:
    """Shuffles the supporting pages among others, each ``[title, sentences]``; takes ``pages`` off the record."""
    needed: list[Page] = record.pop("pages")
    others = [page for page in draw.sample(pages, CONTEXT_PAGES) if page not in needed]
    shown = needed + others[: CONTEXT_PAGES - len(needed)]
    draw.shuffle(shown)
    return [[title, list(sentences)] for title, sentences in shown]


SPOKEN = {synonym: kind.name for kind in KINDS for synonym in (*kind.synonyms, *kind.rare)}
"""What the pages call what a question calls so."""
