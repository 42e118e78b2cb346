"""``rllib watch``: a run while it goes on, in the terminal and as a local page."""

import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rllib_mhgpo.cli import app
from rllib_mhgpo.cli.watch import changes
from rllib_mhgpo.errors import ConfigError, DataError
from rllib_mhgpo.views.compare import Group, group_trials
from rllib_mhgpo.views.dashboard import dashboard, headlines
from rllib_mhgpo.views.runs import find_trials
from rllib_mhgpo.views.server import make_server
from tests.test_report import row, trial


def shown(groups: list[Group]) -> list[str]:
    console = Console(record=True, width=150)
    console.print(dashboard(groups))
    return console.export_text().splitlines()


def test_curves_and_alerts_in_the_terminal(tmp_path: Path) -> None:
    rows = [row(1, 0.25), row(2, 0.75, zero_std_share=1.0, done=True)]
    trial(tmp_path, rows, grid="[red]$x[/]")
    assert CliRunner().invoke(app, ["watch", str(tmp_path)]).exit_code == 0
    (groups,) = changes([tmp_path])
    said = shown(groups)
    assert said[0] == "MHGPO: 1 trial, 2 iterations, ended"
    assert any(line.split() == ["dev", "F1", "▁▃█", "0.1", "0.75"] for line in said)
    (recall,) = (line for line in said if line.startswith("recall of"))
    assert said[said.index(recall) + 1].split() == ["reranker", "▁▁", "0.25", "0.25"]
    assert recall.split()[-4:] == ["rewriter", "▁▁", "0.5", "0.5"]
    assert any(line.startswith("alert: 100% of the groups have equal rewards") for line in said)
    assert not any("illegal" in line for line in said)  # 0 throughout


def test_it_follows_a_run_to_its_end(tmp_path: Path) -> None:
    rows = [row(1, 0.2)]
    waited = []

    def go_on(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) > 1:  # nothing has changed after the first wait
            rows.append(row(len(rows) + 1, 0.5, done=len(rows) == 2))
            trial(tmp_path, rows)

    trial(tmp_path, rows)
    looks = [[group.iterations for group in groups] for groups in changes([tmp_path], go_on)]
    assert looks == [[1], [2], [3]]
    assert len(waited) == 3


def test_a_trial_that_failed_has_ended_unless_it_was_resumed(tmp_path: Path) -> None:
    place = trial(tmp_path, [])
    (place / "error.txt").write_text("Failure # 1 (occurred at 2026-11-30_02-35-00)\nTraceback ...")
    (groups,) = changes([tmp_path])
    assert shown(groups)[0] == "MHGPO: 1 trial, 0 iterations, ended"
    for date, ended in (("2026-11-30_02-34-59", True), ("2026-11-30_02-35-01", False)):
        trial(tmp_path, [row(1, 0.5, date=date)])
        assert find_trials(place)[0].ended is ended


def test_a_run_whose_process_is_gone_has_stopped(tmp_path: Path) -> None:
    """After a kill nothing is written any more; a run that is being resumed has written its parameters."""
    with subprocess.Popen(["true"]) as process:
        pass
    here = {"hostname": socket.gethostname(), "pid": process.pid}
    place, minute = trial(tmp_path, [row(1, 0.25, **here)]), time.time() - 60

    def state(result: float = minute, parameters: float = minute - 1, **changes: Any) -> str:
        trial(tmp_path, [row(1, 0.25, **{**here, **changes})])
        os.utime(place / "result.json", (result, result))
        os.utime(place / "params.json", (parameters, parameters))
        (line,) = headlines(group_trials(find_trials(tmp_path)))
        return line.rpartition("iterations, ")[2]

    assert state() == "stopped: no process, last row 1 minutes ago; rllib train ... --resume goes on"
    assert [len(groups) for groups in changes([tmp_path])] == [1]
    for going_on in (
        {"pid": os.getpid()}, {"hostname": "elsewhere"}, {"parameters": time.time()}, {"result": time.time()}
    ):  # fmt: skip
        assert state(**going_on) == "running", going_on
    assert state(done=True) == "ended"


@pytest.fixture
def pages() -> list[str]:
    return ["first"]


@pytest.fixture
def server(pages: list[str]) -> Iterator[HTTPServer]:
    def page() -> str:
        if not pages:
            raise DataError("<b>half a file")
        return pages[-1]

    made = make_server("127.0.0.1", 0, page)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def get(server: HTTPServer, path: str = "/", **headers: str) -> tuple[int, str]:
    address = f"http://127.0.0.1:{server.server_address[1]}{path}"
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_one_page_is_served_on_this_machine_alone(server: HTTPServer, pages: list[str]) -> None:
    assert server.server_address[0] == "127.0.0.1"
    with socket.create_connection(("127.0.0.1", server.server_address[1])):  # a browser that says nothing yet
        assert get(server) == (200, "first")
    pages.append("second")
    assert get(server) == (200, "second")
    assert get(server, "/../etc/passwd")[0] == 404
    assert get(server, Host="elsewhere.example:80")[0] == 403
    assert get(server, Host="localhost:1")[0] == 200
    pages.clear()
    assert get(server) == (503, "<!doctype html><title>waiting</title><p>&lt;b&gt;half a file</p>")


def test_a_port_in_use_is_said(server: HTTPServer) -> None:
    port = int(server.server_address[1])
    with pytest.raises(ConfigError, match=rf"127.0.0.1:{port} cannot be used.*another --port"):
        make_server("127.0.0.1", port, str)


@pytest.mark.parametrize("more", [[], ["--serve"]])
def test_what_is_no_run_is_refused(tmp_path: Path, more: list[str]) -> None:
    result = CliRunner().invoke(app, ["watch", str(tmp_path), *more])
    assert result.exit_code == 1
    assert "expected the folder of a trial or an experiment" in result.output
