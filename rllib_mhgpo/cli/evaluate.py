"""``rllib evaluate``: answers questions with a checkpoint, prints the scores and writes the predictions down."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from rllib_mhgpo.cli.experiments import change
from rllib_mhgpo.errors import DataError

EXAMPLES = """
[bold]Examples[/bold]

  rllib evaluate ~/ray_results/mhgpo-hotpot --questions minipedia:test

  rllib evaluate CHECKPOINT --questions dev.jsonl --limit 20 --out predictions.jsonl
"""
SCORES = {"acc": "Acc", "em": "EM", "f1": "F1", "avg": "AVG"}


def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or a run's folder: then its last one.")],
    questions: Annotated[
        str | None, typer.Option(help="A question file or minipedia:test; by default the dev questions of the run.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many.", min=1)] = None,
    out: Annotated[Path | None, typer.Option(help="Write predictions here, as JSON lines.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one key of env_config, such as corpus. Repeatable."),
    ] = None,
    verbose: Annotated[int, typer.Option("-v", count=True, help="Show what the libraries say.")] = 0,
) -> None:
    """Answer questions greedily with a checkpoint; print Acc, EM, F1 and AVG in percent with their standard errors."""
    if out is not None and not out.absolute().parent.is_dir():
        raise DataError(f"{out}: no such folder {out.absolute().parent}.")
    if out is not None and out.is_dir():
        raise DataError(f"{out}: expected a file to write, found a folder.")
    env_config: dict[str, Any] = {} if questions is None else {"questions": questions, "dev_questions": None}
    for assignment in set_ or []:
        change({"config": env_config}, assignment)
    from rllib_mhgpo.cli.launch import prepare

    prepare(verbose)
    records = answer(checkpoint.expanduser(), env_config, "dev" if questions is None else "train", limit)
    if all("void" in record for record in records):
        raise DataError(f"every rollout was voided; the first: {records[0]['void']}")
    typer.echo(format_scores(records))
    if out is not None:
        write_lines(out, records)


def answer(checkpoint: Path, env_config: Mapping[str, Any], split: str, limit: int | None) -> list[dict[str, Any]]:
    """Plays the split with the checkpoint's policy and returns its records; a bar shows how far it is."""
    from rllib_mhgpo.algorithms.evaluation import open_system

    system = open_system(checkpoint, env_config)
    records: list[dict[str, Any]] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("answering", total=system.count(split, limit))
        for wave in system.answers(split, limit):
            records += wave
            progress.advance(bar, len(wave))
    return records


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes one JSON object a line.

    Raises:
        DataError: the file cannot be written.
    """
    try:
        with path.open("w", encoding="utf-8") as stream:
            stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}.") from None


def format_scores(records: Sequence[dict[str, Any]]) -> str:
    """Writes means and standard errors in percent; the known scores first and in their usual order.

    >>> format_scores([{"scores": {"em": 0.0, "acc": 1.0}}, {"scores": {"em": 1.0, "acc": 1.0}}])
    'Acc 100.00 ± 0.00 | EM 50.00 ± 35.36 | 2 questions'
    """
    from rllib_mhgpo.algorithms.evaluation import mean_and_error

    means = mean_and_error(records)
    names = [*(name for name in SCORES if name in means), *(name for name in means if name not in SCORES)]
    cells = [f"{SCORES.get(name, name)} {100 * means[name][0]:.2f} ± {100 * means[name][1]:.2f}" for name in names]
    voided = sum("void" in record for record in records)
    return " | ".join([*cells, f"{len(records)} questions", *([f"{voided} voided, counted 0"] if voided else [])])
