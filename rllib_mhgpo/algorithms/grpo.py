"""GRPO on a single context (arXiv:2402.03300): one agent, and a transcript is one generation.

The baseline of the single-context kind (R1-Searcher, arXiv:2503.05592; Search-R1, arXiv:2503.09516): the agent's rounds
are joined to one response in which what the environment inserted carries no loss. With one generation a trajectory,
everything else is MHGPO with one agent, which is GRPO.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rllib_mhgpo.algorithms.mhgpo import MHGPO, MHGPOConfig
from rllib_mhgpo.errors import ConfigError
from rllib_mhgpo.tree import Generation, RolloutTree


class GRPOConfig(MHGPOConfig):
    """Keys of MHGPO; the environment is ``transcript`` unless another single-agent one is given."""

    def __init__(self, algo_class: Any = None) -> None:
        super().__init__(algo_class=algo_class or GRPO)
        self.env = "transcript"


class GRPO(MHGPO):
    """MHGPO with one agent whose trajectories are single generations."""

    @classmethod
    def get_default_config(cls) -> GRPOConfig:
        """Returns the defaults."""
        return GRPOConfig()

    def check_agents(self) -> None:
        """Refuses environments of several agents."""
        if len(self.agents) != 1:
            raise ConfigError(
                f"config: env: GRPO trains one agent in one context, found the agents {self.agents}; use MHGPO or "
                "MAPPO, or an environment such as transcript."
            )
        super().check_agents()

    def roll_out(self, roots: Sequence[int]) -> list[RolloutTree]:
        """Plays training roots; each trajectory is one generation."""
        return [joined(tree) for tree in super().roll_out(roots)]


def joined(tree: RolloutTree) -> RolloutTree:
    """Returns the tree with each trajectory joined to one generation.

    Raises:
        ConfigError: a prompt does not go on from the prompt and response before it.
    """
    whole = RolloutTree(tree.root, void=list(tree.void), recorded=tree.recorded)
    for leaf in tree.leaves():
        whole.add(join_rounds([tree.generations[index] for index in tree.trajectory(leaf)], tree.root))
    return whole


def join_rounds(rounds: Sequence[Generation], root: int) -> Generation:
    """Joins the rounds of one context; tokens between them were inserted by the environment and were not said."""
    first, last = rounds[0], rounds[-1]
    tokens, logprobs, said = [first.response], [first.logprobs], [np.ones(len(first.response), bool)]
    context = np.concatenate([first.prompt, first.response])
    for each in rounds[1:]:
        if not np.array_equal(each.prompt[: len(context)], context):
            raise ConfigError(
                f"question {root}, agent {each.agent!r}: GRPO needs one context, in which each prompt is the prompt "
                f"and response before it and what was inserted; act {each.act} does not go on from the one before."
            )
        inserted = each.prompt[len(context) :]
        tokens += [inserted, each.response]
        logprobs += [np.zeros(len(inserted), np.float32), each.logprobs]
        said += [np.zeros(len(inserted), bool), np.ones(len(each.response), bool)]
        context = np.concatenate([each.prompt, each.response])
    shared: dict[str, float] = {}
    for each in rounds:
        for team, earned in each.shared.items():
            shared[team] = shared.get(team, 0.0) + earned
    return Generation(
        last.agent, first.prompt, np.concatenate(tokens), np.concatenate(logprobs),
        truncated=any(each.truncated for each in rounds), path=last.path, team=last.team,
        trained=first.trained, specific=sum(each.specific for each in rounds), shared=shared,
        metrics=mean_metrics(rounds), scores=last.scores, record=last.record, said=np.concatenate(said),
    )  # fmt: skip


def mean_metrics(rounds: Sequence[Generation]) -> dict[str, float]:
    """Averages what was measured over the rounds that measured it."""
    values: dict[str, list[float]] = {}
    for each in rounds:
        for name, value in each.metrics.items():
            values.setdefault(name, []).append(value)
    return {name: float(np.mean(found)) for name, found in values.items()}
