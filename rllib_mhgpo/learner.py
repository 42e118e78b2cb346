"""The learner: owns policies, optimisers and the loop over steps, and knows no loss.

A batch comes with every advantage and every denominator already in it, so that the sum over micro-batches and learners
is the gradient of the whole. Where agents follow different policies, every policy makes each step with its own agents'
rows. The algorithm's hook turns log-probabilities into the loss of a micro-batch.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.rllib.core import COMPONENT_OPTIMIZER
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from torch import Tensor

from rllib_mhgpo.credit import along_trajectories
from rllib_mhgpo.micro_batches import Laid
from rllib_mhgpo.modules.scoring import matmul_rate
from rllib_mhgpo.sharding import Replica, ZeroShard, is_first, largest, leave_group
from rllib_mhgpo.train_batch import TrainBatch
from rllib_mhgpo.trained_policy import TrainedPolicy

POLICIES = "policies"


class LLMLearner(TorchLearner):
    """Trains language models; a subclass gives :meth:`compute_loss_for_module`.

    Attributes:
        policies: by name; one, ``default_policy``, where agents share their parameters.
    """

    def build(self) -> None:
        """Builds modules, optimisers and, where the loss needs them, the frozen reference policies."""
        super().build()
        self.num_updates = 0
        self.is_restored = False

    def _make_modules_ddp_if_necessary(self) -> None:
        """Makes of each model a replica or a shard; RLlib's DDP would average what has to be summed."""
        config = self.config
        self.policies = {
            name: TrainedPolicy(name, self.module[name], config.get_config_for_module(name), self._device)
            for name in config.policy_names
        }
        self.flops_per_s = matmul_rate(self._device, self.policy.module.dtype)
        self.not_finite: list[int] = []
        self.parallel: dict[str, Replica | ZeroShard] = {}
        for module_id in self.module.keys():  # noqa: SIM118  # a MultiRLModule is no dict
            module, optimizer = self.module[module_id], self.get_optimizer(module_id)
            if config.torch_compile_learner:
                module.compile(self._torch_compile_cfg)  # RLlib leaves out the modules of a MultiRLModule
            if config.gradient_checkpointing:
                module.checkpoint_gradients(config.gradient_checkpointing == "offload")
            if config.zero_stage:
                shard = ZeroShard(module.llm, optimizer, config.deepspeed, config.grad_clip, module.dtype)
                module.forward_through = shard.engine.__call__
                self.parallel[module_id] = shard
            else:
                self.parallel[module_id] = Replica(module.llm, optimizer, config.grad_clip)
        for policy in self.policies.values():
            policy.shard_reference()

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

    @property
    def policy(self) -> TrainedPolicy:
        """The policy that all agents share, or the first of several."""
        return next(iter(self.policies.values()))

    def by_policy(
        self, batch: TrainBatch, rows: NDArray[np.int64]
    ) -> Iterator[tuple[TrainedPolicy, NDArray[np.int64]]]:
        """Yields every policy with those of the rows that its agents said: the same policies on every learner."""
        if len(self.policies) == 1:
            yield self.policy, rows
            return
        names = {agent: self.config.policy_of(agent) for agent in dict.fromkeys(batch.agents)}
        followed = (names[batch.agents[row]] for row in rows)
        # an opponent's rows weigh nothing and belong to anyone
        owners = np.array([name if name in self.policies else self.policy.name for name in followed], dtype=object)
        for name, policy in self.policies.items():
            yield policy, rows[owners == name]

    def apply(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a function with this learner; an error reaches the caller and frees the learners that wait for it."""
        try:
            return func(self, *args, **kwargs)
        except Exception:
            leave_group()
            raise

    # --- an update ---------------------------------------------------------------------------------------------------

    def update(  # RLlib's many ways to hand over data are one here
        self, *, training_data: TrainingData, timesteps: dict[str, Any] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Runs ``config.num_epochs`` passes over a :class:`TrainBatch`, one optimiser step for each of its ``steps``.

        Returns:
            ``rows``: ``updated`` (B,), which rows were computed, and ``measured``, by name (B,) what the hook measured
            before each row's first step; ``grad_norms``: one a step; ``skipped_steps``: how many had a loss or a
            gradient that was not finite, ``skipped_in_a_row``: the last of them; ``not_finite``: the rows of the
            micro-batches with such a loss; ``policies``: norms and skipped steps by policy.
        """
        batch: TrainBatch = training_data.batch
        self._check_is_built()
        self.before_gradient_based_update(timesteps=timesteps or {})
        self._weights_seq_no += 1
        self.not_finite = []
        for policy in self.policies.values():
            policy.begin()
        old_logprobs = self.old_logprobs(batch)
        before = self.sums_before(batch, old_logprobs) if batch.previous is not None else np.zeros(0)
        first_pass: dict[str, NDArray[np.float64]] = {}
        opposing = np.zeros(len(batch), dtype=bool)
        opposing[: len(batch.agents)] = [agent in self.config.opponents for agent in batch.agents]
        for epoch in range(self.config.num_epochs):
            factors = np.ones(len(batch))
            for step in range(self._num_steps(batch)):
                mine = batch.steps == step
                found = self._make_step(batch.weighted(factors), self._step_rows(batch, step), old_logprobs)
                if batch.previous is not None:
                    moving = mine & ~opposing  # whoever plays an opponent's part has not moved
                    moved = np.where(moving, self.log_sums(batch, moving) - before, 0.0)
                    factors *= np.exp(along_trajectories(moved, batch.previous))
                beside = np.flatnonzero(mine & (batch.weights != 0))
                for rows, numbers in (*found, (beside, self.step_beside(batch, beside))):
                    for name, values in numbers.items() if epoch == 0 else ():
                        first_pass.setdefault(name, np.zeros(len(batch)))[rows] = values
        trained = {"updated": self.has_gradient(batch), "measured": first_pass}
        self.after_gradient_based_update(timesteps=timesteps or {})
        self._refresh_references()
        return {"rows": trained, **self._summary()}

    def _make_step(
        self, batch: TrainBatch, rows: NDArray[np.int64], old_logprobs: Sequence[NDArray[np.float32]]
    ) -> list[tuple[NDArray[np.int64], dict[str, NDArray[np.float64]]]]:
        """Makes one optimiser step of each policy that has any of the rows; returns what the hook measured of which.

        Where no learner has a row there is no step: none to count, and no gradient of norm 0.
        """
        found = []
        for policy, mine in self.by_policy(batch, rows):
            if largest(len(mine), self._device):
                numbers = self.accumulate(batch, mine, old_logprobs, policy)
                policy.note_step(self.step(policy.name))
                policy.watch_engine(batch, mine, numbers)
                found.append((mine, numbers))
        return found

    def _summary(self) -> dict[str, Any]:
        """What an update says of its steps."""
        policies = self.policies.values()
        counts = sum((policy.micro.counts for policy in policies), Counter[str]())
        return {
            "grad_norms": [norm for policy in policies for norm in policy.grad_norms],
            "skipped_steps": sum(policy.skipped for policy in policies),
            "skipped_in_a_row": max(policy.skipped_in_a_row for policy in policies),
            "not_finite": self.not_finite,
            "counts": {**counts, "flops_per_s": self.flops_per_s},
            POLICIES: {p.name: {"grad_norms": p.grad_norms, "skipped_steps": p.skipped} for p in policies},
        }

    def _num_steps(self, batch: TrainBatch) -> int:
        return largest(int(batch.steps.max(initial=-1)) + 1, self._device)

    def _step_rows(self, batch: TrainBatch, step: int) -> NDArray[np.int64]:
        """The rows that an optimiser step computes."""
        return np.flatnonzero((batch.steps == step) & self.has_gradient(batch))

    def _refresh_references(self) -> None:
        """Makes the policies their own references, every ``reference_refresh`` updates."""
        self.num_updates += 1
        every = self.config.reference_refresh
        for policy in self.policies.values() if every and self.num_updates % every == 0 else ():
            policy.refresh_reference()

    def step_beside(self, batch: TrainBatch, rows: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
        """Trains what is beside the policies (a critic) on the rows of a step; returns what was measured, as a hook."""
        return {}

    def has_gradient(self, batch: TrainBatch) -> NDArray[np.bool_]:
        """Which rows can move the weights, (B,); the others are not computed, and stay in the denominators.

        A subclass whose loss has terms beside the advantage overrides this.
        """
        return np.asarray((batch.weights != 0) & batch.with_advantage)

    def accumulate(
        self,
        batch: TrainBatch,
        rows: NDArray[np.int64],
        old_logprobs: Sequence[NDArray[np.float32]] | None = None,
        policy: TrainedPolicy | None = None,
    ) -> dict[str, NDArray[np.float64]]:
        """Adds the gradient of these rows to a policy, the shared one by default.

        Returns:
            What the hook measured, one number a row, by name.
        """
        policy = policy or self.policy
        numbers: dict[str, NDArray[np.float64]] = {}
        for place, is_last in policy.micro.in_step(batch, rows):
            part = place.sequences
            laid = policy.micro.lay_out(batch, rows, place, passes=policy.passes)
            loss, measured = self._loss(policy, laid, old_logprobs or batch.logprobs)
            if not torch.isfinite(loss):
                self.not_finite += rows[part].tolist()
                loss = loss * float("nan")  # so that the gradient is not finite either, and no learner makes the step
            self.parallel[policy.name].backward(loss, is_last)
            for name, values in measured.items() if len(part) else ():
                numbers.setdefault(name, np.zeros(len(rows)))[part] = values.double().cpu().numpy()
        return numbers

    def _loss(
        self, policy: TrainedPolicy, laid: Laid, old_logprobs: Sequence[NDArray[np.float32]]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the hook's loss of a micro-batch."""
        found: tuple[Tensor, dict[str, Tensor]] = self.compute_loss_for_module(
            module_id=policy.name, config=policy.config, batch=policy.forward(laid, old_logprobs), fwd_out={}
        )
        return found

    def step(self, module_id: str) -> float | None:
        """Makes a module's optimiser step; returns the gradient's norm, None when it or a loss was not finite."""
        return self.parallel[module_id].step()

    # --- log-probabilities -------------------------------------------------------------------------------------------

    def old_logprobs(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        """Returns log-probabilities before the update: the engine's, or the learner's own where they differ."""
        result = list(batch.logprobs)
        if not any(policy.recomputes for policy in self.policies.values()):
            return result
        for step in range(self._num_steps(batch)):
            for policy, rows in self.by_policy(batch, self._step_rows(batch, step)):
                if policy.recomputes:
                    policy.fill(result, policy.llm, batch, rows)
        return result

    def logprobs(self, batch: TrainBatch, llm: torch.nn.Module | None = None) -> list[NDArray[np.float32]]:
        """Returns log-probabilities of all responses under the present policies, or under another model."""
        result: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(batch)
        for policy, rows in self.by_policy(batch, np.arange(len(batch))):
            policy.fill(result, llm or policy.llm, batch, rows)
        return result

    def sums_before(self, batch: TrainBatch, old_logprobs: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
        """Returns the summed log-probabilities of all responses before an update, (B,); see :meth:`old_logprobs`."""
        if any(policy.recomputes for policy in self.policies.values()):
            steps = range(self._num_steps(batch))
            return np.asarray(sum(self.log_sums(batch, batch.steps == step) for step in steps))
        said = batch.said or [None] * len(batch)
        pairs = zip(old_logprobs, said, strict=True)
        return np.array([float((old if mask is None else old[mask]).sum()) for old, mask in pairs])

    def log_sums(self, batch: TrainBatch, mine: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Returns the summed log-probabilities of some responses under the present policies, (B,), 0 elsewhere."""
        sums = np.zeros(len(batch))
        for policy, rows in self.by_policy(batch, np.flatnonzero(mine)):
            for part, now, _ in policy.score(policy.llm, batch, rows):
                sums[rows[part]] = now.sum(1).double().cpu().numpy()
        return sums

    def reference_kl(self, batch: TrainBatch) -> NDArray[np.float64]:
        """Returns the sum over each response of ``log-probability - that of the reference``, (B,).

        Both are computed here, in one layout, so that it is 0 where they are one policy; an engine's log-probabilities
        differ by rounding, which would pass for a KL.
        """
        present = self.logprobs(batch)
        reference: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(batch)
        for policy, rows in self.by_policy(batch, np.arange(len(batch))):
            with policy.as_reference() as llm:
                policy.fill(reference, llm, batch, rows)
        said = batch.said or [None] * len(batch)
        differences = [mine - ref for mine, ref in zip(present, reference, strict=True)]
        return np.array([float((d if s is None else d[s]).sum()) for d, s in zip(differences, said, strict=True)])

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Adds what is counted, and reference policies that move; others are the policies that the run began with."""
        state: dict[str, Any] = super().get_state(*args, **kwargs)
        if COMPONENT_OPTIMIZER in state:
            state["num_updates"] = self.num_updates
            state[POLICIES] = {name: policy.state() for name, policy in self.policies.items()}
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes a state of :meth:`get_state`."""
        self._weights_seq_no = 0  # else RLlib leaves out the weights of a state that is not newer
        super().set_state(state)
        self.num_updates = state.get("num_updates", self.num_updates)
        for name, its in state.get(POLICIES, {}).items():
            self.policies[name].set_state(its)

    def _get_optimizer_state(self) -> dict[str, Any]:
        """Nothing where optimisers are sharded: a checkpoint has every learner's :meth:`shards` instead."""
        return {} if self.config.zero_stage else dict(super()._get_optimizer_state())

    def shards(self) -> dict[str, NDArray[Any]]:
        """Returns this learner's parts of the sharded optimisers, by module and name."""
        return {
            f"{module_id}/{name}": array
            for module_id, parallel in self.parallel.items()
            if isinstance(parallel, ZeroShard)
            for name, array in parallel.state().items()
        }

    def set_shards(self, shards: Mapping[str, NDArray[Any]]) -> None:
        """Takes what :meth:`shards` returned on this learner."""
        for module_id, parallel in self.parallel.items():
            if isinstance(parallel, ZeroShard):
                start = f"{module_id}/"
                mine = {name.removeprefix(start): shards[name] for name in shards if name.startswith(start)}
                parallel.load_state(mine)

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
