"""The dashboard as an ASGI app: the built page, its API endpoints, live notices and media.

All URLs are relative to where the app is mounted, so that it works inside another app and under a proxy's path.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from ..errors import FanfoldError, Forbidden, RunNotFound, SettingError
from ..fleet.limits import Busy
from ..fleet.responses import read_body
from ..store.query import Store
from ..stores import open_store
from . import endpoints, media
from .access import Access, access_of, ask, while_it_holds
from .guard import EMBED_POLICY, Guard
from .live import INTERVAL, LiveNotices
from .share import share_token
from .turns import Turns

STATIC = Path(__file__).parent / "static"
MOST_BYTES = 4 << 20  # of a request's body
TOO_LONG = f"the request is longer than {MOST_BYTES} bytes. Nothing was done. Ask for less at a time."


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
    if token == "":
        raise SettingError(
            "app(token='') would let in everybody who sends no token. The server was not started. Pass a token, or None for a "
            "dashboard that asks for none."
        )
    if not guarded and hosts is None and token is None:
        raise SettingError(
            "app(hosts=None) answers to any name, and no token is asked for. The server was not started: any web page could "
            "read the runs. Pass token=…, or name the hosts."
        )
    if not (STATIC / "index.html").is_file():
        raise FanfoldError("the dashboard is not built. The server was not started. In a checkout, run `make web`.")
    served = Starlette(
        routes=[*_routes(), Mount("/", _Page(directory=STATIC, html=True))],
        middleware=[] if guarded else [Middleware(Guard, hosts=hosts, token=token, embed=embed, public=_public())],
        exception_handlers={FanfoldError: _said, OSError: _said, ClientDisconnect: _left},
    )
    reader: Store = store or open_store(dir)

    async def changed(since: int | None) -> tuple[int, list[Any]]:
        return await run_in_threadpool(reader.changed, since or 0)

    served.state.access = None if guarded else Access(reader, write)
    served.state.token = token
    served.state.turns = Turns()
    served.state.notices = LiveNotices(changed, interval)
    return served


class AgentDoor:
    """The tools for agents, over MCP: what a request may see and change is what its caller may on the dashboard."""

    @cached_property
    def _server(self) -> Any:
        from ..tools.mcp import server

        def reach(request: Request) -> tuple[Store, bool]:
            access = access_of(request)
            return access.store, access.write

        return server(reach, ask)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":  # nothing is kept between requests, so there is no stream to open and no session to end
            await Response(status_code=405, headers={"allow": "POST"})(scope, receive, send)
            return
        from ..tools.mcp import over_http

        await over_http(self._server, scope, receive, send)


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
        Route("/api/share", _share),
        Route("/embed", _embed),
        Route("/mcp", AgentDoor()),
        Route("/media", media.blob),
        Route("/html", media.html),
        Route("/cell", media.cell),
        Route("/plot", media.plot),
        Route("/plotly.js", media.plotly),
    ]


def _asked(one: endpoints.Endpoint) -> Callable[[Request], Any]:
    """Wrap an endpoint's function: parse its arguments, run it off the event loop, and encode its result."""

    async def answer(request: Request) -> Response:
        access = access_of(request)
        if one.writes and not access.write and not (one.own and access.user):
            if access.user:
                raise Forbidden("you have read access only. Nothing was changed. Ask the operator of this gateway.")
            raise SettingError("this dashboard is read-only. Nothing was changed. Start it with `fanfold ui --write`.")
        given = one.arguments(request.query_params, await read_body(request, MOST_BYTES, TOO_LONG))
        result = await ask(request, partial(one.function, access.store, **given))
        if isinstance(result, bytes):
            return Response(result, media_type="application/octet-stream")
        if isinstance(result, Iterator):
            return StreamingResponse(result, media_type="application/octet-stream")
        extra = {"write": access.write, **({"user": access.user} if access.user else {})} if one.path == "api/projects" else {}
        return Response(msgspec.json.encode({**result, **extra} if extra else result), media_type="application/json")

    return answer


async def _live(request: Request) -> Response:
    access = access_of(request)
    stream = while_it_holds(request.app.state.notices.stream(access.sees), access)
    return StreamingResponse(stream, media_type="text/event-stream", headers={"x-accel-buffering": "no"})


def _public() -> list[str]:
    """Return the paths of the built files, and of the page for one chart: there is nothing of any run in them."""
    return ["/embed", *(f"/{file.name}" for file in STATIC.iterdir() if file.suffix in (".js", ".css", ".svg"))]


async def _embed(request: Request) -> Response:
    """Serve the page for one chart. A page of another site may show it in a frame, except from a gateway, where people log in."""
    headers = {"cache-control": "no-cache"}
    if request.app.state.access is not None:
        headers["content-security-policy"] = EMBED_POLICY
    return FileResponse(STATIC / "index.html", headers=headers)


async def _share(request: Request) -> Response:
    """Return the token that reads one project, for embedding its charts; empty if this dashboard asks for none."""
    project, token = request.query_params.get("project", ""), request.app.state.token
    if getattr(request.state, "share", None) is not None or request.app.state.access is None:
        raise Forbidden("share links are made on a dashboard that you opened with its own token. Nothing was shared.")
    return Response(msgspec.json.encode({"share": share_token(token, project) if token else ""}), media_type="application/json")


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
    if request.url.path.endswith(("/media", "/html", "/cell", "/plotly.js")):
        return PlainTextResponse(f"{error}\n", code)
    return Response(msgspec.json.encode({"error": str(error)}), code, media_type="application/json")
