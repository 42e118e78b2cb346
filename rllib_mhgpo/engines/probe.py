"""Whether an engine computes with the learner's weights: both score one fixed sequence, after every hand-over.

A hand-over can go wrong without a word: a tensor that is not taken, a copy in another layout that stays, prefixes
cached under the old weights. Each leaves samples whose log-probabilities are not those of the policy being trained.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rllib_mhgpo.errors import SyncError
from rllib_mhgpo.spaces import Tokens
from rllib_mhgpo.train_batch import TrainBatch

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest mean absolute difference of log-probabilities, by dtype: a hundred times what rounding makes."""

PROMPT, RESPONSE = 288, 8
"""Tokens of the fixed sequence: enough for whole blocks of any prefix cache."""


class Scores(Protocol):
    """An engine that says how likely a given response is."""

    def score(self, prompt: Tokens, response: Tokens, temperature: float, agent: str = "") -> NDArray[np.float32]:
        """Returns the log-probabilities of a response, (R,)."""


@dataclass(frozen=True)
class Probe:
    """A sequence, and what the learner says of it.

    Attributes:
        prompt, response: token ids.
        expected: the learner's log-probabilities of the response, (R,).
        temperature: at which they are.
        tolerance: largest mean absolute difference.
        agent: whose adapter computed them.
        policy: which of several they are of, for messages.
    """

    prompt: Tokens
    response: Tokens
    expected: NDArray[np.float32]
    temperature: float
    tolerance: float
    agent: str = ""
    policy: str = ""

    def check(self, engine: Scores) -> float:
        """Returns the mean absolute difference between the engine and the learner.

        Raises:
            SyncError: it is above the tolerance.
        """
        found = engine.score(self.prompt, self.response, self.temperature, self.agent)
        difference = float(np.abs(found - self.expected).mean())
        if not difference <= self.tolerance:
            worst = int(np.abs(found - self.expected).argmax())
            whose = f"the engine of policy {self.policy!r}" if self.policy else "the engine"
            raise SyncError(
                f"{whose} does not compute with the learner's weights: on a fixed sequence of {len(self.prompt)} + "
                f"{len(self.response)} tokens their log-probabilities differ by {difference:.3g} a token, expected at "
                f"most {self.tolerance:g}; at token {worst} the engine says {found[worst]:.6f}, the learner "
                f"{self.expected[worst]:.6f}. `rllib doctor FILE` looks for the cause; the last checkpoint is good."
            )
        return difference


def fixed_sequence(vocabulary: int, context: int) -> tuple[Tokens, Tokens]:
    """Returns a prompt and a response of arbitrary ids, the same for the same model."""
    length = min(PROMPT + RESPONSE, context - 1)
    ids = np.random.default_rng(0).integers(vocabulary, size=length).astype(np.int32)
    said = min(RESPONSE, length - 1)
    return ids[:-said], ids[-said:]


def as_batch(prompt: Tokens, response: Tokens, agents: list[str]) -> TrainBatch:
    """Returns what a learner takes to score the sequence, once for each agent."""
    count = len(agents)
    return TrainBatch(
        prompts=[prompt] * count,
        responses=[response] * count,
        logprobs=[np.zeros(len(response), np.float32)] * count,
        advantages=np.zeros(count),
        weights=np.zeros(count),
        steps=np.zeros(count, np.int64),
        agents=agents,
    )
