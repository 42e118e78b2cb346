"""What cannot be asked for together: learners, shards, adapters, engines and weights; rollouts; terms of the loss."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from rllib_mhgpo.algorithms.registration import import_named
from rllib_mhgpo.credit import AGGREGATIONS
from rllib_mhgpo.engines.settings import check_engine
from rllib_mhgpo.errors import ConfigError, did_you_mean
from rllib_mhgpo.sampling import STRATEGIES

if TYPE_CHECKING:
    from rllib_mhgpo.algorithms.config import LLMConfig

OWN_IN_DEEPSPEED = (
    "fp16", "bf16", "optimizer", "scheduler", "gradient_clipping", "gradient_accumulation_steps", "train_batch_size",
    "train_micro_batch_size_per_gpu",
)  # fmt: skip


def check_scale(config: "LLMConfig") -> None:
    """Refuses what learners, DeepSpeed and sampling ahead cannot do together."""
    keys = ("zero_stage", "offload_optimizer", "offload_param", "config")
    given = config.deepspeed or {}
    strangers = [key for key in given if key not in keys]
    if strangers:
        hint = did_you_mean(strangers[0], keys)
        raise ConfigError(
            f"config: deepspeed: expected keys of {list(keys)}, found {strangers[0]!r}.{hint} DeepSpeed's "
            "own keys go under config."
        )
    if given and given.get("zero_stage") not in (0, 1, 2, 3):
        raise ConfigError(f"config: deepspeed.zero_stage: expected 0, 1, 2 or 3, found {given.get('zero_stage')!r}.")
    if config.zero_stage and not config.num_learners:
        raise ConfigError(
            f"config: deepspeed: zero_stage {config.zero_stage} needs learners to spread over; set num_learners to "
            "the number of GPUs, or to 1 to offload from one."
        )
    _check_deepspeed(given)
    if given.get("offload_param") and config.zero_stage != 3:
        raise ConfigError("config: deepspeed.offload_param: needs zero_stage 3, which spreads parameters.")
    more = given.get("config") or {}
    ours = [key for key in OWN_IN_DEEPSPEED if key in more]
    if ours or "stage" in more.get("zero_optimization", {}):
        raise ConfigError(
            f"config: deepspeed.config: {ours or ['zero_optimization.stage']} follow from dtype, grad_clip, lr and "
            "zero_stage; leave them out."
        )
    if "activation_checkpointing" in more:
        raise ConfigError(
            "config: deepspeed.config.activation_checkpointing: has no effect on models of transformers; "
            "gradient_checkpointing: offload keeps layers' inputs in the CPU's memory and computes the rest again."
        )
    if config.reference_refresh and config.zero_stage == 3:
        raise ConfigError("config: reference_refresh: a reference that follows is not sharded; use zero_stage 2.")
    if len(given) > 1 and not config.zero_stage:
        raise ConfigError("config: deepspeed: offloading and DeepSpeed's own keys need a zero_stage of 1 to 3.")
    _check_compilation(config)
    if config.torch_compile_learner and config.zero_stage == 3:
        raise ConfigError("config: torch_compile_learner: ZeRO-3 gathers layers in hooks; use a zero_stage below 3.")
    if config.torch_compile_learner and config.shares_module and not config.in_evaluation:
        raise ConfigError(
            "config: torch_compile_learner: the engine hf would sample with the learner's compiled layers, which are "
            "compiled for updates; set num_env_runners or num_learners to 1 or more, or engine: vllm."
        )
    share, strategy = config.num_gpus_per_learner, config.placement_strategy
    if config.num_learners > 1 and 0 < share <= 0.5 and "SPREAD" not in strategy:
        raise ConfigError(
            f"config: num_gpus_per_learner: expected more than 0.5, found {share:g}: with placement_strategy "
            f"{strategy} Ray puts two of the {config.num_learners} learners on one GPU, between which NCCL cannot "
            "talk. Give each more than half (0.6 leaves 0.4 for an env runner)."
        )
    if config.sample_ahead and not config.num_env_runners and not config.in_evaluation:
        raise ConfigError("config: sample_ahead: expected num_env_runners of at least 1, found 0.")
    if config.sample_ahead and config.rollout_is_cap is None:
        raise ConfigError(
            "config: sample_ahead: what is sampled ahead comes from older weights; set rollout_is_cap, such as 2.0."
        )


def _check_deepspeed(given: Mapping[str, Any]) -> None:
    """Refuses values of other kinds than DeepSpeed takes."""
    for key in ("offload_optimizer", "offload_param"):
        if not isinstance(given.get(key), Mapping | bool | None):
            raise ConfigError(
                f"config: deepspeed.{key}: expected true, false or keys and values, found {given[key]!r}."
            )
    more = given.get("config") or {}
    zero = more.get("zero_optimization", {}) if isinstance(more, Mapping) else {}
    for place, value in (("config", more), ("config.zero_optimization", zero)):
        if not isinstance(value, Mapping):
            raise ConfigError(f"config: deepspeed.{place}: expected keys and values, found {value!r}.")
    bucket = zero.get("reduce_bucket_size", 1)
    if not isinstance(bucket, int | float) or bucket < 1:
        raise ConfigError(
            f"config: deepspeed.config.zero_optimization.reduce_bucket_size: expected a number of at least 1, found "
            f"{bucket!r}."
        )


def _check_compilation(config: "LLMConfig") -> None:
    backend, mode = config.torch_compile_learner_dynamo_backend, config.torch_compile_learner_dynamo_mode
    if not config.torch_compile_learner:
        if (backend, mode) != ("inductor", None) and (backend, mode) != ("aot_eager", None):  # RLlib's own, by system
            raise ConfigError("config: torch_compile_learner_dynamo_backend, _mode: need torch_compile_learner: true.")
        return
    from torch import _dynamo

    known = _dynamo.list_backends(None)
    if backend not in known:
        raise ConfigError(
            f"config: torch_compile_learner_dynamo_backend: expected one of {known}, found {backend!r}."
            + did_you_mean(str(backend), known)
        )


def check_engine_place(config: "LLMConfig") -> None:
    """Refuses engines, and ways of weights to them, that the machine's parts do not allow."""
    check_engine(config.engine, config.engine_config)
    if "flash" in (config.attn_implementation or ""):
        runners = config.num_gpus_per_env_runner or config.engine == "vllm" or not config.num_env_runners
        if config.dtype != "bfloat16" or not config.num_gpus_per_learner or not runners:
            raise ConfigError(
                f"config: attn_implementation: {config.attn_implementation} computes in bfloat16 on GPUs alone; set "
                "dtype: bfloat16, num_gpus_per_learner and, with the engine hf in runners, num_gpus_per_env_runner."
            )
    if config.attn_implementation == "flex_attention" and (config.engine == "hf" or not config.num_gpus_per_learner):
        raise ConfigError(
            "config: attn_implementation: flex_attention has kernels for the rows of an update on GPUs alone; set "
            "num_gpus_per_learner and engine: vllm, or leave it out."
        )
    if config.weight_sync != "store":
        _check_weight_sync(config)
    if config.engine_config.get("enable_sleep_mode"):
        _check_sleep(config)


def _check_weight_sync(config: "LLMConfig") -> None:
    """Refuses vLLM's own ways of weights where they do not lead to the engines."""
    way, learner, runner = config.weight_sync, config.num_gpus_per_learner, config.num_gpus_per_env_runner
    if "past" in config.opponents.values():
        raise ConfigError(
            f"config: opponents: past is made of weights in Ray's store, found weight_sync: {way}; use store, or let a "
            "checkpoint or model folder play."
        )
    adapters = any(config.get_config_for_module(name).lora for name in config.policy_names)
    if config.engine != "vllm" or not config.num_env_runners or not runner or adapters:
        raise ConfigError(
            f"config: weight_sync: {way} needs engine: vllm, num_env_runners and num_gpus_per_env_runner above 0, and "
            "no lora; store works everywhere."
        )
    if way == "nccl" and min(runner, learner) < 1:
        raise ConfigError(
            "config: weight_sync: nccl cannot talk between two processes on one GPU; give learners and runners "
            "whole GPUs, or use ipc where they share them."
        )
    if way == "ipc" and not (0 < learner < 1 and runner < 1):
        raise ConfigError(
            f"config: weight_sync: ipc reaches engines on the learners' own GPUs alone, found num_gpus_per_learner "
            f"{learner:g} and num_gpus_per_env_runner {runner:g}; give each a part of a GPU, such as 0.6 and 0.4, or "
            "use nccl or store."
        )
    if config.sample_ahead:
        raise ConfigError(f"config: weight_sync: {way} cannot wait for runners that sample ahead.")


def _check_sleep(config: "LLMConfig") -> None:
    """Refuses engines that could not sleep."""
    if not config.num_gpus_per_env_runner:
        raise ConfigError("config: engine_config.enable_sleep_mode: expected num_gpus_per_env_runner above 0.")
    if len(config.policies) > 1 and config.engine_config.get("distributed_executor_backend") == "uni":
        raise ConfigError(
            "config: engine_config.distributed_executor_backend: with enable_sleep_mode vLLM holds one engine a "
            f"process, found uni and the policies {list(config.policies)}; leave it out, and each engine has processes "
            "of its own."
        )
    if config.sample_ahead:
        raise ConfigError("config: engine_config.enable_sleep_mode: an engine that samples ahead cannot sleep.")


def check_adapters(config: "LLMConfig") -> None:
    """Refuses what does not go with adapters."""
    lora = config.lora or {}
    if config.reference_refresh:
        raise ConfigError("config: reference_refresh: with lora the reference is the model without adapters.")
    if config.zero_stage and lora["adapters"]:
        raise ConfigError("config: lora.adapters: agents' own adapters cannot be sharded; leave deepspeed out.")
    if lora["send"] == "merged" and config.engine != "vllm":
        raise ConfigError("config: lora.send: merged needs engine: vllm; the engine hf runs the adapters themselves.")
    if config.opponents and lora["adapters"]:
        raise ConfigError("config: lora.adapters: opponents play with one set of weights; share the adapter.")


def prompt_limits(config: "LLMConfig", context: int) -> tuple[int, int]:
    """Returns the longest prompt, and the length to which an environment fits prompts, in tokens.

    Where ``max_prompt_tokens`` is null a prompt may fill the context but for a token, and each response is lowered to
    what its prompt leaves; passages leave responses their room, but never have less than half of the context.

    Raises:
        ConfigError: prompts that leave no room for a response.
    """
    own, longest = config.env_config.get("max_prompt_tokens"), config.max_prompt_tokens
    if isinstance(own, int):
        return min(own, context - 1), min(own, context - 1)
    if longest is None:
        return context - 1, max(context - config.longest_response, context // 2)
    if longest >= context:
        raise ConfigError(
            f"config: max_prompt_tokens: expected 1 to {context - 1}, which leaves a response room in the context of "
            f"{context} tokens of {min(config.llms.values(), key=config.context_of)!r}; found {longest}."
        )
    return longest, longest


def longest_sequence(config: "LLMConfig", context: int) -> int:
    """Returns the most tokens that prompt and response have together."""
    prompt, _ = prompt_limits(config, context)
    return min(context, prompt + config.longest_response)


def check_rollouts(config: "LLMConfig") -> None:
    """Refuses numbers of questions and forks that do not go together."""
    if (config.minibatch_questions or 0) > config.questions_per_iteration:
        raise ConfigError(
            f"config: minibatch_questions: expected at most questions_per_iteration = "
            f"{config.questions_per_iteration}, found {config.minibatch_questions}."
        )
    import_named("rollout_strategy", config.rollout_strategy, STRATEGIES)
    if config.rollout_strategy == "rr" and not np.isclose(sum(config.fork_probs), 1.0):
        raise ConfigError(f"config: fork_probs: expected a sum of 1, found {sum(config.fork_probs)}.")
    if config.rollout_strategy == "rr" and min(config.fork_probs) < 0:
        raise ConfigError(f"config: fork_probs: expected no number below 0, found {config.fork_probs}.")
    counts = config.fork_counts or []
    if config.rollout_strategy == "fork_counts" and (max(counts, default=0) < 2 or min(counts) < 1):
        raise ConfigError(
            f"config: fork_counts: expected numbers of at least 1, one of them at least 2; found {config.fork_counts}"
        )


def check_losses(config: "LLMConfig") -> None:
    """Refuses rewards and a KL that cannot be computed."""
    import_named("reward_aggregation", config.reward_aggregation, AGGREGATIONS)
    if config.max_kl is not None and config.kl_beta == 0:
        raise ConfigError("config: max_kl: expected a kl_beta above 0, without which there is no reference.")
    if config.kl_in_reward and config.kl_beta == 0:
        raise ConfigError("config: kl_in_reward: expected a kl_beta above 0, found 0; raise it, or leave the KL out.")
    if config.kl_estimator == "k1" and config.kl_beta > 0 and not config.kl_in_reward:
        raise ConfigError(
            "config: kl_estimator: k1 in the loss has a gradient whose mean is 0, so it would hold nothing back; use "
            "k2 or k3, or kl_in_reward."
        )
    limits = config.max_response_tokens
    charged = {limits} if isinstance(limits, int) else {limits[agent] for agent in {*limits} - {*config.opponents}}
    shortest = min(charged, default=config.overlong_penalty_tokens)
    if config.overlong_penalty_tokens > shortest:
        raise ConfigError(
            f"config: overlong_penalty_tokens: expected at most max_response_tokens = {shortest}, found "
            f"{config.overlong_penalty_tokens}; every response would be punished."
        )
