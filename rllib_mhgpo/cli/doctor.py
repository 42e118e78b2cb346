"""``rllib doctor``: whether a machine, and a configuration on it, will do what they should, in about a minute."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from rllib_mhgpo.errors import ConfigError

if TYPE_CHECKING:
    from rllib_mhgpo.cli.machine_checks import Finding

EXAMPLES = """
[bold]Examples[/bold]

  rllib doctor

  rllib doctor tuned_examples/mhgpo_hotpot.yaml --set engine=vllm
"""
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    path: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="A .yaml file of experiments, or a .py file.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE", help="Change one setting. Repeatable.")
    ] = None,
) -> None:
    """Check this machine and a configuration: ok, warn or fail a line, with what to do. Exit code 1 where one fails."""
    from rllib_mhgpo.cli.launch import prepare

    prepare(0)
    console, worst = Console(), "ok"
    for found in findings(path, set_ or []):
        show(console, found)
        worst = max(worst, found.status, key=list(STYLES).index)
    raise typer.Exit(1 if worst == "fail" else 0)


def findings(path: Path | None, changes: list[str]) -> Iterator["Finding"]:
    """Yields what there is to say of the machine and, with a file, of its experiments."""
    from rllib_mhgpo.cli.machine_checks import faiss_searches, machine_checks, packages
    from rllib_mhgpo.cli.system_checks import system_checks

    if path is None:
        yield from machine_checks()
        return
    yield from packages()
    yield faiss_searches()
    for config in configurations(path, changes):
        yield from system_checks(config)


def configurations(path: Path, changes: list[str]) -> Iterator[Any]:
    """Yields the checked configuration of each experiment of a file.

    Raises:
        ConfigError: the file does not describe an experiment of this package.
    """
    from rllib_mhgpo.cli.checks import check, is_own, the_variant
    from rllib_mhgpo.cli.experiments import change, load_experiments

    for name, experiment in load_experiments(path).items():
        for assignment in changes:
            change(experiment, assignment)
        algorithm: Any = check(name, experiment)
        if not is_own(algorithm):
            raise ConfigError(f"doctor: {name} runs {algorithm.__name__}; expected an algorithm of this package.")
        config = algorithm.get_default_config().update_from_dict(
            the_variant(experiment["config"], name, "choose one value of each, such as --set lr=1e-5.")
        )
        config.validate()
        yield config


def show(console: Console, found: "Finding") -> None:
    """Prints one line, and the remedy below it."""
    line = Text(f"{found.status:5}", STYLES[found.status])
    line.append(f"{found.name}: ", "bold").append(found.found, "default")
    console.print(line, soft_wrap=True)
    if found.remedy and found.status != "ok":
        console.print(Text(f"     -> {found.remedy}", "default"), soft_wrap=True)
