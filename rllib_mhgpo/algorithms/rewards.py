"""Rewards of generations beside what their environment paid at their step."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from rllib_mhgpo.algorithms.config import LLMConfig
from rllib_mhgpo.algorithms.learner_pool import LearnerPool
from rllib_mhgpo.algorithms.registration import import_named
from rllib_mhgpo.credit import AGGREGATIONS, propagate
from rllib_mhgpo.train_batch import TrainBatch
from rllib_mhgpo.tree import FlatTrees

Floats = NDArray[np.float64]


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
    """``kl_beta`` times the summed k1 estimate of each response, (N,), where the KL is part of the reward."""
    if not config.kl_in_reward:
        return np.zeros(len(flat.generations))
    ones = np.ones(len(flat.generations))
    batch = TrainBatch.of(flat.generations, ones, ones, np.zeros(len(ones), dtype=np.int64))
    kl = np.zeros(len(batch))
    for rows, found in learners.each_shard(lambda learner, shard: learner.reference_kl(shard), batch, flat.tree):
        kl[rows] = found
    return config.kl_beta * kl


def overlong_penalty(flat: FlatTrees, limits: int | Mapping[str, int], width: int) -> Floats:
    """From 0, ``width`` tokens before a response's limit, down to -1 at it, (N,) (DAPO, equation 13)."""
    if width == 0:
        return np.zeros(len(flat.generations))
    length = np.array([generation.num_tokens for generation in flat.generations])
    given = [limits if isinstance(limits, int) else limits[g.agent] for g in flat.generations]
    limit = np.where([g.truncated for g in flat.generations], length, given)
    penalty: Floats = -np.clip((length - (limit - width)) / width, 0.0, 1.0)
    return penalty
