"""Reads the records of a JSON array or a JSONL file, each with its place.

Knows JSON, not questions. The one idea: the file is read record by record from its text, so that whatever is wrong is
named with its record and line; which of the two forms it has is told by its content, never by its name.
"""

import json
from collections.abc import Iterator
from json import JSONDecodeError, JSONDecoder
from pathlib import Path
from typing import Any

from rllib_mhgpo.errors import DataError

_decoder = JSONDecoder()


def read_text(path: Path) -> str:
    """The file's text, without a byte order mark.

    Raises:
        DataError: when the file is missing, a folder, unreadable, not UTF-8 or empty.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}. Give the path of an existing file.") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: expected UTF-8 text, found byte 0x{error.object[error.start]:02x} at offset {error.start}."
            " Save the file as UTF-8."
        ) from error
    if not text.strip():
        raise DataError(f"{path}: the file is empty; expected a JSON array of records or one JSON record a line.")
    return text


def iterate_records(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Yields ``(place, value)`` for every element of an array, or for every line that is not blank.

    ``place`` reads ``path: record 3 (line 17)``, counted from 1.

    Raises:
        DataError: where the text is not JSON, or ends in the middle.
    """
    return _array(path, text) if text.lstrip().startswith("[") else _lines(path, text)


def _array(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    position = _skip(text, text.index("[") + 1)
    number, line, counted = 0, 1, 0
    mark = "," if text[position : position + 1] != "]" else "]"
    while mark == ",":
        number += 1
        line, counted = line + text.count("\n", counted, position), position
        try:
            value, position = _decoder.raw_decode(text, position)
        except JSONDecodeError as error:
            place = f"{path}: record {number} (line {line})"
            raise _broken(
                place, error.msg, _place(text, error.pos), cut_short=not text.rstrip().endswith("]")
            ) from error
        yield f"{path}: record {number} (line {line})", value
        position = _skip(text, position)
        mark = text[position : position + 1]
        if mark not in (",", "]") or not mark:
            place = f"{path}: after record {number}"
            raise _broken(place, "neither ',' nor ']'", _place(text, position), cut_short=not mark)
        position = _skip(text, position + (mark == ","))
    if text[position + 1 :].strip():
        raise _broken(str(path), "text after the closing ']'", _place(text, position + 1), cut_short=False)


def _lines(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    lines = text.rstrip().split("\n")  # not splitlines(): U+2028 and its kin may stand inside a JSON string
    filled = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    for record, (number, line) in enumerate(filled, start=1):
        place = f"{path}: record {record} (line {number})"
        try:
            value = json.loads(line)
        except JSONDecodeError as error:
            if record == 1 and len(filled) > 1:
                yield str(path), _whole(place, text, error)
                return
            at = f"line {number}, character {error.colno}"
            raise _broken(place, error.msg, at, cut_short=number == len(lines) and record > 1) from error
        yield place, value


def _whole(place: str, text: str, first: JSONDecodeError) -> Any:
    """One JSON value spread over many lines; where the text is not that either, the first line is what is wrong."""
    try:
        return json.loads(text)
    except JSONDecodeError as error:
        cut_short = error.pos >= len(text.rstrip())
        error = error if cut_short else first
        raise _broken(place, error.msg, f"line {error.lineno}, character {error.colno}", cut_short) from error


def _skip(text: str, position: int) -> int:
    while text[position : position + 1] in (" ", "\n", "\r", "\t"):
        position += 1
    return position


def _place(text: str, position: int) -> str:
    return f"line {text.count(chr(10), 0, position) + 1}, character {position - text.rfind(chr(10), 0, position)}"


def _broken(place: str, found: str, where: str, cut_short: bool) -> DataError:
    advice = "The file ends in the middle: fetch it again." if cut_short else "Mend the file or export it again."
    return DataError(
        f"{place}: expected a JSON array of records or one JSON record a line, found: {found}, at {where}. {advice}"
    )
