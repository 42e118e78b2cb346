"""Loggers by one flag: MLflow into a local store, W&B offline, and what is refused."""

from pathlib import Path
from typing import Any

import pytest

from rllib_mhgpo.cli.loggers import check_loggers, make_loggers
from rllib_mhgpo.errors import ConfigError

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


def test_unknown_loggers_and_absent_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'wandb'\?"):
        check_loggers(["wanb"])
    monkeypatch.setattr("rllib_mhgpo.cli.loggers.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install aim"):
        check_loggers(["aim"])
