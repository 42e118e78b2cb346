"""A learner of several policies: whose rows move whom, by what, and in which turn."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec

from rllib_mhgpo.algorithms.mhgpo import MHGPOConfig
from rllib_mhgpo.algorithms.objective import PolicyLearner
from rllib_mhgpo.spaces import TokenSequence
from rllib_mhgpo.train_batch import TrainBatch
from tests.test_learner import make_batch
from tests.toys import save_toy


def make_learner(folder: Path, policies: Any = (), **settings: Any) -> PolicyLearner:
    own = {"llm": str(folder), "lr": 1e-2, "kl_beta": 0.04, "grad_clip": None, "policies": policies}
    config = MHGPOConfig().training(**{**own, **settings})
    space = TokenSequence(258, 64)
    spec: MultiRLModuleSpec = config.get_multi_rl_module_spec(spaces=dict.fromkeys(config.policy_names, (space, space)))
    learner = PolicyLearner(config=config, module_spec=spec)
    learner.build()
    return learner


def batch_of(agents: Sequence[str], **changes: Any) -> TrainBatch:
    return make_batch(agents=list(agents), **changes)


def update(learner: PolicyLearner, batch: TrainBatch) -> dict[str, Any]:
    return learner.update(training_data=TrainingData(batch=batch))


def moved(learner: PolicyLearner, policy: str, before: torch.Tensor) -> torch.Tensor:
    return flat(learner, policy) - before


def flat(learner: PolicyLearner, policy: str) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in learner.module[policy].llm.parameters()])


ACTS = ["a", "b", "a", "b", "b", "a"]


def with_sgd(learner: PolicyLearner, rate: float = 0.1) -> PolicyLearner:
    for name, parallel in learner.parallel.items():
        parallel.optimizer = torch.optim.SGD(learner.module[name].llm.parameters(), lr=rate)
    return learner


@pytest.mark.parametrize("epochs", [1, 2])
def test_each_policy_moves_as_a_shared_one_that_had_its_rows_alone(toy_folder: Path, epochs: int) -> None:
    """The denominators are those of all rows, so the others' rows are left out by a weight of 0, not cut away."""
    batch = batch_of(ACTS, steps=np.array([0, 0, 0, 1, 1, 1]))
    apart = with_sgd(make_learner(toy_folder, ["a", "b"], num_epochs=epochs))
    start = flat(apart, "a")
    update(apart, batch)
    assert not torch.equal(flat(apart, "a"), flat(apart, "b"))
    for name in "ab":
        shared = with_sgd(make_learner(toy_folder, num_epochs=epochs))
        mine = np.array([agent == name for agent in ACTS])
        update(shared, replace(batch, weights=np.where(mine, batch.weights, 0.0)))
        expected = moved(shared, "default_policy", start)
        assert expected.abs().max() > 1e-3
        assert torch.allclose(moved(apart, name, start), expected, atol=1e-6 * expected.abs().max().item() + 1e-7)


def test_rows_of_one_policy_do_not_touch_the_other(toy_folder: Path) -> None:
    learner = make_learner(toy_folder, ["a", "b"])
    before = flat(learner, "b")
    batch = batch_of(ACTS)
    mine = np.array([agent == "a" for agent in ACTS])
    result = update(learner, replace(batch, weights=np.where(mine, batch.weights, 0.0)))
    assert torch.equal(flat(learner, "b"), before)
    assert not torch.equal(flat(learner, "a"), before)
    assert [len(result["policies"][name]["grad_norms"]) for name in "ab"] == [1, 0]
    assert result["rows"]["updated"].tolist() == mine.tolist()


def test_each_row_is_scored_by_its_own_policy(toy_folder: Path, tmp_path: Path) -> None:
    other = save_toy(tmp_path / "other", seed=5)
    learner = make_learner(toy_folder, policies={"a": {}, "b": {"llm": str(other)}})
    batch = batch_of(ACTS)
    found = learner.logprobs(batch)
    for name, folder in (("a", toy_folder), ("b", other)):
        alone = make_learner(folder).logprobs(batch)
        for place, agent in enumerate(ACTS):
            assert np.allclose(found[place], alone[place], atol=1e-5) == (agent == name)
    sampled = replace(batch, logprobs=found)
    assert learner.reference_kl(sampled) == pytest.approx(np.zeros(6), abs=1e-4)


def test_a_policy_without_a_finite_gradient_stays_and_the_other_goes_on(toy_folder: Path) -> None:
    learner = make_learner(toy_folder, ["a", "b"])
    before = flat(learner, "a")
    lost = batch_of(ACTS, advantages=np.array([np.inf if agent == "b" else 0.5 for agent in ACTS]))
    for count in (1, 2):
        result = update(learner, lost)
        assert (result["skipped_steps"], result["skipped_in_a_row"]) == (1, count)
        assert {name: its["skipped_steps"] for name, its in result["policies"].items()} == {"a": 0, "b": 1}
    assert torch.equal(flat(learner, "b"), before)
    assert not torch.equal(flat(learner, "a"), before)


def test_roles_in_turn_carry_the_ratio_of_another_policys_role(
    toy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HAPPO as it was meant: a moves first, and b's advantages carry what a's step did to the act before."""
    learner = make_learner(toy_folder, ["a", "b"], kl_beta=0.0)
    lengths = [(5, 3), (9, 2), (4, 4), (8, 5)]
    agents = list("abab")
    fresh = learner.logprobs(make_batch(lengths, agents=agents))
    chained = make_batch(
        lengths, agents=agents, logprobs=fresh, steps=np.array([0, 1, 0, 1]), previous=np.array([-1, 0, -1, 2]),
        weights=np.array([1 / 6, 1 / 4, 1 / 8, 1 / 10]),
    )  # fmt: skip
    seen: list[np.ndarray] = []
    between: list[Any] = []
    accumulate = learner.accumulate

    def watched(batch: TrainBatch, rows: np.ndarray, *more: Any) -> Any:
        seen.append(np.asarray(batch.advantages))
        between.append(learner.logprobs(batch))
        return accumulate(batch, rows, *more)

    monkeypatch.setattr(learner, "accumulate", watched)
    update(learner, chained)
    ratios = [float(np.exp((now - old).sum())) for now, old in zip(between[1], fresh, strict=True)]
    assert np.array(ratios)[[1, 3]] == pytest.approx(1, abs=1e-5)
    assert max(abs(np.array(ratios)[[0, 2]] - 1)) > 1e-2
    assert seen[1][[1, 3]] == pytest.approx(np.asarray(chained.advantages)[[1, 3]] * np.array(ratios)[[0, 2]], rel=1e-4)


def test_roles_in_turn_do_not_carry_the_ratio_of_an_opponent(toy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What chance or a person's function said has log-probability 0 here, and has not moved."""
    learner = make_learner(toy_folder, kl_beta=0.0, opponents={"a": "random"})
    lengths = [(5, 3), (9, 2), (4, 4), (8, 5)]
    batch = make_batch(
        lengths, agents=list("abab"), steps=np.array([0, 1, 0, 1]), previous=np.array([-1, 0, -1, 2]),
        weights=np.array([0.0, 1 / 4, 0.0, 1 / 10]), logprobs=[np.zeros(size, np.float32) for _, size in lengths],
    )  # fmt: skip
    seen: list[np.ndarray] = []
    accumulate = learner.accumulate

    def watched(batch: TrainBatch, rows: np.ndarray, *more: Any) -> Any:
        seen.append(np.asarray(batch.advantages))
        return accumulate(batch, rows, *more)

    monkeypatch.setattr(learner, "accumulate", watched)
    update(learner, batch)
    assert seen[-1][[1, 3]] == pytest.approx(np.asarray(batch.advantages)[[1, 3]])
