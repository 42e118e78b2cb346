"""What ``--resume`` looks at before Tune goes on: that something was left, and nothing that would end it at once."""

import json
from collections.abc import Mapping
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
    """
    from pyarrow.fs import FileSelector, FileSystem

    system, folder = FileSystem.from_uri(place)
    files = [file.path for file in system.get_file_info(FileSelector(folder, allow_not_found=True))]
    for path in (path for path in files if Path(path).match(STATES)):
        with system.open_input_stream(path) as stream:
            state: dict[str, Any] = json.loads(stream.read())
        if state.get("runner_data", {}).get(DECISIONS):
            state["runner_data"][DECISIONS] = {}
            with system.open_output_stream(f"{path}.part") as stream:
                stream.write(json.dumps(state).encode())
            system.move(f"{path}.part", path)
