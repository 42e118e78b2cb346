"""The text of a file, plain or compressed, piece by piece.

Knows neither JSON nor tables. The one idea: memory is bounded whatever the file holds; compression is told by the
first bytes, never by the name.
"""

import bz2
import codecs
import gzip
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from rllib_mhgpo.errors import DataError

CHUNK = 1 << 20  # bytes
#: The longest line or JSON record, in characters; a longer one is refused.
MAX_RECORD = 64 << 20
_EXPANSION = 200  # text shrinks to a tenth, seldom to a fiftieth
_FREE = 16 << 20  # bytes that may expand as they like

#: How files begin that hold no text of their own, what they are, and what to do.
_OTHERS = {
    b"PK\x03\x04": ("a ZIP archive", "Unpack it."),
    b"\xfd7zXZ": ("an xz file", "Unpack it."),
    b"7z\xbc\xaf": ("a 7z archive", "Unpack it."),
    b"PAR1": ("a Parquet file", "Give its folder to the package datasets: hf:FOLDER."),
    b"ARROW1": ("an Arrow file", "Give the file that it was made of."),
    b"version https://git-lfs": ("the address of a file in Git LFS", "Fetch the file itself: git lfs pull."),
}
_OPENERS: dict[bytes, Callable[[BinaryIO], Any]] = {
    b"\x1f\x8b": lambda raw: gzip.GzipFile(fileobj=raw),
    b"BZh": bz2.BZ2File,
    b"\x28\xb5\x2f\xfd": lambda raw: pa.CompressedInputStream(pa.PythonFile(raw), "zstd"),
}


def stream_text(path: Path) -> Iterator[str]:
    """Yields the file's text without a byte order mark, decompressed where it is gzip, bzip2 or Zstandard.

    Raises:
        DataError: when the file is missing, a folder, unreadable, not UTF-8, cut or damaged, or expands without end.
    """
    try:
        with path.open("rb") as raw:
            head = raw.read(4)
            raw.seek(0)
            opener = next((opener for magic, opener in _OPENERS.items() if head.startswith(magic)), None)
            if opener is None:
                yield from _decoded(path, raw, None)
            else:
                yield from _unpacked(path, raw, opener)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}. Give the path of an existing file.") from error


def stream_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields ``(number, line)`` from 1 without line ends; U+2028 and its kin do not end a line.

    Raises:
        DataError: as :func:`stream_text`, and for a line longer than :data:`MAX_RECORD`.
    """
    number, rest = 1, ""
    for piece in stream_text(path):
        *lines, rest = (rest + piece).split("\n")
        for line in lines:
            yield number, line.removesuffix("\r")
            number += 1
        if len(rest) > MAX_RECORD:
            raise DataError(
                f"{path}: line {number} has more than {MAX_RECORD:,} characters; expected one record a line."
                " Split the file into lines."
            )
    if rest:
        yield number, rest


def _unpacked(path: Path, raw: BinaryIO, opener: Callable[[BinaryIO], Any]) -> Iterator[str]:
    try:
        with opener(raw) as file:
            yield from _decoded(path, file, raw)
    except (EOFError, zlib.error, OSError) as error:
        raise DataError(
            f"{path}: the compressed data end too early or are damaged ({error}). Fetch the file again."
        ) from error


def _decoded(path: Path, file: Any, packed: BinaryIO | None) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    size = 0
    while True:
        block = file.read(CHUNK)
        size += len(block)
        if size == len(block):
            _check_kind(path, block)
        if packed is not None and size > max(_FREE, _EXPANSION * packed.tell()):
            raise DataError(
                f"{path}: {packed.tell():,} compressed bytes expand to more than {size:,}; expected text, which"
                f" expands less than {_EXPANSION}-fold. Unpack it yourself if it is meant."
            )
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            offset = size - len(error.object) + error.start
            raise DataError(
                f"{path}: expected UTF-8 text, found byte 0x{error.object[error.start]:02x} at offset {offset}."
                " Save the file as UTF-8."
            ) from error
        if text:
            yield text
        if not block:
            return


def _check_kind(path: Path, head: bytes) -> None:
    """Refuses archives and binary files by their kind, so that the advice is to unpack them, not to mend their text."""
    kind = next((kind for magic, kind in _OTHERS.items() if head.startswith(magic)), None)
    if head[257:262] == b"ustar":
        kind = ("a tar archive", "Unpack it.")
    if kind:
        raise DataError(f"{path}: expected text, found {kind[0]}. {kind[1]}")
