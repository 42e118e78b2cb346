"""Answers queries with passages of a corpus.

Not a service and not a judge. The one idea: one call for all queries of a step; what is returned is a passage of the
corpus that the index found, or nothing.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from sklearn.preprocessing import normalize

from rllib_mhgpo.data import Corpus, Passage
from rllib_mhgpo.errors import RetrievalError
from rllib_mhgpo.retrieval.encoder import Encoder, Vectors
from rllib_mhgpo.retrieval.index import Index, make_index

CACHE_SIZE = 65_536
_BLOCK = 8_192  # passages encoded at a time


@dataclass
class RetrievalCounts:
    """What a retriever was asked since it was made: all queries, and those answered without a search."""

    queries: int = 0
    cache_hits: int = 0


class Retriever:
    """Searches ``corpus`` through ``index`` with queries encoded by ``encoder``.

    Shared by everything that searches: a copy is the retriever itself. The ``cache_size`` queries used last are
    remembered (0: none). ``counts`` tells what it was asked.

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
        self.corpus, self.encoder, self.index = corpus, encoder, index
        self.counts = RetrievalCounts()
        self._cache_size = cache_size
        self._cache: OrderedDict[str, tuple[int, list[int]]] = OrderedDict()  # query -> (k searched, rows)

    @classmethod
    def build(cls, corpus: Corpus, encoder: Encoder, cache_size: int = CACHE_SIZE) -> Self:
        """Encodes and indexes the whole corpus."""
        blocks = (_comparable(encoder, texts, encoder.encode_passages(texts)) for texts in _blocks(corpus))
        return cls(corpus, encoder, make_index(blocks, len(corpus), encoder.width), cache_size)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """For every query its at most k best passages, best first, distinct, equal ones by their id.

        Fewer than k is normal: a small corpus, or (TF-IDF) few or no passages that share a word with the query.
        The answer to a query does not depend on the others, and the answer for a smaller k is a prefix.

        Raises:
            RetrievalError: for k below 1, a blank query, or a query whose vector is not finite.
        """
        if k < 1:
            raise RetrievalError(f"k: expected a number of passages of at least 1, found {k}.")
        for position, query in enumerate(queries):
            if not query.strip():
                raise RetrievalError(f"query {position} of {len(queries)}: expected words, found {query!r}. Drop it.")
        self._remember(queries, k)
        found = {query: self._cache[query][1][:k] for query in queries}
        rows = sorted({row for hits in found.values() for row in hits})
        passages = dict(zip(rows, self.corpus.take(rows), strict=True))
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)
        return [[passages[row] for row in found[query]] for query in queries]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def _remember(self, queries: Sequence[str], k: int) -> None:
        """Puts the rows of all queries into the cache, searching only for those not there."""
        distinct = list(dict.fromkeys(queries))
        new = [query for query in distinct if query not in self._cache or self._cache[query][0] < k]
        if new:
            vectors = _comparable(self.encoder, new, self.encoder.encode_queries(new))
            for query, rows in zip(new, self.index.search(vectors, k, self.encoder.lexical), strict=True):
                self._cache[query] = (k, rows.tolist())
        for query in distinct:
            self._cache.move_to_end(query)
        self.counts.queries += len(queries)
        self.counts.cache_hits += len(queries) - len(new)


def passage_texts(passages: Iterable[Passage]) -> list[str]:
    """What an encoder reads of each passage: the title's line, then the text."""
    return [f"{passage.title}\n{passage.text}" if passage.title else passage.text for passage in passages]


def _blocks(corpus: Corpus) -> Iterator[list[str]]:
    for begin in range(0, len(corpus), _BLOCK):
        yield passage_texts(corpus[begin : begin + _BLOCK])


def _comparable(encoder: Encoder, texts: Sequence[str], vectors: Vectors) -> Vectors:
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
