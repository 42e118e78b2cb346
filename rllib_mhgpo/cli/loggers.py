"""Where results go beside ``progress.csv``, ``result.json`` and TensorBoard: ``--logger wandb``, ``mlflow`` or ``aim``.

Ray's own callbacks do the work. Each tool is told where to write as its users are used to: by its environment variables
(``WANDB_PROJECT``, ``WANDB_MODE=offline``, ``MLFLOW_TRACKING_URI``).
"""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from rllib_mhgpo.errors import ConfigError, did_you_mean

LOGGERS = {"wandb": "wandb", "mlflow": "mlflow", "aim": "aim"}
"""By name: the package that has to be installed."""


def check_loggers(names: Sequence[str]) -> None:
    """Refuses a logger that nobody knows, or whose package is not installed.

    Raises:
        ConfigError: which, and what to do.
    """
    for name in names:
        if name not in LOGGERS:
            raise ConfigError(
                f"--logger: no logger {name!r}; there are {', '.join(LOGGERS)}." + did_you_mean(name, LOGGERS)
            )
        if find_spec(LOGGERS[name]) is None:
            raise ConfigError(f"--logger {name}: its package is not installed: pip install {LOGGERS[name]}")


def make_loggers(names: Sequence[str], experiment: str) -> list[Any]:
    """Returns Tune's callbacks for these loggers.

    Raises:
        ConfigError: a tool refuses what its environment variables say.
    """
    check_loggers(names)
    try:
        return [MAKERS[name](experiment) for name in dict.fromkeys(names)]
    except Exception as error:
        raise ConfigError(f"--logger {', '.join(names)}: {error}") from error


def _wandb(experiment: str) -> Any:
    from ray.air.integrations.wandb import WandbLoggerCallback

    # workers of a running cluster do not have this process's environment
    mode = {"mode": os.environ["WANDB_MODE"]} if "WANDB_MODE" in os.environ else {}
    return WandbLoggerCallback(project=os.environ.get("WANDB_PROJECT", "rllib-mhgpo"), group=experiment, **mode)


def _mlflow(experiment: str) -> Any:
    from ray.air.integrations.mlflow import MLflowLoggerCallback
    from ray.tune.utils import flatten_dict

    class Nested(MLflowLoggerCallback):
        """Ray's own leaves nested columns out."""

        def log_trial_result(self, iteration: int, trial: Any, result: dict[str, Any]) -> None:
            step = {"timesteps_total": result["training_iteration"]}
            numbers = {key: value for key, value in flatten_dict(result).items() if not key.startswith("config/")}
            super().log_trial_result(iteration, trial, {**numbers, **step})

    return Nested(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI"), experiment_name=experiment)


def _aim(experiment: str) -> Any:
    from ray.tune.logger.aim import AimLoggerCallback

    return AimLoggerCallback(experiment_name=experiment)


MAKERS = {"wandb": _wandb, "mlflow": _mlflow, "aim": _aim}
