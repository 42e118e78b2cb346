"""What goes to a learner and what a loss sees: a batch of generations, and a micro-batch of tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rllib_mhgpo.packing import right_pad
from rllib_mhgpo.spaces import Tokens
from rllib_mhgpo.tree import Generation


@dataclass(frozen=True)
class TrainBatch:
    """B generations and what the loss needs to know of each.

    Attributes:
        prompts, responses: token ids, (P_i,) and (R_i,) each.
        logprobs: of the responses when they were sampled, (R_i,) each.
        advantages: one a response, (B,), or one a token, (R_i,) each.
        weights: what one token weighs in its optimiser step's objective, (B,); 0 leaves a generation out.
        steps: which optimiser step of an epoch a generation belongs to, (B,).
        agents: who acts, B names; empty where it makes no difference.
        said: which tokens of each response the policy said, (R_i,) each, None where it said all.
        values, returns: of a critic before the update, and its targets, (R_i,) each; empty without a critic.
        critic_prompts: what the critic reads before each response; empty: the prompts.
        previous: the row before each in its trajectory or -1, (B,), where roles are updated one after the other.
    """

    prompts: Sequence[Tokens]
    responses: Sequence[Tokens]
    logprobs: Sequence[NDArray[np.float32]]
    advantages: NDArray[np.float64] | Sequence[NDArray[np.float64]]
    weights: NDArray[np.float64]
    steps: NDArray[np.int64]
    agents: Sequence[str] = ()
    said: Sequence[NDArray[np.bool_] | None] = ()
    values: Sequence[NDArray[np.float64]] = ()
    returns: Sequence[NDArray[np.float64]] = ()
    critic_prompts: Sequence[Tokens] = ()
    previous: NDArray[np.int64] | None = None

    @classmethod
    def of(
        cls,
        generations: Sequence[Generation],
        advantages: NDArray[np.float64] | Sequence[NDArray[np.float64]],
        weights: NDArray[np.float64],
        steps: NDArray[np.int64],
        **more: Any,
    ) -> "TrainBatch":
        """Takes tokens and log-probabilities from generations."""
        return cls(
            prompts=[generation.prompt for generation in generations],
            responses=[generation.response for generation in generations],
            logprobs=[generation.logprobs for generation in generations],
            advantages=advantages,
            weights=weights,
            steps=steps,
            agents=[generation.agent for generation in generations],
            said=[generation.said for generation in generations],
            **more,
        )

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def with_advantage(self) -> NDArray[np.bool_]:
        """Which responses have an advantage other than 0, (B,)."""
        if isinstance(self.advantages, np.ndarray):
            return np.asarray(self.advantages != 0)
        return np.array([bool(np.any(values)) for values in self.advantages], dtype=bool)

    def num_said(self, rows: NDArray[np.int64]) -> int:
        """How many tokens the policy said in some responses."""
        said = self.said or [None] * len(self)
        return sum(len(self.responses[row]) if (s := said[row]) is None else int(s.sum()) for row in rows)

    def take(self, rows: NDArray[np.int64]) -> "TrainBatch":
        """Returns some rows, (b,), whole trajectories where roles are updated one after the other."""
        place = np.full(len(self) + 1, -1)  # the last is that of -1, no row
        place[rows] = np.arange(len(rows))
        mine = rows.tolist()
        return TrainBatch(
            weights=self.weights[rows],
            steps=self.steps[rows],
            advantages=_some(self.advantages, mine),
            previous=None if self.previous is None else place[self.previous[rows]],
            **{name: _some(getattr(self, name), mine) for name in PER_ROW},
        )

    def weighted(self, factors: NDArray[np.float64]) -> "TrainBatch":
        """Returns the batch with every response's advantages multiplied by its factor, (B,)."""
        if isinstance(self.advantages, np.ndarray):
            return replace(self, advantages=self.advantages * factors)
        return replace(self, advantages=[a * f for a, f in zip(self.advantages, factors, strict=True)])

    def advantage_rows(self, rows: NDArray[np.int64], width: int) -> NDArray[np.float32]:
        """Advantages of some responses, (b, 1) where they are the same for all tokens, else (b, width)."""
        if isinstance(self.advantages, np.ndarray):
            return self.advantages[rows].astype(np.float32)[:, None]
        return right_pad([self.advantages[i].astype(np.float32) for i in rows], width)


PER_ROW = ("prompts", "responses", "logprobs", "agents", "said", "values", "returns", "critic_prompts")


def _some(values: Any, rows: list[int]) -> Any:
    """Returns some rows of an array or of a sequence, which may be empty."""
    return values[rows] if isinstance(values, np.ndarray) else [values[row] for row in rows] if len(values) else values


NOTHING = TrainBatch(
    prompts=[np.zeros(1, np.int32)],
    responses=[np.zeros(1, np.int32)],
    logprobs=[np.zeros(1, np.float32)],
    advantages=np.zeros(1),
    weights=np.zeros(1),
    steps=np.zeros(1, np.int64),
    values=[np.zeros(1)],
    returns=[np.zeros(1)],
    critic_prompts=[np.zeros(1, np.int32)],
)
"""One row that weighs nothing: what a learner computes while the others, with larger shards, compute theirs."""


@dataclass(frozen=True)
class MicroBatch:
    """What a loss hook sees of b generations; tensors are (b, R) unless said otherwise, 0 past a response's end.

    Attributes:
        logp, entropy: of the policy being trained.
        ref_logp: of the frozen reference, None where the loss does not use it.
        old_logp: of the policy before the update: recorded at sampling, or recomputed by the learner.
        engine_logp: recorded at sampling.
        importance: truncated importance weight of learner over engine, 1 where it is off.
        advantage: (b, 1) or (b, R).
        weight: 0 on columns that carry no loss.
        mask: True on response tokens that the policy said.
    """

    logp: Tensor
    entropy: Tensor
    ref_logp: Tensor | None
    old_logp: Tensor
    engine_logp: Tensor
    importance: Tensor
    advantage: Tensor
    weight: Tensor
    mask: Tensor
