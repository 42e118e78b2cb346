"""Search on a server that speaks Search-R1's retrieval protocol.

Not a server. The one idea: whatever is not exactly an answer to what was asked is a failure that names the server, for
nothing found must never be taken from a server that failed.

The protocol: ``POST`` of ``{"queries": [...], "topk": k, "return_scores": true}`` is answered by ``{"result": [...]}``
with a list for each query of ``{"document": {"id": ..., "contents": "\\"Title\\"\\nText"}, "score": ...}``.
"""

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from rllib_mhgpo.data import Passage
from rllib_mhgpo.data.corpus import is_unicode
from rllib_mhgpo.data.passages import split_contents
from rllib_mhgpo.errors import ConfigError, RetrievalError
from rllib_mhgpo.retrieval.base import BaseRetriever

CACHE_SIZE = 8_192  # texts are kept, not rows
_AT_ONCE = 512  # queries a request
_TRIES = 3
_LARGEST = 256 << 20  # bytes of an answer


class HttpRetriever(BaseRetriever):
    """Asks the server at ``url``; an unreachable or overloaded one is asked again, a wrong answer is an error at once.

    Args:
        url: of the server, usually ending in ``/retrieve``.
        timeout_s: after which a request is given up.
        cache_size: queries remembered.
    """

    def __init__(self, url: str, timeout_s: float = 60.0, cache_size: int = CACHE_SIZE) -> None:
        super().__init__(min(cache_size, CACHE_SIZE))
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < 1e6:
            raise ConfigError(f"retriever: timeout_s: expected a number of seconds above 0, found {timeout_s!r}.")
        if not _is_address(url):
            raise ConfigError(f"retriever {url!r}: expected an address such as http://HOST:PORT/retrieve.")
        self.url, self._timeout = url, float(timeout_s)

    def find(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """The passages that the server found for each query."""
        started = time.perf_counter()
        found = []
        for begin in range(0, len(queries), _AT_ONCE):
            asked = list(queries[begin : begin + _AT_ONCE])
            found += self._answers(self._ask({"queries": asked, "topk": k, "return_scores": True}), asked, k)
        self.counts.search_s += time.perf_counter() - started
        return found

    def passages(self, found: Sequence[Sequence[Passage]]) -> list[list[Passage]]:
        """What was found is passages already."""
        return [list(hits) for hits in found]

    def _ask(self, request: dict[str, Any]) -> Any:
        reason = ""
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(0.1 * 4**attempt)
            try:
                body = self._post(json.dumps(request).encode())
            except urllib.error.HTTPError as error:
                reason = f"status {error.code} {error.reason}"
                if error.code < 500 and error.code != 429:
                    break
            except (OSError, http.client.HTTPException) as error:  # a cut answer, one of another protocol
                reason = " ".join(str(getattr(error, "reason", error)).split()) or type(error).__name__
            else:
                try:
                    return json.loads(body)
                except (ValueError, RecursionError):
                    raise self._wrong(f"no JSON: {body[:80]!r}") from None
        raise RetrievalError(
            f"{self.url}: no answer after {attempt + 1} tries: {reason}. Check that the server runs, or raise"
            " timeout_s."
        )

    def _post(self, data: bytes) -> bytes:
        """Reads the whole answer; a server that sends slower and slower is given up in time."""
        request = urllib.request.Request(self.url, data, {"Content-Type": "application/json"})
        until = time.monotonic() + self._timeout
        parts, size = [], 0
        with urllib.request.urlopen(request, timeout=self._timeout) as response:
            while part := response.read1(1 << 16):
                parts.append(part)
                size += len(part)
                if size > _LARGEST:
                    raise self._wrong(f"more than {_LARGEST:,} bytes")
                if time.monotonic() > until:
                    raise TimeoutError(f"the answer was not whole after {self._timeout:g} s")
            told = response.headers.get("Content-Length", "")
        if told.isdigit() and size != int(told):
            raise ConnectionError(f"the answer was cut at {size:,} of {int(told):,} bytes")
        return b"".join(parts)

    def _answers(self, answer: Any, queries: list[str], k: int) -> list[list[Passage]]:
        lists = answer.get("result") if isinstance(answer, dict) else None
        if not isinstance(lists, list):
            raise self._wrong(f"no list under 'result': {str(answer)[:80]}")
        if len(lists) != len(queries):
            raise self._wrong(f"{len(lists)} answers to {len(queries)} queries")
        found = []
        for query, hits in zip(queries, lists, strict=True):
            if not isinstance(hits, list):
                raise self._wrong(f"no list for the query {query[:60]!r}: {str(hits)[:80]}")
            if len(hits) > k:
                raise self._wrong(f"{len(hits)} passages for the query {query[:60]!r}, asked for {k}")
            found.append(list(dict.fromkeys(map(self._passage, hits))))
        return found

    def _passage(self, hit: Any) -> Passage:
        document: Any = hit.get("document", hit) if isinstance(hit, dict) else None
        match document:
            case {"title": str(title), "text": str(text)}:
                pass
            case {"contents": str(contents)}:
                title, text = split_contents(contents)
            case _:
                raise self._wrong(f"no passage with 'contents', or 'title' and 'text': {str(hit)[:80]}")
        if not is_unicode(title + text):
            raise self._wrong(f"half a character in a passage: {ascii(title)[:80]}")
        return Passage(_number(str(document.get("id", "")), title, text), title, text)

    def _wrong(self, found: str) -> RetrievalError:
        return RetrievalError(
            f"{self.url}: expected an answer in Search-R1's protocol, found {found}. Name the address of such a server."
        )


def _is_address(url: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(url)
        return bool(parts.hostname) and parts.port != 0  # a port that is no number raises
    except ValueError:
        return False


def _number(id_: str, title: str, text: str) -> int:
    """The document's number; where its id is none, one made of its content."""
    if id_.isascii() and id_.isdigit() and len(id_) < 19:
        return int(id_)
    return int.from_bytes(sha256("\0".join([id_, title, text]).encode("utf-8", "surrogatepass")).digest()[:7], "big")
