"""Serve the runs to a coding agent over MCP, on stdin and stdout.

Agents can only read. With --write, they can also tag and annotate runs, and tell running jobs what to do.
`fanfold ui` and `fanfold server start` serve the same tools over HTTP at /mcp, with their own tokens.
"""

from __future__ import annotations

import argparse

from . import choose

EXAMPLE = """examples:
  claude mcp add fanfold -- fanfold mcp
  codex mcp add fanfold -- fanfold mcp --dir ~/runs --write"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", action="store_true", help="allow tags, notes, names, archiving and requests to running jobs")


def run(args: argparse.Namespace) -> int:
    from ..fleet.views import ProjectsView
    from ..tools.mcp import over_stdio

    store = choose.store(args)
    if args.project:
        store = ProjectsView(store, lambda project: project == args.project, store.changes)
    over_stdio(store, write=args.write)
    return 0
