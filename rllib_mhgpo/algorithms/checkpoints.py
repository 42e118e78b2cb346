"""Checkpoints that are whole or absent: written beside their place and moved there at the end, with checksums."""

import json
import logging
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from rllib_mhgpo.errors import CheckpointError

MODULES = Path("learner_group/learner/rl_module")
"""Where a checkpoint has the Hugging Face folder of each policy, by its name."""
POLICY = MODULES / "default_policy"
"""That of the policy that all agents share."""

log = logging.getLogger(__name__)
METADATA = "rllib_checkpoint.json"
MANIFEST = "manifest.json"
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
        write_manifest(part)
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


def write_manifest(folder: Path) -> None:
    """Writes sizes and checksums of all files of a checkpoint into it."""
    files = {str(file.relative_to(folder)): _size_and_sum(file) for file in sorted(folder.rglob("*")) if file.is_file()}
    (folder / MANIFEST).write_text(json.dumps(files, indent=1))


def damage(folder: Path) -> str | None:
    """Says which file of a checkpoint is missing or not as it was written; None where all are, or nothing is known."""
    try:
        files = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        return f"{folder / MANIFEST} cannot be read"
    for name, (size, checksum) in files.items():
        file = folder / name
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != size:
            return f"{file} has {file.stat().st_size:,} bytes, {size:,} were written"
        if _size_and_sum(file)[1] != checksum:
            return f"{file} holds other bytes than were written"
    return None


def last_whole(folder: Path) -> Path:
    """Returns the checkpoint, or the one before it in the same run where it is damaged.

    Raises:
        CheckpointError: none is whole.
    """
    numbered = re.compile(r"checkpoint_\d+")  # a copy from a remote storage has strangers beside it
    beside = sorted(folder.parent.iterdir(), reverse=True) if numbered.fullmatch(folder.name) else []
    earlier = [other for other in beside if numbered.fullmatch(other.name) and other.name < folder.name]
    faults: list[str] = []
    for candidate in (folder, *earlier):
        fault = damage(candidate) if (candidate / MANIFEST).is_file() else f"{candidate} has no {MANIFEST}"
        if fault is None:
            if faults:
                log.warning("Checkpoint damaged: %s. Going on from the one before, %s.", faults[0], candidate)
            return candidate
        faults.append(fault)
    raise CheckpointError(f"no checkpoint of the run is whole: {'; '.join(faults)}. Start a new run.")


def _size_and_sum(file: Path) -> list[int]:
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return [file.stat().st_size, checksum]


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
            "restore with num_learners and deepspeed as they were, or start a new run from its policy folder."
        )


def check_facts(path: Path, mine: Mapping[str, str]) -> None:
    """Refuses a checkpoint of a run with other data; warns of other packages.

    Args:
        mine: fingerprints of this run's data by what they are of.

    Raises:
        CheckpointError: both fingerprints.
    """
    try:
        written = json.loads((path / METADATA).read_text())
    except (OSError, ValueError):
        return
    for name, fingerprint in written.get("data", {}).items():
        if (here := mine.get(name, fingerprint)) != fingerprint:
            raise CheckpointError(
                f"{path}: the run that wrote it had other {name}: expected fingerprint {fingerprint[:12]}, found "
                f"{here[:12]}. Give it the same, or start a new run from its policy folder with `llm`."
            )
    for package, theirs in written.get("versions", {}).items():
        if (here := versions().get(package)) != theirs:
            log.warning("%s: written with %s %s, this is %s.", path, package, theirs, here)


def versions() -> dict[str, str]:
    """The packages that a run's numbers depend on."""
    found = {}
    for package in ("ray", "torch", "transformers", "rllib-mhgpo"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


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


def check_names(folder: Path, names: Sequence[str]) -> None:
    """Refuses a checkpoint of other policies.

    Raises:
        CheckpointError: both lists.
    """
    held = [path.name for path in (folder / MODULES).glob("*") if path.is_dir() and path.name != "critic"]
    if held and set(held) != set(names):
        raise CheckpointError(
            f"{folder}: expected a checkpoint of the policies {sorted(names)}, found {sorted(held)}; restore with the "
            "policies of the run that wrote it."
        )


def policy_source(source: str, agent: str) -> str:
    """Returns the folder of the policy that an agent follows in a checkpoint or a run; another source as it is.

    Raises:
        CheckpointError: the folder is neither a model nor a checkpoint, or its policies are of other agents.
    """
    path = Path(source).expanduser()
    if not path.is_dir() or (path / "config.json").is_file():
        return source
    folder = find_checkpoint(path)
    followed = read_metadata(folder).get("config", {}).get("policy_mapping") or {}
    if not followed:
        return str(folder / POLICY)
    if agent not in followed:
        raise CheckpointError(f"{folder}: its policies are of the agents {list(followed)}; none of them is {agent!r}.")
    return str(folder / MODULES / followed[agent])


def read_metadata(folder: Path) -> dict[str, Any]:
    """Reads what a checkpoint says of itself.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        found = json.loads((folder / METADATA).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: {METADATA} cannot be read: {error}.") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{folder}: {METADATA}: expected an object, found {type(found).__name__}.")
    return found
