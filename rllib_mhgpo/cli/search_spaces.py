"""Search spaces in YAML: ``{loguniform: [1e-5, 1e-3]}``, at any depth, becomes Tune's ``tune.loguniform(1e-5, 1e-3)``.

One idea: a mapping whose only key is the name of one of Tune's spaces is that space; ``grid_search`` Tune reads itself.
"""

from collections.abc import Mapping
from typing import Any

from rllib_mhgpo.errors import ConfigError, did_you_mean

SPACES = (
    "choice", "uniform", "quniform", "loguniform", "qloguniform", "randint", "qrandint", "lograndint", "qlograndint",
    "randn", "qrandn",
)  # fmt: skip
GRID = "grid_search"


def searched(value: Any, place: str = "config") -> Any:
    """Returns a value with all search spaces inside it made into Tune's.

    Raises:
        ConfigError: a space whose arguments Tune refuses, a grid that is no list, a slip in a space's name, or a space
            inside an object, where Tune does not look.

    >>> searched({"a": [{"choice": [1, 2]}]})["a"][0].categories
    [1, 2]
    """
    if isinstance(value, list):
        return [searched(inner, f"{place}[{index}]") for index, inner in enumerate(value)]
    if not isinstance(value, dict):
        if _is_hidden(value):
            raise ConfigError(
                f"{place}: Tune does not look for search spaces inside a {type(value).__name__}; it would be passed on "
                "as it is. Write the space in a list or under a key."
            )
        return value
    if len(value) == 1:
        ((name, arguments),) = value.items()
        if name == GRID:
            return {GRID: _grid(arguments, place)}
        if name in SPACES:
            return _space(name, arguments, place)
        nearest = did_you_mean(str(name), (*SPACES, GRID)) if isinstance(arguments, list) else ""
        if nearest and place != "config" and _is_slip(str(name)):
            raise ConfigError(f"{place}: no search space {name!r}.{nearest}")
    return {key: searched(inner, f"{place}.{key}") for key, inner in value.items()}


def _grid(arguments: Any, place: str) -> list[Any]:
    if not isinstance(arguments, list) or not arguments:
        raise ConfigError(f"{place}: grid_search: expected a list of values, found {arguments!r}.")
    return [searched(inner, f"{place}[{index}]") for index, inner in enumerate(arguments)]


def _space(name: str, arguments: Any, place: str) -> Any:
    from ray import tune

    if name == "choice":
        if not isinstance(arguments, list) or not arguments:
            raise ConfigError(f"{place}: choice: expected a list of values, found {arguments!r}.")
        return tune.choice([searched(inner, f"{place}[{index}]") for index, inner in enumerate(arguments)])
    numbers = isinstance(arguments, list) and all(
        isinstance(each, int | float) and not isinstance(each, bool) for each in arguments
    )
    if not numbers:
        raise ConfigError(f"{place}: {name}: expected numbers such as [1, 10], found {arguments!r}.")
    if not name.endswith("randn") and len(arguments) >= 2 and arguments[0] >= arguments[1]:
        raise ConfigError(f"{place}: {name}: expected a lower bound below the upper one, found {arguments}.")
    try:
        return getattr(tune, name)(*arguments)
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"{place}: {name}: Tune refuses {arguments}: {error}") from None


def _is_hidden(value: Any, depth: int = 4) -> bool:
    """True for an object, a tuple or a set with a search space somewhere inside."""
    if isinstance(value, tuple | set | frozenset):
        return any(_has_space(inner, depth) for inner in value)
    if (
        value is None
        or isinstance(value, str | int | float | type)
        or callable(value)
        or not hasattr(value, "__dict__")
    ):
        return False
    from ray.tune.search.sample import Domain

    return not isinstance(value, Domain) and any(_has_space(inner, depth) for inner in vars(value).values())


def _has_space(value: Any, depth: int) -> bool:
    from ray.tune.search.sample import Domain

    if depth == 0:
        return False
    if isinstance(value, Domain) or (isinstance(value, dict) and list(value) == [GRID]):
        return True
    if isinstance(value, dict | list):
        return any(_has_space(inner, depth - 1) for inner in (value.values() if isinstance(value, dict) else value))
    return _is_hidden(value, depth - 1)


def _is_slip(name: str) -> bool:
    """True for a word that is nearly the name of a space."""
    from difflib import get_close_matches

    return bool(get_close_matches(name, (*SPACES, GRID), n=1, cutoff=0.8))


def places(config: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Returns where the grids and where the random spaces of :func:`searched` stand, as Tune names them.

    >>> places({"lr": {"grid_search": [1, 2]}, "a": searched({"b": {"choice": [1]}})})
    (['lr'], ['a/b'])
    """
    from ray.tune.search.variant_generator import parse_spec_vars

    _, domains, grids = parse_spec_vars(dict(config))
    grid_names, domain_names = (["/".join(map(str, path)) for path, _ in found] for found in (grids, domains))
    return grid_names, domain_names
