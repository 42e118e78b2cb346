"""What an index of so many passages will take: bytes on disk, bytes in memory, before anything is built.

Pure arithmetic. The one idea: FAISS itself is asked what a vector takes in a factory's layout, by a small index of it.
"""

from dataclasses import dataclass

import faiss
import numpy as np

from rllib_mhgpo.retrieval.approximate import num_lists, train_and_fill

_PROBE = 4_096  # vectors of the small index
_EXACT = "Flat"


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
    """What the small index takes for its lists, once, and for each vector."""
    if factory == _EXACT:
        return 4 * count * width
    lists = num_lists(factory)
    small = factory.replace(f"IVF{lists}", "IVF16") if lists else factory
    rows = np.random.default_rng(0).standard_normal((_PROBE, width)).astype(np.float32)

    def size(number: int) -> int:
        index = train_and_fill(small, width, number, lambda: iter([rows[:number]]), 0)
        return int(faiss.serialize_index(index).nbytes)

    half, whole = size(_PROBE // 2), size(_PROBE)
    each = (whole - half) / (_PROBE // 2)
    once = max(0, whole - each * _PROBE) + 4 * width * max(0, lists - 16)
    return round(count * each + once)


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
