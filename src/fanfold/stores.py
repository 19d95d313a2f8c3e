"""Opening a store by its address: a directory of runs, or a database. Everything that reads runs begins here."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import SettingError
from .journal.directory import is_run
from .settings import find_directory, is_address, is_gateway, store_address
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
    """Return stored runs, newest first, of one project or of all; `filter` selects among them (see docs/query.md).

    Args:
        project: Only runs of this project.
        filter: A condition, such as `"loss.min < 0.2 and tag:baseline"`.
        dir: Where the runs are: a directory, or the address of a ClickHouse store or a gateway.
        progress: Called with the folders to read and their number; returns them, for progress bars.

    Returns:
        A list of runs. Its `unreadable` lists runs that could not be read, with the reasons.

    Raises:
        SettingError: The filter cannot be understood, or there is no store of that kind.

    Example:
        ```python
        import fanfold

        fanfold.init("llm").finish()
        for run in fanfold.runs("llm", filter="status:finished"):
            print(run.name, run.duration)
        ```
    """
    if is_gateway(dir):
        from .fleet import gateway_run

        return gateway_run.runs(dir, project, filter)
    return matching(open_store(dir), project, filter, progress=progress)


def open(
    id_or_path: str | os.PathLike[str], *, dir: str | os.PathLike[str] | None = None, project: str | None = None
) -> StoredRun:
    """Open one stored run by its id, its name, its directory, or the beginning of its id. `-` is the newest run.

    PROJECT/ID and PROJECT/NAME work too, where a copy in another project has the same id or name.

    A path object, or a text that can only be a path (`.`, `..`, `./x`, `../x`, `/x`), is a directory. Any other text is looked
    up among the runs first, so a folder that happens to have the same name does not hide a run.

    `dir` may also be the address of a gateway: the run's facts can then be read and assigned, and its job be told what to do.

    Args:
        id_or_path: Which run, as above.
        dir: Where the runs are: a directory, or the address of a ClickHouse store or a gateway.
        project: Look only in this project.

    Returns:
        The run, also while it is being written.

    Raises:
        RunNotFound: There is no such run.
        RunError: Several runs match.

    Example:
        ```python
        import fanfold

        with fanfold.init("llm") as run:
            run.log({"loss": 0.5})
        print(fanfold.open(run.id).series("loss").values)
        ```
    """
    word = os.fspath(id_or_path)
    if is_gateway(dir):
        from .fleet import gateway_run

        return gateway_run.open_run(dir, word, project)
    if isinstance(id_or_path, os.PathLike) or (_is_path(word) and _is_run(word)):
        return open_run(Path(word))
    store = open_store(dir)
    if word != "-" and _is_run(word) and not _is_known(store, word, project):
        return open_run(Path(word))
    return find(store, word, project)


def _is_known(store: Store, word: str, project: str | None) -> bool:
    """Return whether a text is the complete id or name of a run in a store."""
    if any(word in (id, f"{name}/{id}") for name, id in store.names(project)):
        return True
    return any(word in (run.name, f"{run.project}/{run.name}") for run in matching(store, project, ""))


def _is_path(word: str) -> bool:
    """Return whether a text can only be a path."""
    return word in (".", "..") or word.startswith(("/", "./", "../"))


def _is_run(word: str) -> bool:
    return is_run(Path(word))  # False if it is too long for a path or contains a NUL: then it is a name
