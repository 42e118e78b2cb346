"""What ``--resume`` looks at before Tune goes on: that something was left, and nothing that would end it at once."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rllib_mhgpo.errors import ConfigError

STATES = "experiment_state-*.json"
DECISIONS = "_cached_trial_decisions"


def require_earlier_run(storages: Mapping[str, str | None]) -> None:
    """Refuses to resume where none of the experiments has left a state.

    Args:
        storages: by name of an experiment, where its results go; None: Ray's default.

    Raises:
        ConfigError: nothing to resume.
    """
    remote = any(storage and "://" in storage for storage in storages.values())
    if not remote and not any(list(place.glob(STATES)) for place in map(Path, places_of(storages))):
        raise ConfigError(f"--resume: nothing to resume in {', '.join(places_of(storages))}; start without --resume.")


def places_of(storages: Mapping[str, str | None]) -> list[str]:
    """Returns the folders or addresses of experiments."""
    from ray.train.constants import DEFAULT_STORAGE_PATH

    return [f"{(storage or DEFAULT_STORAGE_PATH).rstrip('/')}/{name}" for name, storage in storages.items()]


def forget_decisions(place: str) -> None:
    """Takes decisions about trials out of an experiment's state.

    What Tune had decided when a trial failed while it was saved, to stop it, is kept there, and would end the resumed
    trial after one iteration as if it were done.

    Args:
        place: a folder, or an address that PyArrow knows, as it has to be for Tune.

    Raises:
        ConfigError: no such place, or a last state that is damaged.
    """
    from pyarrow import ArrowInvalid
    from pyarrow.fs import FileSelector, FileSystem

    try:
        system, folder = FileSystem.from_uri(place)
        files = [file.path for file in system.get_file_info(FileSelector(folder, allow_not_found=True))]
        _rewrite(system, sorted(path for path in files if Path(path).match(STATES)))
    except (OSError, ArrowInvalid) as error:
        raise ConfigError(f"--resume: {place}: cannot be read: {error}. Give the storage path of the run.") from error


def _rewrite(system: Any, paths: Sequence[str]) -> None:
    """Writes states anew that hold decisions; Tune goes on from the last, so that the others may be damaged."""
    for path in paths:
        with system.open_input_stream(path) as stream:
            text = stream.read()
        try:
            state: dict[str, Any] = json.loads(text)
        except ValueError as error:
            if path != paths[-1]:
                continue
            raise ConfigError(
                f"--resume: {path}: expected the state of an experiment, found {len(text)} bytes that are no JSON "
                f"({error}). Remove this file to go on from the state before, where there is one."
            ) from error
        if state.get("runner_data", {}).get(DECISIONS):
            state["runner_data"][DECISIONS] = {}
            with system.open_output_stream(f"{path}.part") as stream:
                stream.write(json.dumps(state).encode())
            system.move(f"{path}.part", path)
