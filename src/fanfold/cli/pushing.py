"""The options of `server start` and `server forward` that push metrics to an OpenTelemetry collector."""

from __future__ import annotations

import argparse
import contextlib
from contextlib import AbstractContextManager

from ..store.query import Store


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--otlp", metavar="URL", help="push metrics of live runs to this OpenTelemetry collector")
    parser.add_argument("--otlp-every", type=float, default=30.0, metavar="SECONDS", help="how often (default: 30)")
    parser.add_argument(
        "--otlp-what", default="metrics,goodput", metavar="A,B", help="of: metrics, goodput, ops (default: the first two)"
    )


def pusher(args: argparse.Namespace, store: Store) -> AbstractContextManager[None]:
    """Push meanwhile, if a collector was given."""
    if not args.otlp:
        return contextlib.nullcontext()
    from ..fleet.push import Pusher
    from ..store import monitoring

    what = monitoring.check(args.otlp_what)
    return Pusher(store, args.otlp, project=args.project, what=what, every=args.otlp_every).beside()
