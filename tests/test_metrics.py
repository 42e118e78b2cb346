"""Scores against numbers worked by hand and the HotpotQA script's figures on real predictions."""

import json
import subprocess
import sys
from math import sqrt
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rllib_mhgpo.data import Question, load_questions
from rllib_mhgpo.errors import ConfigError, DataError
from rllib_mhgpo.metrics import (
    REWARDS,
    accuracy,
    exact_match,
    f1,
    load_reward,
    normalize_answer,
    score_answer,
    score_predictions,
)
from tests.real_data import real_file

answers = st.text(st.sampled_from("aAtThHeEnNoOsSyY  .!,'-é"), max_size=16)


@pytest.mark.parametrize(
    ("text", "normalised"),
    [
        ("The  U.S. Army!", "us army"),
        ("an apple, a day", "apple day"),
        ("Theatre", "theatre"),  # an article only as a word of its own
        ("t.h.e", ""),  # punctuation goes first
        ("“quoted”", "“quoted”"),  # ASCII punctuation alone
        ("The The", ""),
    ],
)
def test_normalisation(text: str, normalised: str) -> None:
    assert normalize_answer(text) == normalised


@pytest.mark.parametrize(
    ("prediction", "gold", "score"),
    [
        # precision 2/3, recall 2/2: 2 * 2/3 * 1 / (5/3)
        ("Chief of protocol staff", "Chief of Protocol", 6 / 7),
        ("the cat the cat", "cat", 2 / 3),  # a repeated word counts once: precision 1/2, recall 1
        ("cat sat", "sat cat", 1.0),
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
    ],
)
def test_f1_by_hand(prediction: str, gold: str, score: float) -> None:
    assert f1(prediction, gold) == pytest.approx(score, abs=1e-12)


@pytest.mark.parametrize(
    ("prediction", "gold", "score"),
    [
        ("no, they are not", "no", 0.0),
        ("No Country for Old Men", "no", 0.0),
        ("No.", "no", 1.0),
        ("noanswer", "yes", 0.0),
        ("yes", "yes it is", 0.0),
        ("The yes", "yes", 1.0),
    ],
)
def test_yes_and_no_must_be_the_whole_answer(prediction: str, gold: str, score: float) -> None:
    assert f1(prediction, gold) == score


def test_a_string_is_one_gold_and_the_best_of_several_counts() -> None:
    assert exact_match("R", "Rush") == f1("R", "Rush") == accuracy("R", "Rush") == 0.0
    assert exact_match("Rush", "Rush") == 1.0
    golds = ["Pirates", "Pittsburgh Pirates"]
    assert exact_match("the Pittsburgh Pirates", golds) == 1.0
    assert f1("Pittsburgh Steelers", golds) == 0.5  # of the second: precision 1/2, recall 1/2
    assert accuracy("It was the Pirates.", golds) == 1.0
    with pytest.raises(DataError, match="no gold"):
        f1("x", [])


@pytest.mark.parametrize(
    ("prediction", "gold", "score"),
    [
        ("unknown", "no", 0.0),
        ("I think it is New York City.", "New York", 1.0),
        ("York, New", "New York", 0.0),
        ("new and old york", "New York", 0.0),  # together, not merely all
        ("the The", "The The", 1.0),
        ("Puddle of Mudd", "The The", 0.0),
        ("!!!", "The The", 0.0),
    ],
)
def test_accuracy(prediction: str, gold: str, score: float) -> None:
    assert accuracy(prediction, gold) == score


@pytest.mark.parametrize("gold", ["The The", "!!!"])
def test_golds_that_normalise_to_nothing(gold: str) -> None:
    # reported: as the HotpotQA script has it
    assert exact_match(gold, gold) == 1.0
    assert f1(gold, gold) == 0.0
    assert exact_match("", gold) == 1.0
    assert exact_match("Puddle of Mudd", gold) == 0.0
    # trained on: the gold itself and nothing else
    for reward in REWARDS.values():
        assert reward(gold, gold) == 1.0
        assert reward(f" {gold.lower()} ", [gold, "other"]) == 1.0
        for wrong in ("", "  ", "a", "?", "Puddle of Mudd"):
            assert reward(wrong, gold) == 0.0
    assert REWARDS["em"]("?", [gold, "x"]) == 0.0
    assert REWARDS["f1"]("", "") == REWARDS["em"](" ", ["", "yes"]) == REWARDS["acc"]("", [" ", gold]) == 0.0


@settings(deadline=None)
@given(answers)
def test_normalisation_is_idempotent(text: str) -> None:
    assert normalize_answer(normalize_answer(text)) == normalize_answer(text)


@settings(deadline=None)
@given(st.text(max_size=20))
def test_normalisation_is_idempotent_on_any_text(text: str) -> None:
    assert normalize_answer(normalize_answer(text)) == normalize_answer(text)


@settings(deadline=None)
@given(answers, answers)
def test_f1_is_symmetric_and_blind_to_order(first: str, second: str) -> None:
    score = f1(first, second)
    assert 0.0 <= score <= 1.0
    assert score == pytest.approx(f1(second, first))
    tokens = normalize_answer(first).split()
    if len(tokens) > 1:
        assert f1(" ".join(reversed(tokens)), second) == pytest.approx(score)


@settings(deadline=None)
@given(answers, answers)
def test_an_exact_match_is_a_full_score(prediction: str, gold: str) -> None:
    if normalize_answer(gold) and exact_match(prediction, gold):
        assert f1(prediction, gold) == accuracy(prediction, gold) == 1.0


@settings(deadline=None)
@given(answers, st.lists(answers.filter(lambda gold: bool(normalize_answer(gold))), min_size=1, max_size=3))
def test_rewards_are_the_reported_scores_elsewhere(answer: str, golds: list[str]) -> None:
    for name, reward in REWARDS.items():
        assert reward(answer, golds) == score_answer(answer, golds)[name]


def test_missing_predictions_count_zero_and_are_named() -> None:
    questions = [Question(str(i), "?", ("cat",)) for i in range(4)]
    scores = score_predictions(questions, {"0": "cat", "1": "black cat", "3": "dog", "9": "cat"})
    # f1: 1, 2/3, 0 (missing), 0; em: 1, 0, 0, 0; acc: 1, 1, 0, 0
    assert scores.means == pytest.approx({"acc": 1 / 2, "em": 1 / 4, "f1": 5 / 12, "avg": (1 / 2 + 1 / 4 + 5 / 12) / 3})
    assert scores.missing == ("2",)
    assert scores.unknown == ("9",)
    assert scores.num_questions == 4
    # em: variance p(1 - p) = 3/16; over n = 4
    assert scores.standard_errors["em"] == pytest.approx(sqrt(3 / 16 / 4))
    # f1: squares 1 + 4/9 over 4 less (5/12)^2
    assert scores.standard_errors["f1"] == pytest.approx(sqrt((13 / 36 - 25 / 144) / 4))
    with pytest.raises(DataError, match="no questions"):
        score_predictions([], {})


def test_the_hotpotqa_scripts_figures() -> None:
    questions = load_questions(real_file("hotpotqa/benchfortir_dev500.jsonl"))
    lines = real_file("predictions/dire_hotpotqa_dev_predictions.jsonl").read_text(encoding="utf-8").splitlines()
    predictions = {row["question_id"]: row["answer"] for row in map(json.loads, lines)}
    scores = score_predictions(questions, predictions)
    assert scores.means["em"] == pytest.approx(0.498, abs=1e-12)
    assert scores.means["f1"] == pytest.approx(0.6373720114, abs=1e-10)
    assert len(scores.missing) == 3
    assert scores.num_questions == 500
    assert scores.standard_errors["em"] == pytest.approx(sqrt(0.498 * 0.502 / 500))


def test_rewards_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_reward("f1") is REWARDS["f1"]
    (tmp_path / "my_rewards.py").write_text(
        "limit = 3\ndef short(answer, golds):\n    return float(len(answer) < limit)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert load_reward("my_rewards:short")("ab", "x") == 1.0
    with pytest.raises(ConfigError, match=r"'f2' is not one of f1, em, acc.*Did you mean 'f1'"):
        load_reward("f2")
    for name in ("my_rewards:long", "no_such_module:f", ":f"):
        with pytest.raises(ConfigError, match="cannot be imported"):
            load_reward(name)
    with pytest.raises(ConfigError, match="int; expected a function"):
        load_reward("my_rewards:limit")


def test_scores_and_data_load_nothing_heavy() -> None:
    code = (
        "import rllib_mhgpo.metrics, rllib_mhgpo.data, sys;"
        "print([m for m in ('torch', 'ray', 'faiss', 'sklearn', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
