"""The default job, measured: ``python benchmarks/default_run.py --seeds 0 1 2``.

Runs ``rllib train file tuned_examples/mhgpo_hotpot.yaml`` once a seed in a process of its own, as a user would, and
prints dev F1 before and after, wall time, where an iteration's time goes, and the peak of memory over all processes
(proportional set size, sampled every two seconds).
"""

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

FILE = Path(__file__).parent.parent / "tuned_examples" / "mhgpo_hotpot.yaml"


def descendants(root: int) -> list[int]:
    """Process ids below ``root``, itself included."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        parents.setdefault(parent, []).append(int(folder.name))
    found, waiting = [], [root]
    while waiting:
        found.append(waiting.pop())
        waiting += parents.get(found[-1], [])
    return found


def proportional_set_size(pid: int) -> int:
    """Bytes of memory, shared pages counted by their share; 0 for a process that has ended."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    except OSError:
        pass
    return 0


def run(seed: int, storage: Path, extra: list[str]) -> tuple[float, float, Path]:
    """Trains once; returns wall seconds, peak bytes over all processes, and progress.csv."""
    command = [str(Path(sys.executable).with_name("rllib")), "train", "file", str(FILE), "--storage-path", str(storage)]
    started, peak = time.monotonic(), 0
    process = subprocess.Popen([*command, "--set", f"seed={seed}", *extra], env={**os.environ, "COLUMNS": "200"})
    while process.poll() is None:
        peak = max(peak, sum(map(proportional_set_size, descendants(process.pid))))
        time.sleep(2)
    if process.returncode:
        sys.exit(process.returncode)
    return time.monotonic() - started, peak, next(storage.glob("**/progress.csv"))


def line(seed: int, seconds: float, peak: float, progress: Path) -> str:
    """One row of the table."""
    with progress.open() as file:
        rows = list(csv.DictReader(file))
    last = rows[-1]

    def middle(column: str) -> float:
        return median(float(row[column]) for row in rows)

    total, model = middle("time/total_s"), middle("time/generate_s") + middle("time/update_s")
    overhead = median(
        float(row["time/total_s"]) - float(row["time/generate_s"]) - float(row["time/update_s"]) for row in rows
    )
    scores = (f"{float(last[f'{when}/{score}']):.3f}" for score in ("f1", "em") for when in ("dev_start", "dev"))
    times = (f"{seconds:.0f}", f"{total:.2f}", f"{middle('time/generate_s'):.2f}", f"{middle('time/update_s'):.2f}")
    rest = f"{100 * (1 - model / total):.1f} %", f"{1000 * overhead / middle('num_generations'):.2f}"
    cells = (seed, *scores, len(rows), *times, *rest, f"{peak / 2**30:.2f}")
    return "| " + " | ".join(map(str, cells)) + " |"


HEAD = (
    "| seed | dev F1 before | after | dev EM before | after | iterations | wall s | iteration s | generate s "
    "| update s | everything else | ms a generation | peak GiB |\n" + "|---" * 13 + "|"
)


def main() -> None:
    """Prints the table, a line a seed as it is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("extra", nargs="*", help="further arguments of rllib train file, after --")
    options = parser.parse_args()
    print(HEAD, flush=True)
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as storage:
            print(line(seed, *run(seed, Path(storage), options.extra)), flush=True)


if __name__ == "__main__":
    main()
