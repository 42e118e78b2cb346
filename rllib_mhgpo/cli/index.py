"""``rllib index``: builds indexes of passages, describes, searches, measures and serves them."""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rllib_mhgpo.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rllib_mhgpo.retrieval import CorpusRetriever

app = typer.Typer(
    help="Build, describe, search, measure and serve indexes of passages.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    epilog="[bold]Start with[/bold]  rllib index build corpus.jsonl --encoder minilm --out wiki-index",
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of an index.")]
Hybrid = Annotated[
    list[Path] | None,
    typer.Option("--hybrid", metavar="DIR", help="Fuse with this index of the same corpus. Repeatable."),
]
TopK = Annotated[int, typer.Option("--top-k", "-k", min=1, help="Passages a query.")]


@app.command()
def build(
    corpus: Annotated[Path, typer.Argument(metavar="CORPUS", help="A file of passages, in any published layout.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder of the index.")],
    encoder: Annotated[
        str, typer.Option(help="tfidf, bm25, minilm, or the folder of a sentence encoder such as E5 or Contriever.")
    ] = "tfidf",
    factory: Annotated[
        str, typer.Option("--index", metavar="FACTORY", help="FAISS's factory string: Flat, IVF4096,PQ48, HNSW32, …")
    ] = "Flat",
    workers: Annotated[int, typer.Option(min=0, help="Ray actors that encode; 0 encodes in this process.")] = 0,
    gpus: Annotated[float, typer.Option(min=0, help="GPUs shared by the workers.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Passages a pass through the encoder.")] = 32,
    seed: Annotated[int, typer.Option(help="Of the training sample.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it will take, build nothing.")] = False,
) -> None:
    """Build an index; after Ctrl-C the same command goes on where it stopped."""
    if not corpus.expanduser().is_file():
        raise DataError(f"{corpus}: no such file.")
    if gpus and not workers:
        raise ConfigError("--gpus: needs --workers, one or more a GPU.")
    from rllib_mhgpo.retrieval.build import LEXICAL, sentence_encoder

    quiet()
    corpus, out = corpus.expanduser(), out.expanduser()
    if encoder in LEXICAL:
        if factory != "Flat" or workers or gpus:
            raise ConfigError(f"--encoder {encoder}: has no vectors to encode or to compress; leave the others out.")
        if dry_run:
            raise ConfigError(f"--dry-run: nothing is estimated for {encoder}; it is built in memory, in one go.")
        made: Any = _whole(encoder)
    else:
        made = sentence_encoder(encoder, {"batch_size": batch_size, "device": "cpu" if workers else _device()})
    if dry_run:
        _tell_estimate(corpus, made, factory)
        return
    from rllib_mhgpo.retrieval.building import build_index, encode_here

    spread: Any = encode_here
    if workers:
        from rllib_mhgpo.cli.encoders import ray_encoders

        spread = ray_encoders(encoder, batch_size, workers, gpus)
    started = time.monotonic()
    with _progress() as report:
        try:
            meta = build_index(corpus, out, made, factory, seed, spread, report)
        except KeyboardInterrupt:
            typer.echo(f"Interrupted; what is encoded is kept in {out}. Go on with the same command.", err=True)
            raise typer.Exit(130) from None
    typer.echo(f"{_summary(out, meta)}, {time.monotonic() - started:.0f} s")


@app.command()
def info(folder: Folder) -> None:
    """Check every file of an index, and say what it is."""
    from rllib_mhgpo.retrieval.plan import readable
    from rllib_mhgpo.retrieval.store import check_files, read_meta

    meta = read_meta(folder.expanduser())
    check_files(folder.expanduser(), meta)
    files = meta.pop("files")
    table = Table(box=None, show_header=False)
    for key, value in meta.items():
        if value not in ("", None):
            shown = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
            table.add_row(key.replace("_", " "), printable(shown))
    for name, (size, _) in files.items():
        table.add_row(name, Text(readable(size)))
    _console().print(table)


@app.command()
def search(
    folder: Folder,
    query: Annotated[str, typer.Argument(help="What to look for.")],
    top_k: TopK = 10,
    hybrid: Hybrid = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a passage instead of a table.")] = False,
) -> None:
    """Search an index; print the passages, best first."""
    retriever = open_all(folder, hybrid)
    (passages,) = retriever.search([query], top_k)
    if as_json:
        for passage in passages:
            typer.echo(json.dumps(passage._asdict(), ensure_ascii=False))
        return
    table = Table("", "id", "title", "text")
    for rank, passage in enumerate(passages, start=1):
        table.add_row(str(rank), str(passage.id), printable(passage.title, 60), printable(passage.text, 300))
    _console().print(table)
    if not passages:
        typer.echo("No passage was found.")


@app.command()
def recall(
    folder: Folder,
    questions: Annotated[Path, typer.Option(metavar="FILE", help="Questions with supporting facts.")],
    top_k: TopK = 100,
    limit: Annotated[int | None, typer.Option(help="Only the first so many.", min=1)] = None,
    hybrid: Hybrid = None,
) -> None:
    """Ask the questions themselves; print the share whose supporting passages are among the first k, hop by hop."""
    from rllib_mhgpo.data import load_questions
    from rllib_mhgpo.retrieval.measure import hop_recall

    loaded = load_questions(questions.expanduser(), require_context=False, limit=limit)
    asked = [question for question in loaded if question.hops]
    if not asked:
        raise DataError(f"{questions}: none of {len(loaded)} questions names its supporting passages.")
    retriever = open_all(folder, hybrid)
    found = []
    with _progress() as report:
        for begin in range(0, len(asked), 64):
            report("searching", begin, len(asked))
            found += retriever.search([question.question for question in asked[begin : begin + 64]], top_k)
    rows = [hop_recall(asked, found, k) for k in sorted({k for k in (1, 2, 5, 10, 20, 50) if k < top_k} | {top_k})]
    hops = len(rows[0].by_hop)
    table = Table("k", "all hops", "mean", *(f"hop {hop}" for hop in range(1, hops + 1)))
    for row in rows:
        table.add_row(str(row.k), *(f"{100 * share:.1f}" for share in (row.all_hops, row.any_hop, *row.by_hop)))
    _console().print(table)
    left = len(loaded) - len(asked)
    typer.echo(f"percent of {len(asked)} questions" + (f"; {left} name no supporting passages" if left else ""))


@app.command()
def serve(
    folder: Folder,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 for other machines too.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    hybrid: Hybrid = None,
) -> None:
    """Answer HTTP requests in Search-R1's protocol (POST /retrieve) until Ctrl-C."""
    from rllib_mhgpo.retrieval.serve import make_server

    with make_server(open_all(folder, hybrid), host, port) as server:
        typer.echo(f"serving {folder} at http://{host}:{server.server_address[1]}/retrieve")
        server.serve_forever()


def open_all(folder: Path, others: Sequence[Path] | None) -> "CorpusRetriever":
    """Opens an index, fused with the others where there are any."""
    from rllib_mhgpo.retrieval import open_retriever
    from rllib_mhgpo.retrieval.hybrid import HybridRetriever

    quiet()
    opened = [open_retriever(place.expanduser()) for place in (folder, *(others or ()))]
    return opened[0] if len(opened) == 1 else HybridRetriever(opened)


def printable(text: str, limit: int | None = None) -> Text:
    """A text for the terminal: no mark-up, no control characters, cut to ``limit`` characters."""
    flat = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return Text(flat if limit is None or len(flat) <= limit else flat[: limit - 1] + "…")


def quiet() -> None:
    """Keeps what the libraries say of loading models off the terminal."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _whole(encoder: str) -> Callable[[Any], Any]:
    from rllib_mhgpo.retrieval import build_retriever

    def make(corpus: Any) -> Any:
        return build_retriever(corpus, encoder)

    make.__name__ = encoder
    return make


def _summary(folder: Path, meta: dict[str, Any]) -> str:
    told = [f"{folder}: {meta['passages']:,} passages", f"{meta['encoder']} {meta['factory']}".strip()]
    if meta["repeats_left_out"]:
        told.append(f"{meta['repeats_left_out']:,} exact repeats left out")
    if meta["recall_at_10"] is not None:
        setting = f" at {meta['search']}" if meta["search"] else ""
        told.append(f"recall@10 against Flat {meta['recall_at_10']:.3f}{setting}")
    return ", ".join(told)


def _tell_estimate(corpus: Path, encoder: Any, factory: str) -> None:
    from rllib_mhgpo.retrieval.approximate import check_factory
    from rllib_mhgpo.retrieval.plan import estimate, readable

    check_factory(factory, encoder.width)
    count, mean, sample = _count(corpus)
    started = time.perf_counter()
    encoder.encode_passages(sample)
    rate = len(sample) / (time.perf_counter() - started)
    will = estimate(count, mean, encoder.width, factory)
    table = Table(box=None, show_header=False)
    rows = {
        "passages": f"{count:,}, {mean:.0f} bytes each",
        "vectors": f"{encoder.width} wide, {factory}",
        "disk, for good": f"corpus {readable(will.corpus)}, index {readable(will.index)}",
        "disk, while building": f"{readable(will.vectors)} more, {readable(will.disk)} in all",
        "memory, building": readable(will.building),
        "memory, searching": f"{readable(will.searching)}, mapped and shared by the processes of a machine",
        "time, encoding": f"{count / rate / 3600:.1f} h at {rate:.0f} passages/s, as measured on {len(sample)} here",
    }
    for key, value in rows.items():
        table.add_row(key, Text(value))
    _console().print(table)


def _count(corpus: Path) -> tuple[int, float, list[str]]:
    """Passages of a file, their mean bytes, and a few of them."""
    from rllib_mhgpo.data.corpus_files import is_arrow
    from rllib_mhgpo.data.passages import read_passages

    if is_arrow(corpus):
        from rllib_mhgpo.data import load_corpus

        pairs: Iterator[tuple[str, str]] = ((p.title, p.text) for p in load_corpus(corpus))
    else:
        pairs = ((found.title, found.text) for found in read_passages(corpus))
    first = list(islice(pairs, 64))
    if not first:
        raise DataError(f"{corpus}: holds no passages; expected at least one.")
    sizes = [len(title.encode()) + len(text.encode()) for title, text in first]
    count, total = len(first), sum(sizes)
    for title, text in pairs:
        count, total = count + 1, total + len(title.encode()) + len(text.encode())
    return count, total / count, [f"{title}\n{text}" for title, text in first]


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar with rate and time left; lines now and then where nothing is updated in place."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"))
    with Progress(SpinnerColumn(), *columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        bar = progress.add_task("", total=None, rate="")
        begun: dict[str, tuple[float, int]] = {}
        told = time.monotonic()

        def report(what: str, done: int, total: int) -> None:
            nonlocal told
            now = time.monotonic()
            if what not in begun:
                begun[what] = (now, done)
                progress.reset(bar, description=what, total=total or None, completed=done, rate="")
            start, before = begun[what]
            rate = (done - before) / (now - start) if now > start and done > before else 0.0
            progress.update(bar, completed=done, rate=f"{rate:.0f}/s" if rate else "")
            if not console.is_terminal and rate and now - told > 30:
                left = (total - done) / rate
                typer.echo(f"{what}: {done:,} of {total:,}, {rate:.0f}/s, {left:.0f} s left", err=True)
                told = now

        yield report


def _console() -> Console:
    return Console(width=None if Console().is_terminal else 160)
