"""The passages that are searched: an Arrow table of title and text, in which the row is a passage's identity.

Not an index. The one idea: a corpus is immutable and memory-mapped, so that every process of a machine shares it.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self, overload

import numpy as np
import pyarrow as pa

from rllib_mhgpo.data.cache import copy_arrow, map_table, write_whole
from rllib_mhgpo.data.questions import Question, join_sentences
from rllib_mhgpo.errors import DataError

SCHEMA = pa.schema([pa.field("title", pa.string(), nullable=False), pa.field("text", pa.string(), nullable=False)])
_NAMED = pa.schema([pa.field("id", pa.string(), nullable=False), *SCHEMA])
_ROWS_PER_BATCH = 65_536  # keeps each batch below Arrow's 2 GB of text
_FINGERPRINT, _REPEATS = b"fingerprint", b"repeats"


class Passage(NamedTuple):
    """A passage and its row in the corpus."""

    id: int
    title: str
    text: str


class Corpus(Sequence[Passage]):
    """Passages in a table with columns ``title`` and ``text``; row i is the passage with id i.

    A first column ``id`` may hold the ids that the passages had in their source. Immutable, so a copy is the thing
    itself. ``source`` says where it comes from, ``repeats`` how many exact repeats were left out when it was made.

    Raises:
        DataError: for a table of other columns, with nulls, or without a row.
    """

    def __init__(self, table: pa.Table, source: str) -> None:
        found = [(field.name, field.type) for field in table.schema]
        if found not in ([(field.name, field.type) for field in schema] for schema in (SCHEMA, _NAMED)):
            raise DataError(f"{source}: expected text columns title, text; found {table.schema.to_string()}.")
        if empty := next((name for name in table.schema.names if table.column(name).null_count), None):
            raise DataError(f"{source}: expected a text in every row, found null under {empty!r}. Write it as ''.")
        if table.num_rows == 0:
            raise DataError(f"{source}: holds no passages; expected at least one.")
        self.table = table
        self.source = source
        self.repeats = int((table.schema.metadata or {}).get(_REPEATS, 0))
        self._batches = table.to_batches()
        self._ends = np.cumsum([batch.num_rows for batch in self._batches])

    @classmethod
    def from_passages(cls, passages: Iterable[tuple[str, str]], source: str = "passages") -> "Corpus":
        """Makes a corpus of (title, text) pairs; row i is the i-th pair, repeats included."""
        batches, pairs = [], iter(passages)
        while rows := list(islice(pairs, _ROWS_PER_BATCH)):
            titles, texts = zip(*rows, strict=True)
            batches.append(
                pa.record_batch([pa.array(titles, pa.string()), pa.array(texts, pa.string())], schema=SCHEMA)
            )
        return cls(pa.Table.from_batches(batches, SCHEMA), source)

    @classmethod
    def distinct(cls, passages: Iterable[tuple[str, str, str]], source: str) -> "Corpus":
        """Makes a corpus of (id, title, text) triples in memory; see :func:`write_corpus`, which does not."""
        found = list(passages)
        first = {passage[1:]: passage for passage in reversed(found)}
        rows = [passage for passage in found if first[passage[1:]] is passage]
        table = pa.Table.from_batches([_batch(rows, 0, source)] if rows else [], _NAMED)
        return cls(table.replace_schema_metadata({_REPEATS: str(len(found) - len(rows)).encode()}), source)

    @classmethod
    def from_questions(cls, questions: Iterable[Question], source: str = "the questions' passages") -> "Corpus":
        """Makes a corpus of the questions' own passages, each (title, text) once, in order of first appearance."""
        pairs = ((title, join_sentences(sentences)) for q in questions for title, sentences in q.context)
        return cls.from_passages(dict.fromkeys(pairs), source)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @overload
    def __getitem__(self, index: int) -> Passage: ...
    @overload
    def __getitem__(self, index: slice) -> list[Passage]: ...
    def __getitem__(self, index: int | slice) -> Passage | list[Passage]:
        if isinstance(index, slice):
            return self.take(range(len(self))[index])
        return self.take([range(len(self))[index]])[0]

    def take(self, rows: Sequence[int]) -> list[Passage]:
        """The passages of these rows, in this order.

        Raises:
            IndexError: for a row that is not 0..len-1; negative rows included.
        """
        return [Passage(row, *self._read(row, "title", "text")) for row in rows]

    def source_ids(self, rows: Sequence[int]) -> list[str]:
        """The ids that these passages have in the source; where it gives none, the rows."""
        if "id" not in self.table.schema.names:
            return [str(row) for row in rows]
        return [self._read(row, "id")[0] or str(row) for row in rows]

    def _read(self, row: int, *columns: str) -> list[str]:
        if not 0 <= row < len(self):
            raise IndexError(f"{self.source}: expected a row in 0..{len(self) - 1}, found {row}")
        number = int(np.searchsorted(self._ends, row, side="right"))
        batch = self._batches[number]
        place = row - int(self._ends[number]) + batch.num_rows
        return [batch.column(column)[place].as_py() for column in columns]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __repr__(self) -> str:
        return f"Corpus({len(self)} passages from {self.source})"

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of titles and texts in row order; read from the file where :meth:`save` wrote it."""
        stored = (self.table.schema.metadata or {}).get(_FINGERPRINT)
        if stored:
            return str(stored.decode())
        return _fingerprint(self._batches)

    def save(self, path: str | Path) -> None:
        """Writes an Arrow IPC file, whole or not at all."""
        metadata = {_FINGERPRINT: self.fingerprint.encode(), _REPEATS: str(self.repeats).encode()}
        table = self.table.replace_schema_metadata(metadata)

        def write(place: Path) -> None:
            with pa.OSFile(str(place), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=_ROWS_PER_BATCH)

        write_whole(Path(path), write)


def write_corpus(passages: Iterable[tuple[str, str, str]], place: Path, source: str) -> None:
    """Streams (id, title, text) triples into a corpus file; of exact repeats of title and text the first is kept.

    Memory stays at one batch and 24 bytes a passage.

    Raises:
        DataError: for no passage, or text that is not valid Unicode.
    """
    rows = place.with_name(f"{place.name}.rows")
    try:
        hashes = _write_rows(passages, rows, source)
        batches = map_table(rows).to_batches()
        if not len(hashes):
            raise DataError(f"{source}: holds no passages; expected at least one.")
        kept = _kept(Corpus(pa.Table.from_batches(batches), source), hashes)
        metadata = {
            _FINGERPRINT: _fingerprint(_filtered(batches, kept)).encode(),
            _REPEATS: str(int((~kept).sum())).encode(),
        }
        if kept.all():
            copy_arrow(rows, place, metadata)
        else:
            with pa.OSFile(str(place), "wb") as sink, pa.ipc.new_file(sink, _NAMED.with_metadata(metadata)) as writer:
                for batch in _filtered(batches, kept):
                    writer.write_batch(batch.replace_schema_metadata(metadata))
    finally:
        rows.unlink(missing_ok=True)


def _write_rows(passages: Iterable[tuple[str, str, str]], rows: Path, source: str) -> np.ndarray:
    hashes, count = [np.zeros(0, dtype=np.int64)], 0
    stream = iter(passages)
    with pa.OSFile(str(rows), "wb") as sink, pa.ipc.new_file(sink, _NAMED) as writer:
        while block := list(islice(stream, _ROWS_PER_BATCH)):
            writer.write_batch(_batch(block, count, source))
            hashes.append(np.fromiter((hash(passage[1:]) for passage in block), dtype=np.int64, count=len(block)))
            count += len(block)
    return np.concatenate(hashes)


def _batch(block: list[tuple[str, str, str]], before: int, source: str) -> pa.RecordBatch:
    try:
        return pa.record_batch([pa.array(column, pa.string()) for column in zip(*block, strict=True)], schema=_NAMED)
    except UnicodeEncodeError as error:
        for number, passage in enumerate(block, start=before + 1):
            if not all(is_unicode(field) for field in passage):
                raise DataError(
                    f"{source}: passage {number} holds half a character; expected valid Unicode. Mend it."
                ) from error
        raise


def is_unicode(text: str) -> bool:
    """Whether the text can be written down: it holds no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kept(corpus: Corpus, hashes: np.ndarray) -> np.ndarray:
    """Which rows are the first of their content; rows of equal hash are compared themselves."""
    order = np.argsort(hashes, kind="stable")
    same = hashes[order[1:]] == hashes[order[:-1]]
    kept = np.ones(len(hashes), dtype=bool)
    seen: set[tuple[str, str]] = set()
    for place in np.flatnonzero(same):
        if not (place and same[place - 1]):  # a new run of equal hashes
            seen = {corpus[int(order[place])][1:]}
        row = int(order[place + 1])
        kept[row] = corpus[row][1:] not in seen
        seen.add(corpus[row][1:])
    return kept


def _filtered(batches: Iterable[pa.RecordBatch], kept: np.ndarray) -> Iterator[pa.RecordBatch]:
    begin = 0
    for batch in batches:
        part = kept[begin : begin + batch.num_rows]
        begin += batch.num_rows
        yield batch if part.all() else batch.filter(pa.array(part))


def _fingerprint(batches: Iterable[pa.RecordBatch]) -> str:
    digest = sha256()
    for batch in batches:
        for begin in range(0, batch.num_rows, _ROWS_PER_BATCH):
            part = batch.slice(begin, _ROWS_PER_BATCH)
            for pair in zip(part.column("title").to_pylist(), part.column("text").to_pylist(), strict=True):
                for field in pair:
                    data = field.encode()
                    digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
