"""Propagation, groups and denominators on hand-worked numbers and identities."""

from collections.abc import Callable
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rllib_mhgpo.credit import (
    along_trajectories,
    group_advantages,
    group_similarity,
    heights,
    propagate,
    regroup_singletons,
    token_weights,
)


def edges(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def shared(*rewards: float) -> np.ndarray:
    return np.array(rewards, dtype=np.float64)[:, None]


def test_mean_propagation_on_an_even_tree_gives_the_root_the_leaf_mean() -> None:
    """0 -> 1, 2; 1 -> 3, 4; 2 -> 5, 6, leaves 1, 0, 1, 1: node 1 = 0.5, node 2 = 1, root = 0.75 = leaf mean."""
    tree = edges((0, 1), (0, 2), (1, 3), (1, 4), (2, 5), (2, 6))
    result = propagate(tree, shared(0, 0, 0, 1, 0, 1, 1))[:, 0]
    assert result.tolist() == [0.75, 0.5, 1, 1, 0, 1, 1]


def test_mean_propagation_on_an_uneven_tree_does_not() -> None:
    """0 -> 1, 2; 1 -> 3, 4, 5 with 1, 1, 0; 2 -> 6 with 0: root = (2/3 + 0) / 2 = 1/3, leaf mean = 1/2."""
    tree = edges((0, 1), (0, 2), (1, 3), (1, 4), (1, 5), (2, 6))
    result = propagate(tree, shared(0, 0, 0, 1, 1, 0, 0))[:, 0]
    assert result[0] == pytest.approx(1 / 3)


def test_equal_branching_along_every_path_is_enough_for_the_leaf_mean() -> None:
    """0 -> 1, 2 (2 each); 1 -> 3 -> 5, 6 and 2 -> 4, 7 -> 8 and 9: products of branching are 4 along every path."""
    tree = edges((0, 1), (0, 2), (1, 3), (3, 5), (3, 6), (2, 4), (2, 7), (7, 8), (4, 9))
    rewards = shared(0, 0, 0, 0, 0, 0.3, 0.9, 0, 0.1, 0.7)
    assert propagate(tree, rewards)[0, 0] == pytest.approx((0.3 + 0.9 + 0.1 + 0.7) / 4)


def test_rewards_in_the_middle_of_an_episode_are_added() -> None:
    """0 -> 1 -> 2 with 1, 2, 4 on the way: 2 has 4, 1 has 2 + 4, 0 has 1 + 6."""
    assert propagate(edges((0, 1), (1, 2)), shared(1, 2, 4))[:, 0].tolist() == [7, 6, 4]


def test_a_generation_with_two_parents_pays_both() -> None:
    """Two searchers (0, 1) feed one answerer (2) that earned 1."""
    assert propagate(edges((0, 2), (1, 2)), shared(0, 0, 1))[:, 0].tolist() == [1, 1, 1]


@pytest.mark.parametrize(("aggregation", "root"), [("mean", 0.5), ("max", 0.9), ("min", 0.2)])
def test_aggregations(aggregation: str, root: float) -> None:
    tree = edges((0, 1), (0, 2), (0, 3))
    assert propagate(tree, shared(0, 0.9, 0.2, 0.4), aggregation)[0, 0] == pytest.approx(root)


def test_random_aggregation_is_one_successor_and_repeats_with_the_seed() -> None:
    tree = edges((0, 1), (0, 2), (0, 3))
    draws = [propagate(tree, shared(0, 1, 2, 3), "random", np.random.default_rng(s))[0, 0] for s in range(30)]
    assert set(draws) == {1.0, 2.0, 3.0}
    assert draws[0] == propagate(tree, shared(0, 1, 2, 3), "random", np.random.default_rng(0))[0, 0]


def test_teams_are_kept_apart() -> None:
    rewards = np.array([[0.0, 0.0], [1.0, -1.0]])
    assert propagate(edges((0, 1)), rewards).tolist() == [[1, -1], [1, -1]]


def test_a_cycle_is_refused() -> None:
    with pytest.raises(ValueError, match="cycle"):
        propagate(edges((0, 1), (1, 0)), shared(0, 0))


@given(
    st.integers(1, 25).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, 10**6), min_size=n, max_size=n)))
)
def test_max_propagation_is_the_best_leaf_below(case: tuple[int, list[int]]) -> None:
    """Random trees: the maximum over all descendants that are leaves, found by plain recursion."""
    n, draws = case
    parents = [draw % i if i else -1 for i, draw in enumerate(draws)]
    tree = edges(*((p, i) for i, p in enumerate(parents) if p >= 0))
    is_leaf = ~np.isin(np.arange(n), tree[:, 0])
    rewards = np.where(is_leaf, np.array(draws) % 7, 0).astype(float)

    def best(node: int) -> float:
        children = [i for i, p in enumerate(parents) if p == node]
        return max(map(best, children)) if children else float(rewards[node])

    assert propagate(tree, rewards[:, None], "max")[:, 0].tolist() == [best(i) for i in range(n)]
    assert (heights(tree, n) == 0).tolist() == is_leaf.tolist()


def test_one_right_answer_of_four() -> None:
    """mean 0.25, variance (0.5625 + 3 * 0.0625) / 3 = 0.25, std 0.5: 0.75 / 0.5 = 1.5 and -0.25 / 0.5 = -0.5."""
    values = group_advantages(np.array([1.0, 0, 0, 0]), [7, 7, 7, 7]).values
    assert values == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_groups_stay_apart_and_rows_may_come_in_any_order() -> None:
    """G1: rewards 0, 1 of A and 10, 11 of B: std of two neighbours is 1/sqrt(2), so every advantage is +-0.7071."""
    values = group_advantages(np.array([0.0, 10, 11, 1]), [1, 2, 2, 1]).values
    assert values == pytest.approx([-(2**-0.5), -(2**-0.5), 2**-0.5, 2**-0.5], abs=1e-5)


def test_a_group_of_one_has_no_advantage() -> None:
    """G3."""
    result = group_advantages(np.array([0.7, 1, 0]), [0, 1, 1])
    assert result.values[0] == 0
    assert result.singleton.tolist() == [True, False, False]
    assert not result.zero_std.any() or not result.zero_std[0]


def test_a_group_of_equal_rewards_has_none_either_and_is_told() -> None:
    """G4: 0.1 has no exact float, so the deviations are not exactly 0; the advantages are."""
    result = group_advantages(np.array([0.1, 0.1, 0.1, 0.0, 1.0]), [0, 0, 0, 1, 1])
    assert result.values[:3].tolist() == [0, 0, 0]
    assert result.zero_std.tolist() == [True, True, True, False, False]


def test_rewards_that_rounding_sets_apart_are_equal() -> None:
    """Of the first group one may be off by 0.01, and they are 0.01 apart; of the second none may."""
    rewards, groups = np.array([0.25, 0.26, 0.25, 0.26]), [0, 0, 1, 1]
    result = group_advantages(rewards, groups, rounding=np.array([0.0, 0.0101, 0.0, 0.0]))
    assert result.values == pytest.approx([0, 0, -(2**-0.5), 2**-0.5], abs=1e-3)
    assert result.zero_std.tolist() == [True, True, False, False]


def test_std_floor_bounds_the_blow_up() -> None:
    """Penalty 0.1 in one of four: std 0.05, so 1.5 without a floor and 0.075 / 0.2 with a floor of 0.2."""
    rewards = np.array([-0.1, 0.0, 0.0, 0.0])
    assert group_advantages(rewards, [0] * 4).values[0] == pytest.approx(-1.5, abs=1e-4)
    assert group_advantages(rewards, [0] * 4, std_floor=0.2).values[0] == pytest.approx(-0.375, abs=1e-4)


def test_other_norms() -> None:
    """none: R - mean; leave one out: 1 - 0 for the winner, 0 - 1/2 for the others."""
    rewards = np.array([1.0, 0, 0])
    assert group_advantages(rewards, [0] * 3, "none").values == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert group_advantages(rewards, [0] * 3, "leave_one_out").values == pytest.approx([1, -0.5, -0.5])


def test_a_reward_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages(np.array([0.0, np.nan]), [0, 0])


rewards_and_groups = st.lists(
    st.tuples(st.floats(-1, 1).map(lambda x: round(x, 3)), st.integers(0, 5)), min_size=1, max_size=40
)


@given(rewards_and_groups, st.randoms(use_true_random=False))
def test_advantages_sum_to_zero_are_never_nan_and_follow_their_rows(rows: list[tuple[float, int]], rng: object) -> None:
    rewards, groups = np.array([r for r, _ in rows]), np.array([g for _, g in rows])
    values = group_advantages(rewards, groups).values
    assert np.isfinite(values).all()
    for group in np.unique(groups):
        assert values[groups == group].sum() == pytest.approx(0, abs=1e-9)
    order = np.array(sorted(range(len(rows)), key=lambda _: rng.random()))  # type: ignore[attr-defined]
    assert group_advantages(rewards[order], groups[order]).values == pytest.approx(values[order])


@given(rewards_and_groups, st.floats(-3, 3), st.floats(0.5, 2))
def test_shift_changes_nothing_and_scale_next_to_nothing(
    rows: list[tuple[float, int]], shift: float, scale: float
) -> None:
    """Identity 4, on rewards in thousandths, so that the smallest spread is far above the epsilon of 1e-6."""
    rewards, groups = np.array([r for r, _ in rows]), [g for _, g in rows]
    values = group_advantages(rewards, groups).values
    assert group_advantages(rewards + shift, groups).values == pytest.approx(values, abs=1e-6)
    assert group_advantages(rewards * scale, groups).values == pytest.approx(values, abs=2e-3)


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=12).filter(lambda xs: len(set(xs)) > 1))
def test_std_norm_is_the_z_score_of_scipy(rewards: list[int]) -> None:
    values = group_advantages(np.array(rewards, dtype=float), [0] * len(rewards)).values
    assert values == pytest.approx(stats.zscore(rewards, ddof=1), abs=1e-4)


def test_agent_mean_weights_by_hand() -> None:
    """Agents a (lengths 2, 4) and b (5): 1/2 agents * 1/2 generations * 1/2 tokens, ..., 1/2 * 1 * 1/5."""
    weights = token_weights(np.array([0, 0, 1]), np.array([2, 4, 5]))
    assert weights == pytest.approx([1 / 8, 1 / 16, 1 / 10])


def test_other_aggregations_by_hand() -> None:
    agents, lengths = np.array([0, 0, 1]), np.array([2, 4, 6])
    assert token_weights(agents, lengths, "sequence_mean") == pytest.approx([1 / 6, 1 / 12, 1 / 18])
    assert token_weights(agents, lengths, "token_mean") == pytest.approx([1 / 12] * 3)
    assert token_weights(agents, lengths, "fixed_length", 10) == pytest.approx([1 / 30] * 3)


def test_what_carries_no_loss_is_not_counted() -> None:
    """A generation without tokens, and an agent that has no others, leave the denominators alone."""
    weights = token_weights(np.array([0, 0, 1]), np.array([2, 0, 0]))
    assert weights.tolist() == [0.5, 0, 0]
    assert token_weights(np.array([0]), np.array([0])).tolist() == [0]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=20))
@pytest.mark.parametrize("aggregation", ["agent_mean", "sequence_mean", "token_mean"])
def test_weights_of_a_mean_sum_to_one(aggregation: str, rows: list[tuple[int, int]]) -> None:
    agents, lengths = np.array([a for a, _ in rows]), np.array([n for _, n in rows])
    assert (token_weights(agents, lengths, aggregation) * lengths).sum() == pytest.approx(1)


def test_singletons_are_pooled_by_agent_in_chunks() -> None:
    """Agent 0 has five singletons, G = 2: chunks of 2, 2 and 1, and the last one joins: 2 and 3; agent 1 has one."""
    groups = np.array([10, 11, 12, 13, 14, 20, 30, 30])
    pools = np.array([0, 0, 0, 0, 0, 1, 2, 2])
    new = regroup_singletons(groups, pools, 2, np.random.default_rng(0))
    assert sorted(np.unique(new[:5], return_counts=True)[1].tolist()) == [2, 3]
    assert new[5] not in [*new[:5], *new[6:]]
    assert new[6] == new[7] not in new[:6]
    other = regroup_singletons(groups, pools, 2, np.random.default_rng(1))
    assert new[:5].tolist() != other[:5].tolist()


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), min_size=1, max_size=40),
    st.integers(2, 5),
    st.integers(0, 9),
)
def test_regrouping_keeps_groups_apart_and_leaves_at_most_one_alone(
    rows: list[tuple[int, int]], size: int, seed: int
) -> None:
    pools = np.array([p for _, p in rows])
    groups = np.array([10 * p + g for g, p in rows])
    new = regroup_singletons(groups, pools, size, np.random.default_rng(seed))
    sizes = {g: int((groups == g).sum()) for g in groups.tolist()}
    for g in groups.tolist():
        if sizes[g] > 1:
            assert len(set(new[groups == g].tolist())) == 1
            assert set(groups[new == new[groups == g][0]].tolist()) == {g}
    for p in np.unique(pools):
        alone = new[(pools == p) & np.array([sizes[g] == 1 for g in groups.tolist()])]
        counts = np.unique(alone, return_counts=True)[1]
        assert len(alone) == 1 or all(2 <= c <= size + 1 for c in counts)
        assert not set(alone.tolist()) & set(new[pools != p].tolist())


@given(st.lists(st.tuples(st.integers(0, 3), st.sets(st.integers(0, 8), min_size=1)), min_size=1, max_size=15))
def test_similarity_is_the_mean_over_pairs(responses: list[tuple[int, set[int]]]) -> None:
    """By brute force: over all ordered pairs of a group, common tokens against own tokens."""
    groups = np.array([g for g, _ in responses])
    tokens = np.array([t for _, held in responses for t in held])
    rows = np.array([i for i, (_, held) in enumerate(responses) for _ in held])
    for group, value in zip(np.unique(groups), group_similarity(tokens, rows, groups), strict=True):
        members = [held for g, held in responses if g == group]
        pairs = [(a, b) for i, a in enumerate(members) for j, b in enumerate(members) if i != j]
        if not pairs:
            assert np.isnan(value)
            continue
        assert value == pytest.approx(sum(len(a & b) for a, b in pairs) / sum(len(a) for a, _ in pairs))
        assert (value == 1) == all(m == members[0] for m in members)


def test_sums_along_trajectories_on_an_uneven_tree() -> None:
    """A root, two branches, one of which forks again: 0 -> 1 -> (3, 4), 0 -> 2."""
    values, previous = np.array([1.0, 2.0, 4.0, 8.0, 16.0]), np.array([-1, 0, 0, 1, 1])
    assert along_trajectories(values, previous).tolist() == [(2 + 12 + 4) / 2, 1 + 12, 1, 3, 3]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Random acyclic graphs: any earlier generations are parents; rewards anywhere."""
    count = draw(st.integers(1, 12))
    parents = [draw(st.sets(st.integers(0, child - 1), max_size=3)) if child else set() for child in range(count)]
    edges = [(parent, child) for child, found in enumerate(parents) for parent in sorted(found)]
    rewards = draw(st.lists(st.integers(-3, 3), min_size=count, max_size=count))
    return np.array(edges, dtype=np.int64).reshape(-1, 2), np.array(rewards, dtype=float)


@given(graphs(), st.sampled_from(["mean", "max", "min"]))
def test_propagation_over_any_graph_is_its_definition(graph: tuple[np.ndarray, np.ndarray], aggregation: str) -> None:
    edges, rewards = graph
    reduce: dict[str, Callable[[list[float]], float]] = {"mean": fmean, "max": max, "min": min}

    def stands_for(generation: int) -> float:
        below = [stands_for(child) for parent, child in edges.tolist() if parent == generation]
        return float(rewards[generation] + (reduce[aggregation](below) if below else 0.0))

    found = propagate(edges, rewards[:, None], aggregation)[:, 0]
    assert found == pytest.approx([stands_for(generation) for generation in range(len(rewards))])
    assert np.isfinite(found).all()
