"""Makes a retriever from what a configuration says.

Holds no search. The one idea: a specification is a word, a folder, an address, or a mapping of the few things that can
be chosen; whether it brings passages of its own is told by it alone.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rllib_mhgpo.data import Corpus
from rllib_mhgpo.errors import ConfigError, did_you_mean
from rllib_mhgpo.retrieval.approximate import HALF
from rllib_mhgpo.retrieval.base import CACHE_SIZE, BaseRetriever, passage_texts
from rllib_mhgpo.retrieval.bm25 import BM25Retriever
from rllib_mhgpo.retrieval.encoder import Encoder
from rllib_mhgpo.retrieval.hybrid import HybridRetriever
from rllib_mhgpo.retrieval.retriever import CorpusRetriever, Retriever
from rllib_mhgpo.retrieval.store import check_corpus, check_files, is_index_folder, open_retriever, read_meta
from rllib_mhgpo.retrieval.tfidf import TfidfEncoder

Spec = str | Path | Mapping[str, Any]

#: Retrievers that are fitted to the words of a corpus, and the sentence encoder that a package of its own brings.
LEXICAL, PACKAGED = ("tfidf", "bm25"), "minilm"
RECIPE = ("pooling", "cosine", "query_prefix", "passage_prefix", "max_tokens", "batch_size", "device")
_SERVED = ("http://", "https://")
#: What their values are; the others are checked where they are used.
_VALUES: dict[str, tuple[str, type]] = {
    "pooling": ("a text", str),
    "cosine": ("true or false", bool),
    "query_prefix": ("a text", str),
    "passage_prefix": ("a text", str),
    "device": ("a text", str),
    "max_tokens": ("a whole number of at least 1", int),
    "batch_size": ("a whole number of at least 1", int),
}
_KEYS = ("encoder", "hybrid", "actors", "timeout_s", "gpu", "cache_size", *RECIPE)


def build_retriever(corpus: Corpus | None, spec: Spec = "tfidf") -> BaseRetriever:
    """Makes a retriever over ``corpus``, which is not needed where :func:`brings_passages`.

    ``spec`` is ``"tfidf"`` or ``"bm25"``; ``"minilm"`` or the local folder of a Hugging Face sentence encoder; a folder
    that ``rllib index build`` or ``save_retriever`` wrote, which then must be of this corpus; the address of a server
    that speaks Search-R1's protocol; or a mapping of ``encoder`` (one of these), or ``hybrid`` (several), and
    ``cache_size``; for a folder with an index ``gpu``, and ``actors``, a number of Ray actors that share it (where no
    Ray runs, it is opened here); for those and servers ``timeout_s``; for a sentence encoder ``batch_size``, ``device``
    and the fields of its ``Recipe``.

    Raises:
        ConfigError: for a specification that is none of these.
        RetrievalError: for an encoder or an index that cannot be used.
    """
    options = _options(spec)
    if "hybrid" in options:
        return _hybrid(corpus, options)
    name, cache_size = str(options.pop("encoder", "tfidf")), options.pop("cache_size", CACHE_SIZE)
    if isinstance(cache_size, bool) or not isinstance(cache_size, int) or cache_size < 0:
        raise ConfigError(f"retriever: cache_size: expected a number of queries of at least 0, found {cache_size!r}.")
    if name.startswith(_SERVED):
        from rllib_mhgpo.retrieval.http import HttpRetriever

        return HttpRetriever(name, cache_size=cache_size, **_only(options, name, "timeout_s"))
    if is_index_folder(Path(name).expanduser()):
        return _from_folder(corpus, str(Path(name).expanduser()), cache_size, options)
    if corpus is None:
        raise ConfigError(f"retriever {name!r}: needs a corpus to search. Name one, or give the folder of an index.")
    if name == "bm25":
        _only(options, name)
        return BM25Retriever.build(corpus, cache_size)
    if name == "tfidf":
        _only(options, name)
        return Retriever.build(corpus, TfidfEncoder.fit(passage_texts(corpus)), cache_size)
    return Retriever.build(corpus, sentence_encoder(name, _only(options, name, *RECIPE)), cache_size)


def brings_passages(spec: Any) -> bool:
    """Whether what is searched comes with the specification: the folder of an index, a server, several of these."""
    if isinstance(spec, Mapping):
        if "hybrid" in spec:
            parts = spec["hybrid"]
            return isinstance(parts, list | tuple) and all(map(brings_passages, parts))
        spec = spec.get("encoder", "tfidf")
    if not isinstance(spec, str | Path):
        return False
    return str(spec).startswith(_SERVED) or is_index_folder(Path(spec).expanduser())


def peek_retriever(spec: Any) -> None:
    """Looks at what a specification names: the description and the files' sizes of an index, an encoder's folder.

    Raises:
        ConfigError: for a specification that :func:`build_retriever` does not know.
        RetrievalError: for an index that cannot be used, as far as this shows it.
    """
    options = _options(spec)
    if "hybrid" in options:
        for part in _parts(options):
            peek_retriever(part)
        return
    for name in named_retrievers(options):
        folder = Path(name).expanduser()
        if is_index_folder(folder):
            check_files(folder, read_meta(folder), up_to=0)
        elif name not in LEXICAL and not name.startswith(_SERVED):
            _check_encoder(name)
            from rllib_mhgpo.retrieval.hf_encoder import model_folder

            model_folder(name)


def named_retrievers(spec: Any) -> Iterator[str]:
    """Yields the names, folders and addresses in a specification."""
    if isinstance(spec, Mapping):
        parts = spec.get("hybrid", [spec.get("encoder", "tfidf")])
        for part in parts if isinstance(parts, list | tuple) else ():
            yield from named_retrievers(part)
    elif isinstance(spec, str | Path):
        yield str(spec)


def sentence_encoder(name: str, options: Mapping[str, Any] | None = None) -> Encoder:
    """A sentence encoder by the name of its package or its folder.

    Raises:
        ConfigError: for neither.
    """
    _check_encoder(name)
    from rllib_mhgpo.retrieval.hf_encoder import HFEncoder  # brings torch, which nothing else here needs

    return HFEncoder(name, **dict(options or {}))


def _check_encoder(name: str) -> None:
    if name != PACKAGED and not Path(name).expanduser().is_dir():
        raise ConfigError(
            f"retriever {name!r}: expected {', '.join(map(repr, (*LEXICAL, PACKAGED)))}, the address of a server, or an"
            " existing folder of a sentence encoder or of a saved index." + did_you_mean(name, [*LEXICAL, PACKAGED])
        )


def _options(spec: Spec) -> dict[str, Any]:
    if not isinstance(spec, str | Path | Mapping):
        raise ConfigError(f"retriever: expected a name, a folder, an address or keys and values, found {spec!r}.")
    options: dict[str, Any] = {"encoder": spec} if isinstance(spec, str | Path) else dict(spec)
    if not isinstance(options.get("encoder", ""), str | Path):
        raise ConfigError(f"retriever: encoder: expected a name, a folder or an address, found {options['encoder']!r}.")
    for key in options:
        if key not in _KEYS:
            known = ", ".join(_KEYS)
            raise ConfigError(f"retriever: unknown key {key!r}; expected {known}.{did_you_mean(str(key), _KEYS)}")
        wanted, kind = _VALUES.get(key, ("", object))
        value = options[key]
        if not isinstance(value, kind) or (kind is int and (isinstance(value, bool) or options[key] < 1)):
            raise ConfigError(f"retriever: {key}: expected {wanted}, found {value!r}.")
    if options.get("gpu", False) not in (True, False, HALF):
        raise ConfigError(f"retriever: gpu: expected true, false or {HALF}, found {options['gpu']!r}.")
    return options


def _only(options: dict[str, Any], name: str, *known: str) -> dict[str, Any]:
    """The options, where all of them have a meaning for this kind of retriever."""
    foreign = [key for key in options if key not in known]
    if foreign:
        expected = ", ".join(("cache_size", *known)) if known else "no key but cache_size"
        raise ConfigError(f"retriever {name!r}: expected {expected}, found {', '.join(map(repr, foreign))}. Remove it.")
    return options


def _from_folder(corpus: Corpus | None, folder: str, cache_size: int, options: dict[str, Any]) -> BaseRetriever:
    _only(options, folder, "actors", "timeout_s", "gpu", "device")
    actors, timeout = options.pop("actors", 0), options.pop("timeout_s", None)
    if not actors or (actors is not True and isinstance(actors, int) and actors > 0 and not _ray_runs()):
        if timeout is not None and not actors:
            raise ConfigError("retriever: timeout_s: only actors and servers are waited for. Remove it.")
        return open_retriever(folder, corpus, cache_size=cache_size, **options)
    from rllib_mhgpo.retrieval.actors import ActorRetriever  # brings Ray, which nothing else here needs

    if corpus is not None:
        check_corpus(Path(folder), read_meta(Path(folder)), corpus)
    waits = {} if timeout is None else {"timeout_s": timeout}
    return ActorRetriever(folder, actors, cache_size=cache_size, **waits, **options)


def _hybrid(corpus: Corpus | None, options: dict[str, Any]) -> BaseRetriever:
    parts = _parts(options)
    del options["hybrid"]
    cache_size = options.pop("cache_size", CACHE_SIZE)
    _only(options, "hybrid")
    retrievers = []
    for part in parts:
        retriever = build_retriever(corpus, part)
        if not isinstance(retriever, CorpusRetriever):
            raise ConfigError(f"retriever: hybrid: expected retrievers in this process, found {part!r}.")
        retrievers.append(retriever)
        corpus = corpus or retriever.corpus
    return HybridRetriever(retrievers, cache_size)


def _parts(options: Mapping[str, Any]) -> Sequence[Any]:
    parts = options["hybrid"]
    if not isinstance(parts, list | tuple):
        raise ConfigError(f"retriever: hybrid: expected a list of retrievers, found {parts!r}.")
    return parts


def _ray_runs() -> bool:
    """Whether this process is part of a Ray session; without one there is nothing to share an index with."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())
