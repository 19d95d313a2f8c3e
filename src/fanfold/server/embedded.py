"""The dashboard process of a notebook: serves the store in FANFOLD_DIR for as long as its parent process lives."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import threading
from typing import Any

import uvicorn

from ..errors import FanfoldError
from ..store.merge import beside
from ..stores import open_store
from .app import app
from .connections import Connections
from .listen import listen


def serve() -> None:
    """Serve the dashboard on a free port of this machine until the pipe on stdin closes."""
    listeners = listen("localhost", 0)  # before the address is printed: its reader may connect at once
    token = secrets.token_urlsafe(24)  # other users of this machine can reach the port, too
    store = open_store()
    served = app(store=store, embed=True, token=token)
    config = uvicorn.Config(
        served, http=Connections().protocol(), log_level="critical", lifespan="off", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    threading.Thread(target=_watch, args=[server, served.state.notices], daemon=True).start()
    print(json.dumps({"address": f"http://localhost:{listeners[0].getsockname()[1]}/?token={token}"}), flush=True)
    with beside(store):
        server.run(sockets=listeners)


def _watch(server: Any, notices: Any) -> None:
    """Stop the server when its parent process is gone."""
    with contextlib.suppress(OSError):
        while os.read(0, 1024):
            pass
    server.should_exit = True
    notices.close()  # the server would wait for the streams of open pages


if __name__ == "__main__":
    try:
        serve()
    except FanfoldError as error:
        sys.exit(f"fanfold: {error}")
