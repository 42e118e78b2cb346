"""What the retriever asks of an encoder.

Holds no encoder. The one idea: an encoder only maps texts to vectors; whether vectors are compared by cosine, and
what a similarity of zero means, it declares, and the retriever does it in one place for all.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

#: Rows of vectors, float32, ``(texts, width)``.
Vectors: TypeAlias = NDArray[np.float32] | csr_matrix


class Encoder(Protocol):
    """Maps texts to vectors whose inner product (or cosine) is their similarity.

    Another encoder may stand in for those of this package: any object with these members.
    """

    name: str
    #: Number of columns of the vectors.
    width: int
    #: Compare by cosine: both sides are scaled to length 1. Otherwise by inner product.
    cosine: bool
    #: A similarity of zero means that no word is shared, which is not a hit.
    lexical: bool

    @property
    def fingerprint(self) -> str:
        """Changes whenever the same text could get another vector."""

    def encode_queries(self, texts: Sequence[str]) -> Vectors:
        """One vector a query."""

    def encode_passages(self, texts: Sequence[str]) -> Vectors:
        """One vector a passage."""

    def state(self) -> dict[str, Any]:
        """What JSON needs to hold to make the encoder again; ``kind`` names its class."""
