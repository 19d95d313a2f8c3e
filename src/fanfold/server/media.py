"""Logged media as files: with range requests, never sniffed, never executed. HTML is shown in an isolated sandbox."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, BinaryIO

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.types import Receive, Scope, Send

from ..errors import JournalError, RunNotFound
from ..journal import blobs
from ..store.query import Store
from . import data
from .access import access_of, ask
from .guard import MEDIA_POLICY

# Types a browser may display. Everything else, including SVG and HTML, is only offered as a download.
TYPES = {
    "png": "image/png", "jpg": "image/jpeg", "jpeg": "image/jpeg", "gif": "image/gif", "webp": "image/webp", "bmp": "image/bmp",
    "wav": "audio/wav", "mp3": "audio/mpeg", "ogg": "audio/ogg", "flac": "audio/flac", "m4a": "audio/mp4",
    "mp4": "video/mp4", "webm": "video/webm", "json": "application/json", "txt": "text/plain; charset=utf-8",
}  # fmt: skip
FOREVER = "private, max-age=31536000, immutable"  # a blob's name is the hash of its content


class OpenFile(FileResponse):
    """A response from an already open file: the file that was checked is the one sent, whatever happens to its path."""

    def __init__(self, file: BinaryIO, **how: Any) -> None:
        super().__init__(f"/dev/fd/{file.fileno()}", stat_result=os.fstat(file.fileno()), **how)
        self.file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.file:  # without the extensions: a server that sends files itself would open the path later
            await super().__call__({**scope, "extensions": {}}, receive, send)


async def blob(request: Request) -> Response:
    """Serve a run's blob by name, with range requests, so that players can seek in audio and video."""
    asked = request.query_params
    store, project, run, wanted = access_of(request).store, asked.get("project", ""), asked.get("run", ""), asked.get("blob", "")
    file = await ask(request, partial(_opened, store, project, run, wanted))
    kind = TYPES.get(asked.get("ext", "").lower())
    headers = {"content-security-policy": MEDIA_POLICY, "cache-control": FOREVER}
    name = asked.get("name") or f"{wanted[:12]}.{asked.get('ext', 'bin')}"
    how = "inline" if kind and not asked.get("name") else "attachment"
    return OpenFile(
        file, media_type=kind or "application/octet-stream", headers=headers, filename=name, content_disposition_type=how
    )


def _opened(store: Store, project: str, id: str, name: str) -> BinaryIO:
    run = data.open_run(store, project, id)
    run.artifact_file(name)  # downloads it if the store keeps it elsewhere
    try:
        return blobs.opened(run.path, name)
    except (OSError, JournalError) as error:
        raise RunNotFound(
            "there is no such blob in the run. Nothing was read. It may have been pruned, or not copied along."
        ) from error


async def html(request: Request) -> Response:
    """Serve logged HTML, sandboxed."""
    asked = request.query_params
    number = asked.get("n", "0")
    place = int(number) if number.isascii() and number.isdecimal() and len(number) < 10 else -1
    project, run, key = asked.get("project", ""), asked.get("run", ""), asked.get("key", "")
    text = await ask(request, partial(_html, access_of(request).store, project, run, key, place))
    return HTMLResponse(text, headers={"content-security-policy": MEDIA_POLICY})


def _html(store: Store, project: str, id: str, key: str, place: int) -> str:
    point = data.media_point(store, project, id, key, place)
    if point.kind != "html":
        raise RunNotFound(f"{point.key!r} is a {point.kind}, not HTML. Nothing was read.")
    return str(point.load().html)
