"""``rllib ask``: a system answers a question, and shows how."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rllib_mhgpo.errors import RolloutError

if TYPE_CHECKING:
    from rllib_mhgpo.algorithms.evaluation import System

EXAMPLES = """
[bold]Examples[/bold]

  rllib ask ~/ray_results/mhgpo-hotpot --index wiki-index "Where was the author of Red Sand born?"

  rllib ask CHECKPOINT --index wiki-index          (asks you for questions until Ctrl-D)
"""


def ask(
    system: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT|FILE", help="As for rllib evaluate.", show_default=False)
    ],
    question: Annotated[str | None, typer.Argument(help="Without one you are asked, until Ctrl-D.")] = None,
    index: Annotated[
        str | None,
        typer.Option(metavar="DIR|URL", help="The index to search, or a server; by default what the run searched."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a question, for programs.")] = False,
    verbose: Annotated[int, typer.Option("-v", count=True, help="Show what the libraries say.")] = 0,
) -> None:
    """Let a system answer a question: its answer, what each agent said, the passages, those chosen marked."""
    from rllib_mhgpo.cli.evaluate import open_any
    from rllib_mhgpo.cli.launch import prepare

    prepare(verbose)
    opened = open_any(system.expanduser(), searching(index))
    while True:
        text = question if question is not None else _prompt()
        if text is None:
            return
        if question is not None or text.strip():
            if strange := unknown_words(opened.env.unwrapped.tokenizer, text):
                words = ", ".join(strange[:8])
                typer.echo(
                    f"warning: the policy's tokenizer does not know: {words}. The answer ignores them.", err=True
                )
            tell(answer(opened, text), as_json)
        if question is not None:
            return


def searching(index: str | None) -> dict[str, Any]:
    """Returns the changes of ``env_config``: an index brings its passages, and the run's questions are not needed."""
    if index is None:
        return {}
    from rllib_mhgpo.data import Question, Questions
    from rllib_mhgpo.errors import ConfigError
    from rllib_mhgpo.retrieval.build import brings_passages

    index = index if "://" in index else str(Path(index).expanduser())
    if not brings_passages(index):
        raise ConfigError(
            f"--index {index}: expected the folder of an index (rllib index build), or a server's address."
        )
    none = Questions([Question("none", "none", ("",))], "no questions")
    return {"retriever": index, "corpus": None, "questions": none, "dev_questions": None}


def unknown_words(tokenizer: Any, text: str) -> list[str]:
    """Returns the words that a policy reads as unknown; tiny ones know those of their world alone."""
    if tokenizer.unk_token_id is None:
        return []
    words = text.replace("?", " ").split()
    return [word for word in words if tokenizer.unk_token_id in tokenizer(word, add_special_tokens=False)["input_ids"]]


def answer(system: "System", question: str) -> dict[str, Any]:
    """Returns what the system says, with the seconds it took.

    Raises:
        RolloutError: the episode was voided.
    """
    started = time.monotonic()
    record = system.ask(question)
    if "void" in record:
        raise RolloutError(f"no answer: {record['void']}")
    chosen = set(record.pop("chosen", ()))
    passages = [{**passage, "chosen": passage["id"] in chosen} for passage in record.get("passages", ())]
    return {**record, "passages": passages, "seconds": round(time.monotonic() - started, 3)}


def tell(record: dict[str, Any], as_json: bool) -> None:
    """Prints one record, as JSON or for reading."""
    if as_json:
        typer.echo(json.dumps(record, ensure_ascii=False))
        return
    from rllib_mhgpo.cli.index import printable

    console = Console(width=None if Console().is_terminal else 160)
    said = Table(show_header=False, box=None)
    for agent, text in record.get("outputs", {}).items():
        said.add_row(agent, printable(text, 1000))
    console.print(said)
    table = Table("", "id", "title", "text")
    for passage in record["passages"]:
        mark = "✓" if passage["chosen"] else ""
        table.add_row(mark, str(passage["id"]), printable(passage["title"], 60), printable(passage["text"], 200))
    console.print(table)
    answered = printable(str(record.get("answer", "")))
    console.print(Text.assemble(answered.plain or "(no answer)", f"   ({record['seconds']:.1f} s)"))


def _prompt() -> str | None:
    try:
        return input("question: ")
    except EOFError:
        return None
