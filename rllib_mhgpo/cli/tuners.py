"""Tune's schedulers and search algorithms by name, with their keys checked, and the table of the best trials.

Both may stand in the file (``scheduler: {name: asha, grace_period: 2}``) or on the command line.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from rllib_mhgpo.algorithms.registration import ALGORITHMS
from rllib_mhgpo.cli.experiments import Experiment, refuse_unknown
from rllib_mhgpo.cli.search_spaces import places, searched
from rllib_mhgpo.errors import ConfigError, did_you_mean

ALIASES = {"asha": "async_hyperband", "bohb": "hb_bohb"}
PACKAGES = {
    "optuna": "optuna", "hyperopt": "hyperopt", "ax": "ax-platform", "bayesopt": "bayesian-optimization",
    "bohb": "hpbandster ConfigSpace", "nevergrad": "nevergrad", "zoopt": "zoopt", "hebo": "HEBO", "pb2": "GPy",
}  # fmt: skip
"""What ``pip install`` needs beyond Ray."""
METRIC, RETURN = "dev/f1", "env_runners/episode_return_mean"
MOST_ROWS = 10


def metric_of(experiment: Experiment) -> dict[str, str]:
    """Returns the column by which trials are compared, and whether it is to be ``max`` or ``min``.

    >>> metric_of({"run": "PPO"}), metric_of({"run": "MHGPO", "scheduler": {"name": "asha", "metric": "reward"}})
    ({'metric': 'env_runners/episode_return_mean', 'mode': 'max'}, {'metric': 'reward', 'mode': 'max'})
    """
    run = experiment["run"]
    is_own = run in ALGORITHMS or getattr(run, "__module__", "").startswith("rllib_mhgpo.")
    chosen = {"metric": METRIC if is_own else RETURN, "mode": "max"}
    for place in (experiment, experiment.get("search_alg"), experiment.get("scheduler")):
        chosen |= {key: str(place[key]) for key in chosen if place and key in place}
    return chosen


def make_scheduler(settings: Mapping[str, Any] | None, source: str = "scheduler") -> Any:
    """Returns a new Tune scheduler of ``settings["name"]``, None for none.

    Raises:
        ConfigError: an unknown scheduler, a key it does not take or a value it refuses, or a package that it needs.
    """
    if settings is None:
        return None
    from ray.tune.schedulers import SCHEDULER_IMPORT

    return _make(settings, SCHEDULER_IMPORT, ALIASES, source)


def make_search_alg(settings: Mapping[str, Any] | None, source: str = "search_alg") -> Any:
    """Returns a new Tune search algorithm of ``settings["name"]``, None for none.

    Raises:
        ConfigError: as :func:`make_scheduler`.
    """
    if settings is None:
        return None
    from ray.tune.search import SEARCH_ALG_IMPORT

    return _make(settings, SEARCH_ALG_IMPORT, {}, source)


def _make(settings: Mapping[str, Any], table: Mapping[str, Any], aliases: Mapping[str, str], source: str) -> Any:
    arguments = {key: value for key, value in settings.items() if key not in ("metric", "mode")}  # told by tune.run
    name = str(arguments.pop("name", ""))
    known = sorted({*table, *aliases})
    found = table.get(aliases.get(name.lower(), name.lower()))
    if found is None:
        raise ConfigError(
            f"{source}: none is called {name!r}; there are {', '.join(known)}.{did_you_mean(name, known)}"
        )
    try:
        made = found if isinstance(found, type) else found()
    except ImportError:
        raise _missing(name, source) from None
    refuse_unknown(arguments, [key for key in inspect.signature(made).parameters if key != "kwargs"], source)
    try:
        return made(**searched(arguments, source))
    except (ImportError, AssertionError) as error:
        if isinstance(error, AssertionError) and "install" not in str(error).lower():
            raise ConfigError(f"{source}: {name} refuses it: {error}") from error
        raise _missing(name, source) from None
    except Exception as error:
        raise ConfigError(f"{source}: {name} refuses it: {error}") from error


def _missing(name: str, source: str) -> ConfigError:
    return ConfigError(
        f"{source}: {name} needs packages that are not installed: pip install {PACKAGES.get(name, name)}"
    )


def check_search(experiment: Experiment, source: str) -> None:
    """Refuses a search that could not run, or would find nothing to search.

    Raises:
        ConfigError: grids under a search algorithm, or one without any space to search.
    """
    make_scheduler(experiment.get("scheduler"), f"{source}: scheduler")
    algorithm = make_search_alg(experiment.get("search_alg"), f"{source}: search_alg")
    grids, domains = places(searched(experiment["config"], f"{source}: config"))
    name = (experiment.get("search_alg") or {}).get("name", "")
    partner = (experiment.get("scheduler") or {}).get("name")
    if name == "bohb" and ALIASES.get(str(partner), partner) != "hb_bohb":
        raise ConfigError(
            f"{source}: search_alg: bohb goes with the scheduler hb_bohb, found {partner or 'none'!r}, "
            "without which it hears nothing of the trials."
        )
    if algorithm is None or name in ("random", "variant_generator"):
        return
    if grids:
        raise ConfigError(f"{source}: search_alg: {name} cannot walk a grid; write `choice` for `grid_search`.")
    if not domains:
        raise ConfigError(f"{source}: search_alg: {name} has nothing to search; write a space such as loguniform.")


def best_trials(trials: Sequence[Any], metric: str, mode: str) -> list[tuple[Any, float]]:
    """Returns the trials that have reported the metric with the best value of each, best first.

    A dev score counts for nothing where dev was evaluated before training alone.
    """
    sign = 1 if mode == "max" else -1
    found = []
    for trial in trials:
        if metric.startswith("dev/") and (trial.last_result or {}).get("dev", {}).get("iteration") == 0:
            continue
        numbers = (trial.metric_analysis or {}).get(metric, {})
        if mode in numbers and numbers[mode] == numbers[mode]:
            found.append((trial, float(numbers[mode])))
    return sorted(found, key=lambda pair: -sign * pair[1])


def searched_values(trial: Any, names: Sequence[str]) -> str:
    """Writes what a trial was given at these places; a search algorithm's trial knows of all its other settings too."""
    given = {key: value for key, value in (trial.evaluated_params or {}).items() if key in names}
    return ", ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in given.items()
    )


def table_of_best(trials: Sequence[Any], names: Sequence[str], metric: str, mode: str) -> list[str]:
    """Writes the best trials, a line each: the metric's best value, iterations, what was searched, the checkpoint.

    Args:
        names: the places that were searched, as :func:`places` gives them.
    """
    best = best_trials(trials, metric, mode)[:MOST_ROWS]
    if not best and metric.startswith("dev/"):
        other = metric.replace("dev/", "train/", 1)
        said = f"No trial has evaluated {metric} since its start; by {other}, of sampled answers:"
        return [said, *table_of_best(trials, names, other, mode)]
    if not best:
        return [f"No trial has reported {metric}; name another column as `metric`."]
    rows = [("", metric, "iterations", "trial", "checkpoint")]
    for place, (trial, value) in enumerate(best, 1):
        where = trial.checkpoint.path if trial.checkpoint else ""
        iterations = str((trial.last_result or {}).get("training_iteration", 0))
        rows.append((str(place), f"{value:.4g}", iterations, searched_values(trial, names) or trial.trial_id, where))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
