"""Which columns end a run: a name that cannot be one is refused before it, one that is not after its first iteration.

Tune takes any name, and lets a run with a wrong one train for ever.
"""

import re
from collections.abc import Mapping
from typing import Any

from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.tune import Callback
from ray.tune.utils import flatten_dict

from rllib_mhgpo.errors import ConfigError, did_you_mean

COLUMNS = (
    "training_iteration", "time_total_s", "time_this_iter_s", "time_since_restore", "iterations_since_restore",
    "timestamp", "num_env_steps_sampled_lifetime", "num_training_step_calls_per_iteration",
    "reward", "reward_shared", "reward_specific", "advantage_mean", "advantage_std", "zero_std_share", "singletons",
    "similarity", "prompt_tokens", "response_tokens", "truncated_share", "num_generations",
    "entropy", "kl", "clip_fraction", "ratio_mean", "ratio_max",
    "engine_logprob_diff", "engine_logprob_diff_max", "engine_kl", "sync_logprob_diff", "sync_mb", "staleness",
    "value_mean", "value_loss", "explained_variance", "critic_grad_norm", "grad_norm", "skipped_steps",
    "num_voided", "num_replaced_runners", "num_tokens_generated", "num_tokens_trained", "num_tokens_computed",
    "shared_token_share", "padding_share", "mfu", "tokens_per_s", "generations_per_s", "peak_memory_gb",
)  # fmt: skip
"""Numbers without a path in the rows of this package's algorithms; agents, scores and policies have paths."""
LATE = re.compile(r"((?:evaluation/)?env_runners/)|evaluation/|learners/")
"""What RLlib's algorithms report only once an episode has ended, an evaluation was made, a first gradient taken."""


def check_stop(experiment: Mapping[str, Any], is_own: bool) -> None:
    """Refuses a column that no row will have, as far as this can be known before the run.

    Raises:
        ConfigError: such a column; the nearest one is named.
    """
    stop, config = experiment["stop"], experiment["config"]
    for key in stop:
        if is_own and not has_callbacks(config) and "/" not in key and key not in COLUMNS:
            raise ConfigError(f"stop: no column {key!r}.{did_you_mean(key, COLUMNS)}")
        if key.startswith("evaluation/") and not is_own and not config.get("evaluation_interval"):
            raise ConfigError(f"stop: {key!r} is reported by evaluations alone; set evaluation_interval.")


def has_callbacks(config: Mapping[str, Any]) -> bool:
    """Whether the user's own code may add columns, of any name and in any iteration."""
    return any(key.startswith("callbacks") and value not in (None, RLlibCallback) for key, value in config.items())


class Stops(Callback):
    """Ends an experiment one of whose trials lacks a column that would stop it.

    Args:
        is_own: of this package's algorithms, which report all they have from the first iteration on.
    """

    def __init__(self, is_own: bool) -> None:
        self.is_own = is_own

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Looks for the columns.

        Raises:
            ConfigError: one is missing and will not come, or only dev scores would stop a run without dev questions.
        """
        row, stop = flatten_dict(result), trial.stopping_criterion
        if has_callbacks(trial.config) and any(key in row for key in stop):
            return
        numbers = [key for key, value in row.items() if isinstance(value, int | float)]
        for key in stop:
            if key not in row and key not in (trial.metric_analysis or {}) and not self._may_follow(key, row):
                raise ConfigError(
                    f"stop: the first iteration reported no column {key!r}, which so would never end the run."
                    f"{did_you_mean(key, numbers)} All columns stand in result.json; start anew, without --resume."
                )
        if stop and row.get("dev/questions") == 0 and all(key.startswith("dev/") for key in stop):
            raise ConfigError(
                f"stop: {', '.join(stop)}: dev is never evaluated here, the run would never end; give dev questions "
                "and evaluation_interval, or stop by training_iteration."
            )

    def _may_follow(self, key: str, row: Mapping[str, Any]) -> bool:
        late = None if self.is_own else LATE.match(key)
        if late is None:
            return False
        witness = f"{late[1]}episode_return_mean" if late[1] else late[0]
        return not any(name.startswith(witness) for name in row)
