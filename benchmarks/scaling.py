"""How an iteration's time changes with runners, sampling ahead and ZeRO: ``python benchmarks/scaling.py``.

Trains the embedded default with one thread a process and prints the median seconds of an iteration of each variant
over that of the first; then seconds of a weight sync and of saving and loading a checkpoint by model size. What is
measured is kept in ``--out``; a call ends after ``--minutes`` and the next one measures what is missing.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import ray

from rllib_mhgpo.algorithms.mhgpo import MHGPOConfig
from rllib_mhgpo.cli.experiments import load_experiments
from rllib_mhgpo.llms.shape import model_shape

FILE = Path(__file__).parent.parent / "tuned_examples" / "mhgpo_hotpot.yaml"
VARIANTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "1 runner": {"num_env_runners": 1},
    "2 runners": {"num_env_runners": 2},
    "1 runner, sample_ahead": {"num_env_runners": 1, "sample_ahead": 1, "rollout_is_cap": 2.0},
    "2 runners, sample_ahead": {"num_env_runners": 2, "sample_ahead": 1, "rollout_is_cap": 2.0},
    **{
        f"2 learners, {'replicas' if stage == 0 else f'ZeRO {stage}'}": {
            "num_learners": 2,
            "deepspeed": {"zero_stage": stage},
        }
        for stage in range(4)
    },
}


def build(questions: int | None, **changes: Any) -> Any:
    """Returns the algorithm of the default job with changes."""
    (experiment,) = load_experiments(FILE).values()
    fewer = {} if questions is None else {"questions_per_iteration": questions, "minibatch_questions": None}
    settings = {"evaluation_interval": None, "num_cpus_for_main_process": 1, **fewer, **changes}
    return MHGPOConfig().update_from_dict({**experiment["config"], **settings}).build_algo()


def timed(act: Callable[[], Any]) -> float:
    """Returns the seconds that a call takes."""
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def iterations(name: str, rounds: int, questions: int | None) -> list[float]:
    """Returns seconds of ``rounds`` iterations of a variant after the first."""
    algorithm = build(questions, **VARIANTS[name])
    try:
        algorithm.train()
        return [timed(algorithm.train) for _ in range(rounds)]
    finally:
        algorithm.stop()


def checkpoints(llm: str) -> list[float]:
    """Returns seconds of a weight sync to one runner, of saving and of loading a checkpoint."""
    settings = {"prompts": "hotpot", "questions": "minipedia:train"}
    algorithm = build(None, llm=llm, num_env_runners=1, env_config=settings)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "checkpoint")
            save, load = partial(algorithm.save_to_path, path), partial(algorithm.restore_from_path, path)
            return [timed(algorithm._sync), timed(save), timed(load)]
    finally:
        algorithm.stop()


def show(found: dict[str, Any]) -> None:
    """Prints both tables of what has been measured."""
    print("| variant | iteration, s | least to most | over the first |\n|---|---|---|---|")
    base = median(next(iter(found["iterations"].values()), [float("nan")]))
    for name, seconds in found["iterations"].items():
        middle = median(seconds)
        print(f"| {name} | {middle:.2f} | {min(seconds):.2f} to {max(seconds):.2f} | {middle / base:.2f} |")
    print("\n| model | parameters | weight sync, s | save, s | load, s |\n|---|---|---|---|---|")
    for llm, seconds in found["checkpoints"].items():
        millions = model_shape(llm).parameters / 1e6
        print(f"| {llm} | {millions:,.1f} M | " + " | ".join(f"{span:.2f}" for span in seconds) + " |")


def main() -> None:
    """Measures what is missing and prints what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--questions", type=int, help="of an iteration, for a trial; those of the job by default")
    parser.add_argument("--llms", nargs="*", default=["tiny", "tiny_1"])
    parser.add_argument("--out", type=Path, default=Path("scaling.json"))
    parser.add_argument("--minutes", type=float, default=7.0, help="after which nothing more is begun")
    options = parser.parse_args()
    found = json.loads(options.out.read_text()) if options.out.exists() else {"iterations": {}, "checkpoints": {}}
    jobs: list[tuple[str, str, Callable[[], list[float]]]] = [
        *(
            ("iterations", name, partial(iterations, name, options.rounds, options.questions))
            for name in options.variants
        ),
        *(("checkpoints", llm, partial(checkpoints, llm)) for llm in options.llms),
    ]
    end = time.monotonic() + 60 * options.minutes
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    for kind, name, job in jobs:
        if name not in found[kind] and time.monotonic() < end:
            found[kind][name] = job()
            options.out.write_text(json.dumps(found, indent=1))
    ray.shutdown()
    show(found)


if __name__ == "__main__":
    main()
