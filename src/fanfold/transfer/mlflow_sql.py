"""MLflow's database: SQLite is read directly, other databases through SQLAlchemy. Older schemas lack some columns and tables."""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
import numpy as np

from ..errors import SettingError, needed
from ..process import digest
from .events import Event, Facts, Mark, Rows
from .mlflow_files import new_files, tree
from .mlflow_run import SOURCE_RUN, TRACES, MLflowFacts, began, ended, files, finite, keys_of, nanoseconds
from .reading import Account, resumed
from .sqlite import BROKEN, SQLiteFile, opened

BATCH = 1 << 15
SCHEMES = ("postgresql", "postgres", "mysql", "mariadb", "mssql", "oracle", "sqlite")
NEEDED = {"experiments", "runs", "metrics", "params", "tags"}
_RUN = ("run_uuid", "name", "source_name", "source_version", "user_id", "status", "start_time", "end_time", "lifecycle_stage",
        "artifact_uri", "experiment_id")  # fmt: skip
_POINT = ("key", "value", "timestamp", "step", "is_nan")


def is_mlflow(database: SQLiteFile) -> bool:
    """Return whether a database has MLflow's tables."""
    return database.tables.keys() >= NEEDED and {"run_uuid", "experiment_id"} <= database.tables["runs"]


# Finding runs


def runs_in(path: Path) -> Iterator[tuple[str, MLflowFacts]]:
    """Yield the runs of a SQLite database; nothing if it is not MLflow's."""
    ours = False
    try:
        with opened(path) as database:
            ours = is_mlflow(database)
            yield from runs_of(database) if ours else ()
    except BROKEN:
        if ours:  # what is damaged appears in the account
            yield (
                str(path.absolute()),
                MLflowFacts(info={"run_name": path.name}, params={}, tags={}, experiment=path.stem, datasets=[]),
            )


def runs_of(database: SQLiteFile) -> Iterator[tuple[str, MLflowFacts]]:
    """Yield all runs of a database, with the tags that tell what a run is."""
    experiments = _experiments(database)
    wanted = "WHERE t.\"key\" LIKE 'fanfold.%' OR t.\"key\" IN ('mlflow.runName')"
    tags: dict[str, dict[str, str]] = {}
    for run, key, value in database.select("tags", ("run_uuid", "key", "value"), wanted):
        tags.setdefault(str(run), {})[str(key)] = str(value or "")
    for row in database.select("runs", _RUN):
        kept = _kept(row, experiments, tags.get(str(row[0]), {}))
        yield str(row[0]), kept


def _experiments(database: SQLiteFile) -> dict[Any, tuple[str, bool]]:
    rows = database.select("experiments", ("experiment_id", "name", "lifecycle_stage"))
    return {key: (str(name), stage == "deleted") for key, name, stage in rows}


def _kept(row: tuple[Any, ...], experiments: Mapping[Any, tuple[str, bool]], tags: dict[str, str]) -> MLflowFacts:
    info = dict(zip(_RUN, row, strict=True))
    experiment, deleted = experiments.get(info["experiment_id"], (str(info["experiment_id"]), False))
    info |= {"run_id": str(info["run_uuid"]), "run_name": info["name"], "experiment_id": str(info["experiment_id"])}
    return MLflowFacts(
        info=info,
        params={},
        tags=tags,
        experiment=experiment,
        datasets=[],
        archived=deleted or info["lifecycle_stage"] == "deleted",
    )


# Reading one run


def read(path: Path, run_id: str, position: dict[str, Any]) -> Iterator[Event]:
    """Yield a run's events from a position on."""
    account = Account()
    state = copy.deepcopy({"facts": "", "row": 0, "files": {}} | position)
    try:
        with opened(path) as database:
            kept = _run(database, run_id)
            if kept is not None:
                yield from _events(database, kept, state, path, account)
            else:
                account.leave("run", "it is not in the database", run_id)
    except BROKEN as error:
        account.leave("the rest of the run", f"the database cannot be read: {error}", run_id)
    yield from account.events()
    if state != position:
        yield Mark(position=state)


def _events(database: SQLiteFile, kept: MLflowFacts, state: dict[str, Any], path: Path, account: Account) -> Iterator[Event]:
    described = digest(repr(msgspec.to_builtins(kept)))
    anything = described != state["facts"]
    if anything:
        yield from began(kept)
        _left(database, kept, account)
    for event in itertools.chain(_points(database, kept, state, account), _files(kept, path, state, account)):
        anything = True
        yield event
    if anything:
        yield from ended(kept)
    state["facts"] = described


def _left(database: SQLiteFile, kept: MLflowFacts, account: Account) -> None:
    """Count what belongs to a run and is not carried."""
    run = kept.info["run_id"]
    rest = 'WHERE t."key" = :key AND t."value" = :run'
    traces = sum(1 for _ in database.select("trace_request_metadata", ("key",), rest, key=SOURCE_RUN, run=run))
    models = sum(1 for _ in database.select("logged_models", ("model_id",), 'WHERE t."source_run_id" = :run', run=run))
    if traces:
        account.leave("traces", TRACES, count=traces)
    if models:
        account.leave("logged models", "their metrics and params are not carried", count=models)


def _files(kept: MLflowFacts, path: Path, state: dict[str, Any], account: Account) -> Iterator[Event]:
    yield from files(kept, new_files(_artifacts(kept, path, account), state["files"]), account)


def _run(database: SQLiteFile, run_id: str) -> MLflowFacts | None:
    row = next(database.select("runs", _RUN, 'WHERE t."run_uuid" = :run', run=run_id), None)
    if row is None:
        return None
    kept = _kept(row, _experiments(database), {})
    pairs = {
        table: database.select(table, ("key", "value"), 'WHERE t."run_uuid" = :run', run=run_id) for table in ("tags", "params")
    }
    kept.tags, kept.params = ({str(key): str(value or "") for key, value in pairs[table]} for table in ("tags", "params"))
    parent = kept.tags.get("mlflow.parentRunId")
    if parent:
        named = next(database.select("runs", ("name",), 'WHERE t."run_uuid" = :run', run=parent), None)
        kept.parent = str(named[0] or "") if named else ""
    kept.datasets = _datasets(database, run_id)
    return kept


def _datasets(database: SQLiteFile, run_id: str) -> list[dict[str, Any]]:
    names = ("name", "digest", "dataset_source_type", "dataset_source", "dataset_schema", "dataset_profile")
    found = []
    inputs = database.select("inputs", ("input_uuid", "source_id", "source_type"), 'WHERE t."destination_id" = :run', run=run_id)
    for input_id, source, kind in list(inputs):
        for row in database.select("datasets", names, 'WHERE t."dataset_uuid" = :id', id=source) if kind == "DATASET" else ():
            about = dict(zip((name.removeprefix("dataset_") for name in names), row, strict=True))
            tags = dict(database.select("input_tags", ("name", "value"), 'WHERE t."input_uuid" = :id', id=input_id))
            found.append({**about, "tags": tags} if tags else about)
    return found


def _points(database: SQLiteFile, kept: MLflowFacts, state: dict[str, Any], account: Account) -> Iterator[Event]:
    """Yield points in the order they were written, and a mark after each batch."""
    run = kept.info["run_id"]
    rows = database.select(
        "metrics",
        ("rowid", *_POINT),
        'WHERE t."run_uuid" = :run AND t.rowid > :after ORDER BY t.rowid',
        run=run,
        after=state["row"],
    )
    keys, ours = keys_of(kept), "fanfold.run_id" in kept.tags
    while True:
        batch = [row for _, row in zip(range(BATCH), rows, strict=False)]
        if not batch:
            return
        yield from events_of([row[1:] for row in batch], keys, account, ours=ours)
        state["row"] = batch[-1][0]
        yield Mark(position=copy.deepcopy(state))


def events_of(rows: list[tuple[Any, ...]], keys: Mapping[str, str], account: Account, *, ours: bool) -> Iterator[Event]:
    """Yield the points of rows with key, value, time in milliseconds, step and whether the value is NaN."""
    columns: dict[str, list[tuple[int, int, float]]] = {}
    for key, value, ms, step, nan in rows:
        time_ns = nanoseconds(ms)
        fits = isinstance(value, (int, float)) and isinstance(step, (int, type(None))) and isinstance(key, str)
        if time_ns is None or not fits:
            account.leave("points", "a row cannot be read", f"{key}: {value!r} at {step!r}")
            continue
        number = float("nan") if nan else finite(float(value))
        columns.setdefault(keys.get(key, key), []).append((step or 0, time_ns, number))
    for key, points in columns.items():
        steps, times, values = zip(*points, strict=True)
        if ours and key.startswith("summary/"):
            yield Facts(summary={key.removeprefix("summary/"): values[-1]})
            continue
        system = not ours and key.startswith("system/")
        yield Rows(
            steps=None if system else np.array(steps, np.int64), times=np.array(times, np.int64),
            columns={key: np.array(values, np.float64)}, system=system,
        )  # fmt: skip


def _artifacts(kept: MLflowFacts, database: Path, account: Account) -> dict[str, Path]:
    """Return the run's files, if they are beside the database: a file of somebody else never names another place to read."""
    address = str(kept.info.get("artifact_uri") or "")
    home = database.resolve().parent
    place = Path(unquote(urlsplit(address).path)) if address.startswith("file:") else Path(address)
    ids = (str(kept.info.get("experiment_id")), str(kept.info["run_id"]))
    plain = all(part and "/" not in part and part not in (".", "..") for part in ids)
    guesses = [home / name / ids[0] / ids[1] / "artifacts" for name in ("mlruns", "mlartifacts")] if plain else []
    for guess in ([place] if "://" not in address or address.startswith("file:") else []) + guesses:
        resolved = guess.resolve()
        if resolved.is_dir() and resolved.is_relative_to(home) and resolved != home:
            return tree(resolved)
    if address and (("://" in address and not address.startswith("file:")) or place.exists()):
        why = "they are not beside the database, so they were not read" if place.exists() else "they are elsewhere; not fetched"
        account.leave("the run's files", why, address)
    return {}


# Databases other than SQLite


def runs_at(address: str) -> Iterator[tuple[str, MLflowFacts]]:
    """Yield the runs of any database that SQLAlchemy knows; raise SettingError if it cannot be read."""
    try:
        with _connected(address) as database:
            if not is_mlflow(database):
                raise ValueError("it has no tables of MLflow")
            yield from runs_of(database)
    except _sqlalchemy_errors() as error:
        raise SettingError(
            f"the database cannot be read: {error}. Nothing was imported from it. Check the address, and that the database's "
            "driver is installed."
        ) from error


def read_at(address: str, run_id: str, position: Any) -> Iterator[Event]:
    """Yield a run's events."""
    yield from resumed(_all(address, run_id), position)


def _all(address: str, run_id: str) -> Iterator[Event]:
    account = Account()
    try:
        with _connected(address) as database:
            kept = _run(database, run_id)
            if kept is not None:
                yield from began(kept)
                _left(database, kept, account)
                rest = 'WHERE t."run_uuid" = :run ORDER BY t."timestamp", t."step"'
                rows = database.select("metrics", _POINT, rest, run=run_id)
                ours = "fanfold.run_id" in kept.tags
                while batch := [row for _, row in zip(range(BATCH), rows, strict=False)]:
                    yield from events_of(batch, keys_of(kept), account, ours=ours)
                if kept.info.get("artifact_uri"):
                    account.leave(
                        "the run's files", "they are not in the database, and were not fetched", kept.info["artifact_uri"]
                    )
                yield from ended(kept)
    except _sqlalchemy_errors() as error:
        account.leave("the rest of the run", f"the database cannot be read: {error}", run_id)
    yield from account.events()


def _sqlalchemy_errors() -> tuple[type[Exception], ...]:
    with needed("sqlalchemy", "mlflow", "Reading an MLflow database other than SQLite"):
        from sqlalchemy.exc import SQLAlchemyError
    return (SQLAlchemyError, OSError, ValueError, ImportError)


@contextlib.contextmanager
def _connected(address: str) -> Iterator[SQLiteFile]:
    """Open any database that SQLAlchemy knows."""
    import sqlalchemy

    engine = sqlalchemy.create_engine(address)
    quote = engine.dialect.identifier_preparer.quote_identifier
    try:
        with engine.connect() as found:
            names = sqlalchemy.inspect(engine)
            tables = {table: {column["name"] for column in names.get_columns(table)} for table in names.get_table_names()}

            def execute(query: str, values: Mapping[str, Any]) -> Iterator[tuple[Any, ...]]:
                text = sqlalchemy.text(re.sub(r'"(\w+)"', lambda word: quote(word[1]), query))
                return (tuple(row) for row in found.execute(text, dict(values)))

            yield SQLiteFile(execute, tables)
    finally:
        engine.dispose()
