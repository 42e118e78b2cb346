"""Rollout trees: every generation of one root question, stored once.

Trajectories, groups and batches are walks over the tree; no generation is copied for them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rllib_mhgpo.spaces import Tokens

TEAM = "team"


@dataclass(slots=True)
class Generation:
    """One prompt and one response of one agent.

    Attributes:
        agent: who acted.
        prompt: token ids, (P,).
        response: token ids as sampled, EOS included, (R,).
        logprobs: log-probability of each response token under the distribution it was sampled from, (R,).
        truncated: the response ended by its length limit instead of an EOS.
        previous: index of the generation that acted before in the same trajectory, None at the root.
        parents: indices of the generations whose responses the prompt contains.
        act: this is the agent's act-th act in its trajectory, from 0.
        path: which sample was taken at each act from the root to here; names the generation within the tree.
        trained: whether it enters the loss; untrained ones only carry rewards back.
        team: the team whose shared reward the agent receives.
        specific: reward of the role alone for this act.
        shared: reward each team earned by this step.
        metrics: numbers of this act to be averaged.
        scores: numbers of the whole trajectory, where it ends here.
        record: what a reader wants to see of the whole trajectory, where it ends here.
    """

    agent: str
    prompt: Tokens
    response: Tokens
    logprobs: NDArray[np.float32]
    truncated: bool
    previous: int | None = None
    parents: tuple[int, ...] = ()
    act: int = 0
    path: tuple[int, ...] = ()
    trained: bool = True
    team: str = TEAM
    specific: float = 0.0
    shared: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    scores: dict[str, float] | None = None
    record: dict[str, object] | None = None


@dataclass(slots=True)
class RolloutTree:
    """All generations of one root; parents stand before their children.

    Attributes:
        root: index of the question.
        generations: in the order in which they were sampled.
        void: why trajectories of this tree were voided, one message each.
    """

    root: int
    generations: list[Generation] = field(default_factory=list)
    void: list[str] = field(default_factory=list)

    def add(self, generation: Generation) -> int:
        """Appends a generation and returns its index.

        Raises:
            ValueError: a parent is not an earlier generation of this tree (an unknown parent, or a cycle).
        """
        index = len(self.generations)
        for parent in generation.parents:
            if not 0 <= parent < index:
                raise ValueError(
                    f"question {self.root}, agent {generation.agent!r}: parent {parent} is not one of the {index} "
                    "generations before it"
                )
        self.generations.append(generation)
        return index

    def leaves(self) -> Iterator[int]:
        """Yields the generations at which trajectories ended."""
        return (index for index, generation in enumerate(self.generations) if generation.scores is not None)

    def trajectory(self, leaf: int) -> list[int]:
        """Returns the generations from the root to ``leaf`` in the order in which they acted."""
        indices: list[int] = []
        index: int | None = leaf
        while index is not None:
            indices.append(index)
            index = self.generations[index].previous
        return indices[::-1]

    def prune(self, leaf: int) -> None:
        """Removes a voided trajectory: ``leaf`` and its ancestors that no other trajectory needs."""
        doomed: set[int] = set()
        index: int | None = leaf
        while index is not None and not self._is_needed(index, doomed):
            doomed.add(index)
            index = self.generations[index].previous
        kept = [i for i in range(len(self.generations)) if i not in doomed]
        new = {old: i for i, old in enumerate(kept)}
        self.generations = [self.generations[old] for old in kept]
        for generation in self.generations:
            generation.parents = tuple(new[parent] for parent in generation.parents)
            generation.previous = None if generation.previous is None else new[generation.previous]

    def _is_needed(self, index: int, doomed: set[int]) -> bool:
        followers = (
            i for i, other in enumerate(self.generations) if other.previous == index or index in other.parents
        )
        return self.generations[index].scores is not None or any(i not in doomed for i in followers)
