"""TF-IDF over the corpus's own vocabulary: an encoder that needs no model.

Every word has a column of its own; nothing is hashed, for words that share a column cap what any learner can reach.
Words of one letter and digits count, accents do not, and term counts enter by their logarithm.
"""

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from hashlib import sha256
from typing import Any, Self

import numpy as np
from scipy.sparse import csr_matrix
from sklearn.feature_extraction.text import TfidfVectorizer

from rllib_mhgpo.errors import RetrievalError

#: What a word is.
WORDS: dict[str, Any] = {"token_pattern": r"(?u)\b\w+\b", "strip_accents": "unicode"}
_OPTIONS: dict[str, Any] = {
    **WORDS,
    "sublinear_tf": True,
    "norm": None,  # the retriever normalises
    "dtype": np.float32,
}


class TfidfEncoder:
    """Weights ``(1 + ln tf) * (ln((1 + n) / (1 + df)) + 1)`` over a fixed vocabulary (scikit-learn's formula)."""

    name = "tfidf"
    cosine = True
    lexical = True

    def __init__(self, words: Sequence[str], idf: Sequence[float]) -> None:
        self._vectorizer = TfidfVectorizer(vocabulary=list(words), **_OPTIONS)
        self._vectorizer.idf_ = np.asarray(idf, dtype=np.float32)
        self.width = len(words)

    @classmethod
    def fit(cls, passages: Iterable[str]) -> Self:
        """Takes vocabulary and document frequencies from the passages.

        Raises:
            RetrievalError: when no passage holds a word.
        """
        fitted = TfidfVectorizer(**_OPTIONS)
        try:
            fitted.fit(passages)
        except ValueError as error:
            raise RetrievalError(f"tfidf: expected words in the passages, found none ({error}).") from error
        return cls(fitted.get_feature_names_out().tolist(), fitted.idf_.tolist())

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of vocabulary and weights."""
        return sha256(json.dumps(self.state()).encode()).hexdigest()

    def encode_queries(self, texts: Sequence[str]) -> csr_matrix:
        """Sparse rows ``(texts, width)``; a text without a known word is a zero row."""
        return csr_matrix(self._vectorizer.transform(texts))

    def encode_passages(self, texts: Sequence[str]) -> csr_matrix:
        """As queries."""
        return self.encode_queries(texts)

    def state(self) -> dict[str, Any]:
        """Words and their inverse document frequencies, in column order."""
        words = self._vectorizer.get_feature_names_out().tolist()
        return {"kind": "tfidf", "words": words, "idf": self._vectorizer.idf_.tolist()}
