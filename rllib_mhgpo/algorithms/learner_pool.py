"""All learners as one: a function goes to each, whole questions are dealt, and a failure becomes one clear error."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError
from ray.rllib.core.learner.learner_group import LearnerGroup

from rllib_mhgpo.errors import ConfigError, MHGPOError
from rllib_mhgpo.packing import balanced_shards
from rllib_mhgpo.train_batch import TrainBatch

GRACE_S = 20.0
"""How long the other learners may take to notice that one has failed."""


@dataclass(frozen=True)
class LearnerPool:
    """The learners of an RLlib group.

    Attributes:
        group: a local learner or remote ones.
        count: how many remote ones there are; 0 where the learner is in this process.
    """

    group: LearnerGroup
    count: int

    def each(self, function: Callable[[Any], Any]) -> list[Any]:
        """Calls a function on all learners at once and returns what it returned, in their order.

        Raises:
            MHGPOError: a learner died, or whatever the function raised.
        """
        if not self.count:
            return [function(self.group._learner)]
        return answers([learner.apply.remote(function) for learner in self.group._workers])

    def confirm(self) -> None:
        """Hears from all learners; raises as :meth:`each` does, so that an error names those that died."""
        self.each(id)

    def one(self, index: int, function: Callable[[Any], Any]) -> Any:
        """Calls a function that is not collective on one learner."""
        return answers([self.group._workers[index].apply.remote(function)], first=index)[0]

    def each_shard(
        self, function: Callable[[Any, TrainBatch], Any], batch: TrainBatch, tree: NDArray[np.int64]
    ) -> list[tuple[NDArray[np.int64], Any]]:
        """Deals whole trees to the learners; returns what the function returned of each shard, and the shard's rows."""
        if not self.count:
            return [(np.arange(len(batch)), self.each(lambda learner: function(learner, batch))[0])]
        lengths = zip(batch.prompts, batch.responses, strict=True)
        tokens = np.array([len(prompt) + len(response) for prompt, response in lengths], dtype=np.int64)
        shards = balanced_shards(tokens, tree, batch.steps, self.count)
        refs = [ray.put(batch.take(rows)) for rows in shards]
        found = self.each(lambda learner: function(learner, _shard_of(learner, refs)))
        return list(zip(shards, found, strict=True))


def one_update(parts: Sequence[tuple[NDArray[np.int64], dict[str, Any]]], size: int) -> dict[str, Any]:
    """Returns what one learner with all ``size`` rows would have returned, from those with a part of them each."""
    rows: dict[str, Any] = {"updated": np.zeros(size, dtype=bool), "measured": {}}
    not_finite: list[int] = []
    counts: Counter[str] = Counter()
    for shard, part in parts:
        counts.update(part["counts"])
        rows["updated"][shard] = part["rows"]["updated"]
        not_finite += shard[part["not_finite"]].tolist()
        for name, values in part["rows"]["measured"].items():
            rows["measured"].setdefault(name, np.zeros(size))[shard] = values
    _, first = parts[0]
    return {**first, "rows": rows, "not_finite": not_finite, "counts": counts}


def refuse_shared_gpus(places: Sequence[tuple[str, tuple[int, ...]]]) -> None:
    """Refuses two learners on one GPU, between which NCCL cannot talk.

    Args:
        places: of each learner its node and its GPUs.

    Raises:
        ConfigError: which learners share one.
    """
    for index, place in enumerate(places):
        if place in places[:index]:
            node, gpus = place
            raise ConfigError(
                f"config: num_gpus_per_learner: learners {places.index(place)} and {index} were both placed on GPU "
                f"{', '.join(map(str, gpus))} of node {node[:8]}; give each more than 0.5 of a GPU."
            )


def answers(refs: Sequence[ray.ObjectRef], first: int = 0) -> list[Any]:
    """Waits for what learners return; once one has failed, for :data:`GRACE_S` alone, since the others may wait for it.

    Args:
        refs: one a learner, in their order.
        first: index of the first of them.

    Raises:
        MHGPOError: a learner died, or whatever it raised.
    """
    waiting, found, errors = list(refs), dict.fromkeys(refs), dict[int, Exception]()
    while waiting:
        done, waiting = ray.wait(waiting, timeout=GRACE_S if errors else None)
        if not done:
            break
        for ref in done:
            try:
                found[ref] = ray.get(ref)
            except RayError as error:
                errors[first + refs.index(ref)] = error
    if errors:
        raise learner_failure(errors)
    return list(found.values())


def learner_failure(errors: Mapping[int, Exception]) -> Exception:
    """Returns what to raise when learners failed: their own error, or which one is gone.

    Those that waited for it fail too, with an error of their connection.

    Args:
        errors: by the learner's index.
    """
    dead = {index: error for index, error in errors.items() if isinstance(error, RayActorError | OutOfMemoryError)}
    causes = [getattr(error, "cause", None) or error for error in errors.values()]
    own = [cause for cause in causes if not _of_connection(cause)]
    if own and not dead:
        return own[0]
    which = f"learner {', '.join(map(str, sorted(dead)))}" if dead else "a learner"
    first = str(next(iter((dead or errors).values()))).splitlines()[0]
    return MHGPOError(
        f"the process of {which} died ({first}). The last checkpoint is whole; go on from it with --resume. A "
        "common cause is memory: see max_tokens_per_microbatch, gradient_checkpointing and deepspeed."
    )


def _of_connection(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and bool(re.search("gloo|nccl|connection", str(error), re.IGNORECASE))


def apply_learning_rates(learner: Any) -> None:
    """Gives a learner's optimisers the learning rates of its own configuration, whatever a checkpoint brought."""
    for optimizer, schedule in learner._optimizer_lr_schedules.items():
        if schedule.use_schedule:  # goes by the steps done, which the checkpoint has
            continue
        learner._set_optimizer_lr(optimizer, schedule.get_current_value())


def take_shards(shards: ray.ObjectRef, learner: Any) -> None:
    """Hands a learner its part of the sharded optimisers."""
    learner.set_shards(ray.get(shards))


def _shard_of(learner: Any, refs: Sequence[ray.ObjectRef]) -> TrainBatch:
    shard: TrainBatch = ray.get(refs[learner._learner_index])
    return shard
