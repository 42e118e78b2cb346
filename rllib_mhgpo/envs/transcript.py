"""Multi-hop search in a single context: one agent searches round by round and answers.

Each round is one act: a query or the answer between tags. What was found is appended between tags, so that a round's
prompt is the ids of everything before it; nothing is tokenized twice. Kind of R1-Searcher (arXiv:2503.05592) and
Search-R1 (arXiv:2503.09516), whose tags these are.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from rllib_mhgpo.data import Passage
from rllib_mhgpo.envs.search import SearchEnv
from rllib_mhgpo.kinds import whole_number
from rllib_mhgpo.metrics import score_answer
from rllib_mhgpo.spaces import Tokens


class TranscriptEnv(SearchEnv):
    """One agent, one context; it earns the answer's reward, and a penalty for every round that is out of form.

    A round out of form (no closed tag, an empty one, or more than one) finds nothing and the next begins; after
    ``max_rounds`` without an answer, or when the context is full, the episode ends with an empty one. Other arguments
    are those of :class:`SearchEnv`.

    Args:
        top_k: passages retrieved a search.
        max_rounds: acts of an episode, the answer included.
    """

    metadata: ClassVar[dict[str, Any]] = {**SearchEnv.metadata, "name": "transcript_v0"}
    kinds: ClassVar[Mapping[str, str]] = {"searcher": "searcher"}
    stop: ClassVar[tuple[str, ...]] = ("</search>", "</answer>")
    shared: ClassVar[tuple[str, ...]] = (*SearchEnv.shared, "found", "context")

    def __init__(self, tokenizer: Any = "tiny", top_k: int = 5, max_rounds: int = 5, **search: Any) -> None:
        self.max_rounds = whole_number("max_rounds", max_rounds)
        super().__init__(tokenizer, top_k=top_k, **search)

    def start(self, index: int, split: str) -> None:
        """Takes question ``index`` of the split."""
        super().start(index, split)
        self.rounds: list[str] = []
        self.answered = False
        self.found: Sequence[Passage] = ()
        self.context: Tokens | None = None
        self.is_full = False

    def next_agent(self) -> str | None:
        """The searcher, until it has answered, or its rounds or its context are used up."""
        return None if self.answered or self.is_full or len(self.rounds) == self.max_rounds else "searcher"

    def read(self, agent: str) -> Tokens:
        """Returns the ids of the whole context so far."""
        if self.context is None:
            self.context = super().read(agent)
        return self.context

    def act(self, agent: str, text: str) -> None:
        """Notes a query or the answer; see the class for the rewards."""
        self.rounds.append(text)
        self.outputs[agent] = "\n".join(self.rounds)
        said, legal = self.understood(agent, text)
        self.answered, self.answer = "answer" in said, said.get("answer", "")
        self.context = np.concatenate([self.read(agent), self.response])
        found, self.found, self.left_out = self.found, (), 0
        if self.next_agent() is not None:
            self.looked_up(found)
        self.reward(agent, 0.0 if legal else self.penalties[agent])
        self.measure(agent, illegal=float(not legal), passages_left_out=float(self.left_out))
        if self.next_agent() is None:
            self.reward_all(self._earned())
            self.measure(agent, unanswered=float(not self.answered), searches=float(len(self.queries)))
            self.measure(agent, **self._recall(range(len(self.passages))))
            self.score(**score_answer(self.answer, self.question.answers))

    def asked(self, text: str) -> list[str]:
        """The query of a round, where it holds one and another round follows."""
        if self.agent_selection != "searcher" or len(self.rounds) + 1 == self.max_rounds:
            return []
        said, _ = self.understood("searcher", text)
        return [said["search"]] if "search" in said else []

    def take(self, queries: list[str], found: Sequence[Sequence[Passage]]) -> None:
        """Takes what was found in this round; earlier passages stay."""
        self.queries += queries
        self.found = found[0]
        self.passages = tuple(dict.fromkeys([*self.passages, *self.found]))

    def looked_up(self, found: Sequence[Passage]) -> None:
        """Appends what was found to the context."""
        self.append([self.roles["searcher"].shown([passage]) for passage in found])

    def append(self, texts: Sequence[str]) -> None:
        """Appends texts as information; the last that do not fit are left out."""
        assert self.context is not None
        for kept in range(len(texts), -1, -1):
            context = np.concatenate([self.context, self.encode_text(information("\n".join(texts[:kept])))])
            if len(context) <= self.max_prompt_tokens or not kept:
                break
        self.left_out, self.context = len(texts) - kept, context
        self.is_full = len(context) > self.max_prompt_tokens


def information(shown: str) -> str:
    """Returns what is appended to a round: the passages found, between tags, or nothing but a line break.

    >>> information("Ada Abel: She was born in Kassel.")
    '\\n<information>\\nAda Abel: She was born in Kassel.\\n</information>\\n'
    """
    return f"\n<information>\n{shown}\n</information>\n" if shown else "\n"
