"""The part of an algorithm that is saved and restored: a run goes on from a checkpoint as if it had not stopped.

Not how a checkpoint lies on disk, which is ``checkpoints``. The one idea: whatever cannot be whole is refused, with the
file, the process or the fact that is at fault.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray
from numpy.typing import NDArray
from ray.exceptions import RayActorError
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.core import COMPONENT_LEARNER, COMPONENT_LEARNER_GROUP, COMPONENT_OPTIMIZER, COMPONENT_RL_MODULE

from rllib_mhgpo.algorithms.checkpoints import (
    MODULES,
    SHARDS,
    check_facts,
    check_names,
    check_shards,
    damage,
    last_whole,
    read_shard,
    versions,
    whole_or_absent,
    write_shard,
)
from rllib_mhgpo.algorithms.config import LLMConfig
from rllib_mhgpo.algorithms.learner_pool import LearnerPool, apply_learning_rates, take_shards
from rllib_mhgpo.algorithms.opponents import PAST, read_past, write_past
from rllib_mhgpo.algorithms.policies import followers
from rllib_mhgpo.algorithms.runner_pool import Deals, RunnerPool
from rllib_mhgpo.errors import CheckpointError

STATE = "llm_algorithm"


class CheckpointedAlgorithm(Algorithm):
    """Saves and restores a run; what it is, a subclass builds in ``setup``."""

    config: LLMConfig
    learners: LearnerPool
    pool: RunnerPool
    agents: list[str]
    run_seed: int
    _ahead: Deals
    _updates: int
    _dev: dict[str, float]
    _dev_start: dict[str, float]
    _facts: dict[str, str]
    _is_gathered = False

    def _sync(self) -> None:
        """Hands the learners' weights to the runners."""
        raise NotImplementedError

    def get_state(self, components: Any = None, *, not_components: Any = None, **kwargs: Any) -> dict[str, Any]:
        """Adds the run's seed and dev scores; the roots dealt so far follow from seed and iteration.

        Beside the whole state are the parts of sharded optimisers and the opponents ``past``, as in a checkpoint.
        """
        own: dict[str, Any] = {
            "seed": self.run_seed, "dev": self._dev, "dev_start": self._dev_start, "updates": self._updates,
        }  # fmt: skip
        if not self._check_component(COMPONENT_LEARNER_GROUP, components, not_components):
            return {**super().get_state(components, not_components=not_components, **kwargs), STATE: own}
        with self._gathered():
            state = super().get_state(components, not_components=not_components, **kwargs)
        if components is None:  # a checkpoint asks for parts, and writes these itself, one learner's at a time
            own[SHARDS.name] = list(self._shards())
            own[PAST] = self._past() if self._has_past else None
        return {**state, STATE: own}

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes a state of :meth:`get_state`, and gives the runners its weights.

        Raises:
            CheckpointError: a policy has no weights in it, or it is of another number of learners.
        """
        own, learners = state.get(STATE, {}), state.get(COMPONENT_LEARNER_GROUP, {}).get(COMPONENT_LEARNER)
        if learners:
            self._check_state(learners, own.get(SHARDS.name, []))
        super().set_state(state)
        if own:
            self.run_seed, self._dev, self._dev_start = own["seed"], own["dev"], own["dev_start"]
            self._updates = own["updates"]
        if learners:
            self._take_shards(own.get(SHARDS.name, []))
            self._ahead = {}
            self._sync()
            self._take_past(own.get(PAST))

    def _check_state(self, learners: Mapping[str, Any], shards: Sequence[Any]) -> None:
        for name, weights in learners.get(COMPONENT_RL_MODULE, {}).items():
            if not weights:
                raise CheckpointError(f"set_state: expected the weights of {name!r}, found none.")
        expected = self.config.num_learners if self.config.zero_stage else 0
        if COMPONENT_OPTIMIZER in learners and len(shards) != expected:
            raise CheckpointError(
                f"set_state: expected optimiser shards of {expected} learners (num_learners), found {len(shards)}; "
                "set it with num_learners and deepspeed as they were."
            )

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Restores for Tune, the checkpoint before where this one is damaged.

        The learning rate is this trial's, where population-based training loads another's checkpoint.
        """
        super().load_checkpoint(str(last_whole(Path(checkpoint_dir))))
        self.learner_group.foreach_learner(apply_learning_rates)

    def get_metadata(self) -> dict[str, Any]:
        """Adds algorithm and configuration as JSON, so that the policy can be used without reading a pickle."""
        config = self.config.as_json()
        if self.config.policies:  # a function would be lost
            config["policy_mapping"] = followers(self.config, self.agents)
        own = {"algorithm": type(self).__name__, "config": config, "data": self._facts, "versions": versions()}
        return {**super().get_metadata(), **own}

    def save_to_path(self, path: Any = None, **kwargs: Any) -> str:
        """Writes a checkpoint, whole or not at all."""
        with self._gathered():
            try:
                return whole_or_absent(self._save, path, **kwargs)
            except RayActorError:
                self.learners.confirm()
                raise

    def _save(self, path: Any, **kwargs: Any) -> str:
        folder = str(super().save_to_path(path, **kwargs))
        if not all(any((Path(folder) / MODULES / name).glob("*.safetensors")) for name in self.config.policy_names):
            # RLlib asks a remote learner for no answer
            self.learners.confirm()
            raise CheckpointError(f"{path}: a learner could not write its part of the checkpoint; its log says why.")
        for index, shard in enumerate(self._shards()):
            write_shard(Path(folder), index, shard)
        if self._has_past:
            write_past(Path(folder), self._past())
        return folder

    def restore_from_path(self, path: Any, *args: Any, **kwargs: Any) -> None:
        """Takes the state of a checkpoint, and gives the runners its weights.

        Raises:
            CheckpointError: a file is damaged, or questions and corpus are not those of the run that wrote it.
        """
        if "component" not in kwargs and (fault := damage(Path(path))):
            raise CheckpointError(f"{path}: the checkpoint is damaged: {fault}. Restore the one before.")
        check_facts(Path(path), self._facts)
        check_names(Path(path), self.config.policy_names)
        super().restore_from_path(path, *args, **kwargs)
        if not all(self.learners.each(lambda learner: learner.is_restored)):
            raise CheckpointError(f"{path}: a learner could not restore its part of the checkpoint; its log says why.")
        if self.config.zero_stage or (Path(path) / SHARDS).exists():
            check_shards(Path(path), self.config.num_learners if self.config.zero_stage else 0)
            self._take_shards(read_shard(Path(path), index) for index in range(self.config.num_learners))
        self._ahead = {}
        self._sync()
        self._take_past(read_past(Path(path)) if self._has_past else None)

    @contextmanager
    def _gathered(self) -> Iterator[None]:
        """The context in which the first learner holds sharded models whole; within it, it changes nothing."""
        if self.config.zero_stage < 3 or self._is_gathered:
            yield
            return
        self._is_gathered = True
        try:
            self.learners.each(lambda learner: learner.gather())
            yield
        finally:
            self._is_gathered = False
            self.learners.each(lambda learner: learner.release())

    def _shards(self) -> Iterator[dict[str, NDArray[Any]]]:
        """Yields each learner's part of the sharded optimisers, one at a time."""
        for index in range(self.config.num_learners if self.config.zero_stage else 0):
            yield self.learners.one(index, lambda learner: learner.shards())

    def _take_shards(self, shards: Iterable[dict[str, NDArray[Any]]]) -> None:
        for index, shard in enumerate(shards):
            self.learners.one(index, partial(take_shards, ray.put(shard)))

    def _past(self) -> Any:
        return self.pool.first(lambda runner: runner.opponents.state())

    def _take_past(self, past: Any) -> None:
        if self._has_past and past is not None:
            self.pool.each(lambda runner: runner.opponents.set_state(past))

    @property
    def _has_past(self) -> bool:
        return PAST in self.config.opponents.values()
