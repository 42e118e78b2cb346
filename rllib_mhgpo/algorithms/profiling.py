"""One iteration under PyTorch's profiler: a Chrome trace, and a table of seconds and tokens by phase.

What runs in the algorithm's own process is traced; remote runners and learners are seen as the time it waits for them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TRACE, TABLE = "trace.json.gz", "phases.md"
TOKENS = {"generate": "num_tokens_generated", "update": "num_tokens_computed"}
PARTS = ("generate", "step", "retrieve", "credit", "update", "sync", "record")


@contextmanager
def traced(folder: Path | None) -> Iterator[None]:
    """The context whose operations go to ``trace.json.gz`` in a folder, for chrome://tracing or Perfetto."""
    if folder is None:
        yield
        return
    from torch import cuda
    from torch.profiler import ProfilerActivity, profile

    devices = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda.is_available() else [])]
    with profile(activities=devices) as profiler:
        yield
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / TRACE))


def phase_table(columns: Mapping[str, Any]) -> str:
    """Returns seconds, share of the iteration, tokens and tokens a second of each phase.

    >>> print(phase_table({"time": {"total_s": 2.0, "update_s": 1.0}, "num_tokens_computed": 500}))
    | phase | seconds | share | tokens | tokens/s |
    |---|---|---|---|---|
    | update | 1.000 | 50 % | 500 | 500 |
    | everything else | 1.000 | 50 % | | |
    | all | 2.000 | 100 % | | |
    """
    total, times = columns["time"]["total_s"], columns["time"]
    lines = ["| phase | seconds | share | tokens | tokens/s |", "|---|---|---|---|---|"]
    seconds = {phase: times[f"{phase}_s"] for phase in PARTS if f"{phase}_s" in times}
    inside = ("retrieve",) if "step" in seconds else ()  # retrieval happens within the environments' step
    rest = total - sum(spent for phase, spent in seconds.items() if phase not in inside)
    for phase, spent in {**seconds, "everything else": rest, "all": total}.items():
        tokens = columns.get(TOKENS.get(phase, ""))
        counted = f"{tokens:,} | {tokens / max(spent, 1e-9):,.0f}" if tokens is not None else "|"
        lines.append(f"| {phase} | {spent:.3f} | {100 * spent / total:.0f} % | {counted} |")
    return "\n".join(lines)
