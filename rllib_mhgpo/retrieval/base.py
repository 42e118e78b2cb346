"""What every retriever is: a search with one cache, one set of checks and one count.

Holds no vectors and no corpus. The one idea: a kind of retriever writes :meth:`BaseRetriever.find`, which answers
distinct queries that are worth asking; the rest is here, so that all kinds fail, count and remember alike.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from rllib_mhgpo.data import Passage
from rllib_mhgpo.data.corpus import is_unicode
from rllib_mhgpo.errors import RetrievalError

CACHE_SIZE = 65_536


@dataclass
class RetrievalCounts:
    """What a retriever was asked since it was made.

    All queries, those answered without a search, and the seconds spent on making vectors and on searching.
    """

    queries: int = 0
    cache_hits: int = 0
    encode_s: float = 0.0
    search_s: float = 0.0


class BaseRetriever(ABC):
    """Answers queries with passages; the ``cache_size`` queries used last are remembered (0: none).

    Shared by everything that searches: a copy is the retriever itself. ``counts`` tells what it was asked.
    """

    def __init__(self, cache_size: int = CACHE_SIZE) -> None:
        self.counts = RetrievalCounts()
        self._cache_size = cache_size
        self._cache: OrderedDict[str, tuple[int, Sequence[Any]]] = OrderedDict()  # query -> (k searched, found)

    @property
    def corpus_fingerprint(self) -> str:
        """Of what is searched; empty where it cannot be known."""
        return ""

    @property
    def encoder_fingerprint(self) -> str:
        """Of what ranks the passages; empty where it cannot be known."""
        return ""

    @abstractmethod
    def find(self, queries: Sequence[str], k: int) -> Sequence[Any]:
        """What is remembered for each of these distinct, filled queries: its at most k best, best first."""

    @abstractmethod
    def passages(self, found: Sequence[Sequence[Any]]) -> list[list[Passage]]:
        """The passages of what :meth:`find` returned."""

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """For every query its at most k best passages, best first, distinct.

        Fewer than k is normal: a small corpus, or (TF-IDF, BM25) few or no passages that share a word with the query.
        The answer to a query does not depend on the others, and the answer for a smaller k is a prefix.

        Raises:
            RetrievalError: for k below 1, a blank query, one that is not valid Unicode, or a search that fails.
        """
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise RetrievalError(f"k: expected a number of passages of at least 1, found {k}.")
        for position, query in enumerate(queries):
            if not query.strip():
                raise RetrievalError(f"query {position} of {len(queries)}: expected words, found {query!r}. Drop it.")
            if not is_unicode(query):
                raise RetrievalError(f"query {position} of {len(queries)}: holds half a character: {query[:80]!r}.")
        self._remember(queries, k)
        found = [self._cache[query][1][:k] for query in queries]
        while len(self._cache) > self._cache_size:
            self._cache.popitem(last=False)
        return self.passages(found)

    def known(self, queries: Sequence[str], k: int) -> int:
        """How many of these queries would be answered without a search."""
        return sum(query in self._cache and self._cache[query][0] >= k for query in queries)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def _remember(self, queries: Sequence[str], k: int) -> None:
        """Puts what is found for all queries into the cache, searching only for those not there."""
        distinct = list(dict.fromkeys(queries))
        new = [query for query in distinct if query not in self._cache or self._cache[query][0] < k]
        if new:
            found = self.find(new, k)
            if len(found) != len(new):
                raise RetrievalError(f"the retriever answered {len(found)} of {len(new)} queries; expected all.")
            for query, hits in zip(new, found, strict=True):
                self._cache[query] = (k, hits)
        for query in distinct:
            self._cache.move_to_end(query)
        self.counts.queries += len(queries)
        self.counts.cache_hits += len(queries) - len(new)


def passage_texts(passages: Iterable[Passage]) -> list[str]:
    """What an encoder reads of each passage: the title's line, then the text."""
    return [f"{passage.title}\n{passage.text}" if passage.title else passage.text for passage in passages]
