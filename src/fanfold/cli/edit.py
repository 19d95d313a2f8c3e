"""Change what is known about stored runs: name, tags, notes, archived. Nothing that training wrote is changed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from ..store import StoredRun
from ..store.changes import checked_facts
from ..tools.answers import edited
from . import choose, output, remote


def apply(
    args: argparse.Namespace, words: list[str], change: Callable[[StoredRun], dict[str, Any]], tool: str, **arguments: Any
) -> int:
    """Edit the runs that words name, and print what they are now. A gateway is asked by the tool that does the same."""
    if remote.is_gateway(args):
        named = [remote.named(args, word) for word in words]
        which: dict[str, Any] = {"run": named[0]} if tool in ("note", "rename") else {"runs": named}
        return _print(args, remote.ask(args, tool, **which, **arguments))
    changes = choose.store(args).changes
    found = choose.several(args, words)
    new = [checked_facts(change(one)) for one in found]  # all of them first: either every run is changed, or none
    for one, facts in zip(found, new, strict=True):
        if facts:
            changes.edit(one, facts)
    return _print(args, [edited(one.reopened()) for one in found])


def _print(args: argparse.Namespace, now: list[dict[str, Any]]) -> int:
    if args.json:
        output.print_json(now)
    else:
        rows = [[one["name"], one["id"], ", ".join(one["tags"]), one["notes"] or "", "yes" * one["archived"]] for one in now]
        output.table(["run", "id", "tags", "notes", "archived"], rows)
    return 0
