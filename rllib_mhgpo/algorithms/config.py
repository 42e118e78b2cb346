"""What every algorithm of this package can be told: an AlgorithmConfig that refuses what it does not know.

A key is written once, as an annotated class attribute: its type, its bounds, its default and a line of documentation.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pettingzoo import AECEnv
from pydantic import Field, TypeAdapter, ValidationError
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from rllib_mhgpo.algorithms.keys import FINITE, RLLIB_TYPES, USED_RLLIB_KEYS, Tokens, annotations, own_keys, plain, same
from rllib_mhgpo.algorithms.opponents import Opponents, check_opponents
from rllib_mhgpo.algorithms.policies import check_followed, check_policies, check_rate, given_policies, policy_followed
from rllib_mhgpo.algorithms.registration import check_environment, make_environment, register
from rllib_mhgpo.algorithms.scale_checks import (
    check_adapters,
    check_engine_place,
    check_losses,
    check_rollouts,
    check_scale,
    longest_sequence,
    prompt_limits,
)
from rllib_mhgpo.engines.settings import refuse_reshaping
from rllib_mhgpo.errors import ConfigError, did_you_mean
from rllib_mhgpo.llms import context_length
from rllib_mhgpo.llms.lora import lora_settings
from rllib_mhgpo.runner import LLMEnvRunner


class LLMConfig(AlgorithmConfig):
    """Common keys of algorithms that train language models; RLlib's own keys keep their names and meaning."""

    llm: Annotated[str, Field(description="tiny, tiny_1, mini, smollm2, a model folder or a hub id")] = "tiny"
    dtype: Annotated[Literal["float32", "bfloat16"], Field(description="of forward passes; weights are float32")] = (
        "float32"
    )
    attn_implementation: Annotated[
        Literal["sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"] | None,
        Field(description="attention kernels of the update, by transformers' names; null: its own choice"),
    ] = None
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
        Literal[False, True, "offload"],
        Field(description="compute layers again in the backward pass; offload: keep their inputs in the CPU's memory"),
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
        int | None, Field(ge=1, description="longest prompt; null: the context; passages then leave responses room")
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
    kl_estimator: Annotated[Literal["k1", "k2", "k3"], Field(description="of the KL in the loss (not k1)")] = "k3"
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
    policies: Annotated[
        dict[str, dict[str, Any]],
        Field(description="policies with weights of their own: names, or by name their own llm, lora, lr; empty: one"),
    ] = {}  # noqa: RUF012  # copied
    policy_mapping: Annotated[
        dict[str, str], Field(description="which policy an agent follows; empty: the one of its own name")
    ] = {}  # noqa: RUF012  # copied
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
        self.policy_mapping_fn = None  # RLlib's own knows the shared policy alone
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

    @property
    def is_multi_agent(self) -> bool:
        """False, for RLlib's own connectors and runners: those of this package deal agents to policies themselves."""
        return False

    @property
    def policy_names(self) -> list[str]:
        """The policies: RLlib's ``default_policy`` alone where agents share their parameters."""
        return list(self.policies) or [DEFAULT_MODULE_ID]

    @property
    def llms(self) -> dict[str, str]:
        """What each policy begins with."""
        return {name: str(self.get_config_for_module(name).llm) for name in self.policy_names}

    def policy_of(self, agent: str) -> str:
        """Which policy an agent follows."""
        return policy_followed(self, agent)

    def get_config_for_module(self, module_id: str) -> Self:
        """Returns the configuration with what a policy has of its own."""
        own = given_policies(self.policies).get(module_id)
        its: Self = self.copy(copy_frozen=False) if own else self
        for key, value in (own or {}).items():
            setattr(its, key, value)
        return its

    def multi_agent(self, *, policies: Any = None, policy_mapping_fn: Any = None, **others: Any) -> Self:
        """As RLlib's, with what has a meaning here: a policy's own keys may be a dict or a ``PolicySpec``'s config.

        ``policy_mapping_fn(agent, None)`` is called once an agent.
        """
        if any(value is not None for value in others.values()):
            raise ConfigError(
                f"config: multi_agent: {sorted(others)} have no effect on {self._name()}; train_agents says whom it "
                "trains."
            )
        if policies is not None:
            self.policies = given_policies(policies)
        if policy_mapping_fn is not None:
            self.policy_mapping_fn = policy_mapping_fn
        return self

    @property
    def context(self) -> int:
        """Most tokens of prompt and response together that every policy takes."""
        return min(map(self.context_of, self.llms.values()))

    def context_of(self, llm: str) -> int:
        """Most tokens of prompt and response together for a model, as the engine may lower it."""
        context = context_length(llm)
        return int(min(context, self.engine_config.get("max_model_len", context)))

    def make_env(self, tokenizer: Any, context: int) -> AECEnv:
        """Builds the environment for a policy's tokenizer and context length, in tokens.

        Raises:
            ConfigError: no such environment, a key it does not take, or prompts that leave no room for a response.
        """
        longest, fitted = prompt_limits(self, context)
        offered: dict[str, Any] = {
            "tokenizer": tokenizer,
            "max_prompt_tokens": fitted,
            "max_response_tokens": self.longest_response,
        }
        if self.penalties is not True:
            offered["penalties"] = self.penalties
        env: AECEnv = make_environment(self.env, offered, self.env_config)
        if hasattr(env.unwrapped, "admit"):
            env.unwrapped.admit(longest)
        return env

    def cast(self, engines: Mapping[str, Any], agents: Sequence[str], context: int, present: Any = None) -> Opponents:
        """Returns the policies' engines, by policy, as one, with the opponents in their places; see :class:`Opponents`.

        Raises:
            ConfigError: an agent that follows no policy, or an opponent that cannot play.
        """
        check_followed(self, agents)
        own = {agent: engines.get(self.policy_of(agent), next(iter(engines.values()))) for agent in agents}
        return Opponents(own, self.opponents, self.opponent_refresh, longest_sequence(self, context), present)

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
        config_dict = dict(plain(dict(config_dict)))
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
            if not same(value, stock[key]):
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
        self.policies = given_policies(self.policies)
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
        check_rate("config", self.lr)
        check_scale(self)
        check_engine_place(self)
        if self.lora is not None:
            self.lora = lora_settings(self.lora)
            check_adapters(self)
        check_policies(self)
        check_rollouts(self)
        check_losses(self)
        check_opponents(self.opponents)
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

        settings = {key: self[key] for key in ("llm", "dtype", "temperature", "lora", "attn_implementation")}
        return RLModuleSpec(module_class=LLMRLModule, model_config=settings)

    def get_multi_rl_module_spec(self, *, spaces: Any = None, **kwargs: Any) -> MultiRLModuleSpec:
        """One such module for each policy; ``spaces`` are those of the runners, by policy."""
        specs = {name: self.get_config_for_module(name).get_default_rl_module_spec() for name in self.policy_names}
        for name, spec in specs.items():
            spec.observation_space, spec.action_space = spaces[name]
        return MultiRLModuleSpec(rl_module_specs=specs)
