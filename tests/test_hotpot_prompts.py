"""The prompt set for HotpotQA: its worked examples are legal, its shared part comes first, its content is invented."""

import json
import os
from pathlib import Path

import pytest

from rllib_mhgpo.data import Passage
from rllib_mhgpo.envs.hotpot_prompts import AUTHOR, LAKE, NOVEL, QUESTION, ROLES
from rllib_mhgpo.envs.prompts import AGENTS, Message

DATA = Path(os.environ.get("MHGPO_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))
PAGES = [Passage(i, f"Title {i}", "x" * 1000) for i in range(10)]


def chat(agent: str, question: str, pages: list[Passage]) -> list[Message]:
    return ROLES[agent].messages(question, [], pages if agent != "rewriter" else [])


def test_the_worked_examples_are_what_the_parsers_call_legal() -> None:
    replies = {agent: ROLES[agent].examples[0][1] for agent in AGENTS}
    assert ROLES["rewriter"].parse(replies["rewriter"]) == ([QUESTION, "the novel Mill on the Tarn"], True)
    assert ROLES["reranker"].parse(replies["reranker"], [NOVEL, AUTHOR, LAKE]) == ([1, 0], True)
    assert ROLES["answerer"].parse(replies["answerer"]) == ("Brannick", True)


@pytest.mark.parametrize("agent", AGENTS)
def test_only_the_last_turn_depends_on_the_question(agent: str) -> None:
    first, second = chat(agent, "Who?", PAGES), chat(agent, "Where?", PAGES[:3])
    assert [m["role"] for m in first] == ["system", "user", "assistant", "user"]
    assert first[:-1] == second[:-1]
    assert "Who?" in first[-1]["content"]


@pytest.mark.parametrize("agent", AGENTS)
def test_the_example_is_asked_as_the_question_is(agent: str) -> None:
    pages = {"rewriter": [], "reranker": [NOVEL, AUTHOR, LAKE], "answerer": [NOVEL, AUTHOR]}[agent]
    assert chat(agent, QUESTION, pages)[-1]["content"] == ROLES[agent].examples[0][0]


def test_passages_are_numbered_from_zero_and_cut() -> None:
    request = chat("reranker", "Who?", PAGES)[-1]["content"]
    for i in range(10):
        assert f"[{i}] Title {i}: {'x' * 160}\n" in request
    assert "x" * 161 not in request


@pytest.mark.parametrize("name", ["hipporag_train100.json", "benchfortir_dev500.jsonl"])
def test_the_example_is_not_from_the_data(name: str) -> None:
    path = DATA / "hotpotqa" / name
    if not path.is_file():
        pytest.skip(f"needs {path}; set MHGPO_TEST_DATA")
    text = path.read_text(encoding="utf-8")
    assert not [word for word in ("Mill on the Tarn", "Edda Voss", "Brannick", json.dumps(LAKE.text)) if word in text]
