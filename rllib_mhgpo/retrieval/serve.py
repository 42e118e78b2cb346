"""A server of one retriever, in Search-R1's protocol (see :mod:`http`); FastAPI and its kind are not needed for it.

The one idea: requests are read and answered in threads, searched one after the other, for FAISS and PyTorch use all
cores for one search already.
"""

import json
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

from rllib_mhgpo.data import Passage
from rllib_mhgpo.errors import ConfigError, MHGPOError, did_you_mean
from rllib_mhgpo.retrieval.base import BaseRetriever

_LARGEST = 64 << 20  # bytes of a request
_DEFAULT_K = 10
_KEYS = ("queries", "topk", "return_scores")


def make_server(retriever: BaseRetriever, host: str = "127.0.0.1", port: int = 0) -> ThreadingHTTPServer:
    """A server that answers when its ``serve_forever`` runs; port 0 takes a free one.

    Raises:
        ConfigError: when the port cannot be had.
    """
    lock = Lock()

    class Handler(_Handler):
        def answer(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
            with lock:
                return retriever.search(queries, k)

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--port {port}: cannot listen at {host}: {error}. Choose another.") from error
    server.daemon_threads = True
    return server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60  # of a client that stops sending

    def answer(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        raise NotImplementedError

    def do_POST(self) -> None:
        """Answers ``/retrieve``, and any other path as well."""
        try:
            queries, k, scored = self._asked()
        except (ValueError, TypeError, RecursionError) as error:
            self._send(400, {"error": f"expected {', '.join(_KEYS)}; found: {error}"})
            return
        try:
            found = self.answer(queries, k)
        except MHGPOError as error:
            self._send(400, {"error": str(error)})
            return
        self._send(200, {"result": [[_document(p, rank, scored) for rank, p in enumerate(hits)] for hits in found]})

    def log_message(self, format: str, *args: Any) -> None:
        """Keeps silent: errors are told to the client."""

    def _asked(self) -> tuple[list[str], int, bool]:
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 < length <= _LARGEST:
            self.close_connection = True
            raise ValueError(f"a body of {length} bytes")
        request = json.loads(self.rfile.read(length))
        if not isinstance(request, dict):
            raise TypeError("no JSON object")
        for key in request:
            if key not in _KEYS:
                raise ValueError(f"the key {key!r}.{did_you_mean(key, _KEYS)}")
        queries, k, scored = map(request.get, _KEYS)
        k = _DEFAULT_K if k is None else k
        if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
            raise TypeError("no list of texts under 'queries'")
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise TypeError(f"topk {k!r}, which is no whole number of at least 1")
        if not isinstance(scored, bool | None):
            raise TypeError(f"return_scores {scored!r}, which is neither true nor false")
        return queries, k, bool(scored)

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _document(passage: Passage, rank: int, scored: bool) -> dict[str, Any]:
    """The passage as Search-R1 has it, with title and text beside it; the score tells the order alone."""
    contents = f'"{passage.title}"\n{passage.text}'
    document = {"id": str(passage.id), "contents": contents, "title": passage.title, "text": passage.text}
    return {"document": document, "score": 1 / (1 + rank)} if scored else document
