"""The passages that are searched: an Arrow table of title and text, in which the row is a passage's identity.

Not an index. The one idea: a corpus is immutable and memory-mapped, so that every process of a machine shares it.
"""

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self, overload

import pyarrow as pa

from rllib_mhgpo.data.questions import Question, load_questions
from rllib_mhgpo.errors import DataError

SCHEMA = pa.schema([pa.field("title", pa.string(), nullable=False), pa.field("text", pa.string(), nullable=False)])
_ROWS_PER_BATCH = 65_536  # keeps each batch below Arrow's 2 GB of text
_FINGERPRINT = b"fingerprint"


class Passage(NamedTuple):
    """A passage and its row in the corpus."""

    id: int
    title: str
    text: str


class Corpus(Sequence[Passage]):
    """Passages in a table with columns ``title`` and ``text``; row i is the passage with id i.

    Immutable, so a copy is the thing itself. ``source`` says where it comes from.

    Raises:
        DataError: for a table of other columns or without a row.
    """

    def __init__(self, table: pa.Table, source: str) -> None:
        if table.schema.names != SCHEMA.names or [f.type for f in table.schema] != [f.type for f in SCHEMA]:
            raise DataError(f"{source}: expected text columns title, text; found {table.schema.to_string()}.")
        if table.num_rows == 0:
            raise DataError(f"{source}: holds no passages; expected at least one.")
        self.table = table
        self.source = source

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
        for row in rows:
            if not 0 <= row < len(self):
                raise IndexError(f"{self.source}: expected a row in 0..{len(self) - 1}, found {row}")
        part = self.table.take(pa.array(rows, pa.int64()))
        titles, texts = part.column("title").to_pylist(), part.column("text").to_pylist()
        return [Passage(*fields) for fields in zip(rows, titles, texts, strict=True)]

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
        digest = sha256()
        for batch in self.table.to_batches(max_chunksize=_ROWS_PER_BATCH):
            for pair in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                for field in pair:
                    data = field.encode()
                    digest.update(len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()

    def save(self, path: str | Path) -> None:
        """Writes an Arrow IPC file, whole or not at all."""
        path = Path(path)
        table = self.table.replace_schema_metadata({_FINGERPRINT: self.fingerprint.encode()})
        part = path.with_name(f"{path.name}.part{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with pa.OSFile(str(part), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=_ROWS_PER_BATCH)
            os.replace(part, path)
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            raise DataError(f"{path}: the corpus cannot be written: {error.strerror or error}.") from error


def load_corpus(path: str | Path) -> Corpus:
    """Opens a file written by :meth:`Corpus.save` (memory-mapped), or takes the passages of a question file.

    Raises:
        DataError: when the file is neither, or is damaged, or holds no passage.
    """
    path = Path(path)
    if not _is_arrow(path):
        return Corpus.from_questions(load_questions(path), str(path))
    try:
        return Corpus(pa.ipc.open_file(pa.memory_map(str(path))).read_all(), str(path))
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: expected a whole Arrow file, found: {error}. Write it again.") from error


def join_sentences(sentences: Sequence[str]) -> str:
    """The sentences as one text: most HotpotQA sentences bring their own leading space; the others get one.

    >>> join_sentences(["A town.", " It lies north.", "It is old."])
    'A town. It lies north. It is old.'
    """
    text = ""
    for sentence in sentences:
        glued = text and sentence and not text[-1].isspace() and not sentence[0].isspace()
        text += f" {sentence}" if glued else sentence
    return text


def _is_arrow(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(6) == b"ARROW1"
    except OSError:
        return False  # reading it as a question file says what is wrong
