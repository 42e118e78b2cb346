"""Rollout strategies: how many responses are drawn at each act, and which of them are trained.

A strategy is a pure function of where the rollout stands. It forks at an agent's first act only; counts and names
are those of section 3.2 of arXiv:2506.02718.
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
        num_agents: how many agents the environment has.
        act: the agent's act-th act in this trajectory, from 0.
        path: which sample was taken at each act so far.
    """

    root: int
    agent: str
    position: int
    num_agents: int
    act: int
    path: tuple[int, ...]


Strategy = Callable[[Visit], Sequence[bool]]
"""Returns one entry a response to draw: True when it is trained, False when it only carries rewards back."""


@dataclass(frozen=True)
class ForkOnFirst:
    """FoF: whoever acts first draws ``group_size`` responses, every later act one for each of them.

    >>> ForkOnFirst(4)(Visit(0, "rewriter", 0, 3, 0, ()))
    (True, True, True, True)
    >>> ForkOnFirst(4)(Visit(0, "reranker", 1, 3, 0, (2,)))
    (True,)
    """

    group_size: int

    def __call__(self, visit: Visit) -> tuple[bool, ...]:
        """Returns the trained flags of the responses to draw at this visit."""
        return (True,) * (self.group_size if not visit.path else 1)


STRATEGIES: dict[str, Callable[[int], Strategy]] = {"fof": ForkOnFirst}
"""By name: a function from the group size G to a strategy."""


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
