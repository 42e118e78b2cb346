"""A system asked one question, and one evaluated on several sets of questions, each with its own passages."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rllib_mhgpo.cli import app
from rllib_mhgpo.cli.ask import unknown_words
from rllib_mhgpo.cli.evaluate import question_sets, score_table
from rllib_mhgpo.data import Corpus
from rllib_mhgpo.envs.minipedia import minipedia
from rllib_mhgpo.errors import ConfigError, RetrievalError
from rllib_mhgpo.llms import load_tokenizer
from rllib_mhgpo.retrieval import build_retriever, save_retriever
from rllib_mhgpo.retrieval.store import read_meta
from tests.toys import PROMPTS, toy_questions, toy_tokenizer


@pytest.fixture(scope="module")
def experiment(toy_folder: Path, toy_questions_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained system of the toy policy."""
    settings = {
        "llm": str(toy_folder), "max_response_tokens": 6,
        "env_config": {"questions": str(toy_questions_file), "dev_questions": None, "prompts": PROMPTS},
    }  # fmt: skip
    file = tmp_path_factory.mktemp("run") / "toy.yaml"
    file.write_text(json.dumps({"toy": {"run": "MHGPO", "env": "search", "config": settings}}), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("index") / "ix"
    pages = [(f"Page {i}", f"what is [red]{i}[/red] \x1b[31m") for i in range(12)]
    save_retriever(build_retriever(Corpus.from_passages(pages)), place)
    return place


def run(*arguments: object, **settings: Any) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False, **settings)


def test_a_question_is_answered_from_an_index(experiment: Path, index: Path) -> None:
    told = run("ask", experiment, "what is 7?", "--index", index, "--json")
    assert told.exit_code == 0, told.output
    record = json.loads(told.stdout)
    assert record["question"] == "what is 7?"
    assert set(record["outputs"]) == {"rewriter", "reranker", "answerer"}
    assert {"answer", "queries", "passages", "seconds"} <= set(record)
    assert not {"gold", "scores"} & set(record)
    assert all(passage["title"].startswith("Page") for passage in record["passages"])
    assert all(isinstance(passage["chosen"], bool) for passage in record["passages"])
    shown = run("ask", experiment, "what is 7?", "--index", index).stdout
    assert "rewriter" in shown
    assert "\x1b" not in shown


def test_questions_are_asked_for_until_the_end(experiment: Path, index: Path) -> None:
    told = run("ask", experiment, "--index", index, "--json", input="what is 1?\n\nwhat is 2?\n")
    assert told.exit_code == 0, told.output
    lines = [line.removeprefix("question: ") for line in told.stdout.splitlines()]
    asked = [json.loads(line[line.index("{") :])["question"] for line in lines if "{" in line]
    assert asked == ["what is 1?", "what is 2?"]


def test_from_python(experiment: Path, index: Path) -> None:
    from rllib_mhgpo.cli.evaluate import untrained

    system = untrained(experiment, {"retriever": str(index)})
    assert system.ask("what is 3?")["question"] == "what is 3?"
    with pytest.raises(ConfigError, match="expected a question"):
        system.ask("  ")
    assert system.on({"top_k": 2}).env.top_k == 2
    assert system.env.top_k == 10


def test_the_shipped_model_answers_in_its_world() -> None:
    asked = minipedia("minipedia:test")[0]
    file = Path(__file__).parent.parent / "tuned_examples" / "mhgpo_hotpot.yaml"
    told = run("ask", file, asked.question, "--json")
    assert told.exit_code == 0, told.output
    assert "warning" not in told.stderr  # it knows all words
    record = json.loads(told.stdout)
    assert record["outputs"].keys() == {"rewriter", "reranker", "answerer"}
    assert record["answer"]
    assert record["answer"] in record["outputs"]["answerer"]
    assert 0 < sum(passage["chosen"] for passage in record["passages"]) < len(record["passages"])
    shown = run("ask", file, asked.question).stdout
    assert shown.count("✓") == sum(passage["chosen"] for passage in record["passages"])
    assert record["answer"] in shown.splitlines()[-1]


def test_refused_indexes(experiment: Path, tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none", "tfidf"):
        refused = run("ask", experiment, "x", "--index", place)
        assert refused.exit_code == 1
        assert "expected the folder of an index" in refused.stderr


def test_several_sets_in_one_table(experiment: Path, index: Path, toy_questions_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    rows = [{"question": q.question, "answer": q.answers[0], "_id": f"o{q.id}"} for q in toy_questions(3)]
    other.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    out, toy = tmp_path / "out.jsonl", tmp_path / "toy.json"
    toy.write_bytes(toy_questions_file.read_bytes())
    told = run(
        "evaluate", experiment, "--questions", toy_questions_file, "--corpus", "own",
        "--questions", other, "--corpus", index, "--questions", toy, "--corpus", "own", "--out", out,
    )  # fmt: skip
    assert told.exit_code == 0, told.output
    table = told.stdout.partition("questions")[2]
    assert all(heading in table for heading in ("Acc", "EM", "F1", "AVG"))
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [record["questions"] for record in records] == [
        *[str(toy_questions_file)] * 8, *[str(other)] * 3, *[str(toy)] * 8
    ]  # fmt: skip
    titles = {passage["title"] for record in records[8:11] for passage in record["passages"]}
    assert all(title.startswith("Page") for title in titles)
    for record, again in zip(records[:8], records[11:], strict=True):  # nothing of one set's passages in the next
        assert record["passages"] == again["passages"]


def test_the_table_by_hand() -> None:
    """F1 1 and 0: mean 0.5, deviation 0.5, error 0.5 / √2; a voided rollout counts 0."""
    played: list[Any] = [{"scores": dict.fromkeys(("acc", "em", "f1", "avg"), value)} for value in (1.0, 0.0)]
    table = score_table({"a": played, "b": [played[0], {"void": "x"}]})
    columns = [list(column.cells) for column in table.columns]
    assert [list(map(str, column)) for column in columns] == [["a", "b"], *[["50.00 ± 35.36"] * 2] * 4, ["2", "2"]]


def test_sets_of_questions() -> None:
    assert question_sets([], []) == {"the run's dev questions": {}}
    assert question_sets([], ["c.arrow"]) == {"the run's dev questions": {"corpus": "c.arrow"}}
    asked = {"dev_questions": None}
    assert question_sets(["a", "b"], ["own"]) == {
        "a": {"questions": "a", "corpus": "own", **asked},
        "b": {"questions": "b", "corpus": "own", **asked},
    }
    assert question_sets(["a", "b"], ["c", "d"])["b"] == {"questions": "b", "corpus": "d", **asked}
    assert question_sets(["a"], []) == {"a": {"questions": "a", **asked}}
    for questions, corpora, message in (
        (["a", "b"], ["c", "d", "e"], "one for each of 2"),
        (["a", "a"], [], "the same questions twice"),
        ([" "], [], "found nothing"),
    ):
        with pytest.raises(ConfigError, match=message):
            question_sets(questions, corpora)


def test_words_that_the_policy_does_not_know_are_named() -> None:
    tokenizer = load_tokenizer("tiny")
    assert unknown_words(tokenizer, "Where was Einstein born?") == ["Einstein"]
    assert unknown_words(tokenizer, "In which town was the person behind the film Amber Tower born?") == []
    assert unknown_words(toy_tokenizer(), "Where was Einstein born?") == []


def test_what_is_no_index_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match="no such folder"):
        read_meta(tmp_path / "nowhere")
    with pytest.raises(RetrievalError, match=r"a folder without meta\.json"):
        read_meta(tmp_path)
