"""Columns that end a run: those that never come are said, those that come late are waited for."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from rllib_mhgpo.cli.stops import Stops
from rllib_mhgpo.errors import ConfigError


@dataclass
class Trial:
    """What the callback sees of one of Tune's trials."""

    stopping_criterion: dict[str, float]
    metric_analysis: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


EARLY = {"training_iteration": 1, "env_runners": {"num_env_steps_sampled": 4}}
PLAYED = {**EARLY, "env_runners": {"episode_return_mean": 1.0}, "learners": {"default_policy": {"total_loss": 1.0}}}
OWN = {"training_iteration": 1, "solver": {"reward": 0.5}, "dev": {"acc": float("nan"), "questions": 0}}


def told(stop: list[str], row: dict[str, Any], is_own: bool, earlier: list[str]) -> None:
    trial = Trial(dict.fromkeys(stop, 1.0), {key: {} for key in earlier})
    Stops(is_own).on_trial_result(1, [], trial, row)


@pytest.mark.parametrize(
    ("stop", "row", "is_own", "said"),
    [
        ("env_runners/episode_retrun_mean", PLAYED, False, "Did you mean 'env_runners/episode_return_mean'"),
        ("evaluation/x", {**PLAYED, "evaluation": {"y": 1}}, False, "no column 'evaluation/x'"),
        ("learners/default_policy/totalloss", PLAYED, False, "Did you mean 'learners/default_policy/total_loss'"),
        ("env_runners/mine", OWN, True, "no column 'env_runners/mine'"),
        ("solver/reword", OWN, True, "Did you mean 'solver/reward'"),
        ("dev/acc", OWN, True, "dev is never evaluated here"),
    ],
)
def test_a_column_that_never_comes_is_said(stop: str, row: dict[str, Any], is_own: bool, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        told([stop], row, is_own, earlier=["training_iteration"])


def test_a_column_that_comes_late_or_came_before_is_waited_for() -> None:
    late = ["env_runners/episode_return_mean", "evaluation/env_runners/episode_return_mean", "learners/q/loss"]
    told(late, EARLY, is_own=False, earlier=[])
    told(["evaluation/num_env_steps_sampled_lifetime"], PLAYED, is_own=False, earlier=[])
    told(["solver/recall"], OWN, is_own=True, earlier=["solver/recall"])
    told(["dev/acc", "training_iteration"], OWN, is_own=True, earlier=[])


def test_callbacks_may_add_columns_later_where_another_ends_the_run() -> None:
    trial = Trial({"plateau": 1.0, "training_iteration": 3.0}, config={"callbacks_on_train_result": print})
    Stops(True).on_trial_result(1, [], trial, OWN)
    with pytest.raises(ConfigError, match="no column 'plateau'"):
        Stops(True).on_trial_result(1, [], Trial({"plateau": 1.0}, config=trial.config), OWN)
