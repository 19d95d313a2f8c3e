"""MLflow: a file store (`mlruns`), a database, or a server. None of them needs MLflow itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..process import digest
from . import mlflow_files, mlflow_server, mlflow_sql
from .events import Event, Found
from .mlflow_run import found_of
from .sqlite import with_log

ASK_SECONDS = 10.0  # how often a database on a server is read again


class MLflowImporter:
    """Runs of an MLflow file store, or of an MLflow database in SQLite."""

    kind = "mlflow"
    title = "MLflow"
    says_end = True

    def __init__(self) -> None:
        self._addresses: dict[str, str] = {}  # of runs that are not in files
        self._seen: dict[str, str] = {}  # and what changes with them

    def find(self, path: Path) -> Iterator[Found]:
        """Yield the runs of a store, an experiment or a run's folder, or of a database."""
        if path.is_file():
            for run_id, kept in mlflow_sql.runs_in(path):
                yield found_of(run_id, kept, with_log(path), "database")
            return
        for folder, kept in mlflow_files.runs_in(path):
            yield found_of(str(kept.info.get("run_id")), kept, (folder,), "file store")

    def find_address(self, address: str) -> Iterator[Found]:
        """Yield the runs of a server (`http://…`) or of a database (`sqlite:///…`, `postgresql://…`)."""
        scheme = address.partition(":")[0].lower()
        if scheme == "sqlite":
            yield from self.find(Path(address.removeprefix("sqlite:///")))
            return
        if scheme not in ("http", "https") and scheme.partition("+")[0] not in mlflow_sql.SCHEMES:
            return
        runs = mlflow_server.runs_at(address) if scheme in ("http", "https") else mlflow_sql.runs_at(address)
        for run_id, kept in runs:
            self._addresses[run_id] = address
            self._seen[run_id] = digest(repr(kept.latest or [kept.info, time.time() // ASK_SECONDS]))
            yield found_of(run_id, kept, (), "server" if scheme in ("http", "https") else "database")

    def signature(self, found: Found) -> Any:
        """Return what a server's list says of a run; None for runs in files."""
        return None if found.paths else self._seen.get(found.id)

    def read(self, found: Found, position: Any = None) -> Iterator[Event]:
        """Yield a run's events."""
        if not found.paths:
            address = self._addresses[found.id]
            remote = mlflow_server if address.lower().startswith("http") else mlflow_sql
            yield from remote.read_at(address, found.id, position)
            return
        path = found.paths[0]
        source = mlflow_sql if path.is_file() else mlflow_files
        yield from source.read(path, found.id, position if isinstance(position, dict) else {})
