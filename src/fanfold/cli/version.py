"""Print the version of fanfold and of the journal format it writes."""

from __future__ import annotations

import argparse
import platform

from .. import __version__
from .output import print_json

EXAMPLE = "example:\n  fanfold version --json"


def arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # none of its own


def run(args: argparse.Namespace) -> int:
    from ..journal import format as fmt

    facts = {"version": __version__, "journal": f"{fmt.MAJOR}.{fmt.MINOR}", "python": platform.python_version()}
    if args.json:
        print_json(facts)
    else:
        print(f"fanfold {facts['version']} (journal format {facts['journal']}, Python {facts['python']})")
    return 0
