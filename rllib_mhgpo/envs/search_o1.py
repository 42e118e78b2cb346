"""Agentic search in the manner of Search-o1 (arXiv:2501.05366): a reader condenses what the searcher finds.

Each document found is read by itself, in a context of its own, and only the reader's note enters the searcher's. Meant
for evaluating models that were not trained for it; it trains like any other environment of two agents.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rllib_mhgpo.data import Passage
from rllib_mhgpo.envs.search import Told
from rllib_mhgpo.envs.token_env import TokenEnv
from rllib_mhgpo.envs.transcript import TranscriptEnv
from rllib_mhgpo.spaces import Tokens


class SearchO1Env(TranscriptEnv):
    """A searcher in one context, and a reader that is shown one document at a time; arguments as there."""

    metadata: ClassVar[dict[str, Any]] = {**TranscriptEnv.metadata, "name": "search_o1_v0"}
    kinds: ClassVar[Mapping[str, str]] = {"searcher": "searcher", "reader": "reader"}

    def start(self, index: int, split: str) -> None:
        """Takes question ``index`` of the split."""
        super().start(index, split)
        self.unread: list[Passage] = []
        self.notes: list[str] = []

    def next_agent(self) -> str | None:
        """The reader, while there are documents to read."""
        return "reader" if self.unread else super().next_agent()

    def told(self, agent: str) -> Told:
        """The reader is told the question, the queries so far and one document."""
        question, queries, passages = super().told(agent)
        return (question, queries, self.unread[:1]) if agent == "reader" else (question, queries, passages)

    def identity(self, agent: str) -> str:
        """A reader that hands the document on."""
        if agent != "reader":
            return super().identity(agent)
        return self.roles["searcher"].shown(self.unread[:1])

    def read(self, agent: str) -> Tokens:
        """The reader has no context but the document."""
        return TokenEnv.read(self, agent) if agent == "reader" else super().read(agent)

    def act(self, agent: str, text: str) -> None:
        """Adds a note; with the last one the searcher goes on."""
        if agent != "reader":
            super().act(agent, text)
            return
        note, legal = self.understood(agent, text)
        self.notes += [note] if note else []
        self.outputs[agent] = "\n".join(self.notes)
        self.unread = self.unread[1:]
        if not self.unread:
            self.append(self.notes)
            self.notes = []
        self.reward(agent, 0.0 if legal else self.penalties[agent])
        self.measure(agent, illegal=float(not legal), note_words=float(len(note.split())))

    def looked_up(self, found: Sequence[Passage]) -> None:
        """Hands what was found to the reader."""
        self.unread = list(found)
        if not self.unread:
            self.append([])
