"""How an iteration's time changes with runners, sampling ahead and ZeRO: ``python benchmarks/scaling.py``.

Trains the embedded default with one thread a process and prints the median seconds of an iteration of each variant
over that of the first, each variant run in turn so that a noisy machine disturbs all alike; then seconds of a weight
sync and of saving and loading a checkpoint by model size.
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import ray

from rllib_mhgpo.algorithms.mhgpo import MHGPOConfig
from rllib_mhgpo.cli.experiments import load_experiments

FILE = Path(__file__).parent.parent / "tuned_examples" / "mhgpo_hotpot.yaml"
VARIANTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "1 runner": {"num_env_runners": 1},
    "2 runners": {"num_env_runners": 2},
    "1 runner, sample_ahead": {"num_env_runners": 1, "sample_ahead": 1, "rollout_is_cap": 2.0},
    **{
        f"2 learners, {'replicas' if stage == 0 else f'ZeRO {stage}'}": {
            "num_learners": 2,
            "deepspeed": {"zero_stage": stage},
        }
        for stage in range(4)
    },
}


def build(**changes: Any) -> Any:
    """Returns the algorithm of the default job with changes."""
    (experiment,) = load_experiments(FILE).values()
    settings = {**experiment["config"], "evaluation_interval": None, "num_cpus_for_main_process": 1, **changes}
    return MHGPOConfig().update_from_dict(settings).build_algo()


def iterations(variants: list[str], rounds: int) -> dict[str, list[float]]:
    """Returns seconds of ``rounds`` iterations of each variant; the first iteration of each is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for name in variants:
        algorithm = build(**VARIANTS[name])
        algorithm.train()
        for _ in range(rounds):
            started = time.perf_counter()
            algorithm.train()
            seconds[name].append(time.perf_counter() - started)
        algorithm.stop()
    return seconds


def checkpoints(llm: str) -> tuple[float, float, float]:
    """Returns seconds of a weight sync to one runner, of saving and of loading a checkpoint."""
    algorithm = build(llm=llm, num_env_runners=1, env_config={"prompts": "hotpot", "questions": "minipedia:train"})
    spans = []
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "checkpoint")
        for act in (algorithm._sync, lambda: algorithm.save_to_path(path), lambda: algorithm.restore_from_path(path)):
            started = time.perf_counter()
            act()
            spans.append(time.perf_counter() - started)
    algorithm.stop()
    return spans[0], spans[1], spans[2]


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llms", nargs="*", default=["tiny"])
    options = parser.parse_args()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    seconds = iterations(options.variants, options.rounds)
    base = median(seconds[options.variants[0]])
    print("| variant | iteration, s | over the first |\n|---|---|---|")
    for name, found in seconds.items():
        print(f"| {name} | {median(found):.2f} | {median(found) / base:.2f} |")
    print("\n| model | weight sync, s | save, s | load, s |\n|---|---|---|---|")
    for llm in options.llms:
        print(f"| {llm} | " + " | ".join(f"{span:.2f}" for span in checkpoints(llm)) + " |")


if __name__ == "__main__":
    main()
