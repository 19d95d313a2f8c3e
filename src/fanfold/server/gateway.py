"""The gateway as an ASGI app: stores journal bytes and blobs from authorized forwarders, exactly once.

It keeps no state in memory that a restart would lose, so any number of instances can run behind a load balancer. Requests
are refused before they cost memory: the caller is checked first, then the memory budget, and only then is the body read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import SettingError
from ..fleet.audit import Audit
from ..fleet.changes import ChangeTargets
from ..fleet.grants import Anybody, Holder
from ..fleet.intake import Intake, Result
from ..fleet.limits import Budget, Busy, Rates, party
from ..fleet.metrics import Metrics
from ..fleet.proxy import Proxied
from ..fleet.responses import Call, answered, peer_of, read_body, whole_number
from ..fleet.responses import as_json as _json
from ..fleet.tokens import ALL, READ, WRITE, Token, TokenBook, match
from ..fleet.wire import (
    ANSWER,
    APPEND,
    BATCH,
    BLOB,
    LENGTH,
    MAX_RAW,
    MISSING,
    OFFSET,
    REQUESTS,
    RUN,
    RUNS,
    TELL,
    Conflict,
    Fetched,
    Fetching,
    Gone,
    Piece,
    Rejected,
    Telling,
    checked_name,
    decode,
)
from ..journal import requests
from ..journal.requests import Answer
from ..store import monitoring
from ..store.changes import Views
from ..store.query import Store
from ..store.tell import answer_so_far
from ..store.tell import tell as ask_job
from . import gate
from .guard import Guard
from .live import LiveNotices
from .login import Logins
from .turns import Turns

logger = logging.getLogger("fanfold.gateway")
MEMORY = 256 << 20
MAX_NAMES = 10_000
SMALL = 64 << 10  # bytes that are unpacked and decoded sooner than a thread is woken
STRANGER_RATE, STRANGER_BURST = 1.0, 20.0  # wrong tokens from one address: per second, and at once
_COLUMNS = ("id", "name", "status", "created", "seen", "ranks")


@dataclass(frozen=True)
class Limits:
    """Limits of one gateway: bytes of request bodies in memory, and bytes per second (`burst`: at once) from one project."""

    memory: int = MEMORY
    rate: float = 64 << 20
    burst: float = 256 << 20


class Replies:
    """Outcomes from a store's thread for the event loop: it is woken once for all that are ready, not once for each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready: list[tuple[asyncio.Future[Any], Future[Any]]] = []

    def to(self, coming: Future[Value]) -> asyncio.Future[Value]:
        """Return a future of this event loop with the outcome of one of a thread."""
        loop = asyncio.get_running_loop()
        here: asyncio.Future[Value] = loop.create_future()
        coming.add_done_callback(lambda done: self._came(loop, here, done))
        return here

    def _came(self, loop: asyncio.AbstractEventLoop, here: asyncio.Future[Any], done: Future[Any]) -> None:
        with self._lock:
            self._ready.append((here, done))
            first = len(self._ready) == 1
        if first:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        with self._lock:
            ready, self._ready = self._ready, []
        for here, done in ready:
            if here.cancelled():
                continue
            error = done.exception()
            if error is not None:
                here.set_exception(error)
            else:
                here.set_result(done.result())


class Gateway:
    """State shared by the routes. With `tokens=None` anyone may do everything, which is safe only on loopback."""

    def __init__(self, change: ChangeTargets, tokens: TokenBook | None, limits: Limits, store: Store | None) -> None:
        self.change = change
        self.intake = change.intake
        self.audit = change.audit
        self.tokens = tokens
        self.store = store
        self.notices: LiveNotices | None = None  # of the dashboard, if it is served
        self.turns = Turns()  # for store queries, shared with the dashboard
        self.budget = Budget(limits.memory)
        self.rates = Rates(limits.rate, limits.burst)
        self.strangers = Rates(STRANGER_RATE, STRANGER_BURST)
        self.metrics = Metrics()
        self.replies = Replies()
        self.closing = False
        self._looking: asyncio.Future[dict[str, Token]] | None = None
        self.started = time.monotonic()

    def close(self) -> None:
        """Report as not ready, and end the streams of open pages: a server that stops would wait for them."""
        self.closing = True
        if self.notices is not None:
            self.notices.close()

    async def admit(self, request: Request, scopes: Sequence[str], project: str) -> Token | None:
        """Return the token of a request, or raise Refused: 401 if it is unknown, 403 if it lacks the permission."""
        if self.tokens is None:
            return None
        kind, _, word = request.headers.get("authorization", "").partition(" ")
        try:
            known = kind.lower() == "bearer"
            token = match(await self._known(self.tokens), word.strip()) if known else None
        except SettingError as error:  # the token file is unusable: nobody gets in, and the log shows why
            raise Rejected(503, str(error)) from error
        if token is None:
            raise self.stranger(request)
        if not any(token.allows(scope, project) for scope in scopes):
            raise Rejected(403, f"this token may not {' or '.join(scopes)} there. Nothing was done. Ask for one that may.")
        return token

    async def _known(self, tokens: TokenBook) -> Mapping[str, Token]:
        """Return all tokens. They may be in a database, so one thread looks them up, and other requests wait for the same."""
        found = tokens.at_hand()
        if found is not None:
            return found
        if self._looking is None or self._looking.done():
            self._looking = asyncio.ensure_future(run_in_threadpool(tokens.recent))
        return await asyncio.shield(self._looking)

    def stranger(self, request: Request) -> Rejected:
        """Return the error for a request without a valid token; repeated attempts are rate-limited."""
        peer = party(peer_of(request))
        self.strangers.check(peer, "what this address tries")  # only now: valid tokens may come from the same address
        self.strangers.take(peer, 1.0)
        what = "this token is not valid" if "authorization" in request.headers else "a token is needed"
        return Rejected(401, f"{what}. Nothing was done. Ask whoever runs this gateway for one.")


Handler = Callable[[Gateway, Request, str], Awaitable[Response]]
Body = TypeVar("Body", bound=msgspec.Struct)
Value = TypeVar("Value")


@dataclass(frozen=True)
class Door:
    """One route: its method, the scopes of which it needs one (none: open to all), and whether it is about a project.

    Where that is None, it is about one project if the caller names it, else about all, which needs a token for all.
    """

    path: str
    method: str
    handler: Handler
    scopes: tuple[str, ...] = ()
    of_project: bool | None = True

    def route(self, gateway: Gateway) -> Route:
        answer = answered(gateway.metrics, self.path, partial(self._answer, gateway))
        return Route(self.path, Opened(answer), methods=[self.method])

    async def _answer(self, gateway: Gateway, request: Request) -> Response:
        if not self.scopes:
            return await self.handler(gateway, request, "")
        project = request.query_params.get("project") if self.of_project is not False else ALL
        if self.of_project is None:
            project = project or ALL
        token = await gateway.admit(request, self.scopes, project or "")
        request.state.token, request.state.holder = (token.id, token) if token else (None, Anybody())
        return await self.handler(gateway, request, checked_name("project", project))


class Opened:
    """The app behind a door."""

    def __init__(self, answer: Callable[[Request], Awaitable[Response]]) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._answer(Call(scope, receive))
        await response(scope, receive, send)


class Doors:
    """The middleware that finds a door by its exact name, at once; whatever is not named exactly is left to the router."""

    def __init__(self, app: ASGIApp, *, routes: Sequence[Route]) -> None:
        self.app = app
        self._named = {(method, route.path): route.app for route in routes for method in route.methods or ()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        named = scope["type"] == "http" and not scope.get("root_path")
        app = self._named.get((scope["method"], scope["path"])) if named else None
        await (app or self.app)(scope, receive, send)


async def _append(gateway: Gateway, request: Request, project: str) -> Response:
    gateway.rates.check(project, f"project {project[:100]!r}")
    length = whole_number(request.headers, LENGTH, MAX_RAW)
    size = whole_number(request.headers, "content-length", MAX_RAW)
    with gateway.budget.reserve(size + 3 * length):  # the body, unpacked, its pieces, and the one being checked
        body = await _body(request, size)
        pieces = decode(body, length) if length <= SMALL else await run_in_threadpool(decode, body, length)
        gateway.rates.take(project, length + sum(max(0, piece.gap) for piece in pieces))
        gateway.metrics.add("received_bytes_total", size)
        results = await _store(gateway, project, pieces)
    code = 200 if all(one["status"] == 200 for one in results) else 409
    return _json({"pieces": results}, code)


async def _store(gateway: Gateway, project: str, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    """Store pieces; a refused one does not affect the others. No thread is blocked while a store collects a batch."""
    began = time.monotonic()
    outcomes = await gateway.replies.to(gateway.intake.append_all(project, pieces))
    gateway.metrics.add("store_seconds_total", time.monotonic() - began)
    stored = [piece for piece, outcome in zip(pieces, outcomes, strict=True) if isinstance(outcome, int)]
    if stored:
        gateway.metrics.add("pieces_total", len(stored), outcome="stored")
        gateway.metrics.add("bytes_total", sum(len(piece.data) for piece in stored), kind="journal")
    return [_answer(gateway, project, piece, outcome) for piece, outcome in zip(pieces, outcomes, strict=True)]


def _answer(gateway: Gateway, project: str, piece: Piece, outcome: Result) -> dict[str, Any]:
    match outcome:
        case int():
            if not piece.offset:
                begun = {"event": "journal", "project": project, "run": piece.run, "journal": piece.journal}
                logger.info("a journal begins", extra=begun)
            return {"status": 200, "offset": outcome}
        case Conflict():
            gateway.metrics.add("pieces_total", outcome="conflict")
            return {"status": 409, "offset": outcome.offset}
        case Rejected():
            gateway.metrics.add("pieces_total", outcome="refused")
            facts = {"event": "refused", "project": project, "run": piece.run, "journal": piece.journal, "offset": piece.offset}
            logger.warning("%s", outcome, extra=facts)
            return {"status": outcome.status, "error": str(outcome)}
    logger.error("a piece could not be stored: %s", outcome, extra={"event": "storage", "project": project})
    why = getattr(outcome, "strerror", None) or outcome
    return {"status": 503, "error": f"the gateway could not store it: {why}. Nothing is lost. Try again."}


async def _offset(gateway: Gateway, request: Request, project: str) -> Response:
    query = request.query_params
    offset = await run_in_threadpool(gateway.intake.offset, project, query.get("run", ""), query.get("journal", ""))
    return _json({"offset": offset})


async def _missing(gateway: Gateway, request: Request, project: str) -> Response:
    size = whole_number(request.headers, "content-length", BATCH)
    with gateway.budget.reserve(2 * size):
        try:
            names = msgspec.json.decode(await _body(request, size), type=list[str])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Rejected(400, f"the body is not a list of names: {error}. Nothing was done.") from error
        if len(names) > MAX_NAMES:
            raise Rejected(413, f"more than {MAX_NAMES} names at once. Nothing was done.")
        found = await run_in_threadpool(gateway.intake.missing, project, request.query_params.get("run", ""), names)
    return _json({"missing": found})


async def _blob(gateway: Gateway, request: Request, project: str) -> Response:
    gateway.rates.check(project, f"project {project[:100]!r}")
    query = request.query_params
    size = whole_number(request.headers, "content-length", 2 * BATCH)
    place = {name: whole_number(query, name, 1 << 50) for name in ("offset", "total")}
    with gateway.budget.reserve(2 * size):
        data = await _body(request, size)
        gateway.rates.take(project, size)
        gateway.metrics.add("received_bytes_total", size)

        def store() -> int:
            return gateway.intake.blob(project, query.get("run", ""), query.get("name", ""), data=data, **place)

        try:
            offset = await run_in_threadpool(store)
        except Conflict as conflict:
            return _json({"offset": conflict.offset}, 409)
        except OSError as error:
            raise Busy(
                503, f"the gateway could not store it: {error.strerror or error}. Nothing is lost. Try again.", 5.0
            ) from error
    gateway.metrics.add("bytes_total", size, kind="blob")
    return _json({"offset": offset})


async def _runs(gateway: Gateway, request: Request, project: str) -> Response:
    if gateway.store is None:
        raise Rejected(404, "this store lists no runs. Nothing was read.")
    rows = await gateway.turns.run(request.state.holder.label, partial(gateway.store.runs, project))
    return _json({"runs": [{name: row[name] for name in _COLUMNS} for row in rows]})


async def _delete(gateway: Gateway, request: Request, project: str) -> Response:
    store, run = gateway.store, checked_name("run", request.query_params.get("run"))
    if store is None:
        raise Rejected(404, "this store lists no runs. Nothing was deleted.")
    holder: Holder = request.state.holder
    changes = gateway.change.by(holder, peer_of(request))

    def delete() -> None:
        if gateway.intake.deleted(project, run):
            raise Gone(project, run)
        found = store.run(project, run)
        changes.check_deletable(found)
        changes.delete(found)

    await run_in_threadpool(delete)
    return _json({"deleted": 1})


async def _tell(gateway: Gateway, request: Request, project: str) -> Response:
    given = await _small(gateway, request, Telling)
    store, run = gateway.store, checked_name("run", request.query_params.get("run"))
    if store is None:
        raise Rejected(404, "this store lists no runs. Nothing was asked.")
    holder: Holder = request.state.holder
    changes = gateway.change.by(holder, peer_of(request))

    def tell() -> Answer:
        found = store.run(project, run)
        try:
            return ask_job(
                found, given.action, given.values, wait=False, timeout=given.seconds, by=holder.label,
                leave=partial(changes.ask, found),
            )  # fmt: skip
        except SettingError as error:
            raise Rejected(400, str(error)) from error

    return _json(msgspec.to_builtins(await gateway.turns.run(holder.label, tell)))


async def _answer_of(gateway: Gateway, request: Request, project: str) -> Response:
    store, run = gateway.store, checked_name("run", request.query_params.get("run"))
    id = _id(request.query_params.get("id", ""))
    if store is None:
        raise Rejected(404, "this store lists no runs. Nothing was read.")

    def find() -> Answer:
        return answer_so_far(store.run(project, run), id)

    return _json(msgspec.to_builtins(await gateway.turns.run(request.state.holder.label, find)))


async def _requests(gateway: Gateway, request: Request, project: str) -> Response:
    """Hand out requests to the forwarder that serves rank 0 of their runs."""
    given = await _small(gateway, request, Fetching)

    def fetch() -> list[tuple[str, requests.JobRequest]]:
        for run, id in given.got:
            gateway.intake.fetched(project, checked_name("run", run), _id(id))
        return gateway.intake.asked(project, [checked_name("run", run) for run in given.runs])

    try:
        found = await run_in_threadpool(fetch)
    except OSError as error:
        raise Busy(503, f"the gateway cannot read its requests: {error.strerror or error}. Try again.", 5.0) from error
    return _json(msgspec.to_builtins(Fetched(time.time(), found)))


def _id(word: str) -> str:
    try:
        return requests.checked_id(word)
    except SettingError as error:
        raise Rejected(400, str(error)) from error


async def _small(gateway: Gateway, request: Request, kind: type[Body]) -> Body:
    """Read a small JSON body."""
    size = whole_number(request.headers, "content-length", BATCH)
    with gateway.budget.reserve(2 * size):
        try:
            return msgspec.json.decode(await _body(request, size), type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Rejected(400, f"the body is malformed: {error}. Nothing was done.") from error


async def _metrics(gateway: Gateway, request: Request, project: str) -> Response:  # noqa: ARG001 - the interface
    gauges = {"body_bytes": gateway.budget.used, "up_seconds": time.monotonic() - gateway.started}
    return PlainTextResponse(gateway.metrics.text(**gauges), media_type="text/plain; version=0.0.4")


async def _run_metrics(gateway: Gateway, request: Request, project: str) -> Response:
    """Answer with the metrics of live runs, of one project or of all."""
    store = gateway.store
    if store is None:
        raise Rejected(404, "this store lists no runs. Nothing was read.")
    try:
        what = monitoring.check(request.query_params.get("what", ""))
    except SettingError as error:
        raise Rejected(400, str(error)) from error
    of = None if project == ALL else project

    def read() -> str:
        return monitoring.prometheus(*monitoring.collect(monitoring.live(store, of), what))

    text = await gateway.turns.run(request.state.holder.label, read)
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


async def _healthz(gateway: Gateway, request: Request, project: str) -> Response:  # noqa: ARG001 - the interface
    return PlainTextResponse("ok\n")


async def _readyz(gateway: Gateway, request: Request, project: str) -> Response:  # noqa: ARG001 - the interface
    if gateway.closing:
        return PlainTextResponse("closing\n", 503)
    try:
        await run_in_threadpool(gateway.intake.check)
    except OSError as error:
        logger.warning("nothing can be stored: %s", error, extra={"event": "not ready"})
        return PlainTextResponse("the store cannot be written to\n", 503)
    return PlainTextResponse("ready\n")


DOORS = (  # routes are tried in this order
    Door(APPEND, "POST", _append, (WRITE,)),
    Door("/healthz", "GET", _healthz),
    Door("/readyz", "GET", _readyz),
    Door("/metrics", "GET", _metrics, (READ,), of_project=False),
    Door("/metrics/runs", "GET", _run_metrics, (READ,), of_project=None),
    Door(RUNS, "GET", _runs, (READ,)),
    Door(RUN, "DELETE", _delete, (WRITE,)),
    Door(OFFSET, "GET", _offset, (READ, WRITE)),
    Door(MISSING, "POST", _missing, (WRITE,)),
    Door(BLOB, "POST", _blob, (WRITE,)),
    Door(TELL, "POST", _tell, (WRITE,)),
    Door(ANSWER, "GET", _answer_of, (READ, WRITE)),
    Door(REQUESTS, "POST", _requests, (WRITE,)),
)


def app(
    intake: Intake,
    *,
    store: Store | None = None,
    views: Views | None = None,
    audit: Audit | None = None,
    tokens: TokenBook | None = None,
    logins: Logins | None = None,
    limits: Limits | None = None,
    allow_delete: bool = False,
) -> Starlette:
    """Return a gateway. Without tokens it accepts only this machine's host names, and no web page but its own.

    store: read by its dashboard and its lists of runs. views, audit: storage for saved views, and for the record of
    deletions and logins. logins: how people log in to the dashboard, tokens included. allow_delete: let callers who may
    write to a project delete its runs.
    """
    logins = logins or Logins(tokens)
    if logins.tokens is None and (logins.oidc is not None or logins.proxies.user):
        raise SettingError("people have to log in here, and forwarders not. The gateway was not started. Name a file of tokens.")
    gateway = Gateway(ChangeTargets(intake, audit, views, allow_delete), logins.tokens, limits or Limits(), store)
    routes = [door.route(gateway) for door in DOORS]
    rest: list[BaseRoute] = gate.routes(gateway, logins, store) if store is not None else []
    served = Starlette(
        routes=[*routes, *rest],
        middleware=[Middleware(Proxied, proxies=logins.proxies), _guard(logins), Middleware(Doors, routes=routes)],
    )
    served.state.gateway = gateway
    return served


def _guard(logins: Logins) -> Middleware:
    hosts = () if logins.tokens is None else None
    names = [name] if (name := urlsplit(logins.public_url or "").hostname) else []
    return Middleware(Guard, hosts=hosts, token=None, embed=False, pages=names)


async def _body(request: Request, size: int) -> bytes:
    """Read a body of exactly the announced size; a connection that sends it too slowly is closed (connections.py)."""
    body = await read_body(request, size, "the body is longer than announced. Nothing was stored.")
    if len(body) != size:
        raise Rejected(400, "the body is shorter than announced. Nothing was stored.")
    return body
