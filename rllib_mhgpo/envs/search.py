"""Multi-hop search by three agents: one asks, the environment retrieves, one chooses, one answers.

Retrieval happens inside the step, for all environments of a wave in one call. Defaults are those of section 4.1 of
arXiv:2506.02718: at most 4 queries share 10 passages, penalties of 0.5 and 1 for illegal outputs, reward is the F1.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Self

from rllib_mhgpo.data import (
    Corpus,
    Passage,
    Question,
    Questions,
    hops_found,
    load_corpus,
    load_questions,
    peek_corpus,
    peek_questions,
)
from rllib_mhgpo.envs.minipedia import is_minipedia, minipedia, minipedia_corpus, parse_spec
from rllib_mhgpo.envs.prompts import AGENTS, check_value, load_prompts
from rllib_mhgpo.envs.token_env import Messages, TokenEnv
from rllib_mhgpo.errors import ConfigError, RolloutError, did_you_mean
from rllib_mhgpo.kinds import check_kind, whole_number
from rllib_mhgpo.metrics import load_reward, score_answer
from rllib_mhgpo.retrieval import BaseRetriever, build_retriever
from rllib_mhgpo.retrieval.build import brings_passages, peek_retriever

Outcome = tuple[bool, dict[str, float]]
"""Whether an output was legal, and what is measured of it."""

Told = tuple[str, Sequence[str], Sequence[Passage]]
"""Question, queries so far, passages."""

OWN = "own"
"""As corpus: the passages of the questions themselves."""

PENALTIES = {"rewriter": -0.5, "reranker": -1.0, "answerer": -1.0, "searcher": -0.5, "reader": 0.0}
"""By kind of role, where its output is illegal."""


class SearchEnv(TokenEnv):
    """Rewriter, retrieval, reranker, answerer; every agent earns the answer's reward and its own penalty.

    Args:
        tokenizer: see :class:`TokenEnv`.
        questions: ``minipedia:train``, a question file, or a mapping of ``file``, ``limit`` and ``shuffle`` (a seed).
        dev_questions: the same for evaluation; None has no dev split.
        corpus: ``minipedia:train``, a file of passages, or ``own``: the questions' passages; by default
            those of the retriever's index, where it is one, else the questions' own.
        retriever: ``tfidf``, ``bm25``, ``minilm``, the folder of a sentence encoder or of an index, or what
            :func:`build_retriever` takes.
        prompts: a built-in set, or changes of one; see :func:`load_prompts`.
        reward: ``f1``, ``em``, ``acc`` or ``module:function`` of (answer, golds), such as a reward model.
        penalties: True for the defaults, False for none, or a value by role.
        top_k: passages retrieved in all, dealt over the queries.
        max_prompt_tokens, max_response_tokens: see :class:`TokenEnv`.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "search_v0", "render_modes": ["ansi"], "is_parallelizable": False}
    shared: ClassVar[tuple[str, ...]] = (
        *TokenEnv.shared, "splits", "retriever", "roles", "reward_function", "penalties", "question", "passages"
    )  # fmt: skip
    kinds: ClassVar[Mapping[str, str]] = {agent: agent for agent in AGENTS}
    """What kind of role each agent plays, in the order in which they act."""

    def __init__(
        self,
        tokenizer: Any = "tiny",
        questions: str | Mapping[str, Any] | Questions = "minipedia:train",
        dev_questions: str | Mapping[str, Any] | Questions | None = "minipedia:dev",
        corpus: str | Corpus | None = None,
        retriever: str | Mapping[str, Any] | BaseRetriever = "tfidf",
        prompts: str | Mapping[str, Any] = "minipedia",
        reward: str = "f1",
        penalties: bool | Mapping[str, float] = True,
        top_k: int = 10,
        max_prompt_tokens: int = 1024,
        max_response_tokens: int = 128,
    ) -> None:
        self.roles = load_prompts(prompts, self.kinds)
        self.reward_function = load_reward(reward)
        self.penalties = load_penalties(penalties, self.kinds)
        self.top_k = whole_number("top_k", top_k)
        brought, own_passages = _passages_of(corpus, retriever)
        self.splits = {"train": _load_questions(questions, own_passages)}
        if dev_questions is not None:
            self.splits["dev"] = _load_questions(dev_questions, own_passages)
        if not isinstance(retriever, BaseRetriever):
            searched = None if brought else _load_corpus(corpus, questions, self.splits)
            retriever = build_retriever(searched, retriever)
        self.retriever = retriever
        super().__init__(list(self.kinds), tokenizer, max_prompt_tokens, max_response_tokens)
        self.timings |= dict.fromkeys(("retrieve_s", "encode_s", "search_s"), 0.0)

    @classmethod
    def check(cls, config: Mapping[str, Any]) -> None:
        """Refuses values of the arguments that cannot be right, before anything is loaded.

        Raises:
            ConfigError: a value of the wrong kind, an unknown name.
        """
        sources: dict[str, tuple[type, ...]] = {
            "questions": (str, Mapping, Questions),
            "dev_questions": (str, Mapping, Questions, NoneType),
            "corpus": (str, Corpus, NoneType),
        }
        for key, kinds in sources.items():
            _check_source(key, config.get(key, "minipedia:train"), kinds)
        retriever = config.get("retriever", "tfidf")
        if not isinstance(retriever, str | Mapping | BaseRetriever):
            raise ConfigError(
                f"env_config.retriever: expected a name, a folder or keys and values, found {retriever!r}."
            )
        load_prompts(config.get("prompts", "minipedia"), cls.kinds)
        load_reward(config.get("reward", "f1"))
        load_penalties(config.get("penalties", True), cls.kinds)

    @classmethod
    def peek(cls, config: Mapping[str, Any]) -> None:
        """Opens the files that the arguments name and reads a little of each; :meth:`check` comes before.

        Raises:
            MHGPOError: what a run would find wrong at its start, as far as this shows it.
        """
        corpus, retriever = config.get("corpus"), config.get("retriever", "tfidf")
        _, own_passages = _passages_of(corpus, retriever)
        for key in ("questions", "dev_questions"):
            spec = config.get(key)
            name = spec["file"] if isinstance(spec, Mapping) else spec
            if isinstance(name, str) and not is_minipedia(name):
                peek_questions(name, own_passages)
        if isinstance(corpus, str) and corpus != OWN and not is_minipedia(corpus):
            peek_corpus(corpus)
        if not isinstance(retriever, BaseRetriever):
            peek_retriever(retriever)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Of the training questions, the corpus and the retriever's encoder; a run is not continued with others."""
        found = {"corpus": self.retriever.corpus_fingerprint, "encoder": self.retriever.encoder_fingerprint}
        known = {name: fingerprint for name, fingerprint in found.items() if fingerprint}
        return {"questions": self.splits["train"].fingerprint, **known}

    def num_roots(self, split: str = "train") -> int:
        """Returns the number of questions; 0 where there is no such split."""
        return len(self.splits.get(split, ()))

    def root_id(self, index: int, split: str) -> str:
        """Returns the question's id."""
        return self.splits[split][index].id

    def pose(self, question: str) -> str:
        """Makes a split of one question without a gold, and returns the split's name.

        Raises:
            ConfigError: a blank question.
        """
        if not question.strip():
            raise ConfigError(f"expected a question, found {question!r}.")
        self.splits = {**self.splits, "posed": Questions([Question("posed", question, ("",))], "a question")}
        return "posed"

    def start(self, index: int, split: str) -> None:
        """Takes question ``index`` of the split."""
        self.question = self.splits[split][index]
        self.queries: list[str] = []
        self.passages: tuple[Passage, ...] = ()
        self.chosen: list[int] = []
        self.outputs: dict[str, str] = {}
        self.answer = ""
        self.left_out, self.cache_hits = 0, 0.0

    def next_agent(self) -> str | None:
        """Each agent once, in the order of :attr:`kinds`."""
        return next((agent for agent in self.kinds if agent not in self.outputs), None)

    def told(self, agent: str) -> Told:
        """Returns what a role is told: the question, the queries so far and the passages it is shown."""
        kind, question = self.kinds[agent], self.question.question
        if kind == "rewriter":
            return question, (), ()
        if kind == "answerer":
            return question, self.queries, [self.passages[position] for position in self.chosen]
        return question, self.queries, self.passages

    def identity(self, agent: str) -> str:
        """Returns what a role says that leaves things as they are: the question as query, or all passages chosen.

        Raises:
            ConfigError: the role has nothing to leave as it is.
        """
        question, _, passages = self.told(agent)
        if self.kinds[agent] == "rewriter":
            return question
        if self.kinds[agent] == "reranker":
            return self.roles[agent].choose(passages)
        raise ConfigError(f"{agent}: only rewriters and rerankers can be left out (identity).")

    def prompt(self, agent: str) -> Messages:
        """Renders the role's template; passages that do not fit are left out, the lowest-ranked first."""
        role = self.roles[agent]
        question, queries, shown = self.told(agent)

        def render(kept: Sequence[Any]) -> Messages:
            return role.messages(question, queries, kept)

        messages, self.left_out = self.fit(render, shown)
        if self.kinds[agent] == "reranker" and self.left_out:
            self.passages = self.passages[: len(self.passages) - self.left_out]
        return messages

    def act(self, agent: str, text: str) -> None:
        """Lets the role's output take effect; see :class:`SearchEnv` for the rewards."""
        self.outputs[agent] = text
        legal, numbers = getattr(self, f"_{self.kinds[agent]}")(agent, text)
        self.reward(agent, 0.0 if legal else self.penalties[agent])
        self.measure(agent, illegal=float(not legal), passages_left_out=float(self.left_out), **numbers)
        if self.next_agent() is None:
            self.reward_all(self._earned())
            self.score(**score_answer(self.answer, self.question.answers))

    def understood(self, agent: str, text: str) -> tuple[Any, bool]:
        """Returns what an output says by its role's parser, and whether it is legal.

        Raises:
            ConfigError: the parser fails, or returns what is of no use to the role.
        """
        kind, role = self.kinds[agent], self.roles[agent]
        value, legal = role.parse(text, self.passages) if kind == "reranker" else role.parse(text)
        check_value(kind, role.parser, value, len(self.passages))
        return value, legal

    def _rewriter(self, agent: str, text: str) -> Outcome:
        """The search itself is in :meth:`prefetch`."""
        queries, legal = self.understood(agent, text)
        recalled = self._recall(range(len(self.passages)))
        return legal, {"queries": float(len(queries)), "cache_hits": self.cache_hits, **recalled}

    def _reranker(self, agent: str, text: str) -> Outcome:
        self.chosen, legal = self.understood(agent, text)
        return legal, {"documents": float(len(self.chosen)), **self._recall(self.chosen)}

    def _answerer(self, agent: str, text: str) -> Outcome:
        self.answer, legal = self.understood(agent, text)
        return legal, {"answer_words": float(len(self.answer.split()))}

    def _recall(self, positions: Sequence[int]) -> dict[str, float]:
        """Share of the supporting passages among those at these positions, nothing where none are known."""
        found = hops_found(self.question, [self.passages[position] for position in positions])
        return {"recall": sum(found) / len(found)} if found else {}

    def _earned(self) -> float:
        try:
            reward = self.reward_function(self.answer, self.question.answers)
        except Exception as error:
            raise ConfigError(f"reward: the function failed on question {self.question.id!r}: {error!r}.") from error
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise ConfigError(f"reward: expected a number for question {self.question.id!r}, found {reward!r}.")
        if not math.isfinite(reward):
            raise RolloutError(
                f"question {self.question.id!r}, agent 'answerer': expected a finite reward, found {reward}."
            )
        return float(reward)

    @classmethod
    def prefetch(cls, envs: Sequence[Self], texts: Sequence[str]) -> None:
        """Retrieves for all environments of the wave in one call."""
        asked = [(env, queries) for env, text in zip(envs, texts, strict=True) if (queries := env.asked(text))]
        if not asked:
            return
        first = asked[0][0]
        known = [first.retriever.known(queries, first.top_k) for _, queries in asked]
        before, started = replace(first.retriever.counts), time.perf_counter()
        found = iter(first.retriever.search([query for _, queries in asked for query in queries], first.top_k))
        first.timings["retrieve_s"] += time.perf_counter() - started
        first.timings["encode_s"] += first.retriever.counts.encode_s - before.encode_s
        first.timings["search_s"] += first.retriever.counts.search_s - before.search_s
        for (env, queries), hits in zip(asked, known, strict=True):
            env.cache_hits = hits / len(queries)
            env.take(queries, [next(found) for _ in queries])

    def asked(self, text: str) -> list[str]:
        """The queries of a rewrite, the question itself where it holds none; nothing for the other roles."""
        if self.kinds[self.agent_selection] != "rewriter":
            return []
        queries = [query for query in self.understood(self.agent_selection, text)[0] if query.strip()]
        return queries or [self.question.question]

    def take(self, queries: list[str], found: Sequence[Sequence[Passage]]) -> None:
        """Takes what was found for the acting rewriter's queries, best first for each."""
        self.queries = queries
        self.passages = dealt(found, self.top_k)

    def summary(self) -> dict[str, object]:
        """Returns question, outputs, passages, choice, supporting titles, answer, golds and scores."""
        return {
            "id": self.question.id,
            "question": self.question.question,
            "outputs": dict(self.outputs),
            "queries": list(self.queries),
            "passages": [passage._asdict() for passage in self.passages],
            "chosen": [self.passages[position].id for position in self.chosen],
            "supporting": sorted({title for title, _ in self.question.supporting}),
            "answer": self.answer,
            "gold": list(self.question.answers),
            "scores": dict(self._scores),
        }


def dealt(found: Sequence[Sequence[Passage]], top_k: int) -> tuple[Passage, ...]:
    """Deals ``top_k`` places over the queries (10 / 5+5 / 4+3+3 / 3+3+2+2); repeated passages are removed, order kept.

    >>> a, b, c = (Passage(i, "", "") for i in range(3))
    >>> [passage.id for passage in dealt([[a, b, c], [b, c, a]], top_k=3)]
    [0, 1]
    """
    share, rest = divmod(top_k, len(found))
    places = [share + (i < rest) for i in range(len(found))]
    return tuple(dict.fromkeys(p for passages, k in zip(found, places, strict=True) for p in passages[:k]))


def load_penalties(penalties: bool | Mapping[str, float], kinds: Mapping[str, str]) -> dict[str, float]:
    """Returns the penalty of each agent: the defaults, none, or the defaults with some values replaced."""
    check_kind("penalties", penalties, bool | Mapping)
    defaults = {agent: PENALTIES[kind] * (penalties is not False) for agent, kind in kinds.items()}
    if isinstance(penalties, bool):
        return defaults
    for agent, value in penalties.items():
        if agent not in kinds:
            raise ConfigError(f"penalties: no role {agent!r}; roles: {', '.join(kinds)}." + did_you_mean(agent, kinds))
        if isinstance(value, bool) or not isinstance(value, int | float) or not -math.inf < value <= 0:
            raise ConfigError(f"penalties.{agent}: expected a number of at most 0, found {value!r}.")
    return {**defaults, **penalties}


def _check_source(key: str, value: Any, kinds: tuple[type, ...]) -> None:
    if not isinstance(value, kinds):
        raise ConfigError(f"env_config.{key}: expected minipedia:SPLIT or a file, found {value!r}.")
    if isinstance(value, Mapping):
        _check_part(key, value)
    if isinstance(value, str) and is_minipedia(value):
        parse_spec(value)


def _check_part(key: str, value: Mapping[str, Any]) -> None:
    known = ("file", "limit", "shuffle")
    for name, part in value.items():
        if name not in known:
            raise ConfigError(
                f"env_config.{key}: unknown key {name!r}; expected {', '.join(known)}.{did_you_mean(name, known)}"
            )
        if name != "file" and (isinstance(part, bool) or not isinstance(part, int) or part < (name == "limit")):
            raise ConfigError(f"env_config.{key}.{name}: expected a whole number, found {part!r}.")
    if not isinstance(value.get("file"), str) or is_minipedia(value["file"]):
        raise ConfigError(f"env_config.{key}.file: expected a question file, found {value.get('file')!r}.")


def _passages_of(corpus: Any, retriever: Any) -> tuple[bool, bool]:
    """Whether the retriever brings what is searched, and whether that is the questions' own passages."""
    brought = isinstance(retriever, BaseRetriever) or (corpus is None and brings_passages(retriever))
    return brought, corpus == OWN or (corpus is None and not brought)


def _load_questions(spec: str | Mapping[str, Any] | Questions, require_context: bool) -> Questions:
    if isinstance(spec, Questions):
        return spec
    named = {"file": spec} if isinstance(spec, str) else dict(spec)
    name = named.pop("file")
    if is_minipedia(name):
        return minipedia(name)
    return load_questions(Path(name).expanduser(), require_context, **named)


def _load_corpus(spec: str | Corpus | None, questions: Any, splits: Mapping[str, Questions]) -> Corpus:
    if isinstance(spec, Corpus):
        return spec
    if spec in (None, OWN) and isinstance(questions, str) and is_minipedia(questions):
        spec = questions
    if spec in (None, OWN):
        return Corpus.from_questions([question for split in splits.values() for question in split])
    return minipedia_corpus(spec) if is_minipedia(spec) else load_corpus(Path(spec).expanduser())
