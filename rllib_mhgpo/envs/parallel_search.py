"""Search with two rewriters that work side by side: a graph, not a chain.

Neither searcher reads the other; the reranker reads what both found, so its generation has two parents. Everything
else is :class:`rllib_mhgpo.envs.search.SearchEnv`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rllib_mhgpo.data import Passage
from rllib_mhgpo.envs.search import SearchEnv, dealt


class ParallelSearchEnv(SearchEnv):
    """Two searchers, a reranker and an answerer; the ``top_k`` passages are shared out between the searchers.

    Arguments are those of :class:`SearchEnv`; ``prompts`` gives each searcher instructions of its own.
    """

    metadata: ClassVar[dict[str, Any]] = {**SearchEnv.metadata, "name": "parallel_search_v0"}
    kinds: ClassVar[Mapping[str, str]] = {
        "searcher_0": "rewriter",
        "searcher_1": "rewriter",
        "reranker": "reranker",
        "answerer": "answerer",
    }
    reads: ClassVar[Mapping[str, list[str]]] = {
        "searcher_0": [],
        "searcher_1": [],
        "reranker": ["searcher_0", "searcher_1"],
        "answerer": ["reranker"],
    }
    """Whose outputs are in each agent's prompt."""

    def act(self, agent: str, text: str) -> None:
        """As in :class:`SearchEnv`; says which generations the prompt was made of."""
        super().act(agent, text)
        self.infos[agent]["parents"] = self.reads[agent]

    def take(self, queries: list[str], found: Sequence[Sequence[Passage]]) -> None:
        """Adds what this searcher found to what the other did; repeated passages are removed, order kept."""
        searchers = [agent for agent, kind in self.kinds.items() if kind == "rewriter"]
        share, rest = divmod(self.top_k, len(searchers))
        share += searchers.index(self.agent_selection) < rest
        self.queries = list(dict.fromkeys([*self.queries, *queries]))
        self.passages = tuple(dict.fromkeys([*self.passages, *dealt(found, share)]))
