"""What an index of so many passages will take: bytes on disk, bytes in memory, before anything is built.

Pure arithmetic. The one idea: FAISS itself is asked what the code of a vector takes in a factory's layout.
"""

from dataclasses import dataclass
from typing import Any

import faiss

from rllib_mhgpo.errors import ConfigError
from rllib_mhgpo.retrieval.approximate import num_lists


@dataclass(frozen=True)
class Estimate:
    """Bytes of an index's parts.

    ``corpus`` and ``index`` stay on disk, ``vectors`` lie there while the index is built. ``building`` is the memory
    that the build needs at its peak, ``searching`` what the index takes in memory when all of it has been touched; it
    is mapped, so that all processes of a machine share it and less will do, slower.
    """

    corpus: int
    vectors: int
    index: int
    building: int
    searching: int

    @property
    def disk(self) -> int:
        """Free bytes that the build needs."""
        return self.corpus + self.vectors + self.index


def estimate(count: int, text_bytes: float, width: int, factory: str) -> Estimate:
    """Estimates the index of ``count`` passages of so many bytes of text each.

    The corpus is held twice for a moment, where it is written and freed of repeats, before there are vectors.
    """
    corpus = round(count * (text_bytes + 24))  # offsets and ids
    vectors = 4 * count * width
    index = _index_bytes(count, width, factory)
    sample = 4 * width * min(count, max(65_536, 64 * num_lists(factory)))
    return Estimate(corpus, vectors, index, index + 2 * sample, index)


def _index_bytes(count: int, width: int, factory: str) -> int:
    index = faiss.index_factory(width, factory, faiss.METRIC_INNER_PRODUCT)
    inner = faiss.downcast_index(index.index) if isinstance(index, faiss.IndexPreTransform) else index
    words = inner.pq.ksub if hasattr(inner, "pq") else 0
    once = 4 * width * (num_lists(factory) + words + (width if inner is not index else 0))
    return count * _vector_bytes(inner) + once


def _vector_bytes(index: Any) -> int:
    """What a vector takes: its code, and its id in an IVF, its links in an HNSW."""
    if isinstance(index, faiss.IndexIVF):
        return int(index.code_size) + 8
    if isinstance(index, faiss.IndexHNSW):
        graph: Any = index.hnsw
        links = graph.nb_neighbors(0) + graph.nb_neighbors(1) / (graph.nb_neighbors(1) - 1)
        return int(faiss.downcast_index(index.storage).sa_code_size() + 4 * links + 12)
    try:
        return int(index.sa_code_size())
    except RuntimeError as error:
        raise ConfigError("FAISS does not say what a vector takes in this index; nothing can be estimated.") from error


def readable(size: float) -> str:
    """Bytes in the unit that fits.

    >>> readable(999), readable(32_256_000_000)
    ('999 B', '32.3 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
