"""What every algorithm of this package can be told: an AlgorithmConfig that refuses what it does not know.

A key is written once, as an annotated class attribute: its type, its bounds, its default and a line of documentation.
"""

import copy
import json
from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

import numpy as np
from pettingzoo import AECEnv
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from rllib_mhgpo.algorithms.opponents import Opponents, check_opponents
from rllib_mhgpo.algorithms.registration import check_environment, import_named, make_environment, register
from rllib_mhgpo.algorithms.scale_checks import check_adapters, check_engine_place, check_scale
from rllib_mhgpo.credit import AGGREGATIONS
from rllib_mhgpo.engines.settings import refuse_reshaping
from rllib_mhgpo.errors import ConfigError, did_you_mean
from rllib_mhgpo.llms import context_length
from rllib_mhgpo.llms.lora import lora_settings
from rllib_mhgpo.runner import LLMEnvRunner
from rllib_mhgpo.sampling import STRATEGIES

USED_RLLIB_KEYS = {
    "env", "env_config", "lr", "grad_clip", "num_epochs", "seed", "callbacks", "callbacks_class", "num_env_runners",
    "num_cpus_per_env_runner", "num_gpus_per_env_runner", "custom_resources_per_env_runner", "sample_timeout_s",
    "num_learners", "num_cpus_per_learner", "num_gpus_per_learner", "custom_resources_per_learner",
    "num_cpus_for_main_process", "placement_strategy", "evaluation_interval", "log_level", "framework", "framework_str",
    "callbacks_on_algorithm_init", "callbacks_on_environment_created", "callbacks_on_sample_end",
    "callbacks_on_episode_end", "callbacks_on_train_result", "callbacks_on_evaluate_start",
    "callbacks_on_evaluate_end", "callbacks_on_checkpoint_loaded",
}  # fmt: skip


Tokens = Annotated[int, Field(ge=1, strict=True)]
Count = Annotated[int, Field(ge=0, strict=True)]
Number = Annotated[float, Field(gt=0, allow_inf_nan=False)]

FINITE = ConfigDict(allow_inf_nan=False)

RLLIB_TYPES: dict[str, Any] = {
    "env_config": dict[str, Any],
    "grad_clip": Number | None,
    "num_epochs": Tokens,
    "seed": Count | None,
    "num_env_runners": Count,
    "num_learners": Count,
    "sample_timeout_s": Number,
    "evaluation_interval": Count | None,
    "num_cpus_for_main_process": Number,
}
"""What RLlib's keys must be; RLlib itself takes anything."""


class LLMConfig(AlgorithmConfig):
    """Common keys of algorithms that train language models; RLlib's own keys keep their names and meaning."""

    llm: Annotated[str, Field(description="tiny, tiny_1, mini, smollm2, a model folder or a hub id")] = "tiny"
    dtype: Annotated[Literal["float32", "bfloat16"], Field(description="of forward passes; weights are float32")] = (
        "float32"
    )
    engine: Annotated[Literal["hf", "vllm"], Field(description="what generates: the training module, or vLLM")] = "hf"
    engine_config: Annotated[
        dict[str, Any], Field(description="hf: max_batch_tokens; vllm: arguments of vllm.LLM")
    ] = {}  # noqa: RUF012  # copied
    weight_sync: Annotated[
        Literal["store", "nccl", "ipc"],
        Field(description="how weights reach engines: Ray's object store, or vLLM's NCCL or IPC between GPUs"),
    ] = "store"
    sync_tolerance: Annotated[
        float | None,
        Field(gt=0, description="largest difference of log-probabilities after a weight sync; null: by dtype"),
    ] = None
    lora: Annotated[
        dict[str, Any] | None,
        Field(description="train adapters alone: rank, alpha, target_modules, adapters (agents with their own), send"),
    ] = None
    gradient_checkpointing: Annotated[
        bool, Field(description="compute activations again in the backward pass instead of keeping them")
    ] = False
    deepspeed: Annotated[
        dict[str, Any] | None,
        Field(description="zero_stage (0 to 3), offload_optimizer, offload_param, config (any key of DeepSpeed)"),
    ] = None
    sample_ahead: Annotated[
        int, Field(ge=0, le=1, description="1: sample the next batch while this one is learned from")
    ] = 0
    temperature: Annotated[float, Field(gt=0, description="of sampling and of the log-probabilities")] = 1.0
    max_prompt_tokens: Annotated[
        int | None, Field(ge=1, description="longest prompt; null: what responses leave of the context")
    ] = None
    max_response_tokens: Annotated[
        Tokens | Annotated[dict[str, Tokens], Field(min_length=1)],
        Field(description="longest response: one number, or one by agent"),
    ] = 64
    common_noise: Annotated[bool, Field(description="branches of a tree see the same noise of the environment")] = False
    max_turns: Annotated[int, Field(ge=1, description="acts after which an episode that has not ended is voided")] = (
        1000
    )
    env_errors: Annotated[
        Literal["stop", "void"], Field(description="what an environment's exception does to the run, or to the rollout")
    ] = "stop"
    rollout_strategy: Annotated[
        str, Field(description="where rollouts fork: fof, rr, fof_os, is, fork_counts or module:Class")
    ] = "fof"
    group_size: Annotated[int, Field(ge=1, description="responses of a group, G")] = 4
    fork_probs: Annotated[tuple[float, ...], Field(description="rr: probability of each agent to be the fork")] = (
        0.7,
        0.1,
        0.2,
    )
    fork_counts: Annotated[
        list[int] | None, Field(description="fork_counts: responses each agent draws a state at its first act")
    ] = None
    is_carry: Annotated[Literal["first"], Field(description="is: which output is carried on")] = "first"
    questions_per_iteration: Annotated[int, Field(ge=1, description="root inputs of an iteration")] = 24
    minibatch_questions: Annotated[
        int | None, Field(ge=1, description="root inputs of an optimiser step, all when null")
    ] = None
    max_tokens_per_microbatch: Annotated[int, Field(ge=1, description="padded tokens of a forward pass")] = 8192
    packing: Annotated[
        Literal["auto", "shared", "plain", "off"],
        Field(description="rows of a forward pass: prefixes shared where it pays, prompts shared, back to back, apart"),
    ] = "auto"
    evaluation_questions: Annotated[
        int | None, Field(ge=1, description="dev root inputs of an evaluation, all when null")
    ] = None
    penalties: Annotated[
        bool | dict[str, float], Field(description="true: the environment's, false: none, or a value by role")
    ] = True
    reward_aggregation: Annotated[
        str, Field(description="of successors' shared rewards: mean, max, min, random or module:function")
    ] = "mean"
    propagate_specific: Annotated[bool, Field(description="successors' penalties run back too")] = False
    kl_beta: Annotated[float, Field(ge=0, description="weight of the KL term; 0 holds no reference model")] = 0.001
    reference_refresh: Annotated[
        int, Field(ge=0, description="iterations after which the policy becomes its own reference; 0: never")
    ] = 0
    rollout_is_cap: Annotated[
        float | None, Field(gt=0, description="cap of the importance weight of learner over engine, off when null")
    ] = None
    clip_low: Annotated[float, Field(ge=0, lt=1, description="lower clip bound")] = 0.2
    clip_high: Annotated[float, Field(ge=0, description="upper clip bound")] = 0.2

    loss_aggregation: Annotated[
        Literal["agent_mean", "sequence_mean", "token_mean", "fixed_length"], Field(description="what a token weighs")
    ] = "agent_mean"
    kl_estimator: Annotated[Literal["k1", "k2", "k3"], Field(description="of the KL to the reference")] = "k3"
    kl_in_reward: Annotated[bool, Field(description="take the KL off the reward instead of adding it to the loss")] = (
        False
    )
    dual_clip: Annotated[float | None, Field(gt=1, description="bound of negative advantages' loss, off when null")] = (
        None
    )
    entropy_coeff: Annotated[float, Field(ge=0, description="weight of the entropy bonus")] = 0.0
    overlong_filter: Annotated[bool, Field(description="responses cut off at their limit carry no loss")] = False
    overlong_penalty_tokens: Annotated[
        int, Field(ge=0, description="last tokens before the limit over which a penalty of up to 1 grows (DAPO)")
    ] = 0
    sequential_updates: Annotated[
        bool, Field(description="one optimiser step a role, in random order, weighted by earlier roles' ratios (HAPPO)")
    ] = False
    max_skipped_steps: Annotated[
        int, Field(ge=1, description="optimiser steps in a row without a finite loss and gradient that stop the run")
    ] = 8
    max_kl: Annotated[float | None, Field(gt=0, description="KL to the reference above which the run stops")] = None
    min_entropy: Annotated[float | None, Field(gt=0, description="entropy a token below which the run stops")] = None
    train_agents: Annotated[list[str] | None, Field(description="roles to train, all when null")] = None
    record_share: Annotated[
        float, Field(ge=0, le=1, description="share of the root inputs whose trees are kept as records; 0: none")
    ] = 0.25
    record_mb: Annotated[
        float, Field(gt=0, description="most megabytes of a run's records; older iterations are thinned out")
    ] = 200.0
    profile: Annotated[
        bool, Field(description="trace the second iteration: profile/trace.json.gz and phases.md beside the results")
    ] = False
    opponents: Annotated[
        dict[str, str],
        Field(description="who plays agents untrained: random, past, a checkpoint or model, module:function"),
    ] = {}  # noqa: RUF012  # copied
    opponent_refresh: Annotated[
        int, Field(ge=1, description="iterations after which the opponent past becomes the present policy")
    ] = 10

    def __init__(self, algo_class: Any = None) -> None:
        super().__init__(algo_class=algo_class)
        for name, default in own_keys(type(self)).items():
            setattr(self, name, copy.deepcopy(default))
        self.env, self.env_runner_cls = "search", LLMEnvRunner
        self.lr, self.grad_clip, self.num_epochs = 1e-6, 1.0, 1
        self.evaluation_interval = 5
        self.num_cpus_for_main_process = 1
        self.sample_timeout_s = 1800.0
        self.create_local_env_runner = False
        self.restart_failed_env_runners = False
        self._dont_auto_sync_env_runner_states = True

    @property
    def shares_module(self) -> bool:
        """True when runner and learner live in one process and use one module."""
        return bool(self.engine == "hf" and self.num_env_runners == 0 and self.num_learners == 0)

    @property
    def zero_stage(self) -> int:
        """How much DeepSpeed spreads over the learners: 1 optimiser states, 2 gradients too, 3 parameters too."""
        return int((self.deepspeed or {}).get("zero_stage", 0))

    @property
    def uses_reference(self) -> bool:
        """True when the loss needs the frozen reference policy."""
        return self.kl_beta > 0

    @property
    def longest_response(self) -> int:
        """Most tokens of any agent's response."""
        limits = self.max_response_tokens
        return limits if isinstance(limits, int) else max(limits.values())

    def context_of(self, llm: str) -> int:
        """Most tokens of prompt and response together for a model, as the engine may lower it."""
        context = context_length(llm)
        return int(min(context, self.engine_config.get("max_model_len", context)))

    def make_env(self, tokenizer: Any, context: int) -> AECEnv:
        """Builds the environment for a policy's tokenizer and context length, in tokens.

        Raises:
            ConfigError: no such environment, a key it does not take, or prompts that leave no room for a response.
        """
        max_prompt_tokens = self.max_prompt_tokens or context - self.longest_response
        if not 0 < max_prompt_tokens < context:
            raise ConfigError(
                f"config: max_prompt_tokens: expected 1 to {context - 1}, which leaves a response room in the context "
                f"of {context} tokens of {self.llm!r}; found {max_prompt_tokens}."
            )
        offered: dict[str, Any] = {
            "tokenizer": tokenizer,
            "max_prompt_tokens": max_prompt_tokens,
            "max_response_tokens": self.longest_response,
        }
        if self.penalties is not True:
            offered["penalties"] = self.penalties
        return make_environment(self.env, offered, self.env_config)

    def cast(self, engine: Any) -> Opponents:
        """Returns the policy's engine with the opponents in their places."""
        return Opponents(engine, self.opponents, self.opponent_refresh)

    def training(self, **settings: Any) -> Self:
        """Sets any of this package's keys, and those of RLlib's ``training()``."""
        mine = {key: settings.pop(key) for key in list(settings) if key in own_keys(type(self))}
        for key, value in mine.items():
            setattr(self, key, value)
        super().training(**settings)
        return self

    def update_from_dict(self, config_dict: Mapping[str, Any]) -> Self:
        """Sets keys from a dict, as YAML files and Tune give it.

        Raises:
            ConfigError: a key that nobody knows, or one of RLlib's that has no effect on this algorithm.
        """
        config_dict = dict(config_dict)
        self._refuse_strangers(config_dict)
        if not isinstance(config_dict.get("env_config", {}), Mapping):
            raise ConfigError(f"config: env_config: expected keys and values, found {config_dict['env_config']!r}.")
        mine = {key: config_dict.pop(key) for key in list(config_dict) if key in own_keys(type(self))}
        for key, value in mine.items():
            setattr(self, key, copy.deepcopy(value))
        super().update_from_dict(config_dict)
        return self

    def _refuse_strangers(self, config_dict: Mapping[str, Any]) -> None:
        own, stock = own_keys(type(self)), type(self)().to_dict()
        known = {*own, *USED_RLLIB_KEYS}
        refuse_reshaping(config_dict, "config: ")
        for key, value in config_dict.items():
            if key in known or key.startswith("_"):
                continue
            if key not in stock:
                raise ConfigError(f"config: unknown key {key!r}.{did_you_mean(key, known)}")
            if not _same(value, stock[key]):
                raise ConfigError(
                    f"config: {key!r} is a key of RLlib that has no effect on {self._name()}; remove it."
                    + did_you_mean(key, known)
                )

    def _name(self) -> str:
        return type(self).__name__.removesuffix("Config")

    @classmethod
    def check(cls, config_dict: Mapping[str, Any]) -> Self:
        """Returns the validated config of a dict.

        Raises:
            ConfigError: what is wrong with which key.
        """
        config = cls().update_from_dict(config_dict)
        config.validate()
        return config

    def validate(self) -> None:
        """Checks all values; see :class:`ConfigError`."""
        register()
        for key, annotation in {**RLLIB_TYPES, **annotations(type(self))}.items():
            try:
                setattr(self, key, TypeAdapter(annotation, config=FINITE).validate_python(getattr(self, key)))
            except ValidationError as error:
                found = getattr(self, key)
                nearest = max(
                    error.errors(), key=lambda fault: len(fault["loc"])
                )  # of a union, the branch that was meant
                raise ConfigError(f"config: {key}: {nearest['msg']}; found {found!r}.") from None
        check_environment(self.env, self.env_config)
        if not isinstance(self.lr, list) and not (isinstance(self.lr, int | float) and 0 <= self.lr < float("inf")):
            raise ConfigError(f"config: lr: expected a number of at least 0 or a schedule, found {self.lr!r}.")
        check_scale(self)
        check_engine_place(self)
        if self.lora is not None:
            self.lora = lora_settings(self.lora)
            check_adapters(self)
        if (self.minibatch_questions or 0) > self.questions_per_iteration:
            raise ConfigError(
                f"config: minibatch_questions: expected at most questions_per_iteration = "
                f"{self.questions_per_iteration}, found {self.minibatch_questions}."
            )
        import_named("rollout_strategy", self.rollout_strategy, STRATEGIES)
        import_named("reward_aggregation", self.reward_aggregation, AGGREGATIONS)
        if self.rollout_strategy == "rr" and not np.isclose(sum(self.fork_probs), 1.0):
            raise ConfigError(f"config: fork_probs: expected a sum of 1, found {sum(self.fork_probs)}.")
        if self.rollout_strategy == "rr" and min(self.fork_probs) < 0:
            raise ConfigError(f"config: fork_probs: expected no number below 0, found {self.fork_probs}.")
        if self.max_kl is not None and self.kl_beta == 0:
            raise ConfigError("config: max_kl: expected a kl_beta above 0, without which there is no reference.")
        if self.kl_in_reward and self.kl_beta == 0:
            raise ConfigError(
                "config: kl_in_reward: expected a kl_beta above 0, found 0; raise it, or leave the KL out."
            )
        check_opponents(self.opponents)
        counts = self.fork_counts or []
        if self.rollout_strategy == "fork_counts" and (max(counts, default=0) < 2 or min(counts) < 1):
            raise ConfigError(
                f"config: fork_counts: expected numbers of at least 1, one of them at least 2; found {self.fork_counts}"
            )
        super().validate()

    def as_json(self) -> dict[str, Any]:
        """Returns this package's keys and the environment as JSON-like values that :meth:`check` takes."""
        values = {key: self[key] for key in (*own_keys(type(self)), "env", "env_config")}
        return dict(json.loads(json.dumps(values, default=str)))

    def get_default_learner_class(self) -> type:
        """The policy objective on the common learner."""
        from rllib_mhgpo.algorithms.objective import PolicyLearner

        return PolicyLearner

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """The language model as RLModule."""
        from rllib_mhgpo.modules import LLMRLModule

        settings = {"llm": self.llm, "dtype": self.dtype, "temperature": self.temperature, "lora": self.lora}
        return RLModuleSpec(module_class=LLMRLModule, model_config=settings)


def annotations(config_class: type) -> dict[str, Any]:
    """Returns the annotations of all keys of this package that a config class has."""
    chain = [base for base in reversed(config_class.__mro__) if issubclass(base, LLMConfig)]
    return {key: value for base in chain for key, value in vars(base).get("__annotations__", {}).items()}


def own_keys(config_class: type) -> dict[str, Any]:
    """Returns the defaults of all keys of this package that a config class has."""
    return {key: getattr(config_class, key) for key in annotations(config_class)}


def _same(value: Any, other: Any) -> bool:
    try:
        return bool(value == other)
    except Exception:
        return value is other


def describe(config_class: type, beside: type | None = None) -> str:
    """Returns the keys of a config class, or those that another lacks, as a table: key, default, type, what it is."""
    known = annotations(beside) if beside else {}
    lines = ["| key | default | type | what it is |", "|---|---|---|---|"]
    for key, annotation in annotations(config_class).items():
        if key in known:
            continue
        kind, (field,) = annotation.__origin__, annotation.__metadata__
        cells = (f"`{key}`", f"`{json.dumps(getattr(config_class, key))}`", _type_name(kind), field.description)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _type_name(kind: Any) -> str:
    """A type without the bounds inside it."""
    if hasattr(kind, "__metadata__"):
        return _type_name(kind.__origin__)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Literal:
        return " or ".join(repr(value) for value in inner)
    if origin in (Union, UnionType):
        return " or ".join(_type_name(part) for part in inner)
    name = "null" if kind is type(None) else getattr(origin or kind, "__name__", str(kind))
    parts = ", ".join("..." if part is ... else _type_name(part) for part in inner)
    return f"{name}[{parts}]" if parts else name
