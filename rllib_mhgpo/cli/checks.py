"""Everything about an experiment that can be known before Ray is started.

The algorithms of this package check their own configs; RLlib's accept unknown keys without a word, so they are
compared with the algorithm's defaults here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from itertools import islice
from typing import Any

from rllib_mhgpo.algorithms.registration import peek_environment, register, resolve_algorithm
from rllib_mhgpo.cli.experiments import Experiment
from rllib_mhgpo.cli.search_spaces import places, searched
from rllib_mhgpo.cli.tuners import check_search
from rllib_mhgpo.errors import ConfigError, MHGPOError, did_you_mean

MOST_VARIANTS = 100  # a sweep's combinations beyond these are checked when their turn comes


def check(name: str, experiment: Experiment) -> type:
    """Checks an experiment and returns the class that ``run`` names.

    Raises:
        ConfigError: whatever would make the run fail, as far as it can be known beforehand.
    """
    register()
    run = experiment["run"]
    algorithm = run if isinstance(run, type) else resolve_algorithm(run)
    refuse_hidden_grids(experiment["config"], f"{name}: config")
    check_search(experiment, name)
    from rllib_mhgpo.cli.stops import check_stop

    try:
        check_stop(experiment, is_own(algorithm))
        for config in variants(experiment["config"]):
            check_config(algorithm, config)
    except MHGPOError as error:
        raise type(error)(f"{name}: {error}") from None
    return algorithm


def is_own(algorithm: type) -> bool:
    """True for the algorithms of this package."""
    return algorithm.__module__.startswith("rllib_mhgpo.")


def variants(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the config of each combination of ``grid_search`` values, at any depth; other spaces are drawn from."""
    return (each for _, each in named_variants(config))


def named_variants(config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields :func:`variants`, each with the values that tell it from the others in words."""
    from ray.tune.search.variant_generator import generate_variants

    for found, spec in islice(generate_variants({"config": searched(dict(config))}), MOST_VARIANTS):
        values = {".".join(map(str, path[1:])): value for path, value in found.items()}
        yield (
            ", ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items()),
            spec["config"],
        )


def the_variant(config: Mapping[str, Any], source: str, remedy: str) -> dict[str, Any]:
    """Returns the config of an experiment that has only one.

    Raises:
        ConfigError: it searches; where, and the remedy.
    """
    grids, domains = places(searched(dict(config)))
    if domains or len(list(islice(variants(config), 2))) > 1:
        found = ", ".join([*grids, *domains])
        raise ConfigError(f"{source}: expected one configuration, found a search over {found}; {remedy}")
    return next(variants(config))


def peek(name: str, algorithm: Any, experiment: Experiment) -> None:
    """Lets the environments of an experiment open their files.

    Raises:
        MHGPOError: what the run would find wrong at its start.
    """
    for config in variants(experiment["config"]) if hasattr(algorithm, "get_default_config") else ():
        made = algorithm.get_default_config().update_from_dict(config)
        try:
            peek_environment(made.env, made.env_config)
        except MHGPOError as error:
            raise type(error)(f"{name}: {error}") from None


def unread(algorithm: Any, experiment: Experiment) -> str:
    """Says which words of a first question a small policy has no token for; empty where all is well or not known."""
    if not is_own(algorithm):
        return ""
    from rllib_mhgpo.cli.env_checks import unread_at_first

    return unread_at_first(algorithm.get_default_config().update_from_dict(next(variants(experiment["config"]))))


def refuse_hidden_grids(value: Any, place: str) -> None:
    """Raises a ConfigError for a search inside an object: Tune looks into dicts and lists only."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            refuse_hidden_grids(inner, f"{place}.{key}")
    elif isinstance(value, list | tuple | set):
        for index, inner in enumerate(value):
            refuse_hidden_grids(inner, f"{place}[{index}]")
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            _refuse_search(getattr(value, field.name), f"{place}.{field.name}", type(value).__name__)


def _refuse_search(value: Any, place: str, owner: str) -> None:
    from ray.tune.search.variant_generator import parse_spec_vars

    _, domains, grids = parse_spec_vars({"": value})
    if domains or grids:
        raise ConfigError(f"{place}: Tune finds no search inside a {owner}; write the {owner} as a plain dict.")
    refuse_hidden_grids(value, place)


def check_environment(env: Any) -> None:
    """Raises a ConfigError where RLlib would find no environment; classes and no environment at all pass."""
    if not isinstance(env, str):
        return
    import gymnasium
    from ray.tune.registry import ENV_CREATOR, _global_registry

    if env in gymnasium.registry or _global_registry.contains(ENV_CREATOR, env):
        return
    module, _, name = env.partition(":")
    if name and _imports(module, name):
        return
    raise ConfigError(
        f"env: no environment {env!r}; expected a Gymnasium id or `module:Class`."
        + did_you_mean(env, gymnasium.registry)
    )


def _imports(module: str, name: str) -> bool:
    import gymnasium

    try:
        found = import_module(module)
    except ImportError as error:
        if error.name and module.startswith(error.name):
            return False
        raise ConfigError(f"env: {module} cannot be imported: {error}") from error
    return hasattr(found, name) or name in gymnasium.registry


def check_config(algorithm: type, config: Mapping[str, Any]) -> None:
    """Raises a ConfigError for a config that the algorithm would refuse, or accept without knowing what it says."""
    if not hasattr(algorithm, "get_default_config"):
        return
    default = algorithm.get_default_config()
    if hasattr(default, "check"):
        try:
            default.check(config)
        except MHGPOError:
            raise
        except Exception as error:
            raise ConfigError(f"config: {algorithm.__name__} refuses it: {error}") from error
        return
    check_environment(config.get("env"))
    for key in config:
        if not _knows(default, key):
            raise ConfigError(
                f"config: unknown key {key!r} of {algorithm.__name__}."
                + did_you_mean(key, [known for known in default.to_dict() if not known.startswith("_")])
            )
    try:
        default.update_from_dict(dict(config)).validate()
    except Exception as error:
        raise ConfigError(f"config: {algorithm.__name__} refuses it: {error}") from error


def _knows(default: Any, key: str) -> bool:
    """True for a field of an AlgorithmConfig, under its present or an older name, but not for its methods."""
    if getattr(getattr(type(default), key, None), "fset", None):
        return True
    return key in ("multiagent", *default.to_dict()) or (key in default and not hasattr(type(default), key))


def resolved(algorithm: type, experiment: Experiment) -> Experiment:
    """Returns the experiment with the algorithm's own defaults beside what was set.

    Own are the defaults that RLlib's common ones lack or have otherwise, as far as they can be written down.
    """
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

    shown = {**experiment, "run": experiment["run"] if isinstance(experiment["run"], str) else algorithm.__name__}
    if not hasattr(algorithm, "get_default_config"):
        return shown
    own = algorithm.get_default_config().to_dict()
    defaults = _beyond(own, AlgorithmConfig().to_dict())
    defaults = {key: value for key, value in defaults.items() if _is_plain(value) and not key.startswith("_")}
    return {**shown, "config": {**defaults, **_beyond(experiment["config"], own)}}


def _beyond(values: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what ``values`` says otherwise than ``base``, inside nested dicts too."""
    kept: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            value = _beyond(value, base[key])
            if not value:
                continue
        if key not in base or _differs(value, base[key]):
            kept[key] = value
    return kept


def _differs(value: Any, other: Any) -> bool:
    return type(value) is not type(other) or bool(value != other)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return all(_is_plain(inner) for inner in value)
    return value is None or isinstance(value, str | int | float)
