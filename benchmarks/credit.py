"""Seconds of credit and grouping for FoF(os) trees: ``python benchmarks/credit.py``.

Times what MHGPO does between sampling and the update: laying the trees out as arrays, running rewards back, grouping,
advantages, token weights and group similarity. One core, medians of seven, seconds of CPU time.
"""

import time
from statistics import median

import numpy as np

from rllib_mhgpo.algorithms.mhgpo import by_question
from rllib_mhgpo.credit import group_advantages, group_similarity, propagate, regroup_singletons, token_weights
from rllib_mhgpo.tree import Generation, RolloutTree, flatten

AGENTS = ("rewriter", "reranker", "answerer")
G = 4


def make_tree(root: int, rng: np.random.Generator) -> RolloutTree:
    """One FoF(os) tree: 4 + 4 + 16 generations of 16 tokens."""
    tree = RolloutTree(root)
    for k, agent in enumerate(AGENTS):
        for i in range(G if k < 2 else G * G):
            parents = () if k == 0 else (i,) if k == 1 else (G + i // G,)
            tokens = rng.integers(0, 5000, 16).astype(np.int32)
            shared = {"team": float(rng.integers(0, 2))} if k == 2 else {}
            tree.add(Generation(agent, tokens, tokens, np.zeros(16, np.float32), False, parents=parents, shared=shared))
    return tree


def credit(trees: list[RolloutTree]) -> dict[str, float]:
    """Returns seconds by part."""
    marks = [time.process_time()]

    def mark() -> None:
        marks.append(time.process_time())

    flat = flatten(trees, AGENTS)
    mark()
    reward = propagate(flat.edges, flat.shared)[:, 0] + flat.specific
    mark()
    groups = regroup_singletons(by_question(flat), flat.agent, G, np.random.default_rng(0))
    group_advantages(reward, groups)
    lengths = np.array([len(generation.response) for generation in flat.generations])
    token_weights(flat.agent, lengths)
    mark()
    responses = np.concatenate([generation.response for generation in flat.generations]).astype(np.int64)
    group_similarity(responses, np.repeat(np.arange(len(lengths)), lengths), groups)
    mark()
    return dict(zip(("flatten", "propagate", "advantages", "similarity"), np.diff(marks).tolist(), strict=True))


def main() -> None:
    """Prints one line a size."""
    rng = np.random.default_rng(0)
    print("| generations | flatten | propagate | groups and advantages | similarity | total ms | us a generation |")
    print("|---|---|---|---|---|---|---|")
    for questions in (42, 512, 4167):
        trees = [make_tree(root, rng) for root in range(questions)]
        runs = [credit(trees) for _ in range(7)]
        parts = [1000 * median(run[part] for run in runs) for part in runs[0]]
        count = questions * (2 * G + G * G)
        print(
            f"| {count} | "
            + " | ".join(f"{ms:.1f}" for ms in (*parts, sum(parts)))
            + f" | {1000 * sum(parts) / count:.1f} |"
        )


if __name__ == "__main__":
    main()
