"""Makes a retriever from what a configuration says, and keeps built ones in folders.

Holds no search. The one idea: a specification is a word, a folder, or a mapping of the few things that can be chosen.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rllib_mhgpo.data import Corpus
from rllib_mhgpo.errors import ConfigError, did_you_mean
from rllib_mhgpo.retrieval.encoder import Encoder
from rllib_mhgpo.retrieval.retriever import CACHE_SIZE, Retriever, passage_texts
from rllib_mhgpo.retrieval.store import is_index_folder, open_retriever
from rllib_mhgpo.retrieval.tfidf import TfidfEncoder

Spec = str | Path | Mapping[str, Any]

_RECIPE = ("pooling", "cosine", "query_prefix", "passage_prefix", "max_tokens", "batch_size", "device")
_KEYS = ("encoder", "cache_size", *_RECIPE)


def build_retriever(corpus: Corpus, spec: Spec = "tfidf") -> Retriever:
    """Makes a retriever over ``corpus``.

    ``spec`` is ``"tfidf"``; or the local folder of a Hugging Face sentence encoder; or a folder that
    ``save_retriever`` wrote, which then must be of this corpus; or a mapping of ``encoder`` (one of these) and
    ``cache_size``, and for a sentence encoder ``batch_size``, ``device`` and the fields of its ``Recipe``.

    Raises:
        ConfigError: for a specification that is none of these.
        RetrievalError: for an encoder or an index that cannot be used.
    """
    options: dict[str, Any] = {"encoder": spec} if isinstance(spec, str | Path) else dict(spec)
    for key in options:
        if key not in _KEYS:
            known = ", ".join(_KEYS)
            raise ConfigError(f"retriever: unknown key {key!r}; expected {known}.{did_you_mean(key, _KEYS)}")
    name, cache_size = str(options.pop("encoder", "tfidf")), options.pop("cache_size", CACHE_SIZE)
    if not isinstance(cache_size, int) or cache_size < 0:
        raise ConfigError(f"retriever: cache_size: expected a number of queries of at least 0, found {cache_size!r}.")
    is_saved = is_index_folder(Path(name))
    if options and (name == "tfidf" or is_saved):
        found = ", ".join(map(repr, options))
        raise ConfigError(f"retriever {name!r}: expected no key but cache_size, found {found}. Remove it.")
    if is_saved:
        return open_retriever(name, corpus, cache_size=cache_size)
    return Retriever.build(corpus, _encoder(corpus, name, options), cache_size)


def _encoder(corpus: Corpus, name: str, options: dict[str, Any]) -> Encoder:
    if name == "tfidf":
        return TfidfEncoder.fit(passage_texts(corpus))
    if not Path(name).is_dir():
        raise ConfigError(
            f"retriever {name!r}: expected 'tfidf' or an existing folder of a sentence encoder or of a saved index."
            + did_you_mean(name, ["tfidf"])
        )
    from rllib_mhgpo.retrieval.hf_encoder import HFEncoder  # brings torch, which nothing else here needs

    return HFEncoder(name, **options)
