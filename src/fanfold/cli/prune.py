"""Losslessly compress finished runs that every tracker has received, and delete leftover files without data.

A packed journal takes 40 to 70 % of the space and reads back bit for bit. Leftovers are empty journals, files of
dead processes, half-deleted runs. No logged data is deleted: `fanfold rm` deletes a run, and
`fanfold server forward --prune` the journals that a gateway holds completely.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..drawing.numbers import plural
from ..errors import JournalError, SettingError
from ..fleet.forward_note import behind
from ..journal import Journal, Kind, directory
from ..journal.format import PACKED, SUFFIX
from ..journal.liveness import LOST_SECONDS, is_locked
from ..journal.origin import origin_of
from ..journal.packing import GAIN, Packed, estimate, packing
from ..process import boot_id
from ..relay.cursor import settled
from ..store import catalogue, open_run
from ..store.changes import ASIDE, COPYING, weight
from ..store.filter import length
from . import choose, output
from .text import size

EXAMPLE = """examples:
  fanfold prune --dry-run
  fanfold prune --older-than 30d --project llm"""

WORTH_BYTES = 64 << 10  # packing a smaller journal saves too little for the time it takes to unpack
MEGABYTE = 1_000_000
HARDLY = "would hardly get smaller"
# What dead processes left half-written: folder, name with the process id, least age (another node may write a younger one).
_HALF_WRITTEN = (
    ("blobs", re.compile(r"\.(\d+)-[0-9a-f]{8}"), 3600.0, "half a blob of a process that is gone"),
    ("journal", re.compile(rf"\..+(?:{SUFFIX}|{PACKED})\.(\d+)-[0-9a-f]{{8}}"), LOST_SECONDS,
     "half a packed journal of a process that is gone"),
)  # fmt: skip
_HALF_COPIED = re.compile(rf"{re.escape(COPYING)}(\d+)-[0-9a-f]+"), 3600.0


class Leftover(NamedTuple):
    """A file or folder that can be deleted, and why."""

    path: Path
    why: str
    bytes: int


@dataclass
class Prunable:
    """The leftovers, the journals to pack, those that were packed, and why the others are kept as they are."""

    leftovers: list[Leftover] = field(default_factory=list)
    journals: list[Path] = field(default_factory=list)
    packed: list[Packed] = field(default_factory=list)
    kept: Counter[str] = field(default_factory=Counter)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--older-than", metavar="AGE", default="0s", help="only runs without new data for this long: 12h, 30d")
    parser.add_argument("--dry-run", action="store_true", help="only print what would be packed and deleted")


def run(args: argparse.Namespace) -> int:
    age = length(args.older_than)
    if age is None:
        raise SettingError(f"--older-than {args.older_than!r} is not an age. Nothing was deleted. Write 12h, 30d or 8w.")
    root, oldest = choose.folder(args, "prune"), time.time() - age
    found = Prunable()
    # This also brings the index up to date, so that listing the runs later does not unpack any of them.
    seen = {run.path: run.seen for run in catalogue.listed(root, args.project)}
    folders = [folder for folder in directory.run_directories(root, args.project) if seen.get(folder, 0.0) <= oldest]
    for folder in output.progress(args, folders, len(folders), "Checking runs"):
        _check_run(folder, found)
    found.leftovers += [*_half_deleted(root, args.project), *_half_copied(root, args.project)]
    if args.dry_run:
        _estimate(found)
    else:
        for gone in found.leftovers:
            shutil.rmtree(gone.path) if gone.path.is_dir() else gone.path.unlink(missing_ok=True)
        total = sum(file.stat().st_size for file in found.journals) // MEGABYTE + 1
        for _ in output.progress(args, _pack(found), total, "Packing (MB)", at=int):
            pass
    _report(args, found)
    return 0


def _pack(found: Prunable) -> Iterator[int]:
    """Pack the journals, yielding how many megabytes are done. A journal that cannot be packed stays as it is."""
    before = 0
    for file in found.journals:
        steps, done = packing(file), before
        try:
            while True:
                done = before + next(steps)
                yield done // MEGABYTE
        except StopIteration as end:
            if end.value is None:
                found.kept[f"{HARDLY}, or was written to meanwhile"] += 1
            else:
                found.packed.append(end.value)
                Path(f"{file}.alive").unlink(missing_ok=True)
        except (OSError, JournalError) as error:
            found.kept[f"could not be packed: {error}"] += 1
        before = done


def _estimate(found: Prunable) -> None:
    """Estimate the packed sizes from a few blocks of each journal."""
    for file in found.journals:
        raw, stored = file.stat().st_size, estimate(file)
        if stored > GAIN * raw:
            found.kept[HARDLY] += 1
        else:
            found.packed.append(Packed(file.with_suffix(PACKED), raw, stored))


def _check_run(folder: Path, found: Prunable) -> None:
    """Add a run's leftovers and the journals that can be packed, and count why the others are kept."""
    checked = [_check_journal(file) for file in directory.journal_files(folder)]
    live = any(one.live for one in checked)
    for one in checked:
        why = one.why or ("belongs to a run that is still running" if live and not one.empty else None)
        if why:
            found.kept[why] += 1
        elif one.empty:
            found.leftovers.append(Leftover(one.path, "an empty journal", one.size))
        else:
            found.journals.append(one.path)
    found.leftovers += _leftovers(folder)


class Checked(NamedTuple):
    """One journal: why it is kept as it is (None: it need not be), whether it is empty, whether it may still be written."""

    path: Path
    size: int
    why: str | None
    empty: bool = False
    live: bool = False


def _check_journal(file: Path) -> Checked:
    """Check one journal and close it again: a run may have more of them than a process can hold open."""
    if file.suffix == PACKED:
        return Checked(file, 0, "is packed already")
    journal = _read(file)
    if journal is None or not journal.begun:
        starting = journal is not None and time.time() - file.stat().st_mtime < LOST_SECONDS
        return Checked(file, 0, "cannot be read", live=starting)
    empty = not _holds_data(journal)
    written = "is still being written" if journal.status() != "killed" and not _ended(journal) else None
    grows = written or may_grow(journal)
    why = _undelivered(journal) or (written or _why_not_delete(journal) if empty else _unforwarded(journal) or grows)
    if not empty and not why and journal.size < WORTH_BYTES:
        why = "is too small to gain by packing"
    return Checked(file, journal.size, why, empty, bool(grows))


def _read(file: Path) -> Journal | None:
    try:
        journal = Journal(file)
        journal.refresh()
    except (OSError, JournalError):
        return None
    return journal


def _ended(journal: Journal) -> bool:
    return any(kind == Kind.END for kind, _, _ in journal.frames)


def _holds_data(journal: Journal) -> bool:
    """Return whether anything was logged. A merged segment is only a cache, not a copy."""
    empty = {Kind.HEADER, Kind.SHAPE, Kind.BEAT, Kind.END}
    return any(len(rows) for rows in journal.rows.values()) or any(kind not in empty for kind, _, _ in journal.frames)


# Why a journal is kept as it is, or None.


def _why_not_delete(journal: Journal) -> str | None:
    """Keep an empty journal that shows how its process ended."""
    if not _ended(journal):
        return "has no end record, which shows how its process died"
    if {record.data.status for record in journal.records(Kind.END)} - {"finished"}:
        return "shows how its process failed"
    return "has bytes that cannot be read" if journal.damaged or journal.tail else None


def _undelivered(journal: Journal) -> str | None:
    """Keep what a tracker has not confirmed. Ranks other than 0 are delivered only if the run folds keys over ranks."""
    run = journal.path.parent.parent
    destinations = settled(run)
    if not destinations or not (journal.path.name.startswith("0-") or open_run(run).info.get("fold")):
        return None
    late = [name for name, marks in destinations.items() if marks.get(journal.path.stem, 0) < journal.verified]
    return f"is not delivered to {', '.join(late)} yet (fanfold sync)" if late else None


def _unforwarded(journal: Journal) -> str | None:
    """Keep what a gateway that this run is forwarded to does not have completely."""
    late = behind(journal.path.parent.parent, journal.path)
    return f"is not at {', '.join(late)} yet (fanfold server forward)" if late else None


def may_grow(journal: Journal) -> str | None:
    """Keep an ended journal that may still grow: exit handlers log after the end, and a spool has to be copied."""
    home = origin_of(journal.path, journal.header)
    locked = is_locked(Path(f"{home}.alive")) if home is not None and journal.header.boot == boot_id() else None
    if locked is None:
        silent = time.time() - journal.seen / 1e9
        return "ended a moment ago, perhaps on another node" if silent < LOST_SECONDS else None
    if locked:
        return "is still being written"
    return "is not copied from its spool yet" if home is not None and home != journal.path and home.exists() else None


# Leftovers


def _files(folder: Path) -> Iterator[tuple[Path, int, float]]:
    """Yield a folder's plain files with size and age; links are not followed, and the folder itself must not be one."""
    if folder.is_symlink() or not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                stat = entry.stat(follow_symlinks=False)
                yield Path(entry.path), stat.st_size, time.time() - stat.st_mtime


def _leftovers(folder: Path) -> Iterator[Leftover]:
    """Yield files in a run's directory that dead processes left."""
    for name, pattern, seconds, why in _HALF_WRITTEN:
        for path, bytes, age in _files(folder / name):
            match = pattern.fullmatch(path.name)
            if match and age > seconds and not Path(f"/proc/{match[1]}").exists():
                yield Leftover(path, why, bytes)
    for path, bytes, age in _files(folder / "journal"):
        if path.name.endswith(f"{SUFFIX}.alive") and age >= LOST_SECONDS and not is_locked(path):
            journal = _read(path.with_suffix(""))
            if journal is None or not journal.begun or journal.status() == "killed":
                yield Leftover(path, "the lock of a process that is gone", bytes)


def _half_deleted(root: Path, project: str | None) -> Iterator[Leftover]:
    """Yield what an interrupted `fanfold rm` left."""
    return (Leftover(path, "a half-deleted run", weight(path)) for path in _set_aside(root, project, ASIDE))


def _half_copied(root: Path, project: str | None) -> Iterator[Leftover]:
    """Yield what an interrupted `fanfold cp` left: of a process that is gone, and not changed for a while."""
    pattern, seconds = _HALF_COPIED
    for path in _set_aside(root, project, COPYING):
        match = pattern.fullmatch(path.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            names = (found for folder, _, files in os.walk(path) for found in (folder, *(f"{folder}/{name}" for name in files)))
            if time.time() - max(os.lstat(name).st_ctime for name in names) > seconds:  # a copy has the mtime of the original
                yield Leftover(path, "half a copy of a process that is gone", weight(path))


def _set_aside(root: Path, project: str | None, prefix: str) -> Iterator[Path]:
    for path in root.glob(f"{'*' if project is None else directory.encode_name(project)}/{prefix}*"):
        if path.is_dir() and not path.is_symlink() and not path.parent.is_symlink():
            yield path


def _report(args: argparse.Namespace, found: Prunable) -> None:
    deleted, raw = sum(gone.bytes for gone in found.leftovers), sum(one.raw for one in found.packed)
    stored = sum(one.stored for one in found.packed)
    if args.json:
        gone = [{"path": str(one.path), "why": one.why, "bytes": one.bytes} for one in found.leftovers]
        packed = [{"path": str(p.path), "bytes": p.raw - p.stored, "raw": p.raw, "packed": p.stored} for p in found.packed]
        facts = {"dry_run": args.dry_run, "bytes": deleted + raw - stored, "kept": dict(found.kept), "deleted": gone}
        output.print_json({**facts, "packed": packed, "estimated": args.dry_run and bool(packed)})
        return
    would, about, estimated = ("would ", "about ", " (an estimate, from a sample of each)") if args.dry_run else ("", "", "")
    delete, pack = ("delete", "pack") if args.dry_run else ("deleted", "packed")
    for leftover in found.leftovers:
        output.remark(args, f"  {leftover.path}: {leftover.why}")
    for one in found.packed:
        output.remark(args, f"  {one.path}: {size(one.raw)} in {size(one.stored)}")
    print(f"{would}{delete} {plural(len(found.leftovers), 'leftover')}, {size(deleted)}.")
    if found.packed:
        journals = plural(len(found.packed), "journal")
        print(f"{would}{pack} {journals}: {size(raw)} in {about}{size(stored)}, {size(raw - stored)} freed{estimated}.")
    for why, count in found.kept.most_common():
        print(f"kept {plural(count, 'journal')}: each {why}.")
