"""``rllib report``: what became of runs, as a page."""

from pathlib import Path
from typing import Annotated

import typer

from rllib_mhgpo.cli.trees import check_out

EXAMPLES = """
[bold]Examples[/bold]

  rllib report ~/ray_results/mhgpo-hotpot

  rllib report ~/ray_results/mhgpo-hotpot ~/ray_results/mappo-hotpot --out both.html --figures figures
"""


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of trials or experiments.")],
    out: Annotated[Path, typer.Option(metavar="FILE.html", help="The page to write.")] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write every figure there too, as SVG and PNG.")
    ] = None,
) -> None:
    """Write one page of runs: scores, alerts, curves over seeds, time, memory, differences, questions."""
    check_out(out)
    from rllib_mhgpo.views.page import write_page
    from rllib_mhgpo.views.report import make_folder, make_report

    if figures is not None:
        make_folder(figures)
    write_page(out, make_report(runs, figures))
    typer.echo(out)
