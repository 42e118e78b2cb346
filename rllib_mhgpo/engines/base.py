"""What every engine takes and gives."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rllib_mhgpo.spaces import Tokens


class Prompt(NamedTuple):
    """One prompt of a wave.

    Attributes:
        ids: (P,) token ids.
        seeds: one a response; a response depends on the weights, the prompt and its own seed alone, not on what else
            is in the wave (up to the rounding of another batch shape).
        max_tokens: most tokens of a response, EOS included.
        stop: texts that end a response as EOS does; they stay in it.
        agent: who is asked.
        env: the environment that asks, for players that are no language model.
    """

    ids: Tokens
    seeds: Sequence[int]
    max_tokens: int
    stop: tuple[str, ...] = ()
    agent: str = ""
    env: Any = None


class Completion(NamedTuple):
    """One sampled response.

    Attributes:
        ids: (R,) token ids, a sampled EOS included.
        logprobs: (R,), under the distribution that was sampled from (temperature included).
        truncated: ended by ``max_tokens`` instead of an EOS or a stop text.
    """

    ids: Tokens
    logprobs: NDArray[np.float32]
    truncated: bool


class Engine(Protocol):
    """Generates for a whole wave in one call."""

    def generate(self, prompts: Sequence[Prompt], temperature: float) -> list[list[Completion]]:
        """Returns one completion a seed for each prompt, in order; temperature 0 is greedy."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Takes new weights by their names in the model's state dict."""

    def remembering(self, held: list[Any] | None = None) -> AbstractContextManager[None]:
        """The context in which weights stay as they are, so that a prompt that extends an earlier one is read on.

        Args:
            held: what engines keep of prompts that have one bound together.
        """
        return nullcontext()

    def close(self) -> None:
        """Gives back what it holds beside its model, by default nothing; it generates no more."""
        return
