"""Prediction files, and the scores of the official scripts on them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from rllib_mhgpo.cli import app
from rllib_mhgpo.data import Question, load_predictions, load_questions
from rllib_mhgpo.envs.minipedia import minipedia
from rllib_mhgpo.errors import DataError
from rllib_mhgpo.metrics import bootstrap_errors, fact_scores, musique_f1, official_scores
from tests.real_data import real_file

QUESTIONS = [
    Question("a", "?", ("Rome",), supporting=(("A", 0), ("B", 1))),
    Question("b", "?", ("no",), supporting=(("A", 0),)),
    Question("c", "?", ("Paris", "City of Paris"), supporting=(("C", 2),)),
    Question("d", "?", ("x",), supporting=(("D", 0),)),
]


def write(path: Path, value: Any, lines: bool = False) -> Path:
    path.write_text("\n".join(map(json.dumps, value)) if lines else json.dumps(value), encoding="utf-8")
    return path


ANSWERS = {"a": "Rome", "b": "no, not", "c": "the city of Paris"}
FACTS = {"a": (("A", 0), ("X", 3)), "b": (("A", 0),)}


@pytest.mark.parametrize(
    ("value", "lines"),
    [
        ({"answer": ANSWERS, "sp": FACTS}, False),
        ([{"question_id": i, "answer": a, "supporting_sentences": FACTS.get(i)} for i, a in ANSWERS.items()], True),
        ([{"_id": i, "predicted_answer": a, "sp": FACTS.get(i)} for i, a in ANSWERS.items()], False),
        ([{"id": i, "output": {"pred": a}, "sp": FACTS.get(i)} for i, a in ANSWERS.items()], True),
        ([*({"id": i, "answer": a, "sp": FACTS.get(i)} for i, a in ANSWERS.items()), {"root": 3, "void": "x"}], True),
    ],
)
def test_layouts_of_predictions(tmp_path: Path, value: Any, lines: bool) -> None:
    found = load_predictions(write(tmp_path / "p", value, lines))
    assert (found.answers, found.facts) == (ANSWERS, FACTS)
    assert load_predictions(write(tmp_path / "p", ANSWERS)).answers == ANSWERS


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([{"id": "a", "answer": "x"}, {"id": "a", "answer": "y"}], "record 2 .*a second prediction for 'a'"),
        ([{"id": "a", "answer": 3}], "'a': expected the answer as a text, found int 3"),
        ([{"id": "a", "answr": "x"}], "expected an answer under .*'answer', found keys 'id', 'answr'"),
        ([{"answer": "x", "n": 1}], "expected a prediction with an id under"),
        ([{"id": "a", "answer": "x", "sp": [["A"]]}], r"expected \[title, sentence number\] pairs"),
        ([{"id": "a", "answer": "x", "predicted_support_idxs": ["1"]}], "expected whole numbers"),
        ([{"id": 1.5, "answer": "x"}], "the id as a string or a whole number"),
        (["x"], r"expected a prediction \(a JSON object\)"),
        ({"answer": {"a": "x"}, "sp": []}, "'sp': expected supporting facts by id"),
        ([], "holds no answers"),
        ([{"root": 3, "void": "x"}], "holds no answers"),
    ],
)
def test_refused_predictions(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_predictions(write(tmp_path / "p", value))
    (tmp_path / "p").write_text('{"a": "x", "b": "y", "a": "z"}', encoding="utf-8")
    with pytest.raises(DataError, match="the key 'a' twice in one object"):
        load_predictions(tmp_path / "p")


def test_scores_by_hand() -> None:
    scores = official_scores(QUESTIONS, ANSWERS, FACTS)
    # b: "no, not" against "no" earns nothing; c: the second gold, whole; d: missing
    assert scores.means["em"] == 2 / 4
    assert scores.means["f1"] == 2 / 4
    # a: one of two facts right: precision 1/2, recall 1/2; b whole; c and d without facts
    assert scores.means["sp_em"] == 1 / 4
    assert scores.means["sp_f1"] == pytest.approx((1 / 2 + 1) / 4)
    # joint: a has answer 1 and facts 1/2; b has no answer
    assert scores.means["joint_em"] == 0
    assert scores.means["joint_f1"] == pytest.approx((1 / 2) / 4)
    assert (scores.missing, scores.unknown) == (("d",), ())
    with pytest.raises(DataError, match="not one of 1 predictions has the id of a question: found 'z'"):
        official_scores(QUESTIONS, {"z": "x"})
    with pytest.raises(DataError, match="no questions"):
        official_scores([], ANSWERS)


def test_musiques_scores() -> None:
    # "no, not" -> words no, not: precision 1/2, recall 1; yes and no are words like others
    scores = official_scores(QUESTIONS, ANSWERS, musique=True)
    assert scores.means["f1"] == pytest.approx((1 + 2 / 3 + 1) / 4)
    assert musique_f1("", "!") == 1
    assert musique_f1("a", "cat") == 0
    asked = [Question("a", "?", ("x",), evidence=(3, 5)), Question("b", "?", ("x",), evidence=(1,))]
    support = official_scores(asked, {"a": "x"}, paragraphs={"a": (5, 7)}, musique=True)
    assert support.means["support_f1"] == pytest.approx((1 / 2) / 2)


def test_facts_as_sets() -> None:
    assert fact_scores([("A", 0), ("A", 0)], [("A", 0)])["em"] == 1
    assert fact_scores([], [("A", 0)]) == {"em": 0, "f1": 0, "precision": 0, "recall": 0}
    assert fact_scores([], [])["em"] == 1  # as the script has it


def test_bootstrap_approaches_the_standard_error() -> None:
    rows = [{"x": float(i % 3 == 0), "one": 1.0} for i in range(300)]
    errors = bootstrap_errors(rows)
    assert errors["x"] == pytest.approx(np.sqrt((1 / 3) * (2 / 3) / 300), rel=0.1)
    assert errors["one"] == 0
    assert bootstrap_errors(rows) == errors


def test_the_hotpotqa_scripts_figures() -> None:
    questions = load_questions(real_file("hotpotqa/benchfortir_dev500.jsonl"))
    said = load_predictions(real_file("predictions/dire_hotpotqa_dev_predictions.jsonl"))
    scores = official_scores(questions, said.answers, said.facts)
    wanted = {"em": 0.498, "f1": 0.6373720114, "sp_em": 0.424, "sp_f1": 0.7992746032}
    for name, value in wanted.items():
        assert scores.means[name] == pytest.approx(value, abs=1e-9)
    assert len(scores.missing) == 3
    assert len(scores.unknown) == 7368 - 497


def test_the_command(tmp_path: Path) -> None:
    questions = write(
        tmp_path / "q",
        [
            {"_id": q.id, "question": "?", "answer": list(q.answers), "supporting_facts": q.supporting}
            for q in QUESTIONS
        ],
    )
    predictions = write(tmp_path / "p", {"answer": {**ANSWERS, "z": "x"}, "sp": FACTS})
    run = CliRunner().invoke(app, ["score", str(predictions), str(questions)])
    assert run.exit_code == 0, run.output
    assert "1 without a prediction, counted 0: d" in run.output
    assert "1 predictions are of other questions" in run.output
    assert "joint_f1" in run.output
    full = json.loads(CliRunner().invoke(app, ["score", str(predictions), str(questions), "--json"]).output)
    assert full["scores"] == official_scores(QUESTIONS, ANSWERS, FACTS).means
    assert (full["script"], full["missing"]) == ("hotpotqa", ["d"])
    other = CliRunner().invoke(app, ["score", str(predictions), str(questions), "--script", "musik"])
    assert "Did you mean 'musique'" in other.stderr


def test_predictions_for_the_embedded_questions_are_scored(tmp_path: Path) -> None:
    asked = minipedia("minipedia:test")
    file = tmp_path / "predictions.json"
    file.write_text(json.dumps({question.id: question.answers[0] for question in asked}))
    result = CliRunner().invoke(app, ["score", str(file), "minipedia:test", "--json"])
    assert json.loads(result.stdout)["scores"]["f1"] == 1.0
