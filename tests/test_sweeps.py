"""Sweeps: spaces in YAML, schedulers and search algorithms with their keys, a kill, the table of the best."""

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rllib_mhgpo.cli import app
from rllib_mhgpo.cli.checks import check, variants
from rllib_mhgpo.cli.experiments import load_experiments, normalise
from rllib_mhgpo.cli.search_spaces import SPACES, places, searched
from rllib_mhgpo.cli.tuners import check_search, make_scheduler, make_search_alg, table_of_best
from rllib_mhgpo.cli.yaml12 import format_yaml, parse_yaml
from rllib_mhgpo.errors import ConfigError
from tests.rig import equal, weights

BOUNDS: dict[str, list[Any]] = {
    "choice": [3, 4], "uniform": [3, 4], "quniform": [3, 4, 0.5], "loguniform": [3, 4], "qloguniform": [3, 4, 0.5],
    "randint": [3, 5], "qrandint": [3, 4], "lograndint": [3, 5], "qlograndint": [3, 4, 1], "randn": [3.5, 0.01],
    "qrandn": [3.5, 0.01, 0.5],
}  # fmt: skip


@pytest.mark.parametrize("space", SPACES)
def test_every_space_of_tune_is_found_at_any_depth(space: str) -> None:
    spec = {space: BOUNDS[space]}
    config = {"lr": spec, "env_config": {"a": {"b": spec}}, "layers": [8, spec], "both": {"grid_search": [1, spec]}}
    grids, domains = places(searched(config))
    assert (grids, domains) == (["both"], ["lr", "env_config/a/b", "layers/1"])
    found = list(variants(config))
    assert len(found) == 2
    for each in found:
        for value in (each["lr"], each["env_config"]["a"]["b"], each["layers"][1]):
            assert 3 <= value <= 4


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"lr": {"loguniform": [1e-3]}}, "config.lr: loguniform: Tune refuses"),
        ({"lr": {"loguniform": [1e-3, 1e-5]}}, "expected a lower bound below the upper one"),
        ({"lr": {"loguniform": [0, 1]}}, "config.lr: loguniform: Tune refuses"),
        ({"lr": {"loguniform": ["a", "b"]}}, "expected numbers"),
        ({"lr": {"uniform": 3}}, "expected numbers"),
        ({"a": [{"choice": 3}]}, r"config.a\[0\]: choice: expected a list"),
        ({"a": {"choice": []}}, "expected a list of values"),
        ({"a": {"grid_search": 3}}, "grid_search: expected a list of values"),
        ({"a": {"logunifrom": [1, 2]}}, "no search space 'logunifrom'. Did you mean 'loguniform'"),
        ({"a": {"gridsearch": [1, 2]}}, "Did you mean 'grid_search'"),
    ],
)
def test_a_space_that_cannot_be_drawn_from_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        searched(config)


@dataclass
class Settings:
    """An object in a configuration."""

    sizes: Any


def test_spaces_of_a_config_object_are_all_tried_or_refused(tmp_path: Path) -> None:
    """R9: a grid nested in a config of Python makes every combination; where Tune would not see it, an error."""
    (tmp_path / "nested.py").write_text(
        "from ray import tune\n"
        "from rllib_mhgpo import MHGPOConfig\n"
        "grid = tune.grid_search([True, False])\n"
        "config = MHGPOConfig().environment('solver_verifier', env_config={'penalties': grid})\n"
        "config.training(llm='mini', max_response_tokens={'solver': 4, 'verifier': tune.grid_search([2, 4])})\n"
        "config.training(group_size=tune.grid_search([4, 8]))\n"
    )
    experiment = load_experiments(tmp_path / "nested.py")["nested"]
    check("nested", experiment)
    found = {
        (each["env_config"]["penalties"], each["max_response_tokens"]["verifier"], each["group_size"])
        for each in variants(experiment["config"])
    }
    assert found == {(penalties, tokens, size) for penalties in (True, False) for tokens in (2, 4) for size in (4, 8)}
    for hidden in (
        Settings({"grid_search": [1, 2]}), Settings([{"a": {"grid_search": [1]}}]), ({"grid_search": [1, 2]}, 3),
        Settings(searched({"uniform": [0, 1]})), [Settings(Settings({"grid_search": [1, 2]}))],
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=r"Tune does not look for search spaces inside a (Settings|tuple)"):
            searched({"env_config": {"settings": hidden}})
    plain = {"env_config": {"settings": Settings([1, {"a": 2}])}, "lr": searched({"uniform": [0, 1]}), "probs": (1, 0)}
    assert searched(plain) == plain


def test_an_ordinary_mapping_of_one_key_is_left_alone() -> None:
    config = {"max_response_tokens": {"rewriter": 8}, "prompts": {"base": "hotpot"}, "layers": {"sizes": [1, 2]}}
    assert searched(config) == config


def test_schedulers_and_search_algorithms_take_their_own_keys_alone() -> None:
    asha = make_scheduler({"name": "asha", "grace_period": 2, "max_t": 8, "metric": "reward", "mode": "max"})
    assert type(asha).__name__ == "AsyncHyperBandScheduler"
    mutations = {"lr": {"loguniform": [1e-5, 1e-3]}}
    pbt = make_scheduler({"name": "pbt", "perturbation_interval": 2, "hyperparam_mutations": mutations})
    assert type(pbt._hyperparam_mutations["lr"]).__name__ == "Float"
    optuna = pytest.importorskip("optuna")
    assert optuna
    assert type(make_search_alg({"name": "optuna", "seed": 1})).__name__ == "OptunaSearch"
    refused: list[tuple[dict[str, Any], str]] = [
        ({"name": "asha", "grace_perod": 1}, "Did you mean 'grace_period'"),
        ({"name": "asha", "grace_period": 10, "max_t": 2}, "asha refuses it"),
        ({"name": "pbt"}, "pbt refuses it"),
        ({"name": "ahsa"}, "none is called 'ahsa'.*Did you mean 'asha'"),
    ]
    for settings, said in refused:
        with pytest.raises(ConfigError, match=said):
            make_scheduler(settings)
    with pytest.raises(ConfigError, match="Did you mean 'seed'"):
        make_search_alg({"name": "optuna", "sed": 1})
    with pytest.raises(ConfigError, match="pip install nevergrad"):
        make_search_alg({"name": "nevergrad", "optimizer": "x"})


def test_a_search_that_has_nothing_to_search_is_refused() -> None:
    pytest.importorskip("optuna")
    spec = {"run": "MHGPO", "search_alg": "optuna"}
    with pytest.raises(ConfigError, match="has nothing to search"):
        check_search(normalise(spec, "x"), "x")
    with pytest.raises(ConfigError, match="cannot walk a grid"):
        check_search(normalise({**spec, "config": {"lr": {"grid_search": [1, 2]}}}, "x"), "x")
    check_search(normalise({**spec, "config": {"lr": {"uniform": [1, 2]}}}, "x"), "x")
    refused: list[tuple[dict[str, Any], str]] = [
        ({"scheduler": 3}, "expected a mapping"),
        ({"scheduler": {"max_t": 3}}, "a name among them"),
        ({"mode": "best"}, "expected max or min"),
    ]
    for wrong, said in refused:
        with pytest.raises(ConfigError, match=said):
            normalise({"run": "MHGPO", **wrong}, "x")


def test_options_of_the_command_line_stand_in_the_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllib_mhgpo.cli.launch.prepare", lambda _: None)
    run = CliRunner().invoke(
        app,
        ["train", "--algo", "MHGPO", "--config", '{"lr": {"loguniform": [1e-5, 1e-3]}}', "--scheduler", "asha",
         "--scheduler-config", '{"max_t": 4}', "--dry-run"],
    )  # fmt: skip
    shown = parse_yaml(run.stdout, "dry run")["MHGPO"]
    assert shown["scheduler"] == {"name": "asha", "max_t": 4}
    assert shown["config"]["lr"] == {"loguniform": [1e-5, 1e-3]}


def test_trials_may_share_a_processor() -> None:
    from rllib_mhgpo.algorithms.mhgpo import MHGPO

    for asked in (0.5, 1, 2):
        request = MHGPO.default_resource_request({"num_cpus_for_main_process": asked})
        assert request.required_resources == {"CPU": asked}
    runners = {"num_cpus_for_main_process": 0.5, "num_env_runners": 2, "num_cpus_per_env_runner": 0.25}
    assert MHGPO.default_resource_request(runners).required_resources == {"CPU": 1.0}


@pytest.mark.usefixtures("ray_session")
def test_a_trial_that_takes_over_another_keeps_its_own_learning_rate(make: Any, tmp_path: Path) -> None:
    """What population-based training does: the donor's weights, a new rate, from the first step on."""
    donor, heir = make(lr=1e-2), make(lr=1e-4)
    donor.train()
    heir.load_checkpoint(donor.save_to_path(tmp_path / "checkpoint"))
    learner = heir.learner_group._learner
    rates = {group["lr"] for optimizer in learner._named_optimizers.values() for group in optimizer.param_groups}
    assert rates == {1e-4}
    assert equal(weights(donor), weights(heir))


@dataclass
class Trial:
    """What the table sees of one of Tune's trials."""

    lr: float
    last_result: dict[str, Any]
    metric_analysis: dict[str, dict[str, float]]
    checkpoint: None = None

    @property
    def evaluated_params(self) -> dict[str, float]:
        return {"lr": self.lr}


def made(lr: float, dev: float, iteration: int, train: float) -> Trial:
    result = {"training_iteration": 3, "dev": {"f1": dev, "iteration": iteration}}
    return Trial(lr, result, {"dev/f1": {"max": dev}, "train/f1": {"max": train}})


def test_no_trial_is_ranked_by_its_score_before_training() -> None:
    never = [made(0.1, 0.9, 0, 0.2), made(0.2, 0.9, 0, 0.4)]
    said, heading, *rows = table_of_best(never, ["lr"], "dev/f1", "max")
    assert said == "No trial has evaluated dev/f1 since its start; by train/f1, of sampled answers:"
    assert heading.split()[0] == "train/f1"
    assert [row.split()[1:4] for row in rows] == [["0.4", "3", "lr=0.2"], ["0.2", "3", "lr=0.1"]]
    heading, *rows = table_of_best([*never, made(0.3, 0.5, 2, 0.1)], ["lr"], "dev/f1", "max")
    assert [row.split()[1:4] for row in rows] == [["0.5", "3", "lr=0.3"]]


ENVIRONMENT = """
import time
import gymnasium as gym


class Slow(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)

    def __init__(self, config):
        self.pays = config["pays"]

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.steps += 1
        time.sleep(0.005)
        return self.observation_space.sample(), self.pays, self.steps == 10, False, {}
"""
SWEEP = """
sweep:
  run: PPO
  env: slow:Slow
  stop: {training_iteration: 4}
  checkpoint_config: {checkpoint_frequency: 1, num_to_keep: 1}
  config:
    train_batch_size: 40
    minibatch_size: 20
    num_epochs: 1
    num_env_runners: 0
    model: {fcnet_hiddens: [4]}
    env_config: {pays: {grid_search: [1.0, 4.0, 2.0, 3.0]}}
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from rllib_mhgpo.cli import main; main()", "train", "file", *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*command, "--storage-path", "results", "--ray-num-cpus", "2"], cwd=folder, **pipes)


def test_a_sweep_that_was_killed_goes_on_and_has_every_result_once(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(ENVIRONMENT)
    (tmp_path / "sweep.yaml").write_text(format_yaml(parse_yaml(SWEEP, "sweep")))
    run = start(tmp_path, "sweep.yaml")
    assert run.stdout is not None
    seen = []
    for line in run.stdout:
        seen.append(line)
        if sum("iteration 2/4" in each for each in seen) >= 2:
            break
    run.send_signal(signal.SIGKILL)
    run.wait()
    again = start(tmp_path, "sweep.yaml", "--resume")
    out, _ = again.communicate(timeout=400)
    assert again.returncode == 0, "".join(seen) + out
    folders = [path for path in (tmp_path / "results" / "sweep").iterdir() if path.is_dir()]
    assert len(folders) == 4
    for folder in folders:
        rows = [json.loads(line) for line in (folder / "result.json").read_text().splitlines()]
        assert [row["training_iteration"] for row in rows if row["done"]] == [4], folder
    ends = [line for line in out.splitlines() if line.startswith("sweep [")]
    assert len(ends) == 4
    table = out.splitlines()[-5:]
    assert table[0].split() == ["env_runners/episode_return_mean", "iterations", "trial", "checkpoint"]
    assert [line.split()[:4] for line in table[1:]] == [
        [str(place), f"{10 * pays:g}", "4", f"env_config/pays={pays:g}"] for place, pays in enumerate((4, 3, 2, 1), 1)
    ]
