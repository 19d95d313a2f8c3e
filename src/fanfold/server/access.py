"""What a request may see and change. A local dashboard has one access for everybody; a gateway makes one per caller."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from ..fleet.limits import party
from ..fleet.responses import peer_of
from ..fleet.views import ProjectsView
from ..store.query import Store
from .turns import Turns

T = TypeVar("T")


@dataclass(frozen=True)
class Access:
    """A store as one caller sees it. `sees` and `holds` are set where access is limited to some projects, or can be revoked."""

    store: Store
    write: bool
    user: str = ""
    sees: Callable[[str], bool] | None = None  # a project, by its name
    holds: Callable[[], bool] | None = None  # False once access was revoked or has expired


def access_of(request: Request) -> Access:
    """Return a request's access: set by the gateway's gate, else the app's own; with a share link, to one project only."""
    access: Access = getattr(request.state, "access", None) or request.app.state.access
    project: str | None = getattr(request.state, "share", None)
    if project is None:
        return access

    def sees(name: str) -> bool:
        return name == project

    return Access(ProjectsView(access.store, sees, access.store.changes), write=False, sees=sees)


async def ask(request: Request, question: Callable[[], T]) -> T:
    """Run a store query in a thread, when it is the caller's turn."""
    access = access_of(request)
    turns: Turns = request.app.state.turns
    return await turns.run(access.user or party(peer_of(request)), question)


async def while_it_holds(stream: AsyncGenerator[bytes, None], access: Access) -> AsyncIterator[bytes]:
    """Pass on notices for as long as the caller's access holds."""
    async with aclosing(stream):  # so that the watcher learns at once when a page closes
        async for notice in stream:
            if access.holds is not None and not await run_in_threadpool(access.holds):
                return
            yield notice
