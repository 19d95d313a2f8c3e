"""The forwarder's own metrics endpoint: a small HTTP server that Prometheus scrapes on each node."""

from __future__ import annotations

import contextlib
import hmac
import http.server
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ..errors import FanfoldError, SettingError
from ..process import LOOPBACK
from ..store import deadline, monitoring
from ..store.query import Store

PATH = "/metrics"
TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = 30.0  # for one answer
IDLE_SECONDS = 10.0
AT_ONCE = 4


class Scraped(http.server.ThreadingHTTPServer):
    """Serves the live runs of a store. Callers show the token with which the forwarder sends, if it has one."""

    daemon_threads = True
    request_queue_size = 16

    def __init__(self, store: Store, host: str, port: int, *, token: str | None = None, project: str | None = None) -> None:
        if token is None and host not in LOOPBACK:
            raise SettingError(
                f"{host} can be reached from elsewhere, and the forwarder has no token that callers could show. Metrics are not "
                "served. Set FANFOLD_SERVER_TOKEN, or leave --metrics-host out."
            )
        self.store, self.project, self.token = store, project, token
        self.turns = threading.BoundedSemaphore(AT_ONCE)
        super().__init__((host, port), MetricsHandler)

    def answer(self, query: str) -> str:
        """Return the text for a query such as `what=metrics,ops`."""
        words = parse_qs(query)
        what = monitoring.check(",".join(words.get("what", ())))
        with deadline.within(SECONDS):
            return monitoring.prometheus(*monitoring.collect(monitoring.live(self.store, self.project), what))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore callers that go away in the middle."""

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Serve from a thread while something else runs."""
        thread = threading.Thread(target=self.serve_forever, name="fanfold-metrics", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.shutdown()
            self.server_close()
            thread.join(IDLE_SECONDS)


class MetricsHandler(http.server.BaseHTTPRequestHandler):
    """Answers GET /metrics."""

    server: Scraped
    timeout = IDLE_SECONDS
    server_version, sys_version = "fanfold", ""

    def do_GET(self) -> None:
        place = urlsplit(self.path)
        if place.path != PATH:
            self._answer(404, f"there is only {PATH} here.\n")
        elif not self._known():
            self._answer(401, "a token is needed: the one this forwarder sends with.\n")
        elif not self.server.turns.acquire(blocking=False):
            self._answer(503, "too many questions at once. Try again.\n")
        else:
            try:
                self._answer(*self._found(lambda: self.server.answer(place.query)))
            finally:
                self.server.turns.release()

    def _known(self) -> bool:
        token = self.server.token
        if token is None:  # only this machine can connect; a web page that a browser here shows cannot, under its own name
            host = urlsplit(f"//{self.headers.get('host', '')}").hostname
            return host in LOOPBACK
        kind, _, word = self.headers.get("authorization", "").partition(" ")
        return kind.lower() == "bearer" and hmac.compare_digest(word.strip().encode(), token.encode())

    def _found(self, question: Callable[[], str]) -> tuple[int, str]:
        try:
            return 200, question()
        except SettingError as error:
            return 400, f"{error}\n"
        except (FanfoldError, OSError) as error:
            return 503, f"{error}\n"

    def _answer(self, code: int, text: str) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(code)
        self.send_header("content-type", TYPE if code == 200 else "text/plain; charset=utf-8")
        self.send_header("content-length", str(len(body)))
        if code == 401:
            self.send_header("www-authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a scrape every few seconds would fill the log."""
