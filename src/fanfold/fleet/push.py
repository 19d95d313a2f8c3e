"""Pushing metrics of live runs to an OpenTelemetry collector (OTLP over HTTP, as JSON), from a gateway or a forwarder.

A collector that is down costs nothing but a warning: the next push has the newer values. Authorization comes from the variable
that every OpenTelemetry exporter reads, OTEL_EXPORTER_OTLP_HEADERS.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from urllib.parse import unquote

from .._version import __version__
from ..errors import FanfoldError, SettingError, guard
from ..store import monitoring
from ..store.query import Store
from .address import GatewayAddress, parse
from .client import trust

logger = logging.getLogger("fanfold.push")
PATH = "/v1/metrics"
EVERY_SECONDS = 30.0
TIMEOUT = 10.0
MAX_ANSWER = 64 << 10


class Pusher:
    """Sends the live runs of a store to a collector, every so often, from a thread of its own."""

    def __init__(
        self, store: Store, url: str, *, project: str | None = None, what: Sequence[str] = monitoring.WHAT,
        every: float = EVERY_SECONDS, ca: str | None = None,
    ) -> None:  # fmt: skip
        self.store, self.project, self.what = store, project, tuple(what)
        self.every = max(1.0, every)
        self._place = _collector(url)
        self._headers = {"content-type": "application/json", "user-agent": f"fanfold/{__version__}", **headers()}
        self._trust = trust(ca) if self._place.secure else None
        self._failing = False

    @property
    def url(self) -> str:
        return self._place.url

    def push(self) -> int:
        """Send the current values; return how many requests the collector accepted. Raise OSError or FanfoldError."""
        shown, _ = monitoring.collect(monitoring.live(self.store, self.project), self.what)
        connection = self._connect()
        accepted = 0
        with contextlib.closing(connection):
            for request in monitoring.otlp(shown):
                body = json.dumps(request).encode("utf-8", "replace")
                try:
                    connection.request("POST", self._place.path, body, self._headers)
                    response = connection.getresponse()
                    text = response.read(MAX_ANSWER)
                except http.client.HTTPException as error:
                    raise OSError(f"{self.url} does not answer as a collector does: {error or type(error).__name__}") from error
                if response.status != 200:
                    why = text[:200].decode("utf-8", "replace") or response.reason
                    raise FanfoldError(f"{self.url} answers {response.status}: {why}")
                accepted += 1
        return accepted

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._place.host, self._place.port
        if self._place.secure:
            return http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=self._trust)
        return http.client.HTTPConnection(host, port, timeout=TIMEOUT)

    def attempt(self) -> None:
        """Push, and log a warning when that begins to fail, and when it works again."""
        try:
            self.push()
        except (OSError, FanfoldError) as error:
            if not self._failing:
                logger.warning("metrics are not pushed now: %s. Runs are not affected. It is tried again every %.0f s.",
                               error, self.every, extra={"event": "push"})  # fmt: skip
            self._failing = True
        else:
            if self._failing:
                logger.info("metrics are pushed again to %s", self.url, extra={"event": "push"})
            self._failing = False

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Push from a thread while something else runs, and once more at the end."""
        stop = threading.Event()

        def work() -> None:
            while True:
                with guard("push metrics"):
                    self.attempt()
                if stop.is_set():
                    return
                stop.wait(self.every)

        thread = threading.Thread(target=work, name="fanfold-push", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(2 * TIMEOUT)


def _collector(url: str) -> GatewayAddress:
    """Return where to send metrics; a URL without a path gets the standard one."""
    try:
        place = parse(url)
    except SettingError as error:
        shown = url.rpartition("@")[2].partition("?")[0]
        raise SettingError(
            f"{shown!r} is not the address of an OpenTelemetry collector. Nothing was started. "
            "Write http://collector:4318; a password belongs in OTEL_EXPORTER_OTLP_HEADERS."
        ) from error
    return place if place.path else place._replace(path=PATH)


def headers() -> dict[str, str]:
    """Return the headers in OTEL_EXPORTER_OTLP_HEADERS: name=value pairs, separated by commas, percent-encoded."""
    given = os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "")
    pairs = (word.partition("=") for word in given.split(",") if "=" in word)
    found = {unquote(name).strip().lower(): unquote(value).strip() for name, _, value in pairs}
    if any(not name or set(name + value) & set("\r\n") for name, value in found.items()):
        raise SettingError(
            "OTEL_EXPORTER_OTLP_HEADERS is not a list of name=value. Nothing was started. Separate them by commas."
        )
    return found
