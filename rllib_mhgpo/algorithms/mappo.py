"""MAPPO: the same rollouts, rewards and policy loss as MHGPO, and a critic in the place of groups.

The baseline of arXiv:2506.02718 (there: MMOA-RAG's kind); MAPPO is arXiv:2103.01955, with one policy and one critic for
all agents. Departures from MHGPO:

1. A second model of the policy's architecture says what each response token's state is worth.
2. Advantages are generalised advantage estimates (arXiv:1506.02438), whitened per agent over the batch.
3. The critic has a loss, an optimiser and a learning rate of its own.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from torch import Tensor

from rllib_mhgpo.algorithms.config import LLMConfig
from rllib_mhgpo.algorithms.llm_algorithm import Credit, LLMAlgorithm
from rllib_mhgpo.algorithms.mhgpo import by_question
from rllib_mhgpo.algorithms.objective import PolicyLearner
from rllib_mhgpo.algorithms.rewards import kl_rounding
from rllib_mhgpo.algorithms.scale_checks import longest_sequence
from rllib_mhgpo.credit import explained_variance, gae, gae_over_turns, group_advantages, whiten
from rllib_mhgpo.errors import ConfigError
from rllib_mhgpo.llms import architecture, context_length
from rllib_mhgpo.llms.folders import check_context
from rllib_mhgpo.losses import clipped_value_loss
from rllib_mhgpo.micro_batches import Laid
from rllib_mhgpo.packing import right_pad
from rllib_mhgpo.sharding import largest
from rllib_mhgpo.spaces import Tokens
from rllib_mhgpo.train_batch import TrainBatch
from rllib_mhgpo.tree import FlatTrees

CRITIC = "critic"
Floats = NDArray[np.float64]


class MAPPOConfig(LLMConfig):
    """Keys of MAPPO; see docs/configuration.md for all."""

    critic_llm: Annotated[str | None, Field(description="where the critic's body comes from; null: the policy's")] = (
        None
    )
    critic_lr: Annotated[float, Field(gt=0, allow_inf_nan=False, description="learning rate of the critic")] = 1e-6
    critic_input: Annotated[
        Literal["local", "global"], Field(description="what it reads: the agent's own prompt, or all said before too")
    ] = "local"
    critic_warmup: Annotated[
        int, Field(ge=0, description="iterations at the start in which only the critic learns")
    ] = 0
    gamma: Annotated[float, Field(ge=0, le=1, description="discount")] = 1.0
    lambda_: Annotated[float, Field(ge=0, le=1, description="of the generalised advantage estimate")] = 1.0
    gae_level: Annotated[
        Literal["token", "turn"], Field(description="token: within each response; turn: over the acts of a trajectory")
    ] = "token"
    value_clip: Annotated[
        float | None, Field(gt=0, description="how far a value may move in an update, off when null")
    ] = 0.2
    vf_coeff: Annotated[float, Field(gt=0, allow_inf_nan=False, description="weight of the critic's loss")] = 1.0

    def __init__(self, algo_class: Any = None) -> None:
        super().__init__(algo_class=algo_class or MAPPO)

    def get_default_learner_class(self) -> type:
        """The policy's objective and the critic's loss."""
        return MAPPOLearner

    def validate(self) -> None:
        """Checks all values; see :class:`ConfigError`."""
        super().validate()
        its = architecture(self.critic_llm or self.llm)
        for name, llm in self.llms.items() if self.critic_llm or self.policies else ():
            if (mine := architecture(llm)) != its:
                raise ConfigError(
                    f"config: critic_llm: expected the policy's architecture, {mine} ({name}), found {its}; one critic "
                    "reads what all policies read."
                )
        check_context("critic_llm", self.critic_llm or self.llm, longest_sequence(self, self.context))

    def get_multi_rl_module_spec(self, **kwargs: Any) -> Any:
        """Adds the critic to the modules of the learner."""
        from rllib_mhgpo.modules import LLMCriticModule

        spec = super().get_multi_rl_module_spec(**kwargs)
        if CRITIC not in spec.rl_module_specs:
            policy = next(iter(spec.rl_module_specs.values()))
            spec.rl_module_specs[CRITIC] = RLModuleSpec(
                module_class=LLMCriticModule,
                observation_space=policy.observation_space,
                action_space=policy.action_space,
                model_config={**policy.model_config, "llm": self.critic_llm or self.llm},
            )
        return spec


class MAPPO(LLMAlgorithm):
    """Samples trees, runs rewards back, takes the critic's values off."""

    @classmethod
    def get_default_config(cls) -> MAPPOConfig:
        """Returns the defaults."""
        return MAPPOConfig()

    def assign_credit(self, flat: FlatTrees) -> Credit:
        """Adds to the rewards values, returns and advantages by token, and their means by generation."""
        credit = self.rewards(flat, np.random.default_rng((self.run_seed, self.iteration)))
        prompts = self._critic_prompts(flat)
        values = self._values(flat, prompts)
        gamma, lambda_, counted = self.config.gamma, self.config.lambda_, self.counted(flat)
        if self.config.gae_level == "token":
            advantages = [gae(paid_at_end(g, r), v, gamma, lambda_) for g, r, v in zip(
                (generation.num_tokens for generation in flat.generations), credit["reward"], values, strict=True
            )]  # fmt: skip
            returns = [a + v for a, v in zip(advantages, values, strict=True)]
        else:
            advantages, returns = self._over_turns(flat, credit, values, counted)
        group = by_question(flat)
        groups = group_advantages(credit["reward"], group, rounding=kl_rounding(flat, self.config))
        whitened = whiten(advantages, np.where(counted, flat.agent, -1))
        return {
            **credit, "group": group, "zero_std": groups.zero_std, "singleton": groups.singleton, "counted": counted,
            "advantage": np.array([float(each.sum()) / max(1, len(each)) for each in whitened]),
            "token_advantage": as_objects(whitened),
            "value": as_objects(values), "return": as_objects(returns), "critic_prompt": as_objects(prompts),
        }  # fmt: skip

    def make_batch(self, flat: FlatTrees, credit: Credit) -> TrainBatch:
        """As for all algorithms, with advantages by token and the critic's targets."""
        batch = super().make_batch(flat, credit)
        return TrainBatch.of(
            flat.generations, list(credit["token_advantage"]), batch.weights, batch.steps, previous=batch.previous,
            values=list(credit["value"]), returns=list(credit["return"]), critic_prompts=list(credit["critic_prompt"]),
        )  # fmt: skip

    def more_columns(self, flat: FlatTrees, credit: Credit, update: dict[str, Any]) -> dict[str, Any]:
        """Returns value mean, share of the returns' variance that values explain, the critic's gradient norm."""
        norms = update["critic_grad_norms"]
        everyone = np.ones(len(flat.agent), dtype=bool)
        return {
            "critic_grad_norm": float(np.mean(norms)) if norms else float("nan"),
            **_critic_columns(credit, everyone),
            **{agent: _critic_columns(credit, flat.agent == k) for k, agent in enumerate(self.agents)},
        }

    def _values(self, flat: FlatTrees, prompts: Sequence[Tokens]) -> list[Floats]:
        zeros = np.zeros(len(flat.generations))
        batch = TrainBatch.of(flat.generations, zeros, zeros, zeros.astype(np.int64), critic_prompts=prompts)
        result: list[Floats] = [np.zeros(0)] * len(batch)
        for rows, found in self.learners.each_shard(lambda learner, shard: learner.values(shard), batch, flat.tree):
            for row, value in zip(rows.tolist(), found, strict=True):
                result[row] = value.astype(np.float64)
        return result

    def _critic_prompts(self, flat: FlatTrees) -> list[Tokens]:
        """Returns what the critic reads before each response; the oldest tokens go where the context is too short."""
        if self.config.critic_input == "local":
            return [generation.prompt for generation in flat.generations]
        context, previous = context_length(self.config.critic_llm or self.config.llm), flat.previous
        prompts: list[Tokens] = []
        for row, generation in enumerate(flat.generations):
            before = previous[row]
            said = () if before < 0 else (prompts[before], flat.generations[before].response)
            room = context - len(generation.response)
            prompts.append(np.concatenate([*said, generation.prompt])[-room:])
        return prompts

    def _over_turns(
        self, flat: FlatTrees, credit: Credit, values: Sequence[Floats], counted: NDArray[np.bool_]
    ) -> tuple[list[Floats], list[Floats]]:
        """Returns advantages and targets by token; a turn's value is that before its first token.

        Acts that are not trained are no turns: their values are nobody's targets.
        """
        if not (flat.previous >= 0).any():
            raise ConfigError(
                "config: gae_level: turn needs trajectories of several acts, found one act in each; use token."
            )
        first = np.array([value[0] if len(value) else 0.0 for value in values])
        turns = gae_over_turns(
            flat.shared, credit["reward_specific"], first, flat.previous, flat.team,
            self.config.gamma, self.config.lambda_, counted,
        )  # fmt: skip
        advantages = [np.full(len(value), turn) for value, turn in zip(values, turns, strict=True)]
        returns = [np.full(len(value), np.nan) for value in values]
        for target, turn, value in zip(returns, turns, first, strict=True):
            target[:1] = turn + value
        return advantages, returns


class MAPPOLearner(PolicyLearner):
    """The policy's objective, and a critic that is trained beside it."""

    def learning_rate(self, module_id: str, config: Any) -> Any:
        """The critic has its own."""
        return config.critic_lr if module_id == CRITIC else super().learning_rate(module_id, config)

    def update(self, **kwargs: Any) -> dict[str, Any]:
        """Adds ``critic_grad_norms``."""
        self.critic_grad_norms: list[float] = []
        return {**super().update(**kwargs), "critic_grad_norms": self.critic_grad_norms}

    def has_gradient(self, batch: TrainBatch) -> NDArray[np.bool_]:
        """No row moves the policy while the critic warms up."""
        rows = super().has_gradient(batch)
        return np.asarray(rows & (self.num_updates >= self.config.critic_warmup))

    def values(self, batch: TrainBatch) -> list[NDArray[np.float32]]:
        """Returns the critic's values before the response tokens that the policy said, (R_i,) each, 0 elsewhere."""
        result: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(batch)
        everyone = np.arange(len(batch))
        for part, _ in self.policy.micro.in_step(batch, everyone, batch.critic_prompts):
            laid = self.policy.micro.lay_out(batch, everyone, part, batch.critic_prompts)
            with torch.no_grad():
                values = self._critic(laid).masked_fill(~laid.mask, 0.0).cpu().numpy()
            for row, found in zip(part.sequences.tolist(), values, strict=False):
                result[row] = found[: len(batch.responses[row])]
        return result

    def step_beside(self, batch: TrainBatch, rows: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
        """Takes the critic's step; returns ``value_loss``, sums over response tokens."""
        if not largest(len(rows), self._device):
            return {"value_loss": np.zeros(0)}
        measured, micro = np.zeros(len(rows)), self.policy.micro
        body = replace(micro.work, head=0)  # its own head is one number
        for part, is_last in micro.in_step(batch, rows, batch.critic_prompts):
            laid = micro.lay_out(batch, rows, part, batch.critic_prompts, passes=3, work=body)
            losses, weight = self._value_losses(laid)
            self.parallel[CRITIC].backward(self.config.vf_coeff * (losses * weight).sum(), is_last)
            if part.rows:
                measured[part.sequences] = losses.detach().sum(1).double().cpu().numpy()
        norm = self.step(CRITIC)
        self.critic_grad_norms += [] if norm is None else [norm]
        return {"value_loss": measured}

    def _critic(self, laid: Laid) -> Tensor:
        """Values of a micro-batch, (b, R)."""
        values: Tensor = self.module[CRITIC].forward_train(laid.tensors)["values"]
        return values

    def _value_losses(self, laid: Laid) -> tuple[Tensor, Tensor]:
        """Losses by token (b, R) and weights (b, 1) of a micro-batch; tokens with a target stand for those without."""
        batch, rows, _, mask = laid
        values, width = self._critic(laid), mask.shape[1]
        target, old = (
            torch.from_numpy(right_pad([numbers[i].astype(np.float32) for i in rows], width)).to(self._device)
            for numbers in (batch.returns, batch.values)
        )
        losses = clipped_value_loss(values, old, target.nan_to_num(), self.config.value_clip)
        weight = torch.from_numpy(batch.weights[rows].astype(np.float32)).to(self._device)[:, None]
        known = mask & target.isfinite()
        share = known.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        return losses.masked_fill(~known, 0.0) / share.clamp(min=1e-9), weight


def paid_at_end(tokens: int, reward: float) -> Floats:
    """Rewards of a response's tokens: all at the last.

    >>> paid_at_end(3, 0.5).tolist()
    [0.0, 0.0, 0.5]
    """
    rewards = np.zeros(tokens)
    rewards[-1:] = reward
    return rewards


def as_objects(arrays: Sequence[NDArray[Any]]) -> NDArray[np.object_]:
    """Returns arrays of different lengths as one array of arrays."""
    result = np.empty(len(arrays), dtype=object)
    result[:] = list(arrays)
    return result


def _critic_columns(credit: Credit, mine: NDArray[np.bool_]) -> dict[str, float]:
    rows = np.flatnonzero(mine & credit["counted"])
    nothing = {"value_mean": float("nan"), "explained_variance": float("nan")}
    if not len(rows):
        return nothing
    values, returns = (np.concatenate(list(credit[name][rows])) for name in ("value", "return"))
    known = np.isfinite(returns)
    return {
        "value_mean": float(values[known].mean()),
        "explained_variance": explained_variance(values[known], returns[known]),
    }
