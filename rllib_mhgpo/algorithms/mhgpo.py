"""MHGPO: critic-free policy optimisation of several LLM agents with groups that cross prompts (arXiv:2506.02718).

Departures from its parent, GRPO (arXiv:2402.03300):

1. A rollout is a tree of generations of several agents; the strategy says where it forks (section 3.2).
2. The team's reward runs backwards along the agents' graph; a role's own penalty is added to it (section 3.3).
3. A group shares the root question and the agent, though its prompts may differ (section 3.4).
4. The objective is the mean over agents of the mean over their generations (equation 8).
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from rllib_mhgpo.algorithms.config import LLMConfig
from rllib_mhgpo.algorithms.llm_algorithm import Credit, LLMAlgorithm
from rllib_mhgpo.algorithms.registration import import_named
from rllib_mhgpo.algorithms.rewards import kl_rounding
from rllib_mhgpo.credit import group_advantages, regroup_singletons
from rllib_mhgpo.errors import ConfigError
from rllib_mhgpo.tree import FlatTrees, RolloutTree, flatten

Ints = NDArray[np.int64]


def by_question(flat: FlatTrees) -> Ints:
    """Heterogeneous groups: one a question, agent and n-th act, whatever the prompts; (N,)."""
    return _distinct(flat.tree, flat.agent, flat.act)


def by_prompt(flat: FlatTrees) -> Ints:
    """Homogeneous groups: the same, and the same prompt; (N,)."""
    prompts: dict[bytes, int] = {}
    prompt = np.array([prompts.setdefault(g.prompt.tobytes(), len(prompts)) for g in flat.generations])
    return _distinct(flat.tree, flat.agent, flat.act, prompt)


def _distinct(*columns: Ints) -> Ints:
    return np.unique(np.stack(columns), axis=1, return_inverse=True)[1].reshape(-1)


GROUP_KEYS: dict[str, Callable[[FlatTrees], Ints]] = {"question": by_question, "prompt": by_prompt}
"""By name: which generations are one group. A user's own is such a function, given as ``module:function``."""


def grouped(flat: FlatTrees, key: str) -> Ints:
    """Returns the groups that ``group_key`` makes, numbered from 0, (N,).

    Raises:
        ConfigError: the function did not return one value for each generation.
    """
    found = np.asarray(import_named("group_key", key, GROUP_KEYS)(flat))
    if found.shape != flat.agent.shape:
        raise ConfigError(
            f"config: group_key: {key}: expected one value for each of {len(flat.agent)} generations, "
            f"found an array of shape {found.shape}."
        )
    return np.unique(found, return_inverse=True)[1]


class MHGPOConfig(LLMConfig):
    """Keys of MHGPO; see docs/configuration.md for all."""

    group_size: Annotated[int, Field(ge=2, description="responses of a group, G")] = 4
    group_key: Annotated[str, Field(description="what a group shares: question, prompt or module:function")] = (
        "question"
    )
    advantage_norm: Annotated[
        Literal["std", "none", "leave_one_out"], Field(description="how rewards become advantages")
    ] = "std"
    advantage_ddof: Annotated[Literal[0, 1], Field(description="1: unbiased standard deviation")] = 1
    std_floor: Annotated[float, Field(ge=0, description="least standard deviation that rewards are divided by")] = 0.0
    drop_zero_std: Annotated[bool, Field(description="take groups of equal rewards out of the denominators")] = False
    refill_rounds: Annotated[
        int, Field(ge=0, description="times that questions without any spread are replaced by new ones (DAPO)")
    ] = 0

    def __init__(self, algo_class: Any = None) -> None:
        super().__init__(algo_class=algo_class or MHGPO)

    def validate(self) -> None:
        """Checks all values; see :class:`ConfigError`."""
        super().validate()
        import_named("group_key", self.group_key, GROUP_KEYS)


class MHGPO(LLMAlgorithm):
    """Samples trees, runs rewards back, normalises in heterogeneous groups."""

    @classmethod
    def get_default_config(cls) -> MHGPOConfig:
        """Returns the defaults."""
        return MHGPOConfig()

    def sample_trees(self) -> list[RolloutTree]:
        """Samples the iteration's trees; questions without anything to learn from may be replaced by new ones.

        No question is drawn twice in an iteration; once none is left, those without spread stay.
        """
        trees = super().sample_trees()
        drawn = {tree.root for tree in trees}
        for refill in range(self.config.refill_rounds):
            dull = self._without_spread(trees)
            spare = np.setdiff1d(np.arange(self.num_roots), list(drawn))
            if not len(dull) or not len(spare):
                break
            rng = np.random.default_rng((self.run_seed, self.iteration, refill))
            roots = rng.choice(spare, min(len(dull), len(spare)), replace=False).tolist()
            drawn.update(roots)
            for place, tree in zip(dull.tolist(), self.roll_out(roots), strict=False):
                trees[place] = tree
        return trees

    def _without_spread(self, trees: list[RolloutTree]) -> Ints:
        flat = flatten(trees, self.agents)
        credit = self.assign_credit(flat)
        with_spread = flat.tree[credit["counted"] & (credit["advantage"] != 0)]
        return np.setdiff1d(np.arange(len(trees)), with_spread)

    def assign_credit(self, flat: FlatTrees) -> Credit:
        """Adds to the rewards ``group``, ``advantage``, ``zero_std``, ``singleton``, and which are ``counted``."""
        rng = np.random.default_rng((self.run_seed, self.iteration))
        credit = self.rewards(flat, rng)
        trained, (group, alone) = np.flatnonzero(flat.trained), self._groups(flat, rng)
        advantages = group_advantages(
            credit["reward"][trained],
            group[trained],
            self.config.advantage_norm,
            self.config.advantage_ddof,
            self.config.std_floor,
            kl_rounding(flat, self.config)[trained],
        )
        for name, values in (("advantage", advantages.values), ("zero_std", advantages.zero_std)):
            credit[name] = np.zeros(len(group), dtype=values.dtype)
            credit[name][trained] = values
        counted = self.counted(flat) & ~(credit["zero_std"] & self.config.drop_zero_std)
        return {**credit, "group": group, "singleton": alone, "counted": counted}

    def _groups(self, flat: FlatTrees, rng: np.random.Generator) -> tuple[Ints, NDArray[np.bool_]]:
        """Returns the group of each generation, (N,), and which were alone in it and of their question before.

        Those are pooled, except with ``is``, whose groups share a prompt.
        """
        independent = self.config.rollout_strategy == "is"
        group = grouped(flat, "prompt" if independent else self.config.group_key)
        alone = _alone(group, flat.trained) & _alone(by_question(flat), flat.trained)
        if not independent:
            rows, pools = np.flatnonzero(alone), _distinct(flat.agent, flat.act)
            pooled = regroup_singletons(group[rows], pools[rows], self.config.group_size, rng)
            group[rows] = pooled + group.max(initial=0) + 1
        return group, alone


def _alone(group: Ints, among: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Returns which of some generations are alone in their group, whose numbers are 0 and above, (N,)."""
    members = np.bincount(group[among], minlength=group.max(initial=0) + 1)
    return np.asarray(among & (members == 1)[group])
