"""Built retrievers in folders: vectors, corpus, encoder and what ties them together.

Holds no search and no pickle. The one idea: a folder is opened only when its parts are of one another; otherwise
passages would be found in silence that are not those indexed.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from rllib_mhgpo.data import Corpus, load_corpus
from rllib_mhgpo.errors import RetrievalError
from rllib_mhgpo.retrieval.encoder import Encoder
from rllib_mhgpo.retrieval.index import FlatIndex, SparseIndex
from rllib_mhgpo.retrieval.retriever import CACHE_SIZE, Retriever
from rllib_mhgpo.retrieval.tfidf import TfidfEncoder

_META, _CORPUS, _ENCODER = "meta.json", "corpus.arrow", "encoder.json"
_FORMAT = "rllib-mhgpo index 1"


def save_retriever(retriever: Retriever, folder: str | Path) -> None:
    """Writes a folder that :func:`open_retriever` reads, whole or not at all.

    Raises:
        RetrievalError: when the folder exists or cannot be written.
    """
    folder = Path(folder)
    part = folder.with_name(f"{folder.name}.part{os.getpid()}")
    if folder.exists():
        raise RetrievalError(f"{folder}: exists already; expected a new folder. Remove it or choose another name.")
    try:
        part.mkdir(parents=True)
        retriever.index.save(part)
        retriever.corpus.save(part / _CORPUS)
        _write(part / _ENCODER, retriever.encoder.state())
        _write(part / _META, _meta(retriever))
        os.replace(part, folder)
    except (OSError, RuntimeError) as error:  # FAISS raises RuntimeError when a file cannot be written
        shutil.rmtree(part, ignore_errors=True)
        raise RetrievalError(f"{folder}: the index cannot be written: {error}. Choose a place with room.") from error


def open_retriever(
    folder: str | Path, corpus: Corpus | None = None, encoder: Encoder | None = None, cache_size: int = CACHE_SIZE
) -> Retriever:
    """Opens a saved retriever; ``corpus`` and ``encoder`` are those to use instead of the folder's own.

    Raises:
        RetrievalError: when a part is missing or damaged, or when index, corpus and encoder are not of one another.
    """
    folder = Path(folder)
    meta = _read(folder / _META)
    if meta.get("format") != _FORMAT:
        raise RetrievalError(
            f"{folder / _META}: expected format {_FORMAT!r}, found {meta.get('format')!r}. Index anew."
        )
    try:
        index = (FlatIndex if meta["index"] == FlatIndex.file else SparseIndex).open(folder)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise RetrievalError(f"{folder}: the vectors cannot be read: {error}. Index anew.") from error
    corpus = corpus or load_corpus(folder / _CORPUS)
    encoder = encoder or _encoder(_read(folder / _ENCODER))
    retriever = Retriever(corpus, encoder, index, cache_size, f"the index {folder} ({meta['encoder']})")
    _same(folder, "corpus", meta["corpus_fingerprint"], corpus.fingerprint, corpus.source)
    _same(folder, "encoder", meta["encoder_fingerprint"], encoder.fingerprint, encoder.name)
    return retriever


def is_index_folder(folder: Path) -> bool:
    """Whether the folder looks like one that :func:`save_retriever` wrote."""
    return (folder / _META).is_file()


def _meta(retriever: Retriever) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "index": retriever.index.file,
        "passages": len(retriever.corpus),
        "width": retriever.index.width,
        "encoder": retriever.encoder.name,
        "encoder_fingerprint": retriever.encoder.fingerprint,
        "corpus_fingerprint": retriever.corpus.fingerprint,
    }


def _encoder(state: dict[str, Any]) -> Encoder:
    if state.pop("kind") == "tfidf":
        return TfidfEncoder(**state)
    from rllib_mhgpo.retrieval.hf_encoder import HFEncoder  # brings torch, which nothing else here needs

    return HFEncoder(**state)


def _same(folder: Path, part: str, wanted: str, found: str, name: str) -> None:
    if wanted != found:
        raise RetrievalError(
            f"{folder}: was built with another {part}: expected fingerprint {wanted[:12]}, found {found[:12]}"
            f" ({name}). Use that {part} or index anew."
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RetrievalError(f"{path}: expected a part of a saved index, found: {error}. Index anew.") from error
    return value


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
