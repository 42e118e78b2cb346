"""The same search in this process, in Ray actors and over HTTP; and what happens when the other side fails."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rllib_mhgpo.data import Corpus, Passage
from rllib_mhgpo.errors import ConfigError, RetrievalError
from rllib_mhgpo.retrieval import BaseRetriever, CorpusRetriever, build_retriever, open_retriever, save_retriever
from rllib_mhgpo.retrieval.actors import ActorRetriever
from rllib_mhgpo.retrieval.http import HttpRetriever
from rllib_mhgpo.retrieval.serve import make_server

WORDS = ["red", "blue", "town", "north", "film", "band", "river", "king"]
ODD = [('"Heroes" (album)', 'said "so"\n\nand\tmore é日本'), ("", "untitled red"), ("Tab", "a\x00b \x1b[31m red")]
QUERIES = [f"w{i} {WORDS[i % 8]}" for i in range(40)] + ["red", "untitled", "heroes album", "zebra", "日本"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("index") / "ix"
    pages = [(f"T{i}", f"w{i} {WORDS[i % 8]} {WORDS[i % 5]}") for i in range(40)] + ODD
    save_retriever(build_retriever(Corpus.from_passages(pages)), place)
    return place


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/retrieve"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def served(folder: Path) -> Iterator[str]:
    with running(make_server(open_retriever(folder))) as url:
        yield url


# --- HTTP -------------------------------------------------------------------------------------------------------------


def test_a_server_gives_the_same_passages(folder: Path, served: str) -> None:
    here, there = open_retriever(folder), build_retriever(None, served)
    assert there.search(QUERIES, 5) == here.search(QUERIES, 5)
    assert there.search(QUERIES, 10**6) == here.search(QUERIES, 10**6)
    assert there.search(["red"], 2) == here.search(["red"], 2)
    assert (there.counts.queries, there.counts.cache_hits) == (2 * len(QUERIES) + 1, 1)


def test_callers_get_their_own_answers(folder: Path, served: str) -> None:
    here = open_retriever(folder)
    expected = {query: here.search([query], 3) for query in QUERIES}
    wrong: list[str] = []

    def ask(begin: int) -> None:
        there = HttpRetriever(served, cache_size=0)
        order = QUERIES[begin:] + QUERIES[:begin]
        wrong.extend(query for query in order if there.search([query], 3) != expected[query])

    threads = [threading.Thread(target=ask, args=(7 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Scripted(BaseHTTPRequestHandler):
    """Answers as the test says."""

    script: Callable[["Scripted", dict[str, Any]], None]
    asked: int

    def do_POST(self) -> None:
        type(self).asked += 1
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).script(self, request)

    def say(self, body: str, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Keeps the test's output clean."""


@contextmanager
def scripted(script: Callable[[Scripted, dict[str, Any]], None]) -> Iterator[tuple[str, type[Scripted]]]:
    handler = type("Handler", (Scripted,), {"script": staticmethod(script), "asked": 0})
    with running(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as url:
        yield url, handler


def hit(id_: Any, contents: str) -> dict[str, Any]:
    return {"document": {"id": id_, "contents": contents}, "score": 0.5}


def test_search_r1s_answers_are_read(folder: Path) -> None:
    def answer(handler: Scripted, request: dict[str, Any]) -> None:
        assert request == {"queries": ["one", "two"], "topk": 3, "return_scores": True}
        plain = {"id": "doc-x", "contents": "No Quotes\nText\nmore"}  # without scores the document is bare
        handler.say(json.dumps({"result": [[hit("7", '"A"\nText')] * 2, [plain, hit(12, "alone")]]}))

    with scripted(answer) as (url, _):
        one, two = build_retriever(None, url).search(["one", "two"], 3)
    assert one == [Passage(7, "A", "Text")]  # a repeated passage once
    assert [(p.title, p.text) for p in two] == [("No Quotes", "Text\nmore"), ("", "alone")]
    assert two[1].id == 12
    assert two[0].id > 10**6


def body(text: str) -> Callable[[Scripted, dict[str, Any]], None]:
    return lambda handler, request: handler.say(text)


@pytest.mark.parametrize(
    ("script", "message", "tries"),
    [
        (body("<html>"), r"found no JSON: b'<html>'", 1),
        (body("[" * 10**5), "found no JSON", 1),
        (body('{"hits": []}'), "found no list under 'result'", 1),
        (body('{"result": [[], []]}'), "found 2 answers to 1 queries", 1),
        (body('{"result": [null]}'), "found no list for the query 'q'", 1),
        (body('{"result": [[{"document": {"id": "1"}}]]}'), "found no passage with 'contents'", 1),
        (body('{"result": [["text"]]}'), "found no passage with 'contents'", 1),
        (body(json.dumps({"result": [[hit("1", "a"), hit("2", "b"), hit("3", "c")]]})), "3 passages for the query", 1),
        (lambda handler, request: handler.say("broken", 500), r"no answer after 3 tries: status 500", 3),
        (lambda handler, request: handler.say("no", 404), r"no answer after 1 tries: status 404", 1),
        (lambda handler, request: handler.connection.close(), r"no answer after 3 tries", 3),
    ],
)
def test_servers_that_do_not_answer_what_was_asked(script: Any, message: str, tries: int) -> None:
    with scripted(script) as (url, handler):
        with pytest.raises(RetrievalError, match=message) as caught:
            HttpRetriever(url).search(["q"], 2)
        assert url in str(caught.value)
        assert handler.asked == tries


@pytest.mark.parametrize("drips", [False, True])
def test_a_server_that_hangs_is_given_up(drips: bool) -> None:
    free = threading.Event()

    def hang(handler: Scripted, request: dict[str, Any]) -> None:
        if drips:
            handler.send_response(200)
            handler.end_headers()
        while not free.wait(0.02):
            if drips:
                handler.wfile.write(b" ")

    with scripted(hang) as (url, handler):
        with pytest.raises(RetrievalError, match=r"no answer after 3 tries: .*(timed out|not whole)"):
            HttpRetriever(url, timeout_s=0.2).search(["q"], 2)
        free.set()
        assert handler.asked == 3


def test_a_server_that_recovers_is_asked_again() -> None:
    def recovers(handler: Scripted, request: dict[str, Any]) -> None:
        if type(handler).asked < 3:
            handler.say("busy", 503)
        else:
            handler.say(json.dumps({"result": [[hit("1", '"A"\na')]]}))

    with scripted(recovers) as (url, handler):
        assert HttpRetriever(url).search(["q"], 2) == [[Passage(1, "A", "a")]]
        assert handler.asked == 3


def test_our_server_refuses_what_is_no_request(served: str) -> None:
    import urllib.error
    import urllib.request

    bodies = [b"x", b"[]", b'{"queries": "a"}', b'{"queries": [1]}', b'{"topk": 1}', b""]
    bodies += [b'{"queries": ["a"], "topk": %s}' % k for k in (b"1.5", b"0", b"-1", b"true", b"false", b'""', b"[]")]
    bodies += [b'{"queries": ["a"], %s}' % more for more in (b'"return_scores": "no"', b'"top_k": 1')]
    for body in bodies:
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(urllib.request.Request(served, body, method="POST"))
        assert caught.value.code == 400
    assert b"'top_k'. Did you mean 'topk'?" in caught.value.read()
    with pytest.raises(RetrievalError, match="status 400"):
        HttpRetriever(served)._ask({"queries": [" "], "topk": 3})
    with pytest.raises(ConfigError, match="cannot listen"):
        make_server(build_retriever(Corpus.from_passages([("", "a")])), port=int(served.split(":")[2].split("/")[0]))


@pytest.mark.parametrize("more", [{}, {"topk": None}, {"return_scores": None}])
def test_ten_passages_where_no_number_is_asked_for(folder: Path, served: str, more: dict[str, Any]) -> None:
    retriever = HttpRetriever(served)
    assert retriever._answers(retriever._ask({"queries": ["red"], **more}), ["red"], 10) == open_retriever(
        folder
    ).search(["red"], 10)


@pytest.mark.parametrize("timeout", [0, -1, "x", float("inf"), True])
def test_a_timeout_is_a_number_of_seconds(timeout: Any, folder: Path) -> None:
    with pytest.raises(ConfigError, match="timeout_s"):
        build_retriever(None, {"encoder": "http://127.0.0.1:1/retrieve", "timeout_s": timeout})
    with pytest.raises(ConfigError, match="timeout_s"):
        ActorRetriever(str(folder), 1, timeout_s=timeout)


# --- actors -----------------------------------------------------------------------------------------------------------


def test_without_ray_an_index_is_opened_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllib_mhgpo.retrieval.build._ray_runs", lambda: False)
    spec = {"encoder": str(folder), "actors": 2, "timeout_s": 3}
    assert isinstance(build_retriever(None, spec), CorpusRetriever)
    for actors in (-1, 1.5, True, "x"):
        with pytest.raises(ConfigError, match="actors: expected a whole number"):
            build_retriever(None, {"encoder": str(folder), "actors": actors})


def test_actors_are_not_started_for_another_corpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllib_mhgpo.retrieval.build._ray_runs", lambda: True)
    spec = {"encoder": str(folder), "actors": 2}
    with pytest.raises(RetrievalError, match=r"holds 43 vectors, the corpus .* 1 passages"):
        build_retriever(Corpus.from_passages([("A", "a")]), spec)
    with pytest.raises(RetrievalError, match="another corpus"):
        build_retriever(Corpus.from_passages([("A", "a")] * 43), spec)


@pytest.fixture(scope="module")
def pooled(folder: Path, ray_session: None) -> BaseRetriever:
    return build_retriever(None, {"encoder": str(folder), "actors": 2, "cache_size": 0})


def test_actors_know_what_they_search(folder: Path, pooled: BaseRetriever) -> None:
    assert pooled.corpus_fingerprint == open_retriever(folder).corpus_fingerprint != ""
    assert build_retriever(None, "http://127.0.0.1:9/retrieve").corpus_fingerprint == ""


def test_actors_give_the_same_passages(folder: Path, pooled: BaseRetriever, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllib_mhgpo.retrieval.actors._SHARE", 3)  # many requests, more than may be under way
    here = open_retriever(folder)
    assert pooled.search(QUERIES, 5) == here.search(QUERIES, 5)
    assert pooled.search(["red"], 10**6) == here.search(["red"], 10**6)


def test_an_actor_killed_in_mid_request_is_replaced(
    folder: Path, pooled: BaseRetriever, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr("rllib_mhgpo.retrieval.actors._SHARE", 3)
    retriever: Any = pooled
    expected = open_retriever(folder).search(QUERIES, 5)
    pid = ray.get(retriever.actors[0].__ray_call__.remote(lambda actor: os.getpid()))
    die = retriever.actors[0].__ray_call__.options(max_task_retries=0)
    die.remote(lambda actor: os.kill(os.getpid(), signal.SIGKILL))
    assert pooled.search(QUERIES, 5) == expected  # the requests behind the kill are asked again
    assert ray.get(retriever.actors[0].__ray_call__.remote(lambda actor: os.getpid())) != pid
    ray.kill(retriever.actors[1])  # for good: Ray itself does not restart it
    assert pooled.search(QUERIES, 5) == expected


def test_an_actor_that_does_not_answer_is_given_up(folder: Path, pooled: BaseRetriever) -> None:
    slow: Any = build_retriever(None, {"encoder": str(folder), "actors": 2, "timeout_s": 0.2})
    go_on = folder.parent / "go-on"

    def wait(actor: Any) -> None:
        while not os.path.exists(go_on):
            time.sleep(0.02)

    for actor in slow.actors:
        actor.__ray_call__.remote(wait)
    with pytest.raises(RetrievalError, match=r"no answer of 2 actors in 0\.2 s"):
        slow.search(["red"], 1)
    go_on.touch()
    assert pooled.search(["red"], 1) == open_retriever(folder).search(["red"], 1)


@pytest.mark.parametrize("actors", [1, 2])
def test_an_index_that_cannot_be_opened_is_refused_at_the_start(
    pooled: BaseRetriever, tmp_path: Path, actors: int
) -> None:
    save_retriever(build_retriever(Corpus.from_passages([("", "red")])), tmp_path / "ix")
    (tmp_path / "ix" / "index.faiss").write_bytes(b"x")
    with pytest.raises(RetrievalError, match=r"index\.faiss: expected [\d,]+ bytes, found 1 bytes"):
        build_retriever(None, {"encoder": str(tmp_path / "ix"), "actors": actors})


def test_failures_of_a_search_reach_the_caller(folder: Path, pooled: BaseRetriever) -> None:
    import ray

    broken: Any = build_retriever(None, {"encoder": str(folder), "actors": 3, "cache_size": 0})
    ray.get(broken.actors[2].__ray_call__.remote(lambda actor: setattr(actor, "_failure", "the disk is gone")))
    with pytest.raises(RetrievalError, match="the disk is gone"):
        broken.search([f"red {i}" for i in range(3 * 64)], 1)
