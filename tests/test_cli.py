"""The command line: what a file may say, what is refused before anything starts, what one sees."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rllib_mhgpo.cli import app
from rllib_mhgpo.cli.experiments import change, load_experiments, normalise
from rllib_mhgpo.cli.failures import last_error, own_message
from rllib_mhgpo.cli.progress import Row
from rllib_mhgpo.cli.yaml12 import format_yaml, parse_yaml
from rllib_mhgpo.data import Corpus
from rllib_mhgpo.errors import ConfigError
from rllib_mhgpo.retrieval import build_retriever
from rllib_mhgpo.retrieval.store import save_retriever
from tests.toys import save_questions

CARTPOLE = """
cart:
  run: PPO
  env: CartPole-v1
  stop: {training_iteration: 2}
  config: {lr: 1e-5, num_env_runners: 0}
"""


@pytest.fixture(autouse=True)
def _leave_this_process_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllib_mhgpo.cli.launch.prepare", lambda _: None)


def rllib(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(*arguments: str | Path) -> str:
    """The message of a command that is refused: one line, no traceback, nothing on stdout."""
    result = rllib(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    return result.stderr


def dry_run(*arguments: str | Path) -> Any:
    result = rllib("train", *arguments, "--dry-run")
    assert result.exit_code == 0, result.output
    return parse_yaml(result.stdout, "dry run")


@pytest.fixture
def cartpole(tmp_path: Path) -> Path:
    path = tmp_path / "cart.yaml"
    path.write_text(CARTPOLE)
    return path


# --- what is read ------------------------------------------------------------------------------------------------


def test_numbers_and_words_are_read_as_written() -> None:
    text = "{lr: 1e-5, small: 5e-7, max_steps: 1e5, answer: no, other: yes, switch: on, day: 2024-01-01, run: 1_0}"
    assert parse_yaml(text, "text") == {
        "lr": 0.00001,
        "small": 0.0000005,
        "max_steps": 100000.0,
        "answer": "no",
        "other": "yes",
        "switch": "on",
        "day": "2024-01-01",
        "run": "1_0",
    }


@pytest.mark.parametrize(
    "value", [1e-5, 1e5, "1e5", "no", "null", "1_0", None, True, "a: b", [1, {"b": []}], float("inf")]
)
def test_what_is_printed_reads_back_the_same(value: Any) -> None:
    assert parse_yaml(format_yaml({"key": value}), "text") == {"key": value}


def test_a_file_may_hold_one_bare_experiment_or_several(tmp_path: Path) -> None:
    bare, several = tmp_path / "bare.yaml", tmp_path / "several.yaml"
    bare.write_text("run: PPO\nenv: CartPole-v1\ncheckpoint_freq: 3\nkeep_checkpoints_num: 1\n")
    several.write_text("a: {run: PPO, config: {env: X}}\nb: {run: MHGPO, num_samples: 2}\n")
    assert load_experiments(bare) == {
        "bare": {
            "run": "PPO",
            "config": {"env": "CartPole-v1"},
            "stop": {},
            "checkpoint_config": {"checkpoint_frequency": 3, "num_to_keep": 1},
            "num_samples": 1,
        }
    }
    assert {name: (e["run"], e["num_samples"]) for name, e in load_experiments(several).items()} == {
        "a": ("PPO", 1),
        "b": ("MHGPO", 2),
    }


def test_set_types_values_and_reaches_every_section() -> None:
    experiment = normalise({"run": "PPO", "env": "A", "config": {"lr": 1}}, "test")
    for assignment in ("lr=1e-5", "env_config.questions=a=b.json", "config.x.y=no", "stop.training_iteration=3"):
        change(experiment, assignment)
    change(experiment, "env=B")
    assert experiment["config"] == {"lr": 1e-5, "env": "B", "env_config": {"questions": "a=b.json"}, "x": {"y": "no"}}
    assert experiment["stop"] == {"training_iteration": 3}
    for wrong in ("lr", "=3", "lr.deep=3", "a..b=1"):
        with pytest.raises(ConfigError, match="--set"):
            change(experiment, wrong)


def test_options_win_over_the_file_and_set_over_options(cartpole: Path) -> None:
    options = ("--stop", '{"time_total_s": 9}', "--checkpoint-freq", "5", "--checkpoint-at-end", "--env", "Acrobot-v1")
    shown = dry_run("file", cartpole, *options, "--set", "checkpoint_config.num_to_keep=2", "--experiment-name", "mine")
    assert shown["mine"]["stop"] == {"time_total_s": 9}
    assert shown["mine"]["config"]["env"] == "Acrobot-v1"
    assert shown["mine"]["checkpoint_config"] == {
        "checkpoint_frequency": 5,
        "checkpoint_at_end": True,
        "num_to_keep": 2,
    }


def test_dry_run_shows_what_is_set_beside_the_algorithms_own_defaults(cartpole: Path) -> None:
    shown = dry_run("file", cartpole)["cart"]
    assert (shown["run"], shown["config"]["lr"], shown["config"]["num_epochs"]) == ("PPO", 1e-5, 30)
    own = dry_run("--algo", "MHGPO", "--env", "search", "--config", '{"group_size": 8}')["MHGPO_search"]
    assert (own["config"]["group_size"], own["config"]["env"], own["config"]["clip_low"]) == (8, "search", 0.2)
    # a colon cannot stand in a folder's name everywhere
    assert list(dry_run("--algo", "PPO", "--env", "gymnasium.envs.classic_control:CartPoleEnv")) == [
        "PPO_gymnasium.envs.classic_control-CartPoleEnv"
    ]


def test_python_files_give_config_and_stop(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from ray.rllib.algorithms.ppo import PPOConfig\n"
        "from ray import tune\n"
        "config = PPOConfig().environment('CartPole-v1').training(lr=tune.grid_search([0.1, 0.2]))\n"
        "stop = {'training_iteration': 4}\n"
    )
    shown = dry_run("file", path)["mine"]
    assert (shown["run"], shown["stop"]) == ("PPO", {"training_iteration": 4})
    assert shown["config"]["lr"] == {"grid_search": [0.1, 0.2]}


def test_grid_search_is_found_at_any_depth() -> None:
    from rllib_mhgpo.cli.checks import variants

    two = {"grid_search": [1, 2]}
    config = {"lr": two, "env_config": {"a": {"b": two}}, "layers": [{"grid_search": [8, 16, 32]}, 4]}
    found = list(variants(config))
    assert len(found) == 2 * 2 * 3
    assert {(c["lr"], c["env_config"]["a"]["b"], c["layers"][0]) for c in found} == {
        (lr, b, width) for lr in (1, 2) for b in (1, 2) for width in (8, 16, 32)
    }


# --- what is refused before anything starts ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: {run: PPO\nb: 1", "line 2, column 2"),
        ("a:\n\t- b", "line 2, column 1"),
        ("a: 1\na: 2", "line 2, column 1"),
        ("", "found nothing"),
        ("- run", "found list"),
        ("a: PPO", "a: expected an experiment"),
        ("a: {env: X}", "run: expected an algorithm's name, found None"),
        ("a: {run: PPO, stopp: {}}", "unknown key 'stopp'"),
        ("a: {run: PPO, stopp: {}}", "Did you mean 'stop'?"),
        ("a: {run: PPO, config: 3}", "config: expected a mapping of keys to values, found 3"),
        ("a: {run: PPO, stop: {training_iteration: ten}}", "training_iteration: expected a number, found 'ten'"),
        ("a: {run: PPO, env: CartPole-v1, stop: {evaluation/x: 1}}", "set evaluation_interval"),
        ("a: {run: MHGPO, stop: {iterations: 1}}", "stop: no column 'iterations'. Did you mean 'training_iteration'?"),
        ("a: {run: MHGPO, stop: {timesteps_total: 1}}", "stop: no column 'timesteps_total'"),
        ("a: {run: PPO, num_samples: 0}", "num_samples: expected a whole number of at least 1, found 0"),
        ("a: {run: PPO, checkpoint_config: {num_keep: 1}}", "Did you mean 'num_to_keep'?"),
        ("a: {run: PPO, keep_checkpoints_num: 0}", "num_to_keep: expected a whole number of at least 1, found 0"),
        ("a: {run: PPO, checkpoint_at_end: no}", "checkpoint_at_end: expected true or false, found 'no'"),
        ("a: {run: PPO, checkpoint_at_end: {grid_search: [true]}}", "expected true or false, found {'grid_search'"),
        ("a: {run: PPO, time_budget_s: {grid_search: [9]}}", "time_budget_s: expected a number of seconds, found {"),
        ("a: {run: PPO, time_budget_s: 1_000}", "time_budget_s: expected a number of seconds, found '1_000'"),
        ("a: {run: PPO, max_failures: no}", "max_failures: expected a whole number of at least -1, found 'no'"),
        ("a: {run: PPO, storage_path: 20240501}", "storage_path: expected a text, found 20240501"),
        ("a: {run: PPO, resources_per_trial: 4}", "resources_per_trial: expected keys and values, found 4"),
        ("a: {run: PPO, stop: {1: 2}}", "stop: expected columns' names, found 1"),
        ("a: {run: PPO, stop: {reward: .nan}}", "stop: reward: expected a number, found nan"),
        ("%YAML 1.1\n---\na: {run: PPO}", "line 1: expected YAML 1.2, found %YAML 1.1; remove the line"),
        ("a: {run: MHGPO, env: search, config: {env_config: {penalties: no}}}", "penalties: expected true or false or"),
        (
            "a: {run: PPO, env: {grid_search: [a]}, checkpoint_config: {checkpoint_score_order: up}}",
            "max or min, found",
        ),
        ("a: {run: POP, env: CartPole-v1}", "Did you mean 'PPO'?"),
        ("a: {run: MGHPO, env: search}", "Did you mean 'MHGPO'?"),
        ("a: {run: PPO, env: cartpole}", "Did you mean 'CartPole-v1'?"),
        ("a: {run: MHGPO, env: serch}", "Did you mean 'search'?"),
        ("a: {run: PPO, env: CartPole-v1, config: {num_env_runers: 1}}", "Did you mean 'num_env_runners'?"),
        ("a: {run: PPO, env: CartPole-v1, config: {training: 1}}", "unknown key 'training' of PPO"),
        ("a: {run: PPO, env: CartPole-v1, config: {train_batch_size: 1}}", "PPO refuses it"),
        ("a: {run: MHGPO, config: {group_sise: 4}}", "Did you mean 'group_size'?"),
        ("a: {run: MHGPO, config: {group_size: {grid_search: [4, 1]}}}", "group_size"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    assert said in refused("train", "file", path, "--dry-run")


def test_mistakes_on_the_command_line_are_named(cartpole: Path, tmp_path: Path) -> None:
    assert "no such file" in refused("train", "file", tmp_path / "none.yaml")
    (tmp_path / "file.txt").write_text(CARTPOLE)
    assert "found '.txt'" in refused("train", "file", tmp_path / "file.txt")
    assert "expected --algo NAME" in refused("train")
    assert "--stop: not valid JSON at character 2" in refused("train", "file", cartpole, "--stop", "{x}")
    assert "--config: expected a JSON object" in refused("train", "--algo", "PPO", "--config", "[1]")
    assert "Did you mean 'lr'?" in refused("train", "file", cartpole, "--set", "lrr=1")
    assert "scheduler: none is called 'ptb'" in refused("train", "file", cartpole, "--scheduler", "ptb")
    wrong = ("--scheduler", "asha", "--scheduler-config", '{"grace_perod": 1}')
    assert "Did you mean 'grace_period'?" in refused("train", "file", cartpole, *wrong)
    here = ("--storage-path", tmp_path)
    assert f"nothing to resume in {tmp_path}/cart" in refused("train", "file", cartpole, "--resume", *here)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("config = 3", "expected `config`, an AlgorithmConfig such as MHGPOConfig(), found 3"),
        ("x = 1\ny = x / 0", "file.py, line 2: ZeroDivisionError"),
        ("x = (", "file.py, line 1: not valid Python"),
    ],
)
def test_mistakes_in_a_python_file_are_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "file.py"
    path.write_text(text)
    assert said in refused("train", "file", path)


def test_a_search_inside_an_object_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hidden.py"
    path.write_text(
        "from ray import tune\n"
        "from ray.rllib.algorithms.ppo import PPOConfig\n"
        "from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig\n"
        "model = DefaultModelConfig(fcnet_hiddens=tune.grid_search([[8], [9]]))\n"
        "config = PPOConfig().environment('CartPole-v1').rl_module(model_config=model)\n"
    )
    assert "fcnet_hiddens: Tune finds no search inside a DefaultModelConfig" in refused("train", "file", path)


# --- examples and evaluation -------------------------------------------------------------------------------------


def test_examples_are_listed_and_copied(tmp_path: Path) -> None:
    assert re.search("^ppo_cartpole +PPO balances a pole", rllib("example", "list").stdout, re.MULTILINE)
    copied = rllib("example", "copy", "ppo_cartpole", tmp_path)
    assert copied.stdout.strip() == str(tmp_path / "ppo_cartpole.py")
    assert dry_run("file", tmp_path / "ppo_cartpole.py")["ppo_cartpole"]["run"] == "PPO"
    assert "exists already" in refused("example", "copy", "ppo_cartpole.py", tmp_path)
    assert "Did you mean 'ppo_cartpole'?" in refused("example", "copy", "ppo_cartpol", tmp_path)


def test_every_example_is_accepted() -> None:
    from rllib_mhgpo.cli.example import find_examples, first_words

    for path in find_examples().values():
        assert first_words(path)
        result = rllib("train", "file", path, "--dry-run")
        assert parse_yaml(result.stdout, "dry run")
        # those that need files of the user's are accepted but for them
        assert result.exit_code == 0 or "cannot be read: No such file" in result.stderr, result.stderr


def test_a_dry_run_looks_at_the_files_that_the_run_would_read(tmp_path: Path) -> None:
    good, wrong, index = save_questions(tmp_path / "q.json"), tmp_path / "wrong.json", tmp_path / "index"
    wrong.write_text(json.dumps([{"Question": "who?", "answer": "you"}]))
    save_retriever(build_retriever(Corpus.from_passages([("A", "b c"), ("D", "e f")])), index)

    def look(**env_config: Any) -> Any:
        path = tmp_path / "job.yaml"
        path.write_text(format_yaml({"job": {"run": "MHGPO", "env": "search", "config": {"env_config": env_config}}}))
        return rllib("train", "file", path, "--dry-run")

    files = {"questions": str(good), "dev_questions": None, "retriever": str(index)}
    found = look(**files)
    assert found.exit_code == 0
    assert re.search(r"activations .*\n.*logits .*\n", found.stderr)  # the plan, beside the YAML
    assert "Ray is asked for" in found.stderr
    (index / "corpus.arrow").write_bytes(b"")
    for changes, said in (
        ({"questions": "none.json"}, "error: job: none.json: cannot be read: No such file"),
        ({"dev_questions": str(wrong)}, f"error: job: {wrong}"),
        ({"corpus": str(tmp_path)}, f"error: job: {tmp_path}: "),
        ({}, f"error: job: {index / 'corpus.arrow'}: expected"),
    ):
        result = look(**files | changes)
        assert result.exit_code == 1
        assert result.stderr.startswith(said), result.stderr
        assert result.stderr.count("\n") == 1


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    assert "found nothing there" in refused("evaluate", tmp_path / "none")
    assert "found neither" in refused("evaluate", tmp_path)
    assert "no such folder" in refused("evaluate", tmp_path, "--out", tmp_path / "none" / "out.jsonl")


def test_commands_of_the_readme_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[1]
    monkeypatch.chdir(root)
    lines = re.findall(r"^rllib train (.+)$", (root / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    commands = [shlex.split(line, comments=True) for line in lines if "FILE" not in line]
    assert len(commands) >= 4
    for command in commands:
        assert dry_run(*command)


@pytest.mark.slow
def test_python_of_the_readme_runs() -> None:
    (code,) = re.findall("```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.DOTALL)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert 0 <= float(run.stdout.split()[-1]) <= 1, run.stderr


# --- what one sees -----------------------------------------------------------------------------------------------


def test_a_row_keeps_the_last_dev_score_and_knows_the_time_left() -> None:
    row = Row("trial", {"training_iteration": 4, "time_total_s": 100})
    nan = float("nan")
    start = {"f1": 0.25, "em": 0.125}
    row.add({"training_iteration": 1, "time_total_s": 10, "dev": start, "dev_start": start, "reward": -0.5})
    row.add({"training_iteration": 2, "time_total_s": 20, "dev": {"f1": 0.5, "em": 0.375}, "dev_start": start})
    row.add({"training_iteration": 3, "time_total_s": 30, "dev": {"f1": nan, "em": nan}, "dev_start": start})
    # one more iteration at 10 s each comes before the limit of 100 s
    assert row.cells() == {
        "iteration": "3/4",
        "dev F1": "0.500",
        "dev EM": "0.375",
        "reward": "-0.500",
        "elapsed": "0:30",
        "left": "0:10",
    }
    row.add({"training_iteration": 3, "dev": {"iteration": 2}})
    assert row.cells()["dev F1"] == "0.500 after 2"
    row.checkpoint = "/results/checkpoint_000002"
    assert row.summary(95) == (
        "dev F1 0.250 -> 0.500 (EM 0.125 -> 0.375), 3 iterations, 1:35, checkpoint /results/checkpoint_000002"
    )


def test_a_score_of_before_training_is_no_result() -> None:
    row = Row("trial")
    row.add(
        {"training_iteration": 3, "dev": {"f1": 0.2, "em": 0.1, "iteration": 0}, "dev_start": {"f1": 0.2, "em": 0.1}}
    )
    assert row.summary(95).startswith("dev not evaluated since the start (F1 0.200), 3 iterations")
    row.add({"training_iteration": 4, "dev": {"f1": 0.5, "em": 0.4, "iteration": 4}})
    assert row.summary(95).startswith("dev F1 0.200 -> 0.500 (EM 0.100 -> 0.400), 4 iterations")


def test_a_run_without_an_evaluation_says_nothing_of_dev_scores() -> None:
    row = Row("trial")
    row.add({"training_iteration": 3, "dev": {"f1": float("nan"), "iteration": 0, "questions": 0}})
    assert row.summary(95) == "3 iterations, 1:35, checkpoint none"
    row.add({"training_iteration": 4, "dev": {"accuracy": 0.5, "iteration": 3, "questions": 9}})
    assert row.summary(95) == "dev accuracy 0.500 -> 0.500, 4 iterations, 1:35, checkpoint none"


def test_reasons_are_found_in_tracebacks_from_other_processes() -> None:
    wrapped = (
        "ray::Runner.sample()\n  File ...\nrllib_mhgpo.errors.DataError: a.json, record 3:\nno answer.\n\n"
        "The above exception was the direct cause of the following exception:\n\nray::MHGPO.train()\nValueError: no\n"
    )
    assert own_message(wrapped) == "a.json, record 3:\nno answer."
    assert own_message("ValueError: other") is None
    assert last_error("KeyError: 'x'\n\nThe above ...:\n\nRuntimeError\n") == "KeyError: 'x'"


def test_a_resumed_run_is_not_given_another_end() -> None:
    told = CliRunner().invoke(app, ["train", "--algo", "MHGPO", "--stop", '{"training_iteration": 2}', "--resume"])
    assert told.exit_code == 1
    assert "leave --stop out" in told.output
