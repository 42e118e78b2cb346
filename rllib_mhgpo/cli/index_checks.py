"""What ``rllib doctor`` says of the index that a configuration searches, and of a search by its environment."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rllib_mhgpo.cli.machine_checks import Finding
from rllib_mhgpo.envs.search import SearchEnv
from rllib_mhgpo.errors import MHGPOError
from rllib_mhgpo.retrieval.build import named_retrievers
from rllib_mhgpo.retrieval.store import is_index_folder, open_retriever, read_meta

LEAST_RECALL = 0.9
"""Of an approximate index: the share of the ten truly nearest passages that it finds."""


def index_checks(config: Any) -> Iterator[Finding]:
    """Opens each index of a configuration by itself: its files, and vectors, corpus and encoder against each other."""
    folders = [Path(name).expanduser() for name in named_retrievers(config.env_config.get("retriever"))]
    for folder in filter(is_index_folder, folders):
        try:
            yield _index(folder, config.env_config.get("top_k", 0))
        except MHGPOError as error:
            remedy = "the message says what; rllib index build makes an index anew"
            yield Finding("index", "fail", str(error), remedy)


def _index(folder: Path, top_k: int) -> Finding:
    meta = read_meta(folder)
    open_retriever(folder)  # compares counts, widths and fingerprints
    count, recall = meta["passages"], meta["recall_at_10"]
    seen = (
        f"{folder}: {count:,} vectors of as many passages (corpus {meta['corpus_fingerprint'][:12]}), {meta['width']} "
        f"wide, by {meta['encoder']} ({meta['encoder_fingerprint'][:12]}); {meta['factory'] or meta['index']}"
    )
    if recall is not None:
        seen += f" finds {recall:.2f} of the nearest ten"
    if isinstance(top_k, int) and top_k > count:
        return Finding("index", "warn", f"{seen}; top_k {top_k}", f"lower env_config.top_k to at most {count}")
    if recall is not None and recall < LEAST_RECALL:
        remedy = "build it with another --index (docs/data.md); rllib index recall measures it"
        return Finding("index", "warn", seen, remedy)
    return Finding("index", "ok", seen)


def search_check(env: SearchEnv) -> Finding:
    """Searches once as the environment would."""
    retriever, k, question = env.retriever, env.top_k, env.splits["train"][0].question
    started = time.perf_counter()
    try:
        (found,) = retriever.search([question], k)
    except MHGPOError as error:
        return Finding("search", "fail", str(error), "the message says what")
    seen = f"{len(found)} passages of {k} for {question[:40]!r} in {time.perf_counter() - started:.2f} s"
    if not found:
        return Finding("search", "warn", seen, "is this the corpus of these questions?")
    return Finding("search", "ok", f"{seen}, from corpus {retriever.corpus_fingerprint[:12] or 'unknown'}")
