"""Create and upgrade the tables of a ClickHouse store: `migrate` before the first gateway and at each upgrade, `status` to check.

`rebuild` derives everything again from the stored journals, for one run or all: points, rollups, latest values.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..errors import SettingError
from ..settings import is_address
from . import output, places

if TYPE_CHECKING:
    from ..clickhouse.address import Address

INCOMPLETE = 2  # some runs were left as they are

EXAMPLE = """examples:
  fanfold server db migrate --store clickhouse://fanfold@db.example.org:8123/fanfold
  fanfold server db migrate --store 'clickhouse://fanfold@db-1:8123/fanfold?cluster=fleet' --node db-2:8123 --node db-3:8123
  fanfold server db status --store clickhouse://fanfold@db.example.org:8123/fanfold --json
  fanfold server db rebuild --store clickhouse://… --project llm --run 3f9a"""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("migrate", "status", "rebuild"), help="what to do")
    parser.add_argument("--store", metavar="ADDRESS", help="clickhouse://user@host:8123/database (default: as --dir)")
    parser.add_argument("--node", action="append", default=[], metavar="HOST:PORT",
                        help="another server of the cluster, whose tables are made as well (repeatable)")  # fmt: skip
    parser.add_argument("--run", metavar="ID", help="rebuild: only this run")


def run(args: argparse.Namespace) -> int:
    from ..clickhouse.address import parse

    text = places.address(args)
    if not is_address(text):
        raise SettingError(
            "`fanfold server db` needs the address of a ClickHouse store. Nothing was done. Name it with --store clickhouse://…"
        )
    address = parse(text)
    if args.action == "migrate":
        return _migrate(args, [address, *(_node(address, node) for node in args.node)])
    if args.action == "status":
        return _status(args, address)
    return _rebuild(args)


def _node(address: Address, node: str) -> Address:
    host, _, port = node.rpartition(":")
    if not host or not port.isdecimal():
        raise SettingError(f"--node {node!r} is not HOST:PORT. Nothing was done.")
    return address._replace(host=host.strip("[]"), port=int(port))


def _migrate(args: argparse.Namespace, addresses: list[Address]) -> int:
    from ..clickhouse.database import Database
    from ..clickhouse.schema import migrate

    done: list[dict[str, Any]] = []
    for address in addresses:
        before, after = migrate(Database(address))
        done.append({"address": address.shown, "before": before, "after": after})
    if args.json:
        output.print_json(done)
    for one in [] if args.json else done:
        same = one["before"] == one["after"]
        print(f"{one['address']}: version {one['after']}" + (", as before." if same else f", was {one['before'] or 'empty'}."))
    return 0


def _status(args: argparse.Namespace, address: Address) -> int:
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
        print(f"  {table['table']:<10} {table['rows']:>15,} rows {table['bytes'] / 1e6:>12,.1f} MB in {table['parts']} parts")
    return 0


def _rebuild(args: argparse.Namespace) -> int:
    from ..clickhouse.rebuild import StillGrowing, rebuild
    from ..clickhouse.store import connect

    store = connect(places.address(args))
    names = [name for name in store.names(args.project) if args.run in (None, name[1])]
    if not names:
        raise SettingError("there is no such run. Nothing was rebuilt. `fanfold ls` lists them.")
    points, growing = 0, []
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
        print(f"rebuilt {done} runs, {points:,} points.")
        if growing:
            print(f"Still growing, so left as they are: {', '.join(growing)}. Rebuild them when they have ended.")
    return INCOMPLETE if growing else 0
