"""Environments that know nothing of this package but its space: trained, failing, endless, with agents that come."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pettingzoo import AECEnv

from rllib_mhgpo.algorithms.grpo import GRPOConfig
from rllib_mhgpo.algorithms.llm_algorithm import LLMAlgorithm
from rllib_mhgpo.algorithms.mappo import MAPPOConfig
from rllib_mhgpo.algorithms.mhgpo import MHGPOConfig
from rllib_mhgpo.engines import Completion, Engine
from rllib_mhgpo.errors import ConfigError, MHGPOError
from rllib_mhgpo.sampling import ForkOnFirst, Options
from rllib_mhgpo.spaces import TokenSequence
from rllib_mhgpo.tree import RolloutTree
from rllib_mhgpo.waves import Play, play
from tests.rig import equal, row, weights


class Foreign(AECEnv):
    """Agents speak in turn; the last one to speak is paid by its ids, and all end together."""

    metadata = {"name": "foreign_v0", "is_parallelizable": False}  # noqa: RUF012  # PettingZoo's way

    def __init__(self, count: int = 2, fault: str = "") -> None:
        self.possible_agents = [f"agent_{i}" for i in range(count)]
        self.fault, self.space = fault, TokenSequence(258, 1024)

    def observation_space(self, agent: str) -> TokenSequence:
        return self.space

    def action_space(self, agent: str) -> TokenSequence:
        return self.space

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        if self.fault == "reset":
            raise OSError("no disk")
        self.agents = self.possible_agents[:1] if self.fault == "comes" else list(self.possible_agents)
        self.root = (options or {}).get("index", 0)
        self._reset_dicts(self.agents)
        self.agent_selection, self.turn = self.agents[0], 0

    def _reset_dicts(self, agents: list[str]) -> None:
        self.rewards, self._cumulative_rewards = dict.fromkeys(agents, 0.0), dict.fromkeys(agents, 0.0)
        self.terminations, self.truncations = dict.fromkeys(agents, False), dict.fromkeys(agents, False)
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in agents}

    def observe(self, agent: str) -> Any:
        return np.array([65 + self.root % 20, 66 + self.turn % 20], dtype=np.int32)

    def step(self, action: Any) -> None:
        if self.terminations[self.agent_selection]:
            self._was_dead_step(action)
            return
        if self.fault == "step" and len(action) and action[0] % 3 == 0:
            raise KeyError("score")
        self.turn += 1
        self._clear_rewards()
        if self.fault == "comes" and self.turn == 1:
            self.agents.append("agent_1")
            for table, value in ((self.rewards, 0.0), (self._cumulative_rewards, 0.0)):
                table["agent_1"] = value
            self.terminations["agent_1"], self.truncations["agent_1"], self.infos["agent_1"] = False, False, {}
        if self.fault == "stranger":
            self.agent_selection = "nobody"
            return
        if self.turn >= len(self.possible_agents) and self.fault != "endless":
            self.rewards = dict.fromkeys(self.agents, float(np.mean(np.asarray(action) % 2 == 0)) if len(action) else 0)
            self.terminations = dict.fromkeys(self.agents, True)
        else:
            self.agent_selection = self.possible_agents[self.turn % len(self.possible_agents)]
        self._accumulate_rewards()


Make = Callable[..., LLMAlgorithm]


@pytest.fixture
def train(toy_folder: Path, request: pytest.FixtureRequest) -> Make:
    def build(config_class: Any = MHGPOConfig, **changes: Any) -> LLMAlgorithm:
        settings = {
            "env": "tests.test_foreign_env:Foreign", "llm": str(toy_folder), "questions_per_iteration": 3,
            "group_size": 3, "max_response_tokens": 6, "lr": 1e-2, "seed": 1,
        }  # fmt: skip
        algorithm: LLMAlgorithm = config_class().update_from_dict({**settings, **changes}).build_algo()
        request.addfinalizer(algorithm.stop)
        return algorithm

    return build


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("config", [MHGPOConfig, MAPPOConfig, GRPOConfig])
def test_a_foreign_environment_trains_under_every_algorithm(config: Any, train: Make) -> None:
    agents = 1 if config is GRPOConfig else 2
    algorithm = train(config, env_config={"count": agents})
    before = weights(algorithm)
    for _ in range(2):
        result = row(algorithm)
    assert not equal(before, weights(algorithm))
    assert result["num_generations"] == 3 * 3 * agents
    assert 0 < result["agent_0"]["reward_shared"] <= 1


@pytest.mark.usefixtures("ray_session")
def test_what_an_environment_raises_stops_the_run_or_voids_the_rollout(train: Make) -> None:
    with pytest.raises(KeyError, match="score"):
        row(train(env_config={"fault": "step"}))
    result = row(train(env_config={"fault": "step"}, env_errors="void", group_size=8))
    assert 0 < result["num_voided"] < 3 * 8
    with pytest.raises(MHGPOError, match=r"every rollout was voided; the first: question .*OSError: no disk"):
        row(train(env_config={"fault": "reset"}, env_errors="void"))


@pytest.mark.usefixtures("ray_session")
def test_opponents_play_and_carry_no_loss(train: Make) -> None:
    opponents = {"agent_1": "tests.test_foreign_env:says_one_letter"}
    algorithm = train(opponents=opponents, env_config={"count": 2})
    result = row(algorithm)
    assert result["agent_1"]["response_tokens"] == 1
    assert result["num_tokens_trained"] == result["agent_0"]["num_generations"] * result["agent_0"]["response_tokens"]
    for wrong, said in [({"agent_9": "past"}, "expected some of"), ({"agent_0": "past", "agent_1": "past"}, "not all")]:
        with pytest.raises(ConfigError, match=said):
            train(opponents=wrong)
    with pytest.raises(ConfigError, match=r"random needs a method random_reply\(agent\) of Foreign"):
        row(train(opponents={"agent_1": "random"}))


def says_one_letter(env: Any, agent: str) -> str:
    return "B"


@pytest.mark.usefixtures("ray_session")
def test_the_past_policy_stays_until_it_is_refreshed(train: Make) -> None:
    algorithm: Any = train(opponents={"agent_1": "past"}, opponent_refresh=2)
    opponents = algorithm.env_runner.opponents
    begun = weights(algorithm)
    row(algorithm)
    assert equal(played(opponents), begun)
    assert not equal(weights(algorithm), begun)
    row(algorithm)
    assert equal(played(opponents), begun)
    second = weights(algorithm)
    row(algorithm)
    assert equal(played(opponents), second)


def played(opponents: Any) -> dict[str, np.ndarray]:
    """The weights of the engine that plays agent_1, those that the policy has by name."""
    model = opponents.engine.others["agent_1"].model
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: named[name].detach().numpy().copy() for name in model.state_dict() if name in named}


@pytest.mark.usefixtures("ray_session")
@pytest.mark.parametrize("runners", [0, 1])
def test_what_the_past_policy_says_is_said_with_earlier_weights(train: Make, runners: int) -> None:
    """Each response of the opponent has the log-probabilities that the policy had when its period began, no others."""
    algorithm: Any = train(
        opponents={"agent_1": "past"}, opponent_refresh=2, num_env_runners=runners, num_cpus_for_main_process=0.5,
        num_cpus_per_env_runner=0.5,
    )  # fmt: skip
    trees: list[RolloutTree] = []
    sample = algorithm.sample_trees

    def kept() -> list[RolloutTree]:
        trees[:] = sample()
        return trees

    algorithm.sample_trees = kept
    learners = algorithm.learners
    for iteration in range(4):
        if iteration % 2 == 0:
            earlier = learners.each(lambda learner: copy.deepcopy(learner.policy.llm))[0]
        present = learners.each(lambda learner: copy.deepcopy(learner.policy.llm))[0]
        row(algorithm)
        said = [g for tree in trees for g in tree.generations if g.agent == "agent_1"]
        own = [g for tree in trees for g in tree.generations if g.agent == "agent_0"]
        assert apart(earlier, said) < 1e-4
        assert apart(present, own) < 1e-4
        assert (apart(present, said) > 1e-3) == (iteration % 2 == 1)


def apart(llm: Any, said: list[Any]) -> float:
    """Largest difference between recorded log-probabilities and a model's."""
    largest = 0.0
    for generation in said:
        ids = torch.from_numpy(np.concatenate([generation.prompt, generation.response]).astype(np.int64))[None]
        with torch.no_grad():
            logits = llm(ids).logits[0, len(generation.prompt) - 1 : -1]
        logp = torch.log_softmax(logits, -1).gather(1, ids[0, len(generation.prompt) :, None])[:, 0].numpy()
        largest = max(largest, float(np.abs(logp - generation.logprobs).max()))
    return largest


@pytest.mark.usefixtures("ray_session")
def test_a_run_against_its_past_goes_on_as_if_it_had_not_stopped(train: Make, tmp_path: Path) -> None:
    """Restored in the middle of a period: the opponent is the policy of its beginning, not the restored one."""
    settings: dict[str, Any] = {"opponents": {"agent_1": "past"}, "opponent_refresh": 4}
    whole, first, second = (train(**settings) for _ in range(3))
    for _ in range(6):
        expected = row(whole)
    begun = weights(first)
    for _ in range(3):
        row(first)
    second.restore_from_path(first.save_to_path(tmp_path / "checkpoint"))
    assert equal(played(second.env_runner.opponents), begun)
    assert not equal(weights(second), begun)
    for _ in range(3):
        result = row(second)
    assert equal(weights(whole), weights(second))
    assert result["agent_1"]["reward"] == expected["agent_1"]["reward"]


class Speaker(Engine):
    """An engine that says one letter."""

    def generate(self, prompts: Any, temperature: float) -> Any:
        said = Completion(np.array([65], np.int32), np.zeros(1, np.float32), truncated=False)
        return [[said] * len(prompt.seeds) for prompt in prompts]

    def load_weights(self, weights: Any) -> None:
        """Has none."""


def roll(env: Foreign, **how: Any) -> RolloutTree:
    return play(env, Speaker(), [0], Play(ForkOnFirst(Options(2, 2)), 1.0, 4, (0,), **how), {})[0]


def test_an_episode_that_never_ends_is_voided_at_the_turn_limit() -> None:
    tree = roll(Foreign(fault="endless"), max_turns=5)
    assert tree.generations == []
    assert tree.void == ["question 0: agent 'agent_1': the episode has not ended after max_turns = 5 acts."] * 2


@pytest.mark.usefixtures("ray_session")
def test_a_run_goes_on_with_agents_that_come_and_without_episodes_that_do_not_end(train: Make) -> None:
    result = row(train(env_config={"fault": "comes"}))
    assert result["agent_1"]["num_generations"] == 9
    assert result["num_voided"] == 0
    with pytest.raises(MHGPOError, match=r"every rollout was voided.*has not ended after max_turns = 4 acts"):
        row(train(env_config={"fault": "endless"}, max_turns=4))


def test_agents_may_come_on_the_way() -> None:
    tree = roll(Foreign(fault="comes"))
    assert [g.agent for g in tree.generations] == ["agent_0", "agent_0", "agent_1", "agent_1"]
    assert [g.shared for g in tree.generations][2:] == [{}, {}]


def test_an_agent_that_nobody_announced_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'nobody' is to act, but possible_agents has only \['agent_0', 'agent_1'\]"):
        roll(Foreign(fault="stranger"))
