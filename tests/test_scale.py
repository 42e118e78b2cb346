"""Runs on several processes: runners that are lost, learners over which a model is spread, sampling ahead."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from rllib_mhgpo.algorithms.checkpoints import MANIFEST, POLICY, SHARDS, check_shards, read_shard, write_shard
from rllib_mhgpo.algorithms.learner_pool import refuse_shared_gpus
from rllib_mhgpo.algorithms.mhgpo import MHGPO
from rllib_mhgpo.algorithms.runner_pool import Deal, RunnerPool
from rllib_mhgpo.errors import CheckpointError, ConfigError, MHGPOError
from rllib_mhgpo.runner import Rollouts
from tests.rig import equal, row, weights
from tests.toys import PROMPTS

Make = Callable[..., MHGPO]
pytestmark = pytest.mark.usefixtures("ray_session")


def processes(pool: RunnerPool) -> dict[int, int]:
    """The process of each runner."""
    return {index: ray.get(actor.apply.remote(lambda _: os.getpid())) for index, actor in pool._active.items()}


def responses(parts: list[Rollouts]) -> dict[int, list[list[int]]]:
    found: dict[int, list[list[int]]] = {}
    for part in parts:
        for tree in part.trees:
            assert tree.root not in found, "a question was played twice"
            found[tree.root] = [generation.response.tolist() for generation in tree.generations]
    return found


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "stalls"])
def test_the_questions_of_a_lost_runner_go_to_others(make: Make, how: signal.Signals) -> None:
    algorithm = make(num_env_runners=2, sample_timeout_s=15, evaluation_interval=None)
    pool, play = algorithm.pool, algorithm._training_play(0)
    expected, pids = responses(pool.roll_out(range(5), play)), processes(pool)
    deals = pool.start(range(5), play)
    os.kill(pids[1], how)
    assert responses(pool.finish(deals)) == expected
    assert row(algorithm)["num_replaced_runners"] == 1
    for _, is_ready in list(pool._joining.values()):
        ray.get(is_ready)
    pool._welcome()
    assert len(pool._active) == 2
    version, mine = pool.published.version, weights(algorithm)  # type: ignore[union-attr]
    for actor in pool._active.values():
        assert ray.get(actor.apply.remote(lambda runner: runner.weights_seq_no)) == version == 1
        assert equal(dict(ray.get(actor.apply.remote(lambda runner: list(runner.module.weights())))), mine)


def test_a_new_runner_plays_against_the_past_of_the_others(make: Make) -> None:
    algorithm = make(
        num_env_runners=2, sample_timeout_s=30, evaluation_interval=None, opponents={"reranker": "past"},
        opponent_refresh=10,
    )  # fmt: skip
    start = weights(algorithm)
    row(algorithm)
    pool = algorithm.pool
    os.kill(processes(pool)[1], signal.SIGKILL)
    row(algorithm)
    for _, is_ready in list(pool._joining.values()):
        ray.get(is_ready)
    row(algorithm)
    assert (len(pool._active), pool.num_replaced) == (2, 1)
    for actor in pool._active.values():
        past = ray.get(actor.apply.remote(lambda runner: runner.opponents.state()))
        assert int(past.pop("period")) == 0
        found = {name.removeprefix("reranker."): tensor.numpy() for name, tensor in past.items()}
        assert all(np.array_equal(found[name], array) for name, array in start.items())
    assert not equal(weights(algorithm), start)


def test_questions_that_end_every_runner_end_the_run(make: Make) -> None:
    algorithm = make(num_env_runners=1, evaluation_interval=None)

    def play_and_die(runner: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    pool = algorithm.pool
    play = algorithm._training_play(0)
    deals = {
        actor.apply.remote(play_and_die): Deal(index, actor, [3, 4], play, tries=3)
        for index, actor in pool._active.items()
    }
    with pytest.raises(MHGPOError, match=r"3 runners were lost on the questions \[3, 4\]"):
        pool.finish(deals)


def test_an_error_in_a_runner_reaches_the_user(make: Make) -> None:
    algorithm = make(num_env_runners=1, evaluation_interval=None)
    with pytest.raises(ZeroDivisionError):
        algorithm.pool.first(lambda runner: 1 / 0)


def sampled_with(algorithm: MHGPO) -> dict[str, NDArray[Any]]:
    """The weights of a runner."""

    def weights_of(runner: Any) -> list[tuple[str, NDArray[Any]]]:
        return list(runner.module.weights())

    return dict(algorithm.pool.first(weights_of))


@pytest.mark.parametrize("stage", [None, 3], ids=["replicas", "zero3"])
def test_learners_share_a_run_and_its_checkpoint(make: Make, tmp_path: Path, stage: int | None) -> None:
    """R6, D3: two learners train, save a plain model folder, and go on exactly from a checkpoint."""
    deepspeed = {} if stage is None else {"deepspeed": {"zero_stage": stage}}
    settings = {"num_learners": 2, "evaluation_interval": None, **deepspeed}
    first = make(num_cpus_per_learner=0.5, **settings)
    results = [row(first), row(first)]
    assert all(np.isfinite(result["grad_norm"]) and result["sync_mb"] > 0 for result in results)
    path = Path(first.save_to_path(tmp_path / "checkpoint"))
    model = AutoModelForCausalLM.from_pretrained(path / POLICY)
    saved = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    on_runner = sampled_with(first)
    assert equal(saved, on_runner)
    assert len(list((path / SHARDS).glob("*"))) == (2 if stage else 0)
    after = row(first)
    moved = sampled_with(first)
    first.stop()
    second = make(num_cpus_per_learner=0.5, **settings)
    second.restore_from_path(path)
    assert equal(sampled_with(second), saved)
    again = row(second)
    assert again["train"] == after["train"]
    assert again["grad_norm"] == after["grad_norm"]
    assert equal(sampled_with(second), moved)


@pytest.mark.parametrize("stage", [None, 3], ids=["replicas", "zero3"])
def test_a_state_in_memory_is_as_whole_as_a_checkpoint(make: Make, stage: int | None) -> None:
    """R6: the weights, the optimiser's moments and its master weights; also a state that is older than the run."""
    deepspeed = {} if stage is None else {"deepspeed": {"zero_stage": stage}}
    algorithm = make(num_learners=1, evaluation_interval=None, **deepspeed)
    row(algorithm)
    state, then = algorithm.get_state(), sampled_with(algorithm)
    after = row(algorithm)
    moved = sampled_with(algorithm)
    assert not equal(moved, then)
    algorithm.set_state(state)
    assert equal(sampled_with(algorithm), then)
    again = row(algorithm)
    assert again["training_iteration"] == 2
    assert again["grad_norm"] == after["grad_norm"]
    assert equal(sampled_with(algorithm), moved)
    state["learner_group"]["learner"]["rl_module"]["default_policy"] = {}
    with pytest.raises(CheckpointError, match="expected the weights of 'default_policy', found none"):
        algorithm.set_state(state)


@pytest.mark.parametrize("stage", [None, 2], ids=["replicas", "zero2"])
def test_a_learner_killed_in_mid_update_ends_the_run_and_its_checkpoint_goes_on(
    make: Make, tmp_path: Path, stage: int | None
) -> None:
    deepspeed = {} if stage is None else {"deepspeed": {"zero_stage": stage}}
    settings = {"num_learners": 2, "num_cpus_per_learner": 0.5, "evaluation_interval": None, **deepspeed}
    first = make(**settings)
    row(first)
    path = first.save_to_path(tmp_path / "checkpoint")
    expected = row(first)

    def die_before_the_step(learner: Any) -> None:  # when its gradient is there, and the other waits for it
        if learner._learner_index == 1:
            learner.step = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

    first.learners.each(die_before_the_step)
    for _ in range(2):  # and whoever asks again is told the same
        with pytest.raises(MHGPOError, match=r"the process of learner 1 died \(The actor died.*--resume"):
            row(first)
    first.stop()
    second = make(**settings)
    second.restore_from_path(path)
    again = row(second)
    assert again["training_iteration"] == 2
    assert again["train"] == expected["train"]
    assert again["grad_norm"] == expected["grad_norm"]


def test_a_learner_that_died_is_named_when_a_checkpoint_asks_for_it(make: Make, tmp_path: Path) -> None:
    """RLlib asks the first learner for its state, and would say only that an actor is gone."""
    algorithm = make(num_learners=2, num_cpus_per_learner=0.5, evaluation_interval=None)
    os.kill(algorithm.learners.one(0, lambda learner: os.getpid()), signal.SIGKILL)
    with pytest.raises(MHGPOError, match=r"the process of learner 0 died .*--resume"):
        algorithm.save_to_path(tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == []


def test_adapters_over_zero_3_are_saved_merged(make: Make, tmp_path: Path, toy_folder: Path) -> None:
    """D3 with adapters: the plain folder, of tied weights, says what a runner's adapted model says."""
    settings = {"num_learners": 2, "num_cpus_per_learner": 0.5, "deepspeed": {"zero_stage": 3}, "lora": {"rank": 4}}
    algorithm = make(**settings, evaluation_interval=None)
    row(algorithm)

    def logits(model: Any) -> Any:
        import torch

        with torch.no_grad():
            return model(torch.arange(1, 20)[None]).logits.numpy()

    def on_runner(runner: Any) -> Any:
        return logits(runner.module.llm)

    folder = Path(algorithm.save_to_path(tmp_path / "checkpoint")) / POLICY
    mine = algorithm.pool.first(on_runner)
    assert np.abs(logits(AutoModelForCausalLM.from_pretrained(folder)) - mine).max() < 1e-5
    assert np.abs(logits(AutoModelForCausalLM.from_pretrained(toy_folder)) - mine).max() > 1e-4


def test_sampling_ahead_uses_weights_of_one_update_before(make: Make) -> None:
    algorithm = make(num_env_runners=1, sample_ahead=1, rollout_is_cap=2.0, evaluation_interval=2)
    results = [row(algorithm) for _ in range(3)]
    assert [result["staleness"] for result in results] == [0, 1, 1]
    assert results[1]["dev"]["iteration"] == 2


def checkpoints(algorithm: MHGPO, folder: Path) -> list[Path]:
    paths = []
    for number in range(2):
        row(algorithm)
        paths.append(Path(algorithm.save_to_path(folder / f"checkpoint_00000{number}")))
    return paths


@pytest.mark.parametrize("fault", ["cut", "flipped", "missing"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    make: Make, tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = make(evaluation_interval=None)
    first, second = checkpoints(algorithm, tmp_path)
    (file,) = (second / POLICY).glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes({"cut": content[:-1], "flipped": content[:-9] + b"x" + content[-8:]}.get(fault, b""))
    if fault == "missing":
        file.unlink()
    with pytest.raises(CheckpointError, match=r"the checkpoint is damaged: .*model\.safetensors"):
        algorithm.restore_from_path(second)
    algorithm.load_checkpoint(str(second))
    assert algorithm.iteration == 1
    assert "model.safetensors" in caplog.text
    (first / MANIFEST).write_text("{")
    with pytest.raises(CheckpointError, match="no checkpoint of the run is whole"):
        algorithm.load_checkpoint(str(second))


def test_a_run_is_not_continued_with_other_questions_or_another_retriever(
    make: Make, tmp_path: Path, toy_questions_file: Path
) -> None:
    path = make(evaluation_interval=None).save_to_path(tmp_path / "checkpoint")
    other = tmp_path / "other.json"
    other.write_text(toy_questions_file.read_text().replace("what is 3?", "what was 3?"))
    env_config = {"questions": str(other), "dev_questions": None, "prompts": PROMPTS}
    algorithm = make(env_config=env_config, evaluation_interval=None)
    with pytest.raises(CheckpointError, match=r"had other questions: expected fingerprint \w{12}, found \w{12}"):
        algorithm.restore_from_path(path)
    env_config |= {"questions": str(toy_questions_file), "dev_questions": str(toy_questions_file), "retriever": "bm25"}
    algorithm = make(env_config=env_config, evaluation_interval=None)
    with pytest.raises(CheckpointError, match=r"had other encoder: expected fingerprint \w{12}, found \w{12}"):
        algorithm.restore_from_path(path)


def test_a_loss_that_is_not_finite_skips_the_step_and_stops_a_lost_run(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """R8: the weights stay, the generation is named, and after enough steps in a row the run ends."""
    algorithm = make(evaluation_interval=None, minibatch_questions=1, max_skipped_steps=5)
    before, assign_credit = weights(algorithm), algorithm.assign_credit

    def with_nan(flat: Any) -> Any:
        return {**assign_credit(flat), "advantage": np.full(len(flat.agent), np.nan)}

    algorithm.assign_credit = with_nan  # type: ignore[method-assign]
    assert row(algorithm)["skipped_steps"] == 3
    assert equal(weights(algorithm), before)
    assert "the loss was not finite in a micro-batch with question" in caplog.text
    with pytest.raises(MHGPOError, match="6 optimiser steps in a row had no finite gradient"):
        row(algorithm)


@pytest.mark.parametrize(
    ("guard", "message"), [({"max_kl": 1e-9}, "above max_kl"), ({"min_entropy": 50.0}, "below min_")]
)
def test_guards_stop_a_run(make: Make, guard: dict[str, float], message: str) -> None:
    algorithm = make(evaluation_interval=None, kl_beta=0.01, **guard)
    if "max_kl" in guard:
        row(algorithm)  # the KL is 0 before the first update
    with pytest.raises(MHGPOError, match=message):
        row(algorithm)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"deepspeed": {"zero_stage": 4}, "num_learners": 2}, "zero_stage: expected 0, 1, 2 or 3, found 4"),
        ({"deepspeed": {"stage": 3}, "num_learners": 2}, "deepspeed: expected keys of .* found 'stage'"),
        ({"deepspeed": {"zero_stage": 2}}, "needs learners to spread over"),
        ({"deepspeed": {"zero_stage": 0, "offload_optimizer": True}, "num_learners": 1}, "need a zero_stage of 1 to 3"),
        ({"sample_ahead": 1, "rollout_is_cap": 2.0}, "sample_ahead: expected num_env_runners of at least 1"),
        ({"sample_ahead": 1, "num_env_runners": 1}, "set rollout_is_cap"),
        (
            {"deepspeed": {"zero_stage": 2, "offload_param": True}, "num_learners": 2},
            "offload_param: needs zero_stage 3",
        ),
        ({"deepspeed": {"zero_stage": 2, "config": {"bf16": {}}}, "num_learners": 2}, r"deepspeed.config: \['bf16'\]"),
        ({"deepspeed": {"zero_stage": 3}, "num_learners": 2, "reference_refresh": 2}, "is not sharded"),
        (
            {"deepspeed": {"zero_stage": 2, "config": {"activation_checkpointing": {}}}, "num_learners": 2},
            "activation_checkpointing: has no effect .* gradient_checkpointing: offload",
        ),
        (
            {"torch_compile_learner": True, "deepspeed": {"zero_stage": 3}, "num_learners": 2},
            "torch_compile_learner: ZeRO-3 gathers layers",
        ),
        ({"torch_compile_learner_dynamo_mode": "default"}, "_mode: need torch_compile_learner: true"),
        (
            {"torch_compile_learner": True, "num_learners": 1, "torch_compile_learner_dynamo_backend": "inducto"},
            "dynamo_backend: expected one of .* found 'inducto'. Did you mean 'inductor'",
        ),
        ({"deepspeed": {"zero_stage": 2, "config": 5}, "num_learners": 1}, "deepspeed.config: expected keys and val"),
        (
            {"deepspeed": {"zero_stage": 2, "config": {"zero_optimization": None}}, "num_learners": 1},
            "zero_optimization: expected keys and values, found None",
        ),
        (
            {"deepspeed": {"zero_stage": 2, "offload_optimizer": "yes"}, "num_learners": 1},
            "offload_optimizer: expected true, false or keys and values, found 'yes'",
        ),
        (
            {
                "deepspeed": {"zero_stage": 2, "config": {"zero_optimization": {"reduce_bucket_size": "x"}}},
                "num_learners": 1,
            },
            "reduce_bucket_size: expected a number of at least 1, found 'x'",
        ),
        ({"num_gpus_per_learner": "x"}, "num_gpus_per_learner: .*found 'x'"),
        (
            {"engine_config": {"max_batch_tokens": 0}},
            "max_batch_tokens: expected a whole number of at least 1, found 0",
        ),
        ({"lr": []}, "lr: expected a number or a schedule"),
        ({"lr": True}, "lr: expected a number of at least 0 or a schedule, found True"),
        ({"policies": ["a", "a"]}, "policies: expected different names"),
        ({"torch_compile_learner": True}, "torch_compile_learner: the engine hf would sample"),
        (
            {"attn_implementation": "flash_attention_2", "num_gpus_per_learner": 1},
            "flash_attention_2 computes in bfloat16 on GPUs alone",
        ),
        (
            {"attn_implementation": "flash_attention_2", "dtype": "bfloat16"},
            "flash_attention_2 computes in bfloat16 on GPUs alone",
        ),
        ({"attn_implementation": "flex_attention"}, "flex_attention has kernels .* on GPUs alone"),
        ({"attn_implementation": "flex"}, "attn_implementation: .*'flex_attention'.* found 'flex'"),
        ({"gradient_checkpointing": "cpu"}, "gradient_checkpointing: .* or 'offload'; found 'cpu'"),
        ({"max_kl": 0.5, "kl_beta": 0.0}, "max_kl: expected a kl_beta above 0"),
        ({"num_learners": 2, "num_gpus_per_learner": 0.5}, "num_gpus_per_learner: expected more than 0.5, found 0.5"),
    ],
)
def test_settings_that_do_not_fit_are_refused(config: Callable[..., Any], changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**changes).validate()


def test_two_learners_on_one_gpu_are_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="2 learners need a GPU each, Ray has 0"):
        make(num_learners=2, num_gpus_per_learner=0.4, placement_strategy="SPREAD")
    refuse_shared_gpus([("a" * 9, (0,)), ("a" * 9, (1,)), ("b" * 9, (0,))])
    with pytest.raises(
        ConfigError, match=r"learners 1 and 2 were both placed on GPU 1 of node aaaaaaaa; give each more"
    ):
        refuse_shared_gpus([("a" * 9, (0,)), ("a" * 9, (1,)), ("a" * 9, (1,))])


def test_shards_of_other_learners_are_refused(tmp_path: Path) -> None:
    for learner in range(2):
        write_shard(tmp_path, learner, {"0.master": np.zeros(3, np.float32)})
    assert np.array_equal(read_shard(tmp_path, 1)["0.master"], np.zeros(3))
    with pytest.raises(CheckpointError, match=r"shards of 3 learners .* found those of 2"):
        check_shards(tmp_path, 3)
    (tmp_path / SHARDS / "learner_1.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError, match=r"learner_1\.safetensors: the optimiser's shard cannot be read"):
        read_shard(tmp_path, 1)
