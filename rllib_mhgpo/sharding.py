"""How several learners make one step: gradients summed over replicas, or a model sharded by DeepSpeed's ZeRO.

Every loss comes with the denominators of the whole batch, so gradients are summed over learners, never averaged. All
functions here but :meth:`backward` are collective: every learner calls them, in the same order.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from rllib_mhgpo.errors import CheckpointError, ConfigError
from rllib_mhgpo.footprint import REDUCE_BUCKET


def num_learners() -> int:
    """How many learners there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def is_first() -> bool:
    """Whether this is the first learner."""
    return num_learners() == 1 or dist.get_rank() == 0


def largest(value: int, device: torch.device) -> int:
    """Returns the largest of all learners' values."""
    if num_learners() == 1:
        return value
    shared = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return int(shared.item())


def summed(values: Sequence[float], device: torch.device) -> list[float]:
    """Returns the sums of all learners' values."""
    if num_learners() == 1:
        return list(values)
    shared = torch.tensor(values, dtype=torch.float32, device=device)
    dist.all_reduce(shared)
    return [float(value) for value in shared.tolist()]


def leave_group() -> None:
    """Ends this learner's part in collective calls, so that no other waits for it."""
    if num_learners() > 1:
        dist.destroy_process_group()


class Replica:
    """A whole model on each learner.

    Args:
        optimizer: of its trained parameters.
        grad_clip: largest norm of the gradient, None for any.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, grad_clip: float | None) -> None:
        self.model, self.optimizer, self.grad_clip = model, optimizer, grad_clip

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Adds a micro-batch's gradient; the last one of a step is told."""
        torch.autograd.backward(loss)

    def step(self) -> float | None:
        """Clips and steps; returns the gradient's norm, None when it was not finite.

        A gradient that is not finite changes nothing, and neither does one that is zero throughout.
        """
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        if num_learners() > 1:
            has_gradient = torch.tensor([param.grad is not None for param in params], device=params[0].device).int()
            dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX)
            for param in (param for param, has in zip(params, has_gradient.tolist(), strict=True) if has):
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
                dist.all_reduce(param.grad)
        params = [param for param in params if param.grad is not None]
        norm = float(torch.nn.utils.clip_grad_norm_(params, self.grad_clip or float("inf")))
        if 0.0 < norm < float("inf"):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm if np.isfinite(norm) else None


class ZeroShard:
    """A model whose optimiser states (stage 1), gradients (2) and parameters (3) are spread over the learners.

    Args:
        optimizer: a torch optimiser of the model's parameters; DeepSpeed puts its own flat ones in their place.
        settings: the config key ``deepspeed``.
        dtype: float32, or bfloat16 for parameters and gradients with float32 masters.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        settings: Mapping[str, Any],
        grad_clip: float | None,
        dtype: torch.dtype,
    ) -> None:
        deepspeed = import_deepspeed()
        self.stage = int(settings["zero_stage"])
        config = deepspeed_config(settings, grad_clip, dtype, count_trained(model))
        with kept_buffers(model):
            self.engine, self.optimizer, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=config, dist_init_required=False
            )
        if hasattr(self.optimizer, "check_grad_overflow"):
            self.optimizer.check_grad_overflow = True

    def backward(self, loss: Tensor, is_last: bool) -> None:
        """Adds a micro-batch's gradient; every learner makes as many calls, and all tell the last one of a step."""
        self.engine.set_gradient_accumulation_boundary(is_last)
        # ranks are averaged by DeepSpeed
        self.engine.backward(loss * num_learners(), scale_wrt_gas=False)

    def step(self) -> float | None:
        """Clips and steps; returns the gradient's norm, None when it was not finite, which changes nothing."""
        self.engine.step()
        return float(self.engine.get_global_grad_norm()) if self.engine.was_step_applied() else None

    def state(self) -> dict[str, NDArray[Any]]:
        """Returns this learner's part of the master weights and of the optimiser's state, by name."""
        return {name: tensor.detach().cpu().numpy() for name, tensor in self._own()}

    def load_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Takes what :meth:`state` returned on the same learner of as many."""
        for master in self._masters():
            if not self.optimizer.optimizer.state[master]:
                moments = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
                self.optimizer.optimizer.state[master] = {"step": torch.tensor(0.0), **moments}
        mine = dict(self._own())
        if {name: tuple(t.shape) for name, t in mine.items()} != {name: a.shape for name, a in state.items()}:
            raise CheckpointError(
                f"optimiser shards do not fit: expected {sum(t.numel() for t in mine.values()):,} numbers on this "
                f"learner, found {sum(a.size for a in state.values()):,}; restore with as many learners and the ZeRO "
                "stage of the run that wrote the checkpoint."
            )
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(torch.from_numpy(np.require(state[name], requirements="W")))

    def _masters(self) -> list[Tensor]:
        zero = self.optimizer
        flat = zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        return list(flat)

    def _own(self) -> Iterator[tuple[str, Tensor]]:
        for number, master in enumerate(self._masters()):
            yield f"{number}.master", master
            for name, value in sorted(self.optimizer.optimizer.state[master].items()):
                yield f"{number}.{name}", value


def count_trained(model: torch.nn.Module) -> int:
    """Returns how many parameters are trained, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def deepspeed_config(
    settings: Mapping[str, Any], grad_clip: float | None, dtype: torch.dtype, parameters: int
) -> dict[str, Any]:
    """Returns DeepSpeed's configuration for the config key ``deepspeed`` and a model of so many trained parameters."""
    own = ("offload_optimizer", "offload_param")
    zero = {name: {"device": "cpu"} if settings[name] is True else settings[name] for name in own if settings.get(name)}
    more = dict(settings.get("config", {}))
    # allocated in every micro-batch, and with a seed filled, since torch is deterministic then
    zero["reduce_bucket_size"] = max(1, min(REDUCE_BUCKET, parameters))
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": grad_clip or 0.0,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **more,
        "zero_optimization": {"stage": settings["zero_stage"], **zero, **more.get("zero_optimization", {})},
    }


def import_deepspeed() -> Any:
    """Imports DeepSpeed for the device that is there.

    Raises:
        ConfigError: it is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    os.environ.setdefault("LOCAL_RANK", "0")  # an actor sees its own device as the first
    try:
        import deepspeed
    except ImportError:
        raise ConfigError(
            "config: deepspeed: expected the package deepspeed, found none; pip install 'rllib-mhgpo[deepspeed]'."
        ) from None
    return deepspeed


def whole(param: Tensor, writer: int | None = None) -> AbstractContextManager[Any]:
    """The context in which a parameter that may be sharded is whole; what learner ``writer`` writes into it is kept."""
    if not hasattr(param, "ds_id"):
        return nullcontext()
    context: AbstractContextManager[Any] = import_deepspeed().zero.GatheredParameters([param], modifier_rank=writer)
    return context


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether the model's parameters are spread over the learners."""
    return any(hasattr(param, "ds_id") for param in model.parameters())


def shard_frozen(model: torch.nn.Module, settings: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Spreads a model that is not trained over the learners."""
    config = deepspeed_config({**settings, "offload_optimizer": None}, None, dtype, 1)
    with kept_buffers(model):
        import_deepspeed().initialize(model=model, config=config, dist_init_required=False)


def cast_parameters(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Gives parameters a type and leaves buffers alone: positions in bfloat16 would be other positions."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


@contextmanager
def kept_buffers(model: torch.nn.Module) -> Iterator[None]:
    """Puts back the buffers that DeepSpeed casts together with the parameters."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    yield
    for name, buffer in model.named_buffers():
        buffer.data = before[name].to(buffer.device)


def copy_weights(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Copies parameters and buffers between models of one architecture that are sharded alike."""
    mine, its = ([*model.parameters(), *model.buffers()] for model in (source, target))
    with torch.no_grad():
        for given, taken in zip(mine, its, strict=True):
            getattr(taken, "ds_tensor", taken).copy_(getattr(given, "ds_tensor", given))
