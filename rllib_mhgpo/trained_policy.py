"""A policy as a learner trains it: its model, its reference, how its rows are computed, what is known of its engine.

Not the loop over optimiser steps and not a loss. The one idea: a learner has one of these a policy, and a row belongs
to the one that its agent follows.
"""

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rllib_mhgpo.micro_batches import Laid, MicroBatches
from rllib_mhgpo.modules import LLMRLModule
from rllib_mhgpo.modules.scoring import work_of
from rllib_mhgpo.packing import right_pad
from rllib_mhgpo.sharding import cast_parameters, copy_weights, shard_frozen, summed
from rllib_mhgpo.train_batch import NOTHING, MicroBatch, TrainBatch

COUNTERS = ("skipped_in_a_row", "engine_differs")
ENGINE_TOLERANCE = 1e-3
"""Where engine and learner differ by more in the mean, log-probabilities are computed anew before an update."""

log = logging.getLogger(__name__)


class TrainedPolicy:
    """One of a learner's policies.

    Args:
        name: of the policy and its module.
        module: not yet spread over learners.
        config: the run's, with what this policy has of its own.

    Attributes:
        llm: the model that is trained.
        micro: cuts its rows into micro-batches.
        reference: the frozen policy that the run began with, where the loss needs one; None with adapters, without
            which the model is the reference.
        grad_norms, skipped: of this update's optimiser steps: norms, and how many had none that was finite.
        skipped_in_a_row: the last of all steps so far that had none.
        engine_differs: the engine's log-probabilities were not the learner's, and are computed anew.
    """

    def __init__(self, name: str, module: LLMRLModule, config: Any, device: torch.device) -> None:
        self.name, self.module, self.config, self.device = name, module, config, device
        sharing, adapters = module.sharing(config.packing), (module.lora or {}).get("adapters", ())
        if sharing.mode != config.packing:
            log.warning("%s cannot share rows: packing is %s.", type(module.llm).__name__, sharing.mode)
        self.micro = MicroBatches(
            sharing, config.max_tokens_per_microbatch, adapters, work_of(module.llm), device, bool(config.zero_stage)
        )
        self.passes = 3 + config.uses_reference  # a backward pass is two
        copied = config.uses_reference and module.lora is None
        self.reference = copy.deepcopy(module.llm).requires_grad_(False) if copied else None
        self.skipped_in_a_row, self.engine_differs = 0, config.dtype != "float32"
        self.begin()

    @property
    def llm(self) -> torch.nn.Module:
        """The model that is trained."""
        llm: torch.nn.Module = self.module.llm
        return llm

    # --- an update ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Forgets the update before."""
        self.grad_norms: list[float] = []
        self.skipped, self.has_stepped = 0, False
        self.micro.counts.clear()

    def note_step(self, norm: float | None) -> None:
        """Counts an optimiser step and its gradient's norm, None where it or a loss was not finite."""
        self.skipped += norm is None
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if norm is None else 0
        self.grad_norms += [] if norm is None else [norm]

    def watch_engine(
        self, batch: TrainBatch, rows: NDArray[np.int64], numbers: Mapping[str, NDArray[np.float64]]
    ) -> None:
        """Notes whether the engine's log-probabilities were the learner's, at the first step alone; collective."""
        if self.has_stepped:
            return
        self.has_stepped = True
        apart = float(numbers.get("engine_logprob_diff", np.zeros(1)).sum())
        total, count = summed([apart, batch.num_said(rows)], self.device)
        if count:
            self.engine_differs = not total <= count * ENGINE_TOLERANCE  # a NaN differs

    @property
    def recomputes(self) -> bool:
        """Whether log-probabilities before an update are the learner's, in its own layout, and not the engine's.

        In bfloat16 two layouts of the same tokens differ by up to 0.2.
        """
        return bool(self.config.rollout_is_cap or self.engine_differs)

    # --- what the policy says of responses ---------------------------------------------------------------------------

    def forward(self, laid: Laid, old_logprobs: Sequence[NDArray[np.float32]]) -> MicroBatch:
        """Runs policy and reference on a micro-batch."""
        batch, rows, tensors, mask = laid
        old_logprobs = old_logprobs if batch is not NOTHING else NOTHING.logprobs
        self._act_as(laid)
        tensors["entropy_grad"] = getattr(self.config, "entropy_coeff", 0.0) > 0
        out = self.module.forward_train(tensors)
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

    def score(
        self, llm: torch.nn.Module, batch: TrainBatch, rows: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.int64], Tensor, Tensor]]:
        """Yields, a micro-batch at a time, which of the rows, a model's log-probabilities of them and mask, (b, R)."""
        for part, _ in self.micro.in_step(batch, rows):
            laid = self.micro.lay_out(batch, rows, part)
            self._act_as(laid)
            logp = self._logp(llm, laid.tensors, laid.mask)
            if part.rows:
                yield part.sequences, logp, laid.mask

    def fill(
        self, result: list[NDArray[np.float32]], llm: torch.nn.Module, batch: TrainBatch, rows: NDArray[np.int64]
    ) -> None:
        """Puts a model's log-probabilities of some rows in their places."""
        for part, logp, _ in self.score(llm, batch, rows):
            for row, values in zip(rows[part].tolist(), logp.cpu().numpy(), strict=True):
                result[row] = values[: len(batch.responses[row])]

    @contextmanager
    def as_reference(self) -> Iterator[torch.nn.Module]:
        """The context in which the model it gives is the policy that the run began with."""
        if self.reference is not None:
            yield self.reference
            return
        with self.module.without_adapters():
            yield self.llm

    # --- the reference, and what a checkpoint holds ------------------------------------------------------------------

    def shard_reference(self) -> None:
        """Spreads the reference as the model is, which has been spread before."""
        if self.reference is not None and self.config.zero_stage == 3:
            shard_frozen(self.reference, self.config.deepspeed, self.module.dtype)
        elif self.reference is not None and self.config.zero_stage:
            cast_parameters(self.reference, self.module.dtype)

    def refresh_reference(self) -> None:
        """Makes the policy its own reference."""
        if self.reference is not None:
            copy_weights(self.llm, self.reference)

    def state(self) -> dict[str, Any]:
        """Returns what is counted, and the reference where it moves."""
        state: dict[str, Any] = {name: getattr(self, name) for name in COUNTERS}
        if self.config.reference_refresh and self.reference is not None:
            state["reference"] = {name: tensor.cpu() for name, tensor in self.reference.state_dict().items()}
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Takes what :meth:`state` returned."""
        for name in COUNTERS:
            setattr(self, name, state.get(name, getattr(self, name)))
        if "reference" in state and self.reference is not None:
            self.reference.load_state_dict(state["reference"])

    # --- inside ------------------------------------------------------------------------------------------------------

    def _logp(self, llm: torch.nn.Module, tensors: Mapping[str, Any], mask: Tensor) -> Tensor:
        with torch.no_grad():
            return self.module.logprobs(llm, tensors)[0].masked_fill(~mask, 0.0)

    def _reference_logp(self, tensors: Mapping[str, Any], mask: Tensor) -> Tensor:
        with self.as_reference() as reference:
            return self._logp(reference, tensors, mask)

    def _act_as(self, laid: Laid) -> None:
        """Turns to the adapter of the agent whose rows these are."""
        if laid.batch.agents:
            self.module.act_as(laid.batch.agents[laid.rows[0]])

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device)
