"""A forwarder's HTTP client for its gateway: one keep-alive connection, and what each kind of failure means for retries."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import ssl
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from .._version import __version__
from ..errors import FanfoldError, MetricNotFound, RunNotFound, SettingError, notices
from ..journal.requests import Answer as JobAnswer
from ..process import LOOPBACK
from .address import parse
from .wire import (
    ANSWER,
    APPEND,
    BATCH,
    BLOB,
    LENGTH,
    MISSING,
    OFFSET,
    REQUESTS,
    TELL,
    Conflict,
    Fetched,
    Fetching,
    Piece,
    Telling,
    encode,
)

TIMEOUT = 60.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
MAX_ANSWER = 16 << 20
SMALLEST = 32 << 10


Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class PieceResult(msgspec.Struct):
    """The outcome of sending a piece: how much of its journal the gateway has (200, 409), or why it was refused."""

    status: int
    offset: Count | None = None
    error: str = ""

    def __post_init__(self) -> None:
        if self.status in (200, 409) and self.offset is None:
            raise ValueError("a stored piece has an offset")


class Appended(msgspec.Struct):
    """The response to an append request."""

    pieces: list[PieceResult]


class Offset(msgspec.Struct):
    """How much of a journal or blob the gateway has."""

    offset: Count


class Missing(msgspec.Struct):
    """Which blobs the gateway lacks, and how much of each it has."""

    missing: dict[str, Count]


class ToolText(msgspec.Struct):
    """A part of a tool's answer; only texts matter here."""

    text: str = ""


class ToolResult(msgspec.Struct):
    """What a tool answered; the names are those of MCP."""

    structuredContent: dict[str, Any] = {}  # noqa: N815
    content: list[ToolText] = []
    isError: bool = False  # noqa: N815


class ToolAnswer(msgspec.Struct):
    """The response to a call of a tool."""

    result: ToolResult


class RefusalAnswer(msgspec.Struct):
    """The response to a refused request."""

    error: str = ""


Answer = TypeVar("Answer")


class Unreachable(FanfoldError):
    """The gateway cannot be reached or refused a request; `after` is its Retry-After in seconds, `status` the HTTP status."""

    def __init__(self, message: str, *, after: float = 0.0, status: int = 0) -> None:
        super().__init__(message)
        self.after = after
        self.status = status


class Backoff:
    """Exponential backoff with jitter, so that a thousand nodes do not retry at the same moment."""

    def __init__(self, pick: Callable[[float, float], float] = random.uniform) -> None:
        self.failures = 0
        self._pick = pick

    def fail(self, after: float = 0.0) -> float:
        """Return how many seconds to wait: half to all of the current pause, on top of what the gateway asked for."""
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self.failures, 16))
        self.failures += 1
        return min(after, 10 * LONGEST_PAUSE) + self._pick(pause / 2, pause)


class _Whole(http.client.HTTPConnection):
    """A connection that sends head and body of a request at once: one after the other, they wake the gateway twice."""

    _held: list[Any] | None = None

    def request(self, *given: Any, **named: Any) -> None:
        self._held = []
        try:
            super().request(*given, **named)
            whole = b"".join(self._held)
        finally:
            self._held = None
        self.send(whole)

    def send(self, data: Any) -> None:
        if self._held is None:
            super().send(data)
        else:
            self._held.append(data)


class _WholeSecure(_Whole, http.client.HTTPSConnection):
    """The same over TLS."""


class Client:
    """Client of one gateway. Not thread-safe."""

    def __init__(self, url: str, token: str | None = None, *, timeout: float = TIMEOUT, ca: str | None = None) -> None:
        self._place = parse(url)
        self.url = self._place.url
        self._token, self._timeout = token, timeout
        self._trust = trust(ca) if self._place.secure else None
        self._connection: http.client.HTTPConnection | None = None
        self.accepted = 0  # requests whose bytes the gateway has stored
        self.room = BATCH  # bytes per request: shrinks when connections break, or a bad line would never get a request through
        if token and not self._place.secure and self._place.host not in LOOPBACK:
            notices.once(
                f"plain:{self.url}",
                f"{self.url} is not encrypted, and the token goes there in the clear. Runs are forwarded all the same. Use https://.",
            )

    def append(self, project: str, pieces: Sequence[Piece]) -> list[PieceResult]:
        """Send pieces of journals; return the outcome of each."""
        body, length = encode(pieces)
        answer = self._ask(Appended, "POST", APPEND, {"project": project}, body, {LENGTH: str(length)}, also=409)[1]
        if len(answer.pieces) != len(pieces):
            raise Unreachable(f"{self.url} answers for {len(answer.pieces)} pieces of {len(pieces)}, as no gateway does")
        self.accepted += 1
        return answer.pieces

    def offset(self, project: str, run: str, journal: str) -> int:
        """Return how much of a journal the gateway has."""
        return self._ask(Offset, "GET", OFFSET, {"project": project, "run": run, "journal": journal})[1].offset

    def missing(self, project: str, run: str, names: Sequence[str]) -> dict[str, int]:
        """Return which blobs the gateway lacks, and how much of each it has."""
        body = json.dumps(list(names)).encode()
        return self._ask(Missing, "POST", MISSING, {"project": project, "run": run}, body)[1].missing

    def blob(self, project: str, run: str, name: str, *, offset: int, total: int, data: bytes) -> int:
        """Send a piece of a blob; return how much the gateway has now, or raise Conflict."""
        query = {"project": project, "run": run, "name": name, "offset": str(offset), "total": str(total)}
        status, answer = self._ask(Offset, "POST", BLOB, query, data, also=409)
        if status == 409:
            raise Conflict(answer.offset)
        self.accepted += 1
        return answer.offset

    def tell(self, project: str, run: str, asked: Telling) -> JobAnswer:
        """Ask something of a run's job; return what the gateway says to it."""
        return self._ask(JobAnswer, "POST", TELL, {"project": project, "run": run}, msgspec.json.encode(asked))[1]

    def answer(self, project: str, run: str, id: str) -> JobAnswer:
        """Return what became of a request."""
        return self._ask(JobAnswer, "GET", ANSWER, {"project": project, "run": run, "id": id})[1]

    def requests(self, project: str, runs: Sequence[str], got: Sequence[tuple[str, str]]) -> Fetched:
        """Return the requests that wait for some runs, and acknowledge earlier ones."""
        body = msgspec.json.encode(Fetching(list(runs), list(got)))
        return self._ask(Fetched, "POST", REQUESTS, {"project": project}, body)[1]

    def tool(self, name: str, arguments: dict[str, Any]) -> Any:
        """Ask one of the gateway's tools (tools/table.py), which it serves over MCP; return the answer, or raise its error."""
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": name, "arguments": arguments}}
        headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
        answer = self._ask(ToolAnswer, "POST", "/mcp", {}, json.dumps(call).encode(), headers)[1].result
        if answer.isError:
            kind = {"RunNotFound": RunNotFound, "MetricNotFound": MetricNotFound}.get(
                str(answer.structuredContent.get("error")), FanfoldError
            )
            raise kind(f"{self.url} says: {' '.join(one.text for one in answer.content)}")
        if left_out := answer.structuredContent.get("left_out"):
            notices.once(
                f"tool:{self.url}:{left_out}",
                f"the answer of {self.url} was too long, and parts of it are left out: {'; '.join(map(str, left_out[:3]))}.",
            )
        return answer.structuredContent["result"]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(
        self, kind: type[Answer], method: str, path: str, query: dict[str, str], body: bytes | None = None,
        headers: dict[str, str] | None = None, *, also: int = 200,
    ) -> tuple[int, Answer]:  # fmt: skip
        given = {"user-agent": f"fanfold/{__version__}", **(headers or {})}
        if self._token:
            given["authorization"] = f"Bearer {self._token}"
        target = f"{self._place.path}{path}?{urlencode(query, quote_via=quote)}"
        try:
            response, data = self._exchange(method, target, body, given)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if body:
                self.room = max(SMALLEST, self.room // 2)
            raise Unreachable(f"{self.url} cannot be reached: {error or type(error).__name__}") from error
        if response.will_close:
            self.close()
        if body:
            self.room = min(BATCH, self.room + self.room // 4)
        return response.status, self._judged(kind, response, data, also)

    def _exchange(
        self, method: str, target: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[http.client.HTTPResponse, bytes]:
        if self._connection is None:
            self._connection = self._connect()
        try:
            self._connection.request(method, target, body, headers)
        except (BrokenPipeError, ConnectionResetError):
            if self._connection.sock is None:  # reset before it was connected: there is nothing to read
                raise
            # A gateway that refuses may close before it has read the whole body; its response says more than the broken pipe.
            with contextlib.suppress(OSError, http.client.HTTPException):
                response = self._connection.getresponse()
                return response, response.read(MAX_ANSWER)
            raise
        response = self._connection.getresponse()
        return response, response.read(MAX_ANSWER)

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._place.host, self._place.port
        if self._place.secure:
            return _WholeSecure(host, port, timeout=self._timeout, context=self._trust)
        return _Whole(host, port, timeout=self._timeout)

    def _judged(self, kind: type[Answer], response: http.client.HTTPResponse, data: bytes, also: int) -> Answer:
        """Decode a response as `kind`; anything else is treated as an unreachable gateway."""
        expected = response.status in (200, also)
        try:
            if expected:
                return msgspec.json.decode(data, type=kind)
            why = msgspec.json.decode(data, type=RefusalAnswer).error
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            why = f"{error}, which no gateway says" if expected else ""
        after = response.getheader("retry-after") or ""
        wait = float(after) if after.isascii() and after.isdecimal() and len(after) < 10 else 0.0
        raise Unreachable(f"{self.url} answers {response.status}: {why or response.reason}", after=wait, status=response.status)


def trust(ca: str | None) -> ssl.SSLContext:
    """Return a TLS context that trusts the certificates in `ca`, else the system's."""
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:  # the file is missing or holds no certificate
        raise SettingError(f"{ca} holds no certificates: {error}. Nothing is forwarded. Name a PEM file.") from error
