"""Query the runs in SQL: one SELECT over the tables runs, config, latest, points, texts, media and alerts.

Read-only, and without access to files or the network. `--tables` lists the tables and their columns.
"""

from __future__ import annotations

import argparse
import sys
from datetime import datetime, timezone
from typing import Any

from ..drawing.numbers import plural
from ..errors import SettingError
from ..store import sql
from . import choose, output
from .text import clean, short

EXAMPLE = """examples:
  fanfold query "SELECT id, status, duration FROM runs ORDER BY created DESC LIMIT 5"
  fanfold query "SELECT run, min(value) AS best FROM points WHERE key = 'loss' GROUP BY run ORDER BY best"
  fanfold query --json "SELECT r.name, c.number AS lr, l.number AS loss FROM runs r
    JOIN config c ON c.run = r.id AND c.key = 'lr' JOIN latest l ON l.run = r.id AND l.key = 'loss'\""""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sql", nargs="?", metavar="SQL", help="one SELECT; - reads it from stdin")
    parser.add_argument("--tables", action="store_true", help="list the tables and their columns")


def run(args: argparse.Namespace) -> int:
    if args.tables:
        if args.json:
            output.print_json(sql.TABLES)
        else:
            output.table(["table", "columns"], [[name, ", ".join(columns)] for name, columns in sql.TABLES.items()])
        return 0
    if not args.sql:
        raise SettingError('no query was given. Nothing was run. Write for example: fanfold query "SELECT * FROM runs".')
    text = sys.stdin.read() if args.sql == "-" else args.sql
    found = sql.query(text, store=choose.store(args), project=args.project)
    if args.json:
        output.print_json([{name: _plain(value) for name, value in row.items()} for row in found.as_dicts()])
    elif found.rows:
        output.table([clean(name) for name in found.columns], [[_cell(value) for value in row] for row in found.rows])
        output.remark(args, plural(len(found.rows), "row"))
    choose.report_unreadable(args, found.unreadable)
    return 0 if found.rows and not found.unreadable else 1


def _plain(value: Any) -> Any:
    return value.replace(tzinfo=timezone.utc).isoformat() if isinstance(value, datetime) else value


def _cell(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat(" ", "seconds")
    return "" if value is None else short(value, 200)
