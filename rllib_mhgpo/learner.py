"""The learner: owns module, optimiser and micro-batches, and knows no loss.

A batch comes with every advantage and every denominator already in it, so that the sum over micro-batches and learners
is the gradient of the whole. The algorithm's hook turns log-probabilities into the loss of a micro-batch.
"""

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.rllib.core import COMPONENT_OPTIMIZER, DEFAULT_MODULE_ID
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from torch import Tensor

from rllib_mhgpo.credit import along_trajectories
from rllib_mhgpo.micro_batches import EMPTY, Laid, MicroBatches
from rllib_mhgpo.modules import LLMRLModule
from rllib_mhgpo.modules.scoring import matmul_rate, work_of
from rllib_mhgpo.packing import Rows, right_pad
from rllib_mhgpo.sharding import (
    Replica,
    ZeroShard,
    cast_parameters,
    copy_weights,
    is_first,
    largest,
    leave_group,
    shard_frozen,
    summed,
)
from rllib_mhgpo.train_batch import NOTHING, MicroBatch, TrainBatch

COUNTERS = ("num_updates", "skipped_in_a_row", "engine_differs")
ENGINE_TOLERANCE = 1e-3
"""Where engine and learner differ by more in the mean, log-probabilities are computed anew before an update."""


log = logging.getLogger(__name__)


class LLMLearner(TorchLearner):
    """Trains one language model; a subclass gives :meth:`compute_loss_for_module`."""

    def build(self) -> None:
        """Builds module, optimiser and, where the loss needs one, the frozen reference policy."""
        super().build()
        self.num_updates = self.skipped_in_a_row = 0
        self.is_restored = False
        self.engine_differs = self.config.dtype != "float32"

    def _make_modules_ddp_if_necessary(self) -> None:
        """Makes of each model a replica or a shard; RLlib's DDP would average what has to be summed."""
        config, policy = self.config, self._policy()
        sharing, adapters = policy.sharing(config.packing), (config.lora or {}).get("adapters", ())
        if sharing.mode != config.packing:
            log.warning("%s cannot share rows: packing is %s.", type(policy.llm).__name__, sharing.mode)
        self.micro = MicroBatches(
            sharing, config.max_tokens_per_microbatch, adapters, work_of(policy.llm), self._device
        )
        self.flops_per_s = matmul_rate(self._device, policy.dtype)
        self.passes = 3 + config.uses_reference  # a backward pass is two
        for module_id in self.module.keys():  # noqa: SIM118  # a MultiRLModule is no dict
            if config.gradient_checkpointing:
                self.module[module_id].checkpoint_gradients()
        copied = config.uses_reference and policy.lora is None  # the reference of adapters is the model without them
        self.reference = copy.deepcopy(policy.llm).requires_grad_(False) if copied else None
        self.not_finite: list[int] = []
        self.parallel: dict[str, Replica | ZeroShard] = {}
        for module_id in self.module.keys():  # noqa: SIM118
            model, optimizer = self.module[module_id].llm, self.get_optimizer(module_id)
            if config.zero_stage:
                shard = ZeroShard(model, optimizer, config.deepspeed, config.grad_clip, policy.dtype)
                self.module[module_id].forward_through = shard.engine.__call__
                self.parallel[module_id] = shard
            else:
                self.parallel[module_id] = Replica(model, optimizer, config.grad_clip)
        if config.zero_stage == 3 and self.reference is not None:
            shard_frozen(self.reference, config.deepspeed, policy.dtype)
        elif config.zero_stage and self.reference is not None:
            cast_parameters(self.reference, policy.dtype)

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """AdamW without weight decay."""
        params = [param for param in self.get_parameters(self._module[module_id]) if param.requires_grad]
        optimizer = torch.optim.AdamW(params, betas=(0.9, 0.999), weight_decay=0.0, fused=True)
        self.register_optimizer(
            module_id=module_id,
            optimizer=optimizer,
            params=params,
            lr_or_lr_schedule=self.learning_rate(module_id, config),
        )

    def learning_rate(self, module_id: str, config: Any) -> Any:
        """Returns the learning rate or schedule of a module."""
        return config.lr

    def apply(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a function with this learner; an error reaches the caller and frees the learners that wait for it."""
        try:
            return func(self, *args, **kwargs)
        except Exception:
            leave_group()
            raise

    def update(  # RLlib's many ways to hand over data are one here
        self, *, training_data: TrainingData, timesteps: dict[str, Any] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Runs ``config.num_epochs`` passes over a :class:`TrainBatch`, one optimiser step for each of its ``steps``.

        Returns:
            ``rows``: ``updated`` (B,), which rows were computed, and ``measured``, by name (B,) what the hook measured
            before each row's first step; ``grad_norms``: one a step; ``skipped_steps``: how many had a loss or a
            gradient that was not finite, ``skipped_in_a_row``: the last of them; ``not_finite``: the rows of the
            micro-batches with such a loss.
        """
        batch: TrainBatch = training_data.batch
        self._check_is_built()
        self.before_gradient_based_update(timesteps=timesteps or {})
        self._weights_seq_no += 1
        self.micro.counts.clear()
        old_logprobs = self.old_logprobs(batch)
        before = self.sums_before(batch, old_logprobs) if batch.previous is not None else np.zeros(0)
        first_pass: dict[str, NDArray[np.float64]] = {}
        self.not_finite = []
        norms, skipped = [], 0
        for epoch in range(self.config.num_epochs):
            factors = np.ones(len(batch))
            for step in range(largest(int(batch.steps.max(initial=-1)) + 1, self._device)):
                mine = batch.steps == step
                rows = self._step_rows(batch, step)
                numbers = self.accumulate(batch.weighted(factors), rows, old_logprobs)
                norm = self.step(is_empty=not largest(len(rows), self._device))
                if batch.previous is not None:
                    moved = np.where(mine, self.log_sums(batch, mine) - before, 0.0)
                    factors *= np.exp(along_trajectories(moved, batch.previous))
                skipped += norm is None
                self.skipped_in_a_row = self.skipped_in_a_row + 1 if norm is None else 0
                norms += [] if norm is None else [norm]
                beside = np.flatnonzero(mine & (batch.weights != 0))
                for computed, found in ((rows, numbers), (beside, self.step_beside(batch, beside))):
                    for name, values in found.items() if epoch == 0 else ():
                        first_pass.setdefault(name, np.zeros(len(batch)))[computed] = values
                if epoch == step == 0:
                    self._watch_engine(batch, rows, numbers)
        trained = {"updated": self.has_gradient(batch), "measured": first_pass}
        self.after_gradient_based_update(timesteps=timesteps or {})
        self._refresh_reference()
        return {
            "rows": trained,
            "grad_norms": norms,
            "skipped_steps": skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "not_finite": self.not_finite,
            "counts": {**self.micro.counts, "flops_per_s": self.flops_per_s},
        }

    def old_logprobs(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        """Returns log-probabilities before the update: the engine's, or in the layout of the update where they differ.

        In bfloat16 two layouts of the same tokens differ by up to 0.2.
        """
        if not (self.config.rollout_is_cap or self.engine_differs):
            return list(batch.logprobs)
        result = list(batch.logprobs)
        for step in range(largest(int(batch.steps.max(initial=-1)) + 1, self._device)):
            self._fill(result, self._policy().llm, batch, self._step_rows(batch, step))
        return result

    def _step_rows(self, batch: TrainBatch, step: int) -> NDArray[np.int64]:
        """The rows that an optimiser step computes."""
        return np.flatnonzero((batch.steps == step) & self.has_gradient(batch))

    def _watch_engine(
        self, batch: TrainBatch, rows: NDArray[np.int64], numbers: Mapping[str, NDArray[np.float64]]
    ) -> None:
        """Notes whether the engine's log-probabilities were the learner's, before the weights moved."""
        apart = float(numbers.get("engine_logprob_diff", np.zeros(1)).sum())
        total, count = summed([apart, batch.num_said(rows)], self._device)
        if count:
            self.engine_differs = not total <= count * ENGINE_TOLERANCE  # a NaN differs

    def step_beside(self, batch: TrainBatch, rows: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
        """Trains what is beside the policy (a critic) on the rows of a step; returns what was measured, as a hook."""
        return {}

    def has_gradient(self, batch: TrainBatch) -> NDArray[np.bool_]:
        """Which rows can move the weights, (B,); the others are not computed, and stay in the denominators.

        A subclass whose loss has terms beside the advantage overrides this.
        """
        return np.asarray((batch.weights != 0) & batch.with_advantage)

    def accumulate(
        self, batch: TrainBatch, rows: NDArray[np.int64], old_logprobs: Sequence[NDArray[np.float32]] | None = None
    ) -> dict[str, NDArray[np.float64]]:
        """Adds the gradient of these rows; returns what the hook measured, one number a row, by name."""
        numbers: dict[str, NDArray[np.float64]] = {}
        for place, is_last in self._in_step(self.micro.cut(batch, rows)):
            part = place.sequences
            loss, measured = self._loss(
                self.micro.lay_out(batch, rows, place, passes=self.passes), old_logprobs or batch.logprobs
            )
            if not torch.isfinite(loss):
                self.not_finite += rows[part].tolist()
                loss = loss * float("nan")  # so that the gradient is not finite either, and no learner makes the step
            self.parallel[DEFAULT_MODULE_ID].backward(loss, is_last)
            for name, values in measured.items() if len(part) else ():
                numbers.setdefault(name, np.zeros(len(rows)))[part] = values.double().cpu().numpy()
        return numbers

    def _loss(self, laid: Laid, old_logprobs: Sequence[NDArray[np.float32]]) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the hook's loss of a micro-batch."""
        found: tuple[Tensor, dict[str, Tensor]] = self.compute_loss_for_module(
            module_id=DEFAULT_MODULE_ID, config=self.config, batch=self.forward(laid, old_logprobs), fwd_out={}
        )
        return found

    def _in_step(self, parts: list[Rows]) -> Iterator[tuple[Rows, bool]]:
        """Yields micro-batches and whether each is the last; where models are sharded, as many on every learner.

        What is missing is empty.
        """
        count = largest(len(parts), self._device) if self.config.zero_stage else len(parts)
        for number in range(count):
            yield parts[number] if number < len(parts) else EMPTY, number == count - 1

    def forward(self, laid: Laid, old_logprobs: Sequence[NDArray[np.float32]]) -> MicroBatch:
        """Runs policy and reference on a micro-batch."""
        batch, rows, tensors, mask = laid
        old_logprobs = old_logprobs if batch is not NOTHING else NOTHING.logprobs
        self._act_as(laid)
        tensors["entropy_grad"] = getattr(self.config, "entropy_coeff", 0.0) > 0
        out = self.module[DEFAULT_MODULE_ID].forward_train(tensors)
        old = self._tensor(right_pad([old_logprobs[i] for i in rows], mask.shape[1]))
        engine = self._tensor(right_pad([batch.logprobs[i] for i in rows], mask.shape[1]))
        cap = self.config.rollout_is_cap
        return MicroBatch(
            logp=out["logp"].masked_fill(~mask, 0.0),
            entropy=out["entropy"].masked_fill(~mask, 0.0),
            ref_logp=self._reference_logp(tensors, mask) if self.config.uses_reference else None,
            old_logp=old,
            engine_logp=engine,
            importance=torch.exp(old - engine).clamp(max=cap) if cap else torch.ones_like(old),
            advantage=self._tensor(batch.advantage_rows(rows, mask.shape[1])),
            weight=self._tensor(batch.weights[rows].astype(np.float32))[:, None] * mask,
            mask=mask,
        )

    def logprobs(self, batch: TrainBatch, llm: torch.nn.Module | None = None) -> list[NDArray[np.float32]]:
        """Returns log-probabilities of all responses under the present policy, or under another model."""
        result: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(batch)
        self._fill(result, llm or self._policy().llm, batch, np.arange(len(batch)))
        return result

    def sums_before(self, batch: TrainBatch, old_logprobs: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
        """Returns the summed log-probabilities of all responses before an update, (B,); see :meth:`old_logprobs`."""
        if self.config.rollout_is_cap or self.engine_differs:
            steps = range(largest(int(batch.steps.max(initial=-1)) + 1, self._device))
            return np.asarray(sum(self.log_sums(batch, batch.steps == step) for step in steps))
        said = batch.said or [None] * len(batch)
        pairs = zip(old_logprobs, said, strict=True)
        return np.array([float((old if mask is None else old[mask]).sum()) for old, mask in pairs])

    def log_sums(self, batch: TrainBatch, mine: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Returns the summed log-probabilities of some responses under the present policy, (B,), 0 elsewhere."""
        sums, rows = np.zeros(len(batch)), np.flatnonzero(mine)
        for part, now, _ in self._passes(self._policy().llm, batch, rows):
            sums[rows[part]] = now.sum(1).double().cpu().numpy()
        return sums

    def reference_kl(self, batch: TrainBatch) -> NDArray[np.float64]:
        """Returns the sum over each response of ``log-probability when sampled - that of the reference``, (B,)."""
        with nullcontext() if self.reference is not None else self._policy().without_adapters():
            reference = self.logprobs(batch, self.reference)
        said = batch.said or [None] * len(batch)
        differences = [mine - ref for mine, ref in zip(batch.logprobs, reference, strict=True)]
        return np.array([float((d if s is None else d[s]).sum()) for d, s in zip(differences, said, strict=True)])

    def step(self, module_id: str = DEFAULT_MODULE_ID, is_empty: bool = False) -> float | None:
        """Makes a module's optimiser step; returns the gradient's norm, None when it or a loss was not finite."""
        return 0.0 if is_empty else self.parallel[module_id].step()

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Adds the reference policy where it moves; otherwise it is the policy that the run began with."""
        state: dict[str, Any] = super().get_state(*args, **kwargs)
        if COMPONENT_OPTIMIZER in state:
            state |= {name: getattr(self, name) for name in COUNTERS}
            if self.config.reference_refresh and self.reference is not None:
                state["reference"] = {name: tensor.cpu() for name, tensor in self.reference.state_dict().items()}
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes a state of :meth:`get_state`."""
        super().set_state(state)
        for name in COUNTERS:
            setattr(self, name, state.get(name, getattr(self, name)))
        if "reference" in state and self.reference is not None:
            self.reference.load_state_dict(state["reference"])

    def _get_optimizer_state(self) -> dict[str, Any]:
        """Nothing where optimisers are sharded: a checkpoint has every learner's :meth:`shards` instead."""
        return {} if self.config.zero_stage else dict(super()._get_optimizer_state())

    def shards(self) -> dict[str, NDArray[Any]]:
        """Returns this learner's parts of the sharded optimisers, by module and name."""
        return {
            f"{module_id}.{name}": array
            for module_id, parallel in self.parallel.items()
            if isinstance(parallel, ZeroShard)
            for name, array in parallel.state().items()
        }

    def set_shards(self, shards: Mapping[str, NDArray[Any]]) -> None:
        """Takes what :meth:`shards` returned on this learner."""
        for module_id, parallel in self.parallel.items():
            if isinstance(parallel, ZeroShard):
                start = f"{module_id}."
                mine = {name.removeprefix(start): shards[name] for name in shards if name.startswith(start)}
                parallel.load_state(mine)

    def publish(self, bytes_at_once: int = 1 << 26) -> tuple[list[ray.ObjectRef], int]:
        """Puts the policy's weights into the object store, a few layers at a time; returns references and bytes.

        Collective: sharded parameters are gathered one by one. Only the first learner has something to return.
        """
        refs: list[ray.ObjectRef] = []
        chunk: dict[str, NDArray[Any]] = {}
        total = held = 0
        for name, array in self._policy().weights():
            if is_first():
                chunk[name] = array
                total, held = total + array.nbytes, held + array.nbytes
            if held >= bytes_at_once:
                refs.append(ray.put(chunk))
                chunk, held = {}, 0
        return ([*refs, ray.put(chunk)] if chunk else refs), total

    def restore_from_path(self, path: Any, **kwargs: Any) -> None:
        """Takes a checkpoint; ``is_restored`` says whether it did, since RLlib asks remote learners for no answer."""
        self.is_restored = False
        super().restore_from_path(path, **kwargs)
        self.is_restored = True

    def place(self) -> tuple[str, tuple[int, ...]]:
        """Returns this learner's node and GPUs."""
        return ray.get_runtime_context().get_node_id(), tuple(ray.get_gpu_ids())

    def gather(self) -> None:
        """Makes the first learner hold sharded models whole, until :meth:`release`; collective."""
        for module_id in self.module.keys():  # noqa: SIM118
            self.module[module_id].gather(keep=is_first())

    def release(self) -> None:
        """Drops what :meth:`gather` holds."""
        for module_id in self.module.keys():  # noqa: SIM118
            self.module[module_id].gathered = {}

    def _refresh_reference(self) -> None:
        """Makes the policy its own reference, every ``reference_refresh`` updates."""
        self.num_updates += 1
        every = self.config.reference_refresh
        if self.reference is not None and every and self.num_updates % every == 0:
            copy_weights(self._policy().llm, self.reference)

    def _policy(self) -> LLMRLModule:
        policy: LLMRLModule = self.module[DEFAULT_MODULE_ID]
        return policy

    def _logp(self, llm: torch.nn.Module, tensors: Mapping[str, Any], mask: Tensor) -> Tensor:
        with torch.no_grad():
            return self._policy().logprobs(llm, tensors)[0].masked_fill(~mask, 0.0)

    def _reference_logp(self, tensors: Mapping[str, Any], mask: Tensor) -> Tensor:
        """Log-probabilities of the policy that the run began with."""
        if self.reference is not None:
            return self._logp(self.reference, tensors, mask)
        with self._policy().without_adapters():
            return self._logp(self._policy().llm, tensors, mask)

    def _act_as(self, laid: Laid) -> None:
        """Turns to the adapter of the agent whose rows these are."""
        if laid.batch.agents:
            self._policy().act_as(laid.batch.agents[laid.rows[0]])

    def _passes(
        self, llm: torch.nn.Module, batch: TrainBatch, rows: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], Tensor, Tensor]]:
        """Yields, a micro-batch at a time, which of the rows, their log-probabilities and mask, (b, R)."""
        for part, _ in self._in_step(self.micro.cut(batch, rows)):
            laid = self.micro.lay_out(batch, rows, part)
            self._act_as(laid)
            logp = self._logp(llm, laid.tensors, laid.mask)
            if part.rows:
                yield part.sequences, logp, laid.mask

    def _fill(
        self, result: list[NDArray[np.float32]], llm: torch.nn.Module, batch: TrainBatch, rows: NDArray[np.int64]
    ) -> None:
        """Puts a model's log-probabilities of some rows in their places."""
        for part, logp, _ in self._passes(llm, batch, rows):
            for row, values in zip(rows[part].tolist(), logp.cpu().numpy(), strict=True):
                result[row] = values[: len(batch.responses[row])]

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)
