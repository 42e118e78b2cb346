"""Which curves show a run, as numbers: the same for the report, its figures and the terminal.

A curve has the mean over a group's seeds and their spread at every iteration; at most one panel a number and role.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rllib_mhgpo.views.compare import Group
from rllib_mhgpo.views.runs import Row

Floats = NDArray[np.float64]
ALL = "all"


@dataclass(frozen=True)
class Curve:
    """One line: x, the mean over seeds, and the standard deviation over seeds (NaN where there is one)."""

    label: str
    x: Floats
    mean: Floats
    spread: Floats


@dataclass(frozen=True)
class Panel:
    """Curves of one number. ``key`` names files, ``section`` where it stands."""

    section: str
    key: str
    title: str
    curves: tuple[Curve, ...]


SCORES = {"dev/f1": "dev F1", "dev/em": "dev EM", "dev/acc": "dev Acc", "train/f1": "train F1"}
LEARNING = {
    "reward": "reward", "entropy": "entropy, nats a token", "kl": "KL to the reference, a token",
    "clip_fraction": "clip fraction", "similarity": "similarity inside groups",
    "explained_variance": "explained variance of the critic",
}  # fmt: skip
OUTPUTS = {
    "recall": "recall of supporting titles after the role", "queries": "queries", "documents": "documents chosen",
    "answer_words": "words of the answer", "illegal": "illegal outputs", "response_tokens": "tokens of a response",
    "truncated_share": "responses cut off", "passages_left_out": "passages left out of the prompt",
}  # fmt: skip
WHOLE = {"zero_std_share": "share of groups without spread", "grad_norm": "gradient norm"}
MACHINE = {
    "tokens_per_s": "tokens a second", "peak_memory_gb": "peak memory, GB", "time/total_s": "seconds an iteration",
    "engine_logprob_diff": "engine against learner, log-probability a token", "num_voided": "voided rollouts",
}  # fmt: skip
SECTIONS = {"Scores": SCORES, "Learning": {**LEARNING, **WHOLE}, "What the agents do": OUTPUTS, "Machine": MACHINE}
OTHERS = {"env_runners/episode_return_mean": "episode return"}
COMMON = {
    *LEARNING, *WHOLE, *OUTPUTS, "engine_logprob_diff", "advantage_mean", "advantage_std", "num_generations",
    "reward_shared", "reward_specific", "singletons", "prompt_tokens", "ratio_mean", "ratio_max", "value_mean",
    "value_loss",
}  # fmt: skip


def agents_of(groups: Sequence[Group]) -> list[str]:
    """The roles that the runs report, in their order."""
    ending = "/num_generations"
    return [name.removesuffix(ending) for name in numbers_of(groups) if name.endswith(ending)]


def numbers_of(groups: Sequence[Group]) -> list[str]:
    """The names of all numbers that the runs report, in their order."""
    rows = (row for group in groups for trial in group.trials for row in trial.rows)
    return list(dict.fromkeys(name for row in rows for name in row))


def make_panels(groups: Sequence[Group]) -> list[Panel]:
    """Returns every panel in which there is a number.

    The lines of a panel are groups; where there is one group alone, its roles.
    """
    agents = agents_of(groups)
    sections = {**SECTIONS, "What the agents do": {**OUTPUTS, **_own_numbers(groups, agents)}}
    panels = []
    for section, numbers in sections.items():
        for name, title in {**numbers, **(OTHERS if section == "Scores" else {})}.items():
            for key, heading, columns in _columns(name, title, agents, len(groups)):
                curves = [
                    curve for label, column in columns for curve in _curves(groups, label, column)
                    if np.isfinite(curve.mean).any()
                ]  # fmt: skip
                if curves:
                    panels.append(Panel(section, key, heading, tuple(curves)))
    return panels


def _columns(
    name: str, title: str, agents: Sequence[str], groups: int
) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """Yields key and title of each panel of a number, and the labels (empty: the group's) and columns of its lines."""
    key = name.replace("/", "_")
    if name in {**SCORES, **WHOLE, **MACHINE, **OTHERS}:
        yield key, title, [("", name)]
    elif groups == 1:
        yield key, title, [(agent, f"{agent}/{name}") for agent in agents] or [("", name)]
    else:
        for agent in agents:
            yield f"{agent}_{key}", f"{agent}: {title}", [("", f"{agent}/{name}")]


def _own_numbers(groups: Sequence[Group], agents: Sequence[str]) -> dict[str, str]:
    """What environments measure besides the usual."""
    parts = (name.split("/", 1) for name in numbers_of(groups) if name.partition("/")[0] in agents)
    return {name: name.replace("_", " ") for _, name in parts if name not in COMMON}


def _curves(groups: Sequence[Group], label: str, column: str) -> Iterator[Curve]:
    for group in groups:
        found = [points(trial.rows, column) for trial in group.trials]
        x = np.unique(np.concatenate([np.array(list(each), dtype=np.float64) for each in found]))
        values = np.array([[each.get(place, np.nan) for place in x.tolist()] for each in found]).reshape(
            len(found), len(x)
        )
        known = np.isfinite(values)
        count = known.sum(0)
        filled = np.where(known, values, 0.0)
        mean = np.where(count, filled.sum(0) / np.maximum(count, 1), np.nan)
        squares = (np.where(known, values - mean, 0.0) ** 2).sum(0)
        spread = np.where(count > 1, np.sqrt(squares / np.maximum(count - 1, 1)), np.nan)
        yield Curve(label or group.label, x, mean, spread)


def points(rows: Sequence[Row], column: str) -> dict[float, float]:
    """Returns a number by iteration; dev scores stand where they were measured, 0 before training."""
    if not column.startswith("dev/"):
        return {row.get("training_iteration", float(i)): row.get(column, np.nan) for i, row in enumerate(rows, 1)}
    start = column.replace("dev/", "dev_start/")
    found = dict.fromkeys([0.0], rows[0][start]) if rows and np.isfinite(rows[0].get(start, np.nan)) else {}
    return found | {
        row["dev/iteration"]: row[column]
        for row in rows
        if np.isfinite(row.get(column, np.nan)) and "dev/iteration" in row
    }
