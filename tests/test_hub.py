"""Data sets that the package ``datasets`` wrote and reads, without a hub."""

import json
from pathlib import Path
from typing import Any

import pytest

from rllib_mhgpo.data import load_corpus, load_questions
from rllib_mhgpo.errors import DataError

datasets = pytest.importorskip("datasets", reason="needs the package datasets")

HOTPOT: dict[str, Any] = {
    "_id": "5a8b",
    "question": "Where was the author of Red Sand born?",
    "answer": "Ostby",
    "type": "bridge",
    "level": "hard",
    "supporting_facts": {"title": ["Red Sand", "Ada Holm"], "sent_id": [0, 7]},
    "context": {
        "title": ["Red Sand", "Ada Holm"],
        "sentences": [["Red Sand is a film.", " Ada Holm wrote it."], ["She was born in Ostby."]],
    },
}
MUSIQUE: dict[str, Any] = {
    "id": "2hop__1_2",
    "paragraphs": [
        {"idx": 0, "title": "Rome", "paragraph_text": "A city.", "is_supporting": True},
        {"idx": 1, "title": "Rome", "paragraph_text": "A film.", "is_supporting": False},
    ],
    "question": "Where?",
    "question_decomposition": [{"id": 1, "paragraph_support_idx": 0}],
    "answer": "Rome",
    "answer_aliases": ["Roma"],
}


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub")
    monkeypatch.setenv("RLLIB_MHGPO_CACHE", str(tmp_path / "cache"))


def write_file(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("record", [HOTPOT, MUSIQUE])
@pytest.mark.parametrize("how", ["parquet", "json", "disk", "disk of splits"])
def test_what_datasets_saved_is_what_a_file_holds(tmp_path: Path, record: dict[str, Any], how: str) -> None:
    key = "_id" if "_id" in record else "id"
    rows = [record, {**record, key: "second"}]
    made, folder = datasets.Dataset.from_list(rows), tmp_path / "set"
    folder.mkdir()
    if how == "parquet":
        made.to_parquet(str(folder / "validation-00000-of-00001.parquet"))
    elif how == "json":
        made.to_json(str(folder / "validation.jsonl"))
    elif how == "disk":
        made.save_to_disk(str(folder))
    else:
        datasets.DatasetDict({"validation": made}).save_to_disk(str(folder))
    name = f"hf:{folder}" if how == "disk" else f"hf:{folder}:validation"
    read = load_questions(name)
    plain = load_questions(write_file(tmp_path / "plain.jsonl", *rows))
    assert list(read) == list(plain)
    assert read.fingerprint == plain.fingerprint
    assert [q.id for q in load_questions(name, limit=1)] == [record[key]]
    assert len(load_corpus(tmp_path / "plain.jsonl")) == 2


def test_what_a_row_does_not_have_is_no_null(tmp_path: Path) -> None:
    file = write_file(
        tmp_path / "set" / "train.jsonl",
        {"id": 9223372036854775807, "question": "q", "answer": "a"},
        {"id": 2, "question": "r", "answer": "b", "answer_aliases": ["c"], "metadata": {"type": "bridge"}},
    )
    first, second = load_questions(f"hf:{file.parent}", require_context=False)
    assert (first.id, first.answers, first.kind) == ("9223372036854775807", ("a",), "")
    assert (second.answers, second.kind) == (("b", "c"), "bridge")


def test_a_changed_data_set_is_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "set"  # datasets finds splits in names, "test" among them
    folder.mkdir()
    for answer in ("one", "two"):
        datasets.Dataset.from_list([{**HOTPOT, "answer": answer}]).to_parquet(str(folder / "train.parquet"))
        assert load_questions(f"hf:{folder}")[0].answers == (answer,)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        # what pyarrow makes of JSON without a word: a double, a timestamp
        (
            [{"id": 2**63, "question": "q", "answer": "a"}],
            "record 1: expected the id .* Numbers with a point lose digits",
        ),
        ([{"question": "q", "answer": "1990-01-01"}], "record 1: key 'answer': expected a text .* found datetime"),
        ([{"title": "A", "text": "a"}], "record 1: expected key 'question'.*looks like a corpus"),
        ([{"id": "x", "question": "q", "answer": "a"}] * 2, "records 1 and 2 have the same id 'x'"),
    ],
)
def test_refused_rows_are_named(tmp_path: Path, rows: list[Any], message: str) -> None:
    write_file(tmp_path / "set" / "train.jsonl", *rows)
    with pytest.raises(DataError, match=message):
        load_questions(f"hf:{tmp_path / 'set'}", require_context=False)


def test_what_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    write_file(tmp_path / "set" / "validation.jsonl", HOTPOT)
    for name, message in (
        (f"hf:{tmp_path / 'set'}", r'Unknown split "train". Should be one of \[.validation.\]'),
        (f"hf:{tmp_path / 'none'}", "there is no such folder"),
        ("hf:hotpotqa/hotpot_qa/distractor:validation", r"Couldn't reach 'hotpotqa/hotpot_qa' .*give a folder"),
        ("hf:", "found no name"),
    ):
        with pytest.raises(DataError, match=message):
            load_questions(name)
    (tmp_path / "set" / "validation.jsonl").write_text('{"question": ', encoding="utf-8")
    with pytest.raises(DataError, match=r"cannot be loaded: .*JSON"):
        load_questions(f"hf:{tmp_path / 'set'}:validation")
    datasets.DatasetDict({"dev": datasets.Dataset.from_list([HOTPOT])}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(DataError, match="it has no split 'test', but 'dev'"):
        load_questions(f"hf:{tmp_path / 'splits'}:test")
    datasets.Dataset.from_list([HOTPOT]).save_to_disk(str(tmp_path / "whole"))
    with pytest.raises(DataError, match="one data set without splits, so that 'dev' names nothing"):
        load_questions(f"hf:{tmp_path / 'whole'}:dev")


def test_what_one_paragraph_does_not_have_is_no_null(tmp_path: Path) -> None:
    first, *others = MUSIQUE["paragraphs"]
    short = {key: value for key, value in first.items() if key != "idx"}
    rows = [MUSIQUE, {**MUSIQUE, "id": "second", "paragraphs": [short, *others]}]
    folder = tmp_path / "set"
    folder.mkdir()
    datasets.Dataset.from_list(rows).to_parquet(str(folder / "train.parquet"))
    assert list(load_questions(f"hf:{folder}")) == list(load_questions(write_file(tmp_path / "plain.jsonl", *rows)))
