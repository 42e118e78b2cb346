"""What one sees of a run: a table that updates in place on a terminal, otherwise a plain line per iteration.

Both, and the last line, are views of the same rows: one per trial, holding its first and its latest numbers.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.tune import Callback
from ray.tune.utils import flatten_dict
from rich.console import Console
from rich.live import Live
from rich.table import Table

from rllib_mhgpo.alerts import new_alerts, numbers_by_path
from rllib_mhgpo.cli.tuners import searched_values

MOST_ROWS = 20
GROWING = ("training_iteration", "time_total_s", "timesteps_total")
EPISODE_RETURN = "env_runners/episode_return_mean"
SAMPLED_STEPS = "num_env_steps_sampled_lifetime"


@dataclass
class Row:
    """One trial: its limits, and the first and latest number of every column.

    Attributes:
        name: what tells the trial from the others of its experiment.
        stop: the numbers at which the trial ends.
        saved: the iteration of the latest checkpoint.
        history: the numbers of every iteration since the start or the resumption.
    """

    name: str
    stop: Mapping[str, float] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)
    checkpoint: str = ""
    saved: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    state: str = "starting"

    def add(self, result: Mapping[str, Any]) -> None:
        """Takes the numbers of one iteration; a number that is NaN this time keeps its last value."""
        for key, value in flatten_dict(dict(result)).items():
            if isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value):
                self.first.setdefault(key, value)
                self.latest[key] = value
        self.state = "running"

    @property
    def iteration(self) -> int:
        """Iterations finished."""
        return int(self.latest.get("training_iteration", 0))

    def seconds_left(self) -> float | None:
        """Seconds until the first limit that grows evenly is reached, None where there is no such limit."""
        spent = self.latest.get("time_total_s", 0.0)
        ends = [
            spent * (limit / self.latest[key] - 1)
            for key, limit in self.stop.items()
            if (key in GROWING or key.startswith("num_")) and self.latest.get(key, 0) > 0
        ]
        return max(0.0, min(ends)) if ends else None

    def cells(self) -> dict[str, str]:
        """Returns what to show, by heading; what the trial does not report is left out."""
        limit = self.stop.get("training_iteration")
        left = self.seconds_left()
        cells = {"iteration": f"{self.iteration}/{limit:g}" if limit else str(self.iteration)}
        for heading, key, form in COLUMNS:
            if key in self.latest:
                of = self.latest.get("dev/iteration", self.iteration) if key.startswith("dev/") else self.iteration
                cells[heading] = format(self.latest[key], form) + (f" after {of:.0f}" if of != self.iteration else "")
        cells["elapsed"] = clock(self.latest.get("time_total_s", 0.0))
        cells["left"] = "?" if left is None else clock(left)
        return cells

    def summary(self, seconds: float) -> str:
        """Returns the last line: from where to where, in how many iterations and seconds, and the checkpoint."""
        score = ""
        if "dev/f1" in self.latest:
            score = f"dev F1 {self._change('f1')} (EM {self._change('em')}), "
        elif scores := [key for key in self.latest if key.startswith("dev/") and key not in NO_SCORE]:
            names = (key.removeprefix("dev/") for key in scores)
            score = f"dev {', '.join(f'{name} {self._change(name)}' for name in names)}, "
        elif EPISODE_RETURN in self.latest:
            score = f"episode return {self.first[EPISODE_RETURN]:.1f} -> {self.latest[EPISODE_RETURN]:.1f}, "
        if score.startswith("dev") and self.iteration and self.latest.get("dev/iteration") == 0:
            score = f"dev not evaluated since the start ({score.split(' -> ')[0].removeprefix('dev ')}), "
        checkpoint = self.checkpoint or "none"
        return f"{score}{self.iteration} iterations, {clock(seconds)}, checkpoint {checkpoint}"

    def _change(self, name: str) -> str:
        before = self.latest.get(f"dev_start/{name}", self.first[f"dev/{name}"])
        return f"{before:.3f} -> {self.latest[f'dev/{name}']:.3f}"


NO_SCORE = ("dev/iteration", "dev/questions")
COLUMNS = (
    ("dev F1", "dev/f1", ".3f"),
    ("dev EM", "dev/em", ".3f"),
    ("dev Acc", "dev/acc", ".3f"),
    ("train F1", "train/f1", ".3f"),
    ("train Acc", "train/acc", ".3f"),
    ("reward", "reward", ".3f"),
    ("return", EPISODE_RETURN, ".1f"),
    ("steps", SAMPLED_STEPS, ".0f"),
    ("tokens/s", "tokens_per_s", ".0f"),
)


class Progress(Callback):
    """Follows the trials of one experiment and shows them.

    Args:
        stop: the numbers at which a trial ends.
        names: the places of the config that are searched.
    """

    def __init__(self, console: Console, stop: Mapping[str, float], names: Sequence[str] = ()) -> None:
        self.console, self.stop, self.names = console, stop, names
        self.rows: dict[str, Row] = {}
        self.trials: list[Any] = []
        self.started = time.monotonic()
        self.live: Live | None = None

    def __enter__(self) -> "Progress":
        if self.console.is_terminal:
            self.live = Live(get_renderable=self.table, console=self.console, refresh_per_second=2)
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live:
            self.live.stop()

    def get_state(self) -> None:
        """Nothing of this belongs into the experiment's saved state."""

    def row(self, trial: Any) -> Row:
        """Returns the row of a trial."""
        if trial.trial_id not in self.rows:
            self.rows[trial.trial_id] = Row(self.label(trial), self.stop)
        return self.rows[trial.trial_id]

    def label(self, trial: Any) -> str:
        """Returns Tune's tag; a search algorithm's names every setting of a trial, of which the searched are kept."""
        tag, given = trial.experiment_tag or trial.trial_id, trial.evaluated_params or {}
        if len(given) <= len(self.names):
            return str(tag)
        return f"{str(tag).partition('_')[0]}: {searched_values(trial, self.names)}"

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Shows the trial from its start on."""
        self.trials = trials
        label = f"[{self.row(trial).name}] " if len(trials) > 1 else ""
        if not self.live:
            self.console.print(f"{label}starting; a line follows after each iteration", **PLAIN)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Takes the numbers of one iteration and prints its line where nothing is updated in place."""
        row = self.row(trial)
        row.add(result)
        row.history.append(numbers_by_path({key: value for key, value in result.items() if key != "config"}))
        label = f"[{row.name}] " if len(trials) > 1 else ""
        if not self.live:
            cells = " | ".join(f"{heading} {text}" for heading, text in row.cells().items())
            self.console.print(label + cells, **PLAIN)
        for alert in new_alerts(row.history):
            self.console.print(f"{label}alert: {alert.message}. Try: {alert.advice}.", **PLAIN)

    def on_checkpoint(self, iteration: int, trials: list[Any], trial: Any, checkpoint: Any, **info: Any) -> None:
        """Remembers which iteration is safe on disk, and where."""
        row = self.row(trial)
        row.checkpoint, row.saved = checkpoint.path, row.iteration

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Marks the trial as done."""
        self.row(trial).state = "done"

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Marks the trial as failed."""
        self.row(trial).state = "failed"

    def report(self, name: str, trials: list[Any], without: list[Any]) -> None:
        """Prints the last line of each trial of experiment ``name``, but not of those in ``without``."""
        for trial in trials:
            row = self.row(trial)
            row.add(trial.last_result or {})
            row.checkpoint = trial.checkpoint.path if trial.checkpoint else row.checkpoint
            if trial not in without:
                label = f"{name}: " if len(trials) == 1 else f"{name} [{row.name}]: "
                self.console.print(label + row.summary(time.monotonic() - self.started), **PLAIN)

    def table(self) -> Table:
        """Returns the trials as a table: those still running first."""
        rows = sorted(self.rows.values(), key=lambda row: row.state in ("done", "failed"))[:MOST_ROWS]
        shown = [{"trial": row.name, **row.cells(), "state": row.state} for row in rows]
        for cells in shown:
            if len(self.rows) <= 1:
                cells.pop("trial")
        headings = list(dict.fromkeys(heading for cells in shown for heading in cells))
        table = Table(*(headings or ["starting"]), caption=f"{clock(time.monotonic() - self.started)} in all")
        for cells in shown:
            table.add_row(*(cells.get(heading, "") for heading in headings))
        return table


PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}
"""How to print a line as it is: no colours, no mark-up in file names, no line breaks of one's own."""


def clock(seconds: float) -> str:
    """Writes a duration as minutes and seconds, with hours where there are any.

    >>> clock(75.4), clock(3600)
    ('1:15', '1:00:00')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
