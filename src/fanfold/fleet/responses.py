"""A gateway's responses and request logs, the same for its API and for its dashboard."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ..errors import FanfoldError, Forbidden, RunError, RunNotFound
from .limits import Busy
from .metrics import Metrics
from .wire import Refused

logger = logging.getLogger("fanfold.gateway")


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
    if isinstance(error, Refused):
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
        "peer": request.client.host if request.client else None,
    }
    logger.log(level, "%s", refusal or "answered", extra=facts)
