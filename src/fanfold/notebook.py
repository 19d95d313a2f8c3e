"""The dashboard inside a notebook: `fanfold.ui()` starts it in its own process and shows it in a frame.

The server takes no time from training in the same kernel, and ends with it: it watches a pipe that closes when this
process ends, however it ends. `server/embedded.py` is that process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .drawing.markup import STYLE, Markup, join, tag
from .drawing.numbers import moment
from .errors import FanfoldError, missing_extra, notices, outcome
from .process import module_command
from .settings import find_directory, is_address, store_address

HEIGHT = 640
STOP_SECONDS = 5.0
# Shows the frame once the dashboard in it reports that it has loaded: in a saved notebook that is opened later, no server
# answers, and the picture stays.
_SHOW = """(() => {
  const box = document.getElementById('%s'), frame = box.querySelector('iframe');
  addEventListener('message', (event) => {
    if (event.source !== frame.contentWindow || event.data !== 'fanfold') return;
    box.querySelector('.ff-live').style.display = 'block';
    box.querySelector('.ff-still').style.display = 'none';
  });
  frame.src = frame.dataset.src;
})();"""
_servers: dict[str, DashboardServer] = {}  # by store address
_lock = threading.Lock()


class DashboardServer:
    """The dashboard process of one store."""

    def __init__(self, store: str) -> None:
        self.store = store
        path = [str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        # In its own session: Ctrl-C in a terminal is meant for the training.
        self._process = subprocess.Popen(
            module_command("fanfold.server.embedded"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": "",
                 "FANFOLD_DIR": store},  # an address may contain a password, which a command line would expose
        )  # fmt: skip
        self._owner = os.getpid()
        self.address = self._address()

    def _address(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failed()
        return str(json.loads(line)["address"])

    def _failed(self) -> FanfoldError:
        _, said = self._process.communicate()
        last = said.strip().removeprefix("fanfold: ").splitlines()[-1:] or ["it exited without a message"]
        return FanfoldError(f"the dashboard did not start: {last[0]} Runs are not affected. Try `fanfold ui` in a terminal.")

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """End the process, unless called in a forked child."""
        if os.getpid() != self._owner:
            return
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):
                pipe and pipe.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Page:
    """The dashboard as the result of a cell: a frame in a notebook, `.url` anywhere; `.stop()` ends it."""

    def __init__(self, server: DashboardServer, fragment: str, height: int) -> None:
        self._server = server
        self.url = f"{server.address}{fragment}"
        self.height = height

    def stop(self) -> None:
        """Stop the server; other frames of the same store stop with it."""
        with _lock:
            if _servers.get(self._server.store) is self._server:
                del _servers[self._server.store]
        self._server.stop()

    def __repr__(self) -> str:
        return f"<fanfold ui {self.url}{'' if self._server.running else ', stopped'}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": repr(self), "text/html": str(frame(self.url, self.height))}


def ui(run: Any = None, *, dir: str | os.PathLike[str] | None = None, height: int = HEIGHT) -> Page:
    """Show the dashboard in this notebook, opened at `run` if given; in a terminal, print its address.

    It is read-only, and reachable from this machine only. A second call reuses the running server.

    Args:
        run: A run or a stored run.
        dir: Where the runs are.
        height: The height of the frame in pixels.

    Returns:
        An object that a notebook shows as a frame.

    Raises:
        MissingExtra: The server's libraries are not installed.

    Example:
        ```python
        import fanfold

        run = fanfold.init("llm")
        page = fanfold.ui(run, height=400)
        ```
    """
    page = open_page(run, dir=dir, height=height)
    if not in_notebook():
        print(page.url)
    return page


def open_page(run: Any = None, *, dir: str | os.PathLike[str] | None = None, height: int = HEIGHT) -> Page:
    """Start the dashboard's process unless it runs, and return the dashboard, opened at a run."""
    return Page(_server(_store(run, dir)), fragment(run), height)


def _store(run: Any, dir: str | os.PathLike[str] | None) -> str:
    """Return the store address of a run, else the one given."""
    if run is not None and dir is None:
        return str(getattr(run, "store", Path(run.path).parent.parent))  # a run of this process writes to a directory
    given = store_address(dir)
    return str(given) if is_address(given) else str(find_directory(dir))


def fragment(run: Any) -> str:
    """Return the URL fragment of a run in the dashboard."""
    return "" if run is None else f"#p={quote(run.project, safe='')}&v=run&r={quote(run.id, safe='')}"


def _server(store: str) -> DashboardServer:
    with _lock:
        found = _servers.get(store)
        if found is None or not found.running:
            if not all(map(find_spec, ("starlette", "uvicorn"))):
                raise missing_extra("starlette and uvicorn", "all", "the dashboard")
            found = _servers[store] = DashboardServer(store)
            atexit.register(found.stop)
        return found


_FRAME = "border:1px solid #8884;border-radius:7px"


def _link(url: str) -> Markup:
    link = tag("a", url, href=url, target="_blank", rel="noreferrer noopener")
    return tag("div", link, style="font:12px system-ui,sans-serif;margin-bottom:4px")


def frame(url: str, height: int) -> Markup:
    """Return the dashboard in a frame, with its address above for notebooks that do not show frames."""
    inside = tag("iframe", src=url, width="100%", height=max(120, int(height)), title="fanfold", style=_FRAME)
    return tag("div", _link(url), inside)


def live_or_still(url: str, height: int, picture: object) -> Markup:
    """Return a frame with the dashboard, shown while its server answers, and a picture, shown otherwise."""
    inside = tag("iframe", data_src=url, width="100%", height=max(120, int(height)), title="fanfold", style=_FRAME)
    live = tag("div", _link(url), inside, class_="ff-live", style="display:none")
    id = f"ff-{secrets.token_hex(8)}"
    return tag("div", live, tag("div", picture, class_="ff-still"), tag("script", Markup(_SHOW % id)), id=id)


def shown(picture: object, runs: Sequence[Any]) -> str:
    """Return runs as a notebook shows them: live while they are running, else as a picture.

    A live view also contains a current picture, shown when the dashboard's server is gone, as in a saved notebook that is
    opened later.
    """
    inside = tag("div", live(runs, picture) or picture, class_="fanfold", style="padding:12px;border-radius:7px")
    return str(join([tag("style", Markup(STYLE)), inside]))


def live(runs: Sequence[Any], picture: object) -> Markup | None:
    """Return a live frame of runs that are still running, with their picture as fallback; None if that is not possible.

    This starts the dashboard. Without the packages it needs, only the picture is shown.
    """
    going = [run for run in runs if run.status == "running"]
    if not going or not in_notebook():
        return None
    server, error = outcome(lambda: _server(_store(going[0], None)))
    if server is None:
        notices.once("notebook", f"the run is shown as a picture, not live: {error}")
        return None
    place = fragment(going[0]) if len(runs) == 1 else f"#p={quote(going[0].project, safe='')}"
    now = tag("p", f"as of {moment(time.time())}", class_="dim", style="margin:0 0 4px")
    return live_or_still(f"{server.address}{place}", HEIGHT, join([now, picture]))


def in_notebook() -> bool:
    """Return whether a notebook shows the results of this process: a Jupyter kernel, not IPython in a terminal."""
    shell = sys.modules.get("IPython")
    current = shell.get_ipython() if shell is not None else None
    return getattr(current, "kernel", None) is not None
