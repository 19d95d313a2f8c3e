"""What users logged, as files: with ranges, never sniffed, never run. HTML is shown in a sandbox that can reach nothing."""

from __future__ import annotations

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response

from ..errors import RunNotFound
from ..journal import blobs
from . import data
from .access import access_of
from .guard import MEDIA_POLICY

# What a browser may show by itself. Anything else, SVG and HTML among it, is only handed over as a file.
TYPES = {
    "png": "image/png", "jpg": "image/jpeg", "jpeg": "image/jpeg", "gif": "image/gif", "webp": "image/webp", "bmp": "image/bmp",
    "wav": "audio/wav", "mp3": "audio/mpeg", "ogg": "audio/ogg", "flac": "audio/flac", "m4a": "audio/mp4",
    "mp4": "video/mp4", "webm": "video/webm", "json": "application/json", "txt": "text/plain; charset=utf-8",
}  # fmt: skip
FOREVER = "private, max-age=31536000, immutable"  # a blob's name is the hash of its content


async def blob(request: Request) -> Response:
    """Serve one blob of a run by its name; ranges are answered, so that sound and film can be searched."""
    asked = request.query_params
    run = await run_in_threadpool(data.open_run, access_of(request).store, asked.get("project", ""), asked.get("run", ""))
    path = await run_in_threadpool(run.artifact_file, asked.get("blob", ""))
    if not await run_in_threadpool(blobs.is_here, run.path, path.name):
        raise RunNotFound("there is no such blob in the run. Nothing was read. It may have been pruned, or not copied along.")
    kind = TYPES.get(asked.get("ext", "").lower())
    headers = {"content-security-policy": MEDIA_POLICY, "cache-control": FOREVER}
    name = asked.get("name") or f"{path.name[:12]}.{asked.get('ext', 'bin')}"
    how = "inline" if kind and not asked.get("name") else "attachment"
    return FileResponse(
        path, media_type=kind or "application/octet-stream", headers=headers, filename=name, content_disposition_type=how
    )


async def html(request: Request) -> Response:
    """Serve a logged HTML page into its sandbox."""
    asked = request.query_params
    number = asked.get("n", "0")
    place = int(number) if number.isascii() and number.isdecimal() and len(number) < 10 else -1
    store = access_of(request).store
    point = await run_in_threadpool(
        data.media_point, store, asked.get("project", ""), asked.get("run", ""), asked.get("key", ""), place
    )
    if point.kind != "html":
        raise RunNotFound(f"{point.key!r} is a {point.kind}, not HTML. Nothing was read.")
    loaded = await run_in_threadpool(point.load)
    return HTMLResponse(loaded.html, headers={"content-security-policy": MEDIA_POLICY})
