"""Names that configuration files use, and where what they name is found.

The tables hold import paths as text: nothing is imported before it is asked for. Ray keeps its own registry in the
cluster and loses it with :func:`ray.shutdown`; :func:`register` is cheap and is called again before every use.
"""

import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any, get_type_hints

from rllib_mhgpo.errors import ConfigError, did_you_mean
from rllib_mhgpo.kinds import check_kind

ALGORITHMS = {
    "MHGPO": "rllib_mhgpo.algorithms.mhgpo:MHGPO",
    "MAPPO": "rllib_mhgpo.algorithms.mappo:MAPPO",
    "GRPO": "rllib_mhgpo.algorithms.grpo:GRPO",
}
ENVIRONMENTS = {
    "search": "rllib_mhgpo.envs.search:SearchEnv",
    "parallel_search": "rllib_mhgpo.envs.parallel_search:ParallelSearchEnv",
    "transcript": "rllib_mhgpo.envs.transcript:TranscriptEnv",
    "search_o1": "rllib_mhgpo.envs.search_o1:SearchO1Env",
    "solver_verifier": "rllib_mhgpo.envs.solver_verifier:SolverVerifierEnv",
    "text_game": "rllib_mhgpo.envs.text_game:TextGame",
    "text_gym": "rllib_mhgpo.envs.text_gym:TextGym",
}


def load(path: str) -> Any:
    """Imports what ``module:name`` names.

    >>> load("math:floor")(2.5)
    2
    """
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def import_named(key: str, name: str, table: Mapping[str, Any]) -> Any:
    """Returns ``table[name]``, or what ``module:name`` names.

    Raises:
        ConfigError: neither; ``key`` says which key of the configuration is wrong.
    """
    if name in table:
        return table[name]
    if ":" not in name:
        raise ConfigError(
            f"config: {key}: expected one of {', '.join(table)} or module:name, found {name!r}."
            + did_you_mean(name, table)
        )
    try:
        found = load(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"config: {key}: {name!r} cannot be imported: {error}.") from error
    if not callable(found):
        raise ConfigError(f"config: {key}: expected a class or a function, found {name!r}, a {type(found).__name__}.")
    return found


def create_environment(path: str, config: Mapping[str, Any]) -> Any:
    """Builds the environment that ``module:name`` names with ``config`` as its keyword arguments."""
    return make_environment(path, {}, config)


def make_environment(env: Any, offered: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """Builds an environment from a name of this package or of Tune's registry, ``module:Class`` or a class.

    Args:
        offered: keyword arguments that a class is given where it takes them; a registered creator gets them all.
        config: the user's, which all must be taken.

    Raises:
        ConfigError: no such environment, or a key that it does not take.
    """
    found = environment_class(env)
    if found is not None and is_gymnasium(found):
        return build(load(ENVIRONMENTS["text_gym"]), offered, {"env": found, "config": dict(config)})
    if found is not None:
        return build(found, offered, config)
    from ray.tune.registry import ENV_CREATOR, _global_registry

    return _global_registry.get(ENV_CREATOR, env)({**offered, **config})


def check_environment(env: Any, config: Mapping[str, Any]) -> None:
    """Refuses what :func:`make_environment` could not find, and keys that it would not take, without building it.

    A class may have a ``check`` of its own, called with the configuration, for what it can know beforehand.
    """
    found = environment_class(env)
    if found is not None:
        check_arguments(found, config)
        if hasattr(found, "check"):
            found.check(config)
        return
    from ray.tune.registry import ENV_CREATOR, _global_registry

    if not isinstance(env, str) or not _global_registry.contains(ENV_CREATOR, env):
        raise ConfigError(
            f"env: no environment {env!r}; there are {', '.join(ENVIRONMENTS)}, what ray.tune.register_env registered, "
            "and module:Class." + did_you_mean(str(env), ENVIRONMENTS)
        )


def peek_environment(env: Any, config: Mapping[str, Any]) -> None:
    """Lets an environment that has a ``peek`` look at the files that its configuration names."""
    found: Any = environment_class(env)
    if hasattr(found, "peek"):
        found.peek(config)


def environment_class(env: Any) -> type | None:
    """Returns the class of an environment, None where a function that Tune's registry knows makes it."""
    if isinstance(env, str) and (env in ENVIRONMENTS or ":" in env):
        return import_environment(ENVIRONMENTS.get(env, env))
    return env if isinstance(env, type) else None


def import_environment(path: str) -> type:
    """Imports the class that ``module:Class`` names."""
    try:
        found = load(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"env: {path!r} cannot be imported: {error}. Give module:Class on the Python path."
        ) from error
    if not isinstance(found, type):
        raise ConfigError(
            f"env: expected a class, found {path!r}, a {type(found).__name__}. A PettingZoo game goes through "
            "`env: text_game` with `env_config: {game: " + path.removesuffix(":env") + "}`."
        )
    return found


def is_gymnasium(cls: type) -> bool:
    """True for an environment of Gymnasium, which is played by one agent as text."""
    gymnasium = sys.modules.get("gymnasium")  # whoever has defined such a class has imported it
    return gymnasium is not None and issubclass(cls, gymnasium.Env)


def build(cls: type, offered: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    """Calls a class with what it takes of ``offered`` and all of ``config``."""
    check_arguments(cls, config)
    parameters, takes_all = keywords(cls)
    return cls(**{key: value for key, value in offered.items() if key in parameters or takes_all} | dict(config))


def check_arguments(cls: type, config: Mapping[str, Any]) -> None:
    """Raises a ConfigError for the first key that the class does not take, or whose value its annotation excludes.

    Of an unknown key the nearest known one is named. A default is always right, and null where a class is not of this
    package: many that take it do not say so.
    """
    parameters, takes_all = keywords(cls)
    is_own = cls.__module__.startswith("rllib_mhgpo.")
    for key, value in config.items():
        if key not in parameters and not takes_all:
            raise ConfigError(
                f"env_config: {cls.__name__} takes no {key!r}; it takes {', '.join(parameters)}."
                + did_you_mean(key, parameters)
            )
        kind, default = parameters.get(key, (Any, None))
        is_default = value is default or (
            type(value) is type(default) and isinstance(value, float) and value == default
        )
        if not is_default and (value is not None or is_own):
            check_kind(f"env_config.{key}", value, kind)


def keywords(cls: type) -> tuple[dict[str, tuple[Any, Any]], bool]:
    """Returns the keyword arguments of a class, those that it hands on to its bases included, and whether any goes.

    Beside each name stand its annotation, ``Any`` where it has none that can be read, and its default.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for base in cls.__mro__:
        if "__init__" in vars(base):
            own = list(signature(base.__init__).parameters.values())[1:]  # type: ignore[misc]
            hints = _hints(base)
            for p in own:
                if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
                    found.setdefault(p.name, (hints.get(p.name, Any), p.default))
            if all(p.kind is not p.VAR_KEYWORD for p in own):
                return found, False
    return found, True


def _hints(cls: type) -> dict[str, Any]:
    try:
        return get_type_hints(cls.__init__)  # type: ignore[misc]
    except Exception:  # a name that exists for type checkers alone
        return {}


def register() -> None:
    """Makes all names known to Tune and RLlib, in this process and in every worker of the present Ray session."""
    from ray.tune.registry import register_env, register_trainable

    for name, path in ALGORITHMS.items():
        register_trainable(name, load(path))
    for name, path in ENVIRONMENTS.items():
        register_env(name, partial(create_environment, path))


def resolve_algorithm(name: str) -> type:
    """Returns the class of one of this package's algorithms, or of RLlib's own.

    Raises:
        ConfigError: nobody knows the name.
    """
    if name in ALGORITHMS:
        return load(ALGORITHMS[name])  # type: ignore[no-any-return]
    from ray.rllib.algorithms.registry import ALGORITHMS as STOCK

    if name in STOCK:
        return STOCK[name]()[0]  # type: ignore[no-any-return]
    raise ConfigError(
        f"run: no algorithm {name!r}; there are {', '.join(ALGORITHMS)} and RLlib's {', '.join(sorted(STOCK))}."
        + did_you_mean(name, [*ALGORITHMS, *STOCK])
    )
