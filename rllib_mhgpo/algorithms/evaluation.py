"""Answers questions with the policy of a checkpoint, trained or not, without Ray and without reading a pickle."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pettingzoo import AECEnv

from rllib_mhgpo.algorithms.checkpoints import MODULES, find_checkpoint, policy_source, read_metadata
from rllib_mhgpo.algorithms.config import LLMConfig
from rllib_mhgpo.algorithms.registration import resolve_algorithm
from rllib_mhgpo.algorithms.scale_checks import longest_sequence
from rllib_mhgpo.engines import Cast, Engine, HFEngine, Placement, VLLMEngine
from rllib_mhgpo.errors import CheckpointError, ConfigError
from rllib_mhgpo.llms import eos_ids, load_model, load_tokenizer, lora
from rllib_mhgpo.llms.folders import check_context
from rllib_mhgpo.runner import vllm_engine
from rllib_mhgpo.sampling import ONE_TRAJECTORY
from rllib_mhgpo.tree import RolloutTree
from rllib_mhgpo.waves import Play, play

Record = dict[str, Any]
log = logging.getLogger(__name__)


@dataclass
class System:
    """A trained system of agents: its environment, its policy's engine, its configuration."""

    env: AECEnv
    engine: Engine
    config: LLMConfig
    context: int
    env_config: Mapping[str, Any]
    players: dict[tuple[str, str], Engine] = field(default_factory=dict)
    """Engines of other policies that were asked for, by their source and the policy in whose place they are."""

    def cast(self, players: Mapping[str, Engine]) -> "System":
        """Returns the system with some agents played by other engines."""
        return replace(self, engine=Cast(self.engine, players))

    def on(self, env_config: Mapping[str, Any]) -> "System":
        """Returns the system with keys of its own ``env_config`` replaced: other questions, another corpus."""
        config = self.config.copy(copy_frozen=False)
        config.env_config = {**self.env_config, **env_config}
        if config.env_config == self.config.env_config:
            return self
        return replace(self, env=config.make_env(self.env.unwrapped.tokenizer, self.context), config=config)

    def ask(self, question: str) -> Record:
        """Answers one question; returns the environment's summary without golds and scores, or ``void``.

        Raises:
            ConfigError: the environment does not take questions, or the question is blank.
        """
        if not hasattr(self.env.unwrapped, "pose"):
            raise ConfigError(f"ask: the environment {self.config.env!r} takes no questions of one's own.")
        split = self.env.unwrapped.pose(question)
        (wave,) = self.answers(split)
        return {key: value for key, value in wave[0].items() if key not in ("gold", "scores", "root", "id")}

    def player(self, source: str, agent: str) -> Engine:
        """Returns an engine for another policy: a checkpoint's for an agent, a model folder, a built-in name, a hub id.

        Raises:
            ConfigError: its tokenizer is another one, so that it could not read this system's prompts.
            ModelError: its context is too short for them.
        """
        name = policy_source(source, agent)
        check_context("roles", name, longest_sequence(self.config, self.context))
        mine, its = self.env.unwrapped.tokenizer, load_tokenizer(name)
        if mine.get_vocab() != its.get_vocab():
            raise ConfigError(
                f"roles: {source!r} has another tokenizer ({len(its)} ids) than the system ({len(mine)} ids) and "
                "cannot read its prompts; give a policy of the same model family."
            )
        place = self.config.policy_of(agent)
        if (name, place) not in self.players:
            self.players[name, place] = _engine(name, self.config.get_config_for_module(place))
        return self.players[name, place]

    def answers(
        self, split: str, limit: int | None = None, temperature: float = 0.0, seed: int = 0, wave: int = 64
    ) -> Iterator[list[Record]]:
        """Plays the roots of a split, ``wave`` at a time; yields their records.

        A record is the environment's summary with ``scores``; a voided rollout's has ``id``, ``void`` and no scores.
        """
        how = Play(
            ONE_TRAJECTORY, temperature, self.config.max_response_tokens, (seed,), split,
            keep_records=True, context=self.context,
        )  # fmt: skip
        for roots in self.waves(split, limit, wave):
            yield [self.record(tree, split) for tree in play(self.env, self.engine, roots, how, {})]

    def record(self, tree: RolloutTree, split: str) -> Record:
        """Returns what the environment said of the tree's one trajectory, or which root was voided and why."""
        for leaf in tree.leaves():
            generation = tree.generations[leaf]
            return {"root": tree.root, **(generation.record or {}), "scores": generation.scores}
        named = getattr(self.env.unwrapped, "root_id", lambda root, _: str(root))(tree.root, split)
        return {"root": tree.root, "id": named, "void": tree.void[0]}

    def count(self, split: str, limit: int | None) -> int:
        """How many roots :meth:`answers` plays."""
        count = int(self.env.num_roots(split))
        if count == 0:
            raise ConfigError(f"evaluate: the environment has no roots in split {split!r}; give --questions.")
        return count if limit is None else min(limit, count)

    def waves(self, split: str, limit: int | None, wave: int) -> Iterator[Sequence[int]]:
        """Cuts the roots into waves."""
        count = self.count(split, limit)
        return (range(start, min(start + wave, count)) for start in range(0, count, wave))


def open_system(checkpoint: str | Path, env_config: Mapping[str, Any]) -> System:
    """Opens a checkpoint of this package's algorithms; ``env_config`` replaces keys of the trained configuration.

    Raises:
        CheckpointError: the folder is no such checkpoint.
    """
    folder = find_checkpoint(Path(checkpoint))
    metadata = read_metadata(folder)
    if not {"algorithm", "config"} <= set(metadata):
        raise CheckpointError(f"{folder}: expected a checkpoint of this package, found one of another.")
    algorithm: Any = resolve_algorithm(metadata["algorithm"])
    trained = metadata["config"]
    config: LLMConfig = algorithm.get_default_config().update_from_dict(
        {**trained, "env_config": {**trained["env_config"], **env_config}}
    )
    folders = {name: folder / MODULES / name for name in config.policy_names}
    for policy in folders.values():
        if not policy.is_dir():
            raise CheckpointError(f"{folder}: expected a policy in {policy.relative_to(folder)}, found none.")
    return assemble(config, {name: str(policy) for name, policy in folders.items()}, trained["env_config"])


def assemble(config: LLMConfig, llms: Mapping[str, str], env_config: Mapping[str, Any]) -> System:
    """Puts together the system of a configuration with models, by policy, that may be others than the configuration's.

    ``env_config`` is the configuration's before keys of it were replaced.
    """
    context = min(config.context_of(llm) for llm in llms.values())
    # prompts are made with the tokenizer of llm, as in training, where a policy has it
    usual = [llm for name, llm in llms.items() if config.get_config_for_module(name).llm == config.llm]
    env = config.make_env(load_tokenizer([*usual, *llms.values()][0]), context)
    engines = {name: _engine(llm, config.get_config_for_module(name), len(llms)) for name, llm in llms.items()}
    return System(env, config.cast(engines, env.possible_agents, context).at(0), config, context, env_config)


def _engine(llm: str, config: LLMConfig, engines: int = 1) -> HFEngine | VLLMEngine:
    own_adapters = bool((config.lora or {}).get("adapters"))
    if config.engine == "vllm" and not find_spec("vllm"):
        log.warning("engine: vllm is not installed here, the engine hf plays in its place.")
    elif config.engine == "vllm" and not own_adapters:
        return vllm_engine(config, llm, Placement(config.num_gpus_per_env_runner, engines=engines), lora=None)
    model, tokenizer = load_model(llm), load_tokenizer(llm)
    settings: dict[str, Any] = {"tokenizer": tokenizer, **(config.engine_config if config.engine == "hf" else {})}
    ends = eos_ids(model, tokenizer)
    if config.lora and config.lora.get("adapters") and (Path(llm) / lora.FOLDER).is_dir():
        model = lora.load_adapters(model, config.lora, Path(llm))
        settings["act_as"] = partial(lora.activate, model)
    return HFEngine(model, ends, getattr(torch, config.dtype), **settings)


def mean_and_error(records: Sequence[Record]) -> dict[str, tuple[float, float]]:
    """Returns mean and standard error of each score over all records; a voided one counts 0.

    The standard error is the standard deviation (divisor n) over the root of n.
    """
    names = list(dict.fromkeys(name for record in records for name in record.get("scores", {})))
    result = {}
    for name in names:
        values = np.array([record.get("scores", {}).get(name, 0.0) for record in records])
        result[name] = (float(values.mean()), float(values.std() / np.sqrt(len(values))))
    return result
