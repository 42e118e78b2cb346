"""BM25: a retriever of its own, by the package bm25s, which keeps its scores in sparse columns that can be mapped.

Words are those of :mod:`tfidf` (one letter and digits count, accents do not); Lucene's formula with the constants that
the field's baselines use, k1 = 0.9 and b = 0.4.
"""

import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

import bm25s
import numpy as np
from sklearn.feature_extraction.text import CountVectorizer

from rllib_mhgpo.data import Corpus
from rllib_mhgpo.errors import RetrievalError
from rllib_mhgpo.retrieval.base import CACHE_SIZE, passage_texts
from rllib_mhgpo.retrieval.index import Rows, ordered
from rllib_mhgpo.retrieval.retriever import CorpusRetriever
from rllib_mhgpo.retrieval.tfidf import WORDS

K1, B = 0.9, 0.4
_BLOCK = 8_192
_words = CountVectorizer(**WORDS).build_analyzer()


class BM25Retriever(CorpusRetriever):
    """Searches ``corpus`` by BM25; passages that share no word with the query are not found.

    Raises:
        RetrievalError: when scores and corpus differ in number.
    """

    name = "bm25"
    fingerprint = sha256(f"bm25 lucene {K1} {B} {WORDS}".encode()).hexdigest()

    def __init__(
        self, corpus: Corpus, scores: Any, cache_size: int = CACHE_SIZE, index_name: str = "the index"
    ) -> None:
        if scores.scores["num_docs"] != len(corpus):
            raise RetrievalError(
                f"{index_name} holds {scores.scores['num_docs']} passages, the corpus ({corpus.source}) {len(corpus)};"
                " expected the same. Build the index from this corpus."
            )
        super().__init__(corpus, cache_size)
        self._scores = scores

    @property
    def encoder_fingerprint(self) -> str:
        """Of the way scores are counted."""
        return self.fingerprint

    @classmethod
    def build(cls, corpus: Corpus, cache_size: int = CACHE_SIZE) -> Self:
        """Counts the words of the whole corpus.

        Raises:
            RetrievalError: when no passage holds a word.
        """
        vocabulary: dict[str, int] = {}
        ids = [
            [vocabulary.setdefault(word, len(vocabulary)) for word in _words(text)]
            for begin in range(0, len(corpus), _BLOCK)
            for text in passage_texts(corpus[begin : begin + _BLOCK])
        ]
        if not vocabulary:
            raise RetrievalError("bm25: expected words in the passages, found none.")
        scores = bm25s.BM25(k1=K1, b=B, method="lucene")
        scores.index((ids, vocabulary), show_progress=False, create_empty_token=False)
        return cls(corpus, scores, cache_size)

    @classmethod
    def open(cls, folder: Path, corpus: Corpus, cache_size: int = CACHE_SIZE) -> Self:
        """Reads what :meth:`save` wrote, mapped into memory."""
        return cls(corpus, bm25s.BM25.load(folder, mmap=True, show_progress=False), cache_size, f"the index {folder}")

    def save(self, folder: Path) -> None:
        """Writes the scores into a folder."""
        self._scores.save(folder, show_progress=False)

    def find(self, queries: Sequence[str], k: int) -> list[Rows]:
        """The rows found for each query; a word that stands twice in it counts twice."""
        started = time.perf_counter()
        hits = [self._best(query, k) for query in queries]
        self.counts.search_s += time.perf_counter() - started
        return hits

    def _best(self, query: str, k: int) -> Rows:
        vocabulary = self._scores.vocab_dict
        ids = [vocabulary[word] for word in _words(query) if word in vocabulary]
        if not ids:
            return np.zeros(0, dtype=np.int64)
        scores = self._scores.get_scores_from_ids(ids)
        rows = np.flatnonzero(scores > 0).astype(np.int64)
        return ordered(scores[rows].astype(np.float64), rows, k, positive=True)
