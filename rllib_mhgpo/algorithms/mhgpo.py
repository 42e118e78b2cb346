"""MHGPO: critic-free policy optimisation of several LLM agents with groups that cross prompts (arXiv:2506.02718).

Departures from its parent, GRPO (arXiv:2402.03300):

1. A rollout is a tree of generations of several agents; the strategy says where it forks (section 3.2).
2. The team's reward runs backwards along the agents' graph; a role's own penalty is added to it (section 3.3).
3. A group shares the root question and the agent, though its prompts may differ (section 3.4).
4. The objective is the mean over agents of the mean over their generations (equation 8).
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from rllib_mhgpo.algorithms.config import LLMConfig
from rllib_mhgpo.algorithms.llm_algorithm import LLMAlgorithm
from rllib_mhgpo.algorithms.registration import import_named
from rllib_mhgpo.credit import AGGREGATIONS, group_advantages, propagate, regroup_singletons, token_weights
from rllib_mhgpo.errors import ConfigError
from rllib_mhgpo.learner import LLMLearner, MicroBatch, TrainBatch
from rllib_mhgpo.losses import KL_ESTIMATORS, clipped_surrogate
from rllib_mhgpo.sampling import STRATEGIES, Options, Strategy
from rllib_mhgpo.tree import FlatTrees, RolloutTree, flatten

Ints = NDArray[np.int64]
Credit = dict[str, NDArray[Any]]


def by_question(flat: FlatTrees) -> Ints:
    """Heterogeneous groups: one a question, agent and n-th act, whatever the prompts; (N,)."""
    return _distinct(flat.tree, flat.agent, flat.act)


def by_prompt(flat: FlatTrees) -> Ints:
    """Homogeneous groups: the same, and the same prompt; (N,)."""
    prompts: dict[bytes, int] = {}
    prompt = np.array([prompts.setdefault(g.prompt.tobytes(), len(prompts)) for g in flat.generations])
    return _distinct(flat.tree, flat.agent, flat.act, prompt)


def _distinct(*columns: Ints) -> Ints:
    return np.unique(np.stack(columns), axis=1, return_inverse=True)[1].reshape(-1)


GROUP_KEYS: dict[str, Callable[[FlatTrees], Ints]] = {"question": by_question, "prompt": by_prompt}
"""By name: which generations are one group. A user's own is such a function, given as ``module:function``."""


class MHGPOConfig(LLMConfig):
    """Keys of MHGPO; see docs/configuration.md for all."""

    rollout_strategy: Annotated[
        str, Field(description="where rollouts fork: fof, rr, fof_os, is, fork_counts or module:Class")
    ] = "fof"
    group_size: Annotated[int, Field(ge=2, description="responses of a group, G")] = 4
    fork_probs: Annotated[tuple[float, ...], Field(description="rr: probability of each agent to be the fork")] = (
        0.7,
        0.1,
        0.2,
    )
    fork_counts: Annotated[
        list[int] | None, Field(description="fork_counts: responses each agent draws a state at its first act")
    ] = None
    is_carry: Annotated[Literal["first"], Field(description="is: which output is carried on")] = "first"
    group_key: Annotated[str, Field(description="what a group shares: question, prompt or module:function")] = (
        "question"
    )
    reward_aggregation: Annotated[
        str, Field(description="of successors' shared rewards: mean, max, min, random or module:function")
    ] = "mean"
    propagate_specific: Annotated[bool, Field(description="successors' penalties run back too")] = False
    advantage_norm: Annotated[
        Literal["std", "none", "leave_one_out"], Field(description="how rewards become advantages")
    ] = "std"
    advantage_ddof: Annotated[Literal[0, 1], Field(description="1: unbiased standard deviation")] = 1
    std_floor: Annotated[float, Field(ge=0, description="least standard deviation that rewards are divided by")] = 0.0
    drop_zero_std: Annotated[bool, Field(description="take groups of equal rewards out of the denominators")] = False
    refill_rounds: Annotated[
        int, Field(ge=0, description="times that questions without any spread are replaced by new ones (DAPO)")
    ] = 0
    loss_aggregation: Annotated[
        Literal["agent_mean", "sequence_mean", "token_mean", "fixed_length"], Field(description="what a token weighs")
    ] = "agent_mean"
    kl_estimator: Annotated[Literal["k1", "k2", "k3"], Field(description="of the KL to the reference")] = "k3"
    kl_in_reward: Annotated[bool, Field(description="take the KL off the reward instead of adding it to the loss")] = (
        False
    )
    dual_clip: Annotated[float | None, Field(gt=1, description="bound of negative advantages' loss, off when null")] = (
        None
    )
    entropy_coeff: Annotated[float, Field(ge=0, description="weight of the entropy bonus")] = 0.0
    overlong_filter: Annotated[bool, Field(description="responses cut off at their limit carry no loss")] = False
    overlong_penalty_tokens: Annotated[
        int, Field(ge=0, description="last tokens before the limit over which a penalty of up to 1 grows (DAPO)")
    ] = 0
    train_agents: Annotated[list[str] | None, Field(description="roles to train, all when null")] = None

    def __init__(self, algo_class: Any = None) -> None:
        super().__init__(algo_class=algo_class or MHGPO)

    def get_default_learner_class(self) -> type:
        """MHGPO's loss on the common learner."""
        return MHGPOLearner

    def validate(self) -> None:
        """Checks all values; see :class:`ConfigError`."""
        super().validate()
        import_named("rollout_strategy", self.rollout_strategy, STRATEGIES)
        import_named("group_key", self.group_key, GROUP_KEYS)
        import_named("reward_aggregation", self.reward_aggregation, AGGREGATIONS)
        if self.rollout_strategy == "rr" and not np.isclose(sum(self.fork_probs), 1.0):
            raise ConfigError(f"config: fork_probs: expected a sum of 1, found {sum(self.fork_probs)}.")
        if self.rollout_strategy == "rr" and min(self.fork_probs) < 0:
            raise ConfigError(f"config: fork_probs: expected no number below 0, found {self.fork_probs}.")
        if self.kl_in_reward and self.kl_beta == 0:
            raise ConfigError(
                "config: kl_in_reward: expected a kl_beta above 0, found 0; raise it, or leave the KL out."
            )
        counts = self.fork_counts or []
        if self.rollout_strategy == "fork_counts" and (max(counts, default=0) < 2 or min(counts) < 1):
            raise ConfigError(
                f"config: fork_counts: expected numbers of at least 1, one of them at least 2; found {self.fork_counts}"
            )


class MHGPO(LLMAlgorithm):
    """Samples trees, runs rewards back, normalises in heterogeneous groups."""

    @classmethod
    def get_default_config(cls) -> MHGPOConfig:
        """Returns the defaults."""
        return MHGPOConfig()

    def check_agents(self) -> None:
        """Refuses keys that do not fit the environment's agents."""
        super().check_agents()
        config, count = self.config, len(self.agents)
        for name, values in (("fork_probs", config.fork_probs), ("fork_counts", config.fork_counts)):
            used = config.rollout_strategy == {"fork_probs": "rr"}.get(name, name)
            if used and len(values) != count:
                raise ConfigError(
                    f"config: {name}: expected {count} numbers, one for each of {self.agents}, found {values}."
                )
        strangers = [agent for agent in config.train_agents or [] if agent not in self.agents]
        if strangers or config.train_agents == []:
            raise ConfigError(f"config: train_agents: expected some of {self.agents}, found {config.train_agents}.")

    def sample_trees(self) -> list[RolloutTree]:
        """Samples the iteration's trees; questions whose groups all lack spread may be replaced by new ones."""
        trees = super().sample_trees()
        for refill in range(self.config.refill_rounds):
            dull = self._without_spread(trees)
            if not len(dull):
                break
            spare = np.setdiff1d(np.arange(self.num_roots), [tree.root for tree in trees])
            rng = np.random.default_rng((self.run_seed, self.iteration, refill))
            roots = rng.choice(spare, min(len(dull), len(spare)), replace=False).tolist()
            for place, tree in zip(dull.tolist(), self.roll_out(roots), strict=False):
                trees[place] = tree
        return trees

    def _without_spread(self, trees: list[RolloutTree]) -> Ints:
        flat = flatten(trees, self.agents)
        credit = self.assign_credit(flat)
        with_spread = flat.tree[flat.trained & (credit["advantage"] != 0)]
        return np.setdiff1d(np.arange(len(trees)), with_spread)

    def strategy(self) -> Strategy:
        """Where this iteration's rollouts fork."""
        config = self.config
        options = Options(
            group_size=config.group_size,
            num_agents=len(self.agents),
            fork_probs=tuple(config.fork_probs),
            fork_counts=None if config.fork_counts is None else tuple(config.fork_counts),
            seed=(self.run_seed, self.iteration),
        )
        build: Callable[[Options], Strategy] = import_named("rollout_strategy", config.rollout_strategy, STRATEGIES)
        return build(options)

    def assign_credit(self, flat: FlatTrees) -> Credit:
        """Returns for N generations ``reward`` and its parts, ``group``, ``advantage``, ``zero_std``, ``singleton``."""
        rng = np.random.default_rng((self.run_seed, self.iteration))
        specific = flat.specific + self._overlong_penalty(flat) - self._kl_penalty(flat)
        shared = self._propagated(flat, specific, rng)
        reward = shared + specific
        trained, (group, alone) = np.flatnonzero(flat.trained), self._groups(flat, rng)
        advantages = group_advantages(
            reward[trained],
            group[trained],
            self.config.advantage_norm,
            self.config.advantage_ddof,
            self.config.std_floor,
        )
        credit: Credit = {"reward": reward, "reward_shared": shared, "reward_specific": specific, "group": group}
        for name, values in (("advantage", advantages.values), ("zero_std", advantages.zero_std)):
            credit[name] = np.zeros(len(reward), dtype=values.dtype)
            credit[name][trained] = values
        return {**credit, "singleton": alone}

    def make_batch(self, flat: FlatTrees, credit: Credit) -> TrainBatch:
        """Gives every token its weight in its optimiser step; nothing later needs to see a whole group."""
        config, lengths = self.config, self._counted_lengths(flat, credit)
        steps = flat.tree // (config.minibatch_questions or config.questions_per_iteration)
        weights = np.zeros(len(lengths))
        for step in np.unique(steps):
            rows = steps == step
            weights[rows] = token_weights(
                flat.agent[rows], lengths[rows], config.loss_aggregation, config.longest_response
            )
        return TrainBatch.of(flat.generations, credit["advantage"], weights, steps)

    def _propagated(
        self, flat: FlatTrees, specific: NDArray[np.float64], rng: np.random.Generator
    ) -> NDArray[np.float64]:
        own = (np.arange(len(flat.team)), flat.team)
        earned = flat.shared.copy()
        if self.config.propagate_specific:
            earned[own] += specific
        aggregate = import_named("reward_aggregation", self.config.reward_aggregation, AGGREGATIONS)
        total: NDArray[np.float64] = propagate(flat.edges, earned, aggregate, rng)[own]
        return total - specific if self.config.propagate_specific else total

    def _groups(self, flat: FlatTrees, rng: np.random.Generator) -> tuple[Ints, NDArray[np.bool_]]:
        """Returns the group of each generation, (N,), and which were alone of their question before regrouping."""
        key = "prompt" if self.config.rollout_strategy == "is" else self.config.group_key
        group = np.asarray(import_named("group_key", key, GROUP_KEYS)(flat), dtype=np.int64)
        by_root = by_question(flat)
        members = np.bincount(by_root[flat.trained], minlength=by_root.max(initial=0) + 1)
        alone = flat.trained & (members == 1)[by_root]
        rows, pools = np.flatnonzero(alone), _distinct(flat.agent, flat.act)
        pooled = regroup_singletons(by_root[rows], pools[rows], self.config.group_size, rng)
        group[rows] = pooled + group.max(initial=0) + 1
        return group, alone

    def _counted_lengths(self, flat: FlatTrees, credit: Credit) -> Ints:
        """Response tokens that carry loss, 0 for generations that are left out; (N,)."""
        config = self.config
        counted = flat.trained & ~(credit["zero_std"] & config.drop_zero_std)
        if config.train_agents is not None:
            counted &= np.isin(flat.agent, [self.agents.index(agent) for agent in config.train_agents])
        if config.overlong_filter:
            counted &= ~np.array([generation.truncated for generation in flat.generations])
        return np.where(counted, [len(generation.response) for generation in flat.generations], 0)

    def _overlong_penalty(self, flat: FlatTrees) -> NDArray[np.float64]:
        """From 0, ``overlong_penalty_tokens`` before a response's limit, down to -1 at it (DAPO, equation 13)."""
        width = self.config.overlong_penalty_tokens
        if width == 0:
            return np.zeros(len(flat.generations))
        limits = self.config.max_response_tokens
        length = np.array([len(generation.response) for generation in flat.generations])
        given = [limits if isinstance(limits, int) else limits[g.agent] for g in flat.generations]
        limit = np.where([g.truncated for g in flat.generations], length, given)
        penalty: NDArray[np.float64] = -np.clip((length - (limit - width)) / width, 0.0, 1.0)
        return penalty

    def _kl_penalty(self, flat: FlatTrees) -> NDArray[np.float64]:
        """``kl_beta`` times the summed k1 estimate of each response, where the KL is part of the reward."""
        if not self.config.kl_in_reward:
            return np.zeros(len(flat.generations))
        ones = np.ones(len(flat.generations))
        batch = TrainBatch.of(flat.generations, ones, ones, np.zeros(len(ones), dtype=np.int64))
        (kl,) = (
            result.get() for result in self.learner_group.foreach_learner(lambda learner: learner.reference_kl(batch))
        )
        penalty: NDArray[np.float64] = self.config.kl_beta * kl
        return penalty


class MHGPOLearner(LLMLearner):
    """The objective of equation 8, negated."""

    def has_gradient(self, batch: TrainBatch) -> NDArray[np.bool_]:
        """Where neither KL nor entropy is in the loss, rows without advantage cannot move the weights."""
        config = self.config
        if config.entropy_coeff or (config.kl_beta and not config.kl_in_reward):
            return np.asarray(batch.weights != 0)
        return super().has_gradient(batch)

    def compute_loss_for_module(
        self, *, module_id: str, config: Any, batch: MicroBatch, fwd_out: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of a micro-batch and, for each of its rows, sums (and maxima) over its response tokens."""
        surrogate = clipped_surrogate(
            batch.logp, batch.old_logp, batch.advantage, config.clip_low, config.clip_high, config.dual_clip
        )
        objective = surrogate.objective * batch.importance + config.entropy_coeff * batch.entropy
        measured = {
            "entropy": batch.entropy.detach(),
            "clip_fraction": surrogate.clipped.float(),
            "ratio_mean": surrogate.ratio,
            "engine_logprob_diff": (batch.logp.detach() - batch.engine_logp).abs(),
        }
        if batch.ref_logp is not None:
            kl = KL_ESTIMATORS[config.kl_estimator](batch.logp, batch.ref_logp)
            objective = objective - (0.0 if config.kl_in_reward else config.kl_beta) * kl
            measured["kl"] = kl.detach()
        numbers = {name: (values * batch.mask).sum(1) for name, values in measured.items()}
        numbers["ratio_max"] = (surrogate.ratio * batch.mask).amax(1)
        return -(objective * batch.weight).sum(), numbers
