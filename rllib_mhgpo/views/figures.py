"""Curves as SVG and PNG, by matplotlib without a display."""

import re
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from rllib_mhgpo.errors import DataError
from rllib_mhgpo.views.curves import Panel

INK = "#010203"  # what the page's own colour of text takes the place of
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#7F7F7F",
    "#8C6D31",
    "#9467BD",
)  # Okabe and Ito
STYLE: dict[Any, Any] = {
    "font.size": 9, "font.family": "sans-serif", "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "grid.alpha": 0.25, "grid.color": INK, "svg.fonttype": "none", "legend.framealpha": 0.0,
    "text.parse_math": False,
}  # fmt: skip
MOST_IN_LEGEND = 12
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def draw(panel: Panel) -> Figure:
    """Draws a panel: the means as lines, their standard deviation over seeds as bands."""
    figure = Figure(figsize=(4.6, 2.9))
    axes = figure.subplots(gridspec_kw={"left": 0.13, "right": 0.98, "bottom": 0.16, "top": 0.9})
    for place, curve in enumerate(panel.curves):
        colour = COLOURS[place % len(COLOURS)]
        known = np.isfinite(curve.mean)
        x, mean, spread = curve.x[known], curve.mean[known], np.nan_to_num(curve.spread[known])
        marker = "o" if len(x) <= 30 else None
        axes.plot(x, mean, color=colour, marker=marker, markersize=3, linewidth=1.6, label=curve.label)
        if spread.any():
            axes.fill_between(x, mean - spread, mean + spread, color=colour, alpha=0.2, linewidth=0)
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.set_xlabel("iteration")
    axes.locator_params(axis="x", integer=True)
    if 1 < len(panel.curves) <= MOST_IN_LEGEND:
        axes.legend(fontsize=8)
    return figure


def draw_times(split: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draws where the time of an iteration goes: a bar a group, seconds by phase."""
    least = 0.001 * max(sum(seconds.values()) for seconds in split.values())
    phases = dict.fromkeys(phase for seconds in split.values() for phase, spent in seconds.items() if spent > least)
    figure = Figure(figsize=(9.4, 1.6 + 0.4 * len(split)), layout="constrained")
    axes, ends = figure.subplots(), np.zeros(len(split))
    for place, phase in enumerate(phases):
        seconds = np.array([each.get(phase, 0.0) for each in split.values()])
        axes.barh(list(split), seconds, left=ends, color=COLOURS[place % len(COLOURS)], label=phase)
        ends += seconds
    axes.invert_yaxis()
    axes.set_title("seconds of an iteration, by what is done", fontsize=10, loc="left")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.05))
    return figure


def as_svg(figure: Figure, name: str) -> str:
    """Returns a figure as an element of a page, in the page's colour and font; ``name`` keeps its ids apart."""
    stream = StringIO()
    with mpl.rc_context({**STYLE, "svg.hashsalt": name, "svg.id": name}):
        figure.savefig(stream, format="svg", transparent=True, metadata=NO_METADATA)
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r"font-family: [^;\"]*; ?", "", svg)
    return re.sub(r'id="([\w.]+_\d+)"', lambda match: f'id="{name}-{match[1]}"', svg)  # ids are a page's, once each


def save(figure: Figure, folder: Path, name: str) -> None:
    """Writes a figure as SVG and as PNG of 200 dots an inch.

    Raises:
        DataError: the folder cannot be written.
    """
    with mpl.rc_context({**STYLE, "svg.hashsalt": name}):
        for suffix in ("svg", "png"):
            try:
                figure.savefig(folder / f"{name}.{suffix}", dpi=200, facecolor="white")
            except OSError as error:
                raise DataError(f"{folder / name}.{suffix}: cannot be written: {error.strerror or error}.") from None


def styled() -> Any:
    """The style, as a context in which figures are drawn."""
    return mpl.rc_context(STYLE)


def all_figures(panels: Sequence[Panel], split: Mapping[str, Mapping[str, float]]) -> dict[str, tuple[str, Figure]]:
    """Returns every figure by name, with the section where it stands."""
    with styled():
        figures = {panel.key: (panel.section, draw(panel)) for panel in panels}
        if any(any(seconds.values()) for seconds in split.values()):
            figures["time_split"] = ("Machine", draw_times(split))
    return figures
