"""Every strategy, aggregation and switch of MHGPO as the algorithm runs them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rllib_mhgpo.algorithms.mhgpo import MHGPO
from rllib_mhgpo.train_batch import TrainBatch
from rllib_mhgpo.tree import flatten
from tests.rig import equal, row, weights
from tests.toys import PROMPTS

pytestmark = pytest.mark.usefixtures("ray_session")
Make = Callable[..., MHGPO]
REWARD = "tests.toys:share_of_vowels"


@pytest.mark.parametrize("strategy", ["fof", "rr", "fof_os", "is", "fork_counts"])
@pytest.mark.parametrize("aggregation", ["mean", "max", "min", "random"])
@pytest.mark.parametrize("env", ["search", "parallel_search"])
def test_matrix(make: Make, strategy: str, aggregation: str, env: str, toy_questions_file: Path) -> None:
    """Every strategy with every aggregation on a chain and on a graph: two iterations, finite numbers."""
    n = 3 if env == "search" else 4
    algorithm = make(
        env=env, rollout_strategy=strategy, reward_aggregation=aggregation, group_size=2, questions_per_iteration=2,
        max_response_tokens=3, evaluation_interval=None,
        fork_probs=[1 / n] * n, fork_counts=[1, *[2] * (n - 1)],
        env_config={
            "questions": str(toy_questions_file), "dev_questions": None, "reward": REWARD,
            "prompts": {key: value for key, value in PROMPTS.items() if env == "search" or key != "rewriter"},
        },
    )  # fmt: skip
    for _ in range(2):
        result = row(algorithm)
        assert all(np.isfinite(result[agent]["reward"]) for agent in algorithm.agents)
    assert all(np.isfinite(w).all() for w in weights(algorithm).values())


@pytest.mark.parametrize(
    "changes",
    [
        {"kl_in_reward": True, "kl_beta": 0.1},
        {"propagate_specific": True},
        {"group_key": "prompt"},
        {"advantage_norm": "leave_one_out", "loss_aggregation": "token_mean", "kl_estimator": "k2"},
        {"advantage_norm": "none", "loss_aggregation": "fixed_length", "dual_clip": 3.0},
        {"drop_zero_std": True, "refill_rounds": 2},
        {"entropy_coeff": 0.01, "overlong_filter": True, "overlong_penalty_tokens": 2},
        {"train_agents": ["answerer"]},
        {"reference_refresh": 1},
        {"rollout_is_cap": 2.0, "num_epochs": 2, "minibatch_questions": 1},
        {"kl_beta": 0.0},
        {"sequential_updates": True, "minibatch_questions": 2, "num_epochs": 2},
    ],
    ids=",".join,
)
def test_every_switch_trains(make: Make, changes: dict[str, Any]) -> None:
    algorithm = make(evaluation_interval=None, **changes)
    before = weights(algorithm)
    for _ in range(2):
        result = row(algorithm)
    assert np.isfinite(result["reward"])
    assert not equal(before, weights(algorithm))
    assert all(np.isfinite(w).all() for w in weights(algorithm).values())


def test_agents_that_are_not_trained_carry_no_loss(make: Make) -> None:
    algorithm = make(train_agents=["reranker"])
    flat_trees = flatten(algorithm.sample_trees(), algorithm.agents)
    batch = algorithm.make_batch(flat_trees, algorithm.assign_credit(flat_trees))
    lengths = np.array([len(response) for response in batch.responses])
    assert (batch.weights[flat_trees.agent != 1] == 0).all()
    assert (batch.weights * lengths).sum() == pytest.approx(1)


def test_the_kl_can_be_taken_off_the_reward(make: Make) -> None:
    """At the reference the penalty is 0; after an update it is beta times the summed log-ratio of each response."""
    algorithm = make(kl_in_reward=True, kl_beta=0.5, penalties=False, evaluation_interval=None)
    at_start = flatten(algorithm.sample_trees(), algorithm.agents)
    assert algorithm.assign_credit(at_start)["reward_specific"] == pytest.approx(np.zeros(27), abs=1e-4)
    row(algorithm)
    moved = flatten(algorithm.sample_trees(), algorithm.agents)
    learner = algorithm.learner_group._learner
    ones = np.ones(27)
    batch = TrainBatch.of(moved.generations, ones, ones, np.zeros(27, dtype=np.int64))
    reference = learner.logprobs(batch, learner.policy.reference)
    expected = [-0.5 * float((g.logprobs - ref).sum()) for g, ref in zip(moved.generations, reference, strict=True)]
    assert algorithm.assign_credit(moved)["reward_specific"] == pytest.approx(expected, abs=1e-4)
    assert max(map(abs, expected)) > 1e-2


def test_penalties_of_successors_run_back_when_asked(make: Make) -> None:
    """A chain: with the paper's other reading every agent's reward holds the penalties behind it."""
    chain, other = make(evaluation_interval=None), make(evaluation_interval=None, propagate_specific=True)
    trees = flatten(chain.sample_trees(), chain.agents)
    one, two = chain.assign_credit(trees), other.assign_credit(trees)
    own = one["reward_specific"].reshape(3, 3, 3)
    behind = np.cumsum(own[:, ::-1], axis=1)[:, ::-1] - own
    assert two["reward"] - one["reward"] == pytest.approx(behind.reshape(-1))
    assert (behind != 0).any()


def test_questions_without_spread_are_replaced(make: Make) -> None:
    """With a constant reward and no penalty nothing has spread: every round draws new questions, up to the bound."""
    env_config = {"reward": "tests.test_switches:constant"}
    algorithm = make(
        refill_rounds=1, penalties=False, env_config={**base_env(make), **env_config}, evaluation_interval=None
    )
    first = {tree.root for tree in super(MHGPO, algorithm).sample_trees()}
    assert not first & {tree.root for tree in algorithm.sample_trees()}


def constant(answer: str, golds: Any) -> float:
    return 1.0


def base_env(make: Make) -> dict[str, Any]:
    return dict(make().config.env_config)


def test_the_reference_follows_every_k_iterations(make: Make, tmp_path: Path) -> None:
    algorithm = make(reference_refresh=2, evaluation_interval=None)
    learner = algorithm.learner_group._learner

    def apart() -> float:
        pairs = zip(
            learner.policy.reference.parameters(), learner.module["default_policy"].llm.parameters(), strict=True
        )
        return max(float((a - b).abs().max()) for a, b in pairs)

    row(algorithm)
    assert apart() > 0
    row(algorithm)
    assert apart() == 0
    row(algorithm)
    distance = apart()
    restored = make(reference_refresh=2, evaluation_interval=None)
    restored.restore_from_path(algorithm.save_to_path(tmp_path / "checkpoint"))
    learner = restored.learner_group._learner
    assert apart() == distance > 0
