"""Run a gateway: collect the runs of many nodes in one store that every fanfold command reads, and show them at /ui/.

It listens on this machine only, unless told otherwise; on any other address tokens are needed (`fanfold server token create`).
Any number of gateways may serve one directory.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from types import FrameType
from typing import TYPE_CHECKING

from ..errors import FanfoldError, SettingError
from ..settings import is_address
from . import logins, output, places

if TYPE_CHECKING:
    from ..fleet.tokens import TokenBook

EXAMPLE = """examples:
  fanfold server start --store /data/runs
  fanfold server token create cluster-a --store /data/runs --for llm --scope write
  fanfold server start --store /data/runs --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem"""

PORT = 8643
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def arguments(parser: argparse.ArgumentParser) -> None:
    places.arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (default: this machine only)")
    parser.add_argument("--port", type=int, default=PORT, metavar="N", help=f"the port (default: {PORT}; 0: any that is free)")
    parser.add_argument("--tls-cert", metavar="FILE", help="a certificate, to speak TLS")
    parser.add_argument("--tls-key", metavar="FILE", help="its key")
    parser.add_argument(
        "--allow-delete", action="store_true", help="allow callers with write access to delete runs of their projects"
    )
    parser.add_argument("--durability", choices=("power", "process"), default="power",
                        help="acknowledge when data is on disk (power) or in the kernel (process); default: power")  # fmt: skip
    parser.add_argument("--memory", type=int, default=256, metavar="MB", help="memory for request bodies (default: 256)")
    parser.add_argument("--rate", type=float, default=64.0, metavar="MB", help="accepted per project and second (default: 64)")
    parser.add_argument("--log-level", choices=("debug", "info", "warning"), default="info", help="default: info")
    logins.arguments(parser)


def run(args: argparse.Namespace) -> int:
    import uvicorn

    from ..fleet import logs
    from ..server.connections import Connections
    from ..server.gateway import Limits, app

    logins.check(args)
    place = places.place(args, power=args.durability == "power")
    tokens = _tokens(args, place.tokens)
    entry = logins.logins(args, tokens)
    served = app(
        place.intake,
        store=place.store,
        views=place.views,
        audit=place.audit,
        logins=entry,
        limits=Limits(args.memory << 20, args.rate * (1 << 20), 4 * args.rate * (1 << 20)),
        allow_delete=args.allow_delete,
    )
    listener = _listen(args.host, args.port)

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the interface
            served.state.gateway.close()  # a load balancer that asks now sends no more
            self.force_exit = self.should_exit  # the second time; the library's own way ends with the signal's exit code
            self.should_exit = True

    config = uvicorn.Config(
        served,
        http=Connections(trusted=entry.proxies.trusts).protocol(),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=False,  # the library believes whoever is on this machine; --trusted-proxy says whom we believe
        timeout_graceful_shutdown=10,
        timeout_keep_alive=75,
        limit_concurrency=10_000,
        ssl_certfile=args.tls_cert,
        ssl_keyfile=args.tls_key,
    )
    config.load()  # a certificate that cannot be read stops here, before an address is announced
    _say(args, listener, tokens is not None)
    with logs.to_stream(args.log_level):
        Server(config).run(sockets=[listener])
    return 0


def _tokens(args: argparse.Namespace, tokens: TokenBook) -> TokenBook | None:
    """Return the tokens callers must bring; None where none was ever made and only this machine can ask."""
    if tokens.used():
        if not tokens.all() and not logins.people_log_in(args):
            output.remark(
                args,
                "No tokens are left, so nobody gets in. Make one: fanfold server token create NAME --for PROJECT --scope write",
            )
        return tokens
    if args.tokens or logins.people_log_in(args):
        return tokens
    if args.host in LOOPBACK and not args.public_url:
        return None
    if is_address(places.address(args)):  # in a cluster the first token is made by a command inside a running gateway
        output.remark(
            args,
            "There are no tokens yet, so nobody gets in. Make one: fanfold server token create NAME --for PROJECT --scope write",
        )
        return tokens
    raise SettingError(
        f"{args.public_url or args.host} can be reached from elsewhere, and there are no tokens. The gateway was not started: "
        "anybody could write. "
        "Make one first: fanfold server token create NAME --for PROJECT --scope write"
    )


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        raise FanfoldError(
            f"cannot listen on {host}, port {port}: {error}. The gateway was not started. Try another --port."
        ) from error
    return listener


def _say(args: argparse.Namespace, listener: socket.socket, guarded: bool) -> None:
    host = f"[{args.host}]" if ":" in args.host else args.host
    address = f"{'https' if args.tls_cert else 'http'}://{host}:{listener.getsockname()[1]}"
    print(json.dumps({"address": address}) if args.json else address)
    if not args.json:
        output.remark(
            args,
            f"The page is at {address}/ui/. Ctrl-C stops it."
            + ("" if guarded else " Whoever is on this machine may write: there are no tokens."),
        )
    sys.stdout.flush()
