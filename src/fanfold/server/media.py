"""Logged media as files: with range requests, never sniffed, never executed. HTML is shown in an isolated sandbox."""

from __future__ import annotations

import importlib.util
import os
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.types import Receive, Scope, Send

from ..errors import JournalError, RunNotFound
from ..journal import blobs
from ..store.query import Store
from . import data, samples
from .access import access_of, ask
from .guard import MEDIA_POLICY, PLOT_POLICY

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


async def cell(request: Request) -> Response:
    """Serve an image, audio or video in a cell of a logged table."""
    asked = request.query_params
    project, run, key = (asked.get(name, "") for name in ("project", "run", "key"))
    n, row, column = (_whole(asked.get(name, "")) for name in ("n", "row", "column"))
    content, ext = await ask(request, partial(samples.cell, access_of(request).store, project, run, key, n, row, column))
    kind = TYPES.get(ext.lower())
    headers = {"content-security-policy": MEDIA_POLICY}
    if not kind:
        headers["content-disposition"] = f'attachment; filename="cell.{ext if ext.isalnum() else "bin"}"'
    return Response(content, headers=headers, media_type=kind or "application/octet-stream")


def _whole(text: str) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1


# A page that draws one figure. It holds nothing itself: the dashboard sends it the script and the figure.
PLOT_PAGE = """<!doctype html><meta charset="utf-8"><title>figure</title>
<style>html, body, #plot { margin: 0; height: 100%; background: #fff }</style><div id="plot"></div>
<script>
addEventListener('message', async (event) => {
  if (event.source !== parent || !event.data || !event.data.figure) return;
  try {
    if (!window.Plotly) {
      const script = document.createElement('script');
      script.textContent = event.data.script;
      document.head.append(script);
    }
    const { data, layout, frames } = event.data.figure;
    const fitted = { ...(layout || {}), autosize: true };
    delete fitted.width;
    delete fitted.height;
    const config = { responsive: true, displaylogo: false };
    await Plotly.newPlot('plot', { data: data || [], layout: fitted, frames: frames || [], config });
    parent.postMessage({ plot: 'drawn' }, '*');
  } catch (error) {
    parent.postMessage({ plot: 'failed', why: String(error) }, '*');
  }
});
parent.postMessage({ plot: 'ready' }, '*');
</script>
"""


async def plot(request: Request) -> Response:  # noqa: ARG001 - the interface
    """Serve the page in which Plotly figures are drawn, in a sandbox."""
    return HTMLResponse(PLOT_PAGE, headers={"content-security-policy": PLOT_POLICY})


async def plotly(request: Request) -> Response:  # noqa: ARG001 - the interface
    """Serve the script of the installed plotly package, which is not imported for it."""
    found = importlib.util.find_spec("plotly")
    script = Path(found.origin).parent / "package_data" / "plotly.min.js" if found and found.origin else None
    if script is None or not script.is_file():
        raise RunNotFound("plotly is not installed beside this dashboard. Nothing was read. Run: pip install plotly")
    return FileResponse(script, media_type="text/javascript")


async def html(request: Request) -> Response:
    """Serve logged HTML, sandboxed."""
    asked = request.query_params
    place = _whole(asked.get("n", "0"))
    project, run, key = asked.get("project", ""), asked.get("run", ""), asked.get("key", "")
    text = await ask(request, partial(_html, access_of(request).store, project, run, key, place))
    return HTMLResponse(text, headers={"content-security-policy": MEDIA_POLICY})


def _html(store: Store, project: str, id: str, key: str, place: int) -> str:
    point = data.media_point(store, project, id, key, place)
    if point.kind != "html":
        raise RunNotFound(f"{point.key!r} is a {point.kind}, not HTML. Nothing was read.")
    return str(point.load().html)
