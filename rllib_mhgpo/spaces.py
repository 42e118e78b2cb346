"""The space of token sequences: what LLM agents observe and what they do."""

from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


class TokenSequence(gym.Space[Tokens]):
    """Sequences of 0 to ``max_length`` token ids, each below ``vocab_size``.

    An element is a one-dimensional integer array of its own length; nothing is padded. Two spaces are equal when
    their bounds are, so that several agents can share one policy. Samples have at most ``sample_length`` tokens.
    """

    def __init__(
        self, vocab_size: int, max_length: int, seed: int | None = None, sample_length: int | None = None
    ) -> None:
        if vocab_size < 1 or max_length < 1:
            raise ValueError(f"expected vocab_size and max_length of at least 1, found {vocab_size} and {max_length}")
        self.vocab_size, self.max_length = vocab_size, max_length
        self.sample_length = min(max_length, sample_length or max_length)
        super().__init__(shape=None, dtype=np.int32, seed=seed)

    def sample(self, mask: Any = None, probability: Any = None) -> Tokens:
        """Draws a length uniformly, then that many ids uniformly; masks are not supported."""
        if mask is not None or probability is not None:
            raise ValueError("TokenSequence.sample takes no mask and no probability")
        length = int(self.np_random.integers(self.sample_length + 1))
        return self.np_random.integers(self.vocab_size, size=length, dtype=np.int32)

    def contains(self, x: Any) -> bool:
        """True for a one-dimensional sequence of integers within both bounds."""
        ids = np.asarray(x)
        if ids.size == 0:
            return ids.ndim == 1
        is_flat = ids.ndim == 1 and np.issubdtype(ids.dtype, np.integer) and len(ids) <= self.max_length
        return bool(is_flat and ids.min() >= 0 and ids.max() < self.vocab_size)

    @property
    def is_np_flattenable(self) -> bool:
        """False: elements have no common length."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenSequence) and (self.vocab_size, self.max_length) == (
            other.vocab_size,
            other.max_length,
        )

    def __hash__(self) -> int:
        return hash((self.vocab_size, self.max_length))

    def __repr__(self) -> str:
        return f"TokenSequence({self.vocab_size}, {self.max_length})"
