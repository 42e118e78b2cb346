"""``rllib evaluate``: answers questions with a checkpoint, scores the answers and writes them down."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rllib_mhgpo.errors import CheckpointError, DataError

EXAMPLES = """
[bold]Examples[/bold]

  rllib evaluate ~/ray_results/mhgpo-hotpot/MHGPO_search_.../checkpoint_000001 --questions minipedia:test

  rllib evaluate CHECKPOINT --questions dev.jsonl --limit 20 --out predictions.jsonl
"""


def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a checkpoint.")],
    questions: Annotated[
        str, typer.Option(help="A question file, or minipedia:dev, minipedia:test.")
    ] = "minipedia:dev",
    limit: Annotated[int | None, typer.Option(help="Only the first so many.", min=1)] = None,
    out: Annotated[Path | None, typer.Option(help="Write predictions here, as JSON lines.")] = None,
    verbose: Annotated[int, typer.Option("-v", count=True, help="Show what the libraries say.")] = 0,
) -> None:
    """Answer questions greedily with a checkpoint and print Acc, EM, F1 and AVG with their standard errors."""
    checkpoint = checkpoint.expanduser()
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint}: no such folder; `rllib train` prints the checkpoint at its end.")
    if out is not None and not out.absolute().parent.is_dir():
        raise DataError(f"{out}: no such folder {out.absolute().parent}.")
    from rllib_mhgpo.cli.launch import local_ray, prepare

    prepare(verbose)
    with local_ray(verbose):
        predictions = predict(checkpoint, questions, limit)
    if out is not None:
        write_lines(out, predictions)
    typer.echo(format_scores([prediction["scores"] for prediction in predictions]))


def predict(checkpoint: Path, questions: str, limit: int | None) -> list[dict[str, Any]]:
    """Restores the checkpoint and returns one prediction a question, as the environment summarises it.

    Raises:
        CheckpointError: the folder is no checkpoint, or one of an algorithm that answers no questions.
    """
    if not (checkpoint / "rllib_checkpoint.json").is_file():
        raise CheckpointError(f"{checkpoint}: expected an RLlib checkpoint, found no rllib_checkpoint.json in it.")
    from ray.rllib.algorithms.algorithm import Algorithm

    from rllib_mhgpo.algorithms.registration import register

    register()
    algorithm = Algorithm.from_checkpoint(str(checkpoint.absolute()))
    if not hasattr(algorithm, "evaluate_questions"):
        raise CheckpointError(f"{checkpoint}: {type(algorithm).__name__} answers no questions.")
    return list(algorithm.evaluate_questions(questions, limit))


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


def format_scores(scores: Sequence[Mapping[str, float]]) -> str:
    """Writes means and standard errors of the mean, in percent.

    >>> print(format_scores([{"acc": 1, "em": 0, "f1": 0.5, "avg": 0.5}, {"acc": 1, "em": 1, "f1": 1, "avg": 1}]))
    Acc 100.00 ± 0.00 | EM 50.00 ± 50.00 | F1 75.00 ± 25.00 | AVG 75.00 ± 25.00 | 2 questions
    """
    names = {"acc": "Acc", "em": "EM", "f1": "F1", "avg": "AVG"}
    columns = {name: [float(score[key]) for score in scores] for key, name in names.items()}
    cells = [
        f"{name} {100 * mean:.2f} ± {100 * error:.2f}"
        for name, (mean, error) in ((name, mean_and_error(column)) for name, column in columns.items())
    ]
    return " | ".join([*cells, f"{len(scores)} questions"])


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean and its standard error, std with ddof 1 over √n; NaN for fewer than two values."""
    count = len(values)
    if not count:
        return math.nan, math.nan
    mean = sum(values) / count
    if count < 2:
        return mean, math.nan
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1) / count)
