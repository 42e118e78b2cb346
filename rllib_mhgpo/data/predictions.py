"""Reads prediction files: answers by question id, and supporting facts where they were predicted too.

The one idea: the layouts of the official scripts and of what models are usually run with are told by their keys; a
prediction that cannot be read is named, never counted as a wrong answer in silence.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllib_mhgpo.data.layouts import described
from rllib_mhgpo.data.records import iterate_records
from rllib_mhgpo.errors import DataError

Facts = tuple[tuple[str, int], ...]

_IDS = ("question_id", "_id", "id", "qid")
_ANSWERS = ("answer", "predicted_answer", "prediction", "pred", "pred_answer")
_FACTS = ("supporting_sentences", "sp", "predicted_supporting_facts")
_PARAGRAPHS = "predicted_support_idxs"


@dataclass(frozen=True)
class Predictions:
    """By question id: answer; supporting facts, (title, sentence) pairs; numbers of supporting paragraphs."""

    answers: Mapping[str, str]
    facts: Mapping[str, Facts]
    paragraphs: Mapping[str, tuple[int, ...]]


def load_predictions(path: str | Path) -> Predictions:
    """Reads predictions.

    One object of ``answer`` and ``sp`` by id (HotpotQA, 2WikiMultihopQA), one of answers by id, or records with an id
    and an answer, as an array or JSON lines (MuSiQue, FlashRAG, ``rllib evaluate --out``). Records whose answer is null
    or that are voided are no predictions.

    Raises:
        DataError: naming file, record and key.
    """
    path = Path(path)
    answers: dict[str, str] = {}
    facts: dict[str, Facts] = {}
    paragraphs: dict[str, tuple[int, ...]] = {}
    for place, id_, answer, sp, numbers in _rows(path):
        if id_ in answers:
            raise DataError(f"{place}: a second prediction for {id_!r}; expected one a question. Remove one.")
        if answer is not None:
            answers[id_] = _text(place, id_, answer)
        if sp is not None:
            facts[id_] = _facts(place, id_, sp)
        if numbers is not None:
            paragraphs[id_] = _numbers(place, id_, numbers)
    if not answers:
        raise DataError(f"{path}: holds no answers; expected at least one.")
    return Predictions(answers, facts, paragraphs)


def _rows(path: Path) -> Iterator[tuple[str, str, Any, Any, Any]]:
    for place, value in iterate_records(path):
        if not isinstance(value, dict):
            raise DataError(f"{place}: expected a prediction (a JSON object), found {described(value)}.")
        if isinstance(value.get("answer"), dict):
            sp = value.get("sp", {})
            if not isinstance(sp, dict):
                raise DataError(f"{place}: 'sp': expected supporting facts by id, found {described(sp)}.")
            for id_ in dict.fromkeys([*value["answer"], *sp]):
                yield place, id_, value["answer"].get(id_), sp.get(id_), None
        elif _first(value, _IDS) is not None:
            yield from _record(place, value)
        elif "void" in value:
            continue
        elif value and all(isinstance(answer, str) for answer in value.values()):
            for id_, answer in value.items():
                yield place, id_, answer, None, None
        else:
            found = ", ".join(map(repr, list(value)[:8])) or "none"
            raise DataError(
                f"{place}: expected a prediction with an id under {' or '.join(map(repr, _IDS))}, or one object of"
                f" answers by id; found keys {found}."
            )


def _record(place: str, value: dict[str, Any]) -> Iterator[tuple[str, str, Any, Any, Any]]:
    id_ = _first(value, _IDS)
    if isinstance(id_, bool) or not isinstance(id_, str | int):
        raise DataError(f"{place}: expected the id as a string or a whole number, found {described(id_)}.")
    inner = value.get("output")
    record = {**inner, **value} if isinstance(inner, dict) else value  # FlashRAG
    if not any(key in record for key in _ANSWERS) and "void" not in record:
        found = ", ".join(map(repr, list(record)[:8]))
        raise DataError(f"{place}: expected an answer under {' or '.join(map(repr, _ANSWERS))}, found keys {found}.")
    yield place, str(id_), _first(record, _ANSWERS), _first(record, _FACTS), record.get(_PARAGRAPHS)


def _first(record: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((record[key] for key in keys if key in record), None)


def _text(place: str, id_: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    raise DataError(f"{place}: {id_!r}: expected the answer as a text, found {described(value)}.")


def _facts(place: str, id_: str, value: Any) -> Facts:
    pairs = value if isinstance(value, list) else [value]
    for pair in pairs:
        match pair:
            case [str(), int(number)] if not isinstance(number, bool):
                continue
        raise DataError(f"{place}: {id_!r}: expected [title, sentence number] pairs, found {described(pair)}.")
    return tuple((title, number) for title, number in pairs)


def _numbers(place: str, id_: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in value):
        return tuple(value)
    raise DataError(f"{place}: {id_!r}: {_PARAGRAPHS!r}: expected whole numbers, found {described(value)}.")
