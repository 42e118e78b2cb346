"""What tests do with an algorithm: look at its weights, run an iteration, find its processes."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from rllib_mhgpo.algorithms.mhgpo import MHGPO


def weights(algorithm: MHGPO) -> dict[str, np.ndarray]:
    state = algorithm.learner_group.get_state(components="learner/rl_module")["learner"]["rl_module"]
    return {name: np.array(values) for name, values in state["default_policy"].items()}


def equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def row(algorithm: MHGPO) -> dict[str, Any]:
    return algorithm.train()  # type: ignore[no-any-return]


def descendants(pid: int) -> dict[int, str]:
    """The command lines of the processes that a process has started, and of theirs."""
    found: dict[int, str] = {}
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it has ended
            for child in map(int, file.read_text().split()):
                found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
                found |= descendants(child)
    return found
