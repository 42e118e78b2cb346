"""``rllib score``: scores a file of predictions as the data sets' own scripts do."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

NAMES = {"acc": "Acc", "em": "EM", "f1": "F1"}
_SHOWN = 5  # missing ids


def score(
    predictions: Annotated[Path, typer.Argument(help="Answers by question id: JSON or JSON lines.")],
    questions: Annotated[str, typer.Argument(help="The questions with their golds: a file, or minipedia:SPLIT.")],
    script: Annotated[
        str, typer.Option(help="hotpotqa (2WikiMultihopQA's is the same), musique, or auto: by the questions.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="All numbers in full, for programs.")] = False,
) -> None:
    """Print Acc, EM and F1, and supporting-fact and joint scores where facts were predicted.

    Missing predictions are named and count 0; ± is a standard error by bootstrap.
    """
    from rllib_mhgpo.data import load_predictions, load_questions
    from rllib_mhgpo.envs.minipedia import is_minipedia, minipedia
    from rllib_mhgpo.errors import ConfigError, did_you_mean
    from rllib_mhgpo.metrics import official_scores

    if script not in ("auto", "hotpotqa", "musique"):
        raise ConfigError(
            f"--script: expected auto, hotpotqa or musique, found {script!r}."
            + did_you_mean(script, ["auto", "hotpotqa", "musique"])
        )
    asked = minipedia(questions) if is_minipedia(questions) else load_questions(Path(questions), require_context=False)
    said = load_predictions(predictions)
    musique = script == "musique" or (script == "auto" and any(question.evidence for question in asked))
    result = official_scores(asked, said.answers, said.facts, said.paragraphs, musique)
    if as_json:
        told = {
            "script": "musique" if musique else "hotpotqa",
            "questions": len(asked),
            "scores": result.means,
            "standard_errors": result.errors,
            "missing": result.missing,
            "unknown": result.unknown,
        }
        typer.echo(json.dumps(told, ensure_ascii=False, indent=1))
        return
    table = Table("score", "%", "±")
    for name, mean in result.means.items():
        table.add_row(NAMES.get(name, name), f"{100 * mean:.2f}", f"{100 * result.errors[name]:.2f}")
    Console().print(table)
    typer.echo(f"{len(asked)} questions, as the script of {'MuSiQue' if musique else 'HotpotQA'} scores them")
    if result.missing:
        some = ", ".join(result.missing[:_SHOWN]) + (", … (--json lists all)" if len(result.missing) > _SHOWN else "")
        typer.echo(f"{len(result.missing)} without a prediction, counted 0: {some}")
    if result.unknown:
        typer.echo(f"{len(result.unknown)} predictions are of other questions, and not counted")
