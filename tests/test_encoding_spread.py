"""Encoding by several Ray actors gives the index that one process builds."""

import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from rllib_mhgpo.cli import app
from rllib_mhgpo.cli.encoders import ray_encoders
from rllib_mhgpo.errors import ConfigError
from rllib_mhgpo.retrieval import building
from rllib_mhgpo.retrieval.build import sentence_encoder
from rllib_mhgpo.retrieval.store import read_meta
from tests.test_index import write_corpus
from tests.test_sentence_encoder import save_bert


def test_actors_encode_what_one_process_encodes(tmp_path: Path, ray_session: None) -> None:
    source, model = write_corpus(tmp_path / "c.jsonl", 3 * building.PLACE - 7), save_bert(tmp_path / "m")
    building.build_index(source, tmp_path / "one", sentence_encoder(str(model)))
    run = CliRunner().invoke(
        app,
        ["index", "build", str(source), "--encoder", str(model), "--out", str(tmp_path / "two"), "--workers", "2"],
        catch_exceptions=False,
    )
    assert run.exit_code == 0, run.output
    assert "recall@10 against Flat 1.000" in run.output
    one, two = ((tmp_path / name / "index.faiss").read_bytes() for name in ("one", "two"))
    ours, theirs = (np.frombuffer(raw[-4 * 32 * 1000 :], dtype=np.float32) for raw in (one, two))
    assert len(one) == len(two)
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert read_meta(tmp_path / "one")["encoder_fingerprint"] == read_meta(tmp_path / "two")["encoder_fingerprint"]


def test_more_workers_than_there_are_cpus(tmp_path: Path, ray_session: None) -> None:
    source, model = write_corpus(tmp_path / "c.jsonl", 5), save_bert(tmp_path / "m")
    for workers, gpus in ((99, 0), (1, 9)):
        with pytest.raises(ConfigError, match="Ask for no more"):
            building.build_index(
                source, tmp_path / "ix", sentence_encoder(str(model)), encode=ray_encoders(str(model), 8, workers, gpus)
            )


def test_a_dry_run_estimates_and_builds_nothing(tmp_path: Path) -> None:
    source, model = write_corpus(tmp_path / "c.jsonl", 50), save_bert(tmp_path / "m")
    command = ["index", "build", str(source), "--encoder", str(model), "--out", str(tmp_path / "ix"), "--dry-run"]
    run = CliRunner().invoke(app, [*command, "--index", "IVF16,PQ8"], catch_exceptions=False)
    assert run.exit_code == 0, run.output
    assert re.search(r"passages +50, ", run.output)
    assert "32 wide, IVF16,PQ8" in run.output
    assert not (tmp_path / "ix").exists()
