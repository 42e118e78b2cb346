"""From trees and an update to the columns of a result row.

Every column is there in every row and always in the same order; a number that does not exist is NaN, never 0.
"""

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rllib_mhgpo.credit import group_similarity
from rllib_mhgpo.train_batch import TrainBatch
from rllib_mhgpo.tree import FlatTrees, RolloutTree

NAN = float("nan")
SCORES = ("f1", "em", "acc", "avg")
NO_DEV = {**dict.fromkeys(SCORES, NAN), "iteration": 0, "questions": 0}
PER_TOKEN = ("entropy", "kl", "clip_fraction", "ratio_mean")
IN_SAMPLING = ("sample", "generate", "step", "retrieve", "encode", "search")
PHASES = (*IN_SAMPLING, "credit", "update", "sync", "record", "evaluate", "total")


@dataclass(frozen=True)
class Iteration:
    """What one iteration made; arrays are over its N generations.

    Attributes:
        flat: the generations.
        credit: what the algorithm gave them.
        batch: what was trained.
        updated: which generations the update computed.
        measured: what the loss hook measured, sums over response tokens.
        followers: by policy, the numbers of the agents that follow it; empty where all share one.
    """

    flat: FlatTrees
    credit: Mapping[str, NDArray[Any]]
    batch: TrainBatch
    updated: NDArray[np.bool_]
    measured: Mapping[str, NDArray[np.float64]]
    followers: Mapping[str, Sequence[int]]

    @cached_property
    def before_moving(self) -> NDArray[np.bool_]:
        """Which generations were measured under the weights that sampled them: those of each policy's first step."""
        steps, found = self.batch.steps, np.zeros(len(self.updated), dtype=bool)
        for agents in self.followers.values() or [np.unique(self.flat.agent)]:
            rows = self.updated & np.isin(self.flat.agent, agents)
            found |= rows & (steps == steps[rows].min(initial=steps.max(initial=0)))
        return found


def summarise(
    trees: Sequence[RolloutTree],
    iteration: Iteration,
    update: Mapping[str, Any],
    agents: Sequence[str],
    seconds: Mapping[str, float],
    generated: int,
) -> dict[str, Any]:
    """Returns the nested columns of docs/metrics.md, without dev scores.

    Args:
        generated: tokens that the policy said, those of replaced questions included.
    """
    flat = iteration.flat
    lengths = response_lengths(flat)
    similar = similarity(flat, iteration.credit["group"])
    everyone = np.ones(len(lengths), dtype=bool)
    return {
        "train": mean_scores(trees),
        **{
            agent: {**_columns(iteration, similar, flat.agent == k), **_environment_numbers(flat, flat.agent == k)}
            for k, agent in enumerate(agents)
        },
        **_columns(iteration, similar, everyone),
        **_steps(update),
        **_by_policy(iteration, similar, update),
        "num_voided": sum(len(tree.void) for tree in trees),
        "num_tokens_generated": generated,
        "num_tokens_trained": int(lengths[iteration.updated].sum()),
        **_computed(update["counts"], seconds["update"]),
        "tokens_per_s": generated / seconds["total"],
        "generations_per_s": len(lengths) / seconds["total"],
        "peak_memory_gb": peak_memory() / 1e9,
        "time": {f"{phase}_s": float(seconds.get(phase, 0.0)) for phase in PHASES},
    }


def _by_policy(iteration: Iteration, similar: NDArray[np.float64], update: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of each policy: means over the acts of the agents that follow it, and its optimiser steps."""
    columns = {
        name: {
            **_columns(iteration, similar, np.isin(iteration.flat.agent, agents)),
            **_steps(update["policies"][name]),
        }
        for name, agents in iteration.followers.items()
    }
    return {"policies": columns} if columns else {}


def _steps(update: Mapping[str, Any]) -> dict[str, float]:
    """Mean norm of the gradients, and how many optimiser steps had none that was finite."""
    norms = update["grad_norms"]
    return {"grad_norm": float(np.mean(norms)) if norms else NAN, "skipped_steps": update["skipped_steps"]}


def _computed(counts: Mapping[str, float], seconds: float) -> dict[str, float]:
    """What an update computed; ``counts`` are those of the learners' micro-batches."""
    if not counts.get("computed"):
        return {"num_tokens_computed": 0, "shared_token_share": NAN, "padding_share": NAN, "mfu": NAN}
    return {
        "num_tokens_computed": int(counts["computed"]),
        "shared_token_share": 1 - counts["distinct"] / counts["asked"],
        "padding_share": 1 - counts["distinct"] / counts["computed"],
        "mfu": counts["flops"] / seconds / counts["flops_per_s"],
    }


def response_lengths(flat: FlatTrees) -> NDArray[np.int64]:
    """Tokens that the policy said in each response, (N,)."""
    return np.array([generation.num_tokens for generation in flat.generations], dtype=np.int64)


def peak_memory() -> int:
    """Most bytes that this process has held at once."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def similarity(flat: FlatTrees, group: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns the similarity of each generation's group, (N,), NaN where it is alone or not trained."""
    result = np.full(len(flat.generations), NAN)
    rows = np.flatnonzero(flat.trained)
    if len(rows):
        responses = [flat.generations[row].response_said for row in rows]
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
    if divisor and not any(tree.generations for tree in trees):  # every trajectory was given up
        return dict.fromkeys(names, 0.0)
    return {name: _mean([score[name] for score in scores if name in score], divisor) for name in names}


def _environment_numbers(flat: FlatTrees, mine: NDArray[np.bool_]) -> dict[str, float]:
    """Means of what the environment measured at these acts."""
    acts = [flat.generations[row] for row in np.flatnonzero(mine)]
    names = dict.fromkeys(name for act in acts for name in act.metrics)
    return {name: _mean([act.metrics[name] for act in acts if name in act.metrics]) for name in names}


def _columns(iteration: Iteration, similar: NDArray[np.float64], mine: NDArray[np.bool_]) -> dict[str, float]:
    """Means over these generations, over those that may be trained, and over the tokens that were."""
    flat, credit, batch = iteration.flat, iteration.credit, iteration.batch
    acts, lengths = [flat.generations[row] for row in np.flatnonzero(mine)], response_lengths(flat)
    grouped, trained = mine & flat.trained, mine & iteration.updated
    unmoved = mine & iteration.before_moving
    return {
        "num_generations": len(acts),
        **{name: _mean(credit[name][mine]) for name in ("reward", "reward_shared", "reward_specific")},
        "advantage_mean": _mean(credit["advantage"][grouped]),
        "advantage_std": float(np.std(credit["advantage"][grouped])) if grouped.any() else NAN,
        "zero_std_share": _mean(credit["zero_std"][grouped]),
        "singletons": int(credit["singleton"][grouped].sum()),
        "similarity": _mean(similar[mine & np.isfinite(similar)]),
        "prompt_tokens": _mean([len(act.prompt) for act in acts]),
        "response_tokens": _mean([act.num_tokens for act in acts]),
        "truncated_share": _mean([float(act.truncated) for act in acts]),
        **{name: _token_mean(iteration.measured.get(name), lengths, trained) for name in PER_TOKEN},
        **{
            name: _token_mean(iteration.measured[name], lengths, mine & (batch.weights != 0))
            for name in ("value_loss",)
            if name in iteration.measured
        },
        "ratio_max": _max(iteration.measured.get("ratio_max"), trained),
        **{
            name: _token_mean(iteration.measured.get(name), lengths, unmoved)
            for name in ("engine_logprob_diff", "engine_kl")
        },
        "engine_logprob_diff_max": _max(iteration.measured.get("engine_logprob_diff_max"), unmoved),
    }


def _token_mean(sums: NDArray[np.float64] | None, lengths: NDArray[np.int64], rows: NDArray[np.bool_]) -> float:
    tokens = lengths[rows].sum()
    return NAN if sums is None or not tokens else float(sums[rows].sum() / tokens)


def _max(values: NDArray[np.float64] | None, rows: NDArray[np.bool_]) -> float:
    return NAN if values is None or not rows.any() else float(values[rows].max())


def _mean(values: Any, divisor: int | None = None) -> float:
    values = np.asarray(values, dtype=np.float64)
    count = len(values) if divisor is None else divisor
    return float(values.sum() / count) if len(values) else NAN


def merged(columns: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Returns nested columns with more of them added.

    >>> merged({"a": {"x": 1}}, {"a": {"y": 2}, "b": 3})
    {'a': {'x': 1, 'y': 2}, 'b': 3}
    """
    both = {name: {**columns[name], **value} for name, value in more.items() if isinstance(value, dict)}
    return {**columns, **more, **both}
