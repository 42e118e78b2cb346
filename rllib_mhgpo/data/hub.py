"""Data sets by the package ``datasets``: of the Hugging Face hub, or in a folder.

Knows no questions. The one idea: a row becomes the record that a file would hold; ``datasets`` gives every row all
columns, so that what a row does not have is null there, and left out here.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rllib_mhgpo.errors import DataError

#: How the name of such a data set begins.
HUB = "hf:"


def open_hub(name: str) -> tuple[Any, str]:
    """The rows of ``hf:OWNER/NAME``, ``hf:OWNER/NAME/CONFIG`` or ``hf:FOLDER``, and what changes when they do.

    A folder holds Parquet, JSON or CSV files, or what ``save_to_disk`` wrote. ``:SPLIT`` may follow; it is ``train``
    where it does not.

    Raises:
        DataError: where ``datasets`` is not installed, or does not find or cannot read it.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{name}: needs the package datasets (pip install datasets).") from error
    target, _, split = name.removeprefix(HUB).partition(":")
    if not target.strip():
        raise DataError(f"{name}: expected {HUB}OWNER/NAME or {HUB}FOLDER, found no name.")
    folder = Path(target).expanduser()
    try:
        rows = _open(datasets, target, folder, split)
    except Exception as error:  # whatever the hub, the network or the data set's own files say
        cause = error.__cause__ or error  # "an error occurred while generating" says nothing
        told = " ".join(str(cause).split())[:400].rstrip(".") or type(cause).__name__
        where = "" if folder.is_dir() else " Check the name and the network, or give a folder: hf:FOLDER."
        raise DataError(f"{name}: the data set cannot be loaded: {told}.{where}") from error
    return rows, str(rows._fingerprint)  # the name by which datasets itself caches


def hub_records(name: str, rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yields ``(place, record)`` for every row."""
    return ((f"{name}: record {number}", _without_nulls(row)) for number, row in enumerate(rows, start=1))


def _open(datasets: Any, target: str, folder: Path, split: str) -> Any:
    if (folder / "state.json").is_file():
        rows = datasets.load_from_disk(str(folder))
        if split and split != str(rows.split):
            raise ValueError(f"it is one data set without splits, so that {split!r} names nothing; leave :{split} out")
        return rows
    split = split or "train"
    if (folder / "dataset_dict.json").is_file():
        splits = datasets.load_from_disk(str(folder))
        if split not in splits:
            raise ValueError(f"it has no split {split!r}, but {', '.join(map(repr, splits))}")
        return splits[split]
    if folder.is_dir():
        return datasets.load_dataset(str(folder), split=split)
    if target.startswith(("/", ".", "~")):
        raise FileNotFoundError("there is no such folder")
    *owner, last = target.split("/")
    return datasets.load_dataset(*(("/".join(owner), last) if len(owner) == 2 else (target,)), split=split)


def _without_nulls(value: Any) -> Any:
    """``datasets`` gives every record the fields of all; what a record never had is null."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value
