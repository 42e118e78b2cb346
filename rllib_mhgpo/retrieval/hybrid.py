"""Several retrievers of one corpus as one, by reciprocal-rank fusion.

Source: Cormack, Clarke, Büttcher, "Reciprocal Rank Fusion outperforms Condorcet and individual Rank Learning Methods",
SIGIR 2009: score(d) = Σ over rankings of 1 / (60 + rank of d), ranks from 1.
"""

from collections import defaultdict
from collections.abc import Sequence

from rllib_mhgpo.errors import RetrievalError
from rllib_mhgpo.retrieval.base import CACHE_SIZE
from rllib_mhgpo.retrieval.retriever import CorpusRetriever

CONSTANT = 60
#: How many of each ranking are fused at least: the answer for a smaller k stays a prefix.
DEPTH = 100


class HybridRetriever(CorpusRetriever):
    """Fuses the rankings of retrievers over the same corpus; equal scores are ordered by row.

    Raises:
        RetrievalError: for fewer than two, or when their corpora differ.
    """

    def __init__(self, retrievers: Sequence[CorpusRetriever], cache_size: int = CACHE_SIZE) -> None:
        if len(retrievers) < 2:
            raise RetrievalError(f"hybrid: expected at least two retrievers, found {len(retrievers)}.")
        first, *others = retrievers
        for other in others:
            if other.corpus.fingerprint != first.corpus.fingerprint:
                raise RetrievalError(
                    f"hybrid: expected retrievers of one corpus, found {first.corpus!r} and {other.corpus!r}."
                    " Build both indexes from the same corpus."
                )
        super().__init__(first.corpus, cache_size)
        self._retrievers = tuple(retrievers)

    @property
    def encoder_fingerprint(self) -> str:
        """Of all retrievers."""
        return "+".join(retriever.encoder_fingerprint[:12] for retriever in self._retrievers)

    def find(self, queries: Sequence[str], k: int) -> list[list[int]]:
        """The rows of the fused ranking."""
        rankings = [retriever.find(queries, max(k, DEPTH)) for retriever in self._retrievers]
        fused = [fuse(lists)[:k] for lists in zip(*rankings, strict=True)]
        self.counts.encode_s = sum(retriever.counts.encode_s for retriever in self._retrievers)
        self.counts.search_s = sum(retriever.counts.search_s for retriever in self._retrievers)
        return fused


def fuse(rankings: Sequence[Sequence[int]]) -> list[int]:
    """The rows of all rankings by their fused score, equal ones by row.

    >>> fuse([[7, 3], [3, 9]])  # 3: 1/62 + 1/61, 7: 1/61, 9: 1/62
    [3, 7, 9]
    """
    scores: dict[int, float] = defaultdict(float)
    for ranking in rankings:
        for rank, row in enumerate(ranking, start=1):
            scores[int(row)] += 1 / (CONSTANT + rank)
    return sorted(scores, key=lambda row: (-round(scores[row], 12), row))
