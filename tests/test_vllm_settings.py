"""What keys of engines may say, the probe, and runners whose engine fails: none of it needs vLLM."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from rllib_mhgpo.algorithms.mhgpo import MHGPO, MHGPOConfig
from rllib_mhgpo.cli.checks import check
from rllib_mhgpo.cli.experiments import load_experiments
from rllib_mhgpo.engines import HFEngine, Probe
from rllib_mhgpo.engines.probe import fixed_sequence
from rllib_mhgpo.errors import ConfigError, EngineError, SyncError
from tests.rig import row
from tests.test_engines import plain_logprobs
from tests.toys import toy_model, toy_tokenizer

EXAMPLES = Path(__file__).parents[1] / "tuned_examples"
GPU: dict[str, Any] = {
    "engine": "vllm", "num_env_runners": 1, "num_gpus_per_env_runner": 0.4, "num_gpus_per_learner": 0.6,
}  # fmt: skip
SLEEP = {"enable_sleep_mode": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_p": 0.9}, "config: top_p: samples would not come from"),
        ({"engine": "vllm", "engine_config": {"repetition_penalty": 1.1}}, r"engine_config\.repetition_penalty: sampl"),
        ({"engine_config": {"min_p": 0.1}}, r"engine_config\.min_p: samples"),
        ({"engine": "vllm", "engine_config": {"override_generation_config": {"top_k": 5}}}, "override_generation"),
        (
            {"engine": "vllm", "engine_config": {"watermark_config": {"seed": 1}}},
            r"watermark_config: samples would not",
        ),
        ({"engine": "vllm", "engine_config": {"seed": 1}}, r"engine_config\.seed: follows from the key 'seed'"),
        ({"engine": "vllm", "engine_config": {"logprobs_mode": "raw_logprobs"}}, "logprobs_mode: is not to be changed"),
        ({"engine": "vllm", "engine_config": {"gpu_memory_utilization": 40}}, "above 0 and at most 1, found 40"),
        ({"engine": "vllm", "engine_config": {"max_model_len": "4k"}}, "max_model_len: expected a whole"),
        ({"engine_config": {"max_batch_token": 9}}, "Did you mean 'max_batch_tokens'"),
        ({**GPU, "weight_sync": "ipc", "opponents": {"answerer": "past"}}, r"past is made of weights in Ray's store"),
        ({"engine": "vllm", "engine_config": {"enable_sleep_mode": True}}, "num_gpus_per_env_runner above 0"),
        ({"weight_sync": "nccl"}, "weight_sync: nccl needs engine: vllm"),
        ({**GPU, "weight_sync": "nccl"}, "nccl cannot talk between two processes on one GPU"),
        ({**GPU, "weight_sync": "ipc", "sample_ahead": 1, "rollout_is_cap": 2.0}, "ipc cannot wait"),
        ({**GPU, "weight_sync": "ipc", "num_gpus_per_learner": 0}, r"own GPUs alone, found num_gpus_per_learner 0 and"),
        ({**GPU, "weight_sync": "ipc", "num_gpus_per_env_runner": 1}, r"num_gpus_per_env_runner 1; give each a part"),
        ({**GPU, "weight_sync": "ipc", "policies": {"a": {}, "b": {"lora": {"rank": 4}}}}, "above 0, and no lora"),
        (
            {**GPU, "policies": ["a", "b"], "engine_config": {**SLEEP, "distributed_executor_backend": "uni"}},
            r"one engine a process, found uni and the policies \['a', 'b'\]",
        ),
        ({**GPU, "engine_config": SLEEP, "sample_ahead": 1, "rollout_is_cap": 2.0}, "cannot sleep"),
    ],
)
def test_settings_that_would_give_wrong_numbers_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MHGPOConfig.check(changes)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*gpu.yaml")), ids=lambda path: path.stem)
def test_examples_for_gpus_can_be_resolved(path: Path) -> None:
    (name, experiment), *others = load_experiments(path).items()
    assert not others
    assert name == path.stem.replace("_", "-")
    assert check(name, experiment) is MHGPO
    config = MHGPOConfig.check(experiment["config"])
    gpus = int(path.stem[-4])
    assert config.num_learners == config.num_env_runners == gpus
    assert config.num_gpus_per_learner + config.num_gpus_per_env_runner == 1


def test_settings_of_gpus_pass() -> None:
    shared = {**GPU, "weight_sync": "ipc", "engine_config": SLEEP}
    apart = {**GPU, "weight_sync": "nccl", "num_learners": 1, "num_gpus_per_learner": 1, "num_gpus_per_env_runner": 2}
    for policies in ([], ["a", "b"]):
        assert not any(MHGPOConfig.check({**way, "policies": policies}).shares_module for way in (shared, apart))


@pytest.mark.parametrize("learners", [0, 1])
def test_an_engine_in_the_main_process_is_given_its_gpus(learners: int) -> None:
    asked = {**GPU, "num_env_runners": 0, "num_learners": learners}
    bundles = [bundle.get("GPU", 0) for bundle in MHGPO.default_resource_request(asked).bundles]
    assert bundles == ([0.4, 0.6] if learners else [1.0])
    assert MHGPO.default_resource_request({**asked, "engine": "hf"}).required_resources["GPU"] == 0.6


def test_a_learner_and_an_engine_of_one_process_share_whole_gpus() -> None:
    """Ray gives parts of one GPU, or whole ones."""
    for learner, engine, asked in ((1, 0.4, 1), (1, 1, 1), (1, 2, 2)):
        gpus = {"num_gpus_per_learner": learner, "num_gpus_per_env_runner": engine}
        request = MHGPO.default_resource_request({**GPU, **gpus, "num_env_runners": 0, "num_learners": 0})
        assert request.required_resources["GPU"] == asked


def test_a_given_response_is_scored_as_a_plain_forward_pass_scores_it() -> None:
    model, (prompt, response) = toy_model(toy_tokenizer()), fixed_sequence(250, 1024)
    found = HFEngine(model, [0]).score(prompt, response, 0.7)
    np.testing.assert_allclose(found, plain_logprobs(model, prompt, response, 0.7), atol=1e-5)


def test_the_fixed_sequence_fits_the_context() -> None:
    for context in (4, 40, 4096):
        prompt, response = fixed_sequence(50, context)
        assert len(prompt) >= 1
        assert 1 <= len(response) <= 8
        assert len(prompt) + len(response) < context


def test_a_probe_tells_both_numbers_of_other_weights() -> None:
    prompt, response = fixed_sequence(250, 1024)
    mine, other = (HFEngine(toy_model(toy_tokenizer(), seed=seed), [0]) for seed in (0, 1))
    probe = Probe(prompt, response, mine.score(prompt, response, 1.0), 1.0, 1e-3)
    assert probe.check(mine) == 0.0
    with pytest.raises(SyncError, match=r"differ by \d.*at most 0.001; at token \d the engine says -\d.*learner -\d"):
        probe.check(other)


@pytest.mark.usefixtures("ray_session")
class TestRunners:
    """Runners in processes of their own."""

    def test_every_sync_is_probed(self, make: Callable[..., MHGPO]) -> None:
        algorithm = make(num_env_runners=1, evaluation_interval=None)
        assert 0 <= row(algorithm)["sync_logprob_diff"] < 1e-5

        def forget(runner: Any) -> None:
            runner.module.take_weights = lambda weights: None

        algorithm.pool.first(forget)
        with pytest.raises(SyncError, match="does not compute with the learner's weights"):
            row(algorithm)

    def test_a_runner_whose_engine_fails_is_replaced(self, make: Callable[..., MHGPO]) -> None:
        algorithm = make(num_env_runners=2, evaluation_interval=None)

        def break_engine(runner: Any) -> None:
            def dies(*args: Any) -> None:
                raise EngineError("engine: vLLM failed: RuntimeError: CUDA error")

            runner.engine.generate = dies

        ray.get(algorithm.pool.actors[0].apply.remote(break_engine))
        result = row(algorithm)
        assert result["num_replaced_runners"] == 1
        assert result["num_voided"] == 0
        assert result["num_generations"] == 3 * 3 * 3
