"""The tables and their migrations. One setting makes them plain or replicated, another sharded.

`pieces` has the bytes of journals as received: the record. Everything else is derived and can be rebuilt. docs/clickhouse.md
describes the tables for people who query them in SQL.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import FanfoldError
from .address import ClickHouseAddress
from .database import Database, DatabaseUnavailable

CELL = 32  # steps in one cell of the rollups; charts of long series are drawn directly from cells
NO_STEP = -(1 << 63)
WINDOW = 10_000  # number of recent inserts whose tokens are remembered


@dataclass(frozen=True)
class Table:
    """One table: columns, engine without the family's prefix, sort order, and whether it is sharded by run."""

    name: str
    columns: str
    engine: str
    order: str
    sharded: bool = True
    partition: str = ""
    ages: str = ""  # the column TTL counts from, if old rows may expire
    settings: str = ""


# Of the rollups of versions 2 and 3; older ones have these defaults until the migration fills them in from their points.
LOWEST_TYPE = "SimpleAggregateFunction(min, UInt128) DEFAULT bitNot(toUInt128(0))"
HIGHEST_TYPE = "SimpleAggregateFunction(max, UInt128) DEFAULT 0"

TABLES = (
    Table("pieces", "run UInt64, journal UInt64, start UInt64 CODEC(Delta, ZSTD(1)), gap UInt32, "
          "end UInt64 CODEC(Delta, ZSTD(1)), data String CODEC(ZSTD(1)), at DateTime64(6) DEFAULT now64(6)",
          "MergeTree", "run, journal, start", partition="toYYYYMM(at)", settings="index_granularity_bytes = 1048576"),
    Table("frames", "run UInt64, journal UInt64, kind UInt8, flags UInt8, pos UInt64, body String CODEC(ZSTD(1)), "
          "at DateTime64(6) DEFAULT now64(6)",
          "ReplacingMergeTree", "run, journal, kind, pos"),
    Table("points", "run UInt64, series UInt64, journal UInt64, pos UInt64 CODEC(DoubleDelta, ZSTD(1)), "
          "step Int64 CODEC(DoubleDelta, ZSTD(1)), time Int64 CODEC(DoubleDelta, ZSTD(1)), "
          "value Float64 CODEC(Gorilla, ZSTD(1)), kind UInt8 DEFAULT 0, whole Int64 DEFAULT 0 CODEC(ZSTD(1)), "
          "at DateTime DEFAULT now()",
          "ReplacingMergeTree", "run, series, journal, pos", partition="toYYYYMM(at)", ages="at"),
    # `base` and `upto`: from and up to where in the journal a row's points are. Making a row again replaces it.
    Table("cells", "run UInt64, series UInt64, journal UInt64, cell Int64, base UInt64, upto UInt64, low Float64, high Float64, "
          "first UInt256, last UInt256, since Int64, until Int64, total Float64, count UInt64, odd UInt64, lowest UInt128, "
          "highest UInt128",
          "ReplacingMergeTree(upto)", "run, series, journal, cell, base"),
    Table("rolled", "run UInt64, journal UInt64, upto SimpleAggregateFunction(max, UInt64)",
          "AggregatingMergeTree", "run, journal"),
    Table("latest", "run UInt64, journal UInt64, series UInt64, first SimpleAggregateFunction(min, UInt128), "
          "last SimpleAggregateFunction(max, UInt256), low SimpleAggregateFunction(min, Int64), "
          "high SimpleAggregateFunction(max, Int64), kinds SimpleAggregateFunction(groupBitOr, UInt8), "
          "count SimpleAggregateFunction(sum, UInt64)",
          "AggregatingMergeTree", "run, journal, series"),
    Table("keys", "run UInt64, series UInt64, key String", "ReplacingMergeTree", "run, series"),
    Table("commits", "run UInt64, journal UInt64, rank UInt32, end SimpleAggregateFunction(max, UInt64), "
          "seen SimpleAggregateFunction(max, DateTime64(6))",
          "AggregatingMergeTree", "run, journal, rank"),
    Table("runs", "run UInt64, project String, id String, at DateTime64(6) DEFAULT now64(6)", "ReplacingMergeTree", "run"),
    Table("mended", "run UInt64, journal UInt64, excess UInt64, version UInt64 DEFAULT toUnixTimestamp64Micro(now64(6))",
          "ReplacingMergeTree(version)", "run, journal"),
    Table("blobs", "run UInt64, name FixedString(64), offset UInt64, total UInt64, data String CODEC(ZSTD(1))",
          "ReplacingMergeTree", "run, name, offset"),
    Table("ops", "run UInt64, process String, rank UInt32, node String, op String, overload String, scope String, thread String, "
          "label String, inputs String, "
          "calls Float64, observed UInt64, total_ns Float64, self_ns Float64, max_ns UInt64, device_ns Float64",
          "ReplacingMergeTree(observed)", "run, process, op, overload, scope, thread, label, inputs, rank, node"),
    Table("usage", "run UInt64, key String, rank UInt32, node String, pid UInt32, data String, "
          "time SimpleAggregateFunction(min, Int64)",
          "AggregatingMergeTree", "run, key, rank, node, pid, data"),
    Table("deleted", "run UInt64, project String, id String, who String, at DateTime64(6) DEFAULT now64(6)",
          "ReplacingMergeTree", "run"),
    # Where runs were moved to: `name` is the number that the new name alone would have.
    Table("moved", "run UInt64, name UInt64, project String, id String, who String, at DateTime64(6) DEFAULT now64(6)",
          "MergeTree", "run, at"),
    Table("tokens", "id String, token String, version UInt64 DEFAULT toUnixTimestamp64Micro(now64(6))",
          "ReplacingMergeTree(version)", "id", sharded=False),
    Table("views", "project String, name String, fragment String, version UInt64 DEFAULT toUnixTimestamp64Micro(now64(6))",
          "ReplacingMergeTree(version)", "project, name", sharded=False),
    Table("requests", "run UInt64, id String, request String, version UInt64 DEFAULT toUnixTimestamp64Micro(now64(6))",
          "ReplacingMergeTree(version)", "run, id", sharded=False),
    # What gateways sent about runs, a line each; run 0 is the gateways' own. And which gateway sends.
    Table("notices", "run UInt64, line String, at DateTime64(6) DEFAULT now64(6)", "MergeTree", "run, at"),
    Table("leases", "name String, holder String, version UInt64 DEFAULT toUnixTimestamp64Micro(now64(6))",
          "ReplacingMergeTree(version)", "name, holder", sharded=False),
    Table("audit", "at DateTime64(6) DEFAULT now64(6), entry String", "MergeTree", "at", sharded=False),
)  # fmt: skip

# First and last points are each packed into one number that sorts as they do: steps and positions in the upper bits, the value
# below. Aggregates of plain numbers cost a twentieth of those of tuples. Nor does the view group: a block is collapsed as it is
# written, which for a fleet's batches (many series, few points of each) is cheaper still.
_SORTED = "toUInt64(bitXor(reinterpretAsUInt64({0}), 9223372036854775808))"  # maps signed to unsigned integers, in the same order
_STEP = _SORTED.format("step")
_EDGE = (
    f"bitOr(bitOr(bitShiftLeft(toUInt256({_STEP}), 128), bitShiftLeft(toUInt256(pos), 64)), "
    "toUInt256(reinterpretAsUInt64(value)))"
)  # fmt: skip
_LAST = (
    f"bitOr(bitOr(bitShiftLeft(toUInt256(pos * 4 + kind), 192), bitShiftLeft(toUInt256({_STEP}), 128)), "
    "bitOr(bitShiftLeft(toUInt256(time), 64), "
    "toUInt256(if(kind = 1, reinterpretAsUInt64(whole), reinterpretAsUInt64(value)))))"
)
# An extreme with its step: the value in the upper bits, as an integer that sorts like the number, and the step in the lower, so
# that the first of equal values wins. For the highest, a maximum, the step is inverted.
_BITS = "reinterpretAsUInt64(if(value = 0, 0., value))"  # treats -0.0 as 0.0, so that it is not lower
_RANK = f"bitXor({_BITS}, if({_BITS} >= 9223372036854775808, 18446744073709551615, 9223372036854775808))"
_LOWEST = f"bitOr(bitShiftLeft(toUInt128({_RANK}), 64), toUInt128({_STEP}))"
_HIGHEST = f"bitOr(bitShiftLeft(toUInt128({_RANK}), 64), toUInt128(bitNot({_STEP})))"
_EXTREMES = (
    f"if(isFinite(value), {_LOWEST}, bitNot(toUInt128(0))) AS lowest, if(isFinite(value), {_HIGHEST}, toUInt128(0)) AS highest"
)
# One point as a cell, and how the cells of several points are combined.
POINT_CELL = (
    "bitShiftRight(step, 5) AS cell, if(isFinite(value), value, inf) AS low, if(isFinite(value), value, -inf) AS high, "
    f"if(isFinite(value), {_EDGE}, bitNot(toUInt256(0))) AS first, if(isFinite(value), {_EDGE}, toUInt256(0)) AS last, "
    "step AS since, step AS until, if(isFinite(value), value, 0.) AS total, toUInt64(1) AS count, "
    f"toUInt64(NOT isFinite(value)) AS odd, {_EXTREMES}"
)
CELL_COLUMNS = {"low": "min", "high": "max", "first": "min", "last": "max", "since": "min", "until": "max", "total": "sum",
                "count": "sum", "odd": "sum", "lowest": "min", "highest": "max"}  # fmt: skip
COMBINED = ", ".join(f"{how}({name})" for name, how in CELL_COLUMNS.items())
HAS_STEP = "step != -9223372036854775808"
VIEWS = {
    "latest": f"SELECT run, journal, series, bitOr(bitShiftLeft(toUInt128(pos), 64), toUInt128({_STEP})) AS first, "
    f"{_LAST} AS last, "
    "step AS low, step AS high, toUInt8(bitShiftLeft(1, kind)) AS kinds, toUInt64(1) AS count FROM {points}",
}
EDGE_VALUE = "reinterpretAsFloat64(toUInt64({0}))"  # the value in a packed first or last of the rollups
_TOP = "toUInt64(bitShiftRight({0}, 64))"
_VALUE = f"reinterpretAsFloat64(bitXor({_TOP}, if({_TOP} >= 9223372036854775808, 9223372036854775808, 18446744073709551615)))"
# The value and step in a packed extreme.
LOWEST = _VALUE + " AS v_low, reinterpretAsInt64(bitXor(toUInt64({0}), 9223372036854775808)) AS x_low"
HIGHEST = _VALUE + " AS v_high, reinterpretAsInt64(bitXor(bitNot(toUInt64({0})), 9223372036854775808)) AS x_high"


def statements(address: ClickHouseAddress, table: Table) -> Iterator[str]:
    """Yield the statements that create a table: a single one, or a local part per shard and one distributed over them."""
    yield _create(address, table, local_name(address, table.name) if table.sharded else table.name)
    if address.cluster and table.sharded:
        where = f"'{address.cluster}', '{address.database}', '{table.name}_local', run"
        yield f"CREATE TABLE IF NOT EXISTS {table.name} AS {table.name}_local ENGINE = Distributed({where})"


def _create(address: ClickHouseAddress, table: Table, name: str) -> str:
    engine, open_, rest = table.engine.partition("(")
    inside = rest.removesuffix(")") if open_ else ""
    if address.replicated:
        place = f"'/clickhouse/tables/{{shard}}/{address.database}/{name}', '{{replica}}'"
        engine, inside = f"Replicated{engine}", f"{place}, {inside}" if inside else place
    window = "replicated_deduplication_window" if address.replicated else "non_replicated_deduplication_window"
    partition = f" PARTITION BY {table.partition}" if table.partition else ""
    ttl = f" TTL {table.ages} + INTERVAL {address.ttl_days} DAY" if table.ages and address.ttl_days else ""
    settings = f"{window} = {WINDOW}" + (f", {table.settings}" if table.settings else "")
    return (
        f"CREATE TABLE IF NOT EXISTS {name} ({table.columns}) ENGINE = {engine}({inside}){partition} "
        f"ORDER BY ({table.order}){ttl} SETTINGS {settings}"
    )


def view(address: ClickHouseAddress, name: str) -> str:
    """Return the statement that fills a derived table from arriving points."""
    made = VIEWS[name].format(points=local_name(address, "points"))
    return f"CREATE MATERIALIZED VIEW IF NOT EXISTS {name}_feed TO {local_name(address, name)} AS {made}"


def local_name(address: ClickHouseAddress, name: str) -> str:
    """Return the name of a table's local part on one server."""
    return f"{name}_local" if address.cluster else name


def _first(database: Database) -> None:
    for table in TABLES:
        for statement in statements(database.address, table):
            database.run(statement)
    for name in VIEWS:
        database.run(view(database.address, name))


def _extremes_with_steps(database: Database) -> None:
    """Add the steps of extremes to the rollups: first for points that arrive from now on, then for stored ones."""
    at = database.address
    local, points = local_name(at, "rollups"), local_name(at, "points")
    if not _exists(database, local):
        return  # tables made by version 4 or later
    for name in dict.fromkeys((local, "rollups")):
        database.run(
            f"ALTER TABLE {name} ADD COLUMN IF NOT EXISTS lowest {LOWEST_TYPE}, ADD COLUMN IF NOT EXISTS highest {HIGHEST_TYPE}"
        )
    feed = f"SELECT run, series, journal, {POINT_CELL} FROM {points} WHERE {HAS_STEP}"
    database.run(f"ALTER TABLE rollups_feed MODIFY QUERY {feed}")
    _for_each_run(database, local, _FILL.format(rollups=local, points=points))


def _for_each_run(database: Database, table: str, *statements: str) -> None:
    patient = Database(database.address, timeout=FILLING_SECONDS)
    try:
        for run in database.ask(f"SELECT DISTINCT run FROM {table}")["run"].tolist():
            for statement in statements:
                patient.run(statement, run=run)
    finally:
        patient.close()


def _exists(database: Database, table: str) -> bool:
    found = database.one("SELECT count() AS n FROM system.tables WHERE database = {db:String} AND name = {name:String}",
                         db=database.address.database, name=table)  # fmt: skip
    return bool(found["n"])


# Rows with nothing but the extremes: merged with the existing cells, they change nothing else.
FILLING_SECONDS = 3600.0  # for the points of one run
_FILL = (
    "INSERT INTO {rollups} (run, series, journal, cell, low, high, first, last, since, until, total, count, odd, lowest, "
    "highest) SELECT run, series, journal, bitShiftRight(step, 5) AS at, inf, -inf, bitNot(toUInt256(0)), toUInt256(0), "
    "9223372036854775807, toInt64(-9223372036854775808), 0., 0, 0, min(lowest), max(highest) FROM (SELECT run, series, journal, "
    f"step, {_EXTREMES} FROM {{points}} WHERE run = {{{{run:UInt64}}}} AND {HAS_STEP}) "
    "GROUP BY run, series, journal, at"
)

# How far the rollups of a journal reach is the position of the last finite number in them. Later ones that are not finite may be
# counted twice, but then the cells are not used: only points show which values are NaN.
_REACHED = "SELECT run, journal, max(toUInt64(bitShiftRight(last, 64))) + 1 AS upto FROM {rollups} WHERE run = {{run:UInt64}}"
_TAKE_OVER = (
    "INSERT INTO {rolled} " + _REACHED + " GROUP BY run, journal",
    f"INSERT INTO {{cells}} (run, series, journal, cell, base, upto, {', '.join(CELL_COLUMNS)}) "
    f"SELECT run, series, journal, cell, 0, any(reached.upto), {COMBINED} FROM {{rollups}} AS r "
    "INNER JOIN (" + _REACHED + " GROUP BY run, journal) AS reached USING (run, journal) "
    "WHERE run = {{run:UInt64}} GROUP BY run, series, journal, cell",
)


def _cells(database: Database) -> None:
    """Replace the rollups, which a view made of each arriving point, by cells that gateways make of many points at a time."""
    _first(database)
    at = database.address
    old = local_name(at, "rollups")
    if not _exists(database, old):
        return
    database.run("DROP VIEW IF EXISTS rollups_feed SYNC")
    names = {"rollups": old, "rolled": local_name(at, "rolled"), "cells": local_name(at, "cells")}
    _for_each_run(database, old, *(statement.format(**names) for statement in _TAKE_OVER))
    for name in dict.fromkeys(("rollups", old)):
        database.run(f"DROP TABLE IF EXISTS {name} SYNC")


# In order, each applied once per server. Gateways of the previous version keep storing what arrives; those of version 3 cannot
# draw long series from tables of version 4, and are restarted after the migration. The third one adds tables.
MIGRATIONS = (_first, _extremes_with_steps, _first, _cells)


def migrate(database: Database) -> tuple[int, int]:
    """Migrate one server's tables to this version; return the version before and after. Running it twice does no harm."""
    _make_database(database)
    database.run(
        "CREATE TABLE IF NOT EXISTS meta (version UInt32, at DateTime DEFAULT now()) ENGINE = MergeTree ORDER BY version"
    )
    before = version(database)
    for number, migration in enumerate(MIGRATIONS[before:], before + 1):
        migration(database)
        database.insert("meta", {"version": _u32([number])})
    _ages(database)
    return before, max(before, len(MIGRATIONS))


def _ages(database: Database) -> None:
    """Apply a changed age limit to existing tables; 0 removes it."""
    at = database.address
    for table in TABLES:
        if not table.ages:
            continue
        name = local_name(at, table.name)
        made = str(database.one("SELECT create_table_query AS made FROM system.tables WHERE database = {db:String} AND "
                                "name = {name:String}", db=at.database, name=name)["made"])  # fmt: skip
        limit = f"toIntervalDay({at.ttl_days})"
        if at.ttl_days and limit not in made:
            database.run(f"ALTER TABLE {name} MODIFY TTL {table.ages} + INTERVAL {at.ttl_days} DAY")
        elif not at.ttl_days and " TTL " in made:
            database.run(f"ALTER TABLE {name} REMOVE TTL")


def _make_database(database: Database) -> None:
    name = database.address.database
    root = Database(database.address._replace(database="default"), timeout=database.timeout)
    try:
        root.run(f"CREATE DATABASE IF NOT EXISTS {name}")
    finally:
        root.close()


def _u32(values: list[int]) -> Any:
    import numpy as np

    return np.array(values, np.uint32)


def version(database: Database) -> int:
    """Return the version of the tables; 0 if there are none."""
    try:
        return int(database.one("SELECT max(version) AS version FROM meta")["version"])
    except FanfoldError as error:
        if "UNKNOWN" in str(error) or "doesn't exist" in str(error) or "does not exist" in str(error):
            return 0
        raise


def check(database: Database) -> None:
    """Raise if the tables of a database are older than this version."""
    there = version(database)
    if there < len(MIGRATIONS):
        older = f"has tables of version {there}, and this fanfold needs {len(MIGRATIONS)}"
        what = older if there else "has no tables of fanfold"
        raise FanfoldError(
            f"{database.address.shown} {what}. Nothing was opened. "
            f"Run: fanfold server db migrate --store {database.address.shown}"
        )


def ready(database: Database) -> None:
    """Raise OSError while the database is not available."""
    try:
        database.run("SELECT 1")
    except FanfoldError as error:
        raise DatabaseUnavailable(str(error)) from error


def sizes(database: Database) -> list[dict[str, Any]]:
    """Return the tables of this server: rows, bytes on disk, parts."""
    found = database.ask(
        "SELECT table, sum(rows) AS rows, sum(bytes_on_disk) AS size, count() AS parts FROM system.parts WHERE active AND "
        "database = {name:String} GROUP BY table ORDER BY size DESC", name=database.address.database,
    )  # fmt: skip
    rows = zip(*(found[name].tolist() for name in ("table", "rows", "size", "parts")), strict=True)
    return [{"table": table.decode(), "rows": rows, "bytes": bytes, "parts": parts} for table, rows, bytes, parts in rows]


def delete(database: Database, table: str, run: int, **where: str) -> None:
    """Delete a run's rows from one table, on every server that may have some; `where` narrows them down by text columns."""
    on = f" ON CLUSTER {database.address.cluster}" if database.address.cluster else ""
    name = local_name(database.address, table)
    more = "".join(f" AND {column} = {{{column}:String}}" for column in where)
    database.run(
        f"DELETE FROM {name}{on} WHERE run = {{run:UInt64}}{more} SETTINGS lightweight_deletes_sync = 2", run=run, **where
    )
