"""Names that configuration files use, and where what they name is found.

The tables hold import paths as text: nothing is imported before it is asked for. Ray keeps its own registry in the
cluster and loses it with :func:`ray.shutdown`; :func:`register` is cheap and is called again before every use.
"""

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from typing import Any

from rllib_mhgpo.errors import ConfigError, did_you_mean

ALGORITHMS = {"MHGPO": "rllib_mhgpo.algorithms.mhgpo:MHGPO"}
ENVIRONMENTS = {"search": "rllib_mhgpo.envs.search:SearchEnv"}


def load(path: str) -> Any:
    """Imports what ``module:name`` names.

    >>> load("math:floor")(2.5)
    2
    """
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def create_environment(path: str, config: Mapping[str, Any]) -> Any:
    """Builds the environment that ``module:name`` names with ``config`` as its keyword arguments."""
    return load(path)(**config)


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
