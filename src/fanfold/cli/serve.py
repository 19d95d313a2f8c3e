"""Run a gateway: collect the runs of many nodes in one store that every fanfold command reads, and show them at /ui/.

By default it listens on this machine only; any other address needs tokens (`fanfold server token create`).
Any number of gateways may serve one directory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from ..errors import SettingError
from ..settings import is_address
from ..store.merge import beside
from ..store.query import LocalStore
from . import logins, output, places, pushing
from .listen import LOOPBACK, listen, url

if TYPE_CHECKING:
    from ..fleet.tokens import TokenBook
    from ..notify.options import NotifyOptions
    from ..notify.watch import StoreWatch
    from .places import StoreParts

EXAMPLE = """examples:
  fanfold server start --store /data/runs
  fanfold server token create cluster-a --store /data/runs --for llm --scope write
  fanfold server start --store /data/runs --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem"""

PORT = 8643


def arguments(parser: argparse.ArgumentParser) -> None:
    places.arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (default: this machine only)")
    parser.add_argument("--port", type=int, default=PORT, metavar="N", help=f"the port (default: {PORT}; 0: any that is free)")
    parser.add_argument("--tls-cert", metavar="FILE", help="a certificate, to speak TLS")
    parser.add_argument("--tls-key", metavar="FILE", help="its key")
    parser.add_argument(
        "--allow-delete", action="store_true", help="allow callers with write access to delete runs, and to move them"
    )
    parser.add_argument("--durability", choices=("power", "process"), default="power",
                        help="acknowledge when data is on disk (power) or in the kernel (process); default: power")  # fmt: skip
    parser.add_argument("--memory", type=int, default=256, metavar="MB", help="memory for request bodies (default: 256)")
    parser.add_argument("--rate", type=float, default=64.0, metavar="MB", help="accepted per project and second (default: 64)")
    parser.add_argument("--notify", nargs="?", const="", metavar="FILE",
                        help="send messages about all runs, to the addresses in FILE (TOML), else in FANFOLD_NOTIFY or your own "
                        "settings file")  # fmt: skip
    parser.add_argument("--log-level", choices=("debug", "info", "warning"), default="info", help="default: info")
    pushing.arguments(parser)
    logins.arguments(parser)


def run(args: argparse.Namespace) -> int:
    import uvicorn

    from ..fleet import logs
    from ..notify.watch import watching
    from ..server import memory
    from ..server.connections import Connections
    from ..server.gateway import Limits, app

    memory.keep()
    logins.check(args)
    watched = _notified(args)
    place = places.place(args, power=args.durability == "power")
    tokens = _tokens(args, place.tokens)
    entry = logins.logins(args, tokens)
    served = app(
        place.intake,
        store=place.store,
        views=place.store.changes.views,
        audit=place.audit,
        logins=entry,
        limits=Limits(args.memory << 20, args.rate * (1 << 20), 4 * args.rate * (1 << 20)),
        allow_delete=args.allow_delete,
    )
    push = pushing.pusher(args, place.store)
    listeners = listen(args.host, [args.port], "The gateway")

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the interface
            served.state.gateway.close()  # a load balancer that checks now sends no more requests
            self.force_exit = self.should_exit  # at the second signal; uvicorn's own handler exits with the signal's code
            self.should_exit = True

    config = uvicorn.Config(
        served,
        http=Connections(trusted=entry.proxies.trusts).protocol(),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=False,  # uvicorn trusts every local process; --trusted-proxy says whom to trust
        timeout_graceful_shutdown=10,
        timeout_keep_alive=75,
        limit_concurrency=10_000,
        ssl_certfile=args.tls_cert,
        ssl_keyfile=args.tls_key,
    )
    config.load()  # raises for an unreadable certificate before an address is printed
    address = url("https" if args.tls_cert else "http", args.host, listeners)
    if args.json:
        output.print_json({"address": address}, line=True)
    else:
        print(address)
        anybody = (
            "" if tokens is not None else " Any user of this machine may write: there are no tokens. Create one and restart."
        )
        output.remark(args, f"The dashboard is at {address}/ui/. Ctrl-C stops the gateway.{anybody}")
    sys.stdout.flush()
    memory.settle()
    with logs.to_stream(args.log_level), beside(place.store), push, watching(_watch(place, watched)):
        Server(config).run(sockets=listeners)
    return 0


def _notified(args: argparse.Namespace) -> NotifyOptions | None:
    """Return who is told about all runs; raise for a mistake before anything is started."""
    from ..notify.options import read_options

    if args.notify is None:
        return None
    found = read_options(file=Path(args.notify).expanduser() if args.notify else None)
    if not found.to and not found.rules:
        raise SettingError(
            "--notify was given, and there is no address. The gateway was not started. Set FANFOLD_NOTIFY, or name a file with "
            '[notify] and to = ["…"].'
        )
    return found


def _watch(place: StoreParts, options: NotifyOptions | None) -> StoreWatch | None:
    """Return the notifier of the gateway. Without --notify, it still applies the rules of the dashboard, unless another sends."""
    from ..notify.options import NotifyOptions
    from ..notify.watch import DirectoryState, StoreWatch

    options = options or NotifyOptions()
    if isinstance(place.store, LocalStore):
        return StoreWatch(place.store, options, DirectoryState(place.store.root, sends=bool(options.to)))
    from ..clickhouse.gateway_tables import NoticeState
    from ..clickhouse.store import ClickHouseStore

    assert isinstance(place.store, ClickHouseStore)
    state = NoticeState(place.store.database)
    if not options.to:
        state.holder = f"~{state.holder}"  # the first by name leads: one that sends comes before all that do not
    return StoreWatch(place.store, options, state)


def _tokens(args: argparse.Namespace, tokens: TokenBook) -> TokenBook | None:
    """Return the tokens that callers need; None if none was ever created and only this machine can connect."""
    create = "fanfold server token create NAME --for PROJECT --scope write"
    others_log_in = bool(args.tokens) or logins.people_log_in(args)
    if tokens.used():
        if not tokens.all() and not logins.people_log_in(args):
            output.remark(args, f"No tokens are left, so nobody can connect. Create one: {create}")
        return tokens
    if others_log_in:
        return tokens
    if args.host in LOOPBACK and not args.public_url:
        return None
    if is_address(places.address(args)):  # in a cluster, the first token is created by a command inside a running gateway
        output.remark(args, f"There are no tokens yet, so nobody can connect. Create one: {create}")
        return tokens
    raise SettingError(
        f"{args.public_url or args.host} can be reached from elsewhere, and there are no tokens. The gateway was not started: "
        f"anybody could write. Create one first: {create}"
    )
