"""Queries, passages and records a second, and the memory they take: ``python benchmarks/retrieval.py search``.

    make     synthetic indexes of ``--vectors`` x 384, Flat and IVF-PQ, in the folder ``--place``
    search   asks them (and makes them first where they are not there): in process, by two actors and over HTTP, with
             1, 64 and 512 queries a call, each way in a process of its own. Queries are encoded by one BERT layer with
             random weights, so that the search is what is timed. Medians of ``--times`` calls; the cache is off
    encode   the first ``--passages`` passages of ``--file`` by all-MiniLM-L6-v2 (extra minilm)
    load     ``--records`` HotpotQA-like records, read in a process of its own: seconds, peak memory

``search --index Flat --where http`` runs a part alone. Memory is PSS where processes share pages (what is mapped from
one file counts once for all), else the peak of RSS. It is what searching adds to a process that has loaded the encoder,
but all that the actors and the server take.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import faiss
import numpy as np
import psutil

from rllib_mhgpo.data import Corpus, load_corpus, load_questions
from rllib_mhgpo.retrieval import BaseRetriever, build_retriever
from rllib_mhgpo.retrieval.approximate import train_and_fill
from rllib_mhgpo.retrieval.base import passage_texts
from rllib_mhgpo.retrieval.build import sentence_encoder
from rllib_mhgpo.retrieval.store import CORPUS, ENCODER, describe, write_json

WIDTH, BLOCK, K = 384, 65_536, 10
WORDS = [f"word{i}" for i in range(2000)]


def save_encoder(folder: Path) -> Path:
    """One BERT layer of random weights and a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["[PAD]", "[UNK]", *WORDS])}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(WORDS) + 2,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=6,
        intermediate_size=WIDTH,
    )
    BertModel(config).save_pretrained(folder)
    return folder


def make_index(folder: Path, encoder: Path, vectors: int, factory: str) -> None:
    """An index folder of random vectors of length 1."""

    def blocks() -> Iterator[np.ndarray]:
        rng = np.random.default_rng(0)
        for begin in range(0, vectors, BLOCK):
            block = rng.standard_normal((min(BLOCK, vectors - begin), WIDTH), dtype=np.float32)
            yield block / np.linalg.norm(block, axis=1, keepdims=True)

    folder.mkdir()
    corpus = Corpus.from_passages(((f"T{i}", f"passage {i}") for i in range(vectors)), "synthetic passages")
    corpus.save(folder / CORPUS)
    made = sentence_encoder(str(encoder))
    write_json(folder / ENCODER, made.state())
    faiss.write_index(train_and_fill(factory, WIDTH, vectors, blocks, 0), str(folder / "index.faiss"))
    setting = "nprobe=32" if "IVF" in factory else ""
    describe(folder, corpus, made, "index.faiss", factory=factory, search=setting)


def queries_per_second(retriever: BaseRetriever, batch: int, times: int) -> float:
    rng = np.random.default_rng(batch)
    seconds = []
    for _ in range(times + 1):
        queries = [" ".join(rng.choice(WORDS, 8)) for _ in range(batch)]
        started = time.perf_counter()
        retriever.search(queries, K)
        seconds.append(time.perf_counter() - started)
    return batch / median(seconds[1:])  # the first call touches what was not in memory


def memory(pid: int | None = None) -> float:
    """Megabytes of a process, shared pages counted in part."""
    return float(psutil.Process(pid).memory_full_info().pss / 1e6)


def in_actors(folder: Path) -> Iterator[tuple[BaseRetriever, Callable[[], float]]]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    retriever: Any = build_retriever(None, {"encoder": str(folder), "actors": 2, "cache_size": 0})

    def held() -> float:
        pids = [ray.get(actor.__ray_call__.remote(lambda _: os.getpid())) for actor in retriever.actors]
        return sum(map(memory, pids))

    yield retriever, held
    ray.shutdown()


def over_http(folder: Path) -> Iterator[tuple[BaseRetriever, Callable[[], float]]]:
    command = [sys.executable, "-c", "from rllib_mhgpo.cli import main; main()", "index", "serve", str(folder)]
    server = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = server.stdout.readline().split()[-1]
    yield build_retriever(None, {"encoder": url, "cache_size": 0}), lambda: memory(server.pid)
    server.terminate()


def here(folder: Path) -> Iterator[tuple[BaseRetriever, Callable[[], float]]]:
    sentence_encoder(str(folder.parent / "encoder"))
    before = memory()
    yield build_retriever(None, {"encoder": str(folder), "cache_size": 0}), lambda: memory() - before


INDEXES = {"Flat": "Flat", "IVF-PQ": "IVF1024,PQ48"}
PLACES = {"here": ("in process", here), "actors": ("two actors", in_actors), "http": ("HTTP", over_http)}


def make(options: argparse.Namespace) -> None:
    encoder = options.place / "encoder"
    if not encoder.is_dir():
        save_encoder(encoder)
    for name in options.index:
        if not (options.place / name).is_dir():
            make_index(options.place / name, encoder, options.vectors, INDEXES[name])


def search(options: argparse.Namespace) -> None:
    make(options)
    print("| index | where | 1 query a call | 64 | 512 | memory MB |\n|---|---|---|---|---|---|", flush=True)
    for name in options.index:
        for where in options.where:
            command = [sys.executable, __file__, "search-one", "--place", str(options.place), "--index", name]
            subprocess.run([*command, "--where", where, "--times", str(options.times)], check=True)


def search_one(options: argparse.Namespace) -> None:
    ((name,), (where,)) = options.index, options.where
    told, open_it = PLACES[where]
    for retriever, held in open_it(options.place / name):
        rates = [queries_per_second(retriever, batch, options.times) for batch in (1, 64, 512)]
        cells = " | ".join(f"{rate:,.1f}" for rate in rates)
        print(f"| {name} | {told} | {cells} | {held():,.0f} |", flush=True)


def encode(options: argparse.Namespace) -> None:
    encoder = sentence_encoder("minilm")
    texts = passage_texts(load_corpus(options.file)[: options.passages])
    encoder.encode_passages(texts[:8])
    started = time.perf_counter()
    encoder.encode_passages(texts)
    words = sum(len(text.split()) for text in texts) / len(texts)
    print(f"{len(texts) / (time.perf_counter() - started):.1f} passages/s, {len(texts)} of {words:.0f} words")


def load(options: argparse.Namespace) -> None:
    rng = np.random.default_rng(0)
    sentences = [" ".join(rng.choice(WORDS, 20)) for _ in range(1000)]
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "questions.json"
        with file.open("w", encoding="utf-8") as out:
            for i in range(options.records):
                chosen = rng.integers(0, 1000, (10, 4))
                context = [[f"title {i} {j}", [sentences[n] for n in row]] for j, row in enumerate(chosen)]
                record = {"_id": f"{i:024x}", "question": sentences[i % 1000], "answer": "x", "context": context}
                record["supporting_facts"] = [[f"title {i} 0", 0], [f"title {i} 1", 0]]
                out.write(("[" if i == 0 else ", ") + json.dumps(record))
            out.write("]")
        print(f"{options.records:,} records, {file.stat().st_size / 1e6:,.0f} MB", flush=True)
        for what in ("first", "from the cache"):
            command = [sys.executable, __file__, "load-one", "--file", str(file)]
            told = subprocess.run(
                command, capture_output=True, text=True, check=True, env={**os.environ, "RLLIB_MHGPO_CACHE": place}
            )
            print(f"{what}: {told.stdout.strip()}", flush=True)


def load_one(options: argparse.Namespace) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    started = time.perf_counter()
    questions = load_questions(options.file)
    seconds = time.perf_counter() - started
    assert questions[len(questions) - 1].context
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(f"{len(questions):,} questions, {seconds:.1f} s, peak {peak:,.0f} MB, of which imports {before:,.0f} MB")


def main() -> None:
    parts = {"make": make, "search": search, "search-one": search_one, "encode": encode, "load": load}
    parts["load-one"] = load_one
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=parts)
    parser.add_argument("--place", type=Path, help="where the indexes are kept; by default nowhere")
    parser.add_argument("--index", nargs="+", choices=INDEXES, default=list(INDEXES))
    parser.add_argument("--where", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--vectors", type=int, default=1_000_000)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--passages", type=int, default=512)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as nowhere:
        options.place = options.place or Path(nowhere)
        options.place.mkdir(parents=True, exist_ok=True)
        parts[options.part](options)


if __name__ == "__main__":
    main()
