"""Rollout trees: every generation of one root question, stored once.

Trajectories, groups and batches are walks over the tree; no generation is copied for them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
        pays: whether its reward runs back to its parents; where an act draws both, only the untrained ones do.
        team: the team whose shared reward the agent receives.
        specific: reward of the role alone for this act.
        shared: reward each team earned by this step.
        metrics: numbers of this act to be averaged.
        scores: numbers of the whole trajectory, where it ends here.
        record: what a reader wants to see of the whole trajectory, where it ends here.
        said: which tokens of the response the policy said, (R,); None: all. The others carry no loss.
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
    pays: bool = True
    team: str = TEAM
    specific: float = 0.0
    shared: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    scores: dict[str, float] | None = None
    record: dict[str, object] | None = None
    said: NDArray[np.bool_] | None = None

    @property
    def response_said(self) -> Tokens:
        """The tokens that the policy said."""
        return self.response if self.said is None else self.response[self.said]

    @property
    def num_tokens(self) -> int:
        """How many tokens the policy said."""
        return len(self.response) if self.said is None else int(self.said.sum())


@dataclass(slots=True)
class RolloutTree:
    """All generations of one root; parents stand before their children.

    Attributes:
        root: index of the question.
        generations: in the order in which they were sampled.
        void: why trajectories of this tree were voided, one message each.
        recorded: whether it is kept for a reader, with what the environment says of each trajectory.
    """

    root: int
    generations: list[Generation] = field(default_factory=list)
    void: list[str] = field(default_factory=list)
    recorded: bool = False

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

    def paid_parents(self, child: int) -> list[int]:
        """Returns the parents to which the reward of ``child`` runs back.

        Those before a fork that does not pay are not: they are paid by the trajectory that was drawn for their reward.
        """
        first_paid, index = child, child
        while self.generations[index].pays and self.generations[index].previous is not None:
            first_paid = index = self.generations[index].previous  # type: ignore[assignment]
        if not self.generations[index].pays:
            first_paid = index
        return [parent for parent in self.generations[child].parents if parent >= first_paid and parent != child]

    def prune(self) -> None:
        """Removes what belongs to no finished trajectory; what has lost the trajectory that paid it is not trained."""
        kept = sorted({index for leaf in self.leaves() for index in self.trajectory(leaf)})
        new = {old: index for index, old in enumerate(kept)}
        self.generations = [self.generations[old] for old in kept]
        for generation in self.generations:
            generation.parents = tuple(new[parent] for parent in generation.parents)
            generation.previous = None if generation.previous is None else new[generation.previous]
        paid = {g.previous for g in self.generations if g.pays}
        for index, generation in enumerate(self.generations):
            generation.trained &= generation.scores is not None or index in paid


class FlatTrees(NamedTuple):
    """The N generations of several trees as arrays that cannot be written to, in order, parents before children.

    Attributes:
        generations: the generations themselves.
        tree: which tree each belongs to, (N,).
        agent: index of its agent in the list given, (N,).
        act: its agent's act-th act, (N,).
        edges: (E, 2), each a pair (parent, child) along which rewards run back.
        specific: (N,).
        shared: (N, T), what each team earned by its step.
        team: which of the T teams is its own, (N,).
        trained: (N,).
    """

    generations: list[Generation]
    tree: NDArray[np.int64]
    agent: NDArray[np.int64]
    act: NDArray[np.int64]
    edges: NDArray[np.int64]
    specific: NDArray[np.float64]
    shared: NDArray[np.float64]
    team: NDArray[np.int64]
    trained: NDArray[np.bool_]

    @property
    def previous(self) -> NDArray[np.int64]:
        """The row that acted before each in its trajectory, -1 at a root, (N,)."""
        starts = np.searchsorted(self.tree, self.tree)
        before = [-1 if g.previous is None else g.previous for g in self.generations]
        return np.where(np.array(before, dtype=np.int64) < 0, -1, starts + before)


def flatten(trees: Sequence[RolloutTree], agents: Sequence[str]) -> FlatTrees:
    """Lays trees out as arrays; ``agents`` gives the agents' indices."""
    generations = [generation for tree in trees for generation in tree.generations]
    starts = np.cumsum([0, *(len(tree.generations) for tree in trees)])
    edges = [
        (start + parent, start + child)
        for start, tree in zip(starts.tolist(), trees, strict=False)
        for child in range(len(tree.generations))
        for parent in tree.paid_parents(child)
    ]
    teams = list(dict.fromkeys(team for g in generations for team in (g.team, *g.shared)))
    shared = np.zeros((len(generations), len(teams)))
    for row, generation in enumerate(generations):
        for team, earned in generation.shared.items():
            shared[row, teams.index(team)] = earned
    place = {agent: index for index, agent in enumerate(agents)}
    flat = FlatTrees(
        generations,
        tree=np.repeat(np.arange(len(trees)), np.diff(starts)),
        agent=np.array([place[g.agent] for g in generations], dtype=np.int64),
        act=np.array([g.act for g in generations], dtype=np.int64),
        edges=np.array(edges, dtype=np.int64).reshape(-1, 2),
        specific=np.array([g.specific for g in generations]),
        shared=shared,
        team=np.array([teams.index(g.team) for g in generations], dtype=np.int64),
        trained=np.array([g.trained for g in generations], dtype=bool),
    )
    for column in flat[1:]:
        column.flags.writeable = False  # a function of the user's own reads them
    return flat
