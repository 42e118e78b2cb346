"""minipedia: a generated encyclopedia with multi-hop questions, for runs that need nothing but a CPU.

Not a benchmark of large models. One idea: a question set is named by a word, ``minipedia:dev``, and everything behind
that word is generated from seeds, so that nothing has to be fetched; ``minipedia:dev?facts_seed=7`` asks the same
questions of a world with other facts.
"""

import re

from rllib_mhgpo.data import Corpus, Question, Questions
from rllib_mhgpo.envs.minipedia.records import Record, build_records
from rllib_mhgpo.envs.minipedia.world import build_world
from rllib_mhgpo.errors import ConfigError, did_you_mean

SPLITS = ("train", "dev", "test")

__all__ = ["SPLITS", "corpus", "is_minipedia", "minipedia", "minipedia_corpus", "parse_spec", "questions"]


def questions(split: str, facts_seed: int = 0) -> Questions:
    """Generates the questions of ``train``, ``dev`` or ``test``; their works are disjoint."""
    source = f"minipedia:{split}" + (f"?facts_seed={facts_seed}" if facts_seed else "")
    return Questions(map(to_question, build_records(split, facts_seed)), source)


def corpus(facts_seed: int = 0) -> Corpus:
    """Generates the pages of all splits, as one corpus."""
    pages = build_world(facts_seed).pages
    return Corpus.from_passages(
        ((title, " ".join(sentences)) for title, sentences in pages), f"minipedia, facts {facts_seed}"
    )


def is_minipedia(spec: str) -> bool:
    """Tells whether a question source names a generated set and no file."""
    return spec.partition(":")[0] == "minipedia"


def minipedia(spec: str) -> Questions:
    """Generates the questions that ``minipedia:SPLIT`` or ``minipedia:SPLIT?facts_seed=N`` names."""
    return questions(*parse_spec(spec))


def minipedia_corpus(spec: str) -> Corpus:
    """Generates the corpus in which the questions of ``spec`` have their answers."""
    return corpus(parse_spec(spec)[1])


def parse_spec(spec: str) -> tuple[str, int]:
    """Returns split and facts seed.

    Raises:
        ConfigError: for anything else; the nearest split is named.

    >>> parse_spec("minipedia:test?facts_seed=7")
    ('test', 7)
    """
    match = re.fullmatch(r"minipedia:(\w+)(?:\?facts_seed=(\d{1,9}))?", spec)
    if match is None or match[1] not in SPLITS:
        raise ConfigError(
            "questions: expected minipedia:SPLIT or minipedia:SPLIT?facts_seed=NUMBER,"
            f" with SPLIT one of {', '.join(SPLITS)}, found {spec!r}."
            + did_you_mean(match[1] if match else spec, SPLITS)
        )
    return match[1], int(match[2] or 0)


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
