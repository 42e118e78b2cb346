"""The learner: owns module, optimiser and micro-batches, and knows no loss.

A batch comes with every advantage and every denominator already in it, so that the sum over micro-batches is the
gradient of the whole. The algorithm's hook turns log-probabilities into the loss of a micro-batch.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from ray.rllib.core import COMPONENT_OPTIMIZER, DEFAULT_MODULE_ID
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from torch import Tensor

from rllib_mhgpo.credit import along_trajectories
from rllib_mhgpo.modules import LLMRLModule
from rllib_mhgpo.modules.llm_module import response_logprobs
from rllib_mhgpo.packing import micro_batches, rectangle, right_pad
from rllib_mhgpo.spaces import Tokens
from rllib_mhgpo.tree import Generation


@dataclass(frozen=True)
class TrainBatch:
    """B generations and what the loss needs to know of each.

    Attributes:
        prompts, responses: token ids, (P_i,) and (R_i,) each.
        logprobs: of the responses when they were sampled, (R_i,) each.
        advantages: one a response, (B,), or one a token, (R_i,) each.
        weights: what one token weighs in its optimiser step's objective, (B,); 0 leaves a generation out.
        steps: which optimiser step of an epoch a generation belongs to, (B,).
        said: which tokens of each response the policy said, (R_i,) each, None where it said all.
        values, returns: of a critic before the update, and its targets, (R_i,) each; empty without a critic.
        critic_prompts: what the critic reads before each response; empty: the prompts.
        previous: the row before each in its trajectory or -1, (B,), where roles are updated one after the other.
    """

    prompts: Sequence[Tokens]
    responses: Sequence[Tokens]
    logprobs: Sequence[NDArray[np.float32]]
    advantages: NDArray[np.float64] | Sequence[NDArray[np.float64]]
    weights: NDArray[np.float64]
    steps: NDArray[np.int64]
    said: Sequence[NDArray[np.bool_] | None] = ()
    values: Sequence[NDArray[np.float64]] = ()
    returns: Sequence[NDArray[np.float64]] = ()
    critic_prompts: Sequence[Tokens] = ()
    previous: NDArray[np.int64] | None = None

    @classmethod
    def of(
        cls,
        generations: Sequence[Generation],
        advantages: NDArray[np.float64] | Sequence[NDArray[np.float64]],
        weights: NDArray[np.float64],
        steps: NDArray[np.int64],
        **more: Any,
    ) -> "TrainBatch":
        """Takes tokens and log-probabilities from generations."""
        return cls(
            prompts=[generation.prompt for generation in generations],
            responses=[generation.response for generation in generations],
            logprobs=[generation.logprobs for generation in generations],
            advantages=advantages,
            weights=weights,
            steps=steps,
            said=[generation.said for generation in generations],
            **more,
        )

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def with_advantage(self) -> NDArray[np.bool_]:
        """Which responses have an advantage other than 0, (B,)."""
        if isinstance(self.advantages, np.ndarray):
            return np.asarray(self.advantages != 0)
        return np.array([bool(np.any(values)) for values in self.advantages], dtype=bool)

    def weighted(self, factors: NDArray[np.float64]) -> "TrainBatch":
        """Returns the batch with every response's advantages multiplied by its factor, (B,)."""
        if isinstance(self.advantages, np.ndarray):
            return replace(self, advantages=self.advantages * factors)
        return replace(self, advantages=[a * f for a, f in zip(self.advantages, factors, strict=True)])

    def advantage_rows(self, rows: NDArray[np.int64], width: int) -> NDArray[np.float32]:
        """Advantages of some responses, (b, 1) where they are the same for all tokens, else (b, width)."""
        if isinstance(self.advantages, np.ndarray):
            return self.advantages[rows].astype(np.float32)[:, None]
        return right_pad([self.advantages[i].astype(np.float32) for i in rows], width)


@dataclass(frozen=True)
class MicroBatch:
    """What a loss hook sees of b generations; tensors are (b, R) unless said otherwise, 0 past a response's end.

    Attributes:
        logp, entropy: of the policy being trained.
        ref_logp: of the frozen reference, None where the loss does not use it.
        old_logp: of the policy before the update: recorded at sampling, or recomputed by the learner.
        engine_logp: recorded at sampling.
        importance: truncated importance weight of learner over engine, 1 where it is off.
        advantage: (b, 1) or (b, R).
        weight: 0 on columns that carry no loss.
        mask: True on response tokens that the policy said.
    """

    logp: Tensor
    entropy: Tensor
    ref_logp: Tensor | None
    old_logp: Tensor
    engine_logp: Tensor
    importance: Tensor
    advantage: Tensor
    weight: Tensor
    mask: Tensor


class LLMLearner(TorchLearner):
    """Trains one language model; a subclass gives :meth:`compute_loss_for_module`."""

    def build(self) -> None:
        """Builds module, optimiser and, where the loss needs one, the frozen reference policy."""
        super().build()
        self.reference = copy.deepcopy(self._policy().llm).requires_grad_(False) if self.config.uses_reference else None
        self.num_updates = 0

    def configure_optimizers_for_module(self, module_id: str, config: Any = None) -> None:
        """AdamW without weight decay."""
        params = self.get_parameters(self._module[module_id])
        optimizer = torch.optim.AdamW(params, betas=(0.9, 0.999), weight_decay=0.0)
        self.register_optimizer(
            module_id=module_id,
            optimizer=optimizer,
            params=params,
            lr_or_lr_schedule=self.learning_rate(module_id, config),
        )

    def learning_rate(self, module_id: str, config: Any) -> Any:
        """Returns the learning rate or schedule of a module."""
        return config.lr

    def update(  # RLlib's many ways to hand over data are one here
        self, *, training_data: TrainingData, timesteps: dict[str, Any] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Runs ``config.num_epochs`` passes over a :class:`TrainBatch`, one optimiser step for each of its ``steps``.

        Returns:
            ``rows``: ``updated`` (B,), which rows were computed, and ``measured``, by name (B,) what the hook measured
            before each row's first step; ``grad_norms``: one a step; ``skipped_steps``: how many had a gradient that
            was not finite.
        """
        batch: TrainBatch = training_data.batch
        self._check_is_built()
        self.before_gradient_based_update(timesteps=timesteps or {})
        self._weights_seq_no += 1
        old_logprobs = self.logprobs(batch) if self.config.rollout_is_cap else batch.logprobs
        first_pass: dict[str, NDArray[np.float64]] = {}
        norms, skipped = [], 0
        for epoch in range(self.config.num_epochs):
            factors = np.ones(len(batch))
            for step in np.unique(batch.steps):
                mine = batch.steps == step
                rows = np.flatnonzero(mine & self.has_gradient(batch))
                numbers = self.accumulate(batch.weighted(factors), rows, old_logprobs)
                norm = self.step()
                if batch.previous is not None:
                    factors *= np.exp(along_trajectories(self.log_ratios(batch, mine, old_logprobs), batch.previous))
                skipped += norm is None
                norms += [] if norm is None else [norm]
                beside = np.flatnonzero(mine & (batch.weights != 0))
                for computed, found in ((rows, numbers), (beside, self.step_beside(batch, beside))):
                    for name, values in found.items() if epoch == 0 else ():
                        first_pass.setdefault(name, np.zeros(len(batch)))[computed] = values
        self.after_gradient_based_update(timesteps=timesteps or {})
        self._refresh_reference()
        trained = {"updated": self.has_gradient(batch), "measured": first_pass}
        return {"rows": trained, "grad_norms": norms, "skipped_steps": skipped}

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
        for part in self._parts(batch, rows):
            micro = self.forward(batch, rows[part], old_logprobs or batch.logprobs)
            loss, measured = self.compute_loss_for_module(
                module_id=DEFAULT_MODULE_ID, config=self.config, batch=micro, fwd_out={}
            )
            loss.backward()
            for name, values in measured.items():
                numbers.setdefault(name, np.zeros(len(rows)))[part] = values.double().cpu().numpy()
        return numbers

    def forward(
        self, batch: TrainBatch, rows: NDArray[np.int64], old_logprobs: Sequence[NDArray[np.float32]]
    ) -> MicroBatch:
        """Runs policy and reference on some rows."""
        tensors, mask = self._laid_out(batch, rows)
        tensors["entropy_grad"] = getattr(self.config, "entropy_coeff", 0.0) > 0
        out = self.module[DEFAULT_MODULE_ID].forward_train(tensors)
        old = self._tensor(right_pad([old_logprobs[i] for i in rows], mask.shape[1]))
        engine = self._tensor(right_pad([batch.logprobs[i] for i in rows], mask.shape[1]))
        return MicroBatch(
            logp=out["logp"].masked_fill(~mask, 0.0),
            entropy=out["entropy"].masked_fill(~mask, 0.0),
            ref_logp=None if self.reference is None else self._logp(self.reference, tensors, mask),
            old_logp=old,
            engine_logp=engine,
            importance=torch.exp(old - engine).clamp(max=self.config.rollout_is_cap or 1.0),
            advantage=self._tensor(batch.advantage_rows(rows, mask.shape[1])),
            weight=self._tensor(batch.weights[rows].astype(np.float32))[:, None] * mask,
            mask=mask,
        )

    def logprobs(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        """Returns log-probabilities of all responses under the present policy, in the layout of the update."""
        return self._all_logp(self._policy().llm, batch)

    def log_ratios(
        self, batch: TrainBatch, mine: NDArray[np.bool_], old_logprobs: Sequence[NDArray[np.float32]]
    ) -> NDArray[np.float64]:
        """Returns how much likelier the present policy makes some responses: summed log-ratios, (B,), 0 elsewhere."""
        ratios = np.zeros(len(batch))
        for part in self._parts(batch, np.flatnonzero(mine)):
            rows = np.flatnonzero(mine)[part]
            tensors, mask = self._laid_out(batch, rows)
            old = self._tensor(right_pad([old_logprobs[i] for i in rows], mask.shape[1]))
            now = self._logp(self._policy().llm, tensors, mask)
            ratios[rows] = ((now - old) * mask).sum(1).double().cpu().numpy()
        return ratios

    def reference_kl(self, batch: TrainBatch) -> NDArray[np.float64]:
        """Returns the sum over each response of ``log-probability when sampled - that of the reference``, (B,)."""
        assert self.reference is not None
        reference = self._all_logp(self.reference, batch)
        said = batch.said or [None] * len(batch)
        differences = [mine - ref for mine, ref in zip(batch.logprobs, reference, strict=True)]
        return np.array([float((d if s is None else d[s]).sum()) for d, s in zip(differences, said, strict=True)])

    def step(self, module_id: str = DEFAULT_MODULE_ID) -> float | None:
        """Clips a module's gradient and steps its optimiser; returns the gradient's norm, None when it was not finite.

        A gradient that is not finite changes nothing, and neither does one that is zero throughout.
        """
        optimizer = self.get_optimizer(module_id)
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = float(torch.nn.utils.clip_grad_norm_(params, self.config.grad_clip or float("inf")))
        if 0.0 < norm < float("inf"):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm if np.isfinite(norm) else None

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Adds the reference policy where it moves; otherwise it is the policy that the run began with."""
        state: dict[str, Any] = super().get_state(*args, **kwargs)
        if COMPONENT_OPTIMIZER in state:
            state["num_updates"] = self.num_updates
            if self.config.reference_refresh and self.reference is not None:
                state["reference"] = {name: tensor.cpu() for name, tensor in self.reference.state_dict().items()}
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes a state of :meth:`get_state`."""
        super().set_state(state)
        self.num_updates = state.get("num_updates", self.num_updates)
        if "reference" in state and self.reference is not None:
            self.reference.load_state_dict(state["reference"])

    def _refresh_reference(self) -> None:
        """Makes the policy its own reference, every ``reference_refresh`` updates."""
        self.num_updates += 1
        every = self.config.reference_refresh
        if self.reference is not None and every and self.num_updates % every == 0:
            self.reference.load_state_dict(self._policy().llm.state_dict())

    def _policy(self) -> LLMRLModule:
        policy: LLMRLModule = self.module[DEFAULT_MODULE_ID]
        return policy

    def _parts(
        self, batch: TrainBatch, rows: NDArray[np.int64], prompts: Sequence[Tokens] = ()
    ) -> list[NDArray[np.int64]]:
        prompts = prompts or batch.prompts
        prompt_lengths = np.array([len(prompts[i]) for i in rows], dtype=np.int64)
        response_lengths = np.array([len(batch.responses[i]) for i in rows], dtype=np.int64)
        return micro_batches(prompt_lengths, response_lengths, self.config.max_tokens_per_microbatch)

    def _laid_out(
        self, batch: TrainBatch, rows: NDArray[np.int64], prompts: Sequence[Tokens] = ()
    ) -> tuple[dict[str, Any], Tensor]:
        """Returns the rows as a rectangle of tensors, and the mask of the tokens that the policy said, (b, R).

        Other prompts than the batch's may stand before the responses.
        """
        prompts = prompts or batch.prompts
        layout = rectangle([prompts[i] for i in rows], [batch.responses[i] for i in rows])
        tensors: dict[str, Any] = {
            "tokens": self._tensor(layout.tokens),
            "attention": self._tensor(layout.attention),
            "positions": self._tensor(layout.positions),
            "prompt_width": layout.prompt_width,
        }
        mask = layout.attention[:, layout.prompt_width :].astype(bool)
        for place, row in enumerate(rows):
            if batch.said and (said := batch.said[row]) is not None:
                mask[place, : len(said)] &= said
        return tensors, self._tensor(mask)

    def _logp(self, llm: torch.nn.Module, tensors: Mapping[str, Any], mask: Tensor) -> Tensor:
        policy = self._policy()
        with torch.no_grad():
            return response_logprobs(llm, tensors, policy.temperature, policy.precision())["logp"].masked_fill(
                ~mask, 0.0
            )

    def _all_logp(self, llm: torch.nn.Module, batch: TrainBatch) -> list[NDArray[np.float32]]:
        result: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(batch)
        for part in self._parts(batch, np.arange(len(batch))):
            logp = self._logp(llm, *self._laid_out(batch, part)).cpu().numpy()
            for row, values in zip(part.tolist(), logp, strict=True):
                result[row] = values[: len(batch.responses[row])]
        return result

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._device)
