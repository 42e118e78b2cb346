"""Reads prediction files: answers by question id, and supporting facts where they were predicted too.

The one idea: the layouts of the official scripts and of what models are usually run with are told by their keys; a
prediction that cannot be read is named, never counted as a wrong answer in silence.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from rllib_mhgpo.data.corpus import is_unicode
from rllib_mhgpo.data.layouts import check_case, described, keys_of
from rllib_mhgpo.data.records import is_array, iterate_records
from rllib_mhgpo.errors import DataError, did_you_mean

Facts = tuple[tuple[str, int], ...]
Row = tuple[str, str, Any, Any, Any]  # place, id, answer, supporting facts, numbers of paragraphs

_IDS = ("question_id", "_id", "id", "qid")
_ANSWERS = ("predicted_answer", "prediction", "pred", "pred_answer", "answer")  # beside another, 'answer' is the gold
_FACTS = ("supporting_sentences", "sp", "predicted_supporting_facts")
_PARAGRAPHS = "predicted_support_idxs"
_GOLD_FACTS = "supporting_facts"
_KEYS = (*_IDS, *_ANSWERS, *_FACTS, _PARAGRAPHS, _GOLD_FACTS, "output", "void")


@dataclass(frozen=True)
class Predictions:
    """By question id: answer; supporting facts, (title, sentence) pairs; numbers of supporting paragraphs."""

    answers: Mapping[str, str]
    facts: Mapping[str, Facts]
    paragraphs: Mapping[str, tuple[int, ...]]


def load_predictions(path: str | Path) -> Predictions:
    """Reads predictions.

    One object of ``answer`` and ``sp`` by id (HotpotQA, 2WikiMultihopQA) or of answers by id, alone in its file; or
    records with an id and an answer, as an array or JSON lines (MuSiQue, FlashRAG, ``rllib evaluate --out``). Records
    whose answer is null or that are voided are no predictions.

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
        if not is_unicode(id_):
            raise DataError(f"{place}: expected an id of valid Unicode, found half a character: {id_!a}. Mend it.")
        if answer is not None:
            answers[id_] = _text(place, id_, answer)
        if sp is not None:
            facts[id_] = _facts(place, id_, sp)
        if numbers is not None:
            paragraphs[id_] = _numbers(place, id_, numbers)
    if not answers:
        raise DataError(f"{path}: holds no answers; expected at least one.")
    return Predictions(answers, facts, paragraphs)


def _rows(path: Path) -> Iterator[Row]:
    records = iterate_records(path)
    head = list(islice(records, 2))
    if len(head) == 1 and isinstance(head[0][1], dict) and _first(head[0][1], _IDS) is None and not is_array(path):
        yield from _by_id(*head[0])
        return
    for place, value in chain(head, records):
        if not isinstance(value, dict):
            raise DataError(f"{place}: expected a prediction (a JSON object), found {described(value)}.")
        if _first(value, _IDS) is not None or "void" not in value:
            yield _record(place, value)


def _by_id(place: str, value: dict[str, Any]) -> Iterator[Row]:
    """One object of answers, or of ``answer`` and ``sp``, by id."""
    if isinstance(value.get("answer"), dict):
        _check_facts(place, value)
        sp = value.get("sp", {})
        if not isinstance(sp, dict):
            raise DataError(f"{place}: 'sp': expected supporting facts by id, found {described(sp)}.")
        for id_ in dict.fromkeys([*value["answer"], *sp]):
            yield place, id_, value["answer"].get(id_), sp.get(id_), None
    elif "void" in value:
        return
    elif value and all(isinstance(answer, str) for answer in value.values()) and not _names_fields(value):
        for id_, answer in value.items():
            yield place, id_, answer, None, None
    else:
        raise _no_prediction(place, value)


def _record(place: str, value: dict[str, Any]) -> Row:
    id_ = _first(value, _IDS)
    if id_ is None:
        raise _no_prediction(place, value)
    if isinstance(id_, bool) or not isinstance(id_, str | int) or not str(id_).strip():
        raise DataError(f"{place}: expected the id as a string or a whole number, found {described(id_)}.")
    inner = value.get("output")
    record = {**inner, **value} if isinstance(inner, dict) else value  # FlashRAG
    _check_facts(place, record)
    if not any(key in record for key in _ANSWERS) and "void" not in record:
        raise DataError(
            f"{place}: expected an answer under {' or '.join(map(repr, _ANSWERS))}, found keys {keys_of(record)}."
        )
    return place, str(id_), _first(record, _ANSWERS), _first(record, _FACTS), record.get(_PARAGRAPHS)


def _check_facts(place: str, record: Mapping[str, Any]) -> None:
    """Refuses keys that would be ignored in silence; beside a prediction of another name, golds may be."""
    check_case(place, record, _KEYS)
    if {"answer", _GOLD_FACTS} <= record.keys() and not any(key in record for key in (*_ANSWERS[:-1], *_FACTS)):
        raise DataError(
            f"{place}: expected predictions, found an 'answer' beside {_GOLD_FACTS!r}, as files of questions have them."
            " Write predictions under 'predicted_answer' and 'sp'."
        )


def _names_fields(value: Mapping[str, Any]) -> bool:
    return any(key.lower() in _KEYS for key in value)


def _no_prediction(place: str, value: Mapping[str, Any]) -> DataError:
    hints = (did_you_mean(key.lower(), _IDS) for key in value if key not in _KEYS)
    return DataError(
        f"{place}: expected a prediction with an id under {' or '.join(map(repr, _IDS))}, or one object of answers by"
        f" id alone in its file; found keys {keys_of(value)}." + next(filter(None, hints), "")
    )


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
