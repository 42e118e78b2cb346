"""An index in Ray actors, for many runners: each node maps it into memory once, however many processes search.

The only room besides the trainer's that names Ray. The one idea: Ray's own references tell answers apart, Ray restarts
an actor that died and asks it again; here is only how queries are dealt, how many wait, and when to give up.
"""

import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import ray

from rllib_mhgpo.data import Passage
from rllib_mhgpo.errors import ConfigError, MHGPOError, RetrievalError
from rllib_mhgpo.retrieval.base import BaseRetriever
from rllib_mhgpo.retrieval.store import open_retriever, read_meta

CACHE_SIZE = 8_192  # texts are kept, not rows
_SHARE = 64  # queries an actor gets at least, where there are so many
_AHEAD = 2  # requests of this process that an actor holds at most
_RESTARTS = 3
_OPENING_S = 300.0  # in which the index must be opened, where timeout_s is less: an index is not read as fast as asked


class IndexActor:
    """Holds the index and answers; failures that a user can mend come back as answers."""

    def __init__(self, folder: str, options: dict[str, Any]) -> None:
        self._retriever: Any = None
        self._failure = ""
        try:
            self._retriever = open_retriever(folder, cache_size=0, **options)
        except MHGPOError as error:
            self._failure = str(error)

    def search(self, queries: Sequence[str], k: int) -> list[list[tuple[int, str, str]]] | str:
        """The passages found for each query, or why there are none."""
        if self._failure:
            return self._failure
        try:
            return [[tuple(passage) for passage in hits] for hits in self._retriever.search(queries, k)]
        except MHGPOError as error:
            return str(error)


class ActorRetriever(BaseRetriever):
    """Asks ``actors`` Ray actors that hold the index of a folder; all processes of a Ray session share them.

    Queries are dealt over the actors; each holds two requests of this process at most. A dead actor is restarted by
    Ray, or started anew where the process that started it has ended, and asked again, three times. An index that cannot
    be opened is refused at once.

    Args:
        folder: of the index, to be found on every node.
        actors: how many.
        timeout_s: after which an answer is not waited for any longer.
        cache_size: queries remembered by this process.
        options: of :func:`open_retriever`: ``gpu``, ``device``.

    Raises:
        ConfigError: for values that cannot be used, or without Ray.
        RetrievalError: when an actor cannot be started or cannot open the index.
    """

    def __init__(
        self, folder: str, actors: int, timeout_s: float = 300.0, cache_size: int = CACHE_SIZE, **options: Any
    ) -> None:
        super().__init__(min(cache_size, CACHE_SIZE))
        if isinstance(actors, bool) or not isinstance(actors, int) or actors < 1:
            raise ConfigError(f"retriever: actors: expected a whole number of at least 1, found {actors!r}.")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < 1e6:
            raise ConfigError(f"retriever: timeout_s: expected a number of seconds above 0, found {timeout_s!r}.")
        if not ray.is_initialized():
            raise ConfigError("retriever: actors: there is no Ray here to start them. Leave actors out, or start Ray.")
        self.folder, self._timeout = str(Path(folder).absolute()), float(timeout_s)
        self._meta = read_meta(Path(folder))
        name = sha256(repr((self.folder, self._meta, sorted(options.items()))).encode()).hexdigest()[:16]
        self._names, self._options = [f"rllib-mhgpo-{name}-{i}" for i in range(actors)], options
        self.actors = [self._actor(name) for name in self._names]
        self._deal([[]] * actors, 1, max(self._timeout, _OPENING_S))  # no queries: only whether the index is there

    @property
    def corpus_fingerprint(self) -> str:
        """The corpus's, as the folder says."""
        return str(self._meta["corpus_fingerprint"])

    @property
    def encoder_fingerprint(self) -> str:
        """Of the encoder that the index was built with."""
        return str(self._meta["encoder_fingerprint"])

    def find(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """The passages found for each query, dealt over the actors."""
        started = time.perf_counter()
        share = max(_SHARE, -(-len(queries) // len(self.actors)))
        parts = [list(queries[begin : begin + share]) for begin in range(0, len(queries), share)]
        found = self._deal(parts, k, self._timeout)
        self.counts.search_s += time.perf_counter() - started
        return found

    def passages(self, found: Sequence[Sequence[Passage]]) -> list[list[Passage]]:
        """What was found is passages already."""
        return [list(hits) for hits in found]

    def _actor(self, name: str) -> Any:
        """The actor of this name, whoever started it."""
        kind: Any = ray.remote(num_cpus=0, num_gpus=1 if self._options.get("gpu") else 0)(IndexActor)
        try:
            return kind.options(
                name=name, get_if_exists=True, max_restarts=_RESTARTS, max_task_retries=_RESTARTS
            ).remote(self.folder, self._options)
        except ray.exceptions.RayError as error:
            raise RetrievalError(f"{self.folder}: no actor can be started for it: {error}") from error

    def _deal(self, parts: Sequence[Sequence[str]], k: int, timeout: float) -> list[list[Passage]]:
        """The answers to all parts' queries, each part dealt to the actor that has the fewest."""
        found: dict[int, list[list[Passage]]] = {}
        at_work: dict[Any, tuple[int, int]] = {}
        until, self._patience, self._replaced = time.monotonic() + timeout, timeout, 0
        for number, part in enumerate(parts):
            while len(at_work) >= _AHEAD * len(self.actors):
                self._gather(at_work, found, parts, until, k)
            actor = self._least_busy(at_work)
            at_work[self.actors[actor].search.remote(list(part), k)] = (number, actor)
        while at_work:
            self._gather(at_work, found, parts, until, k)
        return [hits for number in range(len(parts)) for hits in found[number]]

    def _least_busy(self, at_work: dict[Any, tuple[int, int]]) -> int:
        loads = [sum(actor == number for _, actor in at_work.values()) for number in range(len(self.actors))]
        return loads.index(min(loads))

    def _gather(
        self,
        at_work: dict[Any, tuple[int, int]],
        found: dict[int, list[list[Passage]]],
        parts: Sequence[Sequence[str]],
        until: float,
        k: int,
    ) -> None:
        """Takes one answer that is ready."""
        ready, _ = ray.wait(list(at_work), num_returns=1, timeout=max(0.0, until - time.monotonic()))
        if not ready:
            for reference in at_work:
                ray.cancel(reference, force=False)
            raise RetrievalError(
                f"{self.folder}: no answer of {len(self.actors)} actors in {self._patience:g} s."
                " Raise timeout_s, or take more actors."
            )
        number, actor = at_work.pop(ready[0])
        try:
            answer = ray.get(ready[0])
        except ray.exceptions.RayActorError as error:  # for good: the process that started it has ended, or Ray gave up
            self._replaced += 1
            if self._replaced > _RESTARTS:
                raise RetrievalError(f"{self.folder}: actors that hold the index keep dying: {error}") from error
            self.actors[actor] = self._actor(self._names[actor])
            at_work[self.actors[actor].search.remote(list(parts[number]), k)] = (number, actor)
            return
        except ray.exceptions.RayError as error:
            raise RetrievalError(f"{self.folder}: an actor that holds the index failed: {error}") from error
        if isinstance(answer, str):
            raise RetrievalError(answer)
        if len(answer) != len(parts[number]):
            raise RetrievalError(f"{self.folder}: {len(answer)} answers to {len(parts[number])} queries.")
        found[number] = [[Passage(*fields) for fields in hits] for hits in answer]
