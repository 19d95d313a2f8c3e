"""SQL over runs and their points, through DuckDB: read-only, without access to files, the network or this process.

Tables are streams produced while the query reads them, so a query costs only what it reads. The runs and keys of `points` and
`texts` to read are taken from its WHERE clause.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..errors import FanfoldError, needed
from ..plain import flat
from .filter import number
from .points import Points, points_by_rank
from .query import LocalStore, Store
from .run import StoredRun

BATCH = 1 << 16

# table: column and type. The first two columns of each table identify the run of a row.
TABLES: dict[str, dict[str, str]] = {
    "runs": {
        "project": "text", "id": "text", "name": "text", "status": "text", "created": "time", "seen": "time",
        "duration": "number", "tags": "texts", "group_name": "text", "notes": "text", "ranks": "whole", "attempts": "whole",
        "error": "text", "path": "text",
    },
    "config": {"project": "text", "run": "text", "key": "text", "value": "text", "number": "number"},
    "latest": {"project": "text", "run": "text", "key": "text", "value": "text", "number": "number"},
    "points": {
        "project": "name", "run": "name", "key": "name", "rank": "whole", "step": "whole", "time": "time", "value": "number",
    },
    "texts": {
        "project": "text", "run": "text", "key": "text", "rank": "whole", "step": "whole", "time": "time", "text": "text",
    },
    "media": {
        "project": "text", "run": "text", "key": "text", "rank": "whole", "step": "whole", "time": "time", "kind": "text",
    },
    "alerts": {
        "project": "text", "run": "text", "rank": "whole", "time": "time", "level": "text", "title": "text", "text": "text",
    },
}  # fmt: skip


@dataclass
class Result:
    """The result of a query: column names and rows."""

    columns: list[str]
    rows: list[tuple[Any, ...]]
    unreadable: list[dict[str, str]] = field(default_factory=list)  # path and reason of each run missing from the tables

    def as_dicts(self) -> list[dict[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


@dataclass(frozen=True)
class Most:
    """What a query of someone else may cost: rows of the result, seconds, and memory."""

    rows: int
    seconds: float
    memory: str


def query(
    text: str, *, dir: str | os.PathLike[str] | None = None, project: str | None = None, store: Store | None = None,
    most: Most | None = None,
) -> Result:  # fmt: skip
    """Run one SELECT over the runs of a store, or of a directory; see docs/query.md for the tables."""
    with needed("duckdb", "sql", "SQL"):
        import duckdb
        import pyarrow  # noqa: F401 - passes tables to the engine
    with tempfile.TemporaryDirectory(prefix="fanfold-sql-") as spill, contextlib.closing(duckdb.connect(":memory:")) as engine:
        listing = Listing(store or LocalStore(dir), project)
        try:
            _check(engine, text)
            for name, table in _tables(listing, wanted(engine, text)).items():
                engine.register(name, table)
            if most is not None:
                engine.execute(
                    f"SET memory_limit = '{most.memory}'; SET threads = 2; SET max_temp_directory_size = '{most.memory}'"
                )
            _lock(engine, spill)
            with _within(engine, most):
                found = engine.execute(text)
                rows = found.fetchall() if most is None else found.fetchmany(most.rows)
            return Result([column[0] for column in found.description or ()], rows, listing.unreadable)
        except duckdb.Error as error:
            raise _explained(error) from error


@contextlib.contextmanager
def _within(engine: Any, most: Most | None) -> Iterator[None]:
    """Interrupt a query that takes too long."""
    if most is None:
        yield
        return
    timer = threading.Timer(most.seconds, engine.interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Listing:
    """The runs, listed once when the first table is read; the engine reads from several threads."""

    def __init__(self, store: Store, project: str | None) -> None:
        self.store, self.project = store, project
        self.unreadable: list[dict[str, str]] = []
        self._found: list[StoredRun] | None = None
        self._lock = threading.Lock()

    def __call__(self) -> list[StoredRun]:
        with self._lock:
            if self._found is None:
                self._found = found = self.store.listed(self.project)
                self.unreadable = found.unreadable
            return self._found


def _check(engine: Any, text: str) -> None:
    """Reject everything but a single SELECT, before anything runs."""
    statements = engine.extract_statements(text)
    kinds = [str(statement.type).rpartition(".")[2] for statement in statements]
    if kinds != ["SELECT"]:
        said = ", ".join(kinds) or "nothing"
        raise FanfoldError(
            f"fanfold query takes one SELECT, and this is {said}. Nothing was run. Runs are changed by other commands."
        )


def _lock(engine: Any, spill: str) -> None:
    """Block the query's access to files, network, extensions and Python's variables. Large sorts may spill to one folder.

    A slow query draws no progress bar: in notebooks and `python -c` the engine would draw it on stdout, into the answer.
    """
    engine.execute(f"SET temp_directory = '{spill}'")
    for setting in (
        "python_enable_replacements = false", "autoinstall_known_extensions = false", "autoload_known_extensions = false",
        "enable_external_access = false", "enable_progress_bar = false", "lock_configuration = true",
    ):  # fmt: skip
        engine.execute(f"SET {setting}")


def _explained(error: Exception) -> FanfoldError:
    said = str(error).strip()
    hint = "Tables: " + ", ".join(TABLES) + "; `fanfold query --tables` lists their columns."
    if type(error).__name__ == "PermissionException":
        hint = "A query reads the tables of runs and nothing else. " + hint
    return FanfoldError(f"the query could not be run. {said}\nNothing was changed. {hint}")


# The runs and keys a query reads


@dataclass
class Wanted:
    """The values of each column that a query can match; None means any."""

    project: set[str] | None = None
    run: set[str] | None = None
    key: set[str] | None = None
    uses: int = 0

    def add(self, found: dict[str, set[str]]) -> None:
        """Widen by another use of the table: a value is left out only if no use can match it."""
        for name in ("project", "run", "key"):
            before, more = getattr(self, name), found.get(name)
            if self.uses == 0:
                setattr(self, name, more)
            else:
                setattr(self, name, None if before is None or more is None else before | more)
        self.uses += 1

    def passes(self, name: str, value: str) -> bool:
        allowed = getattr(self, name)
        return allowed is None or value in allowed


def wanted(engine: Any, text: str) -> dict[str, Wanted]:
    """Return which runs and keys the parsed query names for each table, as far as this can be determined."""
    found = {name: Wanted() for name in TABLES}
    [(tree,)] = engine.execute("SELECT json_serialize_sql(?)", [text]).fetchall()
    parsed = json.loads(tree)
    if parsed.get("error"):
        return found
    nodes = list(_nodes(parsed))
    for node in nodes:
        for table, alias in _from(node.get("from_table")):
            if table in found:
                found[table].add(_equalities(node.get("where_clause"), alias))
    named = Counter(str(node.get("table_name")).lower() for node in nodes if node.get("type") == "BASE_TABLE")
    # A use that was not understood (a pivot, an ASOF join, a sample, renamed columns) may match anything.
    return {name: one if one.uses == named[name] else Wanted() for name, one in found.items()}


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield every node of a parsed query, at any depth."""
    if isinstance(tree, dict):
        yield tree
        tree = tree.values()
    elif not isinstance(tree, list):
        return
    for part in tree:
        yield from _nodes(part)


def _from(tree: Any) -> Iterator[tuple[str, str]]:
    """Yield the tables a SELECT reads directly, with their aliases."""
    if not isinstance(tree, dict):
        return
    if tree.get("type") == "BASE_TABLE" and not tree.get("sample") and not tree.get("column_name_alias"):
        name = str(tree.get("table_name", "")).lower()
        yield name, str(tree.get("alias") or name).lower()
    elif tree.get("type") == "JOIN" and tree.get("ref_type") in ("REGULAR", "CROSS", "NATURAL"):
        yield from _from(tree.get("left"))
        yield from _from(tree.get("right"))


def _equalities(tree: Any, alias: str) -> dict[str, set[str]]:
    """Return a table's columns that AND-ed conditions restrict: column = 'text' or column IN ('text', …)."""
    if not isinstance(tree, dict):
        return {}
    if tree.get("type") == "CONJUNCTION_AND":
        found: dict[str, set[str]] = {}
        for child in tree.get("children", ()):
            for name, values in _equalities(child, alias).items():
                found[name] = found[name] & values if name in found else values
        return found
    sides = [tree.get("left"), tree.get("right")] if tree.get("type") == "COMPARE_EQUAL" else []
    if sides and _column(sides[0], alias) is None:
        sides.reverse()
    if tree.get("type") == "COMPARE_IN":
        sides = tree.get("children", [])
    column = _column(sides[0], alias) if sides else None
    texts = [_text(side) for side in sides[1:]]
    if column is None or not texts or None in texts:
        return {}
    return {column: {text for text in texts if text is not None}}


def _column(tree: Any, alias: str) -> str | None:
    path = [str(part).lower() for part in tree.get("column_names", ())] if isinstance(tree, dict) else []
    return path[-1] if path and (len(path) == 1 or path[-2] == alias) else None


def _text(tree: Any) -> str | None:
    """Return the value of a text constant, in the forms that different engine versions use."""
    if not isinstance(tree, dict) or tree.get("class") != "CONSTANT":
        return None
    literal, value = tree.get("literal"), tree.get("value")
    if isinstance(literal, dict):
        return literal.get("text") if literal.get("kind") == "STRING" else None
    found = value.get("value") if isinstance(value, dict) else None
    return found if isinstance(found, str) else None


# The tables


@dataclass
class Stream:
    """A table produced batch by batch, from the start each time the engine reads it."""

    columns: dict[str, str]
    batches: Callable[[], Iterable[dict[str, Any]]]

    def schema(self) -> Any:
        import pyarrow as pa

        kinds = {
            "text": pa.string(), "texts": pa.list_(pa.string()), "number": pa.float64(), "whole": pa.int64(),
            "time": pa.timestamp("us"), "name": pa.dictionary(pa.int32(), pa.string()),
        }  # fmt: skip
        return pa.schema([(name, kinds[kind]) for name, kind in self.columns.items()])

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        import pyarrow as pa

        schema = self.schema()

        def made() -> Iterator[Any]:
            for batch in self.batches():
                yield pa.record_batch([_array(batch[field.name], field.type) for field in schema], schema=schema)

        return pa.RecordBatchReader.from_batches(schema, made()).__arrow_c_stream__(requested_schema)


def _array(values: Any, kind: Any) -> Any:
    import numpy as np
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        word, count = values
        return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([word]))
    if pa.types.is_timestamp(kind):
        return pa.array(np.round(np.asarray(values, np.float64) * 1e6).astype(np.int64)).cast(kind)
    return pa.array(values, kind)


def _tables(runs: Callable[[], list[StoredRun]], wanted: dict[str, Wanted]) -> dict[str, Stream]:
    def of(name: str, rows: Callable[[StoredRun], Iterable[tuple[Any, ...]]], *, opened: bool = True) -> Stream:
        def batches() -> Iterator[dict[str, Any]]:
            for run in _chosen(runs(), wanted[name]):
                found = rows(run.reopened() if opened else run)
                columns = list(zip(*((run.project, run.id, *row) for row in found), strict=True))
                if columns:
                    yield dict(zip(TABLES[name], columns, strict=True))

        return Stream(TABLES[name], batches)

    return {
        "runs": Stream(TABLES["runs"], lambda: _run_rows(runs())),
        "config": of("config", lambda run: [(key, *_both(value)) for key, value in flat(run.config).items()], opened=False),
        "latest": of("latest", lambda run: [(k, *_both(v)) for k, v in run.latest.items()], opened=False),
        "points": Stream(TABLES["points"], lambda: _point_batches(runs(), wanted["points"])),
        "texts": of("texts", lambda run: [
            (key, text.rank, text.step, text.time, text.text)
            for key in run.keys("text") if wanted["texts"].passes("key", key) for text in run.texts(key)
        ]),
        "media": of("media", lambda run: [
            (key, one.rank, one.step, one.time, one.kind)
            for key in run.keys("media") if wanted["media"].passes("key", key) for one in run.media(key)
        ]),
        "alerts": of("alerts", lambda run: [
            (one.get("rank"), one["t"] / 1e9, one.get("level"), one.get("title"), one.get("text")) for one in run.alerts
        ]),
    }  # fmt: skip


def _chosen(runs: Iterable[StoredRun], wanted: Wanted) -> Iterator[StoredRun]:
    return (run for run in runs if wanted.passes("run", run.id) and wanted.passes("project", run.project))


def _run_rows(runs: list[StoredRun]) -> Iterator[dict[str, Any]]:
    rows = [run.row() for run in runs]
    if rows:
        yield {name: [row["group" if name == "group_name" else name] for row in rows] for name in TABLES["runs"]}


def _both(value: Any) -> tuple[str | None, float | None]:
    """Return a value as text and, if it is a number, as a number."""
    if value is None:
        return None, None
    if isinstance(value, str):
        return value, number(value)
    if isinstance(value, (bool, int, float)):
        return json.dumps(value), float(value)
    return json.dumps(value, default=str), None


def _point_batches(runs: Iterable[StoredRun], wanted: Wanted) -> Iterator[dict[str, Any]]:
    for listed_run in _chosen(runs, wanted):
        run = listed_run.reopened()  # a separate object, so that only one run is open at a time
        for key in [*run.keys(), *run.keys("system")]:
            if wanted.passes("key", key):
                for found in points_by_rank(run, key):
                    yield from _batches(run, found)


def _batches(run: StoredRun, found: Points) -> Iterator[dict[str, Any]]:
    import numpy as np

    key, rank = found.key, found.rank
    for chunk in found.chunks:
        steps, times, values = chunk.steps, chunk.times, np.asarray(chunk.values, np.float64)
        for start in range(0, len(chunk), BATCH):
            part = slice(start, start + BATCH)
            count = len(steps[part])
            names = {"project": (run.project, count), "run": (run.id, count), "key": (key, count)}
            yield {**names, "rank": np.full(count, rank), "step": steps[part], "time": times[part], "value": values[part]}
