"""What an experiment is, read from a classic RLlib YAML file, from a Python file or from the command line.

An experiment is a dict with the keys of :data:`KEYS`; ``env`` and the older spellings of checkpoint settings are folded
into ``config`` and ``checkpoint_config``. Nothing of Ray is imported here except by a user's own Python file.
"""

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rllib_mhgpo.cli.yaml12 import parse_yaml, read_yaml
from rllib_mhgpo.errors import ConfigError, did_you_mean

Experiment = dict[str, Any]

KEYS = (
    "run",
    "env",
    "config",
    "stop",
    "num_samples",
    "checkpoint_config",
    "time_budget_s",
    "max_failures",
    "max_concurrent_trials",
    "metric",
    "mode",
    "scheduler",
    "search_alg",
    "resources_per_trial",
    "restore",
    "storage_path",
)
CHECKPOINT_KEYS = (
    "checkpoint_frequency",
    "checkpoint_at_end",
    "num_to_keep",
    "checkpoint_score_attribute",
    "checkpoint_score_order",
)
OLD_CHECKPOINT_KEYS = {
    "checkpoint_freq": "checkpoint_frequency",
    "checkpoint_at_end": "checkpoint_at_end",
    "keep_checkpoints_num": "num_to_keep",
}
MAPPINGS = ("config", "stop", "checkpoint_config")
Rule = tuple[Callable[[Any], bool], str]


def _whole(least: int) -> Rule:
    return lambda value: type(value) is int and value >= least, f"a whole number of at least {least}"


def _one_of(*words: str) -> Rule:
    return lambda value: value in words, " or ".join(words)


TEXT: Rule = (lambda value: isinstance(value, str), "a text")
VALUES: dict[str, Rule] = {
    "num_samples": _whole(1),
    "max_concurrent_trials": _whole(1),
    "max_failures": _whole(-1),
    "time_budget_s": (lambda value: type(value) in (int, float) and value > 0, "a number of seconds"),
    "metric": TEXT,
    "mode": _one_of("max", "min"),
    "restore": TEXT,
    "storage_path": TEXT,
    "resources_per_trial": (lambda value: not isinstance(value, str | int | float | list), "keys and values"),
    "checkpoint_frequency": _whole(0),
    "checkpoint_at_end": (lambda value: isinstance(value, bool), "true or false"),
    "num_to_keep": _whole(1),
    "checkpoint_score_attribute": TEXT,
    "checkpoint_score_order": _one_of("max", "min"),
}
"""What each key must be; no search stands in them, Tune looks for searches in ``config`` alone."""


def load_experiments(path: Path) -> dict[str, Experiment]:
    """Reads the experiments of a ``.yaml`` or ``.py`` file by their names.

    Raises:
        ConfigError: no such file, another kind of file, or no experiments in it; says where.
    """
    if not path.is_file():
        raise ConfigError(
            f"{path}: no such file. `rllib example list` names those that come with the package, "
            "`rllib example copy NAME` brings one here."
        )
    if path.suffix == ".py":
        return {path.stem: load_python(path)}
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{path}: expected a file named .yaml, .yml or .py, found {path.suffix or 'no suffix'!r}.")
    content = read_yaml(path)
    if not isinstance(content, dict) or not content:
        found = "nothing" if content is None else type(content).__name__
        raise ConfigError(f"{path}: expected `experiment-name: {{run: ..., env: ..., config: ...}}`, found {found}.")
    named = {path.stem: content} if isinstance(content.get("run"), str) else content
    return {str(name): normalise(spec, f"{path}: {name}") for name, spec in named.items()}


def normalise(spec: Any, source: str) -> Experiment:
    """Checks an experiment's own keys and folds the spellings that mean the same into one.

    Args:
        source: file and experiment, for messages.

    Raises:
        ConfigError: an unknown key, none for the algorithm, or a value of another kind.
    """
    if not isinstance(spec, Mapping):
        raise ConfigError(f"{source}: expected an experiment (run, env, config, stop, ...), found {spec!r}.")
    refuse_unknown(spec, [*KEYS, *OLD_CHECKPOINT_KEYS], source)
    made = {key: value for key, value in spec.items() if key in KEYS and value is not None}
    for key in MAPPINGS:
        made[key] = dict(_mapping(made.get(key, {}), f"{source}: {key}"))
    if not isinstance(made.get("run"), str | type):
        raise ConfigError(f"{source}: run: expected an algorithm's name, found {made.get('run')!r}.")
    if "env" in made:
        made["config"]["env"] = made.pop("env")
    for old, new in OLD_CHECKPOINT_KEYS.items():
        if spec.get(old) is not None:
            made["checkpoint_config"][new] = spec[old]
    refuse_unknown(made["checkpoint_config"], CHECKPOINT_KEYS, f"{source}: checkpoint_config")
    for key in ("checkpoint_at_end", "checkpoint_score_attribute", "checkpoint_score_order"):
        if made["checkpoint_config"].get(key, 0) is None:
            del made["checkpoint_config"][key]
    for key, value in made["stop"].items():
        if not isinstance(key, str):
            raise ConfigError(f"{source}: stop: expected columns' names, found {key!r}.")
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
            raise ConfigError(f"{source}: stop: {key}: expected a number, found {value!r}.")
    for key in ("scheduler", "search_alg"):
        if key in made:
            made[key] = named(made[key], f"{source}: {key}")
    made.setdefault("num_samples", 1)
    for place, values in ((source, made), (f"{source}: checkpoint_config", made["checkpoint_config"])):
        for key, (is_right, wanted) in VALUES.items():
            if key in values and not is_right(values[key]):
                raise ConfigError(f"{place}: {key}: expected {wanted}, found {values[key]!r}.")
    return made


def named(value: Any, source: str) -> dict[str, Any]:
    """Returns ``{"name": ..., and arguments}`` of a name alone or of such a mapping.

    >>> named("asha", "scheduler")
    {'name': 'asha'}
    """
    made = {"name": value} if isinstance(value, str) else dict(_mapping(value, source))
    if not isinstance(made.get("name"), str):
        raise ConfigError(f"{source}: expected a name, or keys with a name among them, found {value!r}.")
    return made


def load_python(path: Path) -> Experiment:
    """Runs a Python file that defines ``config``, an AlgorithmConfig, and optionally ``stop``.

    Raises:
        ConfigError: the file fails, or does not define them.
    """
    module = _run(path)
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "algo_class") or not hasattr(config, "to_dict"):
        raise ConfigError(f"{path}: expected `config`, an AlgorithmConfig such as MHGPOConfig(), found {config!r}.")
    spec = {"run": config.algo_class, "config": config.to_dict(), "stop": getattr(module, "stop", {})}
    return normalise(spec, str(path))


def _run(path: Path) -> ModuleType:
    from ray import cloudpickle

    path, name = path.resolve(), f"experiment_{path.stem}"
    source = importlib.util.spec_from_file_location(name, path)
    assert source is not None
    assert source.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(source)
    cloudpickle.register_pickle_by_value(module)  # workers cannot import the file; what it defines travels whole
    try:
        source.loader.exec_module(module)
    except SyntaxError as error:
        raise ConfigError(f"{error.filename}, line {error.lineno}: not valid Python: {error.msg}.") from error
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
        line = f", line {frames[-1].lineno}" if frames else ""
        raise ConfigError(f"{path}{line}: {type(error).__name__}: {error}") from error
    return module


def change(experiment: Experiment, assignment: str) -> None:
    """Applies one ``--set key.path=value``; the value is typed as YAML.

    The path begins in ``config``, or with another of :data:`KEYS` (``stop.training_iteration=3``).

    Raises:
        ConfigError: no ``=``, or a path through something that is no mapping.
    """
    path, separator, text = assignment.partition("=")
    *parents, last = path.strip().split(".")
    if not separator or not all([*parents, last]):
        raise ConfigError(f"--set {assignment}: expected key.path=value, such as lr=1e-5 or env_config.reward=em.")
    place: Any = experiment
    if (parents or [last])[0] not in KEYS or last == "env":
        parents = ["config", *parents]
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict) or "grid_search" in place:
            raise ConfigError(f"--set {assignment}: {parent} is {place!r}, which has no keys to set.")
    place[last] = parse_yaml(text, f"--set {path}")


def refuse_unknown(found: Iterable[str], known: Iterable[str], source: str) -> None:
    """Raises a ConfigError for the first key that is not known, with the nearest that is."""
    known = list(known)
    for key in found:
        if key not in known:
            raise ConfigError(f"{source}: unknown key {key!r}; keys are {', '.join(known)}.{did_you_mean(key, known)}")


def _mapping(value: Any, source: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{source}: expected a mapping of keys to values, found {value!r}.")
    return value
