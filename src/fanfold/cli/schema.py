"""Print the JSON Schema of what a command prints with --json, or the schemas of all commands by name.

Each has a version, which changes when a program could notice a difference.
"""

from __future__ import annotations

import argparse

from ..errors import SettingError, suggestion
from . import output, schemas

EXAMPLE = """examples:
  fanfold schema ls
  fanfold schema server token
  fanfold schema > fanfold-schemas.json"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("command", metavar="COMMAND", nargs="*", help="a command (default: all of them, by name)")


def run(args: argparse.Namespace) -> int:
    name = " ".join(args.command)
    if not name:
        output.print_json({one: schemas.schema(one) for one in schemas.COMMANDS})
        return 0
    if name not in schemas.COMMANDS:
        raise SettingError(f"no command {name!r} prints JSON. Nothing was printed.{suggestion(name, schemas.COMMANDS)}")
    output.print_json(schemas.schema(name))
    return 0
