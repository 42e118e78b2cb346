"""The gradient of a run's own rows by kinds of packing: ``python benchmarks/packing.py TRIAL --iterations 2 3 4``.

Reads the trees that a trial recorded (``record_share`` of them) and computes the gradient of all their generations with
each kind of packing in turn. Prints medians, ratios to ``off``, tokens, and how far the gradients are apart.
"""

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from torch import Tensor

from rllib_mhgpo.algorithms.mhgpo import MHGPOConfig
from rllib_mhgpo.algorithms.objective import PolicyLearner
from rllib_mhgpo.records import read_file, record_files
from rllib_mhgpo.spaces import TokenSequence
from rllib_mhgpo.train_batch import TrainBatch

MODES = ("off", "shared", "auto")


def batch_of(rows: list[dict[str, Any]]) -> TrainBatch:
    """A batch of recorded generations with random advantages."""
    n = len(rows)
    return TrainBatch(
        prompts=[np.array(row["prompt_ids"], np.int32) for row in rows],
        responses=[np.array(row["response_ids"], np.int32) for row in rows],
        logprobs=[np.array(row["logprobs"], np.float32) for row in rows],
        advantages=np.random.default_rng(0).normal(size=n),
        weights=np.full(n, 1 / n / 8),
        steps=np.zeros(n, np.int64),
        said=[None if row["said"] is None else np.array(row["said"], bool) for row in rows],
    )


def make_learner(llm: str, packing: str, max_tokens: int) -> PolicyLearner:
    """A learner with a reference policy, as the default job has."""
    config = MHGPOConfig().training(llm=llm, kl_beta=0.001, packing=packing, max_tokens_per_microbatch=max_tokens)
    spec = config.get_default_rl_module_spec()
    spec.observation_space = spec.action_space = TokenSequence(200_000, 8192)
    learner = PolicyLearner(config=config, module_spec=MultiRLModuleSpec(rl_module_specs={"default_policy": spec}))
    learner.build()
    return learner


def gradient(learner: PolicyLearner, batch: TrainBatch) -> tuple[float, Tensor]:
    """Seconds and the gradient."""
    llm = learner.module["default_policy"].llm
    llm.zero_grad(set_to_none=True)
    learner.policy.micro.counts.clear()
    started = time.perf_counter()
    learner.accumulate(batch, np.arange(len(batch)))
    return time.perf_counter() - started, torch.cat([p.grad.flatten() for p in llm.parameters()])


def main() -> None:
    """Prints one line a kind of packing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="TRIAL")
    parser.add_argument("--iterations", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--llm", default="tiny")
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    recorded = record_files(options.run / "records", options.iterations)
    files = [file for file in recorded if file.name.startswith("train")]
    batch = batch_of([row for file in files for row in read_file(file).to_pylist()])
    learners = {mode: make_learner(options.llm, mode, options.max_tokens) for mode in MODES}
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    gradients: dict[str, Tensor] = {}
    for _ in range(options.repeats):
        for mode, learner in learners.items():
            spent, gradients[mode] = gradient(learner, batch)
            seconds[mode].append(spent)
    whole = gradients["off"].abs().max()
    print(f"{len(batch)} generations\n")
    print("| packing | seconds | ratio to off | tokens computed | distinct | gradient apart |")
    print("|---|---|---|---|---|---|")
    for mode, learner in learners.items():
        ratio = median(mine / off for mine, off in zip(seconds[mode], seconds["off"], strict=True))
        counts, apart = learner.policy.micro.counts, float((gradients[mode] - gradients["off"]).abs().max() / whole)
        tokens = f"{counts['computed']:,} | {counts['distinct']:,}"
        print(f"| {mode} | {median(seconds[mode]):.2f} | {ratio:.2f} | {tokens} | {apart:.0e} |")


if __name__ == "__main__":
    main()
