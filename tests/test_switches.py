"""Every strategy, aggregation and switch of MHGPO as the algorithm runs them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rllib_mhgpo.algorithms.mhgpo import MHGPO, MHGPOConfig
from rllib_mhgpo.credit import group_advantages
from rllib_mhgpo.errors import ConfigError
from rllib_mhgpo.train_batch import TrainBatch
from rllib_mhgpo.tree import FlatTrees, flatten
from tests.rig import equal, row, weights
from tests.toys import PROMPTS, share_of_vowels

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
    assert (algorithm.assign_credit(at_start)["reward_specific"] == 0).all()
    row(algorithm)
    moved = flatten(algorithm.sample_trees(), algorithm.agents)
    learner = algorithm.learner_group._learner
    ones = np.ones(27)
    batch = TrainBatch.of(moved.generations, ones, ones, np.zeros(27, dtype=np.int64))
    reference = learner.logprobs(batch, learner.policy.reference)
    expected = [-0.5 * float((g.logprobs - ref).sum()) for g, ref in zip(moved.generations, reference, strict=True)]
    assert algorithm.assign_credit(moved)["reward_specific"] == pytest.approx(expected, abs=1e-4)
    assert max(map(abs, expected)) > 1e-2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_kl_gives_spread_where_there_is_one_and_rounding_does_not(make: Make, dtype: str) -> None:
    """Equal task rewards: none at the reference, nor with weights that differ in their last digits; some beyond."""
    env_config = {**base_env(make), "reward": "tests.test_switches:constant"}
    algorithm = make(
        kl_in_reward=True, kl_beta=0.05, dtype=dtype, penalties=False, env_config=env_config, evaluation_interval=None
    )
    flat = flatten(algorithm.sample_trees(), algorithm.agents)
    learner = algorithm.learner_group._learner
    start = [tensor.clone() for tensor in learner.policy.llm.parameters()]
    noise = torch.Generator().manual_seed(0)
    for apart, has_spread in ((0.0, False), (1e-7, False), (0.3, True)):
        with torch.no_grad():
            for tensor, begun in zip(learner.policy.llm.parameters(), start, strict=True):
                tensor.copy_(begun * (1 + apart * torch.randn(begun.shape, generator=noise)))
        credit = algorithm.assign_credit(flat)
        assert (credit["advantage"] != 0).any() == (~credit["zero_std"]).any() == has_spread
        assert (credit["reward_specific"] != 0).any() == (apart > 0)


def says_the_same(env: Any, agent: str) -> str:
    return "the same answer"


def test_what_an_opponent_says_costs_nobody_anything(make: Make) -> None:
    """Its text is longer than the limit and unlikely under the policy; neither it nor who acted before it pays."""
    algorithm = make(
        opponents={"answerer": "tests.test_switches:says_the_same"}, kl_in_reward=True, kl_beta=0.1,
        overlong_penalty_tokens=4, propagate_specific=True, penalties=False, evaluation_interval=None,
    )  # fmt: skip
    flat = flatten(algorithm.sample_trees(), algorithm.agents)
    assert max(len(g.response) for g in flat.generations if g.agent == "answerer") > 6
    charged = [{"rewriter": 2, "reranker": 1, "answerer": 0}[g.agent] for g in flat.generations]
    assert all(g.truncated for g in flat.generations if g.agent != "answerer")
    credit = algorithm.assign_credit(flat)
    paid = share_of_vowels("the same answer", ())
    assert credit["reward"] == pytest.approx(paid - np.array(charged))
    assert (credit["reward_specific"][flat.agent == 2] == 0).all()


def by_agent(flat: FlatTrees) -> np.ndarray:
    return np.asarray(flat.agent)


def test_groups_of_ones_own_are_kept_and_leave_the_batch_alone(make: Make) -> None:
    """All of an agent's generations are one group, those before the fork too, though they are alone of a question."""
    algorithm = make(group_key="tests.test_switches:by_agent", rollout_strategy="rr", fork_probs=[0.0, 1.0, 0.0])
    flat = flatten(algorithm.sample_trees(), algorithm.agents)
    agents = flat.agent.copy()
    assert np.bincount(agents).tolist() == [3, 9, 9]
    credit = algorithm.assign_credit(flat)
    assert np.array_equal(flat.agent, agents)
    assert np.array_equal(credit["group"], agents)
    assert credit["advantage"] == pytest.approx(group_advantages(credit["reward"], agents).values)
    assert not credit["singleton"].any()
    assert (algorithm.make_batch(flat, credit).weights > 0).all()
    with pytest.raises(ValueError, match="read-only"):
        flat.agent[0] = 1


def too_few(flat: FlatTrees) -> list[int]:
    return [0]


def test_a_group_key_that_does_not_fit_is_refused(make: Make) -> None:
    algorithm = make(group_key="tests.test_switches:too_few")
    with pytest.raises(ConfigError, match=r"group_key: tests.test_switches:too_few: expected one value for each of 27"):
        row(algorithm)


def test_a_prompt_that_nobody_shares_has_no_advantage(make: Make) -> None:
    """With groups by prompt only who is alone of its question too is pooled, and with ``is`` nobody is."""
    by_prompts = make(group_key="prompt")
    flat = flatten(by_prompts.sample_trees(), by_prompts.agents)
    credit = by_prompts.assign_credit(flat)
    assert not credit["singleton"].any()
    prompts = [(g.agent, g.prompt.tobytes()) for g in flat.generations]
    lone = np.array([prompts.count(prompt) == 1 for prompt in prompts])
    assert lone.any()
    assert (credit["advantage"][lone] == 0).all()
    independent = make(rollout_strategy="is")
    trees = independent.sample_trees()
    for tree in trees:
        for other in [g for g in tree.generations if g.agent == "answerer" and g.trained][1:]:
            other.trained = False
    flat = flatten(trees, independent.agents)
    survivors = flat.trained & (flat.agent == 2)
    credit = independent.assign_credit(flat)
    assert credit["singleton"][survivors].tolist() == [True] * 3
    assert (credit["advantage"][survivors] == 0).all()
    assert len(set(credit["group"][survivors])) == 3


def test_penalties_of_successors_run_back_when_asked(make: Make) -> None:
    """A chain: with the paper's other reading every agent's reward holds the penalties behind it."""
    chain, other = make(evaluation_interval=None), make(evaluation_interval=None, propagate_specific=True)
    trees = flatten(chain.sample_trees(), chain.agents)
    one, two = chain.assign_credit(trees), other.assign_credit(trees)
    own = one["reward_specific"].reshape(3, 3, 3)
    behind = np.cumsum(own[:, ::-1], axis=1)[:, ::-1] - own
    assert two["reward"] - one["reward"] == pytest.approx(behind.reshape(-1))
    assert (behind != 0).any()


def test_questions_without_spread_are_replaced_by_others_than_before(make: Make) -> None:
    """With a constant reward nothing has spread: of 8 questions 3, 3 and the last 2 are drawn, none twice."""
    env_config = {**base_env(make), "reward": "tests.test_switches:constant"}
    algorithm = make(refill_rounds=9, penalties=False, env_config=env_config, evaluation_interval=None)
    drawn, roll_out = list[list[int]](), algorithm.roll_out
    algorithm.roll_out = lambda roots: drawn.append(list(roots)) or roll_out(roots)  # type: ignore[func-returns-value, method-assign]
    kept = [tree.root for tree in algorithm.sample_trees()]
    assert [len(roots) for roots in drawn] == [3, 3, 2]
    assert sorted(root for roots in drawn for root in roots) == list(range(8))
    assert kept == [*drawn[2], drawn[1][2]]


def test_what_carries_no_loss_keeps_no_question(make: Make) -> None:
    """Only penalties of the reranker, which is not trained, differ: there is nothing to learn from."""
    env_config = {**base_env(make), "reward": "tests.test_switches:constant"}
    algorithm = make(refill_rounds=1, train_agents=["answerer"], env_config=env_config, evaluation_interval=None)
    trees = super(MHGPO, algorithm).sample_trees()
    for tree in trees:
        next(g for g in tree.generations if g.agent == "reranker").specific -= 1.0
        for answer in (g for g in tree.generations if g.agent == "answerer"):
            answer.specific = 0.0
    assert algorithm._without_spread(trees).tolist() == [0, 1, 2]


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


def test_an_opponent_is_not_charged_for_length_and_may_say_less() -> None:
    limits = {"rewriter": 64, "reranker": 8, "answerer": 64}
    changes = {"overlong_penalty_tokens": 16, "max_response_tokens": limits}
    MHGPOConfig.check({**changes, "opponents": {"reranker": "random"}})
    with pytest.raises(ConfigError, match="at most max_response_tokens = 8, found 16"):
        MHGPOConfig.check(changes)
