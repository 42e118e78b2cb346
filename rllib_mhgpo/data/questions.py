"""Questions with their golds, supporting facts and passages.

Not a sampler and not a scorer. The one idea: everything a later step relies on is checked when the questions are made,
so that a wrong file is named before any training.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from hashlib import sha256
from typing import Any, Protocol, Self, overload

from rllib_mhgpo.errors import DataError


@dataclass(frozen=True, slots=True)
class Question:
    """One question as the data set has it.

    ``supporting`` holds (title, sentence index) pairs; an index may point past the last sentence, as some do in the
    published files. ``context`` holds (title, sentences) pairs. ``kind`` and ``level`` are empty where not given.
    ``evidence`` holds the positions in ``context`` of the supporting passages, hop by hop, where the data set says so.
    """

    id: str
    question: str
    answers: tuple[str, ...]
    supporting: tuple[tuple[str, int], ...] = ()
    context: tuple[tuple[str, tuple[str, ...]], ...] = ()
    kind: str = ""
    level: str = ""
    evidence: tuple[int, ...] = ()

    @property
    def hops(self) -> tuple[tuple[str, str], ...]:
        """The supporting passages as (title, text), each once; text is empty where the title alone tells the passage.

        A title tells it, unless several passages of the question bear that title.

        >>> pages = (("Rome", ("A city.",)), ("Rome", ("A film.",)), ("Italy", ("A land.",)))
        >>> Question("q", "?", ("a",), context=pages, evidence=(2, 1)).hops
        (('Italy', ''), ('Rome', 'A film.'))
        """
        if not self.evidence:
            return tuple(dict.fromkeys((title, "") for title, _ in self.supporting))
        bearing = Counter(title for title, _ in dict.fromkeys(self.context))
        passages = [self.context[position] for position in self.evidence]
        return tuple(
            dict.fromkeys((title, join_sentences(text) if bearing[title] > 1 else "") for title, text in passages)
        )


class Named(Protocol):
    """What recall needs of a passage."""

    @property
    def title(self) -> str:
        """Its title."""

    @property
    def text(self) -> str:
        """Its text."""


def hops_found(question: Question, passages: Iterable[Named]) -> tuple[bool, ...]:
    """For each of the question's hops whether its passage is among ``passages``."""
    shown = {(passage.title, passage.text) for passage in passages}
    titles = {title for title, _ in shown}
    return tuple((title, text) in shown if text else title in titles for title, text in question.hops)


class Questions(Sequence[Question]):
    """Distinctly named questions in file order; immutable, so a copy is the thing itself.

    ``source`` says where they come from. ``fingerprint`` is the SHA-256 of their content: the same for the same
    questions in another file layout.

    Raises:
        DataError: for no questions, an id that occurs twice, or text that is not valid Unicode.
    """

    def __init__(self, questions: Iterable[Question], source: str) -> None:
        self._questions: Sequence[Question] = tuple(questions)
        self.source = source
        checked = checked_questions(((f"{source}: record {i}", q) for i, q in enumerate(self, start=1)), source)
        self.fingerprint = fingerprint_of(question for _, question in checked)

    @classmethod
    def trusted(cls, questions: Sequence[Question], source: str, fingerprint: str) -> Self:
        """Takes questions that were checked before, without reading them."""
        self = cls.__new__(cls)
        self._questions, self.source, self.fingerprint = questions, source, fingerprint
        return self

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


def checked_questions(placed: Iterable[tuple[str, Question]], source: str) -> Iterator[tuple[str, Question]]:
    """Passes (place, question) pairs on.

    Raises:
        DataError: for no questions, an id that occurs twice, or text that is not valid Unicode.
    """
    first: dict[str, int] = {}
    for number, (place, question) in enumerate(placed, start=1):
        if first.setdefault(question.id, number) != number:
            raise DataError(
                f"{source}: records {first[question.id]} and {number} have the same id {question.id!r};"
                " expected each id once. Remove one."
            )
        encode_question(question, place)
        yield place, question
    if not first:
        raise DataError(f"{source}: holds no questions; expected at least one.")


def fingerprint_of(questions: Iterable[Question]) -> str:
    """The SHA-256 of the questions' content, in their order."""
    digest = sha256()
    for question in questions:
        digest.update(encode_question(question, question.id))
    return digest.hexdigest()


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


def encode_question(question: Question, place: str) -> bytes:
    """What the fingerprint is made of.

    Raises:
        DataError: for text that is not valid Unicode.
    """
    try:
        return json.dumps(astuple(question), ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError as error:
        found = ascii(error.object[error.start])
        raise DataError(
            f"{place}: holds half a character ({found}); expected valid Unicode. Mend the record."
        ) from error
