"""What retrievers refuse: foreign values, folders that were changed, disks that are full, servers that break off."""

import errno
import json
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from faiss import gpu_wrappers

from rllib_mhgpo.data import Corpus
from rllib_mhgpo.errors import ConfigError, RetrievalError
from rllib_mhgpo.retrieval import approximate as ann
from rllib_mhgpo.retrieval import build_retriever, open_retriever, save_retriever
from rllib_mhgpo.retrieval.build import peek_retriever
from rllib_mhgpo.retrieval.building import _mapped, build_index, encode_here
from rllib_mhgpo.retrieval.hf_encoder import HFEncoder
from rllib_mhgpo.retrieval.http import HttpRetriever
from rllib_mhgpo.retrieval.plan import estimate
from tests.test_index import WIDTH, HashEncoder, write_corpus
from tests.test_sentence_encoder import save_bert

PAGES = Corpus.from_passages([("A", "red a"), ("B", "blue b")])


# --- configurations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (3, "expected a name, a folder, an address or keys and values, found 3"),
        (None, "expected a name, a folder"),
        (["tfidf"], "expected a name, a folder"),
        ({"hybrid": [None, "bm25"]}, "expected a name, a folder"),
        ({"hybrid": None}, "hybrid: expected a list of retrievers, found None"),
        ({"hybrid": "tfidf"}, "hybrid: expected a list of retrievers, found 'tfidf'"),
        ({"hybrid": ["tfidf", {"encoder": "bm25", "foo": 1}]}, "unknown key 'foo'"),
        ({1: "bm25"}, "unknown key 1"),
        ({"encoder": 5}, "encoder: expected a name, a folder or an address, found 5"),
        ({"cache_size": True}, "cache_size: expected a number"),
        ({"encoder": "x", "batch_size": 0}, "batch_size: expected a whole number of at least 1, found 0"),
        ({"encoder": "x", "max_tokens": True}, "max_tokens: expected a whole number"),
        ({"encoder": "x", "cosine": "yes"}, "cosine: expected true or false, found 'yes'"),
        ({"encoder": "x", "pooling": ["mean"]}, "pooling: expected a text, found"),
        ({"encoder": "x", "query_prefix": 3}, "query_prefix: expected a text, found 3"),
        ({"encoder": "x", "gpu": "no"}, "gpu: expected true, false or half, found 'no'"),
        ("http://localhost:abc/retrieve", r"expected an address such as http://HOST:PORT/retrieve"),
        ("http://[::1/retrieve", "expected an address"),
        ("http://", "expected an address"),
    ],
)
def test_refused_values(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_retriever(PAGES, spec)


@pytest.mark.parametrize("spec", [{"hybrid": None}, {"hybrid": "tfidf"}, {"hybrid": [3]}, {"encoder": 5}])
def test_a_first_look_refuses_what_a_run_does(spec: Any) -> None:
    with pytest.raises(ConfigError, match="expected a"):
        peek_retriever(spec)


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    folder = save_bert(tmp_path / "m")
    for device in ("cuda:99", "nonsense"):
        with pytest.raises(ConfigError, match=f"device '{device}': cannot be used"):
            HFEncoder(folder, device=device)


# --- builds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("HNSW0", "HNSW needs at least 2 links"),
        ("IVF4,PQ4x10", "needs at least|FAISS cannot build it"),
        ("IDMap,Flat", "FAISS cannot build it of 300 passages"),
        ("IVF4(RCQ2x2),Flat", "FAISS cannot build it"),
        ("LSH", "FAISS's factory refuses it"),
    ],
)
def test_factories_that_faiss_fails_on(tmp_path: Path, factory: str, message: str) -> None:
    source = write_corpus(tmp_path / "c.jsonl", 300)
    with pytest.raises((ConfigError, RetrievalError), match=message) as caught:
        build_index(source, tmp_path / "ix", HashEncoder(), factory)
    assert factory in str(caught.value)
    assert "Error in" not in str(caught.value)  # no places of FAISS's source


def test_what_cannot_be_estimated() -> None:
    with pytest.raises(ConfigError, match="nothing can be estimated"):
        estimate(300, 10, WIDTH, "NSG16")


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "c.jsonl", 3)
    with pytest.raises(RetrievalError, match="expected a new or empty folder, found a file"):
        build_index(source, source, HashEncoder())


def test_a_disk_without_room_says_so_at_once(tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match="3,072,000,000,000,000 bytes cannot be written"):
        _mapped(tmp_path / "vectors", np.dtype(np.float32), (10**12, 768))


def test_two_builds_of_one_folder(tmp_path: Path) -> None:
    source = write_corpus(tmp_path / "c.jsonl", 20)

    def meanwhile(folder: Path, encoder: Any, places: Sequence[int]) -> Iterator[Any]:
        with pytest.raises(RetrievalError, match="is building here"):
            build_index(source, folder, HashEncoder())
        raise KeyboardInterrupt
        yield

    with pytest.raises(KeyboardInterrupt):
        build_index(source, tmp_path / "ix", HashEncoder(), encode=meanwhile)
    assert build_index(source, tmp_path / "ix", HashEncoder())["passages"] == 20  # the lock went with its build


def test_vectors_that_are_gone_are_made_again(tmp_path: Path) -> None:
    """Not taken for those of places that were filled."""
    source = write_corpus(tmp_path / "c.jsonl", 600)
    build_index(source, tmp_path / "once", HashEncoder())

    def stops(folder: Path, encoder: Any, places: Sequence[int]) -> Iterator[Any]:
        yield next(encode_here(folder, encoder, places))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(source, tmp_path / "twice", HashEncoder(), encode=stops)
    (tmp_path / "twice" / "vectors.f32").unlink()
    build_index(source, tmp_path / "twice", HashEncoder())
    for name in ("index.faiss", "meta.json"):
        assert (tmp_path / "twice" / name).read_bytes() == (tmp_path / "once" / name).read_bytes()


def test_a_build_whose_plan_was_changed(tmp_path: Path) -> None:
    (tmp_path / "ix").mkdir()
    (tmp_path / "ix" / "building.json").write_text("[1]", encoding="utf-8")
    with pytest.raises(RetrievalError, match=r"building\.json: was changed: \[1\]\. Remove the folder"):
        build_index(write_corpus(tmp_path / "c.jsonl", 5), tmp_path / "ix", HashEncoder())


@pytest.mark.parametrize("fault", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int) -> None:
    """A file stands for the lock there; it outlives a build that was killed, which is said."""

    def refused(handle: int, how: int) -> None:
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr("fcntl.flock", refused)
    test_two_builds_of_one_folder(tmp_path)
    assert not list(tmp_path.rglob("*.lock"))
    folder = tmp_path / "killed"
    folder.mkdir()
    (folder / "building.lock").write_text("process 7 on node1")
    with pytest.raises(RetrievalError, match=r"building\.lock: process 7 on node1 is building here, or was killed"):
        build_index(tmp_path / "c.jsonl", folder, HashEncoder())
    (folder / "building.lock").unlink()
    assert build_index(tmp_path / "c.jsonl", folder, HashEncoder())["passages"] == 20


def test_what_goes_wrong_in_a_build_is_not_taken_for_another_build(tmp_path: Path) -> None:
    def busy(*args: Any) -> Iterator[Any]:
        raise BlockingIOError("the encoder's own")
        yield

    with pytest.raises(BlockingIOError, match="the encoder's own"):
        build_index(write_corpus(tmp_path / "c.jsonl", 20), tmp_path / "ix", HashEncoder(), encode=busy)


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"files": None}, {"files": 3}, {"files": {"x": 3}}, {"files": {"x": ["3", 3]}}, {"factory": 3},
        {"encoder": None}, {"encoder_fingerprint": None}, {"corpus_fingerprint": 5}, {"passages": "x"},
        {"index": "../x"},
    ],
)  # fmt: skip
def test_a_description_that_was_changed(tmp_path: Path, change: dict[str, Any]) -> None:
    save_retriever(build_retriever(PAGES), tmp_path / "ix")
    file = tmp_path / "ix" / "meta.json"
    meta = {**json.loads(file.read_text(encoding="utf-8")), **change}
    file.write_text(json.dumps({key: value for key, value in meta.items() if value is not None}), encoding="utf-8")
    with pytest.raises(RetrievalError, match="Index anew"):
        open_retriever(tmp_path / "ix")


def test_an_encoder_that_is_no_longer_there(tmp_path: Path) -> None:
    folder = save_bert(tmp_path / "m")
    save_retriever(build_retriever(PAGES, str(folder)), tmp_path / "ix")
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(RetrievalError, match=r"was built with the encoder in .*/m, where there is none"):
        open_retriever(tmp_path / "ix")


# --- GPUs, which are not here: what FAISS would be asked for ----------------------------------------------------------


class Options:
    shard, useFloat16 = False, False  # noqa: N815 - FAISS's own names


def test_gpus_share_the_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Options] = []

    def index_cpu_to_all_gpus(index: Any, co: Any = None, ngpu: int = -1) -> Any:
        asked.append(co)
        return index

    real = gpu_wrappers.index_cpu_to_all_gpus.__code__
    assert real.co_varnames[: real.co_argcount] == ("index", "co", "ngpu")
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 2, raising=False)
    monkeypatch.setattr(faiss, "GpuMultipleClonerOptions", Options, raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_all_gpus", index_cpu_to_all_gpus, raising=False)
    source = write_corpus(tmp_path / "c.jsonl", 300)
    for factory, gpu, half in (("Flat", True, False), ("Flat", "half", True), ("IVF4,PQ4x4", True, True)):
        folder = tmp_path / f"{factory}{half}"
        build_index(source, folder, HashEncoder(), factory)
        found = open_retriever(folder, encoder=HashEncoder(), gpu=gpu).search(["red king"], 5)
        assert found == open_retriever(folder, encoder=HashEncoder()).search(["red king"], 5)
        assert (asked[-1].shard, asked[-1].useFloat16) == (True, half)

    def refuses(index: Any, co: Any = None, ngpu: int = -1) -> Any:
        raise RuntimeError(
            "Error in clone_Index at /faiss/GpuCloner.cpp:230: This index type is not implemented on GPU."
        )

    monkeypatch.setattr(faiss, "index_cpu_to_all_gpus", refuses, raising=False)
    with pytest.raises(ConfigError, match=r"cannot put 'Flat' on 2 GPUs \(This index type is not implemented on GPU\)"):
        open_retriever(tmp_path / "FlatTrue", encoder=HashEncoder(), gpu=True)


def test_without_gpus_they_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 0, raising=False)
    build_index(write_corpus(tmp_path / "c.jsonl", 20), tmp_path / "ix", HashEncoder())
    with pytest.raises(ConfigError, match=r"gpu: expected a GPU .*found none"):
        open_retriever(tmp_path / "ix", encoder=HashEncoder(), gpu=True)


def test_rows_that_the_lists_visited_do_not_hold_are_none() -> None:
    """FAISS fills up with -1 where an index visits fewer vectors than it is asked for."""
    vectors = np.eye(4, dtype=np.float32).repeat(100, axis=0)
    index = ann.train_and_fill("IVF4,Flat", 4, len(vectors), lambda: iter([vectors]), 0)
    queries = np.eye(4, dtype=np.float32)
    proposed = index.search(queries, 400)[1]
    assert (proposed == -1).any(axis=1).all()
    for found, rows in zip(ann.FaissIndex(index).search(queries, 400, False), proposed, strict=True):
        assert sorted(found.tolist()) == sorted(rows[rows >= 0].tolist()) != []


def test_what_faiss_refuses_while_searching() -> None:
    class Limited:
        d, ntotal = 4, 5000

        def search(self, queries: Any, k: int) -> Any:
            raise RuntimeError(f"Error in search at x.cpp:1: GPU index only supports up to 2048 (requested {k})")

    with pytest.raises(RetrievalError, match=r"search for 3,000 passages: GPU index only supports up to 2048"):
        ann.FaissIndex(Limited()).search(np.zeros((1, 4), dtype=np.float32), 3000, False)


# --- servers ----------------------------------------------------------------------------------------------------------


@contextmanager
def raw(answer: bytes) -> Iterator[str]:
    """A server that sends these bytes to whoever comes, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    caller, _ = server.accept()
                except OSError:
                    return
                with caller, suppress(OSError):
                    caller.recv(1 << 16)
                    caller.sendall(answer)
                    caller.shutdown(socket.SHUT_WR)
                    while caller.recv(1 << 16):  # closed with a part unread, the answer would be lost
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/retrieve"
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


NOTHING = b'{"result": [[]]}'


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "no answer after 3 tries: SSH-2.0-OpenSSH"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n100\r\n{", "no answer after 3 tries: IncompleteRead"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{", "no answer after 3 tries: IncompleteRead"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000, "no answer after 3 tries: got more than 100 headers"),
        # whole as JSON, but not what was sent: nothing found must not be taken from it
        (b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n" + NOTHING, "cut at 16 of 900 bytes"),
        (
            b'HTTP/1.1 200 OK\r\n\r\n{"result": [[{"document": {"id": "1", "contents": "A\\n\\ud83d"}}]]}',
            "found half a character in a passage: 'A'",
        ),
    ],
)
def test_servers_that_break_off(answer: bytes, message: str) -> None:
    with raw(answer) as url, pytest.raises(RetrievalError, match=message):
        HttpRetriever(url, timeout_s=5).search(["q"], 2)
    with raw(b"HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n" + NOTHING) as url:
        assert HttpRetriever(url, timeout_s=5).search(["q"], 2) == [[]]
