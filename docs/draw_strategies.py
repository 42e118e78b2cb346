"""Draws docs/strategies.svg: what each rollout strategy samples for one question, n = 3 agents, G = 4.

The trees are played by the package itself, with an engine that writes placeholders. Run: python docs/draw_strategies.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from rllib_mhgpo.sampling import STRATEGIES, Options, Visit
from rllib_mhgpo.tree import Generation, RolloutTree

AGENTS = ("rewriter", "reranker", "answerer")
TITLES = {
    "is": "is: independent\n24 sampled, 12 trained",
    "fof": "fof: fork on first\n12 sampled",
    "rr": "rr: round-robin, fork at the reranker\n9 sampled",
    "fof_os": "fof_os: oversampling\n24 sampled",
}


def grow(name: str) -> RolloutTree:
    """Plays one question of a chain of agents that say nothing."""
    strategy = STRATEGIES[name](Options(group_size=4, num_agents=3, fork_probs=(0.0, 1.0, 0.0)))
    tree, live = RolloutTree(0), [((), None)]
    nothing = np.zeros(0, np.int32)
    for position, agent in enumerate(AGENTS):
        following = []
        for path, parent in live:
            flags = strategy(Visit(0, agent, position, 3, 0, path, (0,) * len(path)))
            for sample, trained in enumerate(flags):
                parents = () if parent is None else (parent,)
                generation = Generation(
                    agent, nothing, nothing, nothing, False, previous=parent, parents=parents, trained=trained
                )
                following.append(((*path, sample), tree.add(generation)))
        live = following
    return tree


def draw(axes: plt.Axes, name: str) -> None:
    """Draws a tree from left to right; filled nodes are trained, hollow ones sampled only for the reward."""
    tree = grow(name)
    leaves = [i for i, g in enumerate(tree.generations) if g.agent == AGENTS[-1]]
    height = {leaf: float(row) for row, leaf in enumerate(leaves)}
    for i in reversed(range(len(tree.generations))):
        below = [height[j] for j, g in enumerate(tree.generations) if i in g.parents]
        height.setdefault(i, float(np.mean(below)) if below else 0.0)
    middle = float(np.mean(list(height.values())))
    for i, generation in enumerate(tree.generations):
        x, y = 1 + AGENTS.index(generation.agent), height[i]
        before = (x - 1, height[generation.parents[0]]) if generation.parents else (0, middle)
        axes.plot([before[0], x], [before[1], y], color="#9aa5b1", linewidth=0.8, zorder=1)
        face = "#2563eb" if generation.trained else "white"
        axes.scatter([x], [y], s=34, color=face, edgecolors="#2563eb", zorder=2)
    axes.scatter([0], [middle], s=60, marker="s", color="#1f2933", zorder=2)
    axes.set_title(TITLES[name], fontsize=9)
    axes.set_xticks(range(4), ["question", *AGENTS], fontsize=8)
    axes.set_yticks([])
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def main() -> None:
    """Writes the picture beside this file."""
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.6), layout="constrained")
    for place, name in zip(axes, TITLES, strict=True):
        draw(place, name)
    plt.rcParams["svg.hashsalt"] = "strategies"
    figure.savefig(Path(__file__).with_name("strategies.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
