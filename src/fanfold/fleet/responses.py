"""A gateway's responses and request logs, the same for its API and for its dashboard."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property, lru_cache
from typing import Any

import msgspec
from starlette.datastructures import Headers, QueryParams
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Scope

from ..errors import FanfoldError, Forbidden, RunError, RunNotFound
from .limits import Busy
from .metrics import Metrics
from .wire import Rejected

logger = logging.getLogger("fanfold.gateway")
SHORT_QUERY = 256  # bytes: a client must not be able to fill memory with queries


class Heads(Headers):
    """Headers as a dict, read once: of each name the first value, as always. Half a dozen are looked up in each request."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope=scope)
        self._first = dict(reversed(self._list))

    def __getitem__(self, key: str) -> str:
        return self._first[key.lower().encode("latin-1")].decode("latin-1")

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and key.lower().encode("latin-1") in self._first


class Call(Request):
    """A request at one of the gateway's doors: cheap to look up things in, since forwarders send thousands a second."""

    @cached_property
    def headers(self) -> Headers:
        return Heads(self.scope)

    @cached_property
    def query_params(self) -> QueryParams:
        query: bytes = self.scope["query_string"]
        return _known_query(query) if len(query) <= SHORT_QUERY else QueryParams(query)


_known_query = lru_cache(maxsize=1024)(QueryParams)  # a forwarder asks the same each time: `project=…`


def as_json(value: Any, code: int = 200) -> Response:
    return Response(msgspec.json.encode(value), code, media_type="application/json")


def answered(
    metrics: Metrics, route: str, answer: Callable[[Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    """Wrap an endpoint: errors become responses, and every request is counted and logged."""

    async def call(request: Request) -> Response:
        began = time.monotonic()
        refusal: FanfoldError | None = None
        try:
            response = await answer(request)
        except FanfoldError as error:
            refusal, response = error, refused(error)
        except ClientDisconnect:
            response = Response(status_code=400)
        except OSError as error:
            refusal = unavailable(error)
            response = refused(refusal)
        tell(metrics, request, route, response.status_code, time.monotonic() - began, refusal)
        return response

    return call


def unavailable(error: OSError) -> Busy:
    """Return the error for a store that cannot be used now."""
    why = error.strerror or str(error) or type(error).__name__
    return Busy(503, f"the gateway's store cannot be used now: {why}. Nothing is lost. Try again.", 5.0)


def refused(error: FanfoldError) -> Response:
    """Return the HTTP response for an error."""
    status = _status(error)
    response = as_json({"error": str(error)}, status)
    if status == 401:
        response.headers["www-authenticate"] = "Bearer"
    if isinstance(error, Busy):
        response.headers["retry-after"] = str(max(1, round(error.seconds)))
    return response


def _status(error: FanfoldError) -> int:
    if isinstance(error, Rejected):
        return error.status
    known: tuple[tuple[type[FanfoldError], int], ...] = ((RunNotFound, 404), (RunError, 409), (Forbidden, 403))
    return next((status for kind, status in known if isinstance(error, kind)), 503)  # such as an unusable file


def tell(metrics: Metrics, request: Request, route: str, status: int, seconds: float, refusal: Exception | None = None) -> None:
    """Count a response and log it: failures as warnings, the rest only for debugging, since every batch would be a line."""
    metrics.add("requests_total", route=route, status=str(status))
    level = logging.DEBUG if status < 400 or status == 409 else logging.WARNING
    if not logger.isEnabledFor(level):
        return
    facts = {
        "event": "request",
        "route": route,
        "status": status,
        "ms": round(seconds * 1000, 1),
        "project": request.query_params.get("project", "")[:200] or None,
        "token": getattr(request.state, "token", None),
        "by": getattr(request.state, "by", None),
        "peer": peer_of(request) or None,
    }
    logger.log(level, "%s", refusal or "answered", extra=facts)


def peer_of(request: Request) -> str:
    """Return the address a request came from."""
    return request.client.host if request.client else ""


async def read_body(request: Request, most: int, too_long: str) -> bytes:
    """Return a request's body; refuse it as soon as it exceeds the limit."""
    parts, size, more = [], 0, True
    while more:  # not by request.stream(), which costs as much as all our checks of an append
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part, more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        if size > most:
            raise Rejected(413, too_long)
        parts.append(part)
    return b"".join(parts)


def whole_number(values: Mapping[str, str], name: str, limit: int) -> int:
    """Return a number from a request's headers or query."""
    text = values.get(name)
    if text is None:
        raise Rejected(411 if name == "content-length" else 400, f"the request lacks {name}. Nothing was stored.")
    if not (text.isascii() and text.isdecimal()) or len(text) > 20:
        raise Rejected(400, f"{name} is not a whole number. Nothing was stored.")
    if int(text) > limit:
        raise Rejected(413, f"{name} is {int(text)}, over the limit of {limit}. Nothing was stored.")
    return int(text)
