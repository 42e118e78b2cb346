"""Each alert holds where it should, and nowhere else."""

import logging
from collections.abc import Callable
from math import nan
from typing import Any

import pytest
from rich.console import Console

from rllib_mhgpo.alerts import find_alerts, new_alerts
from rllib_mhgpo.algorithms.mhgpo import MHGPO
from rllib_mhgpo.cli.progress import Progress

pytestmark = pytest.mark.usefixtures("ray_session")
# a run of the default job, every second iteration
HEALTHY: dict[str, list[float]] = {
    "zero_std_share": [0.33, 0.22, 0.14, 0.26, 0.22, 0.22, 0.33, 0.31, 0.31, 0.36],
    "grad_norm": [0.49, 0.44, 0.44, 0.43, 0.44, 0.40, 0.30, 0.40, 0.36, 0.38],
    "skipped_steps": [0.0] * 10,
    "kl": [0.0002, 0.0068, 0.0167, 0.042, 0.0545, 0.0822, 0.0738, 0.121, 0.1847, 0.1542],
    "engine_logprob_diff": [1e-7] * 10,
    "reward": [0.2, 0.3, 0.4, 0.5, 0.55, 0.6, 0.6, 0.65, 0.64, 0.66],
    "dev/f1": [0.17, 0.17, 0.75, 0.75, 0.75, 0.948, 0.948, 0.942, 0.942, 0.935],
    "dev/iteration": [0, 0, 5, 5, 5, 10, 10, 15, 15, 20],
    "dev/questions": [300] * 10,
    "answerer/entropy": [1.02, 0.77, 0.66, 0.68, 0.6, 0.48, 0.38, 0.28, 0.42, 0.28],
    "reranker/illegal": [0.05, 0.11, 0.09, 0.09, 0.10, 0.10, 0.15, 0.10, 0.09, 0.06],
    "reranker/passages_left_out": [0.0] * 10,
    "reranker/truncated_share": [0.0] * 10,
    "rewriter/recall": [0.77, 0.72, 0.79, 0.84, 0.91, 0.84, 0.93, 0.94, 0.91, 0.95],
}


def rows(**columns: list[float]) -> list[dict[str, float]]:
    length = max(len(values) for values in columns.values())
    return [
        {"training_iteration": float(i + 1), **{key: values[i] for key, values in columns.items() if i < len(values)}}
        for i in range(length)
    ]


def held(name: str, **changes: list[float]) -> list[tuple[int, ...]]:
    return [alert.iterations for alert in find_alerts(rows(**{**HEALTHY, **changes})) if alert.name == name]


def test_a_run_that_learns_raises_none() -> None:
    assert find_alerts(rows(**HEALTHY)) == []


@pytest.mark.parametrize(
    ("name", "column", "values", "when"),
    [
        ("no spread", "zero_std_share", [0.3, 1.0, 0.98, 1.0], [(2, 4)]),
        ("illegal outputs", "reranker/illegal", [1.0, 0.5, 0.49], [(1, 2)]),
        ("truncated prompts", "reranker/passages_left_out", [0.0, 0.4, 2.0], [(3,)]),
        ("truncated responses", "reranker/truncated_share", [0.25, 0.1], [(1,)]),
        ("engine drift", "engine_logprob_diff", [0.01, 0.06], [(2,)]),
        ("entropy collapse", "answerer/entropy", [1.0, 1.0, 1.0, 0.11, 0.09], [(5,)]),
        ("entropy collapse", "answerer/entropy", [0.04, 0.04, 0.04, 0.001], []),  # nothing to lose
        ("kl runaway", "kl", [0.0, 0.2, 0.6], [(3,)]),
        ("kl runaway", "kl", [0.004] * 5 + [0.06], [(6,)]),
        ("kl runaway", "kl", [0.004] * 4 + [0.06], []),  # four are not enough to say what is usual
        ("kl runaway", "kl", [0.0004] * 5 + [0.006], []),
        # of one role alone: four times as far, for answers of few tokens go far in runs that learn
        ("kl runaway", "reranker/kl", [0.1, 1.9, 2.1], [(3,)]),
        ("kl runaway", "answerer/kl", [0.004] * 5 + [0.25], [(6,)]),
        ("kl runaway", "answerer/kl", [0.01, 0.04, 0.1, 0.2, 0.3, 0.5, 0.69], []),
        ("gradient spikes", "grad_norm", [0.4, 0.5, 0.4, 0.5, 0.4, 4.1, 0.4], [(6,)]),
        ("gradient spikes", "skipped_steps", [0.0, 2.0], [(2,)]),
        # means of three: 0.8, 0.8, 0.747, 0.693, 0.593 from iteration 3 on
        ("falling recall", "rewriter/recall", [0.8, 0.8, 0.8, 0.8, 0.64, 0.64, 0.5], [(6, 7)]),
    ],
)
def test_what_holds_when(name: str, column: str, values: list[float], when: list[tuple[int, ...]]) -> None:
    assert held(name, **{column: values}) == when


def test_reward_up_and_dev_f1_down_by_more_than_chance() -> None:
    """Of 300 questions two standard errors are at most 2 * sqrt(0.25 / 300) = 0.058."""
    asked = {"dev/iteration": [0.0, 5.0, 10.0], "dev/questions": [300.0] * 3}
    up = [0.1, 0.4, 0.5]
    name = "reward without score"
    assert held(name, **asked, reward=up, **{"dev/f1": [0.2, 0.6, 0.5]}) == [(3,)]
    assert held(name, **asked, reward=up, **{"dev/f1": [0.2, 0.6, 0.55]}) == []
    assert held(name, **asked, reward=[0.1, 0.4, 0.3], **{"dev/f1": [0.2, 0.6, 0.5]}) == []
    assert held(name, **asked, reward=up, **{"dev/f1": [0.6, nan, 0.5]}) == [(3,)]


def test_the_policy_whose_engine_drifts_is_named() -> None:
    """Where policies have columns of their own these alone speak: the mean over all hides one of them."""
    apart = {"finder": [0.001, 0.002], "answerer": [0.01, 0.2]}
    own = {f"policies/{name}/engine_logprob_diff": gaps for name, gaps in apart.items()}
    (alert,) = find_alerts(rows(**{**HEALTHY, **own, "engine_logprob_diff": [0.01, 0.1]}))
    assert alert.iterations == (2,)
    assert alert.message == "log-probabilities of engine and learner of policy answerer differ by 0.200 a token"


def test_missing_columns_and_nan_raise_nothing() -> None:
    assert find_alerts([]) == []
    assert find_alerts([{}]) == []
    assert find_alerts(rows(**{name: [nan] * 9 for name in HEALTHY})) == []


def test_an_alert_is_new_once_and_says_what_to_try() -> None:
    history = rows(zero_std_share=[1.0, 1.0, 0.0, 1.0])
    (alert,) = new_alerts(history[:1])
    assert alert.message == "100% of the groups have equal rewards: nothing is learned from them"
    assert "group_size" in alert.advice
    assert [len(new_alerts(history[: i + 1])) for i in range(4)] == [1, 0, 0, 1]
    (whole,) = find_alerts(history)
    assert whole.when == "3 iterations from 1 to 4"


def test_the_command_prints_it_under_the_iteration() -> None:
    class Trial:
        trial_id, experiment_tag, evaluated_params = "x", "0", None

    console = Console(record=True, width=200)
    progress = Progress(console, {})
    result = {"training_iteration": 1, "reranker": {"illegal": 0.75}}
    progress.on_trial_result(1, [Trial()], Trial(), result)
    progress.on_trial_result(2, [Trial()], Trial(), {**result, "training_iteration": 2})
    lines = [line for line in console.export_text().splitlines() if line.startswith("alert")]
    assert len(lines) == 1
    assert lines[0].startswith("alert: 75% of the outputs of reranker are illegal. Try: look at them with rllib trees")


def test_an_algorithm_says_it_in_the_log(make: Callable[..., MHGPO], caplog: pytest.LogCaptureFixture) -> None:
    """A random policy over bytes never names a document."""
    algorithm: Any = make()
    with caplog.at_level(logging.WARNING, "rllib_mhgpo"):
        algorithm.train()
    assert "iteration 1: " in caplog.text
    assert "responses of answerer are cut off. Try: raise max_response_tokens" in caplog.text
