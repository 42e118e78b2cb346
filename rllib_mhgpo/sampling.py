"""Rollout strategies: how many responses are drawn at each act, and which of them are trained.

A strategy is one class with one method, a pure function of where the rollout stands. It forks at an agent's first act
only; names and counts are those of section 3.2 of arXiv:2506.02718.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np


class Visit(NamedTuple):
    """Where a trajectory stands when an agent is about to act.

    Attributes:
        root: index of the question.
        agent: who acts.
        position: the agent's place in the order of the environment's agents, from 0.
        num_agents: how many agents the environment has, n.
        act: the agent's act-th act in this trajectory, from 0.
        path: which sample was taken at each act so far.
        acts: for each act so far, which act of its agent it was, from 0.
    """

    root: int
    agent: str
    position: int
    num_agents: int
    act: int
    path: tuple[int, ...]
    acts: tuple[int, ...]


Strategy = Callable[[Visit], Sequence[bool]]
"""Returns one entry a response to draw: True when it is trained, False when it is drawn only for the reward.

Where one act draws both, the untrained response alone carries the reward back to the act before."""


@dataclass(frozen=True)
class Options:
    """What a strategy is built from.

    Attributes:
        group_size: G.
        num_agents: n.
        fork_probs: round-robin's probability of each agent to be the fork, (n,).
        fork_counts: responses each agent draws a state at its first act, (n,).
        seed: of the iteration; decides round-robin's forks.
    """

    group_size: int
    num_agents: int
    fork_probs: tuple[float, ...] | None = None
    fork_counts: tuple[int, ...] | None = None
    seed: tuple[int, ...] = (0, 0)


@dataclass(frozen=True)
class ForkOnFirst:
    """``fof``: whoever acts first draws G responses, every later act one for each of them: n G generations.

    >>> strategy = ForkOnFirst(Options(group_size=4, num_agents=3))
    >>> strategy(Visit(0, "rewriter", 0, 3, 0, (), ()))
    (True, True, True, True)
    >>> strategy(Visit(0, "reranker", 1, 3, 0, (2,), (0,)))
    (True,)
    """

    options: Options

    def __call__(self, visit: Visit) -> tuple[bool, ...]:
        """Returns the trained flags of the responses to draw."""
        return (True,) * (self.options.group_size if not visit.path else 1)


@dataclass(frozen=True)
class Oversampling:
    """``fof_os``: as ``fof``, and the last agent draws G for each trajectory that reaches it: (n - 1) G + G^2."""

    options: Options

    def __call__(self, visit: Visit) -> tuple[bool, ...]:
        """Returns the trained flags of the responses to draw."""
        is_last = visit.position == visit.num_agents - 1 and visit.act == 0
        return (True,) * (self.options.group_size if not visit.path or is_last else 1)


@dataclass(frozen=True)
class RoundRobin:
    """``rr``: a fork agent is drawn for each question; agents before it draw one, from it on as ``fof``."""

    options: Options

    def __call__(self, visit: Visit) -> tuple[bool, ...]:
        """Returns the trained flags of the responses to draw."""
        is_fork = visit.act == 0 and visit.position == self.fork(visit.root)
        return (True,) * (self.options.group_size if is_fork else 1)

    def fork(self, root: int) -> int:
        """Returns the position of the agent at which the question's rollout forks."""
        return _fork(self.options, root)


@lru_cache(maxsize=65536)
def _fork(options: Options, root: int) -> int:
    return int(np.random.default_rng((*options.seed, root)).choice(options.num_agents, p=options.fork_probs))


@dataclass(frozen=True)
class ForkCounts:
    """``fork_counts``: the k-th agent draws ``fork_counts[k]`` responses a state at its first act, later acts one."""

    options: Options

    def __call__(self, visit: Visit) -> tuple[bool, ...]:
        """Returns the trained flags of the responses to draw."""
        assert self.options.fork_counts is not None
        return (True,) * (self.options.fork_counts[visit.position] if visit.act == 0 else 1)


@dataclass(frozen=True)
class Independent:
    """``is``: each agent in turn draws G for one prompt; later agents draw one for each only to obtain the reward.

    The first of an agent's G outputs is carried on to the next agent's fork: G n (n + 1) / 2 generations, n G trained.
    """

    options: Options

    def __call__(self, visit: Visit) -> tuple[bool, ...]:
        """Returns the trained flags of the responses to draw."""
        trained = (True,) * self.options.group_size
        if not visit.path:
            return trained
        # the entry's first trained output is its sample 0; at later forks sample 0 is the untrained one
        carried = (0, *(int(act == 0) for act in visit.acts[1:]))
        return (False, *trained) if visit.path == carried and visit.act == 0 else (False,)


STRATEGIES: dict[str, Callable[[Options], Strategy]] = {
    "fof": ForkOnFirst,
    "fof_os": Oversampling,
    "rr": RoundRobin,
    "is": Independent,
    "fork_counts": ForkCounts,
}
"""By name: builds a strategy from its options. A user's own is such a class, given as ``module:Class``."""

ONE_TRAJECTORY = ForkOnFirst(Options(group_size=1, num_agents=1))
"""One trajectory a root: what evaluation needs."""


def deal_roots(seed: int, iteration: int, per_iteration: int, count: int) -> list[int]:
    """Returns the roots of an iteration: consecutive cuts of a new seeded permutation each epoch, none twice in a cut.

    The last roots of a permutation that do not fill an iteration are left out of that epoch. Depends on nothing but
    its arguments, so a restored run goes on where it was.

    >>> sorted(deal_roots(0, 0, 2, 4) + deal_roots(0, 1, 2, 4))
    [0, 1, 2, 3]
    """
    if not 1 <= per_iteration <= count:
        raise ValueError(f"expected 1 to {count} roots an iteration, found {per_iteration}")
    epoch, cut = divmod(iteration, count // per_iteration)
    order = _permutation(seed, epoch, count)
    return [int(root) for root in order[cut * per_iteration : (cut + 1) * per_iteration]]


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.random.default_rng((seed, epoch)).permutation(count)
