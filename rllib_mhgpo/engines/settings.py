"""What the config key ``engine_config`` may say; nothing heavy is imported to refuse the rest."""

from collections.abc import Iterable, Mapping
from typing import Any

from rllib_mhgpo.errors import ConfigError, did_you_mean

RESHAPING = (
    "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "logits_processors", "bad_words", "allowed_token_ids", "min_tokens", "thinking_token_budget",
    "override_generation_config", "generation_config", "speculative_config", "watermark_config",
)  # fmt: skip
"""Settings under which an engine does not sample from the distribution that the learner computes."""

OWN = {
    "model": "llm", "tokenizer": "llm", "dtype": "dtype", "seed": "seed", "temperature": "temperature",
    "max_tokens": "max_response_tokens", "lora_modules": "lora", "enable_lora": "lora", "max_lora_rank": "lora",
    "n": "group_size",
}  # fmt: skip
"""Arguments of vLLM that follow from a key of the configuration."""

FIXED = ("logprobs_mode", "skip_tokenizer_init", "trust_remote_code", "weight_transfer_config")
"""Arguments of vLLM that are not to be changed."""

HF_KEYS = ("max_batch_tokens",)


def refuse_reshaping(keys: Iterable[str], place: str) -> None:
    """Refuses sampler settings that would make every ratio wrong.

    Raises:
        ConfigError: names the key.
    """
    for key in keys:
        if key in RESHAPING:
            raise ConfigError(
                f"{place}{key}: samples would not come from the distribution that the learner computes, and the ratio "
                "of the policies would be wrong; sampling is shaped by temperature alone. Remove the key."
            )


def check_engine(engine: str, settings: Mapping[str, Any]) -> None:
    """Refuses what ``engine_config`` cannot hold.

    Raises:
        ConfigError: which key, and what to use instead.
    """
    refuse_reshaping(settings, "config: engine_config.")
    for key in ("max_batch_tokens", "kv_cache_memory_bytes"):
        given = settings.get(key, 1)
        if not isinstance(given, int) or isinstance(given, bool) or given < 1:
            raise ConfigError(f"config: engine_config.{key}: expected a whole number of at least 1, found {given!r}.")
    if engine == "hf":
        for key in settings:
            if key not in HF_KEYS:
                raise ConfigError(
                    f"config: engine_config: the engine hf takes {list(HF_KEYS)}, found {key!r}."
                    f"{did_you_mean(key, HF_KEYS)} Arguments of vLLM need engine: vllm."
                )
        return
    for key in settings:
        if key in OWN:
            raise ConfigError(f"config: engine_config.{key}: follows from the key {OWN[key]!r}; set that one.")
        if key in FIXED:
            raise ConfigError(f"config: engine_config.{key}: is not to be changed; remove the key.")
    length = settings.get("max_model_len", 2)
    if not isinstance(length, int) or length < 2:
        raise ConfigError(f"config: engine_config.max_model_len: expected a whole number above 1, found {length!r}.")
    share = settings.get("gpu_memory_utilization", 0.5)
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise ConfigError(
            f"config: engine_config.gpu_memory_utilization: expected a share of one GPU's memory, above 0 and at most "
            f"1, found {share!r}."
        )
