"""From one record of a data set's own layout to a question: HotpotQA, 2WikiMultihopQA, MuSiQue, FlashRAG.

Reads no file. The one idea: a layout is told by the keys of the record itself, and what is wrong is named with place,
wanted and found.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rllib_mhgpo.data.questions import Question
from rllib_mhgpo.errors import DataError, did_you_mean

Record = Mapping[str, Any]

_IDS = ("_id", "id", "question_id", "qid")
_GOLDS = ("answer", "answers", "golden_answers")
_ALIASES = ("answer_aliases", "aliases")
_PASSAGES = ("context", "paragraphs")
_PARAGRAPH = ("idx", "title", "paragraph_text", "is_supporting")
_KEYS = ("question", "supporting_facts", "type", "level", "metadata", *_IDS, *_GOLDS, *_ALIASES, *_PASSAGES)


def to_question(place: str, value: Any, number: str, require_context: bool) -> Question:
    """Makes a question of a record; ``number`` is its id where it has none.

    Raises:
        DataError: naming the place and the key, for anything that cannot be read as a question.
    """
    if not isinstance(value, dict):
        raise DataError(f"{place}: expected a question record (a JSON object), found {described(value)}.")
    metadata = value.get("metadata")
    record = {**metadata, **value} if isinstance(metadata, dict) else value  # FlashRAG keeps the original's keys there
    _check_keys(place, record, require_context)
    context, evidence = _context(place, record)
    return Question(
        id=_id(place, record, number),
        question=_text(place, "question", record["question"]),
        answers=tuple(_answers(place, record)),
        supporting=tuple(_supporting(place, record, context, evidence)),
        context=context,
        kind=_text(place, "type", record.get("type") or "", blank=True),
        level=_text(place, "level", record.get("level") or "", blank=True),
        evidence=evidence,
    )


def has_passages(record: Any) -> bool:
    """Whether the record is a question with passages of its own."""
    if not isinstance(record, dict) or "question" not in record:
        return False
    inner = record.get("metadata")
    return any(key in record or (isinstance(inner, dict) and key in inner) for key in _PASSAGES)


def check_case(place: str, record: Record, known: Sequence[str]) -> None:
    """Refuses a key that differs from a known one in letter case alone, which would be ignored in silence.

    Raises:
        DataError: naming both.
    """
    for key in record:
        if key not in known and key.lower() in known and key.lower() not in record:
            found = keys_of(record)
            raise DataError(f"{place}: expected key {key.lower()!r}, found {key!r} (keys found: {found}). Rename it.")


def keys_of(record: Record) -> str:
    """The record's first keys, for a message."""
    return ", ".join(map(repr, list(record)[:8])) + (", …" if len(record) > 8 else "") or "none"


def described(value: Any) -> str:
    """Type and value, cut to a length that fits a message."""
    shown = ascii(value) if len(ascii(value)) <= 60 else ascii(value)[:57] + "..."
    return f"{type(value).__name__} {shown}"


def _check_keys(place: str, record: Record, require_context: bool) -> None:
    found = ", ".join(map(repr, record)) or "none"
    check_case(place, record, _KEYS)
    wanted: list[tuple[str, Sequence[str], str]] = [
        ("question", ("question",), " Use a file of questions."),
        ("answer", _GOLDS, " Use a file with answers."),
    ]
    if require_context:
        wanted.append(("context", _PASSAGES, " Use a file with passages, or name a corpus to search."))
    for name, keys, remedy in wanted:
        if not any(key in record for key in keys):
            layout = _other_layout(record)
            raise DataError(
                f"{place}: expected key {name!r}, found {found}.{did_you_mean(name, record)}"
                + (f" This looks like {layout}." if layout else "")
                + remedy
            )


def _other_layout(record: Record) -> str:
    if "contents" in record or {"title", "text"} <= record.keys() or "wikipedia_title" in record:
        return "a corpus (one passage a record), not a question file"
    if record and all(isinstance(sentences, list) for sentences in record.values()):
        return "a corpus (one object of title: sentences), not a question file"
    if "data" in record:
        return "records wrapped in an object under 'data'"
    if "predicted_answer" in record or "pred" in record:
        return "predictions, not a question file"
    return ""


def id_of(place: str, value: Any) -> str:
    """Returns an id, given as a string or a whole number, as a string.

    Raises:
        DataError: something else.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise DataError(
        f"{place}: expected the id as a string or a whole number, found {described(value)}."
        " Numbers with a point lose digits: write ids as strings."
    )


def _id(place: str, record: Record, number: str) -> str:
    found = id_of(place, next((record[key] for key in _IDS if key in record), number))
    if not found.strip():
        raise DataError(f"{place}: expected the id as a string that is not blank, found {described(found)}.")
    return found


def _answers(place: str, record: Record) -> Iterator[str]:
    """The golds, then the aliases, each once."""
    if not _truth(place, "answerable", record, True):
        raise DataError(
            f"{place}: a question that its passages do not answer (answerable: false); expected one with an answer."
            " Use the answerable part of the data set."
        )
    key = next(key for key in _GOLDS if key in record)
    golds = record[key] if isinstance(record[key], list) and record[key] else [record[key]]
    aliases = [alias for key in _ALIASES for alias in _list(place, key, record)]
    yield from dict.fromkeys(
        [*(_text(place, key, gold) for gold in golds), *(_text(place, _ALIASES[0], alias) for alias in aliases)]
    )


def _context(place: str, record: Record) -> tuple[tuple[tuple[str, tuple[str, ...]], ...], tuple[int, ...]]:
    """The passages, and the positions of the supporting ones where the passages themselves say so (MuSiQue)."""
    if "context" in record or "paragraphs" not in record:
        pairs = _columns(place, "context", record, "title", "sentences")
        return tuple(_passage(place, pair) for pair in pairs), ()
    paragraphs = _list(place, "paragraphs", record)
    for paragraph in paragraphs:
        if not isinstance(paragraph, dict) or not all(
            isinstance(paragraph.get(key), str) for key in ("title", "paragraph_text")
        ):
            raise DataError(
                f"{place}: 'paragraphs': expected objects with texts 'title' and 'paragraph_text',"
                f" found {described(paragraph)}."
            )
    context = tuple((paragraph["title"], (paragraph["paragraph_text"],)) for paragraph in paragraphs)
    marked = [i for i, paragraph in enumerate(paragraphs) if _truth(place, "is_supporting", paragraph, False)]
    hops = _hops(place, record, _numbers(place, paragraphs))
    return context, tuple(dict.fromkeys([*hops, *marked]))


def _hops(place: str, record: Record, numbers: Mapping[int, int]) -> Iterator[int]:
    """The positions of the paragraphs that the question's steps name."""
    key = "question_decomposition"
    for step in [] if record.get(key) is None else _list(place, key, record):
        number = step.get("paragraph_support_idx") if isinstance(step, dict) else False
        if number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, int):
            raise DataError(
                f"{place}: {key!r}: expected objects with a whole number or null under"
                f" 'paragraph_support_idx', found {described(step)}."
            )
        if number in numbers:
            yield numbers[number]


def _truth(place: str, key: str, record: Record, default: bool) -> bool:
    value = record.get(key)
    if isinstance(value, bool | None):
        return default if value is None else value
    raise DataError(f"{place}: {key!r}: expected true or false, found {described(value)}.")


def _numbers(place: str, paragraphs: Sequence[Record]) -> dict[int, int]:
    """The position of each paragraph by the number that the record gives it."""
    numbers: dict[int, int] = {}
    for position, paragraph in enumerate(paragraphs):
        check_case(place, paragraph, _PARAGRAPH)
        number = paragraph.get("idx", position)
        if isinstance(number, bool) or not isinstance(number, int) or numbers.setdefault(number, position) != position:
            raise DataError(
                f"{place}: 'paragraphs': expected a whole number under 'idx', each once, found {described(number)}."
            )
    return numbers


def _supporting(
    place: str, record: Record, context: Sequence[tuple[str, tuple[str, ...]]], evidence: Sequence[int]
) -> Iterator[tuple[str, int]]:
    if evidence:
        yield from ((context[position][0], 0) for position in evidence)
        return
    for fact in _columns(place, "supporting_facts", record, "title", "sent_id"):
        match fact:
            case [str(title), int(sentence)] if not isinstance(sentence, bool) and abs(sentence) < 1 << 31:
                yield title, sentence
            case _:
                raise DataError(
                    f"{place}: 'supporting_facts': expected [title, sentence number] pairs, found {described(fact)}."
                )


def _passage(place: str, value: Any) -> tuple[str, tuple[str, ...]]:
    match value:
        case [str(title), [*sentences]] if all(isinstance(sentence, str) for sentence in sentences):
            return title, tuple(sentences)
    raise DataError(f"{place}: 'context': expected [title, [sentences]] pairs, found {described(value)}.")


def _columns(place: str, key: str, record: Record, *names: str) -> list[Any]:
    """A list of pairs, also where it is written as two columns of equal length (Hugging Face, FlashRAG)."""
    value = record.get(key)
    if not isinstance(value, dict):
        return _list(place, key, record)
    columns = [value.get(name) for name in names]
    if not all(isinstance(column, list) for column in columns) or len({len(column or ()) for column in columns}) > 1:
        raise DataError(
            f"{place}: {key!r}: expected pairs, or lists of equal length under {', '.join(map(repr, names))};"
            f" found {described(value)}."
        )
    return [list(pair) for pair in zip(*(column or () for column in columns), strict=True)]


def _list(place: str, key: str, record: Record) -> list[Any]:
    value = record.get(key, [])
    if not isinstance(value, list):
        raise DataError(f"{place}: key {key!r}: expected a list, found {described(value)}.")
    return value


def _text(place: str, key: str, value: Any, blank: bool = False) -> str:
    if isinstance(value, str) and (blank or value.strip()):
        return value
    raise DataError(
        f"{place}: key {key!r}: expected a text{'' if blank else ' that is not blank'}, found {described(value)}."
    )
