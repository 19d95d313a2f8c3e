"""Run a gateway: take in the runs of many nodes, into one directory that every fanfold command reads.

It listens on this machine only, unless told otherwise; on any other address tokens are needed (`fanfold token create`).
Any number of gateways may serve one directory.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from ..errors import FanfoldError, SettingError
from ..settings import find_directory
from . import output

if TYPE_CHECKING:
    from ..fleet.tokens import Tokens

EXAMPLE = """examples:
  fanfold serve --store /data/runs
  fanfold token create cluster-a --store /data/runs --for llm --scope write
  fanfold serve --store /data/runs --host 0.0.0.0 --certfile cert.pem --keyfile key.pem"""

PORT = 8643
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", metavar="DIR", help="where runs are kept (default: as --dir)")
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="where to listen (default: this machine only)")
    parser.add_argument("--port", type=int, default=PORT, metavar="N", help=f"the port (default: {PORT}; 0: any that is free)")
    parser.add_argument("--tokens", metavar="FILE", help="the file of tokens (default: .tokens.json in the store)")
    parser.add_argument("--certfile", metavar="FILE", help="a certificate, to speak TLS")
    parser.add_argument("--keyfile", metavar="FILE", help="its key")
    parser.add_argument("--durability", choices=("power", "process"), default="power",
                        help="what an answer means: the disk has it, or the kernel has it (default: power)")  # fmt: skip
    parser.add_argument("--memory", type=int, default=256, metavar="MB", help="bodies in hand at most (default: 256)")
    parser.add_argument("--rate", type=float, default=64.0, metavar="MB", help="taken from a project per second (default: 64)")
    parser.add_argument("--log-level", choices=("debug", "info", "warning"), default="info", help="default: info")


def run(args: argparse.Namespace) -> int:
    import uvicorn

    from ..fleet import logs
    from ..fleet.gateway import Limits, app
    from ..fleet.intake import DirectoryIntake

    store = _store(args)
    tokens = _tokens(args, store)
    limits = Limits(args.memory << 20, args.rate * (1 << 20), 4 * args.rate * (1 << 20))
    served = app(DirectoryIntake(store, power=args.durability == "power"), tokens=tokens, limits=limits)
    listener = _listen(args.host, args.port)

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the interface
            served.state.gateway.closing = True  # a load balancer that asks now sends no more
            self.force_exit = self.should_exit  # the second time; the library's own way ends with the signal's exit code
            self.should_exit = True

    config = uvicorn.Config(
        served,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=10,
        timeout_keep_alive=75,
        limit_concurrency=10_000,
        ssl_certfile=args.certfile,
        ssl_keyfile=args.keyfile,
    )
    config.load()  # a certificate that cannot be read stops here, before an address is announced
    _say(args, listener, tokens is not None)
    with logs.to_stream(args.log_level):
        Server(config).run(sockets=[listener])
    return 0


def _store(args: argparse.Namespace) -> Path:
    if args.store and "://" in args.store:
        raise SettingError(
            f"there is no store of the kind {args.store.partition('://')[0]!r}. Nothing was started. Name a directory."
        )
    return Path(args.store).expanduser().absolute() if args.store else find_directory(args.dir)


def _tokens(args: argparse.Namespace, store: Path) -> Tokens | None:
    from ..fleet.tokens import FILE_NAME, Tokens

    tokens = Tokens(Path(args.tokens) if args.tokens else store / FILE_NAME)
    if tokens.all() or args.tokens:
        return tokens
    if args.host in LOOPBACK:
        return None
    raise SettingError(
        f"{args.host} can be reached from elsewhere, and there are no tokens. The gateway was not started: anybody could write. "
        "Make one first: fanfold token create NAME --for PROJECT --scope write"
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
    address = f"{'https' if args.certfile else 'http'}://{host}:{listener.getsockname()[1]}"
    print(json.dumps({"address": address}) if args.json else address)
    if not args.json:
        output.remark(
            args, "Ctrl-C stops it." + ("" if guarded else " Whoever is on this machine may write: there are no tokens.")
        )
    sys.stdout.flush()
