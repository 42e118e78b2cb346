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
from rllib_mhgpo.sharding import ZeroShard, deepspeed_config
from rllib_mhgpo.train_batch import TrainBatch
from tests.test_learner import make_batch, multi_spec
from tests.toys import save_toy

WAYS: dict[str, dict[str, Any]] = {
    "replicas": {},
    **{f"zero{stage}": {"deepspeed": {"zero_stage": stage}} for stage in range(4)},
    "zero2_offload": {"deepspeed": {"zero_stage": 2, "offload_optimizer": True}},
    "zero3_offload": {
        "deepspeed": {"zero_stage": 3, "offload_optimizer": True, "offload_param": True},
        "gradient_checkpointing": "offload",
    },
}
"""How two learners share a model: a copy each, or spread, some of it beside the device's memory."""
SHARDS = {
    "even": [[0, 2, 4], [1, 3, 5]],
    "one": [[0, 1, 2, 3, 4], [5]],
    "none": [[], [0, 1, 2, 3, 4, 5]],
    "masked": [[0, 2, 4], [1, 3, 5]],
}


CASES = [(way, shards) for way in WAYS for shards in SHARDS if "offload" not in way or shards == "one"]


def batch_of(shards: str) -> TrainBatch:
    """Six rows; where they are "masked", those of the second learner carry no loss."""
    batch = make_batch()
    kept = np.isin(np.arange(len(batch)), SHARDS[shards][0]) | (shards != "masked")
    return replace(batch, weights=batch.weights * kept)


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


def make(folder: Path, way: str = "replicas", **settings: Any) -> PlainSGD:
    config = MHGPOConfig().training(llm=str(folder), kl_beta=0.04, grad_clip=None, **WAYS[way], **settings)
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
    for way, name in CASES:
        mine = np.array(SHARDS[name][rank], dtype=np.int64)
        moved, report = change(make(folder, way, max_tokens_per_microbatch=40), batch_of(name).take(mine))
        if rank == 0:
            moved["norms"] = np.array(report["grad_norms"])
            np.savez(given["out"] / f"{way}_{name}.npz", **moved)  # type: ignore[arg-type]

    move_masters(rank, folder, given["out"])


def move_masters(rank: int, folder: Path, out: Path) -> None:
    """An update each in float32 and in bfloat16; what the first learner's part of the master weights did."""
    found: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        learner = make(folder, "zero2", dtype=dtype)
        shard = learner.parallel["default_policy"]
        assert isinstance(shard, ZeroShard)
        before = torch.cat([master.detach().clone() for master in shard._masters()])
        batch = make_batch(logprobs=learner.logprobs(make_batch()))
        learner.update(training_data=TrainingData(batch=batch.take(np.array(SHARDS["even"][rank]))))
        after = torch.cat([master.detach() for master in shard._masters()])
        found[dtype] = (after - before).numpy()
        kinds = (after.dtype, next(learner.module["default_policy"].llm.parameters()).dtype)
        found[f"{dtype}_kinds"] = np.array([str(kind) for kind in kinds])
    if rank == 0:
        np.savez(out / "masters.npz", **found)


@pytest.fixture(scope="module")
def moved_by_two(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("moved")
    in_two_processes(update_a_shard, folder, out, {"out": out})
    return out


@pytest.mark.parametrize(("way", "shards"), CASES)
def test_two_learners_make_the_step_of_one(folder: Path, moved_by_two: Path, way: str, shards: str) -> None:
    """Identity 8 over learners, D1: 6 rows as 3 and 3, 5 and 1, 0 and 6, 3 and 3 masked; plain SGD at a rate of 1."""
    expected, report = change(make(folder), batch_of(shards))
    found = np.load(moved_by_two / f"{way}_{shards}.npz")
    assert found["norms"] == pytest.approx(report["grad_norms"], rel=1e-4)
    assert set(found) - {"norms"} == set(expected)
    for name, moved in expected.items():
        assert np.linalg.norm(found[name] - moved) <= 1e-4 * np.linalg.norm(moved), name


def test_bfloat16_has_float32_master_weights(moved_by_two: Path) -> None:
    found = np.load(moved_by_two / "masters.npz")
    assert found["bfloat16_kinds"].tolist() == ["torch.float32", "torch.bfloat16"]
    assert found["float32_kinds"].tolist() == ["torch.float32", "torch.float32"]
    expected, moved = found["float32"], found["bfloat16"]
    # a step of bfloat16 itself is 1/256 of a weight; the masters keep what is smaller
    assert np.linalg.norm(moved - expected) <= 0.2 * np.linalg.norm(expected)


def skip_then_step(rank: int, folder: Path, given: dict[str, Any]) -> None:
    """The first update has a loss of NaN on learner 1 alone; the second is a good one."""
    for way in SKIPPING:
        learner, rows = make(folder, way, max_tokens_per_microbatch=20), np.array(SHARDS["even"][rank])
        good = make_batch(logprobs=learner.logprobs(make_batch()))
        bad = replace(good, advantages=np.where(np.arange(len(good)) == 3, np.nan, good.advantages))
        kept, report = change(learner, bad.take(rows))
        moved, _ = change(learner, good.take(rows))
        if rank == 0:
            moved["skipped"] = np.array([report["skipped_steps"], *(np.abs(array).max() for array in kept.values())])
            np.savez(given["out"] / f"{way}.npz", **moved)  # type: ignore[arg-type]


SKIPPING = ("replicas", "zero1", "zero2", "zero3")


def test_a_loss_of_nan_on_one_learner_changes_nothing_on_any(folder: Path, tmp_path: Path) -> None:
    """R8 over learners: no step, no hang, and nothing of it is left in the step after."""
    in_two_processes(skip_then_step, folder, tmp_path, {"out": tmp_path})
    learner = make(folder)
    expected, _ = change(learner, make_batch(logprobs=learner.logprobs(make_batch())))
    for way in SKIPPING:
        found = np.load(tmp_path / f"{way}.npz")
        assert found["skipped"].tolist() == [1, *[0] * len(expected)], way
        for name, moved in expected.items():
            assert np.linalg.norm(found[name] - moved) <= 1e-4 * np.linalg.norm(moved), (way, name)


def test_no_more_is_allocated_for_sums_of_gradients_than_there_are() -> None:
    """DeepSpeed's 500 million numbers are 2 GB, which a deterministic torch fills in every micro-batch."""

    def bucket(parameters: int, **zero: Any) -> int:
        settings = {"zero_stage": 2, "config": {"zero_optimization": zero}}
        found = deepspeed_config(settings, None, torch.float32, parameters)["zero_optimization"]["reduce_bucket_size"]
        return int(found)

    assert [bucket(1000), bucket(8_000_000_000), bucket(1000, reduce_bucket_size=7)] == [1000, 500_000_000, 7]
