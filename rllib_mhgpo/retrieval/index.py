"""Exact nearest rows by inner product, dense in FAISS or sparse in SciPy.

Knows rows and vectors, not passages. The one idea: the order never depends on which queries are searched together.
FAISS sums in float32 and differently for small and large batches, so it proposes; the proposed rows are scored again
in float64, and equal scores are ordered by row.
"""

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, Self

import faiss
import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from rllib_mhgpo.retrieval.encoder import Vectors

Rows = NDArray[np.int64]

_DECIMALS = 9  # scores that agree to this many decimals are equal: float64 noise lies far below, float32 vectors above
_TIE = 1e-5  # what FAISS's float32 sums may be off by, for scores of about 1
_MARGIN = 8
#: FAISS searches one query after the other below so many values of all queries, by matrix products from there on; of
#: its own accord only from 128,000, when products have long been several times as fast. Scores are computed anew.
faiss.cvar.distance_compute_blas_threshold = 3_072
#: A sparse matrix whose dense copy would need more bytes than this stays sparse: almost all of it would be zeros.
DENSE_LIMIT = 64 * 2**20


class Index(Protocol):
    """Vectors by row."""

    #: The file that :meth:`save` writes.
    file: str
    #: Number of columns.
    width: int

    def __len__(self) -> int: ...

    def search(self, queries: Vectors, k: int, positive: bool) -> list[Rows]:
        """For every query the at most k best rows, best first, equal ones by row; ``positive``: scores above 0 only."""

    def save(self, folder: Path) -> None:
        """Writes the vectors into an existing folder."""


class FlatIndex:
    """A dense index: FAISS ``IndexFlatIP``."""

    file = "index.faiss"

    def __init__(self, index: Any) -> None:
        self._index = index
        self.width = int(index.d)

    @classmethod
    def of(cls, blocks: Iterable[NDArray[np.float32]], width: int) -> Self:
        """Indexes blocks of rows ``(n, width)``."""
        index = faiss.IndexFlatIP(width)
        for block in blocks:
            index.add(np.ascontiguousarray(block, dtype=np.float32))
        return cls(index)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Reads what :meth:`save` wrote."""
        return cls(faiss.read_index(str(folder / cls.file)))

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def search(self, queries: Vectors, k: int, positive: bool) -> list[Rows]:
        """See :class:`Index`."""
        asked = dense(queries)
        depth = min(k + _MARGIN, len(self))
        scores, rows = self._index.search(asked, depth)
        return [self._best(*found, k, positive) for found in zip(asked, scores, rows, strict=True)]

    def save(self, folder: Path) -> None:
        """See :class:`Index`."""
        faiss.write_index(self._index, str(folder / self.file))

    def _best(
        self, query: NDArray[np.float32], scores: NDArray[np.float32], rows: Rows, k: int, positive: bool
    ) -> Rows:
        last = min(k, len(rows)) - 1
        slack = _TIE * max(1.0, abs(float(scores[last])))
        lowest = max(float(scores[last]) - slack, float(np.finfo(np.float32).tiny) if positive else -np.inf)
        while scores[-1] >= lowest and len(rows) < len(self):  # rows not seen yet may tie with the k-th
            found = self._index.search(query[None], min(4 * len(rows), len(self)))
            scores, rows = found[0][0], found[1][0]
        rows = rows[(rows >= 0) & (scores >= lowest)]
        vectors = self._index.reconstruct_batch(rows).astype(np.float64)
        return ordered((vectors * query.astype(np.float64)).sum(axis=1), rows, k, positive)


class SparseIndex:
    """A sparse index, for vocabularies too wide to be held densely."""

    file = "index.npz"

    def __init__(self, vectors: sp.csr_matrix) -> None:
        self._vectors = vectors
        self._by_column = vectors.T.astype(np.float64).tocsr()
        self.width = int(vectors.shape[1])

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Reads what :meth:`save` wrote."""
        return cls(sp.csr_matrix(sp.load_npz(folder / cls.file)))

    def __len__(self) -> int:
        return int(self._vectors.shape[0])

    def search(self, queries: Vectors, k: int, positive: bool) -> list[Rows]:
        """See :class:`Index`; rows that share no column with the query have the score 0."""
        products = (sp.csr_matrix(queries, dtype=np.float64) @ self._by_column).tocsr()
        hits = []
        for begin, end in zip(products.indptr[:-1], products.indptr[1:], strict=True):
            scores, rows = products.data[begin:end], products.indices[begin:end].astype(np.int64)
            if not positive:
                full = np.zeros(len(self))
                full[rows] = scores
                scores, rows = full, np.arange(len(self))
            hits.append(ordered(scores, rows, k, positive))
        return hits

    def save(self, folder: Path) -> None:
        """See :class:`Index`."""
        sp.save_npz(folder / self.file, self._vectors)


def make_index(blocks: Iterable[Vectors], count: int, width: int) -> FlatIndex | SparseIndex:
    """Indexes ``count`` rows given in blocks; sparse ones stay sparse above :data:`DENSE_LIMIT`."""
    blocks = iter(blocks)
    first = next(blocks)
    if sp.issparse(first) and 4 * count * width > DENSE_LIMIT:
        return SparseIndex(sp.csr_matrix(sp.vstack([first, *blocks])))
    return FlatIndex.of((dense(block) for block in chain([first], blocks)), width)


def dense(vectors: Vectors) -> NDArray[np.float32]:
    """The vectors as a dense float32 array, rows next to each other."""
    array = vectors if isinstance(vectors, np.ndarray) else vectors.toarray()
    result: NDArray[np.float32] = np.ascontiguousarray(array, dtype=np.float32)
    return result


def ordered(scores: NDArray[np.float64], rows: Rows, k: int, positive: bool) -> Rows:
    """The k rows of the best scores, equal ones by row; ``positive``: scores above 0 only."""
    scores = scores.round(_DECIMALS)
    if positive:
        scores, rows = scores[scores > 0], rows[scores > 0]
    if len(rows) > 4 * k:  # sorting many rows for few is the price of common words
        keep = scores >= np.partition(scores, -k)[-k]
        scores, rows = scores[keep], rows[keep]
    best: Rows = rows[np.lexsort((rows, -scores))][:k]
    return best
