"""Copies of environments in the middle of an episode.

``copy.deepcopy`` alone will not do: environments of PettingZoo and Gymnasium that derive from ``EzPickle`` are copied
by calling their constructor again, so that a fork would begin anew. Here every layer's attributes are copied instead.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import gymnasium
from pettingzoo import AECEnv, ParallelEnv

Env = TypeVar("Env")
KINDS = (AECEnv, ParallelEnv, gymnasium.Env)


def copy_env(env: Env) -> Env:
    """Returns a copy with a state of its own; a class with a ``__deepcopy__`` says itself how."""
    memo: dict[int, Any] = {}
    copy_layers([env], memo)
    return copy.deepcopy(env, memo)


def copy_layers(values: Iterable[Any], memo: dict[int, Any]) -> None:
    """Copies all environments among the values, and those that they wrap, into the memo of a deep copy."""
    layers = {id(layer): layer for value in values for layer in _layers(value)}
    for key, layer in layers.items():
        memo[key] = object.__new__(type(layer))
    for layer in layers.values():
        memo |= {id(thing): thing for thing in _common(layer)}
    for key, layer in layers.items():
        memo[key].__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(layer).items()})


def _layers(env: Any) -> Iterator[Any]:
    """Yields an environment and what it wraps, but nothing that copies itself."""
    if not isinstance(env, KINDS) or hasattr(type(env), "__deepcopy__"):
        return
    yield env
    for value in vars(env).values():
        yield from _layers(value)


def _common(env: Any) -> Iterator[Any]:
    """Yields what copies have in common: spaces, and what pygame draws with, which is no state and cannot be copied."""
    for value in vars(env).values():
        inside = value.values() if isinstance(value, dict) else [value]
        drawing = (thing for thing in inside if type(thing).__module__.startswith("pygame"))
        yield from (*drawing, *(thing for thing in inside if isinstance(thing, gymnasium.Space)))
