"""Whether a value is of the kind that an annotation names: in YAML 1.2 ``no`` is a word, and ``1e2`` no whole number.

Not a validator of all of Python's types. The one idea: what no file could hold, or only its owner can judge, passes.
"""

from collections.abc import Callable, Collection, Hashable, Mapping
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from rllib_mhgpo.errors import ConfigError

SCALARS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    bool: (lambda value: isinstance(value, bool), "true or false"),
    int: (lambda value: isinstance(value, Integral) and not isinstance(value, bool), "a whole number"),
    float: (lambda value: isinstance(value, Real) and not isinstance(value, bool), "a number"),
    str: (lambda value: isinstance(value, str), "a text"),
    NoneType: (lambda value: value is None, "null"),
}
LISTS = (dict, list, tuple, set, frozenset)
"""What a file can hold, beside the abstract kinds of these; other classes, such as enums, their owners judge."""


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind; what is inside lists and mappings is not looked at.

    >>> fits("no", bool | Mapping[str, float]), fits(100.0, int), fits(5, float | None), fits([1], tuple[int, ...])
    (False, False, True, True)
    """
    origin = get_origin(kind) or kind
    if origin is Annotated:
        return fits(value, get_args(kind)[0])
    if origin in (Union, UnionType):
        return any(fits(value, part) for part in get_args(kind))
    if origin is Literal:
        return value in get_args(kind)
    if isinstance(kind, Hashable) and kind in SCALARS:
        return SCALARS[kind][0](value)
    if not isinstance(origin, type) or not (origin in LISTS or origin.__module__ == "collections.abc"):
        return True
    if issubclass(origin, Mapping):
        return isinstance(value, Mapping)
    is_list = isinstance(value, Collection) and not isinstance(value, str | Mapping)
    return is_list or not issubclass(origin, Collection)


def said(kind: Any) -> str:
    """Writes a kind for a message.

    >>> said(bool | Mapping[str, float]), said(int | None)
    ('true or false or keys and values', 'a whole number or null')
    """
    origin = get_origin(kind) or kind
    if origin in (Union, UnionType):
        return " or ".join(map(said, get_args(kind)))
    if isinstance(kind, Hashable) and kind in SCALARS:
        return SCALARS[kind][1]
    if origin is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if isinstance(origin, type) and issubclass(origin, Collection):
        return "keys and values" if issubclass(origin, Mapping) else "a list"
    return str(getattr(origin, "__name__", origin))


def check_kind(key: str, value: Any, kind: Any) -> None:
    """Raises a ConfigError where a value is not of its kind."""
    if not fits(value, kind):
        raise ConfigError(f"{key}: expected {said(kind)}, found {value!r}.")


def whole_number(key: str, value: Any, least: int = 1) -> int:
    """Returns a whole number, or raises a ConfigError where it is none or below the least."""
    if not fits(value, int) or value < least:
        raise ConfigError(f"env_config.{key}: expected a whole number of at least {least}, found {value!r}.")
    return int(value)
