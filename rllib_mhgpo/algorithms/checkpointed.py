"""The part of an algorithm that is saved and restored: a run goes on from a checkpoint as if it had not stopped.

Not how a checkpoint lies on disk, which is ``checkpoints``. The one idea: whatever cannot be whole is refused, with the
file, the process or the fact that is at fault.
"""

from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.rllib.algorithms.algorithm import Algorithm

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

    def _sync(self) -> None:
        """Hands the learners' weights to the runners."""
        raise NotImplementedError

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Adds the run's seed and dev scores; the roots dealt so far follow from seed and iteration."""
        own = {"seed": self.run_seed, "dev": self._dev, "dev_start": self._dev_start, "updates": self._updates}
        return {**super().get_state(*args, **kwargs), STATE: own}

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes a state of :meth:`get_state`."""
        super().set_state(state)
        if STATE in state:
            own = state[STATE]
            self.run_seed, self._dev, self._dev_start = own["seed"], own["dev"], own["dev_start"]
            self._updates = own["updates"]

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
        if self.config.zero_stage == 3:
            self.learners.each(lambda learner: learner.gather())
        try:
            return whole_or_absent(self._save, path, **kwargs)
        except RayActorError:
            self.learners.confirm()
            raise
        finally:
            if self.config.zero_stage == 3:
                self.learners.each(lambda learner: learner.release())

    def _save(self, path: Any, **kwargs: Any) -> str:
        folder = str(super().save_to_path(path, **kwargs))
        if not all(any((Path(folder) / MODULES / name).glob("*.safetensors")) for name in self.config.policy_names):
            # RLlib asks a remote learner for no answer
            self.learners.confirm()
            raise CheckpointError(f"{path}: a learner could not write its part of the checkpoint; its log says why.")
        for index in range(self.config.num_learners if self.config.zero_stage else 0):
            write_shard(Path(folder), index, self.learners.one(index, lambda learner: learner.shards()))
        if self._has_past:
            write_past(Path(folder), self.pool.first(lambda runner: runner.opponents.state()))
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
            for index in range(self.config.num_learners):
                shard = ray.put(read_shard(Path(path), index))
                self.learners.one(index, partial(take_shards, shard))
        self._ahead = {}
        self._sync()
        if self._has_past and (past := read_past(Path(path))) is not None:
            self.pool.each(lambda runner: runner.opponents.set_state(past))

    @property
    def _has_past(self) -> bool:
        return PAST in self.config.opponents.values()
