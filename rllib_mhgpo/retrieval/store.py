"""Built retrievers in folders: corpus, index, encoder and what ties them together.

Holds no search and no pickle. The one idea: a folder describes itself, and is opened only when its parts are whole and
of one another; otherwise passages would be found in silence that are not those indexed.
"""

import json
import os
import shutil
from collections.abc import Mapping
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rllib_mhgpo import __version__
from rllib_mhgpo.data import Corpus, load_corpus
from rllib_mhgpo.errors import ConfigError, RetrievalError
from rllib_mhgpo.retrieval.approximate import open_faiss
from rllib_mhgpo.retrieval.base import CACHE_SIZE, BaseRetriever
from rllib_mhgpo.retrieval.bm25 import BM25Retriever
from rllib_mhgpo.retrieval.encoder import Encoder
from rllib_mhgpo.retrieval.index import FlatIndex, Index, SparseIndex
from rllib_mhgpo.retrieval.retriever import CorpusRetriever, Retriever
from rllib_mhgpo.retrieval.tfidf import TfidfEncoder

META, CORPUS, ENCODER, BM25 = "meta.json", "corpus.arrow", "encoder.json", "bm25"
BUILDING = "building.json"
#: What a build holds until it is ended: vectors, and which of them are there.
VECTORS, FILLED = "vectors.f32", "filled.u8"
_WORK = (META, BUILDING, VECTORS, FILLED)
_FORMAT = "rllib-mhgpo index 2"
#: What opening a folder reads of its own description.
_READ = {
    "index": str,
    "factory": str,
    "search": str,
    "passages": int,
    "encoder": str,
    "encoder_fingerprint": str,
    "corpus_fingerprint": str,
    "files": dict,
}
#: Files of at most so many bytes are compared with their checksum whenever a folder is opened; of larger ones the size.
CHECKED = 64 << 20


def save_retriever(retriever: BaseRetriever, folder: str | Path) -> None:
    """Writes a folder that :func:`open_retriever` reads, whole or not at all.

    Raises:
        RetrievalError: when the folder exists or cannot be written, or for a retriever that has no parts of its own.
    """
    folder = Path(folder)
    part = folder.with_name(f"{folder.name}.part{os.getpid()}")
    if folder.exists():
        raise RetrievalError(f"{folder}: exists already; expected a new folder. Remove it or choose another name.")
    if not isinstance(retriever, BM25Retriever | Retriever):
        raise RetrievalError(f"{folder}: expected a retriever with an index, found {type(retriever).__name__}.")
    try:
        part.mkdir(parents=True)
        retriever.corpus.save(part / CORPUS)
        if isinstance(retriever, BM25Retriever):
            retriever.save(part / BM25)
            describe(part, retriever.corpus, retriever, BM25)
        else:
            retriever.index.save(part)
            write_json(part / ENCODER, retriever.encoder.state())
            describe(part, retriever.corpus, retriever.encoder, retriever.index.file)
        os.replace(part, folder)
    except (OSError, RuntimeError) as error:  # FAISS raises RuntimeError when a file cannot be written
        shutil.rmtree(part, ignore_errors=True)
        raise RetrievalError(f"{folder}: the index cannot be written: {error}. Choose a place with room.") from error


def describe(folder: Path, corpus: Corpus, encoder: Any, index: str, **more: Any) -> dict[str, Any]:
    """Writes what makes the folder an index: after this it opens.

    Args:
        folder: holds all parts.
        corpus: the passages.
        encoder: an encoder, or the BM25 retriever, which has a name and a fingerprint as well.
        index: the file or folder of the vectors or scores.
        more: ``factory``, ``search``, ``recall_at_10``.
    """
    meta = {
        "format": _FORMAT,
        "index": index,
        "factory": "Flat" if index == FlatIndex.file else "",
        "metric": ("cosine" if encoder.cosine else "inner product") if index != BM25 else BM25,
        "search": "",
        "recall_at_10": None,
        **more,
        "passages": len(corpus),
        "repeats_left_out": corpus.repeats,
        "width": getattr(encoder, "width", 0),
        "encoder": encoder.name,
        "encoder_fingerprint": encoder.fingerprint,
        "corpus": corpus.source,
        "corpus_fingerprint": corpus.fingerprint,
        "versions": {"rllib-mhgpo": __version__, **{name: version(name) for name in ("numpy", "bm25s")}} | _faiss(),
        "files": {name: [size, sum_] for name, size, sum_ in _parts(folder)},
    }
    write_json(folder / META, meta)
    return meta


def open_retriever(
    folder: str | Path,
    corpus: Corpus | None = None,
    encoder: Encoder | None = None,
    cache_size: int = CACHE_SIZE,
    gpu: bool | str = False,
    device: str | None = None,
) -> CorpusRetriever:
    """Opens a saved retriever; ``corpus`` and ``encoder`` are those to use instead of the folder's own.

    Args:
        folder: what :func:`save_retriever` or ``rllib index build`` wrote.
        corpus: must have the content of the folder's own.
        encoder: must make the vectors of the folder's own.
        cache_size: queries remembered.
        gpu: search on the GPUs; several share the vectors out. ``half`` holds those of a Flat index as float16.
        device: of the encoder, by default that which it was made for.

    Raises:
        RetrievalError: when a part is missing or damaged, or when index, corpus and encoder are not of one another.
    """
    folder = Path(folder)
    meta = read_meta(folder)
    check_files(folder, meta, CHECKED)
    corpus = corpus or load_corpus(folder / CORPUS)
    check_corpus(folder, meta, corpus)
    try:
        if meta["index"] == BM25:
            _same(folder, "encoder", meta["encoder_fingerprint"], BM25Retriever.fingerprint, BM25)
            return BM25Retriever.open(folder / BM25, corpus, cache_size)
        index: Index = (
            open_faiss(folder / FlatIndex.file, meta["factory"], meta["search"], gpu)
            if meta["index"] == FlatIndex.file
            else SparseIndex.open(folder)
        )
    except (RetrievalError, ConfigError):
        raise
    except (OSError, ValueError, KeyError, RuntimeError) as error:  # FAISS raises RuntimeError
        raise RetrievalError(f"{folder}: the vectors cannot be read: {error}. Index anew.") from error
    encoder = encoder or _encoder(folder, device)
    retriever = Retriever(corpus, encoder, index, cache_size, f"the index {folder} ({meta['encoder']})")
    _same(folder, "encoder", meta["encoder_fingerprint"], encoder.fingerprint, encoder.name)
    return retriever


def is_index_folder(folder: Path) -> bool:
    """Whether the folder looks like one that :func:`save_retriever` wrote, or that a build has begun."""
    return (folder / META).is_file() or (folder / BUILDING).is_file()


def read_meta(folder: Path) -> dict[str, Any]:
    """What the folder says of itself.

    Raises:
        RetrievalError: for a folder that is no index, or whose build was not ended.
    """
    if not (folder / META).is_file() and (folder / BUILDING).is_file():
        raise RetrievalError(f"{folder}: the index is not complete. Give the command that builds it once more.")
    if not (folder / META).is_file():
        there = f"a folder without {META}" if folder.is_dir() else "no such folder"
        raise RetrievalError(f"{folder}: expected the folder of an index, found {there}. rllib index build makes one.")
    meta = read_json(folder / META)
    if not isinstance(meta, dict) or meta.get("format") != _FORMAT:
        found = meta.get("format") if isinstance(meta, dict) else meta
        raise RetrievalError(f"{folder / META}: expected format {_FORMAT!r}, found {found!r}. Index anew.")
    wrong = [key for key, kind in _READ.items() if not isinstance(meta.get(key), kind)]
    wrong = wrong or [name for name, told in meta["files"].items() if not _is_sum(told)]
    if wrong:
        raise RetrievalError(f"{folder / META}: {wrong[0]!r} is missing or was changed. Index anew.")
    return meta


def _is_sum(told: Any) -> bool:
    """Whether these are the size and the checksum of a file."""
    match told:
        case [int(), str()]:
            return True
    return False


def check_files(folder: Path, meta: Mapping[str, Any], up_to: float = float("inf")) -> None:
    """Compares all files with what was written: sizes, and checksums of those of at most ``up_to`` bytes.

    Raises:
        RetrievalError: naming the first file that differs.
    """
    for name, (size, checksum) in meta["files"].items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            seen = "no file" if found is None else f"{found:,} bytes"
            raise RetrievalError(f"{path}: expected {size:,} bytes, found {seen}. Index anew.")
        if size <= up_to and _checksum(path) != checksum:
            raise RetrievalError(f"{path}: has changed since it was written (SHA-256 differs). Index anew.")


def read_json(path: Path) -> Any:
    """The value of a JSON file.

    Raises:
        RetrievalError: when it is missing or damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RetrievalError(f"{path}: expected a part of a saved index, found: {error}. Index anew.") from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON file, whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
    os.replace(part, path)


def _encoder(folder: Path, device: str | None) -> Encoder:
    state = read_json(folder / ENCODER)
    if state.pop("kind") == "tfidf":
        return TfidfEncoder(**state)
    from rllib_mhgpo.retrieval.hf_encoder import HFEncoder, model_folder  # brings torch

    if not model_folder(state["folder"]).is_dir():
        raise RetrievalError(
            f"{folder}: was built with the encoder in {state['folder']}, where there is none. Put it there, or index"
            " anew."
        )
    return HFEncoder(**{**state, **({"device": device} if device else {})})


def check_corpus(folder: Path, meta: Mapping[str, Any], corpus: Corpus) -> None:
    """Compares number and content of the passages with those that were indexed.

    Raises:
        RetrievalError: naming what differs.
    """
    if len(corpus) != meta["passages"]:
        raise RetrievalError(
            f"the index {folder} holds {meta['passages']} vectors, the corpus ({corpus.source}) {len(corpus)} passages;"
            " expected one vector a passage. Build the index from this corpus."
        )
    _same(folder, "corpus", meta["corpus_fingerprint"], corpus.fingerprint, corpus.source)


def _same(folder: Path, part: str, wanted: str, found: str, name: str) -> None:
    if wanted != found:
        raise RetrievalError(
            f"{folder}: was built with another {part}: expected fingerprint {wanted[:12]}, found {found[:12]}"
            f" ({name}). Use that {part} or index anew."
        )


def _parts(folder: Path) -> list[tuple[str, int, str]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in _WORK)
    return [(str(path.relative_to(folder)), path.stat().st_size, _checksum(path)) for path in files]


def _checksum(path: Path) -> str:
    digest = sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def _faiss() -> dict[str, str]:
    import faiss

    return {"faiss": str(faiss.__version__)}
