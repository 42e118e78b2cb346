"""Who earned what: rewards run backwards along the agents' graph, advantages are taken within groups.

Pure functions over flat arrays of N generations, parents before children; nothing here knows trees, tokens or
devices. Source: MHGPO, arXiv:2506.02718, sections 3.3 and 3.4.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

EPSILON = 1e-6
ROUNDING = 1e-9
"""Rewards that differ by less are equal: sums in another order may differ in their last digits."""


Aggregate = Callable[[Floats, Ints, int, np.random.Generator | None], Floats]
"""(E, T) values of successors, (E,) the places 0..count-1 of their parents, count, rng -> (count, T)."""


def propagate(
    edges: Ints, shared: Floats, aggregation: str | Aggregate = "mean", rng: np.random.Generator | None = None
) -> Floats:
    """Runs shared rewards from the leaves up: ``R(k) = r(k) + Aggr{R(j) : edge k -> j}``.

    Args:
        edges: (E, 2), each a pair (parent, child) of generations with parent < child.
        shared: (N, T), what each team earned by the step with generation n's response.
        aggregation: ``mean``, ``max``, ``min``, ``random`` (one successor, drawn by ``rng``), or a function.

    Returns:
        (N, T), the shared reward each generation stands for.
    """
    total = np.array(shared, dtype=np.float64)
    if len(edges) == 0:
        return total
    if np.any(edges[:, 0] >= edges[:, 1]):
        raise ValueError("edges must lead from an earlier generation to a later one; found a cycle or a wrong order")
    parent_height = heights(edges, len(total))[edges[:, 0]]
    aggregate = AGGREGATIONS[aggregation] if isinstance(aggregation, str) else aggregation
    for height in range(1, int(parent_height.max()) + 1):
        parents, children = edges[parent_height == height].T
        rows, segment = np.unique(parents, return_inverse=True)
        total[rows] += aggregate(total[children], segment, len(rows), rng)
    return total


def heights(edges: Ints, count: int) -> Ints:
    """Returns the longest number of edges from each generation down to a leaf, (N,)."""
    height = np.zeros(count, dtype=np.int64)
    while True:
        raised = height.copy()
        np.maximum.at(raised, edges[:, 0], height[edges[:, 1]] + 1)
        if np.array_equal(raised, height):
            return height
        height = raised


def _mean(values: Floats, segment: Ints, count: int, rng: np.random.Generator | None) -> Floats:
    sums = np.zeros((count, values.shape[1]))
    np.add.at(sums, segment, values)
    means: Floats = sums / np.bincount(segment, minlength=count)[:, None]
    return means


def _max(values: Floats, segment: Ints, count: int, rng: np.random.Generator | None) -> Floats:
    best = np.full((count, values.shape[1]), -np.inf)
    np.maximum.at(best, segment, values)
    return best


def _min(values: Floats, segment: Ints, count: int, rng: np.random.Generator | None) -> Floats:
    return -_max(-values, segment, count, rng)


def _random(values: Floats, segment: Ints, count: int, rng: np.random.Generator | None) -> Floats:
    draws = (rng or np.random.default_rng(0)).random(len(segment))
    order = np.lexsort((draws, segment))
    first = np.searchsorted(segment[order], np.arange(count))
    chosen: Floats = values[order[first]]
    return chosen


AGGREGATIONS: dict[str, Aggregate] = {"mean": _mean, "max": _max, "min": _min, "random": _random}


class Advantages(NamedTuple):
    """Advantages of N generations and what their groups were like.

    Attributes:
        values: (N,).
        zero_std: (N,), True in groups of two or more whose rewards are all equal.
        singleton: (N,), True in groups of one.
    """

    values: Floats
    zero_std: Bools
    singleton: Bools


def group_advantages(
    rewards: Floats,
    groups: Sequence[int] | Ints,
    norm: str = "std",
    ddof: int = 1,
    std_floor: float = 0.0,
    rounding: Floats | float = 0.0,
) -> Advantages:
    """Normalises rewards within groups; the order of the rows does not matter.

    ``std``: ``(R - mean) / (max(std, std_floor) + 1e-6)``; ``none``: ``R - mean`` (Dr. GRPO, arXiv:2503.20783);
    ``leave_one_out``: ``R - mean of the others`` (RLOO, arXiv:2402.14740). A group of one, and a group of equal
    rewards, gives 0 and never NaN.

    Args:
        rewards: (N,), finite.
        groups: (N,), any integers; equal ones are one group.
        rounding: (N,) or one number; rewards of a group are equal where they are no further apart than the largest.

    >>> group_advantages(np.array([1.0, 0, 0, 0]), [0, 0, 0, 0]).values.round(4).tolist()
    [1.5, -0.5, -0.5, -0.5]
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite; found {rewards[~np.isfinite(rewards)][0]}")
    _, group, size = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    n = size[group]
    centred = rewards - (np.bincount(group, rewards) / size)[group]
    highest, lowest, nothing = np.full(len(size), -np.inf), np.full(len(size), np.inf), np.zeros(len(size))
    np.maximum.at(highest, group, rewards)
    np.minimum.at(lowest, group, rewards)
    np.maximum.at(nothing, group, rounding)
    equal = (highest - lowest <= np.maximum(nothing, ROUNDING * np.maximum(1.0, np.abs(highest))))[group]
    if norm == "std":
        variance = np.bincount(group, centred**2) / np.maximum(size - ddof, 1)
        values = centred / (np.maximum(np.sqrt(variance), std_floor) + EPSILON)[group]
    else:
        values = centred * SCALES[norm](n)
    return Advantages(np.where(equal, 0.0, values), equal & (n > 1), n == 1)


SCALES: dict[str, Callable[[Ints], Floats]] = {
    "none": lambda n: np.ones(len(n)),
    "leave_one_out": lambda n: n / np.maximum(n - 1, 1),
}
"""By name: group sizes (N,) -> what ``R - mean`` is multiplied by. ``std`` is the third choice."""


def token_weights(agents: Ints, lengths: Ints, aggregation: str = "agent_mean", fixed_length: int = 1) -> Floats:
    """Returns what one token of each generation weighs in the objective, (N,); weights times lengths sum to 1.

    ``agent_mean``: mean over agents of mean over the agent's generations of mean over tokens (equation 8);
    ``sequence_mean``: mean over generations of mean over tokens; ``token_mean``: mean over all tokens (DAPO,
    arXiv:2503.14476); ``fixed_length``: token sums over ``N * fixed_length`` (Dr. GRPO), which need not sum to 1.
    Generations without a token that carries loss weigh nothing and are not counted.

    Args:
        agents: (N,), which agent made each generation.
        lengths: (N,), tokens that carry loss.
    """
    agents, lengths = np.asarray(agents, dtype=np.int64), np.asarray(lengths, dtype=np.int64)
    counted = lengths > 0
    if not counted.any():
        return np.zeros(len(lengths))
    weights = AGGREGATED[aggregation](agents[counted], lengths[counted].astype(np.float64), fixed_length)
    result = np.zeros(len(lengths))
    result[counted] = weights
    return result


def _agent_mean(agents: Ints, lengths: Floats, fixed_length: int) -> Floats:
    _, agent, generations = np.unique(agents, return_inverse=True, return_counts=True)
    return 1.0 / (len(generations) * generations[agent] * lengths)


def _sequence_mean(agents: Ints, lengths: Floats, fixed_length: int) -> Floats:
    return 1.0 / (len(lengths) * lengths)


def _token_mean(agents: Ints, lengths: Floats, fixed_length: int) -> Floats:
    return np.full(len(lengths), 1.0 / lengths.sum())


def _fixed_length(agents: Ints, lengths: Floats, fixed_length: int) -> Floats:
    return np.full(len(lengths), 1.0 / (len(lengths) * fixed_length))


AGGREGATED: dict[str, Callable[[Ints, Floats, int], Floats]] = {
    "agent_mean": _agent_mean,
    "sequence_mean": _sequence_mean,
    "token_mean": _token_mean,
    "fixed_length": _fixed_length,
}
"""By name: agents and lengths of the counted generations, the fixed length -> weight of one token of each."""


def regroup_singletons(groups: Ints, pools: Ints, size: int, rng: np.random.Generator) -> Ints:
    """Puts generations that are alone in their group together: per pool, shuffled, in chunks of ``size``.

    A last chunk of one joins the chunk before it; a lone one stays alone. Source: section 3.4, for round-robin.

    Args:
        groups, pools: (N,); a pool holds what may be grouped (one agent's acts, over the whole batch).

    Returns:
        (N,) groups; those of two or more are as they were.
    """
    _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    result = group.copy()
    free = len(sizes)
    for pool in np.unique(pools):
        alone = rng.permutation(np.flatnonzero((sizes[group] == 1) & (pools == pool)))
        chunk = np.arange(len(alone)) // size
        if len(alone) > size and len(alone) % size == 1:
            chunk[-1] -= 1
        result[alone] = free + chunk
        free += len(alone)
    return result


def group_similarity(tokens: Ints, rows: Ints, groups: Ints) -> Floats:
    """Returns how alike the responses of each group are, 0 (no token in common) to 1 (the same tokens).

    Of the distinct tokens of a group's responses, the share that another response of the group holds too, over all
    pairs together (a ratio of sums, so longer responses weigh more): ``sum_t c_t (c_t - 1) / ((n - 1) sum_i |A_i|)``,
    where c_t of the n responses hold token t and response i has |A_i| distinct ones. Linear in tokens.

    Args:
        tokens, rows: (K,), token ids and the generations 0..N-1 they belong to.
        groups: (N,), any integers.

    Returns:
        (M,) in the order of ``np.unique(groups)``, NaN for groups of one.

    >>> tokens, rows = np.array([5, 6, 5, 7]), np.array([0, 0, 1, 1])
    >>> group_similarity(tokens, rows, np.array([0, 0])).tolist()
    [0.5]
    """
    _, group, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    width, count = int(tokens.max(initial=0)) + 1, len(groups)
    keys = np.sort((group[rows] * width + tokens) * count + rows)
    held = keys[np.flatnonzero(np.diff(keys, prepend=-1))] // count
    starts = np.flatnonzero(np.diff(held, prepend=-1))
    holders = np.diff(starts, append=len(held))
    common = np.bincount(held[starts] // width, holders * (holders - 1.0), minlength=len(sizes))
    distinct = np.bincount(held // width, minlength=len(sizes))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(sizes > 1, common / ((sizes - 1.0) * distinct), np.nan)


def gae(rewards: Floats, values: Floats, gamma: float = 1.0, lambda_: float = 1.0) -> Floats:
    """Generalised advantages of one response's T tokens; nothing follows the last.

    ``A_t = delta_t + gamma lambda A_{t+1}``, ``delta_t = r_t + gamma V_{t+1} - V_t``. Source: arXiv:1506.02438,
    equation 16.

    Args:
        rewards, values: (T,).

    >>> gae(np.array([0.0, 1.0]), np.array([0.5, 0.5])).tolist()
    [0.5, 0.5]
    """
    advantages = np.zeros(len(values))
    following = following_value = 0.0
    for t in reversed(range(len(values))):
        delta = rewards[t] + gamma * following_value - values[t]
        following = advantages[t] = delta + gamma * lambda_ * following
        following_value = values[t]
    return advantages


def gae_over_turns(
    shared: Floats, specific: Floats, values: Floats, previous: Ints, team: Ints,
    gamma: float = 1.0, lambda_: float = 1.0, acts: Bools | None = None,
) -> Floats:  # fmt: skip
    """Generalised advantages over the turns of each team; where a trajectory forks, the mean of what follows.

    A turn earns its specific reward and what its team is paid from its step up to the team's next turn; acts of others
    lie in between as steps of the environment do.

    Args:
        shared: (N, T), what each team was paid by the step with generation n's response.
        specific: (N,), what each act earned alone; values: (N,), of the state before it.
        previous: (N,), the act before in the same trajectory, an earlier row, or -1.
        team: (N,), each act's team, a column of ``shared``.
        acts: (N,), which acts are turns of a learner that has values for them; by default all.

    Returns:
        (N,), 0 where an act is no turn.

    >>> paid, teams = np.array([[0.0, 0.0], [0.0, 0.0], [1.0, -1.0]]), np.array([0, 1, 0])
    >>> gae_over_turns(paid, np.zeros(3), np.zeros(3), np.array([-1, 0, 1]), teams).tolist()
    [1.0, -1.0, 1.0]
    """
    forks = np.bincount(previous[previous >= 0], minlength=len(values))
    advantages, ahead = np.zeros(len(values)), np.zeros((len(values), 3, shared.shape[1]))
    for act in reversed(range(len(values))):
        step, mine = ahead[act].copy(), team[act]  # by team: paid until its next turn, that turn's advantage and value
        step[0] += shared[act]
        if acts is None or acts[act]:
            paid, following, following_value = step[:, mine]
            delta = specific[act] + paid + gamma * following_value - values[act]
            advantages[act] = delta + gamma * lambda_ * following
            step[:, mine] = 0.0, advantages[act], values[act]
        if previous[act] >= 0:
            ahead[previous[act]] += step / forks[previous[act]]
    return advantages


def along_trajectories(values: Floats, previous: Ints) -> Floats:
    """Sums values over the other acts of each act's trajectory; where it forks later, the mean of the branches.

    Args:
        values: (N,); previous: (N,), the act before in the same trajectory, an earlier row, or -1.

    Returns:
        (N,), without the act's own value.

    >>> along_trajectories(np.array([1.0, 10.0, 100.0]), np.array([-1, 0, 1])).tolist()
    [110.0, 101.0, 11.0]
    """
    forks = np.bincount(previous[previous >= 0], minlength=len(values))
    before, after = np.zeros(len(values)), np.zeros(len(values))
    for act, earlier in enumerate(previous.tolist()):
        if earlier >= 0:
            before[act] = before[earlier] + values[earlier]
    for act in reversed(range(len(values))):
        if previous[act] >= 0:
            after[previous[act]] += (after[act] + values[act]) / forks[previous[act]]
    return before + after


def whiten(advantages: Sequence[Floats], pools: Ints) -> list[Floats]:
    """Brings the tokens of each pool to mean 0 and standard deviation 1 (population); a pool below 0 becomes 0.

    A pool whose advantages are all equal becomes 0, never NaN.

    Args:
        advantages: (R_i,) of each generation; pools: (N,).

    >>> [each.tolist() for each in whiten([np.array([1.0]), np.array([3.0]), np.array([9.0])], np.array([0, 0, -1]))]
    [[-1.0], [1.0], [0.0]]
    """
    result: list[Floats] = [np.zeros(len(each)) for each in advantages]
    for pool in np.unique(pools[pools >= 0]):
        rows = np.flatnonzero(pools == pool)
        tokens = np.concatenate([advantages[row] for row in rows])
        mean, std = tokens.mean(), tokens.std()
        if std <= ROUNDING * max(1.0, float(np.abs(tokens).max())):
            continue
        for row in rows:
            result[row] = (advantages[row] - mean) / std
    return result


def explained_variance(values: Floats, returns: Floats) -> float:
    """``1 - Var(returns - values) / Var(returns)``; NaN where returns do not vary.

    >>> explained_variance(np.array([0.0, 1.0]), np.array([0.0, 1.0]))
    1.0
    """
    spread = float(np.var(returns))
    return float("nan") if spread == 0.0 else 1.0 - float(np.var(returns - values)) / spread
