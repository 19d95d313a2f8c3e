"""What a request may see and change. A local dashboard has one access for everybody; a gateway makes one per caller."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from ..store.query import Store
from .turns import Turns

T = TypeVar("T")
STILL_HERE = b": still here\n\n"


@dataclass(frozen=True)
class Access:
    """A store as one caller sees it. `sees` and `holds` are set where access is limited to some projects, or can be revoked."""

    store: Store
    write: bool
    user: str = ""
    sees: Callable[[str], bool] | None = None  # a project, by its name
    holds: Callable[[], bool] | None = None  # False once access was revoked or has expired


def access_of(request: Request) -> Access:
    """Return a request's access: set by the gateway's gate, else the app's own."""
    access: Access = getattr(request.state, "access", None) or request.app.state.access
    return access


async def ask(request: Request, question: Callable[[], T]) -> T:
    """Run a store query in a thread, when it is the caller's turn."""
    access, client = access_of(request), request.client
    turns: Turns = request.app.state.turns
    return await turns.run(access.user or (client.host if client else ""), question)


class _Changed(msgspec.Struct, forbid_unknown_fields=True):
    runs: list[tuple[str, str]] | None


async def notices(stream: AsyncIterator[bytes], access: Access) -> AsyncIterator[bytes]:
    """Pass on notices about the runs a caller may see, for as long as their access holds."""
    async with aclosing(cast("AsyncGenerator[bytes, None]", stream)):  # so that the watcher learns at once when a page closes
        async for notice in stream:
            if access.holds is not None and not await run_in_threadpool(access.holds):
                return
            yield notice if access.sees is None else visible(notice, access.sees)


def visible(notice: bytes, sees: Callable[[str], bool]) -> bytes:
    """Return a notice without the runs a caller may not see; if nothing is left or it is not understood, a comment line."""
    head, _, body = notice.partition(b"data: ")
    if not body or body.strip() == b"{}":
        return notice
    try:
        runs = msgspec.json.decode(body, type=_Changed).runs
    except msgspec.MsgspecError:
        return STILL_HERE
    if runs is None:
        return notice
    kept: list[Any] = [run for run in runs if sees(run[0])]
    return head + b"data: " + msgspec.json.encode({"runs": kept}) + b"\n\n" if kept else STILL_HERE
