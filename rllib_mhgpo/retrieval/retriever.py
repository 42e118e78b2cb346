"""Answers queries with passages of a corpus whose vectors an index holds.

Not a service and not a judge. The one idea: one call for all queries of a step; what is returned is a passage of the
corpus that the index found, or nothing.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Self

import numpy as np
from sklearn.preprocessing import normalize

from rllib_mhgpo.data import Corpus, Passage
from rllib_mhgpo.errors import RetrievalError
from rllib_mhgpo.retrieval.base import CACHE_SIZE, BaseRetriever, passage_texts
from rllib_mhgpo.retrieval.encoder import Encoder, Vectors
from rllib_mhgpo.retrieval.index import Index, Rows, make_index

_BLOCK = 8_192  # passages encoded at a time


class CorpusRetriever(BaseRetriever):
    """A retriever that finds rows of a corpus; equal passages are told apart by their row."""

    def __init__(self, corpus: Corpus, cache_size: int = CACHE_SIZE) -> None:
        super().__init__(cache_size)
        self.corpus = corpus

    @property
    def corpus_fingerprint(self) -> str:
        """The corpus's."""
        return str(self.corpus.fingerprint)

    def passages(self, found: Sequence[Sequence[int]]) -> list[list[Passage]]:
        """The passages of these rows, each read once."""
        rows = sorted({int(row) for hits in found for row in hits})
        passages = dict(zip(rows, self.corpus.take(rows), strict=True))
        return [[passages[int(row)] for row in hits] for hits in found]


class Retriever(CorpusRetriever):
    """Searches ``corpus`` through ``index`` with queries encoded by ``encoder``; equal scores are ordered by row.

    Raises:
        RetrievalError: when index and corpus differ in number, or index and encoder in width.
    """

    def __init__(
        self,
        corpus: Corpus,
        encoder: Encoder,
        index: Index,
        cache_size: int = CACHE_SIZE,
        index_name: str = "the index",
    ) -> None:
        if len(index) != len(corpus):
            raise RetrievalError(
                f"{index_name} holds {len(index)} vectors, the corpus ({corpus.source}) {len(corpus)} passages;"
                " expected one vector a passage. Build the index from this corpus."
            )
        if index.width != encoder.width:
            raise RetrievalError(
                f"encoder {encoder.name!r} makes vectors of width {encoder.width}, {index_name} holds width"
                f" {index.width}; expected equal widths. Use the encoder that the index was built with."
            )
        super().__init__(corpus, cache_size)
        self.encoder, self.index = encoder, index

    @property
    def encoder_fingerprint(self) -> str:
        """The encoder's."""
        return str(self.encoder.fingerprint)

    @classmethod
    def build(cls, corpus: Corpus, encoder: Encoder, cache_size: int = CACHE_SIZE) -> Self:
        """Encodes and indexes the whole corpus."""
        blocks = (comparable(encoder, texts, encoder.encode_passages(texts)) for texts in _blocks(corpus))
        return cls(corpus, encoder, make_index(blocks, len(corpus), encoder.width), cache_size)

    def find(self, queries: Sequence[str], k: int) -> list[Rows]:
        """The rows found for each query.

        Raises:
            RetrievalError: for a query whose vector is not finite.
        """
        started = time.perf_counter()
        vectors = comparable(self.encoder, queries, self.encoder.encode_queries(queries))
        encoded = time.perf_counter()
        rows = self.index.search(vectors, k, self.encoder.lexical)
        self.counts.encode_s += encoded - started
        self.counts.search_s += time.perf_counter() - encoded
        return rows


def comparable(encoder: Encoder, texts: Sequence[str], vectors: Vectors) -> Vectors:
    """Vectors that are finite, and of length 1 where the encoder asks for cosine.

    Raises:
        RetrievalError: naming the first text whose vector is not finite or, unless lexical, has no direction.
    """
    sums = np.asarray(abs(vectors).sum(axis=1)).ravel()
    wrong = ~np.isfinite(sums) if encoder.lexical or not encoder.cosine else ~(np.isfinite(sums) & (sums > 0))
    if wrong.any():
        text = texts[int(wrong.argmax())]
        raise RetrievalError(
            f"encoder {encoder.name!r}: expected a finite vector that is not zero, found another for the text"
            f" {text[:80]!r} (NaN, infinite or zero). Check the encoder's weights."
        )
    return normalize(vectors) if encoder.cosine else vectors


def _blocks(corpus: Corpus) -> Iterator[list[str]]:
    for begin in range(0, len(corpus), _BLOCK):
        yield passage_texts(corpus[begin : begin + _BLOCK])
