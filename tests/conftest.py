"""Fixtures that tests share: a toy policy and its questions on disk, one Ray session."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.toys import save_questions, save_toy

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer language model with a byte tokenizer as a Hugging Face folder."""
    return save_toy(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="session")
def toy_questions_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight questions in HotpotQA's layout."""
    return save_questions(tmp_path_factory.mktemp("data") / "questions.json")


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    """A local Ray of two CPUs, ended after the module."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()
