"""The dashboard as an ASGI app: the built page, its API endpoints, live notices and media.

All URLs are relative to where the app is mounted, so that it works inside another app and under a proxy's path.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ..errors import FanfoldError, Forbidden, RunNotFound, SettingError
from ..fleet.limits import Busy
from ..store.query import Store
from ..stores import open_store
from . import endpoints, media
from .access import Access, access_of, ask, notices
from .guard import Guard
from .live import INTERVAL, Notices
from .turns import Turns

STATIC = Path(__file__).parent / "static"
MOST_BYTES = 4 << 20  # of a request's body


def app(
    dir: str | os.PathLike[str] | None = None,
    *,
    store: Store | None = None,
    write: bool = False,
    token: str | None = None,
    hosts: Iterable[str] | None = (),
    embed: bool = False,
    interval: float = INTERVAL,
    guarded: bool = False,
) -> Starlette:
    """Return the dashboard over the runs in `dir`, ready to serve or to mount in another ASGI app.

    write: allow renaming, tagging, notes, archiving and deleting. token: the token each request must carry. hosts: host
    names to accept besides this machine's own; None accepts any, which is safe only with a token. embed: allow pages of
    other servers on this machine, such as notebooks, to show it in a frame. interval: seconds between checks for changes.
    guarded: the app that mounts this one checks requests, and sets what each may see in `request.state.access`.
    """
    if not guarded and hosts is None and token is None:
        raise SettingError(
            "app(hosts=None) answers to any name, and no token is asked for. The server was not started: any web page could "
            "read the runs. Pass token=…, or name the hosts."
        )
    if not (STATIC / "index.html").is_file():
        raise FanfoldError("the dashboard is not built. The server was not started. In a checkout, run `make web`.")
    served = Starlette(
        routes=[*_routes(), Mount("/", _Page(directory=STATIC, html=True))],
        middleware=[] if guarded else [Middleware(Guard, hosts=hosts, token=token, embed=embed)],
        exception_handlers={FanfoldError: _said, OSError: _said, ClientDisconnect: _left},
    )
    reader: Store = store or open_store(dir)

    async def changed(since: int | None) -> tuple[int, list[Any]]:
        return await run_in_threadpool(reader.changed, since or 0)

    served.state.access = None if guarded else Access(reader, write)
    served.state.turns = Turns()
    served.state.notices = Notices(changed, interval)
    return served


class _Page(StaticFiles):
    """The built files. Their names contain no hash, so browsers revalidate them each time."""

    async def get_response(self, path: str, scope: Any) -> Response:
        response = await super().get_response(path, scope)
        response.headers["cache-control"] = "no-cache"
        return response


def _routes() -> list[Route]:
    listed = [Route(f"/{one.path}", _asked(one), methods=[one.method]) for one in endpoints.ALL]
    return [
        *listed,
        Route("/api/live", _live),
        Route("/api/openapi.json", _openapi),
        Route("/media", media.blob),
        Route("/html", media.html),
    ]


def _asked(one: endpoints.Endpoint) -> Callable[[Request], Any]:
    """Wrap an endpoint's function: parse its arguments, run it off the event loop, and encode its result."""

    async def answer(request: Request) -> Response:
        access = access_of(request)
        if one.writes and not access.write:
            if access.user:
                raise Forbidden("you have read access only. Nothing was changed. Ask the operator of this gateway.")
            raise SettingError("this dashboard is read-only. Nothing was changed. Start it with `fanfold ui --write`.")
        given = one.arguments(request.query_params, await _body(request))
        result = await ask(request, partial(one.function, access.store, **given))
        if isinstance(result, bytes):
            return Response(result, media_type="application/octet-stream")
        if isinstance(result, Iterator):
            return StreamingResponse(result, media_type="application/octet-stream")
        extra = {"write": access.write, **({"user": access.user} if access.user else {})} if one.path == "api/projects" else {}
        return Response(msgspec.json.encode({**result, **extra} if extra else result), media_type="application/json")

    return answer


async def _body(request: Request) -> bytes:
    """Return a request's body, up to a limit."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MOST_BYTES:
            raise SettingError(f"the request is longer than {MOST_BYTES} bytes. Nothing was done. Ask for less at a time.")
        parts.append(part)
    return b"".join(parts)


async def _live(request: Request) -> Response:
    stream = notices(request.app.state.notices.stream(), access_of(request))
    return StreamingResponse(stream, media_type="text/event-stream", headers={"x-accel-buffering": "no"})


async def _openapi(request: Request) -> Response:  # noqa: ARG001 - the interface
    return Response(msgspec.json.encode(endpoints.openapi()), media_type="application/json")


async def _left(request: Request, error: Exception) -> Response:  # noqa: ARG001 - the interface
    return Response(status_code=400)  # reaches nobody: the client disconnected before the request was complete


async def _said(request: Request, error: Exception) -> Response:
    if isinstance(error, OSError):  # such as an unreachable database or a failing disk
        return Response(msgspec.json.encode({"error": f"the store cannot be read now: {error}. Try again."}), 503)
    if isinstance(error, Busy):
        headers = {"retry-after": str(max(1, round(error.seconds)))}
        return Response(msgspec.json.encode({"error": str(error)}), error.status, headers, media_type="application/json")
    code = 404 if isinstance(error, RunNotFound) else 403 if isinstance(error, Forbidden) else 400
    if request.url.path.endswith(("/media", "/html")):
        return PlainTextResponse(f"{error}\n", code)
    return Response(msgspec.json.encode({"error": str(error)}), code, media_type="application/json")
