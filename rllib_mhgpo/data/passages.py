"""Reads passages from files in the layouts in which corpora are published.

Knows layouts, not corpora. The one idea: a passage is (source id, title, text), read one after another; the layout is
told by the content of the file, and a line that cannot be a passage is named.

- TSV with a header of ``id``, ``text``, ``title`` in any order (DPR), or without one ``id``, ``Title: … Text: …``;
- JSON lines or an array of ``id``, ``contents``: title and text parted by a line end (FlashRAG, Search-R1) or a tab
  (Pyserini); or of ``title`` and ``text``, a text or a list of sentences; or of KILT's pages, a passage each paragraph;
- one object of titles and their sentences, alone in its file;
- question files: the questions' own passages.
"""

import csv
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from rllib_mhgpo.data.layouts import check_case, described, has_passages, id_of, keys_of, to_question
from rllib_mhgpo.data.questions import join_sentences
from rllib_mhgpo.data.records import is_array, iterate_records
from rllib_mhgpo.data.streams import stream_lines, stream_text
from rllib_mhgpo.errors import DataError, did_you_mean

_IDS = ("id", "_id", "docid", "pid", "passage_id")
_TEXTS = ("title", "text", "contents")
_KEYS = (*_TEXTS, "wikipedia_title", "wikipedia_id", *_IDS)
_FEW = 10  # keys: in an object of fewer, 'Text' is the key of a text; among more titles it may be one of them
_TITLED = re.compile(r"Title:[ \t]*(?P<title>.*?)[ \t]*Text:\s*(?P<text>.*)", re.DOTALL)
_HEADING = re.compile(r"Section::::")


class Found(NamedTuple):
    """A passage as its source has it; the id may be empty."""

    id: str
    title: str
    text: str


def read_passages(path: Path) -> Iterator[Found]:
    """Yields the passages of a file in their order.

    Raises:
        DataError: naming the file and the line or record, for anything that is no passage.
    """
    if _first_mark(path) in ("[", "{"):
        return _from_records(path)
    return _from_table(path)


def split_contents(contents: str) -> tuple[str, str]:
    """Title and text of ``contents``: the title is the first line, or what precedes a tab, without its quotes.

    >>> split_contents('"Evan Morris"\\nEvan Morris was a lobbyist.')
    ('Evan Morris', 'Evan Morris was a lobbyist.')
    >>> split_contents("Title\\tText"), split_contents("no title")
    (('Title', 'Text'), ('', 'no title'))
    """
    marks = [place for place in (contents.find("\n"), contents.find("\t")) if place >= 0]
    if not marks:
        return "", contents
    title, text = contents[: min(marks)].strip(), contents[min(marks) + 1 :]
    if len(title) > 1 and title[0] == title[-1] == '"':
        title = title[1:-1]
    return title, text


def _first_mark(path: Path) -> str:
    for piece in stream_text(path):
        if piece.strip():
            return piece.lstrip()[0]
    raise DataError(f"{path}: the file is empty; expected passages.")


# --- tables -----------------------------------------------------------------------------------------------------------


def _from_table(path: Path) -> Iterator[Found]:
    lines = ((number, line) for number, line in stream_lines(path) if line.strip())
    first = next(lines)
    header = [name.strip().lower() for name in first[1].split("\t")]
    if {"text", "title"} <= set(header):
        return _with_header(path, header, lines)
    cells = _cells(first[1], 2)
    if cells and _TITLED.fullmatch(cells[1]):
        return _titled(path, chain([first], lines))
    raise DataError(
        f"{path}: line 1: expected a header with the columns id, text, title, parted by tabs, found {len(header)}"
        f" column{'s' * (len(header) != 1)}: {described(first[1])}. Name the columns, or give JSON lines."
    )


def _with_header(path: Path, header: list[str], lines: Iterator[tuple[int, str]]) -> Iterator[Found]:
    if twice := next((name for name in header if header.count(name) > 1), None):
        raise DataError(f"{path}: line 1: expected each column once, found {twice!r} twice. Rename one.")
    title, text = header.index("title"), header.index("text")
    key = next((header.index(name) for name in _IDS if name in header), None)
    for number, line in lines:
        cells = _cells(line, len(header))
        if cells is None:
            raise _uneven(path, number, len(header), line)
        yield Found("" if key is None else cells[key], cells[title], cells[text])


def _titled(path: Path, lines: Iterator[tuple[int, str]]) -> Iterator[Found]:
    for number, line in lines:
        cells = _cells(line, 2)
        match = _TITLED.fullmatch(cells[1]) if cells else None
        if cells is None or match is None:
            raise DataError(f"{path}: line {number}: expected 'ID<tab>Title: … Text: …', found {described(line)}.")
        yield Found(cells[0], match["title"], match["text"])


def _cells(line: str, count: int) -> list[str] | None:
    """The line's cells, None where they are not ``count``: a cell in whole quotes is unquoted, a stray quote stays."""
    cells = line.split("\t")
    if any(cell[:1] == '"' and not _is_quoted(cell) for cell in cells):
        with suppress(csv.Error):  # a stray quote
            quoted = next(csv.reader([line], delimiter="\t", strict=True), [])
            if len(quoted) < len(cells):  # a tab inside quotes
                return quoted if len(quoted) == count else None
    if len(cells) != count:
        return None
    return [cell[1:-1].replace('""', '"') if _is_quoted(cell) else cell for cell in cells]


def _is_quoted(cell: str) -> bool:
    return len(cell) > 1 and cell[0] == cell[-1] == '"' and '"' not in cell[1:-1].replace('""', "")


def _uneven(path: Path, number: int, count: int, line: str) -> DataError:
    return DataError(
        f"{path}: line {number}: expected {count} columns parted by tabs, found {line.count(chr(9)) + 1}:"
        f" {described(line)}. A passage must stand on one line: mend it, or give JSON lines."
    )


# --- records ----------------------------------------------------------------------------------------------------------


def _from_records(path: Path) -> Iterator[Found]:
    records = iterate_records(path)
    place, first = next(records, (str(path), None))
    if first is None:
        raise DataError(f"{path}: holds no passages; expected at least one.")
    second = next(records, None)
    read = [(place, first), *([] if second is None else [second])]
    alone = second is None and not is_array(path)
    reader = _of_titles if alone and _holds_titles(first) else _reader(place, first)
    return (found for place, record in chain(read, records) for found in reader(place, record))


def _holds_titles(record: Any) -> bool:
    """Whether the object's keys are titles and its values their sentences."""
    if not isinstance(record, dict) or not all(_sentences(value) is not None for value in record.values()):
        return False
    if _is_passage(record):
        return False
    return len(record) >= _FEW or not any(key.lower() in (*_KEYS, "question") for key in record)


def _is_passage(record: Mapping[str, Any]) -> bool:
    return ("title" in record and "text" in record) or "contents" in record or "wikipedia_title" in record


def _reader(place: str, record: Any) -> Callable[[str, Any], Iterator[Found]]:
    if has_passages(record):
        return _of_question
    if isinstance(record, dict):
        if _is_passage(record):
            return _of_page if "wikipedia_title" in record else _of_record
        if "question" in record:
            raise DataError(f"{place}: expected passages, found a question without any: {described(record)}.")
    raise DataError(
        f"{place}: expected a passage (keys 'title' and 'text', or 'contents'), a page of KILT, one object of titles"
        f" and sentences alone in its file, or a question with passages; found {_found(record)}"
    )


def _found(record: Any) -> str:
    """What was found in the place of a passage, and what its keys may have meant."""
    if not isinstance(record, dict):
        return f"{described(record)}."
    strange = (key.lower() for key in record if key not in _TEXTS)
    return f"keys {keys_of(record)}." + next(filter(None, (did_you_mean(key, _TEXTS) for key in strange)), "")


def _of_question(place: str, record: Any) -> Iterator[Found]:
    question = to_question(place, record, "0", require_context=True)
    for position, (title, sentences) in enumerate(question.context):
        yield Found(f"{question.id}:{position}", title, join_sentences(sentences))


def _of_record(place: str, record: Any) -> Iterator[Found]:
    if not isinstance(record, dict):
        raise DataError(f"{place}: expected a passage (a JSON object), found {described(record)}.")
    check_case(place, record, _KEYS)
    if isinstance(record.get("title"), str) and (text := _sentences(record.get("text"))) is not None:
        yield Found(_source_id(place, record), record["title"], text)
        return
    contents = record.get("contents")
    if not isinstance(contents, str):
        raise DataError(
            f"{place}: expected a passage with texts under 'title' and 'text', or under 'contents'; found"
            f" {_found(record)}"
        )
    yield Found(_source_id(place, record), *split_contents(contents))


def _of_page(place: str, record: Any) -> Iterator[Found]:
    """A page of KILT: the title again, then headings, then paragraphs; headings are no passages."""
    if isinstance(record, dict):
        check_case(place, record, _KEYS)
    match record:
        case {"wikipedia_title": str(title), "text": [*paragraphs]} if all(isinstance(p, str) for p in paragraphs):
            id_ = _source_id(place, {"id": record.get("wikipedia_id", record.get("_id", ""))})
            for number, paragraph in enumerate(paragraphs):
                text = paragraph.strip()
                if text and text != title and not _HEADING.match(text):
                    yield Found(f"{id_}:{number}", title, text.replace("BULLET::::", ""))
        case _:
            raise DataError(
                f"{place}: expected a page of KILT ('wikipedia_title' and a list of paragraphs under 'text'), found"
                f" {described(record)}."
            )


def _of_titles(place: str, record: Any) -> Iterator[Found]:
    for title, value in record.items():
        yield Found("", title, _sentences(value) or "")


def _sentences(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(sentence, str) for sentence in value):
        return join_sentences(value)
    return None


def _source_id(place: str, record: Any) -> str:
    return id_of(place, next((record[key] for key in _IDS if key in record), ""))
