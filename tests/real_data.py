"""Finds the real data files that some tests read; they are not part of the repository."""

import os
from pathlib import Path

import pytest

_BESIDE = Path(__file__).resolve().parents[1].parent / "shared" / "data"


def real_file(name: str) -> Path:
    """Returns the path of a file in ``$MHGPO_TEST_DATA`` (or beside the repository), or skips the test."""
    path = Path(os.environ.get("MHGPO_TEST_DATA", _BESIDE)) / name
    if not path.is_file():
        pytest.skip(f"needs the real file {name}: set MHGPO_TEST_DATA to the folder that holds it")
    return path
