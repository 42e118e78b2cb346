"""``rllib example``: the tuned examples that come with the package, also where only a wheel is installed."""

import shutil
from pathlib import Path
from typing import Annotated

import typer

from rllib_mhgpo.errors import ConfigError, did_you_mean

EXAMPLES = Path(__file__).parents[1] / "tuned_examples"

app = typer.Typer(help="List or copy the tuned examples.", no_args_is_help=True, rich_markup_mode="rich")


def find_examples() -> dict[str, Path]:
    """Returns the example files by name, without their suffix."""
    return {path.stem: path for path in sorted(EXAMPLES.glob("[!_.]*")) if path.suffix in (".yaml", ".py")}


def first_words(path: Path) -> str:
    """Returns the first line of the file's header, a comment or a docstring; empty where it has none."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.strip('#" ') if first.startswith(("#", '"')) else ""


@app.command("list")
def list_() -> None:
    """List the examples, each with its first line.

    rllib example list
    """
    found = find_examples()
    width = max(map(len, found), default=0)
    for name, path in found.items():
        typer.echo(f"{name:<{width}}  {first_words(path)}")


@app.command()
def copy(
    name: Annotated[str, typer.Argument(help="Name of the example, with or without its suffix.")],
    destination: Annotated[Path, typer.Argument(metavar="[DEST]", help="Folder or file to copy it to.")] = Path(),
) -> None:
    """Copy an example, to be changed and trained.

    rllib example copy mhgpo_hotpot my.yaml && rllib train file my.yaml
    """
    found = find_examples()
    source = found.get(name) or found.get(Path(name).stem)
    if source is None:
        raise ConfigError(f"example: no {name!r}; there are {', '.join(found)}.{did_you_mean(name, found)}")
    target = destination / source.name if destination.is_dir() else destination
    if target.exists():
        raise ConfigError(f"example: {target} exists already; name another destination.")
    try:
        shutil.copyfile(source, target)
    except OSError as error:
        raise ConfigError(f"example: {target} cannot be written: {error.strerror}.") from None
    typer.echo(target)
