"""Runs side by side: trials that differ in their seed alone are one group, and groups are named by what differs."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import nan, sqrt
from typing import Any

import numpy as np

from rllib_mhgpo.views.runs import Trial

IDLE = ("seed", "num_cpus_for_main_process")
"""Parameters in which trials of one group may differ."""
OF_ANSWERS = ("dev/f1", "dev/em", "dev/acc", "dev/avg")
"""Scores of single questions that lie between 0 and 1."""


@dataclass(frozen=True)
class Group:
    """Trials of one configuration."""

    label: str
    trials: tuple[Trial, ...]

    @property
    def iterations(self) -> int:
        """Iterations of its longest trial."""
        return max((int(trial.rows[-1].get("training_iteration", 0)) for trial in self.trials if trial.rows), default=0)

    def last(self, column: str) -> list[float]:
        """The last number that exists of each trial."""
        found = (
            next((r[column] for r in reversed(t.rows) if r.get(column, nan) == r.get(column)), nan) for t in self.trials
        )
        return [value for value in found if value == value]


def group_trials(trials: Iterable[Trial]) -> list[Group]:
    """Puts trials of one configuration together, in the order in which they came."""
    told: dict[str, list[Trial]] = {}
    for trial in trials:
        told.setdefault(json.dumps([trial.algorithm, _settings(trial)], sort_keys=True, default=str), []).append(trial)
    groups = list(told.values())
    differing = differences([group[0] for group in groups])
    labels = [" ".join(_short(key, values[place]) for key, values in differing.items()) for place in range(len(groups))]
    return [Group(label or trials[0].algorithm, tuple(trials)) for label, trials in zip(labels, groups, strict=True)]


def differences(trials: Sequence[Trial]) -> dict[str, list[Any]]:
    """Returns the parameters in which trials differ, ``run`` (the algorithm) first; None where one has none."""
    told = [{"run": trial.algorithm, **_settings(trial)} for trial in trials]
    keys = dict.fromkeys(key for each in told for key in each)
    columns = {key: [each.get(key) for each in told] for key in keys}
    return {key: values for key, values in columns.items() if any(value != values[0] for value in values)}


def _settings(trial: Trial) -> dict[str, Any]:
    return {key: value for key, value in trial.parameters.items() if key not in IDLE}


def _short(key: str, value: Any) -> str:
    return str(value) if key == "run" else f"{key.rpartition('/')[2]}={value}"


def mean_and_error(group: Group, column: str) -> tuple[float, float]:
    """Returns the mean of the last numbers and its standard error.

    Over seeds where there are several (divisor n - 1); of one seed and a score of answers, which lies between 0 and 1,
    over the questions: sqrt(p (1 - p) / n), exact for scores that are 0 or 1 and the most it can be for others. NaN
    where it is not known.
    """
    values = np.array(group.last(column))
    if not len(values):
        return nan, nan
    mean = float(values.mean())
    if len(values) > 1:
        return mean, float(values.std(ddof=1) / sqrt(len(values)))
    questions = group.last("dev/questions")
    if column not in OF_ANSWERS or not questions or questions[0] < 1:
        return mean, nan
    return mean, sqrt(mean * (1 - mean) / questions[0])
