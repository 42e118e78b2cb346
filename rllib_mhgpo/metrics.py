"""What an answer is worth: EM and F1 of the HotpotQA script, Acc, and the training rewards made of them.

Pure Python; no files, no models. The one idea: reward and evaluation are the same functions, but for two cases in
which the script can be earned without knowing anything (a blank answer, and a gold that normalises to nothing).

Source: ``hotpot_evaluate_v1.py`` of the HotpotQA authors (Yang et al. 2018), whose numbers these are.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import sqrt
from typing import Protocol

from rllib_mhgpo.errors import ConfigError, DataError, did_you_mean

Golds = str | Sequence[str]
Reward = Callable[[str, Golds], float]

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WHOLE_ANSWERS = frozenset({"yes", "no", "noanswer"})


def normalize_answer(text: str) -> str:
    """Lower case, without ASCII punctuation, without a/an/the, single spaces.

    >>> normalize_answer("The  U.S. Army!")
    'us army'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, golds: Golds) -> float:
    """1 where the normalised prediction is a normalised gold, else 0."""
    return max(float(normalize_answer(prediction) == normalize_answer(gold)) for gold in gold_list(golds))


def f1(prediction: str, golds: Golds) -> float:
    """Harmonic mean of token precision and recall, in 0..1; the best gold counts.

    A yes/no/noanswer on either side earns only when both sides are equal.

    >>> round(f1("the Pittsburgh Steelers", ["Pirates", "Pittsburgh Pirates"]), 2)
    0.5
    >>> f1("no, they are not", "no")
    0.0
    """
    return max(_f1(normalize_answer(prediction), normalize_answer(gold)) for gold in gold_list(golds))


def accuracy(prediction: str, golds: Golds) -> float:
    """1 where a normalised gold's tokens stand together in the normalised prediction, else 0.

    A gold that normalises to nothing would stand in every text: it matches only itself.

    >>> accuracy("unknown", "no"), accuracy("I think it is Paris, France.", "Paris"), accuracy("", "The The")
    (0.0, 1.0, 0.0)
    """
    return max(_accuracy(prediction, gold) for gold in gold_list(golds))


def reward_f1(answer: str, golds: Golds) -> float:
    """F1 as a training reward; see :data:`REWARDS`."""
    return _earned(f1, answer, golds)


def reward_em(answer: str, golds: Golds) -> float:
    """EM as a training reward; see :data:`REWARDS`."""
    return _earned(exact_match, answer, golds)


def reward_acc(answer: str, golds: Golds) -> float:
    """Acc as a training reward; see :data:`REWARDS`."""
    return _earned(accuracy, answer, golds)


#: Training rewards by name. They equal the reported scores but for two cases: a blank answer earns 0, and a gold that
#: normalises to nothing ("The The", "!!!") is earned by itself alone, and in full (letter case and spaces aside).
REWARDS: dict[str, Reward] = {"f1": reward_f1, "em": reward_em, "acc": reward_acc}


def load_reward(name: str) -> Reward:
    """Finds a reward: a name in :data:`REWARDS`, or ``module:function`` of the user's (a reward model is one).

    The function is called as ``reward(answer, golds)`` and returns a number.

    Raises:
        ConfigError: for an unknown name, module or function.
    """
    if not isinstance(name, str):
        raise ConfigError(f"reward: expected a name or module:function, found {name!r}.")
    if name in REWARDS:
        return REWARDS[name]
    module_name, colon, function_name = name.partition(":")
    if not colon:
        known = ", ".join(REWARDS)
        raise ConfigError(f"reward {name!r} is not one of {known}, nor module:function.{did_you_mean(name, REWARDS)}")
    try:
        reward = getattr(import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"reward {name!r} cannot be imported: {error}. Give module:function on the Python path."
        ) from error
    if not callable(reward):
        raise ConfigError(f"reward {name!r} is a {type(reward).__name__}; expected a function reward(answer, golds).")
    return reward  # type: ignore[no-any-return]  # the user's function; its result is checked where it is used


class Answered(Protocol):
    """What scoring needs of a question."""

    @property
    def id(self) -> str:
        """The key of its prediction."""

    @property
    def answers(self) -> tuple[str, ...]:
        """Its golds, at least one."""


class Supported(Answered, Protocol):
    """What scoring supporting facts needs of a question."""

    @property
    def supporting(self) -> tuple[tuple[str, int], ...]:
        """Its supporting facts, (title, sentence) pairs."""

    @property
    def evidence(self) -> tuple[int, ...]:
        """The numbers of its supporting passages, where the data set has them."""


@dataclass(frozen=True)
class AnswerScores:
    """Scores of a set of predictions: means over all questions, a missing one counting 0.

    ``standard_errors`` has the same keys as ``means`` (``acc``, ``em``, ``f1``, ``avg``): the standard deviation of
    the per-question scores (divisor n) over the root of n. ``per_question`` is in the order of the questions.
    """

    means: dict[str, float]
    standard_errors: dict[str, float]
    per_question: tuple[dict[str, float], ...]
    missing: tuple[str, ...]
    unknown: tuple[str, ...]

    @property
    def num_questions(self) -> int:
        """The divisor of every mean."""
        return len(self.per_question)


def score_answer(prediction: str, golds: Golds) -> dict[str, float]:
    """The reported scores of one answer: ``acc``, ``em``, ``f1`` and ``avg``, the mean of the three."""
    scores = {
        "acc": accuracy(prediction, golds),
        "em": exact_match(prediction, golds),
        "f1": f1(prediction, golds),
    }
    return {**scores, "avg": sum(scores.values()) / 3}


def score_predictions(questions: Sequence[Answered], predictions: Mapping[str, str]) -> AnswerScores:
    """Scores ``predictions`` (question id to answer) on all ``questions``.

    Raises:
        DataError: when there are no questions.
    """
    if not questions:
        raise DataError("no questions to score: expected at least one.")
    nothing = dict.fromkeys(("acc", "em", "f1", "avg"), 0.0)
    rows = tuple(
        score_answer(predictions[question.id], question.answers) if question.id in predictions else nothing
        for question in questions
    )
    ids = {question.id for question in questions}
    means = {name: sum(row[name] for row in rows) / len(rows) for name in nothing}
    errors = {
        name: sqrt(sum((row[name] - mean) ** 2 for row in rows) / len(rows)) / sqrt(len(rows))
        for name, mean in means.items()
    }
    missing = tuple(question.id for question in questions if question.id not in predictions)
    return AnswerScores(means, errors, rows, missing, tuple(id_ for id_ in predictions if id_ not in ids))


@dataclass(frozen=True)
class OfficialScores:
    """Scores as a data set's own script gives them: means over all questions, what is missing counting 0.

    ``errors`` are standard errors by bootstrap. ``per_question`` is in the order of the questions.
    """

    means: dict[str, float]
    errors: dict[str, float]
    per_question: tuple[dict[str, float], ...]
    missing: tuple[str, ...]
    unknown: tuple[str, ...]


def official_scores(
    questions: Sequence[Supported],
    answers: Mapping[str, str],
    facts: Mapping[str, Sequence[tuple[str, int]]] | None = None,
    paragraphs: Mapping[str, Sequence[int]] | None = None,
    musique: bool = False,
) -> OfficialScores:
    """Scores predictions as the HotpotQA script does (2WikiMultihopQA's is the same), or as MuSiQue's.

    Args:
        questions: with golds and supporting facts.
        answers: by id.
        facts: predicted supporting facts by id; adds ``sp_…`` and, with the answer, ``joint_…``.
        paragraphs: predicted supporting paragraphs by id, as numbers; adds ``support_f1`` (MuSiQue).
        musique: EM and F1 as MuSiQue's script: without the rule that yes and no must be the whole answer.

    Raises:
        DataError: when there are no questions, or not one of the predictions is of one of them.
    """
    ids = {question.id for question in questions}
    if not questions:
        raise DataError("no questions to score: expected at least one.")
    if answers and not ids & answers.keys():
        raise DataError(
            f"not one of {len(answers)} predictions has the id of a question: found {next(iter(answers))!r}, expected"
            f" such as {questions[0].id!r}. Name the questions that were answered."
        )
    rows = []
    for question in questions:
        row = _answer_row(answers.get(question.id), question.answers, musique)
        if facts:
            row |= _fact_row(row, facts.get(question.id), question.supporting)
        if paragraphs:
            wanted = {(str(number), 0) for number in question.evidence}
            found = [(str(number), 0) for number in paragraphs.get(question.id, ())]
            row["support_f1"] = fact_scores(found, wanted)["f1"] if question.id in paragraphs else 0.0
        rows.append({name: value for name, value in row.items() if not name.startswith("_")})
    means = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
    missing = tuple(question.id for question in questions if question.id not in answers)
    unknown = tuple(id_ for id_ in answers if id_ not in ids)
    return OfficialScores(means, bootstrap_errors(rows), tuple(rows), missing, unknown)


def fact_scores(predicted: Iterable[tuple[str, int]], gold: Iterable[tuple[str, int]]) -> dict[str, float]:
    """EM, F1, precision and recall of a set of supporting facts.

    >>> fact_scores([("A", 0), ("B", 1)], [("A", 0)])
    {'em': 0.0, 'f1': 0.6666666666666666, 'precision': 0.5, 'recall': 1.0}
    """
    found, wanted = set(predicted), set(gold)
    precision = len(found & wanted) / len(found) if found else 0.0
    recall = len(found & wanted) / len(wanted) if wanted else 0.0
    return {"em": float(found == wanted), "f1": _mean_of(precision, recall), "precision": precision, "recall": recall}


def musique_f1(prediction: str, golds: Golds) -> float:
    """F1 of MuSiQue's (and SQuAD's) script: yes and no are words like others; two empty answers agree.

    >>> round(musique_f1("no, they are not", "no"), 2), musique_f1("the", "!")
    (0.4, 1.0)
    """
    return max(_word_f1(normalize_answer(prediction), normalize_answer(gold)) for gold in gold_list(golds))


def bootstrap_errors(rows: Sequence[Mapping[str, float]], draws: int = 1000, seed: int = 0) -> dict[str, float]:
    """Standard errors of the rows' means: the standard deviation of the means of so many samples with replacement."""
    import numpy as np

    names = list(rows[0])
    table = np.array([[row[name] for name in names] for row in rows])
    rng = np.random.default_rng(seed)
    means = np.array([table[rng.integers(len(rows), size=len(rows))].mean(axis=0) for _ in range(draws)])
    return dict(zip(names, means.std(axis=0, ddof=1).tolist(), strict=True))


def gold_list(golds: Golds) -> Sequence[str]:
    """The golds as a list: a string is one gold, not letters.

    Raises:
        DataError: when there is no gold.
    """
    if isinstance(golds, str):
        return [golds]
    if not golds:
        raise DataError("an answer was scored against no gold: expected at least one.")
    return golds


def _f1(prediction: str, gold: str) -> float:
    return _mean_of(*_precision_recall(prediction, gold))


def _precision_recall(prediction: str, gold: str) -> tuple[float, float]:
    """Of normalised answers, by words; both 0 where a yes, no or noanswer is not the whole of both."""
    if prediction != gold and (prediction in _WHOLE_ANSWERS or gold in _WHOLE_ANSWERS):
        return 0.0, 0.0
    predicted, wanted = prediction.split(), gold.split()
    same = sum((Counter(predicted) & Counter(wanted)).values())
    return (same / len(predicted), same / len(wanted)) if same else (0.0, 0.0)


def _answer_row(prediction: str | None, golds: Golds, musique: bool) -> dict[str, float]:
    """The scores of one answer; names that begin with ``_`` are needed for the joint scores alone."""
    if prediction is None:
        return dict.fromkeys(("acc", "em", "f1", "_precision", "_recall"), 0.0)
    best = max(gold_list(golds), key=lambda gold: f1(prediction, gold))
    precision, recall = _precision_recall(normalize_answer(prediction), normalize_answer(best))
    return {
        "acc": accuracy(prediction, golds),
        "em": exact_match(prediction, golds),
        "f1": musique_f1(prediction, golds) if musique else f1(prediction, golds),
        "_precision": precision,
        "_recall": recall,
        "_answered": 1.0,
    }


def _fact_row(
    answer: Mapping[str, float], predicted: Sequence[tuple[str, int]] | None, gold: Sequence[tuple[str, int]]
) -> dict[str, float]:
    """Supporting-fact scores, and those of answer and facts together, which are 0 where either is missing."""
    facts = (
        dict.fromkeys(("em", "f1", "precision", "recall"), 0.0) if predicted is None else fact_scores(predicted, gold)
    )
    both = float(predicted is not None and "_answered" in answer)
    precision = both * answer["_precision"] * facts["precision"]
    recall = both * answer["_recall"] * facts["recall"]
    return {
        **{f"sp_{name}": value for name, value in facts.items()},
        "joint_em": both * answer["em"] * facts["em"],
        "joint_f1": _mean_of(precision, recall),
        "joint_precision": precision,
        "joint_recall": recall,
    }


def _mean_of(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall > 0 else 0.0


def _word_f1(prediction: str, gold: str) -> float:
    predicted, wanted = prediction.split(), gold.split()
    same = sum((Counter(predicted) & Counter(wanted)).values())
    if not predicted or not wanted:
        return float(predicted == wanted)
    return _mean_of(same / len(predicted), same / len(wanted))


def _accuracy(prediction: str, gold: str) -> float:
    normalised = normalize_answer(gold)
    if not normalised:
        return float(_is_itself(prediction, gold))
    return float(f" {normalised} " in f" {normalize_answer(prediction)} ")


def _earned(score: Callable[[str, Golds], float], answer: str, golds: Golds) -> float:
    return max(
        score(answer, gold) if normalize_answer(gold) else float(_is_itself(answer, gold)) for gold in gold_list(golds)
    )


def _is_itself(answer: str, gold: str) -> bool:
    # a blank gold is earned by nothing, so that a blank answer never earns
    return answer.lower().split() == gold.lower().split() and bool(gold.strip())
