"""What is refused before a run begins, and what stops one that is lost."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.utils import force_list

from rllib_mhgpo.algorithms.config import LLMConfig
from rllib_mhgpo.algorithms.policies import check_followed, check_trained
from rllib_mhgpo.engines.vllm import require_vllm
from rllib_mhgpo.errors import ConfigError, MHGPOError

SILENT = ("on_episode_created", "on_episode_start", "on_episode_step", "on_env_runners_recreated")
log = logging.getLogger(__name__)


def check_place(config: Any, storage: Any) -> None:
    """Refuses what cannot work where this process runs, before anything is built.

    Args:
        config: an algorithm's.
        storage: Tune's, None without Tune.

    Raises:
        ConfigError: no vLLM, results that would not arrive, fewer GPUs than learners that need one each.
    """
    if config.get("engine") == "vllm":
        require_vllm()
    if storage is not None:
        _check_storage(storage)
    learners, share = config.get("num_learners", 0), config.get("num_gpus_per_learner", 0)
    if learners > 1 and 0 < share < 1 and learners > (gpus := ray.cluster_resources().get("GPU", 0)):
        raise ConfigError(
            f"config: num_learners: {learners} learners need a GPU each, Ray has {gpus:g}: two would share one, "
            "between which NCCL cannot talk; lower num_learners, or add GPUs."
        )


def _check_storage(storage: Any) -> None:
    """Looks for the file that Tune left in the run's folder when it began, which another machine may not see."""
    try:
        storage._check_validation_file()
    except (OSError, RuntimeError) as error:
        node = ray.util.get_node_ip_address()
        raise ConfigError(
            f"--storage-path: {storage.storage_fs_path} of the machine that started the run is not reached from node "
            f"{node}, where the trial runs; give a folder that all machines share, or an address such as s3://bucket/runs."
        ) from error


def check_agents(config: LLMConfig, agents: Sequence[str]) -> None:
    """Refuses keys that do not fit the environment's agents."""
    check_followed(config, agents)
    check_trained(config, agents)
    limits = config.max_response_tokens
    named = agents if isinstance(limits, int) else list(limits)
    missing = [agent for agent in agents if agent not in named]
    if missing:
        raise ConfigError(f"config: max_response_tokens: no number for {missing}; agents: {list(agents)}.")
    strangers = [agent for agent in named if agent not in agents]
    if strangers:
        raise ConfigError(f"config: max_response_tokens: no agents {strangers}; agents: {list(agents)}.")
    count = len(agents)
    for name, values in (("fork_probs", config.fork_probs), ("fork_counts", config.fork_counts)):
        used = config.rollout_strategy == {"fork_probs": "rr"}.get(name, name)
        if used and len(values or ()) != count:
            raise ConfigError(
                f"config: {name}: expected {count} numbers, one for each of {list(agents)}, found {values}."
            )
    strangers = [agent for agent in config.train_agents or [] if agent not in agents]
    if strangers or config.train_agents == []:
        raise ConfigError(f"config: train_agents: expected some of {list(agents)}, found {config.train_agents}.")
    strangers = [agent for agent in config.opponents if agent not in agents]
    if strangers or set(config.opponents) == set(agents):
        raise ConfigError(
            f"config: opponents: expected some of {list(agents)}, but not all, found {list(config.opponents)}."
        )
    if set(config.train_agents or agents) <= set(config.opponents):
        raise ConfigError(
            f"config: train_agents: expected an agent that is no opponent, found {config.train_agents}; nobody would "
            "learn. Take one out of opponents."
        )
    adapters = (config.lora or {}).get("adapters")
    if adapters is not None and sorted(adapters) != sorted(agents):
        raise ConfigError(f"config: lora.adapters: expected the agents {list(agents)}, found {adapters}.")


def check_roots(config: LLMConfig, there: int) -> None:
    """Refuses to deal more questions than there are."""
    if config.questions_per_iteration > there:
        raise ConfigError(
            f"config: questions_per_iteration: expected at most the {there} questions of the training set, found "
            f"{config.questions_per_iteration}."
        )


def warn_of_silent_callbacks(config: LLMConfig) -> None:
    """Names the methods of callbacks that never fire, because a tree is played as a whole."""
    for callback in force_list(config.callbacks_class):
        silent = [name for name in SILENT if getattr(callback, name) is not getattr(RLlibCallback, name)]
        if silent:
            log.warning(
                "%s: %s never fire; a rollout tree is given to on_episode_end, an iteration's trees to on_sample_end.",
                callback.__name__,
                ", ".join(silent),
            )


def guard(
    config: LLMConfig,
    where: str,
    columns: Mapping[str, Any],
    update: Mapping[str, Any],
    culprits: Sequence[tuple[int, str]],
) -> None:
    """Warns of skipped steps and stops a run that is lost.

    Raises:
        MHGPOError: too many skipped steps in a row, the KL or the entropy beyond the bound that was set.
    """
    if update["skipped_steps"]:
        named = ", ".join(f"question {root} ({agent})" for root, agent in culprits[:4])
        among = f"; the loss was not finite in a micro-batch with {named}" if named else ""
        log.warning("%s: %d optimiser steps skipped: no finite gradient%s.", where, update["skipped_steps"], among)
    if update["skipped_in_a_row"] >= config.max_skipped_steps:
        raise MHGPOError(
            f"{where}: {update['skipped_in_a_row']} optimiser steps in a row had no finite gradient; the weights "
            "are those before. Go on from the last checkpoint with a lower lr, or look at rewards and model files."
        )
    if config.max_kl is not None and columns["kl"] > config.max_kl:
        raise MHGPOError(f"{where}: KL to the reference {columns['kl']:.4g} is above max_kl = {config.max_kl:g}.")
    if config.min_entropy is not None and columns["entropy"] < config.min_entropy:
        raise MHGPOError(f"{where}: entropy {columns['entropy']:.4g} is below min_entropy = {config.min_entropy:g}.")
