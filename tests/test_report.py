"""``rllib report``: what became of runs, finished or not, one or many, as a page and as figures."""

import json
from math import isnan, nan, sqrt
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image
from typer.testing import CliRunner

from rllib_mhgpo.cli import app
from rllib_mhgpo.errors import DataError
from rllib_mhgpo.views.compare import group_trials, mean_and_error
from rllib_mhgpo.views.curves import make_panels
from rllib_mhgpo.views.report import make_report, scored_questions
from rllib_mhgpo.views.runs import find_trials
from tests.browser import Browser
from tests.test_trees_page import EVIL, chain, save

CONFIG = {"env": "search", "lr": 1e-4, "env_config": {"questions": "a.json"}, "seed": 0}


def row(iteration: int, f1: float, **changes: Any) -> dict[str, Any]:
    role = {"num_generations": 4, "reward": f1, "entropy": 0.5, "kl": 0.01, "illegal": 0.0, "response_tokens": 7.0}
    return {
        "training_iteration": iteration, "time_total_s": 60.0 * iteration, "date": "today", "config": {"lr": 1},
        "rewriter": {**role, "queries": 2.0, "recall": 0.5, "own_number": f1}, "reranker": {**role, "recall": 0.25},
        "zero_std_share": 0.25, "reward": f1, "grad_norm": 1.0, "tokens_per_s": 10.0, "peak_memory_gb": 1.5,
        "dev": {"f1": f1, "em": f1, "acc": f1, "avg": f1, "iteration": iteration, "questions": 100},
        "dev_start": {"f1": 0.1, "em": 0.0, "acc": 0.2, "avg": 0.1, "iteration": 0, "questions": 100},
        "time": {"sample_s": 3.0, "generate_s": 2.0, "step_s": 0.5, "retrieve_s": 0.25, "update_s": 4.0},
        **changes,
    }  # fmt: skip


def trial(folder: Path, rows: list[dict[str, Any]], name: str = "MHGPO_search_0", **config: Any) -> Path:
    """Writes a trial as Tune does, NaN included; returns its folder."""
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    (place / "result.json").write_text("".join(json.dumps(each) + "\n" for each in rows))
    (place / "params.json").write_text(json.dumps({**CONFIG, **config}))
    return place


def command(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["report", *map(str, arguments)])
    return result.exit_code, result.output


def test_seeds_are_one_group_with_mean_and_spread(tmp_path: Path) -> None:
    for seed, f1 in enumerate((0.4, 0.6, 0.8)):
        trial(tmp_path, [row(1, f1), row(2, f1 + 0.1)][: 1 + (seed < 2)], f"MHGPO_{seed}", seed=seed)
    (group,) = group_trials(find_trials(tmp_path))
    assert (group.label, len(group.trials), group.iterations) == ("MHGPO", 3, 2)
    # last scores 0.5, 0.7, 0.8: mean 2/3, sum of squares 0.046667, sd sqrt(0.046667 / 2), over sqrt(3)
    assert mean_and_error(group, "dev/f1") == pytest.approx((2 / 3, sqrt(0.14 / 3 / 2) / sqrt(3)))
    (panel,) = (each for each in make_panels([group]) if each.key == "dev_f1")
    (curve,) = panel.curves
    assert curve.x.tolist() == [0, 1, 2]
    assert curve.mean.tolist() == pytest.approx([0.1, 0.6, 0.6])  # at 2 there are the first two alone
    assert curve.spread.tolist() == pytest.approx([0, 0.2, sqrt(0.02)])


def test_the_error_of_one_seed_is_that_over_questions(tmp_path: Path) -> None:
    trial(tmp_path, [row(1, 0.36)])
    (group,) = group_trials(find_trials(tmp_path))
    assert mean_and_error(group, "dev/em") == pytest.approx((0.36, 0.048))  # sqrt(0.36 * 0.64 / 100)
    assert isnan(mean_and_error(group, "nothing")[0])


def test_the_error_of_one_seed_is_not_known_where_scores_may_be_anything(tmp_path: Path) -> None:
    """A mean return of 0.5 may be that of games won and lost, or of draws."""
    trial(tmp_path, [{**row(1, 0.36), "dev": {"player_return": 0.5, "questions": 100}}])
    (group,) = group_trials(find_trials(tmp_path))
    mean, error = mean_and_error(group, "dev/player_return")
    assert mean == 0.5
    assert isnan(error)


def test_several_algorithms_are_compared_by_what_differs(tmp_path: Path) -> None:
    trial(tmp_path, [row(1, 0.4)], "MHGPO_search_0")
    trial(tmp_path, [row(1, 0.4)], "MHGPO_search_1", lr=2e-4)
    trial(tmp_path, [row(1, 0.4)], "MAPPO_search_0", seed=5)
    groups = group_trials(find_trials(tmp_path))
    assert [group.label for group in groups] == ["MAPPO lr=0.0001", "MHGPO lr=0.0001", "MHGPO lr=0.0002"]
    keys = {panel.key: [curve.label for curve in panel.curves] for panel in make_panels(groups)}
    assert keys["rewriter_recall"] == keys["dev_f1"] == [group.label for group in groups]
    assert "rewriter_own_number" in keys
    page = make_report([tmp_path])
    assert "<td>lr</td><td>0.0001</td><td>0.0001</td><td>0.0002</td>" in page


def test_one_run_shows_its_roles(tmp_path: Path) -> None:
    trial(tmp_path, [row(1, 0.4), row(2, 0.5)])
    panels = {panel.key: panel for panel in make_panels(group_trials(find_trials(tmp_path)))}
    assert [curve.label for curve in panels["recall"].curves] == ["rewriter", "reranker"]
    assert [curve.mean.tolist() for curve in panels["recall"].curves] == [[0.5, 0.5], [0.25, 0.25]]


def test_a_page_and_figures_of_a_run_with_records(browser: Browser, tmp_path: Path) -> None:
    evil = {"env_config": {"questions": EVIL, "$x$": "$\\frac{1}{$"}}
    place = save(tmp_path, [chain(i, 0, 0.0, response=EVIL) for i in (1, 2)] + [chain(1, 4, 1.0), chain(2, 4, 0.0)])
    trial(place.parent, [row(1, 0.4), row(2, 0.5, zero_std_share=1.0)], place.name, **evil)
    trial(place.parent, [row(1, 0.3)], "MHGPO_search_1", **{**evil, "lr": 3, "llm": EVIL})
    out, figures = tmp_path / "report.html", tmp_path / "figures"
    assert command(place.parent, "--out", out, "--figures", figures) == (0, f"{out}\n")
    browser.requests()
    browser.open(out)
    assert browser.complaints() == []
    assert browser.requests() == [out.as_uri()]
    assert browser.run("return window.hacked === undefined")
    assert any(EVIL in text for text in browser.texts("td"))
    assert browser.texts("h2")[:2] == ["Result", "Alerts"]
    (alert,) = browser.texts(".alerts li")
    assert alert.startswith(
        "no spread in experiment/MHGPO_search_0, iteration 2: 100% of the groups have equal rewards"
    )
    ids = browser.run("return [...document.querySelectorAll('[id]')].map(each => each.id)")
    assert len(ids) == len(set(ids))
    names = {file.stem for file in figures.iterdir()}
    assert {"dev_f1", "rewriter_reward", "time_split"} <= names
    for name in names:
        ElementTree.parse(figures / f"{name}.svg")
        with Image.open(figures / f"{name}.png") as image:
            assert image.width > 500
    (worst, best) = (table.text for table in browser.all("h3 + .wide table"))
    assert worst.splitlines()[1] == "Where is 2? Kassel Kassel 0.00 0.00"
    assert best.splitlines()[1] == "Where is 1? Kassel Kassel 0.00 1.00"


def test_questions_are_scored_before_and_last(tmp_path: Path) -> None:
    place = save(tmp_path, [chain(1, 0, 0.0), chain(1, 2, 0.0), chain(1, 4, 1.0), chain(1, 4, 0.0, "train")])
    (only,) = scored_questions(find_trials(place))
    assert only == ("Where is 1?", "Kassel", "Kassel", 0.0, 1.0)


def test_names_of_numbers_are_text_too(tmp_path: Path) -> None:
    role = {**row(1, 0.5)["rewriter"], '"><img src=x>': 0.5, "a b": 0.5, "a/b": 0.5}
    trial(tmp_path, [row(1, 0.5, rewriter=role)])
    page = make_report([tmp_path], figures=tmp_path)
    assert "<img" not in page
    assert {"a_b.svg", "a_b_.svg", "_img_src_x_.svg"} <= {file.name for file in tmp_path.iterdir()}


NOTHING = {"num_generations": 0, "reward": nan, "entropy": nan, "kl": nan}


@pytest.mark.parametrize(
    ("rows", "shown"),
    [
        ([], "No iteration has finished yet"),
        ([row(1, 0.4)], "0.400 ± 0.049"),
        ([row(1, nan, rewriter=NOTHING, reranker=NOTHING, grad_norm=nan, tokens_per_s=nan)] * 2, "Result"),
        ([{"training_iteration": 1}], "Result"),
        ([row(1, 0.4), {"training_iteration": 2, "dev": {"f1": 0.5}}], "0.500"),
        ([{"training_iteration": 1, "env_runners": {"episode_return_mean": 21.5}}], "episode return"),
        ([row(1, 0.4), row(2, 0.2), row(2, 0.5)], "0.500 ± 0.050"),  # iteration 2 again after a resumption
    ],
)
def test_whatever_a_run_has_so_far_makes_a_page(tmp_path: Path, rows: list[dict[str, Any]], shown: str) -> None:
    trial(tmp_path, rows)
    page = make_report([tmp_path])
    assert shown in page
    assert "nan" not in page.lower().partition("<body>")[2]


def test_a_line_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    place = trial(tmp_path, [row(1, 0.4)])
    with (place / "result.json").open("a") as stream:
        stream.write('{"training_iteration": 2, "dev": {"f1"')
    assert len(find_trials(place)[0].rows) == 1
    with (place / "result.json").open("a") as stream:
        stream.write("\n")
    with pytest.raises(DataError, match=r"result.json, line 2: expected a JSON object"):
        find_trials(place)[0].rows  # noqa: B018  # read when it is asked for


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    for place, message in (
        (tmp_path, "expected the folder of a trial or an experiment"),
        (tmp_path / "no", "found nothing there"),
    ):
        code, said = command(place, "--out", out)
        assert code == 1
        assert message in said
        assert not out.exists()
    place = trial(tmp_path / "x", [row(1, 0.4)])
    assert "no such folder" in command(place, "--out", tmp_path / "no" / "report.html")[1]
    (tmp_path / "file").touch()
    assert "cannot be made" in command(place, "--out", out, "--figures", tmp_path / "file" / "x")[1]
    (place / "params.json").write_text("{")
    assert command(place, "--out", out)[0] == 0
