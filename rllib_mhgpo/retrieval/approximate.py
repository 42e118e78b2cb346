"""Indexes of FAISS's factory: Flat, IVF, PQ, HNSW and what they combine to, in memory, mapped, or on GPUs.

Knows rows and vectors, not passages. The one idea: how many lists or nodes a search visits is not guessed; it is
raised until enough of the exact neighbours are found, and what was reached is written down.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from rllib_mhgpo.errors import ConfigError, RetrievalError
from rllib_mhgpo.retrieval.encoder import Vectors
from rllib_mhgpo.retrieval.index import FlatIndex, Rows, dense, ordered

Block = NDArray[np.float32]

#: As ``gpu``: vectors of a Flat index as float16, in half of the memory.
HALF = "half"
#: Share of the ten exact neighbours that a search is to find.
WANTED_RECALL = 0.95
_SAMPLE_PER_LIST = 64  # training vectors a list: FAISS warns below 39
_SAMPLE = 65_536  # and at least so many


class FaissIndex:
    """An approximate index; ``search`` is exact in nothing but that equal scores are ordered by row."""

    file = "index.faiss"

    def __init__(self, index: Any) -> None:
        self._index = index
        self.width = int(index.d)

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def search(self, queries: Vectors, k: int, positive: bool) -> list[Rows]:
        """See :class:`~rllib_mhgpo.retrieval.index.Index`; fewer rows than k where the lists visited hold fewer."""
        try:
            scores, rows = self._index.search(dense(queries), min(k, len(self)))
        except RuntimeError as error:  # GPUs give 2,048 neighbours at most, and visit as many lists
            raise RetrievalError(f"FAISS cannot search for {k:,} passages: {_reason(error)}.") from error
        found = zip(scores.astype(np.float64), rows.astype(np.int64), strict=True)
        return [ordered(s[r >= 0], r[r >= 0], k, positive) for s, r in found]

    def save(self, folder: Path) -> None:
        """See :class:`~rllib_mhgpo.retrieval.index.Index`."""
        faiss.write_index(self._index, str(folder / self.file))


def check_factory(factory: str, width: int) -> None:
    """Refuses what FAISS's factory does not know, before any work.

    Raises:
        ConfigError: naming the factory string.
    """
    try:
        faiss.index_factory(width, factory, faiss.METRIC_INNER_PRODUCT)
        if any(int(links) < 2 for links in re.findall(r"HNSW(\d+)", factory)):
            raise RuntimeError("HNSW needs at least 2 links")  # which FAISS does not check: it aborts the process
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"index {factory!r}: FAISS's factory refuses it for vectors of width {width} ({_reason(error)}). Examples:"
            " Flat, IVF4096,Flat, IVF4096,PQ48, HNSW32; the number after PQ must divide the width."
        ) from error


def _reason(error: Exception) -> str:
    """What FAISS says, without the place in its source."""
    return str(error).rpartition(": ")[2].strip().rstrip(".") or "it is not known"


def num_lists(factory: str) -> int:
    """How many lists a factory string asks for, 0 where none.

    >>> num_lists("IVF4096,PQ48"), num_lists("OPQ16,IVF1024,PQ16"), num_lists("Flat")
    (4096, 1024, 0)
    """
    found = re.search(r"IVF(\d+)", factory)
    return int(found[1]) if found else 0


def train_and_fill(factory: str, width: int, count: int, blocks: Callable[[], Iterator[Block]], seed: int) -> Any:
    """A FAISS index of all blocks' rows, trained on a seeded sample of them.

    Raises:
        RetrievalError: for fewer rows than the training needs.
    """
    index = faiss.index_factory(width, factory, faiss.METRIC_INNER_PRODUCT)
    try:
        _train(index, factory, count, blocks, seed)
        for block in blocks():
            index.add(block)
    except RuntimeError as error:
        if isinstance(error, RetrievalError):
            raise
        raise RetrievalError(
            f"index {factory!r}: FAISS cannot build it of {count:,} passages ({_reason(error)}). Ask for fewer lists or"
            " bits, or for Flat."
        ) from error
    return index


def _train(index: Any, factory: str, count: int, blocks: Callable[[], Iterator[Block]], seed: int) -> None:
    if not index.is_trained:
        needed = max(num_lists(factory), 1 << 8 if "PQ" in factory else 1)
        if count < needed:
            raise RetrievalError(
                f"index {factory!r}: needs at least {needed:,} passages to be trained, found {count:,}."
                " Ask for fewer lists, or for Flat."
            )
        size = min(count, max(_SAMPLE, _SAMPLE_PER_LIST * num_lists(factory)))
        index.train(_sample(blocks(), np.random.default_rng(seed).permutation(count)[:size]))


def _sample(blocks: Iterator[Block], rows: Rows) -> Block:
    """The rows of these numbers, in their order of appearance."""
    rows, begin, kept = np.sort(rows), 0, []
    for block in blocks:
        part = rows[(rows >= begin) & (rows < begin + len(block))] - begin
        kept.append(np.asarray(block[part]))
        begin += len(block)
    return np.concatenate(kept)


def exact_neighbours(queries: Block, blocks: Iterable[Block], k: int = 10) -> Rows:
    """The rows ``(queries, k)`` of the largest inner products, −1 where there are fewer rows."""
    scores = np.full((len(queries), k), -np.inf, dtype=np.float32)
    rows = np.full((len(queries), k), -1, dtype=np.int64)
    begin = 0
    for block in blocks:
        found, where = faiss.knn(queries, np.ascontiguousarray(block), min(k, len(block)), faiss.METRIC_INNER_PRODUCT)
        scores, rows = np.hstack([scores, found]), np.hstack([rows, where + begin])
        best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        scores, rows = np.take_along_axis(scores, best, 1), np.take_along_axis(rows, best, 1)
        begin += len(block)
    return rows


def recall(found: Rows, exact: Rows) -> float:
    """Mean share of the exact rows that are among those found.

    >>> recall(np.array([[1, 2], [3, 4]]), np.array([[2, 9], [4, 3]]))
    0.75
    """
    shares = [np.isin(e[e >= 0], f).mean() for f, e in zip(found, exact, strict=True)]
    return float(np.mean(shares))


def calibrate(index: Any, queries: Block, exact: Rows) -> tuple[str, float]:
    """Raises what a search visits until it finds :data:`WANTED_RECALL` of the exact rows, or raising it finds no more.

    Returns:
        The setting, such as ``nprobe=16`` (empty where there is none), which the index now has, and its recall.
    """
    name, most = _effort(index)
    if not name:
        return "", recall(index.search(queries, exact.shape[1])[1], exact)
    effort, setting, reached = 1 if name == "nprobe" else 16, "", -1.0
    while True:
        setting, before = f"{name}={effort}", reached
        apply_setting(index, setting)
        reached = recall(index.search(queries, exact.shape[1])[1], exact)
        if reached >= WANTED_RECALL or effort >= most or (effort >= 64 and reached < before + 0.002):
            return setting, reached
        effort = min(2 * effort, most)


def apply_setting(index: Any, setting: str) -> None:
    """Sets what a search visits.

    Raises:
        RetrievalError: for a setting that the index does not have.
    """
    try:
        if setting:
            parameters: Any = faiss.ParameterSpace()
            parameters.set_index_parameters(index, setting)
    except RuntimeError as error:
        raise RetrievalError(f"search {setting!r}: the index has no such setting. Try nprobe=16.") from error


def open_faiss(path: Path, factory: str, setting: str, gpu: bool | str = False) -> FlatIndex | FaissIndex:
    """Maps an index file into memory, or copies it to all GPUs, shared out over them; ``half``: as float16."""
    flags = faiss.IO_FLAG_MMAP if num_lists(factory) else faiss.IO_FLAG_MMAP_IFC
    index = faiss.read_index(str(path), 0 if gpu else flags)
    apply_setting(index, setting)
    if gpu:
        index = _on_gpus(index, factory, gpu == HALF)
    return FlatIndex(index) if factory == "Flat" and not gpu else FaissIndex(index)


def _on_gpus(index: Any, factory: str, half: bool) -> Any:
    """The index on all GPUs that this process sees, each with a share of the vectors."""
    count = getattr(faiss, "get_num_gpus", lambda: 0)()
    if not count:
        raise ConfigError(
            "retriever: gpu: expected a GPU that this process may use (num_gpus_per_env_runner, or actors) and the"
            " package faiss-gpu, found none. Leave it out."
        )
    options = faiss.GpuMultipleClonerOptions()
    options.shard = True
    options.useFloat16 = half or "PQ" in factory  # PQ's float32 tables of 56 bytes and more exceed the shared memory
    try:
        return faiss.index_cpu_to_all_gpus(index, co=options)
    except RuntimeError as error:  # HNSW has no GPU code; or there is too little memory
        raise ConfigError(
            f"retriever: gpu: FAISS cannot put {factory!r} on {count} GPUs ({_reason(error)}). Leave it out, or build"
            " Flat or IVF."
        ) from error


def _effort(index: Any) -> tuple[str, int]:
    """The name of what a search visits, and its most."""
    inner = faiss.downcast_index(index.index) if isinstance(index, faiss.IndexPreTransform) else index
    if isinstance(inner, faiss.IndexIVF):
        return "nprobe", int(inner.nlist)
    if isinstance(inner, faiss.IndexHNSW):
        return "efSearch", 1024
    return "", 0
