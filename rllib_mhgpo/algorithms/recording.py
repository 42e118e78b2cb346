"""Keeps what the agents said: which trees a run records, and when they are written."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pyarrow import fs

from rllib_mhgpo.algorithms.config import LLMConfig
from rllib_mhgpo.llms import load_tokenizer
from rllib_mhgpo.records import FOLDER, Credit, RecordFolder, sample_roots, tree_rows
from rllib_mhgpo.tree import FlatTrees, RolloutTree
from rllib_mhgpo.waves import Play


class Recorder:
    """Chooses roots before they are played, and writes their trees when credit has been given.

    Args:
        storage: Tune's storage of the trial, None outside Tune.
        logdir: the folder of results outside Tune.
    """

    def __init__(self, config: LLMConfig, storage: Any, logdir: str) -> None:
        filesystem, path = (
            (fs.LocalFileSystem(), logdir) if storage is None else (storage.storage_filesystem, storage.trial_fs_path)
        )
        self.folder = RecordFolder(filesystem, f"{path}/{FOLDER}", int(config.record_mb * 1e6))
        self.share = config.record_share
        self.tokenizer = load_tokenizer(config.llm) if self.share else None

    def recorded(self, how: Play, roots: Sequence[int]) -> Play:
        """Returns how to play these roots so that a share of their trees is recorded."""
        return replace(how, keep_records=sample_roots(roots, self.share))

    def write(self, split: str, iteration: int, trees: Sequence[RolloutTree], flat: FlatTrees, credit: Credit) -> None:
        """Writes those of the trees that are recorded."""
        self.folder.write(split, iteration, tree_rows(trees, flat, credit, self.tokenizer))
