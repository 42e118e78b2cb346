"""Waves: what is played, how the tree stands, what each step earned."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from rllib_mhgpo.credit import group_advantages, propagate
from rllib_mhgpo.envs.token_env import Messages, TokenEnv
from rllib_mhgpo.errors import RolloutError
from rllib_mhgpo.sampling import ForkOnFirst, Options, Visit, deal_roots
from rllib_mhgpo.spaces import TokenSequence
from rllib_mhgpo.tree import RolloutTree, flatten
from rllib_mhgpo.waves import Play, play, split_rewards
from tests.test_search_env import make
from tests.toys import ScriptedEngine, toy_tokenizer


class Relay(TokenEnv):
    """Each agent of a list says a word; the last one's word decides what all earn."""

    order: Sequence[str] = ("first", "second", "third")
    shared = (*TokenEnv.shared,)

    def __init__(self, tokenizer: Any = None, **limits: int) -> None:
        super().__init__(sorted(set(self.order)), tokenizer or toy_tokenizer(), **limits)

    def start(self, index: int, split: str) -> None:
        self.words: list[str] = [str(index)]

    def prompt(self, agent: str) -> Messages:
        return f"{agent}:" + " ".join(self.words)

    def act(self, agent: str, text: str) -> None:
        if text == "crash":
            raise RolloutError(f"agent {agent!r} crashed")
        self.words.append(text)
        if self.next_agent() is None:
            self.reward_all(float(text == "good"))
            self.score(good=float(text == "good"))

    def next_agent(self) -> str | None:
        turn = len(self.words) - 1
        return self.order[turn] if turn < len(self.order) else None

    def summary(self) -> dict[str, object]:
        return {"words": self.words}


def how(group_size: int = 4, **changes: Any) -> Play:
    return Play(
        **{
            "strategy": ForkOnFirst(Options(group_size, 3)),
            "temperature": 1.0,
            "max_tokens": 8,
            "seed": (0, 0),
            **changes,
        }
    )


def roll(env: Any, script: Any, roots: Sequence[int] = (0,), **changes: Any) -> list[RolloutTree]:
    return play(env, ScriptedEngine(env.tokenizer, script), roots, how(**changes), {})


def test_fork_on_first_samples_each_agent_group_size_times() -> None:
    """3 agents, G = 4: 4/4/4 generations a question, in three engine calls whatever the number of questions."""
    env = Relay()
    engine = ScriptedEngine(env.tokenizer, lambda prompt, i: f"w{i}")
    trees = play(env, engine, range(5), how(), {})
    assert engine.calls == 3
    for tree in trees:
        assert [g.agent for g in tree.generations] == ["first"] * 4 + ["second"] * 4 + ["third"] * 4
        assert [tree.trajectory(leaf) for leaf in tree.leaves()] == [[i, 4 + i, 8 + i] for i in range(4)]
        assert [g.parents for g in tree.generations] == [()] * 4 + [(i,) for i in range(8)]
        assert [g.path for g in tree.generations[4:8]] == [(i, 0) for i in range(4)]


def test_each_branch_goes_its_own_way() -> None:
    (tree,) = roll(Relay(), lambda prompt, i: f"w{i}", keep_records=True)
    records = [tree.generations[leaf].record for leaf in tree.leaves()]
    assert records == [{"words": ["0", f"w{i}", "w0", "w0"]} for i in range(4)]
    assert toy_tokenizer().decode(tree.generations[6].prompt) == "second:0 w2"


def test_every_agent_of_a_trajectory_has_its_grpo_advantage() -> None:
    """Identity 1: FoF without penalties; two of four trajectories end well: +-0.5 / (1 / sqrt(3))."""

    def script(prompt: str, sample: int) -> str:
        return f"w{sample}" if prompt.startswith("first") else "good" if "w1" in prompt or "w2" in prompt else "bad"

    trees = roll(Relay(), script, roots=[0, 1])
    flat = flatten(trees, ["first", "second", "third"])
    reward = propagate(flat.edges, flat.shared)[:, 0] + flat.specific
    groups = np.array([10 * t + a for t, a in zip(flat.tree, flat.agent, strict=True)])
    values = group_advantages(reward, groups).values.reshape(2, 3, 4)
    grpo = group_advantages(np.array([0.0, 1, 1, 0]), [0] * 4).values
    assert grpo == pytest.approx([-(0.75**0.5), 0.75**0.5, 0.75**0.5, -(0.75**0.5)], abs=1e-5)
    for question in values:
        for agent in question:
            assert agent == pytest.approx(grpo)


def test_seeds_name_root_path_and_run() -> None:
    play_ = how()
    seeds = {play_.stream(root, path) for root in range(20) for path in [(), (0,), (1,), (0, 0), (0, 1), (1, 0)]}
    assert len(seeds) == 120
    assert how(seed=(0, 1)).stream(0, (0,)) != play_.stream(0, (0,))


class Noisy(Relay):
    """Adds a random number to what is read."""

    def prompt(self, agent: str) -> Messages:
        return f"{agent}:{self.np_random.random():.6f}"


def test_branches_see_different_noise_that_repeats_with_the_seed() -> None:
    first, again = (roll(Noisy(), lambda prompt, i: "w")[0] for _ in range(2))
    noise = [toy_tokenizer().decode(g.prompt) for g in first.generations]
    assert len(set(noise[4:])) == 8
    assert noise == [toy_tokenizer().decode(g.prompt) for g in again.generations]


def test_a_bad_rollout_is_left_out_and_told() -> None:
    def script(prompt: str, sample: int) -> str:
        return "crash" if prompt == "second:0 w2" else f"w{sample}"

    (tree,) = roll(Relay(), script)
    assert tree.void == ["question 0: agent 'second' crashed"]
    assert [g.path[0] for g in tree.generations if g.agent == "first"] == [0, 1, 3]
    assert [tree.trajectory(leaf) for leaf in tree.leaves()] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert [g.parents for g in tree.generations[6:]] == [(3,), (4,), (5,)]


def test_a_reward_that_is_no_number_voids_its_rollout_naming_question_and_agent() -> None:
    """R8."""

    class Broken(Relay):
        def reward_all(self, shared: float) -> None:
            super().reward_all(float("nan") if "w1" in self.words else shared)

    (tree,) = roll(Broken(), lambda prompt, i: f"w{i}", roots=[7])
    assert tree.void == ["question 7, agent 'third': expected a finite reward, found nan."]
    assert len(list(tree.leaves())) == 3


@pytest.mark.parametrize("wrong", ["nan", "inf", "1e+300"])
def test_a_specific_reward_that_is_no_number_voids_its_rollout_too(wrong: str) -> None:
    """R8: what one agent alone earns, before the episode's end; named as it was given, not what is left of it."""

    class Broken(Relay):
        def act(self, agent: str, text: str) -> None:
            super().act(agent, text)
            self.reward(agent, float(wrong) if (agent, self.words[1]) == ("second", "w1") else 0.0)

    (tree,) = roll(Broken(), lambda prompt, i: f"w{i}", roots=[7])
    assert tree.void == [f"question 7, agent 'second': expected a finite reward, found {wrong}."]
    assert len(list(tree.leaves())) == 3


def test_a_fault_of_the_program_is_raised() -> None:
    class Faulty(Relay):
        def act(self, agent: str, text: str) -> None:
            raise KeyError("oops")

    with pytest.raises(KeyError):
        roll(Faulty(), lambda prompt, i: "w")


class TwoRounds(Relay):
    order = ("first", "second", "first", "second")


def test_agents_may_act_again_and_fork_only_at_their_first_act() -> None:
    (tree,) = roll(TwoRounds(), lambda prompt, i: "w", group_size=2)
    assert [(g.agent, g.act) for g in tree.generations[::2]] == [
        ("first", 0),
        ("second", 0),
        ("first", 1),
        ("second", 1),
    ]
    assert len(tree.generations) == 8


class Searchers(Relay):
    """Two searchers that do not read each other, and a reader of both."""

    order = ("a", "b", "reader")

    def act(self, agent: str, text: str) -> None:
        super().act(agent, text)
        self.infos[agent]["parents"] = ["a", "b"] if agent == "reader" else []


def test_parents_make_a_dag() -> None:
    (tree,) = roll(Searchers(), lambda prompt, i: "good", group_size=2)
    assert [g.parents for g in tree.generations] == [(), (), (), (), (0, 2), (1, 3)]
    flat = flatten([tree], ["a", "b", "reader"])
    assert propagate(flat.edges, flat.shared)[:, 0].tolist() == [1] * 6


class Orphan(Relay):
    def act(self, agent: str, text: str) -> None:
        super().act(agent, text)
        self.infos[agent]["parents"] = ["third"]


def test_a_parent_that_has_not_acted_is_refused() -> None:
    with pytest.raises(ValueError, match=r"question 0, agent 'first': parent 'third' has not acted"):
        roll(Orphan(), lambda prompt, i: "w")


@pytest.mark.parametrize(
    ("rewards", "infos", "ended", "specific", "shared"),
    [
        ({"a": 0.5, "b": 0}, {}, False, 0.5, {}),
        ({"a": 0.5, "b": 0}, {}, True, 0, {"team": 0.5}),
        ({"a": 0.0, "b": 2}, {}, False, 0, {"team": 2}),
        ({"a": 0.7, "b": 1}, {"a": {"specific_reward": -0.3}}, True, -0.3, {"team": 1}),
        ({"a": 1.0, "b": 1, "c": 1}, {}, True, 0, {"team": 1}),
    ],
)
def test_rewards_are_split_by_their_time(
    rewards: dict[str, float], infos: Mapping[str, Any], ended: bool, specific: float, shared: dict[str, float]
) -> None:
    assert split_rewards(rewards, infos, dict.fromkeys(rewards, "team"), "a", ended) == (specific, shared)


def test_opponents_are_teams_of_their_own() -> None:
    assert split_rewards({"x": 1.0, "o": -1.0}, {}, {"x": "x", "o": "o"}, "x", True) == (0, {"x": 1, "o": -1})


def test_search_trees_hold_ids_as_sampled() -> None:
    """G16, through the whole pipeline: what the engine gave is what the loss will see."""
    texts = {"ask": "p1", "Document0": "Document0", "P": "a1"}

    def script(prompt: str, sample: int) -> str:
        return next(text for start, text in texts.items() if prompt.startswith(start))

    env = make()
    (tree,) = roll(env, script, roots=[1])
    for generation in tree.generations:
        assert generation.response[-1] == env.tokenizer.eos_token_id
        assert env.decode(generation.response) in texts.values()
    assert [g.scores["f1"] for g in tree.generations if g.scores] == [1] * 4


def test_roots_are_dealt_once_an_epoch_and_again_in_another_order() -> None:
    epochs = [[deal_roots(3, 5 * e + i, 2, 11) for i in range(5)] for e in range(2)]
    flat = [[root for cut in epoch for root in cut] for epoch in epochs]
    assert all(len(set(roots)) == 10 for roots in flat)
    assert flat[0] != flat[1]
    with pytest.raises(ValueError, match="1 to 11"):
        deal_roots(0, 0, 12, 11)


def test_the_strategy_sees_where_a_rollout_stands() -> None:
    visits: list[Visit] = []

    def strategy(visit: Visit) -> Sequence[bool]:
        visits.append(visit)
        return (True, False)[: 2 if visit.agent == "second" else 1]

    (tree,) = roll(Relay(), lambda prompt, i: "w", strategy=strategy)
    assert [(v.agent, v.position, v.num_agents, v.act, v.path) for v in visits] == [
        ("first", 0, 3, 0, ()), ("second", 1, 3, 0, (0,)), ("third", 2, 3, 0, (0, 0)), ("third", 2, 3, 0, (0, 1)),
    ]  # fmt: skip
    assert [g.trained for g in tree.generations] == [True, True, False, True, True]


def test_token_sequences_as_a_space() -> None:
    space = TokenSequence(10, 4, seed=0)
    assert space == TokenSequence(10, 4)
    assert space != TokenSequence(10, 5)
    assert all(space.contains(space.sample()) for _ in range(50))
    assert {len(space.sample()) for _ in range(50)} == set(range(5))
    short = TokenSequence(10, 4, seed=0, sample_length=2)
    assert {len(short.sample()) for _ in range(50)} == set(range(3))
    assert short == space
    for wrong in ([10], [-1], [1.5], [[1]], [1] * 5):
        assert not space.contains(np.array(wrong))
