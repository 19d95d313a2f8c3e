"""Send the runs of this node to a gateway, while they are written and after their processes have ended.

One forwarder serves a directory. It retries forever, keeps one batch in memory, and continues where the
gateway left off after any crash. init() starts one automatically when FANFOLD_SERVER is set.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import threading
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ..errors import SettingError
from ..settings import find_directory, read_file
from ..store.query import LocalStore
from . import output, pushing

if TYPE_CHECKING:
    from ..fleet.forwarder import Forwarder

EXAMPLE = """examples:
  fanfold server forward --to https://runs.example.org      until Ctrl-C; the token comes from FANFOLD_SERVER_TOKEN
  fanfold server forward --once                             everything recorded so far, to FANFOLD_SERVER
  fanfold server forward --to http://gateway:8643 --prune   and delete local journals that have arrived"""

TURN_SECONDS = 10.0


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", metavar="URL", help="the gateway (default: FANFOLD_SERVER)")
    parser.add_argument("--ca", metavar="FILE", help="trusted certificates (default: FANFOLD_SERVER_CA, or the system's)")
    parser.add_argument("--once", action="store_true", help="send everything recorded so far, then exit")
    parser.add_argument("--prune", action="store_true", help="delete journals and blobs here once the gateway has them")
    parser.add_argument("--idle", type=float, metavar="SECONDS", help="exit after this long without new data")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="seconds between checks (default: 1)")
    parser.add_argument(
        "--metrics-port", type=int, metavar="N", help="serve metrics of this node's runs to Prometheus (0: any port)"
    )
    parser.add_argument("--metrics-host", default="127.0.0.1", metavar="ADDRESS", help="where (default: this machine only)")
    pushing.arguments(parser)
    parser.add_argument("--started", action="store_true", help=argparse.SUPPRESS)  # by init(), whose end closes stdin


def run(args: argparse.Namespace) -> int:
    from ..fleet import logs
    from ..fleet.client import Client
    from ..fleet.destination import destination
    from ..fleet.forwarder import Forwarder

    root = find_directory(args.dir)
    gateway = destination(read_file(root), args.to)
    if gateway is None:
        raise SettingError("no gateway is given. Nothing was sent. Pass --to URL, or set FANFOLD_SERVER.")
    client = Client(gateway.url, gateway.token, ca=args.ca or gateway.ca)
    forwarder = Forwarder(root, client, project=args.project, prune=args.prune, interval=max(0.05, args.interval))
    store = LocalStore(root)
    with logs.to_stream("warning" if args.quiet else "info"), pushing.pusher(args, store), _scraped(args, store, gateway.token):
        return _once(args, forwarder) if args.once else _follow(args, forwarder)


def _scraped(args: argparse.Namespace, store: LocalStore, token: str | None) -> AbstractContextManager[None]:
    """Serve metrics to Prometheus meanwhile, if a port was given."""
    if args.metrics_port is None:
        return contextlib.nullcontext()
    from ..fleet.scrape import PATH, Scraped

    try:
        served = Scraped(store, args.metrics_host, args.metrics_port, token=token, project=args.project)
    except (OSError, OverflowError) as error:
        raise SettingError(
            f"port {args.metrics_port} of {args.metrics_host} cannot be used for metrics: {error}. Nothing was sent. "
            "Choose another with --metrics-port."
        ) from error
    print(f"http://{args.metrics_host}:{served.server_address[1]}{PATH}", flush=True)
    return served.beside()


def _once(args: argparse.Namespace, forwarder: Forwarder) -> int:
    from ..fleet.forwarder import only_one

    url = forwarder.client.url
    with only_one(forwarder.root, url):
        arrived = forwarder.once()
    left = [f"{path.parent.name}/{path.name}" for path in sorted(forwarder.left)]
    if left:
        more = f" and {len(left) - 10} more" if len(left) > 10 else ""
        output.remark(args, f"not delivered, because {url} has deleted or moved them: {', '.join(left[:10])}{more}.")
    else:
        output.remark(args, f"all runs are delivered to {url}." if arrived else f"not all runs are delivered to {url} yet.")
    return 0 if arrived else 1


def _follow(args: argparse.Namespace, forwarder: Forwarder) -> int:
    from ..fleet.forwarder import Taken, follow
    from ..journal.spool import is_network
    from ..relay.process import stopped_by_signals

    wake = threading.Event()
    if args.started:
        threading.Thread(target=_await_end, args=(wake,), daemon=True).start()
    with stopped_by_signals(wake) as stop:
        while not stop.is_set():
            try:
                follow(forwarder, wake, stop, idle=args.idle)
                break
            except Taken:
                if not args.started:
                    raise
                # Another forwarder is active. Where nodes share the directory, it may end with its node, so wait for a turn.
                if not is_network(forwarder.root) or wake.wait(TURN_SECONDS):
                    break
    return 0


def _await_end(wake: threading.Event) -> None:
    while os.read(0, 4096):  # sys.stdin has a lock: Python aborts if it exits while a thread waits for input there
        pass
    wake.set()
