"""Create and upgrade the tables of a ClickHouse store: `migrate` before the first gateway and at each upgrade, `status` to check.

`rebuild` derives the tables of points, rollups and latest values again from the stored journals, for one run or all.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..drawing.numbers import plural
from ..errors import SettingError
from ..settings import is_address
from . import output, places
from .text import size

if TYPE_CHECKING:
    from ..clickhouse.address import ClickHouseAddress

INCOMPLETE = 2  # some runs were not rebuilt

EXAMPLE = """examples:
  fanfold server db migrate --store clickhouse://fanfold@db.example.org:8123/fanfold
  fanfold server db migrate --store 'clickhouse://fanfold@db-1:8123/fanfold?cluster=fleet' --node db-2:8123 --node db-3:8123
  fanfold server db status --store clickhouse://fanfold@db.example.org:8123/fanfold --json
  fanfold server db rebuild --store clickhouse://… --project llm --run 3f9a"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("migrate", "status", "rebuild"), help="what to do")
    parser.add_argument("--store", metavar="ADDRESS", help="clickhouse://user@host:8123/database (default: as --dir)")
    parser.add_argument("--node", action="append", default=[], metavar="HOST:PORT", help="migrate this server too (repeatable)")
    parser.add_argument("--run", metavar="ID", help="rebuild: only this run")


def run(args: argparse.Namespace) -> int:
    from ..clickhouse.address import parse

    text = places.address(args)
    if not is_address(text):
        raise SettingError("`fanfold server db` needs a ClickHouse store. Nothing was done. Pass --store clickhouse://…")
    address = parse(text)
    if args.action == "migrate":
        return _migrate(args, [address, *(_node(address, node) for node in args.node)])
    if args.action == "status":
        return _status(args, address)
    return _rebuild(args)


def _node(address: ClickHouseAddress, node: str) -> ClickHouseAddress:
    host, _, port = node.rpartition(":")
    if not host or not port.isdecimal():
        raise SettingError(f"--node {node!r} is not HOST:PORT. Nothing was done.")
    return address._replace(host=host.strip("[]"), port=int(port))


def _migrate(args: argparse.Namespace, addresses: list[ClickHouseAddress]) -> int:
    from ..clickhouse.database import Database
    from ..clickhouse.schema import migrate

    done: list[dict[str, Any]] = []
    for address in addresses:
        before, after = migrate(Database(address))
        done.append({"address": address.shown, "before": before, "after": after})
    return output.listed(args, done, list(done[0]), lambda one: [str(value or "empty") for value in one.values()])


def _status(args: argparse.Namespace, address: ClickHouseAddress) -> int:
    from ..clickhouse.database import Database
    from ..clickhouse.schema import MIGRATIONS, sizes, version

    database = Database(address)
    tables = sizes(database)
    found = {"address": address.shown, "version": version(database), "needed": len(MIGRATIONS), "tables": tables}
    if args.json:
        output.print_json(found)
        return 0
    print(f"{found['address']}: version {found['version']} (this fanfold needs {found['needed']})")
    for table in tables:
        print(f"  {table['table']:<10} {table['rows']:>15,} rows {size(table['bytes']):>10} in {plural(table['parts'], 'part')}")
    return 0


def _rebuild(args: argparse.Namespace) -> int:
    from ..clickhouse.rebuild import StillGrowing, rebuild
    from ..clickhouse.store import connect

    store = connect(places.address(args))
    names = [name for name in store.names(args.project) if args.run in (None, name[1])]
    if not names:
        raise SettingError("there is no such run. Nothing was rebuilt. `fanfold ls` lists the runs.")
    points, growing = 0, list[str]()
    for name in output.progress(args, names, len(names), "Rebuilding"):
        try:
            points += rebuild(store.database, *name)
        except StillGrowing:
            if args.run is not None:
                raise
            growing.append(name[1])
    done = len(names) - len(growing)
    if args.json:
        output.print_json({"runs": done, "points": points, "growing": growing})
    else:
        print(f"rebuilt {plural(done, 'run')}, {plural(points, 'point')}.")
        if growing:
            print(f"Still growing, so not rebuilt: {', '.join(growing)}. Rebuild them when they have ended.")
    return INCOMPLETE if growing else 0
