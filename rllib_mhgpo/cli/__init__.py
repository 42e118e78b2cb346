"""The command ``rllib``: one file a command family; nothing heavy is imported before a command runs.

A failure that the user can cause is one message on stderr and exit code 1, an interrupt exit code 130; a fault of the
program is a traceback.
"""

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from rllib_mhgpo import __version__
from rllib_mhgpo.cli import ask, doctor, env, evaluate, example, index, plan, report, score, train, trees, watch
from rllib_mhgpo.errors import MHGPOError


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Runs the command and turns failures into messages."""
        try:
            return super().invoke(ctx)
        except MHGPOError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            typer.echo("Interrupted.", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Commands,
    help="Train systems of several LLM agents, and everything that RLlib trains, from one file.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog="[bold]Start with[/bold]  rllib train file tuned_examples/mhgpo_hotpot.yaml",
)
app.add_typer(train.app, name="train")
app.add_typer(index.app, name="index")
app.add_typer(example.app, name="example")
app.add_typer(env.app, name="env")
app.command("ask", epilog=ask.EXAMPLES)(ask.ask)
app.command("score")(score.score)
app.command("plan", epilog=plan.EXAMPLES)(plan.plan)
app.command("doctor", epilog=doctor.EXAMPLES)(doctor.doctor)
app.command("evaluate", epilog=evaluate.EXAMPLES)(evaluate.evaluate)
app.command("trees", epilog=trees.EXAMPLES)(trees.trees)
app.command("report", epilog=report.EXAMPLES)(report.report)
app.command("watch", epilog=watch.EXAMPLES)(watch.watch)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show it."),
) -> None:
    """Train systems of several LLM agents, and everything that RLlib trains, from one file."""


def main() -> None:
    """Entry point of the console script; modules beside the user's files can be named, as with ``python -m``."""
    sys.path.insert(0, os.getcwd())
    app()
