"""``rllib trees``: one page, without network, in which everything is text."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from selenium.webdriver.common.keys import Keys
from typer.testing import CliRunner

from rllib_mhgpo.cli import app
from rllib_mhgpo.records import SCHEMA
from rllib_mhgpo.views.trees import by_use, tree_page
from tests.browser import Browser

EVIL = '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">&amp; {{script}}'
PROMPT = "Choose among these. " + "Ada Abel was born in Kassel and painted the sea. " * 40


def node(tree: Mapping[str, Any], place: int, agent: str, response: str, **changes: Any) -> dict[str, Any]:
    tokens = [response[:4], response[4:], "<eos>"]
    return {
        **tree, "node": place, "agent": agent, "act": 0, "previous": None, "parents": [], "path": [place],
        "prompt": PROMPT + agent, "prompt_ids": [1, 2], "response": response, "response_tokens": tokens,
        "response_ids": [1, 2, 3], "logprobs": [-0.5, -2.0, float("nan")], "truncated": False, "reward": 0.5,
        "reward_shared": 0.5, "reward_specific": 0.0, "advantage": 1.25, "group": 1, "zero_std": False,
        "trained": True, "metrics": {"illegal": 0.0}, **changes,
    }  # fmt: skip


def chain(root: int, iteration: int, em: float, split: str = "dev", response: str = "Kassel") -> list[dict[str, Any]]:
    """Rewriter, reranker, two answerers."""
    tree = {"root": root, "iteration": iteration, "split": split, "question": f"Where is {root}?", "question_id": "x"}
    episode = {
        "passages": [{"id": 7, "title": "Ada", "text": "was born"}, {"id": 9, "title": "Bo", "text": "was not"}],
        "supporting": ["Ada"], "chosen": [9], "answer": response, "gold": ["Kassel"], "queries": ["Ada"],
    }  # fmt: skip
    end = {"previous": 1, "parents": [1], "scores": {"em": em, "f1": em}, "episode": json.dumps(episode)}
    return [
        node(tree, 0, "rewriter", "Ada Abel"),
        node(tree, 1, "reranker", response, previous=0, parents=[0], advantage=-0.75),
        node(tree, 2, "answerer", response, **end),
        node(tree, 3, "answerer", "elsewhere", **end),
    ]


def save(folder: Path, trees: list[list[dict[str, Any]]]) -> Path:
    """Writes a trial's records; returns the trial's folder."""
    trial = folder / "experiment" / "MHGPO_search_0"
    (trial / "records").mkdir(parents=True)
    rows = [row for tree in trees for row in tree]
    for split, iteration in {(row["split"], row["iteration"]) for row in rows}:
        mine = [row for row in rows if (row["split"], row["iteration"]) == (split, iteration)]
        table = pa.Table.from_pylist(mine, SCHEMA)
        pq.write_table(table, trial / "records" / f"{split}-{iteration:06d}.parquet")
    return trial


def command(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["trees", *map(str, arguments)])
    return result.exit_code, result.output


@pytest.fixture
def page(tmp_path: Path) -> Path:
    zero = chain(3, 4, 1.0)
    zero[1] |= {"zero_std": True, "metrics": {"illegal": 1.0}, "truncated": True}
    trees = [
        *(chain(root, 0, em) for root, em in ((1, 0.0), (2, 1.0), (3, 1.0))),
        chain(1, 4, 1.0), chain(2, 4, 1.0), zero, chain(5, 3, 0.0, "train", EVIL),
    ]  # fmt: skip
    out = tmp_path / "trees.html"
    code, said = command(save(tmp_path, trees), "--out", out)
    assert (code, said) == (0, f"{out}: 7 trees\n")
    return out


def test_a_person_filters_opens_and_compares(browser: Browser, page: Path) -> None:
    browser.requests()
    browser.open(page)
    assert browser.texts("#said") == ["3 of 3 questions"]  # of the last evaluation
    browser.wait_for(".panel h2", "dev, iteration 4")  # whose first question is open
    assert browser.texts(".question") == ["Where is 1?"]
    assert [each.text.split("\n")[0] for each in browser.all("#questions [aria-current]")] == ["Where is 1?"]
    expected = {"wrong": 0, "right": 3, "changed": 1, "zero spread": 1, "illegal": 1, "all": 3}
    for choice, count in expected.items():
        browser.choose("#filter", choice)
        assert len(browser.all("#questions button")) == count, choice
    browser.choose("#filter", "changed")
    (line,) = browser.all("#questions button")
    assert "Where is 1?" in line.text
    assert "▲ was wrong" in line.text
    line.click()
    browser.wait(".panel", 2)  # both iterations, side by side
    assert browser.texts(".panel h2") == ["dev, iteration 0", "dev, iteration 4"]
    lefts = [panel.location["x"] for panel in browser.all(".panel")]
    assert lefts[0] < lefts[1]
    browser.choose("#other", "nothing")
    browser.wait(".panel")
    assert browser.texts(".panel h2") == ["dev, iteration 4"]
    assert len(browser.all(".tree path")) == 4  # the question, and three edges
    browser.all(".node")[2].click()
    assert browser.texts(".response") == ["Kassel<eos>"]
    assert "log-probability -2 (13.5 %)" in str(browser.all(".response span")[1].get_attribute("title"))
    assert [text.split("\n")[0] for text in browser.texts(".passages li")] == ["Ada★ supporting", "Bochosen"]
    assert browser.texts(".prompt") == [(PROMPT + "answerer")]
    shades = [str(each.get_attribute("style")) for each in browser.all(".node")]
    assert "--plus" in shades[0]
    assert "--minus" in shades[1]
    browser.choose("#filter", "all")
    browser.all("#search")[0].send_keys("is 2")
    assert len(browser.all("#questions button")) == 1
    assert browser.complaints() == []
    assert browser.requests() == [page.as_uri()]


def test_the_page_is_used_with_keys_alone(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.all("body")[0].send_keys("/")
    active = browser.driver.switch_to.active_element
    assert active.get_attribute("id") == "search"
    browser.all("#questions button")[0].send_keys(Keys.ARROW_DOWN)
    browser.driver.switch_to.active_element.send_keys(Keys.ENTER)
    browser.wait_for(".question", "Where is 2?")
    browser.run("document.querySelector('.node').focus()")
    for key, agent in (
        (Keys.ARROW_RIGHT, "reranker"), (Keys.ARROW_RIGHT, "answerer"), (Keys.ARROW_DOWN, "answerer"),
        (Keys.ARROW_LEFT, "reranker"),
    ):  # fmt: skip
        browser.driver.switch_to.active_element.send_keys(key)
        assert browser.driver.switch_to.active_element.text.startswith(agent)
    browser.driver.switch_to.active_element.send_keys(Keys.ENTER)
    assert browser.texts(".detail h3")[0] == "reranker: response"


def test_what_agents_say_is_text(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.choose("#iteration", "train, iteration 3")
    browser.all("#questions button")[0].click()
    browser.wait_for(".panel h2", "train, iteration 3")
    browser.all(".node")[2].click()
    assert browser.texts(".response") == [EVIL + "<eos>"]
    assert browser.run("return window.hacked === undefined")
    assert browser.run("return document.querySelectorAll('img').length") == 0
    assert EVIL not in page.read_text()
    # even a script that got into the page would not be run
    browser.run(
        "const s = document.createElement('script'); s.textContent = 'window.hacked = 2'; document.body.append(s)"
    )
    assert browser.run("return window.hacked === undefined")
    assert "Content Security Policy" in "".join(browser.complaints())


def test_two_thousand_trees_are_one_small_page_that_opens(browser: Browser, tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    words = [f"word{number}" for number in range(3000)]

    def large(root: int) -> list[dict[str, Any]]:
        tree = chain(root, 1, float(root % 2), "train")
        text = " ".join(noise.choice(words, 350))
        return [{**row, "prompt": f"{text} {row['agent']}"} for row in tree]

    out = tmp_path / "trees.html"
    code, said = command(save(tmp_path, [large(root) for root in range(2000)]), "--out", out)
    assert (code, said) == (0, f"{out}: 2000 trees\n")
    assert out.stat().st_size < 20e6
    browser.open(out)
    assert browser.texts("#said") == ["2000 of 2000 questions"]
    browser.all("#questions button")[1234].click()
    browser.wait_for(".question", "Where is 1234?")


def test_a_page_that_would_grow_too_large_leaves_older_trees_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rllib_mhgpo.views.trees.MOST_BYTES", 6_000)
    trial = save(tmp_path, [chain(root, iteration, 1.0) for root in range(2) for iteration in range(9)])
    _, shown, found = tree_page(trial, None, None)
    assert 4 <= shown < found == 18
    names = ["train-000001", "dev-000000", "train-000002", "dev-000005", "dev-000009"]
    used = by_use(Path(f"{name}.parquet") for name in names)
    assert [file.stem for file in used] == ["dev-000009", "dev-000000", "train-000002", "dev-000005", "train-000001"]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["--iteration", "4"], 2), (["--iteration", "0", "--iteration", "3"], 2), (["--question", "where IS 2"], 1),
        (["--question", "1"], 2), (["--question", "x"], 4),
    ],
)  # fmt: skip
def test_a_page_of_what_was_asked_for(tmp_path: Path, arguments: list[str], shown: int) -> None:
    trees = [chain(1, 0, 0.0), chain(1, 4, 0.0), chain(2, 4, 0.0), chain(5, 3, 0.0, "train")]
    out = tmp_path / "t.html"
    assert command(save(tmp_path, trees), "--out", out, *arguments) == (0, f"{out}: {shown} trees\n")


def test_the_last_run_of_a_folder_is_shown_and_named(tmp_path: Path) -> None:
    """As ``rllib evaluate`` takes the last checkpoint; last is what was written last, whatever its name."""
    trial = save(tmp_path, [chain(1, 0, 0.0), chain(2, 0, 0.0)])
    other = save(tmp_path / "later", [chain(3, 0, 0.0)]).rename(trial.with_name("MHGPO_a"))
    os.utime(trial / "records" / "dev-000000.parquet", (0, 1))
    os.utime(other / "records" / "dev-000000.parquet", (0, 2))
    out = tmp_path / "t.html"
    code, said = command(tmp_path / "experiment", "--out", out)
    assert (code, said) == (0, f"the last run: {other}\n{out}: 1 trees\n")


def test_what_cannot_be_shown_is_said(tmp_path: Path) -> None:
    out = tmp_path / "t.html"

    def said(*arguments: object) -> str:
        code, message = command(*arguments, "--out", out)
        assert code == 1
        assert not out.exists()
        return message

    assert "found nothing there" in said(tmp_path / "no")
    assert "expected the folder of a trial or an experiment" in said(tmp_path)
    trial = save(tmp_path, [chain(1, 0, 0.0)])
    assert "no records of a question 'zzz'" in said(trial, "--question", "zzz")
    assert "of iterations [8], found those of [0]" in said(trial, "--iteration", "8")
    (trial / "result.json").write_text("{}\n")
    (trial / "records" / "dev-000000.parquet").unlink()
    assert "kept no records" in said(trial)
    assert "expected a file to write" in command(trial, "--out", tmp_path)[1]


def test_records_of_an_environment_that_says_nothing_are_shown(browser: Browser, tmp_path: Path) -> None:
    bare = {"split": "train", "iteration": 1, "root": 0, "node": 0, "agent": "player", "response": "C4"}
    ended = {**bare, "node": 1, "previous": 0, "scores": {}, "reward_shared": 1.0, "episode": "[not an object"}
    out = tmp_path / "t.html"
    assert command(save(tmp_path, [[bare, ended]]), "--out", out)[0] == 0
    browser.open(out)
    assert browser.all("#questions button")[0].text.startswith("question 0\n1 ·")
    browser.wait(".node", 2)[1].click()
    assert browser.texts(".detail h3")[:2] == ["player: response", "Numbers"]
    assert browser.complaints() == []
