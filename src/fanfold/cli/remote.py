"""Commands on the runs of a gateway: `--dir https://gateway` asks its tools, with the token in FANFOLD_SERVER_TOKEN."""

from __future__ import annotations

import argparse
from typing import Any

from .. import settings


def is_gateway(args: argparse.Namespace) -> bool:
    """Return whether --dir, or FANFOLD_DIR, is the address of a gateway."""
    return settings.is_gateway(args.dir)


def ask(args: argparse.Namespace, tool: str, **arguments: Any) -> Any:
    """Ask a tool of the gateway."""
    from ..fleet.gateway_run import reach

    return reach(args.dir).tool(tool, arguments)


def named(args: argparse.Namespace, word: str) -> str:
    """Return a run's name as the gateway's tools understand it; it is looked for in --project."""
    from ..fleet.gateway_run import in_project

    return in_project(word, args.project)
