"""Opening a store by its address: a directory of runs, or a database. Everything that reads runs begins here."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import SettingError
from .journal.directory import is_run
from .settings import find_directory, is_address, store_address
from .store import StoredRun, open_run
from .store.catalogue import Progress
from .store.query import LocalStore, Store, find, matching
from .store.run import Runs

SCHEMES = ("clickhouse", "clickhouses")


def open_store(address: str | os.PathLike[str] | None = None) -> Store:
    """Open the store at an address: a directory or clickhouse://host/database. Default: FANFOLD_DIR or the nearest .fanfold."""
    given = store_address(address)
    if not is_address(given):
        return LocalStore(find_directory(address))
    scheme = str(given).partition("://")[0]
    if scheme not in SCHEMES:
        raise SettingError(
            f"there is no store of the kind {scheme!r}. Nothing was opened. Name a directory, or clickhouse://host/database."
        )
    from .clickhouse.store import connect  # imported here because it needs its own driver

    return connect(str(given))


def runs(
    project: str | None = None,
    *,
    filter: str = "",
    dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Runs:
    """Return stored runs, newest first, of one project or of all; `filter` selects among them (see docs/query.md)."""
    return matching(open_store(dir), project, filter, progress=progress)


def open(
    id_or_path: str | os.PathLike[str], *, dir: str | os.PathLike[str] | None = None, project: str | None = None
) -> StoredRun:
    """Open one stored run by its id, its name, its directory, or the beginning of its id. `-` is the newest run.

    A path object, or a text that can only be a path (`.`, `..`, `./x`, `../x`, `/x`), is a directory. Any other text is looked
    up among the runs first, so a folder that happens to have the same name does not hide a run.
    """
    word = os.fspath(id_or_path)
    if isinstance(id_or_path, os.PathLike) or (_is_path(word) and _is_run(word)):
        return open_run(Path(word))
    store = open_store(dir)
    if word != "-" and _is_run(word) and not _is_known(store, word, project):
        return open_run(Path(word))
    return find(store, word, project)


def _is_known(store: Store, word: str, project: str | None) -> bool:
    """Return whether a text is the complete id or name of a run in a store."""
    return any(word == name[1] for name in store.names(project)) or any(word == run.name for run in matching(store, project, ""))


def _is_path(word: str) -> bool:
    """Return whether a text can only be a path."""
    return word in (".", "..") or word.startswith(("/", "./", "../"))


def _is_run(word: str) -> bool:
    return is_run(Path(word))  # False if it is too long for a path or contains a NUL: then it is a name
