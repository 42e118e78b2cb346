"""The command line in processes of its own: a sweep, an interrupt, a resumed run, names in every Ray session."""

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rllib_mhgpo.cli.yaml12 import format_yaml, parse_yaml

ENVIRONMENT = """
import time

import gymnasium as gym

from rllib_mhgpo.errors import DataError


class Counter(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)

    def __init__(self, config):
        self.broken, self.seconds = config.get("broken", False), config.get("seconds", 0)
        open(config["relative"]).close()

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.steps += 1
        time.sleep(self.seconds)
        if self.broken:
            raise DataError("question 7 has no answer")
        return self.observation_space.sample(), 1.0, self.steps == 10, False, {}
"""
SMALL = "train_batch_size: 40, minibatch_size: 20, num_epochs: 1, num_env_runners: 0, model: {fcnet_hiddens: [4]}"
RUNS = f"""
sweep:
  run: PPO
  env: counter:Counter
  stop: {{training_iteration: 2}}
  checkpoint_config: {{checkpoint_at_end: true}}
  config: {{{SMALL}, env_config: {{relative: here.txt, broken: {{grid_search: [false, true]}}}}}}
long:
  run: PPO
  env: counter:Counter
  stop: {{training_iteration: 40}}
  checkpoint_config: {{checkpoint_frequency: 1, num_to_keep: 2}}
  config: {{{SMALL}, env_config: {{relative: here.txt}}}}
"""


@dataclass
class Place:
    """A folder with an environment of its own, and the command run inside it."""

    folder: Path

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", "from rllib_mhgpo.cli import main; main()", "train", "file", *arguments]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(
            [*command, "--storage-path", "results", "--ray-num-cpus", "2"], cwd=self.folder, **pipes
        )


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "counter.py").write_text(ENVIRONMENT)
    (tmp_path / "here.txt").touch()
    for name, experiment in parse_yaml(RUNS, "runs").items():
        (tmp_path / f"{name}.yaml").write_text(format_yaml({name: experiment}))
    return Place(tmp_path)


def after_start(out: str) -> list[str]:
    """The lines after those that say that a trial begins, of which there must be some."""
    lines = out.splitlines()
    told = [line for line in lines if not line.endswith("starting; a line follows after each iteration")]
    assert len(told) < len(lines), out
    return told


def test_a_sweep_trains_where_it_can_and_says_why_where_not(place: Place) -> None:
    run = place.start("sweep.yaml")
    out, err = run.communicate(timeout=240)
    assert (run.returncode, err) == (1, "error: question 7 has no answer\n"), out
    first, second, end, heading, best, *_ = after_start(out)
    assert heading.split() == ["env_runners/episode_return_mean", "iterations", "trial", "checkpoint"]
    assert best.split()[:4] == ["1", "10", "2", "env_config/broken=False"]
    assert first.startswith("[0_broken=False] iteration 1/2 | return 10.0 | steps ")
    assert second.startswith("[0_broken=False] iteration 2/2 | return 10.0 | steps ")
    assert end.startswith("sweep [0_broken=False]: episode return 10.0 -> 10.0, 2 iterations, ")
    checkpoint = Path(end.rpartition("checkpoint ")[2])
    assert (checkpoint / "rllib_checkpoint.json").is_file()
    rows = [json.loads(row) for row in (checkpoint.parent / "result.json").read_text().splitlines()]
    assert [row["training_iteration"] for row in rows] == [1, 2]
    assert len((checkpoint.parent / "progress.csv").read_text().splitlines()) == 3
    assert list(checkpoint.parent.glob("events.out.tfevents.*"))


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_saved_and_resumed(place: Place, how: signal.Signals) -> None:
    run = place.start("long.yaml")
    assert run.stdout is not None
    for line in run.stdout:
        if "iteration 3/40" in line:
            run.send_signal(how)
            break
    rest, err = run.communicate(timeout=240)
    assert run.returncode == 130, rest + err
    saved = next(line for line in rest.splitlines() if line.startswith("Interrupted: iteration "))
    checkpoint = Path(saved.rpartition(" in ")[2])
    assert (checkpoint / "rllib_checkpoint.json").is_file()
    iteration = int(saved.split()[2])
    assert "--resume" in rest.splitlines()[-1]

    run = place.start("long.yaml", "--resume")
    out, err = run.communicate(timeout=240)
    assert run.returncode == 0, out + err
    assert after_start(out)[0].startswith(f"iteration {iteration + 1}/40 "), out
    assert "40 iterations" in out.splitlines()[-1]


def test_a_killed_run_loses_no_more_than_the_iteration_at_work(place: Place) -> None:
    """Tune notes every second checkpoint at once, the others within a second, which is less than an iteration here."""
    slow = ("long.yaml", "--set", "config.env_config.seconds=0.04", "--set", "stop.training_iteration=5")
    run = place.start(*slow)
    assert run.stdout is not None
    for line in run.stdout:
        if "iteration 4/5" in line:
            run.kill()
            break
    run.communicate(timeout=240)
    run = place.start(*slow, "--resume")
    out, err = run.communicate(timeout=240)
    assert run.returncode == 0, out + err
    assert [line.split()[1] for line in after_start(out)[:-1]] == ["4/5", "5/5"], out


def test_a_run_that_failed_while_it_was_saved_goes_on_to_its_end(place: Place) -> None:
    """Tune then keeps with the experiment's state that the trial is to stop; a resumed one would after an iteration."""
    run = place.start("long.yaml", "--stop", '{"training_iteration": 4}')
    run.communicate(timeout=240)
    (file,) = place.folder.glob("results/long/experiment_state-*.json")
    state = json.loads(file.read_text())
    ((trial, metadata),) = state["trial_data"]
    trial = {**json.loads(trial), "status": "ERROR", "stopping_criterion": {"training_iteration": 8}}
    state["runner_data"]["_cached_trial_decisions"] = {trial["trial_id"]: "STOP"}
    file.write_text(json.dumps({**state, "trial_data": [[json.dumps(trial), metadata]]}))
    run = place.start("long.yaml", "--resume")
    out, err = run.communicate(timeout=240)
    assert run.returncode == 0, out + err
    assert [line.split()[1] for line in after_start(out)[:-1]] == ["5/40", "6/40", "7/40", "8/40"]
    assert "8 iterations" in out.splitlines()[-1]


def test_a_column_that_never_comes_ends_the_run_after_an_iteration(place: Place) -> None:
    run = place.start("long.yaml", "--stop", '{"episode_reward_mean": 100}')
    out, err = run.communicate(timeout=240)
    assert run.returncode == 1, out + err
    assert err.startswith("error: long: stop: the first iteration reported no column 'episode_reward_mean', "), err
    assert "Did you mean 'env_runners/episode_return_mean'?" in err
    assert len(after_start(out)) <= 1


SESSIONS = """
import ray
from rllib_mhgpo.algorithms.registration import register

@ray.remote
def found():
    from ray.tune.registry import ENV_CREATOR, TRAINABLE_CLASS, _global_registry as registry
    return registry.contains(TRAINABLE_CLASS, "MHGPO"), registry.contains(ENV_CREATOR, "search")

for session in range(2):
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    register()
    register()
    print(*ray.get(found.remote()))
    ray.shutdown()
"""


def test_names_are_found_in_workers_of_every_ray_session() -> None:
    run = subprocess.run([sys.executable, "-c", SESSIONS], capture_output=True, text=True, timeout=240, check=True)
    assert run.stdout.splitlines() == ["True True"] * 2
