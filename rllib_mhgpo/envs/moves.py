"""Games as text: what is seen becomes words, and a reply becomes a move.

Knows neither PettingZoo nor Gymnasium. One idea: a move has a name, and a reply is legal when it names exactly one move
that may be played now.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.spaces import Discrete

from rllib_mhgpo.errors import ConfigError


class Moves:
    """The moves of a discrete action space, each with a name.

    Args:
        space: what the game takes.
        names: one a move, in the space's order; their numbers when None.
        owner: who acts, for messages.

    Raises:
        ConfigError: the space is not discrete, or the names do not fit it.
    """

    def __init__(self, space: Space[Any], names: Sequence[Any] | None, owner: str) -> None:
        if not isinstance(space, Discrete):
            raise ConfigError(f"env_config: {owner}: expected a Discrete action space, found {space}.")
        self.first = int(space.start)
        self.names = [str(self.first + i) for i in range(int(space.n))] if names is None else list(map(str, names))
        if len(self.names) != int(space.n) or len({name.lower() for name in self.names}) != len(self.names):
            raise ConfigError(
                f"env_config.moves: expected {int(space.n)} different names for {owner}, found {self.names}."
            )
        words = "|".join(re.escape(name) for name in sorted(self.names, key=len, reverse=True))
        self.pattern = re.compile(rf"(?<![\w-])(?:{words})(?!\w)", re.IGNORECASE)

    def legal(self, mask: Any) -> list[str]:
        """Returns the names of the moves that a mask allows, of all where there is no mask."""
        return self.names if mask is None else [self.names[i] for i in np.flatnonzero(np.asarray(mask))]

    def read(self, reply: str, legal: Sequence[str]) -> str | None:
        """Returns the move that a reply names, None unless it names exactly one and that one is legal.

        >>> moves = Moves(Discrete(3), ["rock", "paper", "scissors"], "example")
        >>> moves.read("I play Paper.", moves.names), moves.read("rock or paper", moves.names)
        ('paper', None)
        """
        said = {found.lower() for found in self.pattern.findall(reply)}
        named = [name for name in legal if name.lower() in said]
        return named[0] if len(said) == 1 and named else None

    def action(self, name: str) -> int:
        """Returns the action of a move's name."""
        return self.first + self.names.index(name)


def render(observation: Any) -> str:
    """Writes an observation as text.

    A number as it is, a vector as its rounded numbers, two planes of 0 and 1 as a board of ``x`` (mine), ``o`` (theirs)
    and ``.``, a table line by line; of a dict all but its action mask.

    Raises:
        ConfigError: an image, or whatever else wants a function of its own.

    >>> render({"observation": np.eye(2)[:, :, None] * [1, 0], "action_mask": [1]})
    'x .\\n. x'
    >>> render(np.array([0.123, -2.0]))
    '0.12 -2'
    """
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping):
        parts = {key: value for key, value in observation.items() if key != "action_mask"}
        if set(parts) == {"observation"}:
            return render(parts["observation"])
        return "\n".join(f"{key}: {render(value)}" for key, value in parts.items())
    array = np.asarray(observation)
    is_board = array.ndim == 3 and array.shape[2] == 2 and bool(np.isin(array, (0, 1)).all())
    if is_board:
        rows = np.where(array[:, :, 0] == 1, "x", np.where(array[:, :, 1] == 1, "o", ".")).tolist()
    elif array.ndim <= 2 and (np.issubdtype(array.dtype, np.number) or array.dtype == bool):
        rows = [[f"{round(float(value), 2) + 0.0:g}" for value in row] for row in np.atleast_2d(array).tolist()]
    else:
        raise ConfigError(
            f"env_config.render: an observation of shape {array.shape} and type {array.dtype} has no text form; give "
            "module:function of the observation."
        )
    return "\n".join(" ".join(row) for row in rows)


def import_object(key: str, path: str) -> Any:
    """Imports what ``module:name`` names, or a module.

    Raises:
        ConfigError: nothing is there; ``key`` says which key is wrong.
    """
    module, _, name = path.partition(":")
    try:
        found = import_module(module)
        return getattr(found, name) if name else found
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"env_config.{key}: {path!r} cannot be imported: {error}.") from error


def renderer(render_with: str | Callable[[Any], str] | None) -> Callable[[Any], str]:
    """Returns the function that writes observations: :func:`render`, one by ``module:function``, or the one given."""
    if render_with is None:
        return render
    found = import_object("render", render_with) if isinstance(render_with, str) else render_with
    if not callable(found):
        raise ConfigError(f"env_config.render: expected a function of the observation, found {render_with!r}.")
    return found
