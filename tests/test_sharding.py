"""Two real learner processes: replicas and every ZeRO stage make the step that one learner makes."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from ray.rllib.core.learner.training_data import TrainingData
from torch.multiprocessing.spawn import spawn

from rllib_mhgpo.algorithms.mhgpo import MHGPOConfig
from rllib_mhgpo.algorithms.objective import PolicyLearner
from rllib_mhgpo.modules import scoring
from rllib_mhgpo.train_batch import TrainBatch
from tests.test_learner import make_batch, multi_spec
from tests.toys import save_toy

STAGES = [None, 1, 2, 3]  # None: replicas
SHARDS = {"even": [[0, 2, 4], [1, 3, 5]], "one": [[0, 1, 2, 3, 4], [5]], "none": [[], [0, 1, 2, 3, 4, 5]]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_toy(tmp_path_factory.mktemp("toy"), "llama")


def in_two_processes(task: Callable[[int, Path, Any], None], folder: Path, out: Path, given: Any) -> None:
    """Runs a task as learner 0 and 1 of one group."""
    spawn(  # type: ignore[no-untyped-call]
        _enter, args=(task, out / "rendezvous", folder, given), nprocs=2, join=True
    )


def _enter(rank: int, task: Callable[..., None], meeting: Path, folder: Path, given: Any) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    task(rank, folder, given)
    dist.destroy_process_group()


class PlainSGD(PolicyLearner):
    """So that a change of the weights is the gradient itself."""

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        params = self.get_parameters(self._module[module_id])
        self.register_optimizer(
            module_id=module_id, optimizer=torch.optim.SGD(params), params=params, lr_or_lr_schedule=1.0
        )


def make(folder: Path, stage: int | None, **settings: Any) -> PlainSGD:
    deepspeed = {} if stage is None else {"deepspeed": {"zero_stage": stage}}
    config = MHGPOConfig().training(llm=str(folder), kl_beta=0.04, grad_clip=None, **deepspeed, **settings)
    learner = PlainSGD(config=config, module_spec=multi_spec(config))
    learner.build()
    return learner


def change(learner: PlainSGD, batch: TrainBatch) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """How an update moves the weights, and what it reports."""
    policy = learner.module["default_policy"]
    start = {name: array.copy() for name, array in policy.weights()}
    report = learner.update(training_data=TrainingData(batch=batch))
    return {name: array - start[name] for name, array in policy.weights()}, report


def update_a_shard(rank: int, folder: Path, given: dict[str, Any]) -> None:
    """Rows that share prompts, and a head that runs in pieces of four tokens."""
    scoring.LOGITS_AT_ONCE = 4 * 258
    for stage in STAGES:
        for name, shards in SHARDS.items():
            moved, report = change(
                make(folder, stage, max_tokens_per_microbatch=40),
                make_batch().take(np.array(shards[rank], dtype=np.int64)),
            )
            if rank == 0:
                moved["norms"] = np.array(report["grad_norms"])
                np.savez(given["out"] / f"{stage}_{name}.npz", **moved)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def moved_by_two(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("moved")
    in_two_processes(update_a_shard, folder, out, {"out": out})
    return out


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("shards", SHARDS)
def test_two_learners_make_the_step_of_one(folder: Path, moved_by_two: Path, stage: int | None, shards: str) -> None:
    """Identity 8 over learners, D1: 6 rows as 3 and 3, 5 and 1, 0 and 6; plain SGD at a rate of 1."""
    expected, report = change(make(folder, None), make_batch())
    found = np.load(moved_by_two / f"{stage}_{shards}.npz")
    assert found["norms"] == pytest.approx(report["grad_norms"], rel=1e-4)
    assert set(found) - {"norms"} == set(expected)
    for name, moved in expected.items():
        assert np.linalg.norm(found[name] - moved) <= 1e-4 * np.linalg.norm(moved), name


def skip_then_step(rank: int, folder: Path, given: dict[str, Any]) -> None:
    """The first update has a loss of NaN on learner 1 alone; the second is a good one."""
    for stage in STAGES:
        learner, rows = make(folder, stage, max_tokens_per_microbatch=20), np.array(SHARDS["even"][rank])
        good = make_batch(logprobs=learner.logprobs(make_batch()))
        bad = replace(good, advantages=np.where(np.arange(len(good)) == 3, np.nan, good.advantages))
        kept, report = change(learner, bad.take(rows))
        moved, _ = change(learner, good.take(rows))
        if rank == 0:
            moved["skipped"] = np.array([report["skipped_steps"], *(np.abs(array).max() for array in kept.values())])
            np.savez(given["out"] / f"{stage}.npz", **moved)  # type: ignore[arg-type]


def test_a_loss_of_nan_on_one_learner_changes_nothing_on_any(folder: Path, tmp_path: Path) -> None:
    """R8 over learners: no step, no hang, and nothing of it is left in the step after."""
    in_two_processes(skip_then_step, folder, tmp_path, {"out": tmp_path})
    learner = make(folder, None)
    expected, _ = change(learner, make_batch(logprobs=learner.logprobs(make_batch())))
    for stage in STAGES:
        found = np.load(tmp_path / f"{stage}.npz")
        assert found["skipped"].tolist() == [1, *[0] * len(expected)], stage
        for name, moved in expected.items():
            assert np.linalg.norm(found[name] - moved) <= 1e-4 * np.linalg.norm(moved), (stage, name)
