"""The report as a local page that loads itself again: made when it is asked for and something has changed."""

import html
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from threading import Lock

from rllib_mhgpo.errors import ConfigError, MHGPOError

LOCAL = ("127.0.0.1", "localhost", "::1")


def make_server(host: str, port: int, page: Callable[[], str]) -> HTTPServer:
    """Returns a server of one page; ``serve_forever`` starts it.

    Args:
        port: 0 takes a free one.
        page: makes the page.

    Raises:
        ConfigError: the address cannot be used.
    """

    making = Lock()  # a thread for each connection, for browsers open some ahead; the page is made by one at a time

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.headers.get("Host", "").rpartition(":")[0].strip("[]")
            if host in LOCAL and name not in LOCAL:
                # a foreign page that got its name to point here would read the run
                self.send_error(403, "this page is read under the name localhost")
                return
            if self.path != "/":
                self.send_error(404)
                return
            try:
                with making:
                    status, body = 200, page()
            except MHGPOError as error:
                status, body = 503, f"<!doctype html><title>waiting</title><p>{html.escape(str(error))}</p>"
            self.send_response(status)
            content = body.encode()
            for key, value in (
                ("Content-Type", "text/html; charset=utf-8"), ("Content-Length", str(len(content))),
                ("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff"),
            ):  # fmt: skip
                self.send_header(key, value)
            if status == 503:
                self.send_header("Refresh", "5")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing: the terminal shows the run."""

    try:
        return ThreadingHTTPServer((host, port), Handler)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--serve: {host}:{port} cannot be used: {error}. Choose another --port or --host.") from None
