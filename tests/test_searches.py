"""Whole searches that change trials on the way: population-based training, BOHB through its own packages."""

import json
from pathlib import Path
from typing import Any

import pytest

from rllib_mhgpo.cli.experiments import normalise
from rllib_mhgpo.cli.tuners import check_search, make_search_alg
from rllib_mhgpo.cli.yaml12 import format_yaml
from rllib_mhgpo.errors import ConfigError
from tests.test_sweeps import start

SUMS: dict[str, Any] = {
    "run": "MHGPO",
    "env": "solver_verifier",
    "metric": "reward",
    "mode": "max",
    "config": {
        "llm": "mini", "questions_per_iteration": 4, "group_size": 2, "max_response_tokens": 4, "kl_beta": 0,
        "evaluation_interval": None, "seed": 0, "record_share": 0, "lr": {"loguniform": [1e-4, 1e-2]},
    },
}  # fmt: skip


def sweep(folder: Path, experiment: dict[str, Any]) -> tuple[str, list[list[dict[str, Any]]]]:
    """Runs an experiment by the command; returns what it said, and every trial's results."""
    (folder / "sweep.yaml").write_text(format_yaml({"sweep": experiment}))
    run = start(folder, "sweep.yaml")
    out, _ = run.communicate(timeout=500)
    assert run.returncode == 0, out
    files = sorted((folder / "results" / "sweep").glob("*/result.json"))
    return out, [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


@pytest.mark.slow
def test_a_population_takes_over_the_better_trial_and_goes_on(tmp_path: Path) -> None:
    mutations = {"lr": {"loguniform": [1e-4, 1e-2]}}
    scheduler = {
        "name": "pbt", "time_attr": "training_iteration", "perturbation_interval": 1, "quantile_fraction": 0.5,
        "synch": True, "hyperparam_mutations": mutations,
    }  # fmt: skip
    out, trials = sweep(tmp_path, {**SUMS, "num_samples": 2, "scheduler": scheduler, "stop": {"training_iteration": 2}})
    assert len(trials) == 2
    assert [rows[-1]["training_iteration"] for rows in trials] == [2, 2]
    takeovers = list((tmp_path / "results" / "sweep").glob("pbt_policy_*.txt"))
    assert takeovers, out
    steps = [json.loads(line) for file in takeovers for line in file.read_text().splitlines()]
    rates = {row["config"]["lr"] for rows in trials for row in rows}
    assert {step[-1]["lr"] for step in steps} & rates, "a rate that was perturbed has trained"
    assert len(rates) == 3
    for rows in trials:  # each iteration once, also of a trial that goes on from another's checkpoint
        assert [row["training_iteration"] for row in rows] == [1, 2]
    assert sum(line.startswith("sweep [") for line in out.splitlines()) == 2


@pytest.mark.slow
def test_bohb_draws_after_what_it_has_seen_and_stops_the_worse(tmp_path: Path) -> None:
    pytest.importorskip("hpbandster", reason="BOHB needs the packages hpbandster and ConfigSpace")
    pytest.importorskip("ConfigSpace", reason="BOHB needs the packages hpbandster and ConfigSpace")
    experiment = {
        **SUMS, "num_samples": 4, "stop": {"training_iteration": 3}, "max_concurrent_trials": 2,
        "scheduler": {"name": "hb_bohb", "time_attr": "training_iteration", "max_t": 3, "reduction_factor": 3},
        "search_alg": {"name": "bohb", "seed": 0},
        "config": {**SUMS["config"], "group_size": {"choice": [2, 4]}},
    }  # fmt: skip
    out, trials = sweep(tmp_path, experiment)
    assert len(trials) == 4
    drawn = [(rows[0]["config"]["lr"], rows[0]["config"]["group_size"]) for rows in trials]
    assert len(set(drawn)) == 4
    assert all(1e-4 <= lr <= 1e-2 and group_size in (2, 4) for lr, group_size in drawn)
    assert all(rows[-1]["training_iteration"] <= 3 for rows in trials)
    assert "lr=" in out.splitlines()[-4]


def test_bohb_takes_its_own_keys_and_names_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("ray.tune.search.bohb.bohb_search.BOHB", None)
        with pytest.raises(ConfigError, match=r"bohb needs packages .* pip install hpbandster ConfigSpace"):
            make_search_alg({"name": "bohb"})
    pytest.importorskip("hpbandster", reason="BOHB needs the packages hpbandster and ConfigSpace")
    assert type(make_search_alg({"name": "bohb", "seed": 1, "bohb_config": {"num_samples": 8}})).__name__ == "TuneBOHB"
    with pytest.raises(ConfigError, match="Did you mean 'bohb_config'"):
        make_search_alg({"name": "bohb", "bohb_confg": {}})
    alone = normalise({"run": "MHGPO", "search_alg": "bohb", "config": {"lr": {"uniform": [1e-5, 1e-3]}}}, "x")
    with pytest.raises(ConfigError, match="bohb goes with the scheduler hb_bohb, found 'none'"):
        check_search(alone, "x")
    with pytest.raises(ConfigError, match="bohb goes with the scheduler hb_bohb, found 'asha'"):
        check_search({**alone, "scheduler": {"name": "asha"}}, "x")
    check_search({**alone, "scheduler": {"name": "hb_bohb"}}, "x")
