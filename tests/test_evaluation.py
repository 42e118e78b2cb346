"""A checkpoint's policy answers as it did in training, without Ray."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rllib_mhgpo.algorithms.checkpoints import find_checkpoint
from rllib_mhgpo.algorithms.evaluation import mean_and_error, open_system
from rllib_mhgpo.algorithms.mhgpo import MHGPOConfig
from rllib_mhgpo.errors import CheckpointError, ConfigError
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
    with pytest.raises(CheckpointError, match="with a policy"):
        open_system(half, {})


def test_standard_errors() -> None:
    """Scores 1, 0, 0, 1: mean 0.5, deviation 0.5, error 0.25; a voided rollout counts 0."""
    played: list[dict[str, Any]] = [{"scores": {"f1": f1}} for f1 in (1.0, 0.0, 1.0)]
    records = [*played, {"void": "x"}]
    assert mean_and_error(records) == {"f1": (0.5, 0.25)}
    assert np.isfinite(mean_and_error(records)["f1"][1])
