"""Change what is known about stored runs: name, tags, notes, archived. Nothing that training wrote is changed."""

from __future__ import annotations

import argparse
from typing import Any

from ..tools.answers import Change, edit
from . import choose, output, remote


def apply(args: argparse.Namespace, words: list[str], change: Change, tool: str, **arguments: Any) -> int:
    """Edit the runs that words name, and print what they are now. A gateway is asked by the tool that does the same."""
    if remote.is_gateway(args):
        named = [remote.named(args, word) for word in words]
        which: dict[str, Any] = {"run": named[0]} if tool in ("note", "rename") else {"runs": named}
        return _print(args, remote.ask(args, tool, **which, **arguments))
    return _print(args, edit(choose.store(args).changes, choose.several(args, words), change))


def _print(args: argparse.Namespace, now: list[dict[str, Any]]) -> int:
    if args.json:
        output.print_json(now)
    else:
        rows = [[one["name"], one["id"], ", ".join(one["tags"]), one["notes"] or "", "yes" * one["archived"]] for one in now]
        output.table(["run", "id", "tags", "notes", "archived"], rows)
    return 0
