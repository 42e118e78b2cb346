"""Runs by the command that lose something on their way: the place of their results, or a learner."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from rllib_mhgpo.cli.resuming import forget_decisions
from rllib_mhgpo.cli.yaml12 import format_yaml
from rllib_mhgpo.errors import ConfigError
from tests.rig import descendants
from tests.toys import PROMPTS

ROOT = Path(__file__).parents[1]


@pytest.fixture
def file(tmp_path: Path, toy_folder: Path, toy_questions_file: Path) -> Path:
    env_config = {"questions": str(toy_questions_file), "dev_questions": None, "prompts": PROMPTS}
    config = {
        "llm": str(toy_folder), "questions_per_iteration": 3, "group_size": 3, "max_response_tokens": 6, "seed": 1,
        "env_config": env_config, "num_cpus_for_main_process": 0.5, "num_cpus_per_learner": 0.5,
    }  # fmt: skip
    experiment = {"run": "MHGPO", "env": "search", "stop": {"training_iteration": 2}, "config": config}
    (tmp_path / "safe.yaml").write_text(format_yaml({"safe": experiment}))
    return tmp_path / "safe.yaml"


def start(file: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from rllib_mhgpo.cli import main; main()", "train", "file", str(file)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, *arguments], cwd=ROOT, **pipes)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head without CPUs, so that trials run on the other node."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    yield cluster
    cluster.shutdown()


@pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode != 0,
    reason="a node with mounts of its own needs `unshare -m`",
)
def test_a_storage_path_must_be_one_that_the_other_node_reaches(cluster: Cluster, file: Path, tmp_path: Path) -> None:
    """The second node sees another file system where the first keeps one of two folders."""
    hidden, shared = tmp_path / "hidden", tmp_path / "shared"
    for folder in (hidden, shared):
        folder.mkdir()
    command = f"mount -t tmpfs none {hidden} && exec {sys.executable} -m ray.scripts.scripts start --block --num-cpus 1"
    node = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", f"{command} --address {cluster.address}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        ends = {}
        for folder in (hidden, shared):
            run = start(file, "--storage-path", str(folder), "--ray-address", cluster.address,
                        "--set", "stop.training_iteration=1")  # fmt: skip
            ends[folder] = (*run.communicate(timeout=240), run.returncode)
    finally:
        os.killpg(node.pid, signal.SIGTERM)
        node.wait(60)
    out, err, code = ends[hidden]
    assert code == 1, out + err
    said = f"error: --storage-path: {hidden} of the machine that started the run is not reached from node"
    assert err.startswith(said), err
    assert err.count("\n") == 1
    out, err, code = ends[shared]
    assert code == 0, out + err
    assert list(shared.glob("safe/*/checkpoint_*/manifest.json"))


@pytest.mark.slow
def test_a_run_whose_learner_is_killed_says_so_and_goes_on_to_its_end(file: Path, tmp_path: Path) -> None:
    """The kill comes while the second iteration is saved or the third computed, as it happens."""
    arguments = ["--storage-path", str(tmp_path), "--ray-num-cpus", "2", "--set", "config.num_learners=2",
                 "--set", "stop.training_iteration=6"]  # fmt: skip
    run = start(file, *arguments)
    assert run.stdout is not None
    for line in run.stdout:
        if line.startswith("iteration 2/6 "):
            learners = [pid for pid, command in descendants(run.pid).items() if "_WrappedExecutable" in command]
            assert len(learners) == 2
            os.kill(learners[0], signal.SIGKILL)
            break
    out, err = run.communicate(timeout=240)
    assert run.returncode == 1, out + err
    assert re.match(r"error: the process of learner [01] died .*; go on from it with --resume\.", err), err
    assert err.count("\n") == 1
    saved = len(list(tmp_path.glob("safe/*/checkpoint_*/manifest.json")))  # one an iteration, at most two kept
    assert saved in (1, 2)
    run = start(file, *arguments, "--resume")
    out, err = run.communicate(timeout=240)
    assert (run.returncode, err) == (0, ""), out + err
    told = [line.split()[1] for line in out.splitlines() if line.startswith("iteration ")]
    assert told == [f"{number}/6" for number in range(saved + 1, 7)]
    assert out.splitlines()[-1].startswith("safe: 6 iterations, ")
    (results,) = tmp_path.glob("safe/*/result.json")
    rows = [json.loads(row)["training_iteration"] for row in results.read_text().splitlines()]
    assert rows == [1, 2, *range(saved + 1, 7)]


def test_states_that_cannot_be_read_are_refused_where_they_are_the_last(tmp_path: Path) -> None:
    first, last = tmp_path / "experiment_state-1.json", tmp_path / "experiment_state-2.json"
    first.write_text("")
    last.write_text('{"runner_data": {"_cached_trial_decisions": {"a": "STOP"}}}')
    forget_decisions(str(tmp_path))
    assert json.loads(last.read_text()) == {"runner_data": {"_cached_trial_decisions": {}}}
    last.write_text('{"runner')
    with pytest.raises(ConfigError, match=r"experiment_state-2.json: expected the state .* found 8 bytes that are no"):
        forget_decisions(str(tmp_path))
    with pytest.raises(ConfigError, match="--resume: foo://bar: cannot be read"):
        forget_decisions("foo://bar")
