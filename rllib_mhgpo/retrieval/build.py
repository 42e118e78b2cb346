"""Makes a retriever from what a configuration says.

Holds no search. The one idea: a specification is a word, a folder or a mapping of the few things that can be chosen.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rllib_mhgpo.data import Corpus
from rllib_mhgpo.errors import ConfigError, did_you_mean
from rllib_mhgpo.retrieval.encoder import Encoder
from rllib_mhgpo.retrieval.retriever import CACHE_SIZE, Retriever, passage_texts
from rllib_mhgpo.retrieval.tfidf import TfidfEncoder

Spec = str | Path | Mapping[str, Any]


def build_retriever(corpus: Corpus, spec: Spec = "tfidf") -> Retriever:
    """Encodes and indexes ``corpus``."""
    options: dict[str, Any] = {"encoder": spec} if isinstance(spec, str | Path) else dict(spec)
    cache_size = options.pop("cache_size", CACHE_SIZE)
    return Retriever.build(corpus, _encoder(corpus, options), cache_size)


def _encoder(corpus: Corpus, options: dict[str, Any]) -> Encoder:
    name = options.pop("encoder")
    if name == "tfidf":
        return TfidfEncoder.fit(passage_texts(corpus))
    raise ConfigError(f"retriever {name!r} {did_you_mean(name, ['tfidf'])}")
