"""Merging: conversion of finished or long journals to column segments, one byte range at a time, so that memory stays bounded.

Every merger uses the same ranges, and a segment appears whole by a rename: two mergers at once do the same work twice and do no
harm. A merger that is killed leaves a temporary file, which the next one removes.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

from ..atomic import replacing
from ..errors import JournalError, notices
from ..journal import Journal, Kind
from ..journal import format as fmt
from ..journal.index import open_indexed
from ..journal.packed import raw_size
from ..process import module_command, same_modules
from ..settings import cache_directory
from . import segments
from .query import LocalStore, Store
from .segments import MAGIC, TICK

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RANGE_BYTES = 64 << 20
STALE_SECONDS = 3600.0
AFTER_SECONDS = 3.0


class Merged(NamedTuple):
    """The result of merging one range."""

    path: Path
    points: int
    read: int
    written: int


def merge(path: Path, *, cache: Path | None = None, finished: bool | None = None) -> Iterator[Merged]:
    """Convert a journal's unmerged ranges to segments: complete ranges of a live journal, all of a finished one."""
    cache = cache or cache_directory()
    try:
        if raw_size(path) < segments.WORTH_BYTES:
            return
        journal = open_indexed(path, cache)
    except (OSError, JournalError):
        return  # gone, or of another format: readers report it
    if finished is None:
        finished = is_finished(journal)
    _sweep(segments.folder_of(cache, journal.id))
    for start, end in missing(segments.chain_of(journal, cache).end, journal.verified, finished):
        try:
            yield _write(journal, cache, start, end)
        except OSError as error:
            notices.once(
                f"merge:{error.errno}",
                f"the segment of {path} could not be written: {error.strerror or error}. Reading stays right and gets no "
                "quicker. Make room in the cache folder, or name another one by FANFOLD_CACHE_DIR.",
            )
            return


def start(root: Path, *, quiet: bool = True) -> subprocess.Popen[bytes]:
    """Start merging in a low-priority process that runs until its stdin is closed: by the caller, or when the caller exits."""
    command = module_command("fanfold", "merge", "--follow", "--dir", str(root))
    environment = {**os.environ, **same_modules()}
    output = subprocess.DEVNULL if quiet else subprocess.PIPE
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True, env=environment)


@contextlib.contextmanager
def beside(store: Store, after: float = AFTER_SECONDS) -> Iterator[None]:
    """Merge beside a server while it runs, but not in its first seconds, when someone waits for the dashboard.

    Runs in a database need no merging here.
    """
    if not isinstance(store, LocalStore):
        yield
        return
    children: list[subprocess.Popen[bytes]] = []
    timer = threading.Timer(after, lambda: children.append(start(store.root)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        for child in children:
            _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    child.stdin.close()
    try:
        child.wait(1.0)
    except subprocess.TimeoutExpired:  # in the middle of a long journal: finished segments stay
        child.terminate()
        child.wait()


def is_finished(journal: Journal) -> bool:
    """Return whether a journal is unlikely to grow."""
    return any(True for _ in journal.records(Kind.END)) or journal.status() == "killed"


def missing(done: int, verified: int, finished: bool) -> Iterator[tuple[int, int]]:
    """Yield the ranges to merge. Their bounds depend on the content alone, so that all mergers agree."""
    while (end := (done // RANGE_BYTES + 1) * RANGE_BYTES) <= verified:
        yield done, end
        done = end
    if finished and verified - done >= segments.WORTH_BYTES:
        yield done, verified


def _sweep(folder: Path) -> None:
    """Remove files left behind by killed mergers."""
    with contextlib.suppress(OSError):
        for left in folder.glob(".*"):
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                left.unlink(missing_ok=True)


def _write(journal: Journal, cache: Path, start: int, end: int) -> Merged:
    path = segments.path_of(cache, journal.id, start, end)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with replacing(path, sync=True) as file:
        points = _columns(file, journal, start, end)
        written = file.tell()
    return Merged(path, points, end - start, written)


def _columns(file: IO[bytes], journal: Journal, start: int, end: int) -> int:
    """Write the columns of a range and the footer with their positions; return the number of points."""
    file.write(MAGIC)
    families = [_family(file, journal, keys, start, end) for keys in _families(journal, start, end)]
    footer = fmt.pack({"journal": journal.id, "start": start, "end": end, "mark": journal.print_of(end), "families": families})
    at = file.tell()
    file.write(
        footer + at.to_bytes(8, "little") + len(footer).to_bytes(4, "little") + crc32(footer).to_bytes(4, "little") + MAGIC
    )
    return sum(family["count"] * len(family["keys"]) for family in families)


def _families(journal: Journal, start: int, end: int) -> list[list[str]]:
    """Group the keys that occur in the same rows: they share their steps and times."""
    there = {shape for shape, rows in journal.rows.items() if rows.since(start, end)}
    found: dict[tuple[int, ...], list[str]] = {}
    for key, places in journal.by_key.items():
        shapes = tuple(rows.shape.id for rows, _ in places if rows.shape.id in there)
        if shapes:
            found.setdefault(shapes, []).append(key)
    return list(found.values())


def _family(file: IO[bytes], journal: Journal, keys: list[str], start: int, end: int) -> dict[str, Any]:
    family: dict[str, Any] = {"keys": {}}
    for key in keys:
        steps, times, values = journal.column(key, since=start, until=end)
        if "count" not in family:
            family |= {
                "count": len(steps),
                "low": int(steps.min()),
                "high": int(steps.max()),
                "ascending": bool((steps[1:] >= steps[:-1]).all()),
                "steps": _steps(file, steps),
                "times": _times(file, times),
                "began": float(times[0]),
            }
        family["keys"][key] = _values(file, values)
    return family


def _put(file: IO[bytes], how: str, count: int, column: NDArray[Any], **more: Any) -> dict[str, Any]:
    """Write an array at the next multiple of eight bytes."""
    file.write(bytes(-file.tell() % 8))
    at, data = file.tell(), column.astype(column.dtype.newbyteorder("<"), copy=False).view("u1").data
    file.write(data)
    kind = column.dtype.newbyteorder("<").str
    return {
        "how": how,
        "count": count,
        "type": kind,
        "length": len(column),
        "at": at,
        "size": len(data),
        "crc": crc32(data),
        **more,
    }


def _steps(file: IO[bytes], steps: NDArray[np.int64]) -> dict[str, Any]:
    """Write steps: as base and stride if they are evenly spaced, else as an array that can be searched in place."""
    import numpy as np

    stride = int(steps[1]) - int(steps[0]) if len(steps) > 1 else 0
    reach = int(steps[0]) + stride * len(steps)
    if stride >= 0 and abs(int(steps[0])) < 1 << 62 and abs(reach) < 1 << 62 and (np.diff(steps) == stride).all():
        return {"how": "line", "count": len(steps), "base": int(steps[0]), "stride": stride}
    return _put(file, "flat", len(steps), _small(steps))


def _small(whole: NDArray[np.int64]) -> NDArray[Any]:
    """Return integers in the smallest type that holds them."""
    import numpy as np

    low, high = whole.min(), whole.max()
    for kind in (np.int8, np.int16, np.int32):
        if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max:
            return whole.astype(kind)
    return whole


def _times(file: IO[bytes], times: NDArray[np.float64]) -> dict[str, Any]:
    """Write times as differences of whole ticks, which is lossless for current dates; otherwise as they are."""
    import numpy as np

    if len(times) > 1 and np.abs(times).max() < 2.0**31:
        ticks = (times / TICK).astype(np.int64)
        if (ticks * TICK == times).all():
            apart = np.diff(ticks)
            least = int(apart.min())
            if int(apart.max()) - least < 1 << 32:
                return _put(file, "ticks", len(times), _unsigned(apart - least), base=int(ticks[0]), stride=least)
    return _put(file, "flat", len(times), times)


def _unsigned(whole: NDArray[np.int64]) -> NDArray[Any]:
    import numpy as np

    kind = next(kind for kind in (np.uint8, np.uint16, np.uint32) if whole.max() <= np.iinfo(kind).max)
    return whole.astype(kind)


def _values(file: IO[bytes], values: NDArray[Any]) -> dict[str, Any]:
    """Write values in the smallest form that preserves every bit: one constant, single precision, small integers."""
    import numpy as np

    kind = values.dtype.str
    bits = values.view(np.int64) if values.dtype.itemsize == 8 else values.view(np.int8)
    if (bits == bits[0]).all():
        return {"how": "same", "count": len(values), "type": kind, "value": values[:1].tobytes(), "as": kind}
    if values.dtype == np.float64:
        with np.errstate(over="ignore", invalid="ignore"):
            single = values.astype(np.float32)
            if (single.astype(np.float64).view(np.int64) == bits).all():
                return _put(file, "flat", len(values), single, **{"as": kind})
    if values.dtype == np.int64:
        return _put(file, "flat", len(values), _small(values), **{"as": kind})
    return _put(file, "flat", len(values), values, **{"as": kind})
