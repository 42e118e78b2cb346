"""The folders that runs leave: which trials there are, their rows of numbers, their configuration.

Reads what Ray Tune writes, also while it writes it: an unfinished last line is left for the next look.
"""

import json
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rllib_mhgpo.alerts import numbers_by_path
from rllib_mhgpo.errors import DataError
from rllib_mhgpo.records import FOLDER

RESULTS, PARAMETERS, ERRORS = "result.json", "params.json", "error.txt"
SILENT_S, STARTING_S = 30.0, 600.0
"""How long a run without a process may be silent: a trial that waits for its turn, one that is being resumed."""
Row = dict[str, float]


@dataclass(frozen=True)
class Trial:
    """One trial's folder."""

    folder: Path

    @property
    def name(self) -> str:
        """What tells it from others: the experiment and the trial."""
        return f"{self.folder.parent.name}/{self.folder.name}"

    @property
    def records(self) -> Path:
        """Where its rollouts are kept."""
        return self.folder / FOLDER

    @cached_property
    def rows(self) -> list[Row]:
        """Its numbers, one row an iteration, by path (``dev/f1``); NaN stays NaN."""
        return list(read_rows(self.folder / RESULTS))

    @cached_property
    def ended(self) -> bool:
        """Whether it reached its end, or failed and was not resumed."""
        last = last_line(self.folder / RESULTS) or {}
        try:
            failures = re.findall(r"occurred at ([\d_-]+)", (self.folder / ERRORS).read_text(errors="replace"))
        except OSError:
            failures = []
        return last.get("done") is True or (bool(failures) and failures[-1] >= str(last.get("date", "")))

    @cached_property
    def interrupted(self) -> float | None:
        """Seconds since its last row, where it has not ended and has no process any more; None otherwise.

        Known of processes on this machine alone. A process that goes on from a checkpoint writes its parameters first.
        """
        last = last_line(self.folder / RESULTS) or {}
        if self.ended or last.get("hostname") != socket.gethostname() or _is_alive(int(last.get("pid", 0))):
            return None
        changed = {Path(file).name: status.st_mtime for file, status in _files(self)}
        is_resumed = changed.get(PARAMETERS, 0.0) > changed[RESULTS]
        silent = time.time() - max(changed.values())
        return time.time() - changed[RESULTS] if silent > (STARTING_S if is_resumed else SILENT_S) else None

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """What the trial was told, by path; empty where nothing is known."""
        try:
            told = json.loads((self.folder / PARAMETERS).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return dict(flat(told)) if isinstance(told, dict) else {}

    @cached_property
    def algorithm(self) -> str:
        """The algorithm, as Tune's name of the trial begins with it."""
        return self.folder.name.partition("_")[0]


def find_trials(path: Path) -> list[Trial]:
    """Returns the trials in a folder: itself, or those of an experiment, by name.

    Raises:
        DataError: the folder is no run.
    """
    path = path.expanduser()
    if not path.is_dir():
        raise DataError(f"{path}: expected a run's folder, found {'a file' if path.exists() else 'nothing there'}.")
    path = path.resolve()
    if _is_trial(path):
        return [Trial(path)]
    found = [folder for depth in ("*", "*/*") for folder in sorted(path.glob(depth)) if _is_trial(folder)]
    if not found:
        raise DataError(
            f"{path}: expected the folder of a trial or an experiment, with {RESULTS} or {FOLDER}/ in it; found none. "
            "Runs lie in ~/ray_results unless --storage-path said otherwise."
        )
    return [Trial(folder) for folder in found]


def _is_trial(folder: Path) -> bool:
    return (folder / RESULTS).is_file() or any((folder / FOLDER).glob("*.parquet"))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def signature(runs: Iterable[Path]) -> tuple[object, ...]:
    """Returns what changes when a file of these runs changes."""
    files = (file for run in runs for trial in find_trials(run) for file in _files(trial))
    return tuple((str(file), status.st_mtime_ns, status.st_size) for file, status in files)


def _files(trial: Trial) -> Iterator[tuple[Path, os.stat_result]]:
    for name in (RESULTS, PARAMETERS, ERRORS, FOLDER):
        with suppress(OSError):
            yield trial.folder / name, (trial.folder / name).stat()


def last_line(file: Path) -> dict[str, Any] | None:
    """Returns the last whole line of a file of JSON objects, None where there is none."""
    with suppress(OSError, ValueError):
        *_, last = (line for line in file.read_text(encoding="utf-8", errors="replace").split("\n") if line.strip())
        found = json.loads(last)
        return found if isinstance(found, dict) else None
    return None


def read_rows(file: Path) -> Iterator[Row]:
    """Yields the numbers of each line, one row an iteration: a resumed run's later account of it replaces the earlier.

    Raises:
        DataError: a line that is no JSON object, except for a last one that is still being written.
    """
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}.") from None
    lines = text.split("\n")
    rows: dict[int, Row] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            if number == len(lines):
                break
            raise DataError(f"{file}, line {number}: expected a JSON object, found {line[:40]!r}.")
        row.pop("config", None)
        numbers = numbers_by_path(row)
        rows[int(numbers.get("training_iteration", len(rows) + 1))] = numbers
    yield from (rows[iteration] for iteration in sorted(rows))


def flat(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every value by its path.

    >>> dict(flat({"dev": {"f1": 0.5}, "seed": 0}))
    {'dev/f1': 0.5, 'seed': 0}
    """
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value
