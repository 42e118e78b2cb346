"""``rllib trees``: what the agents said, as a page that asks nothing of the network."""

from pathlib import Path
from typing import Annotated

import typer

from rllib_mhgpo.errors import DataError

EXAMPLES = """
[bold]Examples[/bold]

  rllib trees ~/ray_results/mhgpo-hotpot

  rllib trees RUN --iteration 0 --iteration 12 --question "born in" --out trees.html
"""


def trees(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A trial's folder, or an experiment's: its last trial.")],
    iteration: Annotated[
        list[int] | None, typer.Option(help="Only this iteration; 0 is before training. Repeatable.", min=0)
    ] = None,
    question: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only questions with this text, this id or this index.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FILE.html", help="The page to write.")] = Path("trees.html"),
) -> None:
    """Write one page of the rollouts that a run kept: questions, trees, prompts and responses."""
    check_out(out)
    from rllib_mhgpo.views.page import write_page
    from rllib_mhgpo.views.runs import find_trials
    from rllib_mhgpo.views.trees import last_trial, tree_page

    trial = last_trial(run).folder
    if len(find_trials(run)) > 1:
        typer.echo(f"the last run: {trial}", err=True)
    page, shown, found = tree_page(trial, iteration, question)
    write_page(out, page)
    left = f" of {found}; narrow it with --iteration or --question" if shown < found else ""
    typer.echo(f"{out}: {shown} trees{left}")


def check_out(out: Path) -> None:
    """Refuses a place that cannot be a file, before any work is done."""
    if out.is_dir():
        raise DataError(f"{out}: expected a file to write, found a folder.")
    if not out.absolute().parent.is_dir():
        raise DataError(f"{out}: no such folder {out.absolute().parent}.")
