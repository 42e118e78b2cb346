"""The policy's objective, common to all algorithms of this package: clipped surrogate, KL, entropy bonus."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rllib_mhgpo.learner import LLMLearner
from rllib_mhgpo.losses import KL_ESTIMATORS, clipped_surrogate
from rllib_mhgpo.train_batch import MicroBatch, TrainBatch


class PolicyLearner(LLMLearner):
    """The objective of equation 8 (arXiv:2506.02718), negated."""

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
            "engine_kl": KL_ESTIMATORS["k3"](batch.engine_logp, batch.logp.detach()),
        }
        if batch.ref_logp is not None:
            kl = KL_ESTIMATORS[config.kl_estimator](batch.logp, batch.ref_logp)
            objective = objective - (0.0 if config.kl_in_reward else config.kl_beta) * kl
            measured["kl"] = kl.detach()
        numbers = {name: (values * batch.mask).sum(1) for name, values in measured.items()}
        numbers["ratio_max"] = (surrogate.ratio * batch.mask).amax(1)
        numbers["engine_logprob_diff_max"] = (measured["engine_logprob_diff"] * batch.mask).amax(1)
        return -(objective * batch.weight).sum(), numbers
