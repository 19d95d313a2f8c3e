"""A gateway's dashboard, at /ui/: logged-in users see the projects they may read, and nothing else."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import FanfoldError, Forbidden
from ..fleet.grants import Holder, Person
from ..fleet.responses import answered, peer_of, refused, tell, unavailable, whole_number
from ..fleet.tokens import READ
from ..fleet.views import ProjectsView
from ..fleet.wire import Rejected
from ..store.query import Store
from .access import Access
from .app import MOST_BYTES
from .app import app as dashboard
from .login import Entrance, Logins

if TYPE_CHECKING:
    from .gateway import Gateway

HOME = "/ui"


def routes(gateway: Gateway, logins: Logins, store: Store) -> list[BaseRoute]:
    """Return the dashboard's routes; the login is open, everything else is behind the gate."""
    page, entrance = dashboard(store=store, guarded=True), Entrance(gateway, logins)
    gateway.notices, page.state.turns = page.state.notices, gateway.turns
    ways = (
        ("/login", "GET", entrance.show),
        ("/login", "POST", entrance.log_in),
        ("/logout", "POST", entrance.log_out),
        ("/oidc/start", "GET", entrance.start),
        ("/oidc/callback", "GET", entrance.finish),
    )
    inside = [Route(path, answered(gateway.metrics, HOME + path, way), methods=[method]) for path, method, way in ways]
    behind = Gate(gateway, logins, store, page)
    return [
        Route("/", _to("ui/")),
        Route(HOME, _to("ui/")),
        Route("/mcp", behind),
        Mount(HOME, routes=[*inside, Mount("/", behind)]),
    ]


def _to(place: str) -> ASGIApp:
    """Return a redirect to a relative URL: a proxy may serve us under another path."""
    return RedirectResponse(place, 307)


class Gate:
    """The app in front of the dashboard: refuses unknown callers, and attaches to each request what its caller may see."""

    def __init__(self, gateway: Gateway, logins: Logins, store: Store, page: ASGIApp) -> None:
        self.gateway = gateway
        self.logins = logins
        self.store = store
        self.page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request, began, status = Request(scope), time.monotonic(), 0
        refusal: FanfoldError | None = None

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            access = await self._found(request)
            read_only = request.method in ("GET", "HEAD")
            size = 0 if read_only else whole_number(request.headers, "content-length", MOST_BYTES)
            with self.gateway.budget.reserve(size) if size else nullcontext():
                inner = {**scope, "state": {**scope.get("state", {}), "access": access}}
                await self.page(inner, receive, noted)
        except FanfoldError as error:
            if status:
                raise
            refusal = error
            await (_login(request, error) or refused(error))(scope, receive, noted)
        finally:
            tell(self.gateway.metrics, request, HOME, status, time.monotonic() - began, refusal)

    async def _found(self, request: Request) -> Access:
        try:
            return await run_in_threadpool(self._access, request)
        except OSError as error:
            raise unavailable(error) from error

    def _access(self, request: Request) -> Access:
        """Return the caller's access, or raise."""
        holder = self.logins.caller(request)
        if holder is None:
            if "authorization" in request.headers:
                raise self.gateway.stranger(request)
            raise Rejected(401, "you are not logged in. Nothing was read. Load the page again to log in.")
        request.state.by = holder.label
        if isinstance(holder, Person) and not holder.rights:
            raise Forbidden(f"no project is open to {holder.label}. Nothing was read. Ask whoever runs this gateway.")
        return self._access_of(request, holder)

    def _access_of(self, request: Request, holder: Holder) -> Access:
        def sees(project: str) -> bool:
            return holder.allows(READ, project)

        def holds() -> bool:
            return self.logins.caller(request) == holder  # a stream ends when rights change; the browser reopens it

        # Its callers are not told where on its machine a gateway keeps its runs.
        view = ProjectsView(self.store, sees, self.gateway.change.by(holder, peer_of(request)), place="this gateway")
        return Access(view, holder.may_write, holder.label, sees, holds)


def _login(request: Request, error: FanfoldError) -> Response | None:
    """Return a redirect to the login for a browser that was refused; None for other clients."""
    turned_away = isinstance(error, Forbidden) or (isinstance(error, Rejected) and error.status == 401)
    opens = request.method == "GET" and "text/html" in request.headers.get("accept", "")
    if not (turned_away and opens) or "authorization" in request.headers:
        return None
    inside = request.url.path.removeprefix(request.scope.get("root_path", "")).strip("/")
    return RedirectResponse("../" * inside.count("/") + "login", 303)
