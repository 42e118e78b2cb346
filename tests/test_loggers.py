"""Loggers by one flag: MLflow into a local store, W&B offline, and what is refused."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rllib_mhgpo.cli.loggers import check_loggers, make_loggers
from rllib_mhgpo.cli.yaml12 import format_yaml
from rllib_mhgpo.errors import ConfigError
from tests.test_sweeps import start

RESULT = {"training_iteration": 3, "timesteps_total": 288, "reward": 0.5, "dev": {"f1": 0.75}, "answerer": {"kl": 0.1}}


class Trial:
    """What loggers ask of a trial of Tune."""

    trial_id, trial_name, trainable_name, status = "t1", "MHGPO_search_t1", "MHGPO", "RUNNING"

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = {"lr": 1e-4, "env_config": {"reward": "f1"}}
        self.local_path = self.path = self.logdir = str(folder)
        self.evaluated_params: dict[str, Any] = {}

    def __str__(self) -> str:
        return self.trial_name


@pytest.mark.parametrize("store", ["sqlite:///{}/runs.db", "file://{}/mlruns"])
def test_mlflow_writes_nested_columns_into_a_local_store(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    if store.startswith("sqlite"):
        pytest.importorskip("sqlalchemy")
        pytest.importorskip("flask", reason="MLflow's databases need the whole package, not mlflow-skinny")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = store.format(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    (logger,) = make_loggers(["mlflow"], "sweep")
    logger.setup()
    trial = Trial(tmp_path)
    logger.log_trial_start(trial)
    logger.log_trial_result(3, trial, dict(RESULT))
    logger.log_trial_end(trial, failed=False)
    client = mlflow.tracking.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("sweep")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert {key: run.data.metrics[key] for key in ("reward", "dev/f1", "answerer/kl")} == {
        "reward": 0.5, "dev/f1": 0.75, "answerer/kl": 0.1
    }  # fmt: skip
    assert run.data.params["lr"] == "0.0001"
    assert client.get_metric_history(run.info.run_id, "dev/f1")[0].step == 3


SERVER = "MLflow's server needs the whole package mlflow, here or as the program $MLFLOW_SERVER"


ALONE = {"PYTHONPATH": "", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


@pytest.fixture
def mlflow_server(tmp_path: Path) -> Iterator[str]:
    """The address of a server of MLflow that has begun on a free port."""
    program = os.environ.get("MLFLOW_SERVER") or shutil.which("mlflow", path=str(Path(sys.executable).parent))
    whole = program and ("MLFLOW_SERVER" in os.environ or all(map(find_spec, ("flask", "sqlalchemy", "alembic"))))
    if not program or not whole:
        pytest.skip(SERVER)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = f"sqlite:///{tmp_path}/server.db"
    log = (tmp_path / "server.log").open("w")
    server = subprocess.Popen(
        [program, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1", "--backend-store-uri", store,
         "--artifacts-destination", str(tmp_path / "artifacts")],
        stdout=log, stderr=log, start_new_session=True, env={**os.environ, **ALONE},
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(f"{address}/health", server, tmp_path / "server.log")
        yield address
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()
        log.close()


def wait_for(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(240):
        assert server.poll() is None, log.read_text()
        with suppress(OSError), urllib.request.urlopen(address) as answer:
            if answer.status == 200:
                return
        time.sleep(0.5)
    raise AssertionError(log.read_text())


@pytest.mark.slow
def test_a_run_is_read_back_from_an_mlflow_server(
    mlflow_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole run by the command: its columns, nested ones and each agent's, are the server's metrics."""
    mlflow = pytest.importorskip("mlflow", reason="the logger mlflow needs mlflow-skinny or mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_server)
    experiment = {
        "run": "MHGPO", "env": "solver_verifier", "stop": {"training_iteration": 2},
        "config": {
            "llm": "mini", "questions_per_iteration": 2, "group_size": 2, "max_response_tokens": 4, "kl_beta": 0,
            "evaluation_questions": 4, "evaluation_interval": 1, "record_share": 0,
        },
    }  # fmt: skip
    (tmp_path / "served.yaml").write_text(format_yaml({"served": experiment}))
    run = start(tmp_path, "served.yaml", "--logger", "mlflow")
    out, _ = run.communicate(timeout=500)
    assert run.returncode == 0, out
    client = mlflow.tracking.MlflowClient(tracking_uri=mlflow_server)
    (found,) = client.search_runs([client.get_experiment_by_name("served").experiment_id])
    assert found.info.status == "FINISHED"
    (file,) = (tmp_path / "results" / "served").glob("*/result.json")
    last = json.loads(file.read_text().splitlines()[-1])
    for name in ("reward", "dev/acc", "solver/reward", "verifier/entropy", "time/total_s"):
        value: Any = last
        for part in name.split("/"):
            value = value[part]
        assert found.data.metrics[name] == pytest.approx(value, nan_ok=True), name
        assert [each.step for each in client.get_metric_history(found.info.run_id, name)] == [1, 2]
    assert found.data.params["llm"] == "mini"


@pytest.mark.usefixtures("ray_session")
def test_wandb_writes_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    (logger,) = make_loggers(["wandb"], "sweep")
    logger.setup()
    trial = Trial(tmp_path)
    logger.log_trial_start(trial)
    logger.log_trial_result(3, trial, dict(RESULT))
    logger.log_trial_end(trial, failed=False)
    logger.on_experiment_end(trials=[])
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_aim_writes_into_a_local_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    aim = pytest.importorskip("aim", reason="the logger aim needs the package aim")
    (logger,) = make_loggers(["aim"], "sweep")
    trial = Trial(tmp_path)
    monkeypatch.setattr(Trial, "local_experiment_path", str(tmp_path), raising=False)
    monkeypatch.setattr(Trial, "init_local_path", lambda self: None, raising=False)
    monkeypatch.setattr(Trial, "get_ray_actor_ip", lambda self: "", raising=False)
    logger.log_trial_start(trial)
    logger.log_trial_result(3, trial, dict(RESULT))
    logger.log_trial_end(trial, failed=False)
    (run,) = aim.Repo(str(tmp_path)).iter_runs()
    assert {metric.name for metric in run.metrics()} >= {"reward", "dev/f1", "answerer/kl"}


def test_unknown_loggers_and_absent_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'wandb'\?"):
        check_loggers(["wanb"])
    monkeypatch.setattr("rllib_mhgpo.cli.loggers.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install aim"):
        check_loggers(["aim"])
