"""A run in the terminal: every curve as a line of blocks, with its first and last number, and the alerts."""

from collections.abc import Sequence

import numpy as np
from rich.console import Group as Stack
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rllib_mhgpo.alerts import find_alerts
from rllib_mhgpo.views.compare import Group
from rllib_mhgpo.views.curves import Floats, make_panels

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 24


def dashboard(groups: Sequence[Group]) -> RenderableType:
    """Returns what to show of the runs at this moment."""
    table = Table(box=None, pad_edge=False)
    for heading in ("", "", "curve"):
        table.add_column(heading)
    for heading in ("first", "last"):
        table.add_column(heading, justify="right")
    section = ""
    for panel in make_panels(groups):
        title = panel.title
        for curve in panel.curves:
            known = curve.mean[np.isfinite(curve.mean)]
            if not known.any():
                continue  # 0 throughout
            if panel.section != section:
                section = panel.section
                table.add_row(Text(section, style="bold"))
            who = curve.label if len(panel.curves) > 1 or len(groups) > 1 else ""
            table.add_row(Text(title), Text(who), spark(known), f"{known[0]:.3g}", f"{known[-1]:.3g}")
            title = ""
    return Stack(*(Text(line) for line in headlines(groups)), *alert_lines(groups), "", table)


def headlines(groups: Sequence[Group]) -> list[str]:
    """How far each configuration is."""
    return [
        f"{group.label}: {len(group.trials)} {'trial' if len(group.trials) == 1 else 'trials'}, "
        f"{group.iterations} iterations, {_state(group)}"
        for group in groups
    ]


def _state(group: Group) -> str:
    if all(trial.ended for trial in group.trials):
        return "ended"
    silent = [trial.interrupted for trial in group.trials if not trial.ended]
    known = [seconds for seconds in silent if seconds is not None]
    if len(known) < len(silent):
        return "running"
    return f"stopped: no process, last row {min(known) / 60:.0f} minutes ago; rllib train ... --resume goes on"


def alert_lines(groups: Sequence[Group]) -> list[Text]:
    """The alerts that hold now."""
    trials = [trial for group in groups for trial in group.trials]
    lines = []
    for trial in trials:
        for alert in find_alerts(trial.rows):
            if alert.iterations[-1] == int(trial.rows[-1].get("training_iteration", len(trial.rows))):
                place = f"{trial.name}: " if len(trials) > 1 else ""
                lines.append(Text(f"alert: {place}{alert.message}. Try: {alert.advice}.", style="yellow"))
    return lines


def spark(values: Floats, width: int = WIDTH) -> str:
    """Draws numbers as blocks between their least and their most; more than fit are averaged.

    >>> spark(np.array([0.0, 1.0, 2.0, 7.0]))
    '▁▂▃█'
    >>> spark(np.array([3.0, 3.0]))
    '▁▁'
    """
    if len(values) > width:
        values = np.array([part.mean() for part in np.array_split(values, width)])
    least, most = values.min(), values.max()
    steps = np.zeros(len(values)) if most == least else (values - least) / (most - least) * (len(BLOCKS) - 1)
    return "".join(BLOCKS[step] for step in steps.round().astype(int))
