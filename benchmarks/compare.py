"""Learners side by side: ``python benchmarks/compare.py FILE... --seeds 0 1 2 --storage DIR``.

Runs ``rllib train file FILE`` (Ray Tune) once a file and seed, each in a process of its own, one after the other, then
scores the last checkpoints on held-out questions with ``rllib evaluate``, greedily and sampled. Prints one table: mean
and standard error over seeds after equal iterations (equal questions) and after equal generated tokens (those of the
cheapest run), time, memory, generations. What is finished in DIR is not run again, so a stopped comparison goes on.

A file may be followed by changes: ``tuned_examples/mhgpo_hotpot.yaml,rollout_strategy=rr`` is a row of its own.
"""

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev

RLLIB = str(Path(sys.executable).with_name("rllib"))
Rows = list[dict[str, str]]


@dataclass(frozen=True)
class Run:
    """One file with its changes, one seed.

    Attributes:
        label: file and changes, as they were given.
        seed: of the run.
        folder: where its results and scores lie.
    """

    label: str
    seed: int
    folder: Path

    @property
    def file(self) -> str:
        """The experiment file."""
        return self.label.split(",")[0]

    @property
    def changes(self) -> list[str]:
        """``key=value`` that only this row has."""
        return self.label.split(",")[1:]

    def train(self, shared: Sequence[str], iterations: int) -> None:
        """Trains, unless that is done; goes on where it was stopped."""
        if len(self.rows()) >= iterations:
            return
        settings = [f"seed={self.seed}", f"stop.training_iteration={iterations}", *shared, *self.changes]
        command = [RLLIB, "train", "file", self.file, "--storage-path", str(self.folder / "run")]
        resume = ["--resume"] if any(self.folder.glob("run/*/tuner.pkl")) else []
        sets = [part for setting in settings for part in ("--set", setting)]
        subprocess.run([*command, *resume, *sets], check=True)

    def rows(self) -> Rows:
        """The iterations so far."""
        for progress in self.folder.glob("run/**/progress.csv"):
            with progress.open() as stream:
                return list(csv.DictReader(stream))
        return []

    def held_out(self, questions: str, sampled: bool) -> float:
        """F1 on held-out questions, scored once."""
        out = self.folder / f"test{'_sampled' if sampled else ''}.jsonl"
        if not out.is_file():
            extra = ["--sampled"] if sampled else []
            part = out.with_suffix(".part")
            command = [RLLIB, "evaluate", str(self.folder / "run"), "--questions", questions, "--out", str(part)]
            subprocess.run([*command, *extra], check=True)
            part.rename(out)
        records = [json.loads(line) for line in out.read_text().splitlines()]
        return fmean(record.get("scores", {}).get("f1", 0.0) for record in records)


def tokens(rows: Rows) -> list[float]:
    """Generated tokens up to and with each iteration."""
    total, found = 0.0, []
    for row in rows:
        total += float(row["num_tokens_generated"])
        found.append(total)
    return found


def dev_at(rows: Rows, budget: float) -> float:
    """The last dev F1 measured within so many generated tokens."""
    within = [row for row, spent in zip(rows, tokens(rows), strict=True) if spent <= budget]
    return float(within[-1]["dev/f1"] if within else rows[0]["dev_start/f1"])


def spread(values: Sequence[float]) -> str:
    """Mean and standard error.

    >>> spread([0.5, 0.7])
    '0.600 ± 0.100'
    """
    error = stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return f"{fmean(values):.3f} ± {error:.3f}"


def table(runs: dict[str, list[Run]], held_out: str | None) -> str:
    """One line a file."""
    budget = min(tokens(run.rows())[-1] for group in runs.values() for run in group)
    heads = ["", "dev F1 before", "dev F1", f"dev F1 at {budget:,.0f} tokens"]
    heads += ["test F1", "test F1 sampled"] if held_out else []
    heads += ["sampled F1, last 5", "generations", "tokens", "iteration s", "peak GB"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for label, group in runs.items():
        rows = [run.rows() for run in group]
        cells = [label, f"{fmean(float(r[0]['dev_start/f1']) for r in rows):.3f}"]
        cells += [spread([float(r[-1]["dev/f1"]) for r in rows]), spread([dev_at(r, budget) for r in rows])]
        if held_out:
            cells += [spread([run.held_out(held_out, sampled) for run in group]) for sampled in (False, True)]
        cells.append(spread([fmean(float(row["train/f1"]) for row in r[-5:]) for r in rows]))
        cells.append(f"{fmean(sum(float(row['num_generations']) for row in r) for r in rows):,.0f}")
        cells.append(f"{fmean(tokens(r)[-1] for r in rows):,.0f}")
        cells.append(f"{median(float(row['time/total_s']) for r in rows for row in r):.2f}")
        cells.append(f"{max(float(row['peak_memory_gb']) for r in rows for row in r):.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Runs what is missing and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE[,KEY=VALUE...]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a change for all files")
    parser.add_argument("--held-out", help="questions for the final scores, such as minipedia:test?level=hard")
    parser.add_argument("--storage", type=Path, required=True, help="where results lie and are found again")
    options = parser.parse_args()
    runs = {
        label: [Run(label, seed, options.storage / label.replace("/", "_") / str(seed)) for seed in options.seeds]
        for label in options.files
    }
    for seed in range(len(options.seeds)):  # seed by seed, so that a stopped comparison has all learners
        for group in runs.values():
            group[seed].train(options.set, options.iterations)
    print(table(runs, options.held_out))


if __name__ == "__main__":
    main()
