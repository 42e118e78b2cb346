"""``rllib watch``: the curves of a run while it goes on, in the terminal or as a local page."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live

if TYPE_CHECKING:
    from rllib_mhgpo.views.compare import Group

EXAMPLES = """
[bold]Examples[/bold]

  rllib watch ~/ray_results/mhgpo-hotpot

  rllib watch ~/ray_results/mhgpo-hotpot --serve
"""
SECONDS = 5


def watch(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of trials or experiments.")],
    serve: Annotated[bool, typer.Option("--serve", help="As a page that refreshes, instead of here.")] = False,
    host: Annotated[str, typer.Option(help="Address of the page; others than this machine can read it elsewhere.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Port of the page; 0: a free one.", min=0, max=65535)] = 8050,
) -> None:
    """Show the curves and alerts of runs while they go on; ends with them, or with Ctrl-C."""
    looks = changes(runs)
    if serve:
        serve_page(runs, host, port)
        return
    from rllib_mhgpo.views.dashboard import dashboard

    console = Console()
    if not console.is_terminal:
        for groups in looks:
            console.print(dashboard(groups))
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for groups in looks:
            live.update(dashboard(groups), refresh=True)


def changes(runs: Sequence[Path], wait: Callable[[float], None] = time.sleep) -> Iterator[list["Group"]]:
    """Yields the runs at once and whenever a file of theirs has changed, until all have ended or were interrupted."""
    from rllib_mhgpo.views.compare import group_trials
    from rllib_mhgpo.views.runs import find_trials, signature

    seen = None
    while True:
        now = signature(runs)
        trials = [trial for run in runs for trial in find_trials(run)]
        is_over = all(trial.ended or trial.interrupted is not None for trial in trials)
        if now != seen or is_over:
            seen = now
            yield group_trials(trials)
        if is_over:
            return
        wait(SECONDS)


def serve_page(runs: Sequence[Path], host: str, port: int) -> None:
    """Serves the report until it is interrupted."""
    from rllib_mhgpo.views.report import make_report
    from rllib_mhgpo.views.runs import find_trials, signature
    from rllib_mhgpo.views.server import make_server

    for run in runs:
        find_trials(run)
    made: dict[object, str] = {}

    def page() -> str:
        now = signature(runs)
        if now not in made:
            fresh = make_report(runs, refresh=SECONDS)
            made.clear()
            made[now] = fresh
        return made[now]

    server = make_server(host, port, page)
    typer.echo(f"http://{host}:{server.server_address[1]}/  (Ctrl-C ends it)")
    try:
        server.serve_forever()
    finally:
        server.server_close()
