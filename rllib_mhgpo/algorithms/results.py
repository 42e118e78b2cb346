"""From trees and an update to the columns of a result row.

Every column is there in every row and always in the same order; a number that does not exist is NaN, never 0.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rllib_mhgpo.credit import group_similarity
from rllib_mhgpo.learner import TrainBatch
from rllib_mhgpo.tree import FlatTrees, RolloutTree

NAN = float("nan")
SCORES = ("f1", "em", "acc", "avg")
NO_DEV = {**dict.fromkeys(SCORES, NAN), "iteration": 0, "questions": 0}
PER_TOKEN = ("entropy", "kl", "clip_fraction", "ratio_mean", "engine_logprob_diff")
PHASES = ("sample", "generate", "step", "retrieve", "credit", "update", "sync", "evaluate", "total")


def summarise(
    trees: Sequence[RolloutTree],
    flat: FlatTrees,
    credit: Mapping[str, NDArray[Any]],
    batch: TrainBatch,
    update: Mapping[str, Any],
    agents: Sequence[str],
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """Returns the nested columns of docs/metrics.md, without dev scores."""
    lengths = np.array([len(generation.response) for generation in flat.generations])
    trained = batch.weights != 0
    similar = similarity(flat, credit["group"])
    norms = update["grad_norms"]
    generated = int(lengths.sum())
    return {
        "train": mean_scores(trees),
        **{
            agent: {
                **_agent_columns(flat, credit, update["per_generation"], lengths, trained, flat.agent == k),
                "similarity": _mean(similar[(flat.agent == k) & np.isfinite(similar)]),
            }
            for k, agent in enumerate(agents)
        },
        "similarity": _mean(similar[np.isfinite(similar)]),
        **_columns(credit, update["per_generation"], lengths, trained, np.ones(len(lengths), dtype=bool)),
        "grad_norm": float(np.mean(norms)) if norms else NAN,
        "skipped_steps": update["skipped_steps"],
        "num_generations": len(lengths),
        "num_voided": sum(len(tree.void) for tree in trees),
        "num_tokens_generated": generated,
        "num_tokens_trained": int(lengths[trained].sum()),
        "tokens_per_s": generated / seconds["total"],
        "time": {f"{phase}_s": float(seconds.get(phase, 0.0)) for phase in PHASES},
    }


def similarity(flat: FlatTrees, group: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns the similarity of each generation's group, (N,), NaN where it is alone or not trained."""
    result = np.full(len(flat.generations), NAN)
    rows = np.flatnonzero(flat.trained)
    if len(rows):
        responses = [flat.generations[row].response for row in rows]
        owners = np.repeat(np.arange(len(rows)), [len(response) for response in responses])
        _, place = np.unique(group[rows], return_inverse=True)
        result[rows] = group_similarity(np.concatenate(responses).astype(np.int64), owners, place)[place]
    return result


def mean_scores(trees: Sequence[RolloutTree], divisor: int | None = None) -> dict[str, float]:
    """Averages the scores of all finished trajectories; with ``divisor`` missing ones count 0.

    The usual scores are always there, NaN where the environment gives none.
    """
    scores = [g.scores for tree in trees for g in tree.generations if g.scores]
    names = list(dict.fromkeys([*SCORES, *(name for score in scores for name in score)]))
    return {name: _mean([score[name] for score in scores if name in score], divisor) for name in names}


def _agent_columns(
    flat: FlatTrees,
    credit: Mapping[str, NDArray[Any]],
    measured: Mapping[str, NDArray[np.float64]],
    lengths: NDArray[np.int64],
    trained: NDArray[np.bool_],
    mine: NDArray[np.bool_],
) -> dict[str, float]:
    acts = [flat.generations[row] for row in np.flatnonzero(mine)]
    names = dict.fromkeys(name for act in acts for name in act.metrics)
    return {
        **_columns(credit, measured, lengths, trained, mine),
        "num_generations": len(acts),
        "prompt_tokens": _mean([len(act.prompt) for act in acts]),
        "response_tokens": _mean([len(act.response) for act in acts]),
        "truncated_share": _mean([float(act.truncated) for act in acts]),
        **{name: _mean([act.metrics[name] for act in acts if name in act.metrics]) for name in names},
    }


def _columns(
    credit: Mapping[str, NDArray[Any]],
    measured: Mapping[str, NDArray[np.float64]],
    lengths: NDArray[np.int64],
    trained: NDArray[np.bool_],
    mine: NDArray[np.bool_],
) -> dict[str, float]:
    """Means over generations of what credit says, over trained tokens of what the update measured."""
    rows = mine & trained
    tokens = lengths[rows].sum()
    return {
        **{name: _mean(credit[name][mine]) for name in ("reward", "reward_shared", "reward_specific")},
        "advantage_mean": _mean(credit["advantage"][mine]),
        "advantage_std": float(np.std(credit["advantage"][mine])) if mine.any() else NAN,
        "zero_std_share": _mean(credit["zero_std"][mine]),
        "singletons": int(credit["singleton"][mine].sum()),
        **{
            name: float(measured[name][rows].sum() / tokens) if tokens and name in measured else NAN
            for name in PER_TOKEN
        },
        "ratio_max": float(measured["ratio_max"][rows].max()) if tokens and "ratio_max" in measured else NAN,
    }


def _mean(values: Any, divisor: int | None = None) -> float:
    values = np.asarray(values, dtype=np.float64)
    count = len(values) if divisor is None else divisor
    return float(values.sum() / count) if len(values) else NAN
