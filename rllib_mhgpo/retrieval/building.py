"""Builds an index folder from a file of passages; a build that was interrupted goes on where it stopped.

Knows neither Ray nor the terminal. The one idea: vectors of a fixed number of passages at a time go to their place in
one file, and a place is marked when it is filled; who fills which place, in which order or in how many processes, makes
no difference to the result.
"""

import fcntl
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rllib_mhgpo.data import Corpus, load_corpus
from rllib_mhgpo.data.cache import write_whole
from rllib_mhgpo.data.corpus import write_corpus
from rllib_mhgpo.data.corpus_files import is_arrow
from rllib_mhgpo.data.passages import read_passages
from rllib_mhgpo.errors import RetrievalError
from rllib_mhgpo.retrieval.approximate import Block, calibrate, check_factory, exact_neighbours, train_and_fill
from rllib_mhgpo.retrieval.base import passage_texts
from rllib_mhgpo.retrieval.bm25 import BM25Retriever
from rllib_mhgpo.retrieval.encoder import Encoder
from rllib_mhgpo.retrieval.index import FlatIndex, dense
from rllib_mhgpo.retrieval.retriever import CorpusRetriever, Retriever, comparable
from rllib_mhgpo.retrieval.store import (
    BM25,
    BUILDING,
    CORPUS,
    ENCODER,
    FILLED,
    META,
    VECTORS,
    describe,
    read_json,
    write_json,
)

PLACE = 512  # passages encoded at a time
_BLOCK = 65_536  # vectors added at a time
LOCK = "building.lock"
_ASKED = 200  # queries by which recall is measured

Encode = Callable[[Path, Encoder, Sequence[int]], Iterator[tuple[int, Block]]]
"""Given the folder, the encoder and places to fill: yields each place with its vectors, in any order."""


Report = Callable[[str, int, int], None]
"""Is told what is done, how much of it, of how much."""


def silent(what: str, done: int, total: int) -> None:
    """Tells nobody."""


def encode_here(folder: Path, encoder: Encoder, places: Sequence[int]) -> Iterator[tuple[int, Block]]:
    """Encodes in this process, one place after the other."""
    corpus = load_corpus(folder / CORPUS)
    return ((place, place_vectors(corpus, encoder, place)) for place in places)


def place_vectors(corpus: Corpus, encoder: Encoder, place: int) -> Block:
    """The vectors ``(at most PLACE, width)`` of the passages of one place."""
    texts = passage_texts(corpus[place * PLACE : (place + 1) * PLACE])
    return dense(comparable(encoder, texts, encoder.encode_passages(texts)))


def build_index(
    source: Path,
    folder: Path,
    encoder: Encoder | Callable[[Corpus], CorpusRetriever],
    factory: str = "Flat",
    seed: int = 0,
    encode: Encode = encode_here,
    report: Report = silent,
) -> dict[str, Any]:
    """Builds, or goes on building, the index of a file's passages.

    Args:
        source: the passages, in any layout that :func:`load_corpus` reads.
        folder: where the index goes.
        encoder: of sentences; or, for TF-IDF and BM25, what makes the whole retriever of the corpus at once.
        factory: of FAISS.
        seed: of the training sample and of the queries by which recall is measured.
        encode: who encodes.
        report: follows the build.

    Returns:
        What the folder says of itself.

    Raises:
        RetrievalError: when the folder holds an index, another build, or other things; or for too few passages.
    """
    name = getattr(encoder, "name", "") or str(getattr(encoder, "__name__", "retriever"))
    plan = {
        "source": str(source.resolve()),
        "source_bytes": source.stat().st_size if source.is_file() else None,
        "encoder": name,
        "encoder_fingerprint": getattr(encoder, "fingerprint", name),
        "factory": factory,
        "seed": seed,
    }
    _make(folder)
    with _alone(folder):
        _begin(folder, plan)
        report("reading passages", 0, 0)
        corpus = _corpus(source, folder / CORPUS)
        if callable(encoder):
            meta = _save_whole(folder, encoder(corpus))
        else:
            check_factory(factory, encoder.width)
            meta = _build_dense(folder, corpus, encoder, factory, seed, encode, report)
        for name in (VECTORS, FILLED, BUILDING):
            (folder / name).unlink(missing_ok=True)
    return meta


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps other builds out of the folder; the lock ends with the process, however it ends."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with nullcontext() if _is_locked(handle, folder) else _marked(folder / LOCK):
            yield
    finally:
        os.close(handle)


def _is_locked(handle: int, folder: Path) -> bool:
    """Locks a folder; False where its file system has no locks, as some of networks have none."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RetrievalError(f"{folder}: another process is building here. Wait for it, or choose another.") from error
    except OSError:
        return False
    return True


@contextmanager
def _marked(place: Path) -> Iterator[None]:
    """A file in the place of a lock: two builds at once could leave vectors of zeros."""
    try:
        with place.open("x") as file:
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
    except FileExistsError as error:
        holder = ""
        with suppress(OSError):  # it has ended in this moment
            holder = place.read_text()
        raise RetrievalError(
            f"{place}: {holder or 'another process'} is building here, or was killed while it did; this file system "
            "has no locks that would tell. If it is gone, remove this file and build again."
        ) from error
    except OSError as error:
        place.unlink(missing_ok=True)
        raise RetrievalError(f"{place}: cannot be written: {error}. Choose a place with room.") from error
    try:
        yield
    finally:
        place.unlink(missing_ok=True)


def _make(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise RetrievalError(f"{folder}: expected a new or empty folder, found a file. Choose another.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RetrievalError(f"{folder}: cannot be written: {error}. Choose a place with room.") from error


def _begin(folder: Path, plan: Mapping[str, Any]) -> None:
    if (folder / META).is_file():
        raise RetrievalError(f"{folder}: holds a whole index already. Remove it or choose another folder.")
    if (folder / BUILDING).is_file():
        begun = read_json(folder / BUILDING)
        if not isinstance(begun, dict):
            raise RetrievalError(f"{folder / BUILDING}: was changed: {begun!r:.80}. Remove the folder and begin anew.")
        for key, value in plan.items():
            if begun.get(key) != value:
                raise RetrievalError(
                    f"{folder}: another build was begun here: {key} {begun.get(key)!r}, now {value!r}. Finish that one,"
                    " remove the folder, or choose another."
                )
        return
    if any(file.name != LOCK for file in folder.iterdir()):
        raise RetrievalError(f"{folder}: expected a new or empty folder, found files in it. Choose another.")
    try:
        write_json(folder / BUILDING, plan)
    except OSError as error:
        raise RetrievalError(f"{folder}: cannot be written: {error}. Choose a place with room.") from error


def _corpus(source: Path, place: Path) -> Corpus:
    """The passages as the folder's own file, made once."""
    if not place.is_file():
        if is_arrow(source):
            load_corpus(source).save(place)
        else:
            write_whole(place, lambda part: write_corpus(read_passages(source), part, str(source)))
    corpus = load_corpus(place)
    corpus.source = str(source)
    return corpus


def _save_whole(folder: Path, retriever: CorpusRetriever) -> dict[str, Any]:
    if isinstance(retriever, BM25Retriever):
        retriever.save(folder / BM25)
        return describe(folder, retriever.corpus, retriever, BM25)
    assert isinstance(retriever, Retriever)
    retriever.index.save(folder)
    write_json(folder / ENCODER, retriever.encoder.state())
    return describe(folder, retriever.corpus, retriever.encoder, retriever.index.file)


def _build_dense(
    folder: Path,
    corpus: Corpus,
    encoder: Encoder,
    factory: str,
    seed: int,
    encode: Encode,
    report: Report,
) -> dict[str, Any]:
    write_json(folder / ENCODER, encoder.state())
    vectors = _fill(folder, corpus, encoder, encode, report)

    def blocks() -> Iterator[Block]:
        for begin in range(0, len(corpus), _BLOCK):
            report("adding to the index", begin, len(corpus))
            yield np.asarray(vectors[begin : begin + _BLOCK])

    index = train_and_fill(factory, encoder.width, len(corpus), blocks, seed)
    report("measuring recall", 0, 0)
    queries = _queries(corpus, encoder, seed)
    setting, reached = calibrate(index, queries, exact_neighbours(queries, blocks()))
    report("writing", 0, 0)
    _write_index(index, folder)
    return describe(
        folder, corpus, encoder, FlatIndex.file, factory=factory, search=setting, recall_at_10=reached, seed=seed
    )


def _fill(folder: Path, corpus: Corpus, encoder: Encoder, encode: Encode, report: Report) -> NDArray[np.float32]:
    """The vectors of all passages, on disk; those of places that are marked are there already."""
    places = -(-len(corpus) // PLACE)
    shape = (len(corpus), encoder.width)
    if not _has_size(folder / VECTORS, 4 * shape[0] * shape[1]):
        (folder / FILLED).unlink(missing_ok=True)  # which marks places of vectors that are gone
    vectors = _mapped(folder / VECTORS, np.dtype(np.float32), shape)
    filled = _mapped(folder / FILLED, np.dtype(np.uint8), (places,))
    missing = np.flatnonzero(np.asarray(filled) == 0).tolist()
    done = len(corpus) - sum(min(PLACE, len(corpus) - place * PLACE) for place in missing)
    report("encoding", done, len(corpus))
    for place, block in encode(folder, encoder, missing) if missing else ():
        vectors[place * PLACE : place * PLACE + len(block)] = block
        vectors.flush()
        filled[place] = 1
        filled.flush()
        done += len(block)
        report("encoding", done, len(corpus))
    return np.asarray(vectors)


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _mapped(path: Path, kind: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    size = int(np.prod(shape)) * kind.itemsize
    try:
        if not _has_size(path, size):
            with path.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)  # a full disk says so now, and does not kill the process
        return np.memmap(path, dtype=kind, mode="r+", shape=shape)
    except OSError as error:
        raise RetrievalError(f"{path}: {size:,} bytes cannot be written: {error}. Choose a place with room.") from error


def _queries(corpus: Corpus, encoder: Encoder, seed: int) -> Block:
    """Vectors of the first sentences of passages drawn at random, as queries."""
    rows = np.random.default_rng([seed, 1]).permutation(len(corpus))[:_ASKED]
    texts = [passage.text.partition(". ")[0][:200].strip() or passage.title for passage in corpus.take(rows.tolist())]
    texts = [text for text in texts if text.strip()] or ["?"]
    return dense(comparable(encoder, texts, encoder.encode_queries(texts)))


def _write_index(index: Any, folder: Path) -> None:
    import faiss

    part = folder / f"{FlatIndex.file}.part"
    try:
        faiss.write_index(index, str(part))
        os.replace(part, folder / FlatIndex.file)
    except (OSError, RuntimeError) as error:
        raise RetrievalError(f"{folder}: the index cannot be written: {error}. Make room and build on.") from error
