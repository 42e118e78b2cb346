"""minipedia: a generated encyclopedia with multi-hop questions, for runs that need nothing but a CPU.

Not a benchmark of large models. One idea: a question set is named by a word, ``minipedia:dev``, and everything behind
that word is generated from seeds, so that nothing has to be fetched; ``minipedia:dev?facts_seed=7`` asks the same
questions of a world with other facts, ``minipedia:dev?level=hard`` asks harder ones.
"""

import re
from typing import NamedTuple
from urllib.parse import parse_qsl, urlencode

from rllib_mhgpo.data import Corpus, Question, Questions
from rllib_mhgpo.envs.minipedia.records import Record, build_records
from rllib_mhgpo.envs.minipedia.world import LEVELS, build_world
from rllib_mhgpo.errors import ConfigError, did_you_mean

SPLITS = ("train", "dev", "test")

__all__ = ["SPLITS", "Spec", "corpus", "is_minipedia", "minipedia", "minipedia_corpus", "parse_spec", "questions"]


class Spec(NamedTuple):
    """What ``minipedia:SPLIT?level=hard&facts_seed=7`` says; the level by its name."""

    split: str
    facts_seed: int = 0
    level: str = "standard"

    def __str__(self) -> str:
        changed = {"level": self.level} if self.level != "standard" else {}
        changed |= {"facts_seed": str(self.facts_seed)} if self.facts_seed else {}
        return f"minipedia:{self.split}" + (f"?{urlencode(changed)}" if changed else "")


def questions(split: str, facts_seed: int = 0, level: str = "standard") -> Questions:
    """Generates the questions of ``train``, ``dev`` or ``test``; their works are disjoint."""
    records = build_records(split, facts_seed, LEVELS[level])
    return Questions(map(to_question, records), str(Spec(split, facts_seed, level)))


def corpus(facts_seed: int = 0, level: str = "standard") -> Corpus:
    """Generates the pages of all splits, as one corpus."""
    pages = build_world(facts_seed, LEVELS[level]).pages
    return Corpus.from_passages(
        ((title, " ".join(sentences)) for title, sentences in pages), f"minipedia, level {level}, facts {facts_seed}"
    )


def is_minipedia(spec: str) -> bool:
    """Tells whether a question source names a generated set and no file."""
    return spec.partition(":")[0] == "minipedia"


def minipedia(spec: str) -> Questions:
    """Generates the questions that ``minipedia:SPLIT`` names, with ``?level=hard`` and ``facts_seed=N`` where given."""
    return questions(*parse_spec(spec))


def minipedia_corpus(spec: str) -> Corpus:
    """Generates the corpus in which the questions of ``spec`` have their answers."""
    return corpus(*parse_spec(spec)[1:])


def parse_spec(spec: str) -> Spec:
    """Reads a question source.

    Raises:
        ConfigError: for anything else; the nearest right word is named.

    >>> parse_spec("minipedia:test?facts_seed=7")
    Spec(split='test', facts_seed=7, level='standard')
    """
    split, _, query = spec.removeprefix("minipedia:").partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=False))
    level, seed = options.pop("level", "standard"), options.pop("facts_seed", "0")
    is_right = split in SPLITS and level in LEVELS and re.fullmatch(r"\d{1,9}", seed) and not options
    if not (is_right and spec.startswith("minipedia:")):
        raise ConfigError(
            "questions: expected minipedia:SPLIT, minipedia:SPLIT?level=LEVEL or minipedia:SPLIT?facts_seed=NUMBER, "
            f"with SPLIT one of {', '.join(SPLITS)} and LEVEL one of {', '.join(LEVELS)}, found {spec!r}."
            + did_you_mean(split if split not in SPLITS else level, (*SPLITS, *LEVELS))
        )
    return Spec(split, int(seed), level)


def to_question(record: Record) -> Question:
    """Turns a generated HotpotQA record into a question, as reading it from a file would."""
    return Question(
        id=record["_id"],
        question=record["question"],
        answers=(record["answer"],),
        supporting=tuple((title, number) for title, number in record["supporting_facts"]),
        context=tuple((title, tuple(sentences)) for title, sentences in record["context"]),
        kind=record["type"],
        level=record["level"],
    )
