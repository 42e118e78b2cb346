"""A checkpoint's policy answers as it did in training, without Ray."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from rllib_mhgpo.algorithms.checkpoints import find_checkpoint
from rllib_mhgpo.algorithms.evaluation import mean_and_error, open_system
from rllib_mhgpo.algorithms.mhgpo import MHGPOConfig
from rllib_mhgpo.cli import app
from rllib_mhgpo.cli.evaluate import format_scores
from rllib_mhgpo.data import load_corpus, load_questions
from rllib_mhgpo.errors import CheckpointError, ConfigError
from rllib_mhgpo.metrics import score_predictions
from rllib_mhgpo.retrieval import build_retriever, save_retriever
from tests.real_data import real_file
from tests.toys import PROMPTS


@pytest.fixture(scope="module")
def checkpoint(
    toy_folder: Path, toy_questions_file: Path, tmp_path_factory: pytest.TempPathFactory, ray_session: None
) -> tuple[Path, dict[str, float]]:
    questions = str(toy_questions_file)
    config = MHGPOConfig().update_from_dict(
        {
            "llm": str(toy_folder), "questions_per_iteration": 2, "group_size": 2, "max_response_tokens": 5, "lr": 1e-2,
            "env_config": {"questions": questions, "dev_questions": questions, "prompts": PROMPTS},
        }
    )  # fmt: skip
    algorithm = config.build_algo()
    algorithm.train()
    dev = algorithm.evaluate()
    path = Path(algorithm.save_to_path(tmp_path_factory.mktemp("run") / "checkpoint_000000"))
    algorithm.stop()
    return path, dev


def test_the_scores_are_those_of_training(checkpoint: tuple[Path, dict[str, float]]) -> None:
    path, dev = checkpoint
    records = [record for wave in open_system(path, {}).answers("dev", wave=3) for record in wave]
    assert [record["id"] for record in records] == [f"q{i}" for i in range(8)]
    scores = mean_and_error(records)
    assert {name: scores[name][0] for name in ("f1", "em", "acc")} == {name: dev[name] for name in ("f1", "em", "acc")}
    json.dumps(records)


def test_other_questions_and_a_limit(checkpoint: tuple[Path, dict[str, float]], toy_questions_file: Path) -> None:
    system = open_system(checkpoint[0], {"questions": str(toy_questions_file), "dev_questions": None})
    (wave,) = system.answers("train", limit=3)
    assert [record["question"] for record in wave] == ["what is 0?", "what is 1?", "what is 2?"]
    assert set(wave[0]["outputs"]) == {"rewriter", "reranker", "answerer"}
    with pytest.raises(ConfigError, match="no roots in split 'dev'"):
        list(system.answers("dev"))


def test_the_last_checkpoint_of_a_run_is_found(checkpoint: tuple[Path, dict[str, float]], tmp_path: Path) -> None:
    shutil.copytree(checkpoint[0], tmp_path / "trial" / "checkpoint_000003")
    assert find_checkpoint(tmp_path) == tmp_path / "trial" / "checkpoint_000003"


def test_what_is_no_checkpoint_is_refused(checkpoint: tuple[Path, dict[str, float]], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="found neither"):
        open_system(tmp_path, {})
    with pytest.raises(CheckpointError, match="nothing there"):
        open_system(tmp_path / "missing", {})
    half = tmp_path / "half"
    half.mkdir()
    shutil.copy(checkpoint[0] / "rllib_checkpoint.json", half)
    with pytest.raises(CheckpointError, match=r"expected a policy in .*found none"):
        open_system(half, {})


def test_standard_errors() -> None:
    """Scores 1, 0, 0, 1: mean 0.5, deviation 0.5, error 0.25; a voided rollout counts 0."""
    played: list[dict[str, Any]] = [{"scores": {"f1": f1}} for f1 in (1.0, 0.0, 1.0)]
    records = [*played, {"void": "x"}]
    assert mean_and_error(records) == {"f1": (0.5, 0.25)}
    assert np.isfinite(mean_and_error(records)["f1"][1])


def write(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


TWO_WIKI = {
    "_id": "w0", "type": "comparison", "question": "which is older?", "answer": "A", "evidences": [["A", "year", "1"]],
    "supporting_facts": [["A", 0], ["B", 9]], "context": [["A", ["A is of 1."]], ["B", ["B is of 2."]]],
}  # fmt: skip
MUSIQUE = {
    "id": "2hop__m0", "question": "where is it?", "answer": "Rome", "answer_aliases": ["Roma"], "answerable": True,
    "question_decomposition": [{"paragraph_support_idx": 0}],
    "paragraphs": [{"idx": 0, "title": "It", "paragraph_text": "It is in Rome.", "is_supporting": True}],
}  # fmt: skip


def evaluated(checkpoint: Path, sets: dict[Path, Path | str], out: Path, *more: str) -> None:
    """Evaluates in one command, and checks the table against the scores of the predictions that were written."""
    command = ["evaluate", str(checkpoint), "--out", str(out), *more]
    for questions, corpus in sets.items():
        command += ["--questions", str(questions), "--corpus", str(corpus)]
    told = CliRunner().invoke(app, command, catch_exceptions=False, env={"COLUMNS": "400"})
    assert told.exit_code == 0, told.output
    table = [line for line in told.stdout.splitlines() if line.startswith(("│", "┃"))]
    assert re.findall(r"\w+", table[0]) == ["questions", "Acc", "EM", "F1", "AVG", "n"]
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    for name, line in zip(sets, table[1:], strict=True):
        answers = {row["id"]: row["answer"] for row in records if row["questions"] == str(name)}
        asked = [q for q in load_questions(name, require_context=False) if q.id in answers]
        scores = score_predictions(asked, answers)
        keys = ("acc", "em", "f1", "avg")
        wanted = [f"{100 * scores.means[key]:.2f} ± {100 * scores.standard_errors[key]:.2f}" for key in keys]
        cells = [cell.strip() for cell in re.split("[│┃]", line)[2:-1]]
        assert cells == [*wanted, str(len(answers))]
        assert answers


def test_a_trained_checkpoint_on_other_data_sets(
    checkpoint: tuple[Path, dict[str, float]], toy_questions_file: Path, tmp_path: Path
) -> None:
    wiki, musique = write(tmp_path / "2wiki.json", [TWO_WIKI]), write(tmp_path / "musique.json", [MUSIQUE])
    corpus = write(
        tmp_path / "corpus.json", [{"title": "It", "text": "It is in Rome."}, {"title": "It", "text": "No."}]
    )
    evaluated(checkpoint[0], {toy_questions_file: "own", wiki: "own", musique: corpus}, tmp_path / "out.jsonl")


def test_a_trained_checkpoint_on_the_published_files(checkpoint: tuple[Path, dict[str, float]], tmp_path: Path) -> None:
    sets: dict[Path, Path | str] = {
        real_file("hotpotqa/hipporag_train100.json"): "own",
        real_file("2wiki/migres_train500.json"): "own",
        real_file("musique/hipporag_train100.json"): real_file("musique/hipporag_train100_corpus.json"),
    }
    evaluated(checkpoint[0], sets, tmp_path / "out.jsonl", "--limit", "2")


def test_the_lines_of_the_documentation_ask_a_checkpoint(
    checkpoint: tuple[Path, dict[str, float]],
    toy_questions_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_retriever(build_retriever(load_corpus(toy_questions_file)), tmp_path / "ix")
    page = (Path(__file__).parent.parent / "docs" / "data.md").read_text(encoding="utf-8").partition("## Asking")[2]
    (lines,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(lines.replace("CHECKPOINT", str(checkpoint[0])).replace("wiki-index", str(tmp_path / "ix")), scope)
    record = scope["system"].ask("Where was the author of Red Sand born?")
    assert capsys.readouterr().out == record["answer"] + "\n"
    assert {passage["title"] for passage in record["passages"]} <= {f"{kind}{i}" for kind in "PQ" for i in range(8)}


def test_scores_are_percents_in_their_usual_order_and_voided_ones_count_zero() -> None:
    # acc 0, 0, 1, 1: mean 1/2, standard deviation 1/2, error 1/2 / sqrt(4)
    records: list[dict[str, Any]] = [{"scores": {"f1": x, "acc": x}} for x in (0.0, 1.0, 1.0)]
    shown = format_scores([*records, {"id": "q3", "void": "no prompt fits"}])
    assert shown == "Acc 50.00 ± 25.00 | F1 50.00 ± 25.00 | 4 questions | 1 voided, counted 0: q3"
