"""Check this machine: where runs go, the disk under them, ranks, libraries, credentials (by name only) and GPUs.

The exit code is 1 when something would keep a run from being recorded. --deploy checks code that is to be shipped instead.
"""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import FanfoldError
from . import checks, deploy, output
from .text import clean

EXAMPLE = """examples:
  fanfold doctor
  torchrun --nproc-per-node 2 --no-python fanfold doctor --json     what each rank of a job sees
  fanfold doctor --deploy src/app --sources app-sources.zip         what breaks when only .pyc files are shipped"""

_SIGNS = {"ok": ("✓", "green"), "note": ("·", "dim"), "warning": ("!", "yellow"), "wrong": ("✗", "red")}


def arguments(parser: argparse.ArgumentParser) -> None:
    deploy.arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.deploy is not None:
        return deploy.run(args)
    if args.sources is not None or args.timeout is not None:
        raise FanfoldError("--sources and --timeout go with --deploy. Nothing was checked. Add --deploy PATH.")
    found = [(title, list(check(args))) for title, check in checks.ALL.items()]
    wrong = any(one.level == "wrong" for _, lines in found for one in lines)
    if args.json:
        output.print_json({"healthy": not wrong, "checks": [_facts(title, one) for title, lines in found for one in lines]})
    else:
        _print(found, quiet=args.quiet)
    return 1 if wrong else 0


def _facts(section: str, line: checks.Line) -> dict[str, Any]:
    return {"section": section, "name": line.name, "level": line.level, "value": line.value, "hint": line.hint or None}


def _print(found: list[tuple[str, list[checks.Line]]], *, quiet: bool) -> None:
    from rich.text import Text

    console = output.console(soft_wrap=True)
    for title, lines in found:
        shown = [line for line in lines if not quiet or line.level in ("warning", "wrong")]
        if shown:
            console.print(Text(title, style="bold"))
        for line in shown:
            sign, colour = _SIGNS[line.level]
            console.print(Text.assemble((f"  {sign} ", colour), (f"{clean(line.name):<17} ", "dim"), clean(line.value)))
            if line.hint:
                console.print(Text(f"    {'':<18}{clean(line.hint)}", style=colour))
