"""Checkpoints that are whole or absent: written beside their place and moved there at the end."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rllib_mhgpo.errors import CheckpointError

POLICY = Path("learner_group/learner/rl_module/default_policy")
"""Where the Hugging Face folder of the policy lies in a checkpoint."""


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


def _may_be_replaced(place: Path) -> bool:
    return place.is_dir() and (not any(place.iterdir()) or (place / "rllib_checkpoint.json").is_file())


def find_checkpoint(path: Path) -> Path:
    """Returns the checkpoint itself for a checkpoint, or the last one of a trial or experiment folder."""
    if (path / "rllib_checkpoint.json").is_file():
        return path
    found = sorted(path.glob("**/checkpoint_*/rllib_checkpoint.json"), key=lambda file: file.stat().st_mtime)
    if not found:
        raise CheckpointError(
            f"{path}: expected a checkpoint folder (with rllib_checkpoint.json) or a run's folder with checkpoints,"
            f" found {'neither' if path.exists() else 'nothing there'}."
        )
    return found[-1].parent
