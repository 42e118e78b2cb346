"""Records of rollouts: what is in them, how large they grow, who can read them and when."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from rllib_mhgpo.algorithms.grpo import GRPOConfig
from rllib_mhgpo.algorithms.mappo import MAPPOConfig
from rllib_mhgpo.algorithms.mhgpo import MHGPO
from rllib_mhgpo.errors import DataError
from rllib_mhgpo.llms import load_tokenizer
from rllib_mhgpo.records import FOLDER, SCHEMA, RecordFolder, read_records, token_texts
from tests.rig import row
from tests.toys import toy_tokenizer

pytestmark = pytest.mark.usefixtures("ray_session")
Make = Callable[..., MHGPO]


def read(algorithm: Any, **filters: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_records(Path(algorithm.logdir) / FOLDER, **filters).to_pylist()
    return rows


def test_a_run_keeps_its_trees_as_they_were_trained(make: Make) -> None:
    algorithm = make(record_share=1.0)
    result = row(algorithm)
    rows = [r for r in read(algorithm) if r["split"] == "train"]
    assert len(rows) == result["num_generations"] == 27
    assert {r["iteration"] for r in rows} == {1}
    assert {len([r for r in rows if r["root"] == root]) for root in {r["root"] for r in rows}} == {9}
    assert np.mean([r["reward"] for r in rows]) == pytest.approx(result["reward"])
    assert np.std([r["advantage"] for r in rows]) == pytest.approx(result["advantage_std"])
    assert np.mean([r["zero_std"] for r in rows]) == pytest.approx(result["zero_std_share"])
    tokenizer = load_tokenizer(algorithm.config.llm)
    for r in rows:
        assert "".join(r["response_tokens"]) == tokenizer.decode(r["response_ids"])
        assert len(r["logprobs"]) == len(r["response_ids"]) == len(r["response_tokens"])
        assert r["prompt"] == tokenizer.decode(r["prompt_ids"])
        assert r["parents"] == ([] if r["agent"] == "rewriter" else [r["previous"]])
        assert r["trained"]
        assert dict(r["metrics"])["illegal"] in (0.0, 1.0)
    leaves = [r for r in rows if r["scores"] is not None]
    assert len(leaves) == 9
    for leaf in leaves:
        episode = json.loads(leaf["episode"])
        assert episode["question"] == leaf["question"] == f"what is {leaf['root']}?"
        assert episode["supporting"] == [f"P{leaf['root']}"]
        assert dict(leaf["scores"])["f1"] == episode["scores"]["f1"]


def test_dev_questions_are_the_same_before_and_after(make: Make) -> None:
    algorithm = make(record_share=0.3)
    for _ in range(2):
        row(algorithm)
    before, after = ([r for r in read(algorithm, iterations=[i]) if r["split"] == "dev"] for i in (0, 2))
    assert {r["root"] for r in before} == {r["root"] for r in after}
    assert len({r["root"] for r in before}) == 3  # a share of 0.3 of 8, rounded up
    assert not any(r["trained"] for r in before)
    assert {r["advantage"] for r in before} == {None}
    leaf = before[-1]
    assert leaf["reward_shared"] >= 0
    assert leaf["reward"] == leaf["reward_shared"] + leaf["reward_specific"]


def test_a_share_of_nothing_writes_nothing(make: Make) -> None:
    algorithm = make(record_share=0.0)
    assert row(algorithm)["time"]["record_s"] >= 0
    assert not (Path(algorithm.logdir) / FOLDER).exists()


def test_critics_advantages_and_joined_transcripts_are_kept_by_token(
    toy_folder: Path, toy_questions_file: Path
) -> None:
    files = {"questions": str(toy_questions_file), "dev_questions": None}
    common = {
        "llm": str(toy_folder), "questions_per_iteration": 2, "group_size": 2, "record_share": 1.0,
        "max_response_tokens": 8, "seed": 0,
    }  # fmt: skip
    mappo: Any = MAPPOConfig().update_from_dict({**common, "env_config": files}).build_algo()
    row(mappo)
    for r in read(mappo):
        assert len(r["token_advantages"]) == len(r["response_ids"])
        assert np.mean(r["token_advantages"]) == pytest.approx(r["advantage"], abs=1e-5)
    mappo.stop()
    grpo: Any = GRPOConfig().update_from_dict({**common, "env_config": {**files, "max_rounds": 2}}).build_algo()
    row(grpo)
    rows = read(grpo)
    assert len(rows) == 4
    assert all(len(r["said"]) == len(r["response_ids"]) for r in rows)
    grpo.stop()


def test_pandas_and_duckdb_read_a_run_in_one_line(make: Make) -> None:
    algorithm = make(record_share=1.0)
    row(algorithm)
    folder = Path(algorithm.logdir) / FOLDER
    (folder / ".train-000009.parquet.part").write_bytes(b"half a file of a run that is being written")
    frame = pd.read_parquet(folder)
    wanted = f"select count(*), avg(reward) filter (split = 'train') from '{folder}/*.parquet'"
    (counted,) = duckdb.execute(wanted).fetchall()
    assert counted[0] == len(frame) == len(read(algorithm))
    assert counted[1] == pytest.approx(frame[frame.split == "train"].reward.mean())


# --- files ----------------------------------------------------------------------------------------------------------


def tree(root: int, prompt: str = "p" * 1000) -> list[dict[str, Any]]:
    ids = np.zeros(10, np.int32)
    made = {"root": root, "node": 0, "prompt": prompt, "prompt_ids": ids, "response": "r", "response_ids": ids}
    return [{**made, "episode": None, "agent": "a"}]


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_older_iterations_are_thinned_out_when_records_grow(tmp_path: Path) -> None:
    folder = RecordFolder(fs.LocalFileSystem(), str(tmp_path), 10**9)
    for iteration in range(9):
        folder.write("train", iteration, [tree(0)])
    folder.write("dev", 0, [tree(0)])
    size = (tmp_path / "dev-000000.parquet").stat().st_size
    folder.most_bytes = 8 * size
    folder.write("train", 9, [tree(0)])
    kept = [f"train-{i:06d}.parquet" for i in (0, 2, 4, 6, 8, 9)]
    assert names(tmp_path) == ["dev-000000.parquet", *kept]


def test_one_iteration_holds_at_most_a_quarter_of_what_is_allowed(tmp_path: Path) -> None:
    folder = RecordFolder(fs.LocalFileSystem(), str(tmp_path), 20_000)
    folder.write("train", 1, [tree(root) for root in range(50)])
    assert read_records(tmp_path)["root"].to_pylist() == [0, 1, 2, 3]  # 1,122 bytes each


def test_a_disk_that_cannot_be_written_costs_the_records_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "records").write_text("a file in the way")
    RecordFolder(fs.LocalFileSystem(), str(tmp_path / "records"), 10**6).write("train", 1, [tree(0)])
    assert "records of iteration 1 cannot be written" in caplog.text


def test_a_file_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []

    def write_half(table: Any, place: str, **kwargs: Any) -> None:
        Path(place).write_bytes(b"PAR1")
        seen.extend(tmp_path.glob("*.parquet"))
        raise OSError("No space left on device")

    monkeypatch.setattr(pq, "write_table", write_half)
    RecordFolder(fs.LocalFileSystem(), str(tmp_path), 10**6).write("train", 1, [tree(0)])
    assert not seen
    assert not list(tmp_path.glob("*.parquet"))


def test_an_older_file_is_read_and_a_newer_one_refused(tmp_path: Path) -> None:
    def save(version: bytes, name: str) -> None:
        table = pa.table({"iteration": [1], "root": [7], "extra": ["x"]})
        pq.write_table(table.replace_schema_metadata({b"rllib_mhgpo.records": version}), tmp_path / name)

    save(b"1", "train-000001.parquet")
    (only,) = read_records(tmp_path).to_pylist()
    assert (only["root"], only["advantage"]) == (7, None)
    assert set(only) == set(SCHEMA.names)
    save(b"2", "train-000002.parquet")
    with pytest.raises(DataError, match=r"train-000002.parquet: its schema is version 2, this package reads up to 1"):
        read_records(tmp_path)


def test_what_is_no_record_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected records"):
        read_records(tmp_path)
    (tmp_path / "train-000001.parquet").write_text("PAR1 no Parquet")
    with pytest.raises(DataError, match=r"train-000001.parquet: cannot be read as Parquet"):
        read_records(tmp_path)
    pq.write_table(pa.table({"x": [1]}), tmp_path / "train-000001.parquet")
    with pytest.raises(DataError, match=r"train-000001.parquet: expected records of rollouts"):
        read_records(tmp_path)


def test_the_texts_of_tokens_put_together_are_the_text() -> None:
    bytewise = toy_tokenizer()
    ids = np.array([*bytewise("aé🎈")["input_ids"], bytewise.eos_token_id], dtype=np.int32)
    texts = token_texts(bytewise, ids)
    assert texts == ["a", "", "é", "", "", "", "🎈", "<eos>"]
    tiny = load_tokenizer("tiny")
    ids = np.array(tiny("Who was born in Kassel? Zoë, naïve")["input_ids"], dtype=np.int32)
    assert "".join(token_texts(tiny, ids)) == tiny.decode(ids)
    assert len(token_texts(tiny, ids)) == len(ids)
    assert token_texts(tiny, ids[:0]) == []
    garbage = np.full(100, bytewise("é")["input_ids"][1], dtype=np.int32)  # a byte that begins nothing
    assert len(token_texts(bytewise, garbage)) == 100


def test_runners_elsewhere_that_sample_ahead_keep_the_same_questions(make: Make) -> None:
    here, elsewhere = (
        make(record_share=0.5),
        make(record_share=0.5, num_env_runners=1, sample_ahead=True, rollout_is_cap=2.0),
    )
    kept = []
    for algorithm in (here, elsewhere):
        row(algorithm)
        row(algorithm)
        kept.append([r for r in read(algorithm) if r["split"] == "train"])
    asked = [[(r["iteration"], r["root"], r["question"]) for r in rows] for rows in kept]
    assert asked[0] == asked[1]
    assert {question for _, _, question in asked[0]} == {f"what is {root}?" for _, root, _ in asked[0]}
    said = [[r["response_ids"] for r in rows if r["iteration"] == 1] for rows in kept]  # from the same weights
    assert said[0] == said[1]
    assert len(said[0]) == 2 * 9
