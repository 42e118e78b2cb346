"""MAPPO: value targets and losses on worked numbers, the critic's part in a run, and what it shares with MHGPO."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray.rllib.core.learner.training_data import TrainingData

from rllib_mhgpo.algorithms.mappo import MAPPO, MAPPOConfig, paid_at_end
from rllib_mhgpo.credit import explained_variance, gae, gae_over_turns, whiten
from rllib_mhgpo.envs.token_env import Messages, TokenEnv
from rllib_mhgpo.errors import CheckpointError, ConfigError, ModelError
from rllib_mhgpo.losses import clipped_value_loss
from rllib_mhgpo.tree import flatten
from tests.rig import equal, row, weights
from tests.toys import PROMPTS, save_toy, share_of_vowels

Make = Callable[..., MAPPO]


# --- worked numbers ----------------------------------------------------------------------------------------------


def test_a_response_is_paid_at_its_last_token() -> None:
    """gamma 0.5, lambda 1: returns are 0.25, 0.5, 1 and advantages what values lack."""
    values = np.array([0.1, 0.2, 0.3])
    advantages = gae(paid_at_end(3, 1.0), values, gamma=0.5, lambda_=1.0)
    assert advantages + values == pytest.approx([0.25, 0.5, 1.0])
    assert gae(paid_at_end(3, 1.0), values, 1.0, 0.0) == pytest.approx([0.1, 0.1, 0.7])


def of_one_team(
    earned: np.ndarray, values: np.ndarray, previous: list[int], gamma: float = 1.0, lambda_: float = 1.0
) -> np.ndarray:
    zeros = np.zeros(len(values))
    return gae_over_turns(earned[:, None], zeros, values, np.array(previous), zeros.astype(int), gamma, lambda_)


def test_turns_one_after_the_other() -> None:
    """Rewards 0, -0.5, 1; values 0.2, 0.4, 0.6; gamma 0.9, lambda 0.5."""
    earned, values = np.array([0.0, -0.5, 1.0]), np.array([0.2, 0.4, 0.6])
    third = 1.0 - 0.6
    second = -0.5 + 0.9 * 0.6 - 0.4 + 0.9 * 0.5 * third
    first = 0.9 * 0.4 - 0.2 + 0.9 * 0.5 * second
    assert of_one_team(earned, values, [-1, 0, 1], 0.9, 0.5) == pytest.approx([first, second, third])


def test_where_a_trajectory_forks_the_mean_follows() -> None:
    earned, values = np.array([0.0, 1.0, 0.0]), np.array([0.3, 0.4, 0.2])
    first, *others = of_one_team(earned, values, [-1, 0, 0])
    assert others == pytest.approx([0.6, -0.2])
    assert first == pytest.approx(0.3 - 0.3 + (0.6 - 0.2) / 2)


def test_each_team_has_turns_of_its_own() -> None:
    """X, O, X, O moves; X is paid 1 at its second, O 0.5 at its first; gamma 0.9, lambda 0.5, values 0.1 to 0.4."""
    shared, team = np.array([[0.0, 0.0], [-0.5, 0.5], [1.0, -1.0], [0.0, 0.25]]), np.array([0, 1, 0, 1])
    specific, values = np.array([0.0, -0.2, 0.0, 0.0]), np.array([0.1, 0.2, 0.3, 0.4])
    last_o = 0.25 - 0.4
    first_o = -0.2 + 0.5 - 1.0 + 0.9 * 0.4 - 0.2 + 0.9 * 0.5 * last_o
    last_x = 1.0 - 0.3
    first_x = -0.5 + 0.9 * 0.3 - 0.1 + 0.9 * 0.5 * last_x
    previous = np.array([-1, 0, 1, 2])
    found = gae_over_turns(shared, specific, values, previous, team, 0.9, 0.5)
    assert found == pytest.approx([first_x, first_o, last_x, last_o])
    # acts that are no turns of a learner are steps of the environment: what they pay goes to the turn before
    alone = gae_over_turns(shared, specific, values, previous, team, 0.9, 0.5, np.array([True, False, False, False]))
    assert alone == pytest.approx([-0.5 + 1.0 - 0.1, 0, 0, 0])


def test_a_perfect_critic_leaves_no_advantage_at_lambda_0() -> None:
    assert gae(paid_at_end(4, 0.7), np.full(4, 0.7), 1.0, 0.0) == pytest.approx(np.zeros(4))
    assert of_one_team(np.array([0.0, 0.7]), np.full(2, 0.7), [-1, 0], 1.0, 0.0) == pytest.approx([0, 0])


def test_advantages_are_whitened_by_pool_over_tokens() -> None:
    advantages = [np.array([1.0, 2.0]), np.array([3.0]), np.array([5.0, 5.0]), np.array([100.0])]
    first, second, third, fourth = whiten(advantages, np.array([0, 0, 1, -1]))
    assert np.concatenate([first, second]) == pytest.approx(np.array([-1, 0, 1]) / np.sqrt(2 / 3))
    assert third.tolist() == [0, 0]
    assert fourth.tolist() == [0]


def test_the_value_loss_takes_the_worse_of_clipped_and_unclipped() -> None:
    values, old, returns = torch.tensor([1.0, 0.1, -1.0]), torch.zeros(3), torch.tensor([1.0, 1.0, 1.0])
    assert clipped_value_loss(values, old, returns).tolist() == pytest.approx([0, 0.405, 2.0])
    assert clipped_value_loss(values, old, returns, 0.2).tolist() == pytest.approx([0.32, 0.405, 2.0])


def test_explained_variance() -> None:
    returns = np.array([0.0, 1.0, 2.0])
    assert explained_variance(np.zeros(3), returns) == 0
    assert explained_variance(returns / 2, returns) == pytest.approx(0.75)
    assert np.isnan(explained_variance(returns, np.ones(3)))


# --- runs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def mappo(config: Callable[..., Any], request: pytest.FixtureRequest, ray_session: None) -> Make:
    def build(**changes: Any) -> MAPPO:
        settings = config().to_dict()
        keys = ("llm", "questions_per_iteration", "group_size", "max_response_tokens", "lr", "seed", "env_config")
        kept = {key: settings[key] for key in keys}
        made = MAPPOConfig().update_from_dict({**kept, "critic_lr": 1e-2, "evaluation_interval": None, **changes})
        algorithm: MAPPO = made.build_algo()
        request.addfinalizer(algorithm.stop)
        return algorithm

    return build


def critic(algorithm: MAPPO) -> dict[str, np.ndarray]:
    state = algorithm.learner_group.get_state(components="learner/rl_module")["learner"]["rl_module"]
    return {name: np.array(values) for name, values in state["critic"].items()}


def test_an_iteration_trains_policy_and_critic(mappo: Make) -> None:
    algorithm = mappo()
    policy, values = weights(algorithm), critic(algorithm)
    result = row(algorithm)
    assert not equal(policy, weights(algorithm))
    assert not equal(values, critic(algorithm))
    assert result["value_mean"] == 0  # the head starts at 0
    for column in ("explained_variance", "value_mean", "value_loss"):
        assert np.isfinite(result["reranker"][column])
    assert result["critic_grad_norm"] > 0
    assert row(algorithm)["value_mean"] != 0


def test_returns_are_rewards_and_advantages_are_white(mappo: Make) -> None:
    """gamma and lambda 1: every token's target is the reward of its response."""
    algorithm = mappo()
    row(algorithm)
    flat = flatten(algorithm.sample_trees(), algorithm.agents)
    credit = algorithm.assign_credit(flat)
    for target, reward in zip(credit["return"], credit["reward"], strict=True):
        assert target == pytest.approx(np.full(len(target), reward), abs=1e-6)
    for agent in range(3):
        tokens = np.concatenate(list(credit["token_advantage"][flat.agent == agent]))
        assert (tokens.mean(), tokens.std()) == pytest.approx((0, 1), abs=1e-6)


def test_values_are_those_of_unpadded_rows(mappo: Make) -> None:
    algorithm = mappo()
    row(algorithm)
    learner = algorithm.learner_group._learner
    flat = flatten(algorithm.sample_trees(), algorithm.agents)
    found = algorithm.assign_credit(flat)["value"]
    model = learner.module["critic"].llm
    for generation, values in zip(flat.generations, found, strict=True):
        tokens = torch.from_numpy(np.concatenate([generation.prompt, generation.response]).astype(np.int64))[None]
        with torch.no_grad():
            plain = model(tokens).logits[0, len(generation.prompt) - 1 : -1, 0]
        assert values == pytest.approx(plain.numpy(), abs=1e-5)


def test_the_first_iterations_may_warm_up_the_critic_alone(mappo: Make) -> None:
    algorithm = mappo(critic_warmup=1)
    policy, values = weights(algorithm), critic(algorithm)
    row(algorithm)
    assert equal(policy, weights(algorithm))
    assert not equal(values, critic(algorithm))
    row(algorithm)
    assert not equal(policy, weights(algorithm))


def test_the_global_critic_reads_what_was_said_before(mappo: Make) -> None:
    algorithm = mappo(critic_input="global")
    (tree, *_) = algorithm.sample_trees()
    flat = flatten([tree], algorithm.agents)
    prompts = algorithm.assign_credit(flat)["critic_prompt"]
    first, second, third = (tree.generations[i] for i in tree.trajectory(next(iter(tree.leaves()))))
    rows = tree.trajectory(next(iter(tree.leaves())))
    assert prompts[rows[0]].tolist() == first.prompt.tolist()
    read = np.concatenate([first.prompt, first.response, second.prompt, second.response, third.prompt])
    assert prompts[rows[2]].tolist() == read.tolist()
    row(algorithm)


def test_the_global_critic_reads_no_more_than_its_own_context(mappo: Make, tmp_path: Path) -> None:
    """A critic of 60 tokens beside a policy of 1,024: the oldest of what was said goes."""
    file = save_toy(tmp_path / "short") / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "max_position_embeddings": 60}))
    algorithm = mappo(critic_input="global", critic_llm=str(file.parent), max_prompt_tokens=54)
    flat = flatten(algorithm.sample_trees(), algorithm.agents)
    read = algorithm.assign_credit(flat)["critic_prompt"]
    sizes = [len(prompt) + len(g.response) for prompt, g in zip(read, flat.generations, strict=True)]
    assert max(sizes) == 60


@pytest.mark.parametrize("strategy", ["fof", "rr", "fof_os", "is"])
def test_turns_train_with_every_strategy(mappo: Make, strategy: str) -> None:
    algorithm = mappo(gae_level="turn", gamma=0.99, lambda_=0.9, rollout_strategy=strategy, critic_input="global")
    for _ in range(2):
        result = row(algorithm)
    assert np.isfinite(result["reward"])
    assert np.isfinite(result["value_loss"])
    assert all(np.isfinite(w).all() for w in (*weights(algorithm).values(), *critic(algorithm).values()))


def test_a_turn_weighs_what_its_tokens_do(mappo: Make) -> None:
    """Only its first token has a target, and stands for the others; the head starts at 0."""
    algorithm = mappo(gae_level="turn", value_clip=None)
    flat = flatten(algorithm.sample_trees(), algorithm.agents)
    credit = algorithm.assign_credit(flat)
    batch = algorithm.make_batch(flat, credit)
    learner = algorithm.learner_group._learner
    found = learner.update(training_data=TrainingData(batch=batch))["rows"]["measured"]["value_loss"]
    targets = np.array([target[0] for target in credit["return"]])
    assert targets.std() > 0
    assert found == pytest.approx(np.array([len(r) for r in batch.responses]) * targets**2 / 2, abs=1e-5)


def test_the_loser_of_a_game_is_not_paid_by_the_winner(mappo: Make) -> None:
    """Tic-tac-toe: O, the second to last, lost or won at X's last move; X got the opposite."""
    algorithm = mappo(env="text_game", env_config={"game": "pettingzoo.classic.tictactoe_v3"}, gae_level="turn",
                      max_response_tokens=4, penalties=False)  # fmt: skip
    flat = flatten(algorithm.sample_trees(), algorithm.agents)
    credit = algorithm.assign_credit(flat)
    assert np.abs(credit["reward_shared"]).max() > 0
    for row_, reward in enumerate(credit["reward"]):
        assert credit["return"][row_][0] == pytest.approx(reward)


def test_one_agent_is_token_level_ppo(mappo: Make) -> None:
    """The gradient of one agent's batch equals PPO's, written down independently, token by token."""
    algorithm = mappo(
        env="tests.test_mappo:OneAnswer", env_config={}, kl_beta=0.0, loss_aggregation="token_mean", grad_clip=None
    )
    row(algorithm)
    flat = flatten(algorithm.sample_trees(), algorithm.agents)
    batch = algorithm.make_batch(flat, algorithm.assign_credit(flat))
    learner = algorithm.learner_group._learner
    policy, model = learner.module["default_policy"].llm, learner.module["critic"].llm
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    rewards, values, logp, old = [], [], [], []
    for generation in flat.generations:
        tokens = torch.from_numpy(np.concatenate([generation.prompt, generation.response]).astype(np.int64))[None]
        at = slice(len(generation.prompt) - 1, -1)
        chosen = tokens[0, len(generation.prompt) :, None]
        logp.append(torch.log_softmax(policy(tokens).logits[0, at], -1).gather(1, chosen)[:, 0])
        values.append(model(tokens).logits[0, at, 0].detach().double().numpy())
        old.append(torch.from_numpy(generation.logprobs))
        rewards.append(generation.shared.get("team", 0.0))
    advantage = np.concatenate([reward - value for reward, value in zip(rewards, values, strict=True)])
    white = torch.from_numpy((advantage - advantage.mean()) / advantage.std()).float()
    ratio = (torch.cat(logp) - torch.cat(old)).exp()
    loss = -torch.minimum(ratio * white, ratio.clamp(0.8, 1.2) * white).mean()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(policy.parameters()))])
    policy.zero_grad(set_to_none=True)
    learner.accumulate(batch, np.arange(len(batch)))
    found = torch.cat([p.grad.flatten() for p in policy.parameters()])
    assert torch.allclose(found, expected, atol=1e-5 * float(expected.abs().max()) + 1e-7)


def test_actor_and_critic_are_restored(mappo: Make, tmp_path: Path) -> None:
    first = mappo()
    for _ in range(2):
        row(first)
    path = first.save_to_path(tmp_path / "checkpoint")
    second = mappo(seed=9)
    second.restore_from_path(path)
    assert equal(weights(first), weights(second))
    assert equal(critic(first), critic(second))
    third = MAPPO.from_checkpoint(path)
    results = [row(first), row(second), row(third)]
    assert equal(critic(first), critic(second))
    assert equal(critic(first), critic(third))
    assert results[0]["value_loss"] == results[1]["value_loss"] == results[2]["value_loss"]
    third.stop()
    for file in (tmp_path / "checkpoint" / "learner_group/learner/rl_module/critic").glob("*.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"damaged: .*critic.*is missing"):
        second.restore_from_path(path)


def test_critic_and_reference_are_spread_like_the_policy(mappo: Make, tmp_path: Path) -> None:
    """Two learners with ZeRO-3: no one holds a whole model, and the run goes on exactly from its checkpoint."""
    settings = {"num_learners": 2, "num_cpus_per_learner": 0.5, "deepspeed": {"zero_stage": 3}, "kl_beta": 0.05}
    first = mappo(**settings)

    def share_held(learner: Any) -> list[float]:
        held = []
        for model in (learner.policy.module.llm, learner.policy.reference, learner.module["critic"].llm):
            parameters = list(model.parameters())
            held.append(sum(p.ds_tensor.numel() for p in parameters) / sum(p.ds_numel for p in parameters))
        return held

    assert np.array(first.learners.each(share_held)) == pytest.approx(0.5, abs=0.05)
    row(first)
    path = first.save_to_path(tmp_path / "checkpoint")
    expected = row(first)
    assert expected["critic_grad_norm"] > 0
    first.stop()
    second = mappo(**settings)
    second.restore_from_path(path)
    again = row(second)
    for column in ("value_loss", "grad_norm", "critic_grad_norm"):
        assert again[column] == expected[column]


def test_remote_runners_get_the_policy_and_no_critic(mappo: Make) -> None:
    algorithm = mappo(num_env_runners=1)
    for _ in range(2):
        result = row(algorithm)
    assert result["ratio_max"] == pytest.approx(1, abs=1e-3)


def test_the_critic_may_start_elsewhere_but_not_from_another_architecture(
    mappo: Make, toy_folder: Path, tmp_path: Path
) -> None:
    other = save_toy(tmp_path / "other", seed=5)
    algorithm = mappo(critic_llm=str(other))
    body = "model.layers.0.mlp.up_proj.weight"
    assert not np.array_equal(critic(algorithm)[body], weights(algorithm)[body])
    assert np.array_equal(critic(mappo())[body], weights(mappo())[body])
    gpt2 = save_toy(tmp_path / "gpt2", "gpt2")
    with pytest.raises(ConfigError, match=r"critic_llm: expected the policy's architecture.*llama.*gpt2"):
        MAPPOConfig.check({"llm": str(toy_folder), "critic_llm": str(gpt2)})
    settings = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 10}))
    with pytest.raises(ModelError, match=r"critic_llm: .* has a context of 10 tokens, expected at least the 1024"):
        MAPPOConfig.check({"llm": str(toy_folder), "critic_llm": str(other)})


def test_turns_need_more_than_one(mappo: Make) -> None:
    algorithm = mappo(env="tests.test_mappo:OneAnswer", env_config={}, gae_level="turn")
    with pytest.raises(ConfigError, match="gae_level: turn needs trajectories of several acts"):
        row(algorithm)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lambda_": 1.1}, "lambda_.*less than or equal to 1"),
        ({"gamma": -0.1}, "gamma.*greater than or equal to 0"),
        ({"critic_lr": 0}, "critic_lr"),
        ({"critic_input": "both"}, "critic_input"),
        ({"group_key": "prompt"}, "unknown key 'group_key'"),
        ({"value_clip": 0}, "value_clip"),
    ],
)
def test_bad_configuration_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MAPPOConfig.check(changes)


@pytest.mark.parametrize("env", ["search", "parallel_search", "transcript"])
@pytest.mark.parametrize("gae_level", ["token", "turn"])
def test_matrix(mappo: Make, env: str, gae_level: str, toy_questions_file: Path) -> None:
    kept = {"search": PROMPTS, "parallel_search": {k: v for k, v in PROMPTS.items() if k != "rewriter"}}
    env_config = {
        "questions": str(toy_questions_file), "dev_questions": None, "reward": "tests.toys:share_of_vowels",
        "prompts": kept.get(env, "minipedia"),
    }  # fmt: skip
    algorithm = mappo(env=env, env_config=env_config, gae_level=gae_level, group_size=2)
    for _ in range(2):
        assert np.isfinite(row(algorithm)["reward"])


class OneAnswer(TokenEnv):
    """One agent, one act, earned by its vowels."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(["alone"], tokenizer)

    def start(self, index: int, split: str) -> None:
        self.root, self.said = index, ""

    def num_roots(self, split: str = "train") -> int:
        return 8

    def prompt(self, agent: str) -> Messages:
        return f"question {self.root}:"

    def act(self, agent: str, text: str) -> None:
        self.said = text or " "
        self.reward_all(share_of_vowels(text, None))

    def next_agent(self) -> str | None:
        return None if self.said else "alone"
