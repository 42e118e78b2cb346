"""Fixtures that tests share: a toy policy and its questions on disk, one Ray session."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: as many threads as Ray's actors have, so sums are equal

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rllib_mhgpo.algorithms.mhgpo import MHGPO, MHGPOConfig
from tests.browser import browser  # noqa: F401  # a fixture
from tests.toys import PROMPTS, save_questions, save_toy

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

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture
def config(toy_folder: Path, toy_questions_file: Path) -> Callable[..., MHGPOConfig]:
    def make(config_class: type[MHGPOConfig] = MHGPOConfig, **changes: Any) -> MHGPOConfig:
        questions = str(toy_questions_file)
        env_config = {
            "questions": questions,
            "dev_questions": questions,
            "prompts": PROMPTS,
            "reward": "tests.toys:share_of_vowels",
        }
        settings = {
            "llm": str(toy_folder), "questions_per_iteration": 3, "group_size": 3, "max_response_tokens": 6,
            "lr": 1e-2, "seed": 1, "evaluation_interval": 2, "env_config": env_config,
        }  # fmt: skip
        return config_class().update_from_dict({**settings, **changes})

    return make


@pytest.fixture
def make(config: Callable[..., MHGPOConfig], request: pytest.FixtureRequest) -> Callable[..., MHGPO]:
    def build(**changes: Any) -> MHGPO:
        algorithm: MHGPO = config(**changes).build_algo()
        request.addfinalizer(algorithm.stop)
        return algorithm

    return build
