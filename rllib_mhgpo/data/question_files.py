"""Reads question files, and data sets of the Hugging Face hub (:mod:`hub`), in any layout that :mod:`layouts` knows.

The one idea: memory is bounded. Records pass one by one into an Arrow file in the cache, and questions are made of its
rows when they are asked for; a small file is held as it is.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa

from rllib_mhgpo.data.cache import SMALL, cached_table, kept_table, write_arrow
from rllib_mhgpo.data.hub import HUB, hub_records, open_hub
from rllib_mhgpo.data.layouts import to_question
from rllib_mhgpo.data.questions import Question, Questions, checked_questions, encode_question, fingerprint_of
from rllib_mhgpo.data.records import iterate_records
from rllib_mhgpo.errors import DataError

_STRING = pa.string()
_SCHEMA = pa.schema(
    {
        "id": _STRING,
        "question": _STRING,
        "answers": pa.list_(_STRING),
        "supporting": pa.list_(pa.struct({"title": _STRING, "sentence": pa.int64()})),
        "context": pa.list_(pa.struct({"title": _STRING, "sentences": pa.list_(_STRING)})),
        "kind": _STRING,
        "level": _STRING,
        "evidence": pa.list_(pa.int64()),
    }
)
_BATCH = 1024
_FINGERPRINT = b"fingerprint"


def load_questions(
    path: str | Path, require_context: bool = True, limit: int | None = None, shuffle: int | None = None
) -> Questions:
    """Reads questions of HotpotQA, 2WikiMultihopQA, MuSiQue, FlashRAG or plain question/answer records.

    JSON array or JSONL, plain or compressed. ``hf:OWNER/NAME``, ``hf:OWNER/NAME/CONFIG`` or ``hf:FOLDER``, each also
    with ``:SPLIT``, is what the package ``datasets`` reads; see :mod:`hub`. Where no record has an id, records are
    numbered from "0".

    Args:
        path: the file.
        require_context: refuse questions without passages; False where another corpus is searched.
        limit: keep only so many, the first ones after shuffling.
        shuffle: seed of a shuffle; None keeps the order of the file.

    Raises:
        DataError: naming the file, the record and the key, for anything that cannot be read as such a question.
    """
    if limit is not None and limit < 1:
        raise DataError(f"{path}: limit: expected at least 1, found {limit}.")
    questions = _load(Path(path), str(path), require_context)
    if limit is None and shuffle is None:
        return questions
    order = np.arange(len(questions)) if shuffle is None else np.random.default_rng(shuffle).permutation(len(questions))
    return Questions((questions[int(row)] for row in order[:limit]), questions.source)


def _load(path: Path, name: str, require_context: bool) -> Questions:
    kind = "questions" if require_context else "questions-alone"
    if name.startswith(HUB):
        rows, state = open_hub(name)
        table = kept_table(name, [name, state], kind, _writer(lambda: hub_records(name, rows), name, require_context))
    elif path.is_file() and path.stat().st_size >= SMALL:
        table = cached_table(path, kind, _writer(lambda: iterate_records(path), name, require_context))
    else:
        return _checked(iterate_records(path), name, require_context)
    return Questions.trusted(_Rows(table), name, table.schema.metadata[_FINGERPRINT].decode())


def _writer(
    read: Callable[[], Iterator[tuple[str, Any]]], source: str, require_context: bool
) -> Callable[[Path], None]:
    def write(place: Path) -> None:
        placed = _placed(read(), require_context)
        _write(place, (question for _, question in checked_questions(placed, source)))

    return write


def _checked(records: Iterable[tuple[str, Any]], source: str, require_context: bool) -> Questions:
    questions = [question for _, question in checked_questions(_placed(records, require_context), source)]
    return Questions.trusted(tuple(questions), source, fingerprint_of(questions))


def _placed(records: Iterable[tuple[str, Any]], require_context: bool) -> Iterator[tuple[str, Question]]:
    for number, (place, value) in enumerate(records):
        yield place, to_question(place, value, str(number), require_context)


class _Rows(Sequence[Question]):
    """Questions made of the rows of a table when they are asked for."""

    def __init__(self, table: pa.Table) -> None:
        self._batches = table.to_batches()
        self._ends = np.cumsum([batch.num_rows for batch in self._batches])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @overload
    def __getitem__(self, index: int) -> Question: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Question]: ...
    def __getitem__(self, index: int | slice) -> Question | Sequence[Question]:
        if isinstance(index, slice):
            return [self[row] for row in range(len(self))[index]]
        row = range(len(self))[index]
        batch = int(np.searchsorted(self._ends, row, side="right"))
        begin = int(self._ends[batch]) - self._batches[batch].num_rows
        (value,) = self._batches[batch].slice(row - begin, 1).to_pylist()
        return _question(value)

    def __iter__(self) -> Iterator[Question]:
        for batch in self._batches:
            for begin in range(0, batch.num_rows, _BATCH):
                yield from map(_question, batch.slice(begin, _BATCH).to_pylist())


def _question(row: dict[str, Any]) -> Question:
    return Question(
        id=row["id"],
        question=row["question"],
        answers=tuple(row["answers"]),
        supporting=tuple((fact["title"], fact["sentence"]) for fact in row["supporting"]),
        context=tuple((passage["title"], tuple(passage["sentences"])) for passage in row["context"]),
        kind=row["kind"],
        level=row["level"],
        evidence=tuple(row["evidence"]),
    )


def _row(question: Question) -> dict[str, Any]:
    return {
        **asdict(question),
        "supporting": [{"title": title, "sentence": sentence} for title, sentence in question.supporting],
        "context": [{"title": title, "sentences": sentences} for title, sentences in question.context],
    }


def _write(place: Path, questions: Iterator[Question]) -> None:
    digest = sha256()

    def batches() -> Iterator[pa.RecordBatch]:
        while block := list(islice(questions, _BATCH)):
            for question in block:
                digest.update(encode_question(question, question.id))
            yield pa.RecordBatch.from_pylist(list(map(_row, block)), schema=_SCHEMA)

    write_arrow(place, batches(), _SCHEMA, lambda: {_FINGERPRINT: digest.hexdigest().encode()})
