"""What a system does before training, by role: ``python benchmarks/roles.py FILE --set engine=vllm --limit 60``.

Plays the first dev questions of an experiment file greedily with its untrained policy; prints for each role the means
of what the environment measures (illegal outputs, recall, ...) and the lengths, then scores with standard errors.
"""

import argparse
import time
from pathlib import Path

import numpy as np

from rllib_mhgpo.algorithms.evaluation import assemble, mean_and_error, record
from rllib_mhgpo.cli.doctor import configurations
from rllib_mhgpo.sampling import ONE_TRAJECTORY
from rllib_mhgpo.waves import Play, play


def main() -> None:
    """Prints the two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="changes", metavar="KEY=VALUE")
    parser.add_argument("--limit", type=int, default=60)
    parser.add_argument("--split", default="dev")
    options = parser.parse_args()
    (config,) = configurations(options.file, options.changes)
    system = assemble(config, config.llms, config.env_config)
    how = Play(
        ONE_TRAJECTORY, 0.0, config.max_response_tokens, (0,), options.split, keep_records=True, context=system.context
    )
    started = time.perf_counter()
    trees = play(system.env, system.engine, range(options.limit), how, {})
    print(
        f"{options.limit} questions in {time.perf_counter() - started:.0f} s, {sum(len(t.void) for t in trees)} voided"
    )
    acts = [act for tree in trees for act in tree.generations]
    names = list(dict.fromkeys(name for act in acts for name in act.metrics))
    print(
        "| role | prompt tokens | response tokens | cut off | "
        + " | ".join(names)
        + " |\n"
        + "|---" * (4 + len(names))
        + "|"
    )
    for agent in system.env.possible_agents:
        mine = [act for act in acts if act.agent == agent]
        values = [[act.metrics[name] for act in mine if name in act.metrics] for name in names]
        cells = [f"{np.mean(value):.2f}" if value else "" for value in values]
        lengths = [
            np.mean([len(part) for part in parts])
            for parts in zip(*((a.prompt, a.response) for a in mine), strict=True)
        ]
        cut = np.mean([act.truncated for act in mine])
        print(f"| {agent} | {lengths[0]:.0f} | {lengths[1]:.1f} | {cut:.2f} | " + " | ".join(cells) + " |")
    for name, (mean, error) in mean_and_error([record(tree) for tree in trees]).items():
        print(f"{name}: {100 * mean:.1f} ± {100 * error:.1f}")


if __name__ == "__main__":
    main()
