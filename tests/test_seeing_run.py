"""A run of the command line, and everything that one can see of it."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
from typer.testing import CliRunner

from rllib_mhgpo.cli import app
from rllib_mhgpo.cli.yaml12 import format_yaml
from tests.toys import PROMPTS


def rllib(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-c", "from rllib_mhgpo.cli import main; main()", *arguments]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=480, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_a_run_is_seen_from_its_folder(tmp_path: Path, toy_folder: Path, toy_questions_file: Path) -> None:
    questions = str(toy_questions_file)
    experiment = {
        "run": "MHGPO",
        "env": "search",
        "stop": {"training_iteration": 2},
        "config": {
            "llm": str(toy_folder), "questions_per_iteration": 2, "group_size": 2, "max_response_tokens": 6, "seed": 0,
            "evaluation_interval": 2, "record_share": 1.0,
            "env_config": {"questions": questions, "dev_questions": questions, "prompts": PROMPTS},
        },
    }  # fmt: skip
    (tmp_path / "toy.yaml").write_text(format_yaml({"toy": experiment}))
    said = rllib(tmp_path, "train", "file", "toy.yaml", "--storage-path", "results", "--ray-num-cpus", "2")
    assert "% of the responses of rewriter are cut off. Try: raise max_response_tokens" in said
    (trial,) = (path.parent for path in tmp_path.glob("results/toy/*/result.json"))
    frame = pd.read_parquet(trial / "records")
    assert frame.groupby(["split", "iteration"]).size().to_dict() == {
        ("dev", 0): 24, ("dev", 2): 24, ("train", 1): 12, ("train", 2): 12,
    }  # fmt: skip
    run, trees, report = (str(tmp_path / name) for name in ("results/toy", "trees.html", "report.html"))
    assert CliRunner().invoke(app, ["trees", run, "--out", trees]).output == f"{trees}: 20 trees\n"
    assert CliRunner().invoke(app, ["report", run, "--out", report]).output == f"{report}\n"
    assert "<h3>Worst of 8</h3>" in Path(report).read_text()
    watched = CliRunner().invoke(app, ["watch", run]).output
    assert watched.startswith("MHGPO: 1 trial, 2 iterations, ended\n")
