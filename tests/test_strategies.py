"""Generation counts, identities and groups of every strategy, on trees that the waves really play."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rllib_mhgpo.algorithms.mhgpo import by_prompt, by_question
from rllib_mhgpo.credit import propagate, regroup_singletons
from rllib_mhgpo.errors import RolloutError
from rllib_mhgpo.sampling import STRATEGIES, Options, RoundRobin, Visit
from rllib_mhgpo.tree import RolloutTree, flatten
from rllib_mhgpo.waves import Play, play
from tests.test_waves import Relay
from tests.toys import ScriptedEngine, toy_tokenizer

NAMES = ("a", "b", "c", "d", "e", "f")


def relay(order: Sequence[str]) -> Relay:
    kind = type("Chain", (Relay,), {"order": tuple(order)})
    env: Relay = kind(toy_tokenizer())
    return env


def roll(
    strategy: str, order: Sequence[str], group_size: int, roots: Sequence[int] = (0,), **options: Any
) -> list[RolloutTree]:
    env = relay(order)
    chosen = STRATEGIES[strategy](Options(group_size, len(set(order)), **options))
    engine = ScriptedEngine(env.tokenizer, lambda prompt, sample: f"w{sample}")
    return play(env, engine, roots, Play(chosen, 1.0, 8, (0,)), {})


def counts(tree: RolloutTree, trained: bool | None = None) -> list[int]:
    by_agent = Counter(g.agent for g in tree.generations if trained in (None, g.trained))
    return [by_agent[name] for name in sorted(by_agent)]


@pytest.mark.parametrize("n", range(1, 7))
@pytest.mark.parametrize("group_size", [2, 4])
def test_counts_are_those_of_the_table(n: int, group_size: int) -> None:
    order, g = NAMES[:n], group_size
    (fof,) = roll("fof", order, g)
    assert counts(fof) == [g] * n
    (oversampled,) = roll("fof_os", order, g)
    assert counts(oversampled) == ([g] * (n - 1) + [g * g] if n > 1 else [g])
    (independent,) = roll("is", order, g)
    assert len(independent.generations) == g * n * (n + 1) // 2
    assert counts(independent, trained=True) == [g] * n
    for fork in range(n):
        probs = tuple(float(i == fork) for i in range(n))
        (tree,) = roll("rr", order, g, fork_probs=probs)
        assert counts(tree) == [1] * fork + [g] * (n - fork)
    (static,) = roll("fork_counts", order, g, fork_counts=(g, *[1] * (n - 1)))
    assert [x.path for x in static.generations] == [x.path for x in fof.generations]


def test_the_papers_numbers() -> None:
    """n = 3, G = 4: 12, 24, 24 of which 12 trained, and [2, 1, 4] gives 2/2/8."""
    assert len(roll("fof", "abc", 4)[0].generations) == 12
    assert len(roll("fof_os", "abc", 4)[0].generations) == 24
    (tree,) = roll("is", "abc", 4)
    assert (len(tree.generations), sum(g.trained for g in tree.generations)) == (24, 12)
    assert counts(roll("fork_counts", "abc", 4, fork_counts=(2, 1, 4))[0]) == [2, 2, 8]


def test_round_robin_draws_forks_as_told_and_repeats_with_the_seed() -> None:
    options = Options(4, 3, fork_probs=(0.7, 0.1, 0.2), seed=(0, 0))
    forks = [RoundRobin(options).fork(root) for root in range(2000)]
    assert np.bincount(forks) / 2000 == pytest.approx([0.7, 0.1, 0.2], abs=0.03)
    assert forks == [RoundRobin(options).fork(root) for root in range(2000)]
    other = RoundRobin(Options(4, 3, fork_probs=(0.7, 0.1, 0.2), seed=(0, 1)))
    assert forks != [other.fork(root) for root in range(2000)]
    mean = np.mean([sum(4 if k >= fork else 1 for k in range(3)) for fork in forks])
    assert mean == pytest.approx(10.5, abs=0.2)


def test_round_robin_that_always_forks_first_is_fork_on_first() -> None:
    """Identity 2: bit for bit."""
    one, other = roll("rr", "abc", 4, roots=range(5), fork_probs=(1.0, 0.0, 0.0)), roll("fof", "abc", 4, roots=range(5))
    assert [repr(tree) for tree in one] == [repr(tree) for tree in other]


def test_oversampling_and_fork_on_first_are_one_for_one_agent() -> None:
    """Identity 3, the sampling part."""
    assert repr(roll("fof_os", "a", 4)) == repr(roll("fof", "a", 4)) == repr(roll("is", "a", 4))


@pytest.mark.parametrize("strategy", ["fof", "fof_os", "rr", "is"])
def test_agents_that_act_again_draw_one_response_then(strategy: str) -> None:
    (tree,) = roll(strategy, "abacb", 2, fork_probs=(1.0, 0.0, 0.0))
    by_act = Counter((g.agent, g.act) for g in tree.generations if g.trained or strategy != "is")
    if strategy == "is":
        assert by_act == {("a", 0): 2, ("b", 0): 2, ("c", 0): 2}
    else:
        last = 4 if strategy == "fof_os" else 2
        assert by_act == {("a", 0): 2, ("b", 0): 2, ("a", 1): 2, ("c", 0): last, ("b", 1): last}


def test_independent_forks_are_paid_by_their_own_continuation() -> None:
    """The first output's successors are an untrained one (earned 0) and G trained ones (earned 1): it stands for 0."""
    (tree,) = roll("is", "ab", 2)
    flat = flatten([tree], ["a", "b"])
    earned = np.array([[float(g.agent == "b" and g.trained)] for g in tree.generations])
    shared = propagate(flat.edges, earned)[:, 0]
    first = next(i for i, g in enumerate(tree.generations) if g.agent == "a")
    assert shared[first] == 0


def test_heterogeneous_groups_cross_prompts_and_homogeneous_ones_do_not() -> None:
    """Of FoF's second agent each prompt is its own: one group by question, four lone ones by prompt."""
    trees = roll("fof", "ab", 4, roots=[0, 1])
    flat = flatten(trees, "ab")
    second = flat.agent == 1
    assert len(set(by_question(flat)[second])) == 2
    assert len(set(by_prompt(flat)[second])) == 8
    assert len(set(by_prompt(flat)[~second])) == 2


def test_round_robins_singletons_are_regrouped_across_questions() -> None:
    trees = roll("rr", "abc", 4, roots=range(8), fork_probs=(0.0, 0.0, 1.0))
    flat = flatten(trees, "abc")
    groups = by_question(flat)
    assert sorted(np.unique(groups, return_counts=True)[1].tolist()) == [1] * 16 + [4] * 8
    new = regroup_singletons(groups, flat.agent, 4, np.random.default_rng(0))
    for agent, sizes in ((0, [4, 4]), (1, [4, 4]), (2, [4] * 8)):
        assert np.unique(new[flat.agent == agent], return_counts=True)[1].tolist() == sizes


def test_a_strategy_of_ones_own_is_one_class_with_one_method() -> None:
    class TwoThenThree:
        def __init__(self, options: Options) -> None:
            self.sizes = {"a": 2, "b": 3}

        def __call__(self, visit: Visit) -> tuple[bool, ...]:
            return (True,) * (self.sizes.get(visit.agent, 1) if visit.act == 0 else 1)

    env = relay("abc")
    engine = ScriptedEngine(env.tokenizer, lambda prompt, sample: "w")
    (tree,) = play(env, engine, [0], Play(TwoThenThree(Options(2, 3)), 1.0, 8, (0,)), {})
    assert counts(tree) == [2, 6, 6]


def test_on_a_graph_too_independent_forks_are_paid_by_their_own_continuation() -> None:
    """a and b feed c, c feeds d; every c below a trained fork of b is earned for b alone, not for a."""

    class Graph(Relay):
        order = ("a", "b", "c", "d")

        def act(self, agent: str, text: str) -> None:
            super().act(agent, text)
            self.infos[agent]["parents"] = {"a": [], "b": [], "c": ["a", "b"], "d": ["c"]}[agent]

    env = Graph(toy_tokenizer())
    engine = ScriptedEngine(env.tokenizer, lambda prompt, sample: "w")
    (tree,) = play(env, engine, [0], Play(STRATEGIES["is"](Options(3, 4)), 1.0, 8, (0,)), {})
    flat = flatten([tree], ["a", "b", "c", "d"])
    earned = np.array([[float(len(g.path) == 4 and g.path[:2] == (0, 0))] for g in tree.generations])
    shared = propagate(flat.edges, earned)[:, 0]
    by_path = {g.path: value for g, value in zip(tree.generations, shared, strict=True)}
    assert by_path[0,] == 1
    assert by_path[1,] == by_path[2,] == 0
    assert sum(1 for parent, _ in flat.edges if tree.generations[parent].path == (0,)) == 1


def test_an_output_that_has_lost_its_paying_continuation_is_not_trained() -> None:
    class Crashing(Relay):
        order = ("a", "b")

        def act(self, agent: str, text: str) -> None:
            if agent == "b" and self.words == ["0", "w0"] and text == "w0":
                raise RolloutError("crashed")
            super().act(agent, text)

    env = Crashing(toy_tokenizer())
    engine = ScriptedEngine(env.tokenizer, lambda prompt, sample: f"w{sample}")
    (tree,) = play(env, engine, [0], Play(STRATEGIES["is"](Options(3, 2)), 1.0, 8, (0,)), {})
    assert [(g.path, g.trained) for g in tree.generations if g.agent == "a"] == [
        ((0,), False),
        ((1,), True),
        ((2,), True),
    ]
    assert sum(g.trained for g in tree.generations if g.agent == "b") == 3
