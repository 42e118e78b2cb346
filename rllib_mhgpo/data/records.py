"""Reads the records of a JSON array or a JSONL file one by one, each with its place.

Knows JSON, not questions. The one idea: the file is read record by record in bounded memory, so that whatever is wrong
is named with its record and line; which of the two forms it has is told by its content, never by its name.
"""

from collections import Counter
from collections.abc import Iterator
from json import JSONDecodeError, JSONDecoder
from pathlib import Path
from typing import Any

from rllib_mhgpo.data.streams import CHUNK, MAX_RECORD, stream_lines, stream_text
from rllib_mhgpo.errors import DataError

#: The longest single JSON value that is spread over many lines, in characters: it is held whole.
MAX_WHOLE = 1 << 29
_SPACE = " \n\r\t"
_LONGEST_NUMBER = 32  # characters; nearer to the edge of what was read, a number may go on


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys all stand once: which of two values was meant, nobody can tell."""
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {twice!a} twice in one object")
    return value


_decoder = JSONDecoder(object_pairs_hook=_object)


def iterate_records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields ``(place, value)`` for every element of an array, or for every line that is not blank.

    ``place`` reads ``path: record 3 (line 17)``, counted from 1.

    Raises:
        DataError: where the text cannot be read, is not JSON, is empty, or ends in the middle.
    """
    text = _Text(stream_text(path))
    text.skip()
    if not text.ahead():
        raise DataError(f"{path}: the file is empty; expected a JSON array of records or one JSON record a line.")
    return _array(path, text) if text.ahead() == "[" else _lines(path)


def is_array(path: Path) -> bool:
    """Whether the file's first mark opens an array."""
    text = _Text(stream_text(path))
    text.skip()
    return text.ahead() == "["


class _Text:
    """A window on a text that is read piece by piece: what lies before ``position`` is forgotten at the next piece."""

    def __init__(self, pieces: Iterator[str]) -> None:
        self._pieces = pieces
        self.position = 0
        self._window, self._ended = "", False
        self._lines, self._column = 0, 0  # of what was forgotten: whole lines, and characters since the last line end

    def ahead(self) -> str:
        """The next character, empty at the end."""
        while self.position >= len(self._window) and self._more():
            pass
        return self._window[self.position : self.position + 1]

    def skip(self, count: int = 0) -> None:
        """Passes ``count`` characters and the white space behind them."""
        self.position += count
        while (mark := self.ahead()) and mark in _SPACE:
            self.position += 1

    def value(self) -> Any:
        """Reads the JSON value that starts here.

        Raises:
            JSONDecodeError: where there is none, with a position to be given to :meth:`place`.
        """
        while True:
            try:
                value, end = _decoder.raw_decode(self._window, self.position)
            except JSONDecodeError:
                if self._ended or len(self._window) - self.position > MAX_RECORD:
                    raise
            else:
                if self._ended or end + _LONGEST_NUMBER < len(self._window) or isinstance(value, dict | list | str):
                    self.position = end
                    return value
            self._more()

    def place(self, position: int | None = None) -> str:
        """Line and character of a position of the window, by default the current one, counted from 1."""
        position = self.position if position is None else position
        newline = self._window.rfind("\n", 0, position)
        character = position - newline if newline >= 0 else self._column + position + 1
        return f"line {self.line(position)}, character {character}"

    def line(self, position: int | None = None) -> int:
        """The line of a position, by default the current one, counted from 1."""
        return self._lines + self._window.count("\n", 0, self.position if position is None else position) + 1

    def closed(self) -> bool:
        """Reads on to the end; whether the text ends with the bracket that closes an array."""
        last = ""
        while True:
            last = self._window.rstrip()[-1:] or last
            self.position = len(self._window)
            if not self._more():
                return last == "]"

    def _more(self) -> bool:
        before = len(self._window) - self.position
        pieces: list[str] = []
        while not self._ended and sum(map(len, pieces)) < max(1, CHUNK // 4, before):  # doubled: no quadratic rereading
            piece = next(self._pieces, None)
            self._ended = piece is None
            pieces.append(piece or "")
        gone = self._window[: self.position]
        newline = gone.rfind("\n")
        self._lines += gone.count("\n")
        self._column = len(gone) - newline - 1 if newline >= 0 else self._column + len(gone)
        self._window, self.position = self._window[self.position :] + "".join(pieces), 0
        return any(pieces)


def _array(path: Path, text: _Text) -> Iterator[tuple[str, Any]]:
    text.skip(1)
    number, mark = 0, "," if text.ahead() != "]" else "]"
    while mark == ",":
        number += 1
        place = f"{path}: record {number} (line {text.line()})"
        try:
            value = text.value()
        except JSONDecodeError as error:
            where = text.place(error.pos)
            raise _broken(place, error.msg, where, cut_short=not text.closed()) from error
        except (ValueError, RecursionError) as error:
            raise _broken(place, str(error), text.place(), cut_short=False) from error
        yield place, value
        text.skip()
        mark = text.ahead()
        if mark not in (",", "]") or not mark:
            raise _broken(f"{path}: after record {number}", "neither ',' nor ']'", text.place(), cut_short=not mark)
        if mark == ",":
            text.skip(1)
    text.skip(1)
    if text.ahead():
        raise _broken(str(path), "text after the closing ']'", text.place(), cut_short=False)


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    filled = ((number, line) for number, line in stream_lines(path) if line.strip())
    for record, (number, line) in enumerate(filled, start=1):
        place = f"{path}: record {record} (line {number})"
        try:
            value = _decoder.decode(line)
        except JSONDecodeError as error:
            is_last = next(filled, None) is None
            if record == 1 and not is_last:
                yield str(path), _whole(path, place, error)
                return
            at = f"line {number}, character {error.colno}"
            raise _broken(place, error.msg, at, cut_short=is_last and record > 1) from error
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
            raise _broken(place, str(error), f"line {number}", cut_short=False) from error
        yield place, value


def _whole(path: Path, place: str, first: JSONDecodeError) -> Any:
    """One JSON value spread over many lines; where the text is not that either, the first line is what is wrong."""
    pieces: list[str] = []
    for piece in stream_text(path):
        pieces.append(piece)
        if sum(map(len, pieces)) > MAX_WHOLE:
            raise DataError(f"{path}: one JSON value of more than {MAX_WHOLE:,} characters. Write one record a line.")
    text = "".join(pieces)
    try:
        return _decoder.decode(text)
    except JSONDecodeError as error:
        cut_short = error.pos >= len(text.rstrip())
        error = error if cut_short else first
        raise _broken(place, error.msg, f"line {error.lineno}, character {error.colno}", cut_short) from error
    except (ValueError, RecursionError) as error:
        raise _broken(place, str(error), "some place", cut_short=False) from error


def _broken(place: str, found: str, where: str, cut_short: bool) -> DataError:
    advice = "The file ends in the middle: fetch it again." if cut_short else "Mend the file or export it again."
    return DataError(
        f"{place}: expected a JSON array of records or one JSON record a line, found: {found}, at {where}. {advice}"
    )
