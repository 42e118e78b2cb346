"""Questions with their golds, supporting facts and passages, read from HotpotQA files.

Not a sampler and not a scorer. The one idea: everything a later step relies on is checked when the file is read, so
that a wrong file is named before any training.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Self, overload

from rllib_mhgpo.data.records import iterate_records, read_text
from rllib_mhgpo.errors import DataError, did_you_mean

_KEYS = ("_id", "id", "question", "answer", "supporting_facts", "context", "type", "level")


@dataclass(frozen=True, slots=True)
class Question:
    """One question as the data set has it.

    ``supporting`` holds (title, sentence index) pairs; an index may point past the last sentence, as some do in the
    published files. ``context`` holds (title, sentences) pairs. ``kind`` and ``level`` are empty where not given.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    supporting: tuple[tuple[str, int], ...] = ()
    context: tuple[tuple[str, tuple[str, ...]], ...] = ()
    kind: str = ""
    level: str = ""


class Questions(Sequence[Question]):
    """Distinctly named questions in file order; immutable, so a copy is the thing itself.

    ``source`` says where they come from. ``fingerprint`` is the SHA-256 of their content: the same for the same
    questions in another file layout.

    Raises:
        DataError: for no questions, an id that occurs twice, or text that is not valid Unicode.
    """

    def __init__(self, questions: Iterable[Question], source: str) -> None:
        self._questions = tuple(questions)
        self.source = source
        if not self._questions:
            raise DataError(f"{source}: holds no questions; expected at least one.")
        first: dict[str, int] = {}
        digest = sha256()
        for number, question in enumerate(self._questions, start=1):
            if first.setdefault(question.id, number) != number:
                raise DataError(
                    f"{source}: records {first[question.id]} and {number} have the same id {question.id!r};"
                    " expected each id once. Remove one."
                )
            digest.update(_encoded(question, f"{source}: record {number}"))
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._questions)

    @overload
    def __getitem__(self, index: int) -> Question: ...
    @overload
    def __getitem__(self, index: slice) -> "Questions": ...
    def __getitem__(self, index: int | slice) -> "Question | Questions":
        if isinstance(index, slice):
            return Questions(self._questions[index], self.source)
        return self._questions[index]

    def __iter__(self) -> Iterator[Question]:
        return iter(self._questions)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __repr__(self) -> str:
        return f"Questions({len(self)} from {self.source})"


def load_questions(path: str | Path, require_context: bool = True) -> Questions:
    """Reads HotpotQA questions from the original array or from JSONL.

    ``require_context=False`` also takes files without passages (to be asked over another corpus). Where no record
    has an id, records are numbered from "0".

    Raises:
        DataError: naming the file, the record and the key, for anything that cannot be read as such a question.
    """
    path = Path(path)
    questions = [
        _question(place, value, str(number), require_context)
        for number, (place, value) in enumerate(iterate_records(path, read_text(path)))
    ]
    return Questions(questions, str(path))


def _encoded(question: Question, place: str) -> bytes:
    try:
        return json.dumps(astuple(question), ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError as error:
        found = ascii(error.object[error.start])
        raise DataError(
            f"{place}: holds half a character ({found}); expected valid Unicode. Mend the record."
        ) from error


def _question(place: str, value: Any, number: str, require_context: bool) -> Question:
    if not isinstance(value, dict):
        raise DataError(f"{place}: expected a question record (a JSON object), found {_described(value)}.")
    _check_keys(place, value, ("question", "answer", "context") if require_context else ("question", "answer"))
    return Question(
        id=_id(place, value, number),
        question=_text(place, "question", value["question"]),
        answers=_answers(place, value["answer"]),
        supporting=tuple(_fact(place, fact) for fact in _list(place, "supporting_facts", value)),
        context=tuple(_passage(place, passage) for passage in _list(place, "context", value)),
        kind=_text(place, "type", value.get("type", ""), blank=True),
        level=_text(place, "level", value.get("level", ""), blank=True),
    )


def _check_keys(place: str, record: dict[str, Any], wanted: Sequence[str]) -> None:
    found = ", ".join(map(repr, record)) or "none"
    for key in record:
        if key not in _KEYS and key.lower() in _KEYS:
            raise DataError(f"{place}: expected key {key.lower()!r}, found {key!r} (keys found: {found}). Rename it.")
    for key in wanted:
        if key not in record:
            layout = _layout(record)
            raise DataError(
                f"{place}: expected key {key!r}, found {found}.{did_you_mean(key, record)}"
                + (f" This looks like {layout}." if layout else "")
                + _remedy(key)
            )


def _remedy(key: str) -> str:
    if key == "context":
        return " Use a file with passages, or name a corpus to search."
    return " Use a HotpotQA file with answers."


def _layout(record: dict[str, Any]) -> str:
    if "paragraphs" in record:
        return "a MuSiQue record, which is not read yet"
    if "contents" in record or {"title", "text"} <= record.keys():
        return "a corpus (one passage a record), not a question file"
    if record and all(isinstance(sentences, list) for sentences in record.values()):
        return "a corpus (one object of title: sentences), not a question file"
    if "data" in record:
        return "records wrapped in an object under 'data'"
    return ""


def _id(place: str, record: dict[str, Any], number: str) -> str:
    id_ = record.get("_id", record.get("id", number))
    if isinstance(id_, str) and id_.strip():
        return id_
    if isinstance(id_, int) and not isinstance(id_, bool):
        return str(id_)
    raise DataError(
        f"{place}: expected the id as a string or a whole number, found {_described(id_)}."
        " Numbers with a point lose digits: write ids as strings."
    )


def _answers(place: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, list) and value:
        return tuple(_text(place, "answer", gold) for gold in value)
    return (_text(place, "answer", value),)


def _fact(place: str, value: Any) -> tuple[str, int]:
    match value:
        case [str(title), int(sentence)] if not isinstance(sentence, bool):
            return title, sentence
    raise DataError(f"{place}: 'supporting_facts': expected [title, sentence number] pairs, found {_described(value)}.")


def _passage(place: str, value: Any) -> tuple[str, tuple[str, ...]]:
    match value:
        case [str(title), [*sentences]] if all(isinstance(sentence, str) for sentence in sentences):
            return title, tuple(sentences)
    raise DataError(f"{place}: 'context': expected [title, [sentences]] pairs, found {_described(value)}.")


def _list(place: str, key: str, record: dict[str, Any]) -> list[Any]:
    value = record.get(key, [])
    if not isinstance(value, list):
        raise DataError(f"{place}: key {key!r}: expected a list, found {_described(value)}.")
    return value


def _text(place: str, key: str, value: Any, blank: bool = False) -> str:
    if isinstance(value, str) and (blank or value.strip()):
        return value
    raise DataError(
        f"{place}: key {key!r}: expected a text{'' if blank else ' that is not blank'}, found {_described(value)}."
    )


def _described(value: Any) -> str:
    shown = ascii(value) if len(ascii(value)) <= 60 else ascii(value)[:57] + "..."
    return f"{type(value).__name__} {shown}"
