"""Weights from the learners to the runners' engines, by one of three ways, and a probe of what arrived.

Through Ray's object store on any machine; on GPUs by vLLM's own transfer engines, NCCL between GPUs or IPC on one.
However they travel, every engine then scores a fixed sequence as the learners do, or the run stops.
"""

import socket
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import ray
import torch
from numpy.typing import NDArray
from ray.actor import ActorHandle
from torch import Tensor

from rllib_mhgpo.algorithms.config import LLMConfig
from rllib_mhgpo.algorithms.learner_pool import LearnerPool
from rllib_mhgpo.algorithms.policies import followers
from rllib_mhgpo.algorithms.runner_pool import RunnerPool
from rllib_mhgpo.engines.probe import TOLERANCE, Probe, as_batch, fixed_sequence
from rllib_mhgpo.llms.folders import architecture
from rllib_mhgpo.runner import LLMEnvRunner, Published
from rllib_mhgpo.sharding import is_first, whole


class HandOver:
    """Brings new weights to all runners.

    Args:
        agents: of the environment.

    Attributes:
        size: bytes of the last ones.
        difference: of log-probabilities, mean a token, learners against the farthest engine; NaN before.
    """

    def __init__(self, config: LLMConfig, learners: LearnerPool, pool: RunnerPool, agents: Sequence[str]) -> None:
        self.config, self.learners, self.pool = config, learners, pool
        self._speakers = list({policy: agent for agent, policy in followers(config, agents).items()}.values())
        self.size, self.difference, self.version = 0, float("nan"), 0
        self._connected: list[ActorHandle] = []
        if config.weight_sync != "store":
            pool.republish = self._stored

    def give(self, version: int) -> None:
        """Hands the learners' weights to all runners, and to those that join later.

        Raises:
            SyncError: an engine does not compute with them.
        """
        self.version = version
        if self.config.weight_sync == "store":
            published = self._stored()
        else:
            self._connect()
            self._make_room()
            self.size = self.learners.each(_send)[0]
            published = Published({}, version, self.probes(), transferred=True)
        self._make_room()
        self.difference = self.pool.hand_over(published)

    def _make_room(self) -> None:
        """Lets learners give back what their allocators keep of an update, where engines on their GPUs are to wake."""
        if self.config.engine_config.get("enable_sleep_mode"):
            self.learners.each(_release)

    def probes(self) -> list[Probe]:
        """Lets the learners score a fixed sequence, with each of the policies and adapters; collective."""
        config = self.config
        sizes = [architecture(llm)["vocab_size"] for llm in config.llms.values()]
        prompt, response = fixed_sequence(min(sizes), config.context)
        agents = (config.lora or {}).get("adapters") or self._speakers
        batch = as_batch(prompt, response, agents)
        found = self.learners.each(lambda learner: learner.logprobs(batch))[0]
        tolerance = config.sync_tolerance or TOLERANCE[config.dtype]
        return [
            Probe(
                prompt,
                response,
                expected,
                config.temperature,
                tolerance,
                agent,
                policy=config.policy_of(agent) if config.policies else "",
            )
            for agent, expected in zip(agents, found, strict=True)
        ]

    def _stored(self) -> Published:
        refs, self.size = self.learners.each(publish)[0]
        return Published(refs, self.version, self.probes())

    def _connect(self) -> None:
        """Makes learners and runners a group for each policy, anew where a runner was replaced."""
        actors = self.pool.actors
        if actors == self._connected:
            return
        for policy in self.config.policy_names:
            client = RunnersClient(actors, policy, self.pool.first(partial(_workers, policy)))
            address = self.learners.each(_free_address)[0]
            self.learners.each(partial(_open, self.config.weight_sync, client, address))
        self._connected = actors


def publish(learner: Any, bytes_at_once: int = 1 << 26) -> tuple[dict[str, list[ray.ObjectRef]], int]:
    """Puts the policies' weights into the object store, a few layers at a time; returns references and bytes.

    Collective: sharded parameters are gathered one by one. Only the first learner has something to return.
    """
    refs: dict[str, list[ray.ObjectRef]] = {name: [] for name in learner.policies}
    total = 0
    for name, policy in learner.policies.items():
        chunk: dict[str, NDArray[Any]] = {}
        held = 0
        for weight, array in policy.module.weights():
            if is_first():
                chunk[weight] = array
                total, held = total + array.nbytes, held + array.nbytes
            if held >= bytes_at_once:
                refs[name].append(ray.put(chunk))
                chunk, held = {}, 0
        refs[name] += [ray.put(chunk)] if chunk else []
    return refs, total


class RunnersClient:
    """The runners' engines of a policy as vLLM's trainer side sees them (``VLLMWeightSyncClient``).

    Args:
        actors: the runners.
        policy: whose engines.
        workers: processes of each of them.
    """

    def __init__(self, actors: list[ActorHandle], policy: str, workers: int) -> None:
        self.actors, self.policy, self.workers = actors, policy, workers

    @property
    def processes(self) -> int:
        """All that take part, with the learner that sends."""
        return 1 + len(self.actors) * self.workers

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Lets every engine join; each needs ranks of its own in the group."""
        first = init_info.get("rank_offset")
        infos = [
            init_info if first is None else {**init_info, "rank_offset": first + place * self.workers}
            for place in range(len(self.actors))
        ]
        calls = [self._call("init_weight_transfer_engine", {"init_info": info}) for info in infos]
        ray.get([actor.apply.remote(call) for actor, call in zip(self.actors, calls, strict=True)])

    def start_weight_update(self) -> None:
        """Wakes every engine and makes it ready for new weights."""
        self._all("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Lets every engine receive."""
        self._all("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Ends the update of every engine."""
        self._all("finish_weight_update")

    def _all(self, method: str, *arguments: Any) -> None:
        ray.get([actor.apply.remote(self._call(method, *arguments)) for actor in self.actors])

    def _call(self, method: str, *arguments: Any) -> partial[Any]:
        return partial(_on_engine, self.policy, method, *arguments)


class LearnerWeights:
    """A learner's weights as vLLM's trainer side reads them (``WeightSource``); sharded ones are gathered one by one.

    Args:
        module: the policy.
    """

    def __init__(self, module: Any) -> None:
        self.module = module

    def metadata(self) -> list[Any]:
        """Names, dtypes and shapes of what iteration yields."""
        from vllm.distributed.weight_transfer import ParamMeta

        return [
            ParamMeta(name, self._dtype(tensor), tuple(getattr(tensor, "ds_shape", tensor.shape)))
            for name, tensor in self.module._named().items()
        ]

    def sizes(self) -> list[int]:
        """The bytes of each tensor."""
        return [meta.dtype.itemsize * int(torch.Size(meta.shape).numel()) for meta in self.metadata()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.module._named().items():
            with whole(tensor):
                yield name, tensor.detach().to(self._dtype(tensor), copy=True)

    def _dtype(self, tensor: Tensor) -> torch.dtype:
        dtype: torch.dtype = self.module.dtype if tensor.is_floating_point() else tensor.dtype
        return dtype


def _on_engine(policy: str, method: str, *call: Any) -> Any:
    """Calls a method of vLLM on a runner's engine of a policy; bound by ``partial``, so that the runner comes last."""
    *arguments, runner = call
    assert isinstance(runner, LLMEnvRunner)
    engine: Any = runner.engines[policy]
    if method == "init_weight_transfer_engine":
        engine.llm.shutdown_weight_transfer_engine()  # a group with a runner that was lost
    if method == "start_weight_update":
        engine.wake("weights")
    return getattr(engine.llm, method)(*arguments)


def _free_address(learner: Any) -> tuple[str, int]:
    with socket.socket() as free:
        free.bind(("", 0))
        return ray.util.get_node_ip_address(), int(free.getsockname()[1])


def _workers(policy: str, runner: LLMEnvRunner) -> int:
    """How many processes an engine has."""
    engine: Any = runner.engines[policy]
    return int(engine.llm.llm_engine.vllm_config.parallel_config.world_size)


def _open(way: str, client: RunnersClient, address: tuple[str, int], learner: Any) -> None:
    """Opens the learner's end for a policy; the first learner sends, the others gather with it."""
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    ends = learner.__dict__.setdefault("transfers", {})
    if client.policy in ends:
        ends.pop(client.policy).shutdown()
    rank = 0 if is_first() else 1 + learner._learner_index
    source = LearnerWeights(learner.policies[client.policy].module)
    info: Any = NCCLTrainerInitInfo(*address, client.processes, rank=rank) if way == "nccl" else _ipc(rank, source)
    ends[client.policy] = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


def _ipc(rank: int, source: LearnerWeights) -> Any:
    """What vLLM is told for IPC; its buffer must hold every tensor whole, and 1 GiB holds not all embeddings."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    room = max(IPCTrainerInitInfo.packed_buffer_size_bytes, *source.sizes())
    return IPCTrainerInitInfo(rank=rank, packed=True, packed_buffer_size_bytes=room)


def _release(learner: Any) -> None:
    torch.cuda.empty_cache()


def _send(learner: Any) -> int:
    """Sends the weights of every policy; returns their bytes."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # vLLM reads on streams of its own, which do not wait for the last step
    for transfer in learner.transfers.values():
        transfer.send_weights()
    return sum(sum(transfer.source.sizes()) for transfer in learner.transfers.values())
