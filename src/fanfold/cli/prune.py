"""Delete leftovers that hold no data: empty journals, files of dead processes, half-deleted runs.

A journal that holds a single point, text, image or fact is never deleted here: it is the only copy of record. Merged
segments are a cache, and a tracker keeps what it likes. `fanfold rm` deletes a run, and `fanfold forward --prune` the
journals that a gateway holds whole.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..errors import JournalError, SettingError
from ..journal import Journal, Kind, directory
from ..journal.format import SUFFIX
from ..journal.liveness import LOST_SECONDS, is_locked, status_of
from ..relay.cursor import settled
from ..settings import find_directory
from ..store import open_run
from ..store.delete import ASIDE, weight
from . import output
from .text import plural, size

EXAMPLE = """examples:
  fanfold prune --dry-run
  fanfold prune --older-than 30d --project llm"""

_AGE = re.compile(r"(\d+)\s*(s|min|h|d|w)")
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
STALE_SECONDS = 3600.0  # a file that a dead process was writing; younger ones may belong to another node


class Leftover(NamedTuple):
    """Something that can go, and why."""

    path: Path
    why: str
    bytes: int


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--older-than", metavar="AGE", default="0s", help="only runs silent for so long: 12h, 30d, 8w")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")


def run(args: argparse.Namespace) -> int:
    root, oldest = find_directory(args.dir), time.time() - _age(args.older_than)
    found: list[Leftover] = []
    kept: Counter[str] = Counter()
    folders = [folder for folder in directory.run_directories(root, args.project) if _silent_since(folder) <= oldest]
    for folder in output.progress(args, folders, len(folders), "Looking"):
        found += leftovers(folder, kept)
    found += half_deleted(root, args.project)
    if not args.dry_run:
        for one in found:
            _remove(one.path)
    _report(args, found, kept)
    return 0


def _age(text: str) -> float:
    match = _AGE.fullmatch(text.strip())
    if not match:
        raise SettingError(f"--older-than {text!r} is no age. Nothing was deleted. Write for example 12h, 30d or 8w.")
    return int(match[1]) * _SECONDS[match[2]]


def _silent_since(folder: Path) -> float:
    return max((file.stat().st_mtime for file in directory.journal_files(folder)), default=0.0)


# Journals. Each condition says why a journal has to stay, or None; one reason is enough.


def being_written(journal: Journal) -> str | None:
    return "is still being written" if status_of(journal.path, journal.header) != "killed" and not _ended(journal) else None


def has_no_end(journal: Journal) -> str | None:
    return None if _ended(journal) else "has no end, which is the record of how its process died"


def ended_badly(journal: Journal) -> str | None:
    statuses = {record.data.get("status") for record in journal.records(Kind.END)}
    return None if statuses <= {"finished"} else "tells how its process failed"


def holds_damage(journal: Journal) -> str | None:
    return "has bytes that cannot be read" if journal.damaged or journal.tail else None


def holds_data(journal: Journal) -> str | None:
    """Keep everything that anybody logged. A merged segment does not count: it is a cache that may be deleted any time."""
    empty = {Kind.HEADER, Kind.SHAPE, Kind.BEAT, Kind.END}
    has = any(len(rows) for rows in journal.rows.values()) or any(kind not in empty for kind, _, _ in journal.frames)
    return "holds the only copy of its data" if has else None


def not_delivered(journal: Journal) -> str | None:
    """Keep what a tracker has not confirmed; ranks other than 0 go to trackers only where the run folds keys over ranks."""
    run = journal.path.parent.parent
    destinations = settled(run)
    if not destinations or not (journal.path.name.startswith("0-") or open_run(run).info.get("fold")):
        return None
    behind = [name for name, marks in destinations.items() if marks.get(journal.path.stem, 0) < journal.verified]
    return f"is not delivered to {', '.join(behind)} yet (fanfold sync)" if behind else None


KEEP: tuple[Callable[[Journal], str | None], ...] = (
    not_delivered, holds_data, being_written, has_no_end, ended_badly, holds_damage,
)  # fmt: skip


def reason_to_keep(journal: Journal) -> str | None:
    """Return the first reason why a journal must stay."""
    return next((why for condition in KEEP if (why := condition(journal))), None)


# What can go


def leftovers(folder: Path, kept: Counter[str]) -> Iterator[Leftover]:
    """Yield what can go in one run's directory, and count why its journals stay."""
    for file in directory.journal_files(folder):
        try:
            journal = Journal(file)
            journal.refresh()
            why = reason_to_keep(journal) if journal.header else "cannot be read"
        except JournalError:
            why = "cannot be read"
        if why:
            kept[why] += 1
        else:
            yield Leftover(file, "an empty journal", file.stat().st_size)
    yield from orphans(folder)
    yield from stale_blobs(folder)


@dataclass(frozen=True)
class _File:
    path: Path
    size: int
    age: float


def _files(folder: Path) -> Iterator[_File]:
    """Yield a folder's plain files; links are not followed."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    stat = entry.stat(follow_symlinks=False)
                    yield _File(Path(entry.path), stat.st_size, time.time() - stat.st_mtime)
    except FileNotFoundError:
        return


def orphans(folder: Path) -> Iterator[Leftover]:
    """Yield `.alive` files that no journal needs any more: theirs is gone, or ended."""
    for file in _files(folder / "journal"):
        if not file.path.name.endswith(f"{SUFFIX}.alive") or file.age < LOST_SECONDS or is_locked(file.path):
            continue
        journal = file.path.with_name(file.path.name.removesuffix(".alive"))
        header = directory.read_header(journal)
        if header is None or status_of(journal, header) == "killed":
            yield Leftover(file.path, "the lock of a process that is gone", file.size)


def stale_blobs(folder: Path) -> Iterator[Leftover]:
    """Yield what a process was writing into `blobs/` when it died."""
    for file in _files(folder / "blobs"):
        match = re.fullmatch(r"\.(\d+)-[0-9a-f]{8}", file.path.name)
        if match and file.age > STALE_SECONDS and not Path(f"/proc/{match[1]}").exists():
            yield Leftover(file.path, "half a blob of a process that is gone", file.size)


def half_deleted(root: Path, project: str | None) -> Iterator[Leftover]:
    """Yield what an interrupted `fanfold rm` left."""
    base = root / directory.encode_name(project) if project is not None else root
    for path in base.glob(f"{ASIDE}*" if project is not None else f"*/{ASIDE}*"):
        if path.is_dir() and not path.is_symlink() and not path.parent.is_symlink():
            yield Leftover(path, "a half-deleted run", weight(path))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _ended(journal: Journal) -> bool:
    return any(kind == Kind.END for kind, _, _ in journal.frames)


def _report(args: argparse.Namespace, found: list[Leftover], kept: Counter[str]) -> None:
    freed = sum(one.bytes for one in found)
    if args.json:
        deleted = [{"path": str(one.path), "why": one.why, "bytes": one.bytes} for one in found]
        output.print_json({"dry_run": args.dry_run, "bytes": freed, "kept": dict(kept), "deleted": deleted})
        return
    for one in found:
        output.remark(args, f"  {one.path}: {one.why}")
    word = "would delete" if args.dry_run else "deleted"
    print(f"{word} {plural(len(found), 'leftover')}, {size(freed)}.")
    for why, count in kept.most_common():
        print(f"kept {plural(count, 'journal')}: each {why}.")
