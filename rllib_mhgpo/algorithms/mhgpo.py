"""MHGPO: critic-free policy optimisation of several LLM agents with groups that cross prompts (arXiv:2506.02718).

Departures from its parent, GRPO (arXiv:2402.03300):

1. A rollout is a tree of generations of several agents; the strategy says where it forks (section 3.2).
2. The team's reward runs backwards along the agents' graph; a role's own penalty is added to it (section 3.3).
3. A group shares the root question and the agent, though its prompts may differ (section 3.4).
4. The objective is the mean over agents of the mean over their generations (equation 8).
"""

from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from rllib_mhgpo.algorithms.config import LLMConfig
from rllib_mhgpo.algorithms.llm_algorithm import LLMAlgorithm
from rllib_mhgpo.credit import group_advantages, propagate, token_weights
from rllib_mhgpo.learner import LLMLearner, MicroBatch, TrainBatch
from rllib_mhgpo.losses import KL_ESTIMATORS, clipped_surrogate
from rllib_mhgpo.sampling import STRATEGIES, Strategy
from rllib_mhgpo.tree import FlatTrees


class MHGPOConfig(LLMConfig):
    """Keys of MHGPO; see docs/configuration.md for all."""

    rollout_strategy: Annotated[Literal["fof"], Field(description="where rollouts fork")] = "fof"
    group_size: Annotated[int, Field(ge=2, description="responses of a group, G")] = 4
    reward_aggregation: Annotated[
        Literal["mean", "max", "min", "random"], Field(description="of successors' shared rewards")
    ] = "mean"
    advantage_norm: Annotated[
        Literal["std", "none", "leave_one_out"], Field(description="how rewards become advantages")
    ] = "std"
    advantage_ddof: Annotated[Literal[0, 1], Field(description="1: unbiased standard deviation")] = 1
    std_floor: Annotated[float, Field(ge=0, description="least standard deviation that rewards are divided by")] = 0.0
    drop_zero_std: Annotated[bool, Field(description="take groups of equal rewards out of the denominators")] = False
    loss_aggregation: Annotated[
        Literal["agent_mean", "sequence_mean", "token_mean", "fixed_length"], Field(description="what a token weighs")
    ] = "agent_mean"
    kl_estimator: Annotated[Literal["k1", "k2", "k3"], Field(description="of the KL to the reference")] = "k3"
    dual_clip: Annotated[float | None, Field(gt=1, description="bound of negative advantages' loss, off when null")] = (
        None
    )

    def __init__(self, algo_class: Any = None) -> None:
        super().__init__(algo_class=algo_class or MHGPO)

    def get_default_learner_class(self) -> type:
        """MHGPO's loss on the common learner."""
        return MHGPOLearner


class MHGPO(LLMAlgorithm):
    """Samples trees, runs rewards back, normalises in heterogeneous groups."""

    @classmethod
    def get_default_config(cls) -> MHGPOConfig:
        """Returns the defaults."""
        return MHGPOConfig()

    def strategy(self) -> Strategy:
        """Where this iteration's rollouts fork."""
        return STRATEGIES[self.config.rollout_strategy](self.config.group_size)

    def assign_credit(self, flat: FlatTrees) -> dict[str, NDArray[Any]]:
        """Returns, for each of N generations, ``reward``, its parts, ``advantage``, ``zero_std`` and ``singleton``."""
        config = self.config
        rng = np.random.default_rng((self.run_seed, self.iteration))
        shared = propagate(flat.edges, flat.shared, config.reward_aggregation, rng)[np.arange(len(flat.team)), flat.team]
        reward = shared + flat.specific
        groups = np.unique(np.stack([flat.tree, flat.agent, flat.act]), axis=1, return_inverse=True)[1].reshape(-1)
        advantages = group_advantages(
            reward, groups, config.advantage_norm, config.advantage_ddof, config.std_floor
        )
        return {
            "reward": reward,
            "reward_shared": shared,
            "reward_specific": flat.specific,
            "advantage": advantages.values,
            "zero_std": advantages.zero_std,
            "singleton": advantages.singleton,
        }

    def make_batch(self, flat: FlatTrees, credit: dict[str, NDArray[Any]]) -> TrainBatch:
        """Gives every token its weight in its optimiser step; nothing later needs to see a whole group."""
        config = self.config
        lengths = np.array([len(generation.response) for generation in flat.generations], dtype=np.int64)
        lengths = np.where(flat.trained & ~(credit["zero_std"] & config.drop_zero_std), lengths, 0)
        steps = flat.tree // (config.minibatch_questions or config.questions_per_iteration)
        weights = np.zeros(len(lengths))
        for step in np.unique(steps):
            rows = steps == step
            weights[rows] = token_weights(
                flat.agent[rows], lengths[rows], config.loss_aggregation, config.longest_response
            )
        return TrainBatch(
            prompts=[generation.prompt for generation in flat.generations],
            responses=[generation.response for generation in flat.generations],
            logprobs=[generation.logprobs for generation in flat.generations],
            advantages=credit["advantage"],
            weights=weights,
            steps=steps,
        )


class MHGPOLearner(LLMLearner):
    """The objective of equation 8, negated."""

    def compute_loss_for_module(
        self, *, module_id: str, config: Any, batch: MicroBatch, fwd_out: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of a micro-batch and, for each of its rows, sums (and maxima) over its response tokens."""
        surrogate = clipped_surrogate(
            batch.logp, batch.old_logp, batch.advantage, config.clip_low, config.clip_high, config.dual_clip
        )
        objective = surrogate.objective
        measured = {
            "entropy": batch.entropy,
            "clip_fraction": surrogate.clipped.float(),
            "ratio_mean": surrogate.ratio,
            "engine_logprob_diff": (batch.logp.detach() - batch.old_logp).abs(),
        }
        if batch.ref_logp is not None:
            kl = KL_ESTIMATORS[config.kl_estimator](batch.logp, batch.ref_logp)
            objective = objective - config.kl_beta * kl
            measured["kl"] = kl.detach()
        numbers = {name: (values * batch.mask).sum(1) for name, values in measured.items()}
        numbers["ratio_max"] = (surrogate.ratio * batch.mask).amax(1)
        return -(objective * batch.weight).sum(), numbers
