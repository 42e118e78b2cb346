"""``rllib evaluate``: answers questions with a system, prints the scores and writes the predictions down."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from rllib_mhgpo.cli.experiments import change, load_experiments
from rllib_mhgpo.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rllib_mhgpo.algorithms.evaluation import System

EXAMPLES = """
[bold]Examples[/bold]

  rllib evaluate ~/ray_results/mhgpo-hotpot --questions minipedia:test

  rllib evaluate CHECKPOINT --questions dev.jsonl --limit 20 --out predictions.jsonl

  rllib evaluate CHECKPOINT --questions 2wiki.json --corpus own --questions musique.jsonl --corpus wiki-index

  rllib evaluate CHECKPOINT --roles rewriter=identity --roles reranker=base --roles perfect

  rllib evaluate tuned_examples/mhgpo_hotpot.yaml
"""
SCORES = {"acc": "Acc", "em": "EM", "f1": "F1", "avg": "AVG"}
WHOLE = "as it is"
DEV = "the run's dev questions"
MOST_NAMED = 10

Record = dict[str, Any]


def evaluate(
    system: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT|FILE",
            help="A checkpoint, a run's folder (its last checkpoint), or an experiment file: the untrained system.",
        ),
    ],
    questions: Annotated[
        list[str] | None,
        typer.Option(
            help="A question file or minipedia:test; by default the dev questions of the run. Repeatable: one table."
        ),
    ] = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE|DIR",
            help="Passages or an index to search, one for all questions or one for each; own: the questions' passages.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many.", min=1)] = None,
    roles: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE=WHO,...",
            help="One more row, with roles replaced: identity, base, perfect, a checkpoint, module:function. "
            "A word alone replaces all roles. Repeatable.",
        ),
    ] = None,
    sampled: Annotated[bool, typer.Option("--sampled", help="At the run's temperature instead of greedily.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write predictions here, as JSON lines.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one key of env_config, such as corpus. Repeatable."),
    ] = None,
    verbose: Annotated[int, typer.Option("-v", count=True, help="Show what the libraries say.")] = 0,
) -> None:
    """Answer questions with a system; print Acc, EM, F1 and AVG in percent with their standard errors."""
    if out is not None and not out.absolute().parent.is_dir():
        raise DataError(f"{out}: no such folder {out.absolute().parent}.")
    if out is not None and out.is_dir():
        raise DataError(f"{out}: expected a file to write, found a folder.")
    sets = question_sets(questions or [], corpus or [])
    env_config: dict[str, Any] = {}
    for assignment in set_ or []:
        place: dict[str, Any] = {"config": env_config}
        change(place, assignment)
        if set(place) != {"config"}:
            raise ConfigError(f"--set {assignment}: expected a key of env_config, such as corpus=FILE.")
    from rllib_mhgpo.cli.launch import prepare

    prepare(verbose)
    shown, lines = answer_sets(system.expanduser(), sets, env_config, roles or [], limit, sampled)
    if len(sets) > 1:
        Console(width=None if Console().is_terminal else 160).print(score_table(shown))
    if out is not None:
        write_lines(out, lines)


def answer_sets(
    source: Path,
    sets: Mapping[str, Mapping[str, Any]],
    env_config: Mapping[str, Any],
    roles: Sequence[str],
    limit: int | None,
    sampled: bool,
) -> tuple[dict[str, list[Record]], list[Record]]:
    """Plays every set with every cast and prints the scores of each; returns the records by title, and all with tags.

    Raises:
        DataError: every rollout of a set was voided.
    """
    from rllib_mhgpo.cli.roles import recast

    lines: list[Record] = []
    shown: dict[str, list[Record]] = {}
    first: System | None = None
    for name, changes in sets.items():
        changes = {**changes, **env_config}
        first = first or open_any(source, changes)
        opened = first.on(changes)
        rows = {WHOLE: opened, **{spec: recast(opened, spec) for spec in roles}}
        split, temperature = "dev" if name == DEV else "train", opened.config.temperature if sampled else 0.0
        whole: list[Record] = []
        for label, cast in rows.items():
            records = answer(cast, split, limit, temperature)
            if all("void" in record for record in records):
                raise DataError(f"every rollout was voided; the first: {records[0]['void']}")
            titles = ([name] if len(sets) > 1 else []) + ([label] if roles else [])
            typer.echo(": ".join([*titles, format_scores(records, whole)]))
            whole = whole or records
            shown[", ".join(titles)] = records
            tags = ({"questions": name} if len(sets) > 1 else {}) | ({"roles": label} if roles else {})
            lines += [{**tags, **record} for record in records]
    return shown, lines


def question_sets(questions: Sequence[str], corpora: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the changes of ``env_config`` for each set of questions, by a name for it.

    Raises:
        ConfigError: no question file where one must be, one given twice, or neither one corpus nor one for each.
    """
    if any(not name.strip() for name in questions):
        raise ConfigError("--questions: expected a question file or minipedia:SPLIT, found nothing.")
    if len(set(questions)) < len(questions):
        raise ConfigError("--questions: the same questions twice; name each once.")
    if len(corpora) > 1 and len(corpora) != len(questions):
        raise ConfigError(
            f"--corpus: expected one, or one for each of {len(questions)} --questions, found {len(corpora)}."
        )
    changes = [_searched(corpus) for corpus in corpora] or [{}]
    if not questions:
        return {DEV: changes[0]}
    changes = changes if len(changes) > 1 else changes * len(questions)
    return {
        name: {"questions": name, "dev_questions": None, **change}
        for name, change in zip(questions, changes, strict=True)
    }


def _searched(corpus: str) -> dict[str, Any]:
    if Path(corpus).expanduser().is_dir():
        return {"corpus": None, "retriever": str(Path(corpus).expanduser())}
    return {"corpus": corpus}


def score_table(rows: Mapping[str, Sequence[Record]]) -> Table:
    """Returns one table of several sets' scores with their standard errors, in percent."""
    from rllib_mhgpo.algorithms.evaluation import mean_and_error

    table = Table("questions", *SCORES.values(), "n")
    for name, records in rows.items():
        scores = mean_and_error(records)
        cells = [_percent(*scores[key]) if key in scores else "" for key in SCORES]
        table.add_row(Text(name), *cells, str(len(records)))
    return table


def open_any(source: Path, env_config: Mapping[str, Any]) -> "System":
    """Opens a checkpoint's system, that of a run's last one, which is named, or the untrained one of a file."""
    from rllib_mhgpo.algorithms.checkpoints import find_checkpoint
    from rllib_mhgpo.algorithms.evaluation import open_system

    if source.suffix in (".yaml", ".yml", ".py"):
        return untrained(source, env_config)
    checkpoint = find_checkpoint(source)
    if checkpoint != source:
        typer.echo(f"the last checkpoint: {checkpoint}", err=True)
    return open_system(checkpoint, env_config)


def untrained(file: Path, env_config: Mapping[str, Any], settings: Mapping[str, Any] | None = None) -> "System":
    """Puts together the system that an experiment file describes, with other settings, and the policy it starts from.

    Raises:
        ConfigError: the file has several experiments or searches for settings, or its algorithm is not of this package.
    """
    from rllib_mhgpo.algorithms.config import LLMConfig
    from rllib_mhgpo.algorithms.evaluation import assemble
    from rllib_mhgpo.cli.checks import check, the_variant, variants

    experiments = load_experiments(file)
    if len(experiments) != 1:
        raise ConfigError(f"{file}: expected one experiment, found {', '.join(experiments)}.")
    ((name, experiment),) = experiments.items()
    experiment["config"].update(settings or {})
    algorithm: Any = check(name, experiment)
    its = experiment["config"].get("env_config", {})
    left = {**experiment["config"], "env_config": {key: value for key, value in its.items() if key not in env_config}}
    the_variant(left, f"{file}: {name}", "write one value of each into a copy of the file.")
    found = next(iter(variants(experiment["config"])))
    config = algorithm.get_default_config()
    if not isinstance(config, LLMConfig):
        raise ConfigError(f"{file}: run: expected an algorithm of this package, found {experiment['run']!r}.")
    config.update_from_dict({**found, "env_config": {**found.get("env_config", {}), **env_config}})
    return assemble(config, config.llms, found.get("env_config", {}))


def answer(system: "System", split: str, limit: int | None, temperature: float = 0.0) -> list[Record]:
    """Plays the split and returns its records; a bar shows how far it is."""
    records: list[Record] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("answering", total=system.count(split, limit))
        for wave in system.answers(split, limit, temperature):
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


def format_scores(records: Sequence[Record], whole: Sequence[Record] = ()) -> str:
    """Writes means and standard errors in percent; the known scores first and in their usual order.

    Args:
        whole: records of the same questions; where given, the mean of the differences to them stands in brackets.

    >>> format_scores([{"scores": {"em": 0.0, "acc": 1.0}}, {"scores": {"em": 1.0, "acc": 1.0}}])
    'Acc 100.00 ± 0.00 | EM 50.00 ± 35.36 | 2 questions'
    >>> format_scores([{"scores": {"em": 0.0}}], [{"scores": {"em": 1.0}}])
    'EM 0.00 ± 0.00 (-100.00 ± 0.00) | 1 questions'
    """
    from rllib_mhgpo.algorithms.evaluation import mean_and_error

    means, changes = mean_and_error(records), mean_and_error(list(differences(records, whole)))
    names = [*(name for name in SCORES if name in means), *(name for name in means if name not in SCORES)]

    def cell(name: str) -> str:
        changed = f" ({_percent(*changes[name], '+')})" if name in changes else ""
        return f"{SCORES.get(name, name)} {_percent(*means[name])}{changed}"

    voided = [str(record.get("id", record.get("root"))) for record in records if "void" in record]
    some = ", ".join(voided[:MOST_NAMED]) + (", ..." if len(voided) > MOST_NAMED else "")
    tail = [f"{len(records)} questions", *([f"{len(voided)} voided, counted 0: {some}"] if voided else [])]
    return " | ".join([*map(cell, names), *tail])


def differences(records: Sequence[Record], whole: Sequence[Record]) -> Iterator[Record]:
    """Yields the differences of scores, question by question."""
    for record, other in zip(records, whole, strict=False):
        mine, its = record.get("scores", {}), other.get("scores", {})
        yield {"scores": {name: mine.get(name, 0.0) - its.get(name, 0.0) for name in {**mine, **its}}}


def _percent(mean: float, error: float, sign: str = "") -> str:
    return f"{100 * mean:{sign}.2f} ± {100 * error:.2f}"
