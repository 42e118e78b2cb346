"""The learner: owns module, optimiser and micro-batches, and knows no loss.

A batch comes with every advantage and every denominator already in it, so that the sum over micro-batches is the
gradient of the whole. The algorithm's hook turns log-probabilities into the loss of a micro-batch.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from torch import Tensor

from rllib_mhgpo.modules import LLMRLModule
from rllib_mhgpo.modules.llm_module import response_logprobs
from rllib_mhgpo.packing import micro_batches, rectangle, right_pad
from rllib_mhgpo.spaces import Tokens


@dataclass(frozen=True)
class TrainBatch:
    """B generations and what the loss needs to know of each.

    Attributes:
        prompts, responses: token ids, (P_i,) and (R_i,) each.
        logprobs: of the responses when they were sampled, (R_i,) each.
        advantages: (B,).
        weights: what one token weighs in its optimiser step's objective, (B,); 0 leaves a generation out.
        steps: which optimiser step of an epoch a generation belongs to, (B,).
    """

    prompts: Sequence[Tokens]
    responses: Sequence[Tokens]
    logprobs: Sequence[NDArray[np.float32]]
    advantages: NDArray[np.float64]
    weights: NDArray[np.float64]
    steps: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class MicroBatch:
    """What a loss hook sees of b generations; tensors are (b, R) unless said otherwise, 0 past a response's end.

    Attributes:
        logp, entropy: of the policy being trained.
        ref_logp: of the frozen reference, None where the loss does not use it.
        old_logp: recorded at sampling.
        advantage: (b, 1).
        weight: 0 on columns that carry no loss.
        mask: True where a response token stands.
    """

    logp: Tensor
    entropy: Tensor
    ref_logp: Tensor | None
    old_logp: Tensor
    advantage: Tensor
    weight: Tensor
    mask: Tensor


class LLMLearner(TorchLearner):
    """Trains one language model; a subclass gives :meth:`compute_loss_for_module`."""

    def build(self) -> None:
        """Builds module, optimiser and, where the loss needs one, the frozen reference policy."""
        super().build()
        self.reference = self._make_reference() if self.config.uses_reference else None

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """AdamW without weight decay."""
        params = self.get_parameters(self._module[module_id])
        optimizer = torch.optim.AdamW(params, betas=(0.9, 0.999), weight_decay=0.0)
        self.register_optimizer(
            module_id=module_id, optimizer=optimizer, params=params, lr_or_lr_schedule=config.lr
        )

    def update(  # type: ignore[override]  # RLlib's many ways to hand over data are one here
        self, *, training_data: TrainingData, timesteps: dict[str, Any] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Runs ``config.num_epochs`` passes over a :class:`TrainBatch`, one optimiser step for each of its ``steps``.

        Returns:
            ``per_generation``: by name (B,) what the hook measured before each row's first step; ``grad_norms``: one a
            step; ``skipped_steps``: how many had a gradient that was not finite.
        """
        batch: TrainBatch = training_data.batch
        self._check_is_built()
        self.before_gradient_based_update(timesteps=timesteps or {})
        self._weights_seq_no += 1
        first_pass: dict[str, NDArray[np.float64]] = {}
        norms, skipped = [], 0
        for epoch in range(self.config.num_epochs):
            for step in np.unique(batch.steps):
                rows = np.flatnonzero((batch.steps == step) & (batch.weights != 0))
                numbers = self.accumulate(batch, rows)
                if epoch == 0:
                    for name, values in numbers.items():
                        first_pass.setdefault(name, np.zeros(len(batch)))[rows] = values
                norm = self.step()
                skipped += norm is None
                norms += [] if norm is None else [norm]
        self.after_gradient_based_update(timesteps=timesteps or {})
        return {"per_generation": first_pass, "grad_norms": norms, "skipped_steps": skipped}

    def accumulate(self, batch: TrainBatch, rows: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
        """Adds the gradient of these rows; returns what the hook measured, one number a row, by name; no rows, no numbers."""
        prompt_lengths = np.array([len(batch.prompts[i]) for i in rows], dtype=np.int64)
        response_lengths = np.array([len(batch.responses[i]) for i in rows], dtype=np.int64)
        numbers: dict[str, NDArray[np.float64]] = {}
        for part in micro_batches(prompt_lengths, response_lengths, self.config.max_tokens_per_microbatch):
            micro = self.forward(batch, rows[part])
            loss, measured = self.compute_loss_for_module(
                module_id=DEFAULT_MODULE_ID, config=self.config, batch=micro, fwd_out={}
            )
            loss.backward()
            for name, values in measured.items():
                numbers.setdefault(name, np.zeros(len(rows)))[part] = values.double().cpu().numpy()
        return numbers

    def forward(self, batch: TrainBatch, rows: NDArray[np.int64]) -> MicroBatch:
        """Runs policy and reference on some rows."""
        responses = [batch.responses[i] for i in rows]
        layout = rectangle([batch.prompts[i] for i in rows], responses)
        tensors: dict[str, Any] = {
            "tokens": self._tensor(layout.tokens),
            "attention": self._tensor(layout.attention),
            "positions": self._tensor(layout.positions),
            "prompt_width": layout.prompt_width,
        }
        mask = tensors["attention"][:, layout.prompt_width :].bool()
        out = self.module[DEFAULT_MODULE_ID].forward_train(tensors)
        reference = self._reference_logp(tensors)
        return MicroBatch(
            logp=out["logp"].masked_fill(~mask, 0.0),
            entropy=out["entropy"].masked_fill(~mask, 0.0),
            ref_logp=None if reference is None else reference.masked_fill(~mask, 0.0),
            old_logp=self._tensor(right_pad([batch.logprobs[i] for i in rows], mask.shape[1])),
            advantage=self._tensor(batch.advantages[rows].astype(np.float32))[:, None],
            weight=self._tensor(batch.weights[rows].astype(np.float32))[:, None] * mask,
            mask=mask,
        )

    def step(self) -> float | None:
        """Clips the gradient and steps the optimiser; returns the gradient's norm, None when it was not finite.

        A gradient that is not finite changes nothing, and neither does one that is zero throughout.
        """
        optimizer = self.get_optimizer(DEFAULT_MODULE_ID)
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = float(torch.nn.utils.clip_grad_norm_(params, self.config.grad_clip or float("inf")))
        if 0.0 < norm < float("inf"):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm if np.isfinite(norm) else None

    def _reference_logp(self, tensors: Mapping[str, Any]) -> Tensor | None:
        if self.reference is None:
            return None
        module: LLMRLModule = self.module[DEFAULT_MODULE_ID]
        with torch.no_grad():
            return response_logprobs(self.reference, tensors, module.temperature, module.precision())["logp"]

    def _make_reference(self) -> torch.nn.Module:
        reference = copy.deepcopy(self.module[DEFAULT_MODULE_ID].llm)
        return reference.requires_grad_(False)

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)
