"""How many of the supporting passages are found. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass

from rllib_mhgpo.data import Passage, Question, hops_found


@dataclass(frozen=True)
class HopRecall:
    """Shares of questions, at one k: all of whose supporting passages were found, and each hop's.

    ``by_hop[i]`` is over those questions that have so many hops; ``any_hop`` is the mean share of a question's hops.
    """

    k: int
    all_hops: float
    any_hop: float
    by_hop: tuple[float, ...]


def hop_recall(questions: Sequence[Question], found: Sequence[Sequence[Passage]], k: int) -> HopRecall:
    """The recall of the first ``k`` passages found for each question; all questions must have hops."""
    hits = [hops_found(question, passages[:k]) for question, passages in zip(questions, found, strict=True)]
    columns = [[hit[hop] for hit in hits if len(hit) > hop] for hop in range(max(map(len, hits)))]
    return HopRecall(
        k,
        sum(map(all, hits)) / len(hits),
        sum(sum(hit) / len(hit) for hit in hits) / len(hits),
        tuple(sum(column) / len(column) for column in columns),
    )
