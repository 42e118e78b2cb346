"""The report of runs, one page: scores, alerts, curves, time and memory, what differs, best and worst questions.

It is made of what is on disk at that moment, so an unfinished run has one too. Text from files is escaped.
"""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite, nan
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rllib_mhgpo.alerts import find_alerts
from rllib_mhgpo.errors import DataError
from rllib_mhgpo.records import read_records
from rllib_mhgpo.views.compare import Group, differences, group_trials, mean_and_error
from rllib_mhgpo.views.curves import SECTIONS, make_panels
from rllib_mhgpo.views.figures import all_figures, as_svg, save
from rllib_mhgpo.views.page import make_page
from rllib_mhgpo.views.runs import Trial, find_trials
from rllib_mhgpo.views.trees import group_trees, tree_score

NUMBERS = {
    "dev F1 before": "dev_start/f1", "dev F1": "dev/f1", "EM": "dev/em", "Acc": "dev/acc", "AVG": "dev/avg",
    "episode return": "env_runners/episode_return_mean",
}  # fmt: skip
PHASES = ("generate", "retrieve", "rest of step", "rest of sampling", "credit", "update", "sync", "record", "evaluate")
SHOWN_QUESTIONS = 10
SCORED = ("split", "iteration", "root", "node", "question", "response", "reward_shared", "scores", "episode")


def make_report(runs: Iterable[Path], figures: Path | None = None, refresh: int | None = None) -> str:
    """Makes the page of some runs.

    Args:
        runs: folders of trials or experiments.
        figures: where every figure is written as SVG and PNG too.
        refresh: seconds after which the page loads itself again.

    Raises:
        DataError: a folder is no run, or a file of it cannot be read.
    """
    trials = list({trial.folder: trial for run in runs for trial in find_trials(run)}.values())
    groups = group_trials(trials)
    title = f"Report of {trials[0].folder.parent.name if len(trials) == 1 else f'{len(trials)} trials'}"
    parts = {
        "Result": results(groups),
        "Alerts": alerts(trials),
        **curves(groups, figures),
        "Configuration": what_differs(groups),
        "Questions": questions(groups),
    }
    shown = {heading: part for heading, part in parts.items() if part}
    anchors = {heading: heading.lower().replace(" ", "-") for heading in shown}
    links = "".join(f'<a href="#{anchor}">{heading}</a>' for heading, anchor in anchors.items())
    body = "".join(f'<h2 id="{anchors[heading]}">{heading}</h2>{part}' for heading, part in shown.items())
    return make_page("report", title, {}, f"<nav>{links}</nav>{body}", refresh)


# --- parts of the page ----------------------------------------------------------------------------------------------


def results(groups: Sequence[Group]) -> str:
    """The table of last numbers, with standard errors."""
    columns = {name: column for name, column in NUMBERS.items() if any(group.last(column) for group in groups)}
    head = ["", "trials", "iterations", *columns, "minutes", "tokens a second", "peak memory, GB"]
    rows = []
    for group in groups:
        scores = [plus_minus(*mean_and_error(group, column)) for column in columns.values()]
        minutes = [seconds / 60 for seconds in group.last("time_total_s")]
        rows.append([
            group.label, str(len(group.trials)), str(group.iterations), *scores, mean_of(minutes, 1),
            mean_of(group.last("tokens_per_s"), 0), mean_of(group.last("peak_memory_gb"), 2),
        ])  # fmt: skip
    note = (
        "± is the standard error: over seeds where there are several, else over the questions, "
        "√(p(1−p)/n), which is exact for EM and Acc and the most it can be for F1. "
        "Scores are those of the last evaluation."
    )
    waiting = "" if any(group.iterations for group in groups) else "<p>No iteration has finished yet.</p>"
    return f'{waiting}<div class="wide">{table(head, rows, numbers_from=1)}</div><p class="quiet">{note}</p>'


def alerts(trials: Sequence[Trial]) -> str:
    """What went wrong in each trial, with what to try."""
    lines = [
        f"<li><b>{escape(alert.name)}</b>{of_trial(trial, trials)}, {escape(alert.when)}: {escape(alert.message)}. "
        f'<span class="quiet">Try: {escape(alert.advice)}.</span></li>'
        for trial in trials
        for alert in find_alerts(trial.rows)
    ]
    return f'<ul class="alerts">{"".join(lines)}</ul>' if lines else "<p>None.</p>"


def of_trial(trial: Trial, trials: Sequence[Trial]) -> str:
    """Names a trial where there are several."""
    return f" in {escape(trial.name)}" if len(trials) > 1 else ""


def curves(groups: Sequence[Group], folder: Path | None) -> dict[str, str]:
    """The figures of each section; numbers that are 0 throughout are named instead of drawn."""
    panels = make_panels(groups)
    zero = [panel for panel in panels if not any(np.nan_to_num(curve.mean).any() for curve in panel.curves)]
    figures = all_figures([panel for panel in panels if panel not in zero], time_split(groups))
    parts: dict[str, str] = {}
    for section in SECTIONS:
        drawn = "".join(
            f'<figure class="{"long" if name == "time_split" else ""}">{as_svg(figure, name)}</figure>'
            for name, (place, figure) in figures.items() if place == section
        )  # fmt: skip
        idle = ", ".join(escape(panel.title) for panel in zero if panel.section == section)
        said = f'<p class="quiet">0 throughout: {idle}.</p>' if idle else ""
        parts[section] = f'<div class="panels">{drawn}</div>{said}' if drawn or idle else ""
    if folder is not None:
        for name, (_, figure) in figures.items():
            save(figure, folder, name)
    several = any(len(group.trials) > 1 for group in groups)
    if several and parts["Scores"]:
        parts["Scores"] += (
            '<p class="quiet">Lines are means over the trials of a configuration, bands their standard deviation.</p>'
        )
    return parts


def time_split(groups: Sequence[Group]) -> dict[str, dict[str, float]]:
    """Mean seconds of an iteration by phase, without overlap."""
    split = {}
    for group in groups:
        rows = [row for trial in group.trials for row in trial.rows]
        spent = {
            phase: mean([row.get(f"time/{phase}_s", 0.0) for row in rows])
            for phase in ("sample", "generate", "step", "retrieve", *PHASES[4:])
        }
        spent["rest of step"] = max(0.0, spent["step"] - spent["retrieve"])
        spent["rest of sampling"] = max(0.0, spent["sample"] - spent["generate"] - spent["step"])
        split[group.label] = {phase: spent[phase] for phase in PHASES}
    return split


def what_differs(groups: Sequence[Group]) -> str:
    """The parameters in which groups differ, and all of them, folded."""
    first = [group.trials[0] for group in groups]
    told = differences(first)
    rows = [[key, *(short(value) for value in values)] for key, values in told.items()]
    part = f'<div class="wide">{table(["", *(group.label for group in groups)], rows)}</div>' if rows else ""
    for group, trial in zip(groups, first, strict=True):
        seeds = [trial.parameters.get("seed") for trial in group.trials]
        known = {"run": trial.algorithm, **trial.parameters, "seed": seeds if len(seeds) > 1 else seeds[0]}
        whole = table(["key", "value"], [[key, short(value)] for key, value in known.items()])
        part += f"<details><summary>All settings of {escape(group.label)}</summary>{whole}</details>"
    return part


def questions(groups: Sequence[Group]) -> str:
    """The dev questions that went best and worst at the last evaluation that was recorded."""
    part = ""
    for group in groups:
        found = scored_questions(group.trials)
        if not found:
            continue
        found.sort(key=lambda each: (each.score, each.score - np.nan_to_num(each.before)))
        many = min(SHOWN_QUESTIONS, (len(found) + 1) // 2)
        part += f"<h3>{escape(group.label)}</h3>" if len(groups) > 1 else ""
        for heading, some in (("Worst", found[:many]), ("Best", found[: -many - 1 : -1])):
            rows = [[q.question, q.gold, q.answer, mean_of([q.before], 2), f"{q.score:.2f}"] for q in some]
            head = ["question", "gold", "answer", "first", "last"]
            part += f'<h3>{heading} of {len(found)}</h3><div class="wide">{table(head, rows)}</div>'
    note = "Scores are EM where there is one, means over trials; the answer is the first trial's. More: rllib trees."
    return f'{part}<p class="quiet">{note}</p>' if part else ""


class ScoredQuestion(NamedTuple):
    """A dev question: its mean scores at the first and the last evaluation that was recorded."""

    question: str
    gold: str
    answer: str
    before: float
    score: float


def scored_questions(trials: Sequence[Trial]) -> list[ScoredQuestion]:
    """Returns the dev questions that were recorded at the last evaluation."""
    first: dict[int, list[float]] = {}
    last: dict[int, list[float]] = {}
    told: dict[int, tuple[str, str, str]] = {}
    for trial in trials:
        files = sorted(trial.records.glob("dev-*.parquet"))
        ends = [int(number) for file in files if (number := file.stem.rpartition("-")[2]).isdigit()]
        if not ends:
            continue
        trees = group_trees(read_records(trial.records, (ends[0], ends[-1]), SCORED).to_pylist())
        for (split, iteration, root), rows in trees.items():
            score = tree_score(rows)
            if split != "dev" or score is None:
                continue
            if iteration == ends[0]:
                first.setdefault(root, []).append(score)
            if iteration == ends[-1]:
                last.setdefault(root, []).append(score)
                told.setdefault(root, (rows[0]["question"] or f"question {root}", *gold_and_answer(rows)))
    return [
        ScoredQuestion(*told[root], mean(first[root]) if root in first else nan, mean(scores))
        for root, scores in last.items()
    ]


def gold_and_answer(rows: Sequence[Mapping[str, object]]) -> tuple[str, str]:
    """The gold and the answer of a recorded question, as the environment tells them."""
    text = next((str(row["episode"]) for row in rows if row["episode"]), "{}")
    try:
        episode = json.loads(text)
    except ValueError:
        episode = {}
    episode = episode if isinstance(episode, dict) else {}
    gold = episode.get("gold", "")
    shown = " | ".join(map(str, gold)) if isinstance(gold, list) else str(gold)
    return shown, str(episode.get("answer", rows[-1]["response"] or ""))


# --- markup ---------------------------------------------------------------------------------------------------------


def escape(text: object) -> str:
    """Makes markup of a text."""
    return html.escape(str(text))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int | None = None) -> str:
    """Makes a table; columns from ``numbers_from`` on are set to the right."""

    def cells(tag: str, values: Sequence[str]) -> str:
        numbers = len(values) if numbers_from is None else numbers_from
        return "".join(
            f"<{tag}{' class=number' if place >= numbers else ''}>{escape(value)}</{tag}>"
            for place, value in enumerate(values)
        )

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><thead><tr>{cells('th', head)}</tr></thead><tbody>{body}</tbody></table>"


def plus_minus(value: float, error: float) -> str:
    """Writes a number with its error.

    >>> plus_minus(0.5, 0.0123), plus_minus(0.5, float("nan")), plus_minus(float("nan"), 0.0)
    ('0.500 ± 0.012', '0.500', '–')
    """
    if not isfinite(value):
        return "–"
    return f"{value:.3f} ± {error:.3f}" if isfinite(error) else f"{value:.3f}"


def mean(values: Sequence[float]) -> float:
    """The mean of the numbers that exist, 0 where there are none."""
    known = [value for value in values if isfinite(value)]
    return sum(known) / len(known) if known else 0.0


def mean_of(values: Sequence[float], digits: int) -> str:
    """Writes a mean, a dash where there is none."""
    known = [value for value in values if isfinite(value)]
    return f"{mean(known):.{digits}f}" if known else "–"


def short(value: object) -> str:
    """Writes a setting; one that is missing is empty."""
    return "" if value is None else str(value)


def make_folder(folder: Path) -> None:
    """Makes the folder of figures.

    Raises:
        DataError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{folder}: cannot be made: {error.strerror or error}.") from None
