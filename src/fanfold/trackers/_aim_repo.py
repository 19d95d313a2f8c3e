"""Aim's repositories: creating them so that a kill leaves none half-built, reserving a run's hash, and indexing."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from ..errors import notices, outcome

BUILD_SECONDS = 60.0  # a repository without a version, unchanged for this long, was left behind by a kill
Row = tuple[int, float, float, Any]  # step, value, time, epoch
EXACT = 1 << 53  # Aim hashes a point's step as a float: beyond this, neighbouring steps would collide


def opened(where: str | None, run_hash: str) -> Any:
    """Open a repository. A new one is built aside and moved into place: Aim cannot open one that a kill left half-built."""
    from aim.sdk.repo import Repo
    from aim.sdk.repo_utils import get_repo
    from aim.sdk.utils import clean_repo_path

    end_always()
    where = where or Repo.default_repo_path()
    if not where.startswith(("aim://", "ssh://")):
        _build(Path(clean_repo_path(where)).absolute(), run_hash)
    return get_repo(where)


def end_always() -> None:
    """Let the process end though a repository is gone or its disk is full: at exit Aim waits until it has closed everything.

    It waits for ever when closing one of its files raises, and leaves the others open; here it continues with the next.
    """
    from aim.ext.cleanup import AutoClean

    close_all = AutoClean._cleanup  # noqa: SLF001 - what Aim runs at exit
    if close_all.__module__ == __name__:
        return

    def close_each() -> None:
        for _ in range(len(AutoClean._finalizers) + 1):  # noqa: SLF001 - one that raised is not called again
            _, error = outcome(close_all)
            if error is None:
                break
            notices.once("aim:exit", f"Aim could not close a repository: {error}. The run's journal has all of its values.")
        AutoClean.stop_signal.set()

    AutoClean._cleanup = staticmethod(close_each)  # noqa: SLF001


def _build(root: Path, run_hash: str) -> None:
    from aim.sdk.configs import get_aim_repo_name
    from aim.sdk.repo import Repo

    home, aside = root / get_aim_repo_name(), root / f".fanfold-{run_hash}"  # the latter is used only by this run's relay
    shutil.rmtree(aside, ignore_errors=True)
    if (home / "VERSION").exists() or any(home.glob("*/chunks/*")):
        return  # already built; upgrading an old one without a version is Aim's job
    if home.exists():
        _discard(home)
    aside.mkdir(parents=True)
    Repo(str(aside), init=True).close()
    try:
        (aside / home.name).rename(home)
    except OSError:
        if not (home / "VERSION").exists():  # otherwise another run has built it in the meantime
            raise
    shutil.rmtree(aside, ignore_errors=True)


def _discard(home: Path) -> None:
    """Move a half-built repository away, unless another process may still be building it."""
    if time.time() - max(path.stat().st_mtime for path in (home, *home.rglob("*"))) < BUILD_SECONDS:
        raise BlockingIOError(f"{home} has no VERSION yet: another process may be building it")
    home.rename(home.with_name(f"{home.name}.incomplete-{time.time_ns()}"))


def reserved(repo: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the run's arguments after reserving its place in the repository: Aim opens known hashes but only creates its own."""
    run_hash = arguments["run_hash"]
    if repo.is_remote_repo:
        known = run_hash in repo.list_all_runs()
        return arguments if known else {name: value for name, value in arguments.items() if name != "run_hash"}
    (Path(repo.path) / "meta" / "chunks" / run_hash).mkdir(parents=True, exist_ok=True)
    # A killed relay leaves its lock behind. Our lock on the cursor proves it is gone; the store's own lock stops a live one.
    left = (Path(repo.path) / "locks" / f"{run_hash}.softlock").exists()
    return {"force_resume": left, **arguments}


def place_of(repo: Any) -> str:
    """Return a repository's address."""
    return f"aim://{repo.root_path}" if repo.is_remote_repo else str(repo.root_path)


def index(repo: Any, run_hash: str) -> None:
    """Make a finished run visible to queries. If `aim up` holds the index, it does this itself."""
    from aim.sdk.index_manager import RepoIndexManager, aimrocks
    from filelock import Timeout

    try:
        RepoIndexManager.get_index_manager(repo).index(run_hash)
    except (aimrocks.errors.RocksIOError, Timeout):
        notices.once(
            f"aim:index:{run_hash}",
            f"aim's index is held by another process, so run {run_hash} may not be found by queries yet. Nothing is lost. "
            "`aim up` adds it by itself; elsewhere run `aim storage reindex`.",
        )


def series_of(run: Any, name: str, context: Mapping[str, Any]) -> Any:
    """Return what Aim knows of a series in an open run; None before its first value."""
    from aim.storage.context import Context

    return run._tracker.sequence_infos.get((Context(dict(context)).idx, name))  # noqa: SLF001 - readers do not see open runs


def continues(series: Any, value: Any, step: int) -> bool:
    """Return whether a point is one more number of a series of numbers, of which Aim has its type and its first step."""
    kind = type(value).__name__
    return kind in ("float", "int") and series.dtype in (kind, "number") and series.version == 2 and step >= 0


def track_together(run: Any, series: Any, name: str, context: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Track points of one series, in the order of their steps, as `Run.track` does one by one.

    For each point Aim also writes down the last, highest and lowest value of its series, and deletes what was at its step. So the
    points with these values take Aim's way, and the others are put into its four arrays, each as a whole.
    """
    from aim.storage.encoding import encode_path
    from aim.storage.treeutils import encode_tree

    numbers = [row for row in rows if row[1] == row[1]] or rows[-1:]  # Aim's extremes leave out NaN
    told = {id(row) for row in (rows[-1], max(numbers, key=itemgetter(1)), min(numbers, key=itemgetter(1)))}
    for step, value, moment, epoch in (row for row in rows if id(row) in told):
        run._tracker._track(value, moment, name, step, epoch, context=context)  # noqa: SLF001 - as Run.track() does
    rest = [(encode_path((series.step_hash_fn(row[0]),)), row) for row in rows if id(row) not in told]
    for at, view in enumerate((series.step_view, series.val_view, series.time_view, series.epoch_view)):
        container = view.tree.container
        batch = container.batch()
        for path, row in rest:
            for key, stored_value in encode_tree(row[at]):
                container.set(path + key, stored_value, store_batch=batch)
        container.commit(batch)


def stored(run: Any, name: str, step: int, context: Mapping[str, Any]) -> Any:
    """Return the stored value of a name at a step, or None."""
    known = series_of(run, name, context)
    if known is None or not known.initialized:
        return None
    try:
        return known.val_view[known.step_hash_fn(step)]
    except KeyError:
        return None


def hash_exactly(run: Any, name: str, value: Any, context: Mapping[str, Any]) -> None:
    """Make a number sequence hash each step beyond 2**53 uniquely; readers use the steps themselves."""
    from aim.storage.context import Context

    tracker, idx = run._tracker, Context(dict(context)).idx  # noqa: SLF001 - no public API
    info = tracker.sequence_infos[idx, name]
    if not info.initialized:
        tracker._init_sequence_info(idx, name, tracker._normalized_values(value, name)[name])  # noqa: SLF001 - as track() does
    if info.version == 2:
        info.step_hash_fn = _step_hash


def _step_hash(step: int) -> int:
    from aim.storage.hashing import hash_auto

    return int(hash_auto(step if abs(step) <= EXACT else str(step)))
