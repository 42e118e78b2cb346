"""Checkpoints that are whole or absent: written beside their place and moved there at the end."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from rllib_mhgpo.errors import CheckpointError

POLICY = Path("learner_group/learner/rl_module/default_policy")
"""Where the Hugging Face folder of the policy lies in a checkpoint."""

SHARDS = Path("optimizer_shards")
"""Where a checkpoint has the parts of optimisers that are spread over learners."""


def whole_or_absent(save: Callable[..., str], path: str | Path | None, **kwargs: Any) -> str:
    """Calls ``save(folder, **kwargs)`` on a new folder beside ``path`` and moves it there when all is written.

    A checkpoint that is already there is replaced at that moment, not before.

    Raises:
        CheckpointError: the disk is full or not writable; nothing is left behind.
    """
    place = Path(tempfile.mkdtemp(prefix="checkpoint_")) if path is None else Path(path)
    if place.exists() and not _may_be_replaced(place):
        raise CheckpointError(f"{place}: expected no file there, an empty folder or a checkpoint; it is kept as it is.")
    part = place.with_name(f".{place.name}.part{os.getpid()}")
    try:
        part.mkdir(parents=True)
        save(part, **kwargs)
        old = place.with_name(f".{place.name}.old{os.getpid()}")
        if place.exists():
            place.rename(old)
        part.rename(place)
        shutil.rmtree(old, ignore_errors=True)
    except Exception as error:
        shutil.rmtree(part, ignore_errors=True)
        if not isinstance(error, OSError) and "No space left" not in str(error):
            raise
        raise CheckpointError(
            f"{place}: the checkpoint cannot be written: {error}. Nothing was left behind."
        ) from error
    return str(place)


def write_shard(folder: Path, learner: int, shard: dict[str, NDArray[Any]]) -> None:
    """Writes one learner's part of the sharded optimisers."""
    (folder / SHARDS).mkdir(exist_ok=True)
    save_file(shard, folder / SHARDS / f"learner_{learner}.safetensors")


def read_shard(folder: Path, learner: int) -> dict[str, NDArray[Any]]:
    """Reads what :func:`write_shard` wrote."""
    file = folder / SHARDS / f"learner_{learner}.safetensors"
    try:
        return dict(load_file(file))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file}: the optimiser's shard cannot be read: {error}.") from error


def check_shards(folder: Path, learners: int) -> None:
    """Refuses a checkpoint that another number of learners wrote.

    Raises:
        CheckpointError: both numbers.
    """
    found = len(list((folder / SHARDS).glob("learner_*.safetensors")))
    if found != learners:
        raise CheckpointError(
            f"{folder}: expected optimiser shards of {learners} learners (num_learners), found those of {found}; "
            "restore with as many learners as wrote it, or start a new run from its policy folder with `llm`."
        )


def _may_be_replaced(place: Path) -> bool:
    return place.is_dir() and (not any(place.iterdir()) or (place / "rllib_checkpoint.json").is_file())
