"""Rewards of generations beside what their environment paid at their step."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from rllib_mhgpo.algorithms.config import LLMConfig
from rllib_mhgpo.algorithms.learner_pool import LearnerPool
from rllib_mhgpo.algorithms.registration import import_named
from rllib_mhgpo.credit import AGGREGATIONS, propagate
from rllib_mhgpo.train_batch import TrainBatch
from rllib_mhgpo.tree import FlatTrees, RolloutTree

Floats = NDArray[np.float64]
LOGPROB_ROUNDING = {"float32": 1e-5, "bfloat16": 0.05}
"""By dtype: how far rounding may move the log-probability of a token less that of the reference.

Twice (bfloat16) and five times the largest difference between two layouts that was measured on small models."""


def propagated(flat: FlatTrees, specific: Floats, config: LLMConfig, rng: np.random.Generator) -> Floats:
    """Returns what ran back to each generation for its team, (N,); penalties run back only where that is asked for."""
    own = (np.arange(len(flat.team)), flat.team)
    earned = flat.shared.copy()
    if config.propagate_specific:
        earned[own] += specific
    aggregate = import_named("reward_aggregation", config.reward_aggregation, AGGREGATIONS)
    total: Floats = propagate(flat.edges, earned, aggregate, rng)[own]
    return total - specific if config.propagate_specific else total


def kl_penalty(flat: FlatTrees, config: LLMConfig, learners: LearnerPool) -> Floats:
    """``kl_beta`` times the summed k1 estimate of each response, (N,), where the KL is part of the reward.

    0 for opponents' responses, which are not the policy's, and while the policy is the reference.
    """
    penalty = np.zeros(len(flat.generations))
    if not config.kl_in_reward:
        return penalty
    mine = np.flatnonzero([generation.agent not in config.opponents for generation in flat.generations])
    ones = np.ones(len(mine))
    batch = TrainBatch.of([flat.generations[row] for row in mine], ones, ones, np.zeros(len(mine), dtype=np.int64))
    kl = learners.each_shard(lambda learner, shard: learner.reference_kl(shard), batch, flat.tree[mine])
    for rows, found in kl:
        penalty[mine[rows]] = config.kl_beta * found
    return penalty


def kl_rounding(flat: FlatTrees, config: LLMConfig) -> Floats:
    """How far rounding may move each reward that holds a KL, (N,): rewards that are no further apart are equal.

    Tokens err independently, so the error of a sum grows with the root of its tokens. A group whose KLs truly differ
    learns from them; where they differ by less, the layout or the number of learners would decide what is learned.
    """
    if not config.kl_in_reward:
        return np.zeros(len(flat.generations))
    tokens = np.array([float(generation.num_tokens) for generation in flat.generations])
    if config.propagate_specific:  # successors' KLs too
        tokens = propagate(flat.edges, tokens[:, None], "max")[:, 0]
    rounding: Floats = config.kl_beta * LOGPROB_ROUNDING[config.dtype] * np.sqrt(tokens)
    return rounding


def charge_overlong(trees: Iterable[RolloutTree], config: LLMConfig) -> None:
    """Takes from every response, opponents' excepted, what its length costs: ``specific`` falls by up to 1.

    From 0, ``overlong_penalty_tokens`` before its limit, to 1 at it, or where it was cut off (DAPO, arXiv:2503.14476,
    equation 13). Rounds of one context, each with the limit to itself, are charged before they are joined.
    """
    width, limits = config.overlong_penalty_tokens, config.max_response_tokens
    for generation in (g for tree in trees for g in tree.generations if width and g.agent not in config.opponents):
        limit = limits if isinstance(limits, int) else limits[generation.agent]
        over = width if generation.truncated else generation.num_tokens - (limit - width)
        generation.specific -= max(0, over) / width
