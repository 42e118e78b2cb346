"""Values against annotations: what a file cannot have meant is refused, what only its owner can judge passes."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest

from rllib_mhgpo.algorithms.registration import check_arguments
from rllib_mhgpo.errors import ConfigError
from rllib_mhgpo.kinds import check_kind, fits


class Mode(StrEnum):
    EASY = "easy"


class Board(list[int]):
    """A class of the user's own that is made of a file's name."""


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("easy", Mode), (Mode.EASY, Mode), ("board.txt", Board), ("x", bytes), (1, {"min": 1}), ("left", ["left"]),
        ([1], Sequence[int]), ((1,), list[int]), ({"a": 1}, Mapping[str, int] | None), (3, Annotated[int, "rooms"]),
        (1, Any),
    ],
)  # fmt: skip
def test_what_may_be_meant_passes(value: Any, kind: Any) -> None:
    assert fits(value, kind)


@pytest.mark.parametrize(
    ("value", "kind", "said"),
    [
        ("no", bool, "expected true or false, found 'no'"),
        (1e2, int, "expected a whole number, found 100.0"),
        ("a", list[str], "expected a list, found 'a'"),
        ([1], dict[str, int], "expected keys and values, found [1]"),
        ("z", Literal["x", "y", 3], "expected 'x' or 'y' or 3, found 'z'"),
    ],
)
def test_what_cannot_be_meant_is_refused(value: Any, kind: Any, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_kind("key", value, kind)
    assert str(raised.value) == f"key: {said}."


class World:
    def __init__(self, name: str = "4x4", speed: int = 4.0) -> None:  # type: ignore[assignment]  # as some write it
        """Takes null for a random name."""


def test_null_and_the_default_are_right_for_a_class_of_others() -> None:
    check_arguments(World, {"name": None, "speed": 4.0})
    with pytest.raises(ConfigError, match=r"env_config\.speed: expected a whole number, found 5\.0"):
        check_arguments(World, {"speed": 5.0})
