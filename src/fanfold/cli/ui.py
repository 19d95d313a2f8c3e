"""Open the dashboard: every run, live, in the browser.

By default it listens on this machine only and is read-only. The printed address carries a token, new at
each start (or taken from FANFOLD_TOKEN), because other users of this machine can reach its ports too.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING
from urllib.parse import quote

from ..errors import FanfoldError, guard, missing_extra
from ..settings import find_directory, resolve
from ..store.merge import beside
from ..store.query import LocalStore, Store
from ..store.several import SeveralStores
from ..stores import open_store
from . import output
from .browser import opening
from .listen import LOOPBACK, listen, url

if TYPE_CHECKING:
    from ..notify.watch import LocalWatch

EXAMPLE = """examples:
  fanfold ui
  fanfold ui ./runs ./wandb ./mlruns  runs of other tools, imported and followed live
  fanfold ui --dir /data/runs --port 8080
  fanfold ui --host 0.0.0.0          then open the address with its token from another machine
  ssh -L 8642:localhost:8642 node    then `fanfold ui` there, and open the address it prints here"""

PORT = 8642
TRIES = 20


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", metavar="PATH", nargs="*",
        help="directories of runs, and folders of other tools, such as ./runs ./wandb ./mlruns: imported into your cache and "
        "followed live (default: as --dir)",
    )  # fmt: skip
    parser.add_argument("--port", type=int, metavar="N", help=f"the port (default: {PORT}, or the next free one)")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (default: this machine only)")
    parser.add_argument("--open", action="store_true", help="open the browser")
    parser.add_argument("--no-token", action="store_true", help="no token: every user of this machine can read the runs")
    parser.add_argument("--write", action="store_true", help="allow renaming, tags, notes, archiving and deleting")
    parser.add_argument("--allow-host", action="append", default=[], metavar="NAME", help="also answer to this name (repeatable)")


def run(args: argparse.Namespace) -> int:
    from ..transfer.follower import following

    store, foreign = _opened(args)
    with following(foreign):  # first: it imports while this process is still starting
        return _serve(args, store)


def _serve(args: argparse.Namespace, store: Store) -> int:
    try:
        import uvicorn

        from ..notify.watch import watching
        from ..server import app
        from ..server.connections import Connections
    except ImportError as error:
        raise missing_extra("starlette and uvicorn", "all", "the dashboard") from error
    local = args.host in LOOPBACK
    if args.no_token and not local:
        raise FanfoldError(
            f"--no-token does not go with --host {args.host}: anybody could read the runs. The dashboard was not started. Leave "
            "one of the two out."
        )
    token = None if args.no_token else resolve("token") or secrets.token_urlsafe(24)
    served = app(store=store, write=args.write, token=token, hosts=args.allow_host if local else None)
    listeners = listen(args.host, range(PORT, PORT + TRIES) if args.port is None else [args.port], "The dashboard")
    page = (f"?token={token}" if token else "") + (f"#p={quote(args.project)}" if args.project else "")
    addresses = [f"{url('http', name, listeners)}/{page}" for name in _names(args.host)]
    if args.json:  # on one line: the command keeps running, and its reader needs to know where the document ends
        output.print_json({"address": addresses[0], "addresses": addresses}, line=True)
    else:
        print("\n".join(addresses))
        output.remark(args, "Ctrl-C stops it." + ("" if args.write else " Read-only; --write allows changes."))
    sys.stdout.flush()

    browser = contextlib.ExitStack()

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            served.state.notices.close()  # each open page holds a stream, which the server would wait for
            browser.close()  # now: a signal ends this process as soon as the server has stopped
            super().handle_exit(sig, frame)

    server = Server(
        uvicorn.Config(served, http=Connections().protocol(), log_level="warning", lifespan="off", timeout_graceful_shutdown=3)
    )
    import numpy  # noqa: F401 - charts need it, and journals are read faster once it is there

    with browser, beside(store), watching(_watch(args, store)):
        if args.open:
            browser.enter_context(opening(addresses[0]))
        server.run(sockets=listeners)
    return 0


def _watch(args: argparse.Namespace, store: Store) -> LocalWatch | None:
    """Return what applies the rules of the dashboard and sends what a killed notifier left; it writes, so --write is needed."""
    from ..notify.options import NotifyOptions, read_options
    from ..notify.watch import LocalWatch

    if not args.write or not isinstance(store, (LocalStore, SeveralStores)):  # a database has a gateway for this
        return None
    options = NotifyOptions()
    with guard("read who is notified"):
        options = read_options()
    return LocalWatch(store, options)


def _opened(args: argparse.Namespace) -> tuple[Store, list[Path]]:
    """Return the store to show, and the folders of other tools that are imported into a part of it."""
    if not args.paths:
        return open_store(args.dir), []
    from ..transfer.follower import cache_of, own_runs

    roots: list[Path] = [find_directory(args.dir)] if args.dir else []
    foreign: list[Path] = []
    for word in args.paths:
        path = Path(word).expanduser().absolute()
        if not path.exists():
            raise FanfoldError(f"{word} does not exist. The dashboard was not started. Check the path.")
        own = own_runs(path)
        roots += [own] if own is not None else []
        if own != path:
            foreign.append(path)
            roots.append(cache_of(path))
    for root in roots:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
    stores = [LocalStore(root) for root in dict.fromkeys(roots)]
    return (stores[0] if len(stores) == 1 else SeveralStores(stores)), foreign


def _names(host: str) -> list[str]:
    """Return the host names a browser can use: if we listen on all addresses, the local one and those that others reach."""
    if host in LOOPBACK:
        return ["localhost"]
    if host not in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        return [host]
    name = socket.getfqdn()
    seen = [name] if "." in name and not name.startswith("localhost") else []
    return list(dict.fromkeys(["localhost", *seen, *_outward()]))


def _outward() -> list[str]:
    """Return the address by which other machines reach this one, if there is one. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # reserved for documentation; only the route matters
        return [str(probe.getsockname()[0])]
    with contextlib.suppress(OSError):
        return [
            str(row[4][0])
            for row in socket.getaddrinfo(socket.gethostname(), None)
            if not str(row[4][0]).startswith(("127.", "::1"))
        ]
    return []
