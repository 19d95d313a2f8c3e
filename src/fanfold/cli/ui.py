"""Open the dashboard: every run, live, in the browser.

By default it listens on this machine only and is read-only. The printed address carries a token, new at
each start (or taken from FANFOLD_TOKEN), because other users of this machine can reach its ports, too.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import socket
import sys
import threading
import webbrowser
from types import FrameType
from typing import Any
from urllib.parse import quote

from ..errors import FanfoldError, missing_extra
from ..settings import resolve
from ..store.merge import beside
from ..stores import open_store
from . import output

EXAMPLE = """examples:
  fanfold ui
  fanfold ui --dir /data/runs --port 8080
  fanfold ui --host 0.0.0.0          then open the address with its token from another machine
  ssh -L 8642:localhost:8642 node    then `fanfold ui` there, and open the address it prints here"""

PORT = 8642
TRIES = 20
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, metavar="N", help=f"the port (default: {PORT}, or the next that is free)")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (default: this machine only)")
    parser.add_argument("--open", action="store_true", help="open the browser")
    parser.add_argument(
        "--no-token", action="store_true", help="require no token: every user of this machine can then read the runs"
    )
    parser.add_argument("--write", action="store_true", help="allow renaming, tags, notes, archiving and deleting")
    parser.add_argument("--allow-host", action="append", default=[], metavar="NAME",
                        help="also answer to this name, such as a proxy's (repeatable)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    try:
        import uvicorn

        from ..server import app
        from ..server.connections import Connections
    except ImportError as error:
        raise missing_extra("starlette and uvicorn", "all", "the dashboard") from error
    local = args.host in LOOPBACK
    if args.no_token and not local:
        raise FanfoldError(
            f"--no-token works on this machine only, and {args.host} can be reached from elsewhere. The dashboard was not "
            "started: anybody could read the runs. Leave one of the two out."
        )
    token = None if args.no_token else resolve("token") or secrets.token_urlsafe(24)
    store = open_store(args.dir)
    served = app(store=store, write=args.write, token=token, hosts=args.allow_host if local else None)
    listener = _listen(args.host, args.port)
    addresses = [_address(args, name, listener.getsockname()[1], token) for name in _names(args.host)]
    _say(args, addresses)

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            served.state.notices.close()  # open pages hold a stream each; without this the server would wait for them
            super().handle_exit(sig, frame)

    server = Server(
        uvicorn.Config(served, http=Connections().protocol(), log_level="warning", lifespan="off", timeout_graceful_shutdown=3)
    )
    if args.open:
        threading.Timer(0.3, webbrowser.open, [addresses[0]]).start()
    with beside(store):
        server.run(sockets=[listener])
    return 0


def _listen(host: str, port: int | None) -> socket.socket:
    """Bind the port asked for, or the first free one from the usual on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reason: OSError | None = None
    for number in [port] if port is not None else range(PORT, PORT + TRIES):
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, number))
            listener.listen(2048)  # from here on a browser may come; it waits until the server is up
        except (OSError, OverflowError) as error:
            listener.close()
            reason = error if isinstance(error, OSError) else OSError(str(error))
        else:
            return listener
    which = f"port {port}" if port is not None else f"any port from {PORT} to {PORT + TRIES - 1}"
    raise FanfoldError(f"cannot listen on {host}, {which}: {reason}. The dashboard was not started. Try another --port.")


def _names(host: str) -> list[str]:
    """Return the names a browser can use for this address: for all addresses, the local name and those that others see."""
    if host in LOOPBACK:
        return ["localhost"]
    if host not in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        return [host]
    name = socket.getfqdn()
    seen = [name] if "." in name and not name.startswith("localhost") else []
    return list(dict.fromkeys(["localhost", *seen, *_outward()]))


def _outward() -> list[str]:
    """Return the address by which other machines reach this one, if it has one. No packet is sent for it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # an address of documentation: only the route counts
        return [str(probe.getsockname()[0])]
    with contextlib.suppress(OSError):
        return [
            str(row[4][0])
            for row in socket.getaddrinfo(socket.gethostname(), None)
            if not str(row[4][0]).startswith(("127.", "::1"))
        ]
    return []


def _address(args: argparse.Namespace, name: str, port: int, token: str | None) -> str:
    shown = f"[{name}]" if ":" in name else name
    query = f"?token={token}" if token else ""
    project: Any = f"#p={quote(args.project)}" if args.project else ""
    return f"http://{shown}:{port}/{query}{project}"


def _say(args: argparse.Namespace, addresses: list[str]) -> None:
    if args.json:
        print(
            json.dumps({"address": addresses[0], "addresses": addresses})
        )  # one line: the command goes on, and its reader must know where it ends
    else:
        print("\n".join(addresses))
        output.remark(args, "Ctrl-C stops it." + ("" if args.write else " Read-only; --write allows changes."))
    sys.stdout.flush()
