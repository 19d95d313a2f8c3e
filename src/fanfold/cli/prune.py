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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ..errors import JournalError, SettingError
from ..fleet.forward_note import behind as not_at
from ..journal import Journal, Kind, directory
from ..journal.format import PACKED, SUFFIX
from ..journal.liveness import LOST_SECONDS, is_locked
from ..journal.origin import origin_of
from ..journal.packing import GAIN, Packed, estimate, packing
from ..process import boot_id
from ..relay.cursor import settled
from ..store import catalogue, open_run
from ..store.delete import ASIDE, weight
from . import choose, output
from .text import plural, size

EXAMPLE = """examples:
  fanfold prune --dry-run
  fanfold prune --older-than 30d --project llm"""

_AGE = re.compile(r"(\d+)\s*(s|min|h|d|w)")
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
STALE_SECONDS = 3600.0  # a file that a dead process was writing; younger ones may belong to another node
WORTH_BYTES = 64 << 10  # a smaller journal gives back too little for the time it takes to unpack
MEGABYTE = 1_000_000


class Leftover(NamedTuple):
    """Something that can go, and why."""

    path: Path
    why: str
    bytes: int


@dataclass
class Found:
    """What there is to do, what was done, and why the other journals stay as they are."""

    leftovers: list[Leftover] = field(default_factory=list)
    journals: list[Path] = field(default_factory=list)
    packed: list[Packed] = field(default_factory=list)
    kept: Counter[str] = field(default_factory=Counter)

    @property
    def freed(self) -> int:
        return sum(one.bytes for one in self.leftovers) + sum(one.raw - one.stored for one in self.packed)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--older-than", metavar="AGE", default="0s", help="only runs with no new data for this long: 12h, 30d, 8w"
    )
    parser.add_argument("--dry-run", action="store_true", help="only print what would be packed and deleted")


def run(args: argparse.Namespace) -> int:
    root, oldest = choose.folder(args, "prune"), time.time() - _age(args.older_than)
    found = Found()
    seen = {run.path: run.seen for run in catalogue.listed(root, args.project)}
    folders = [folder for folder in directory.run_directories(root, args.project) if seen.get(folder, 0.0) <= oldest]
    for folder in output.progress(args, folders, len(folders), "Looking"):
        look(folder, found)
    found.leftovers += half_deleted(root, args.project)
    if args.dry_run:
        found.packed = [one for file in found.journals if (one := expected(file, found.kept)) is not None]
    else:
        for gone in found.leftovers:
            _remove(gone.path)
        pack_all(args, root, found)
    _report(args, found)
    return 0


def pack_all(args: argparse.Namespace, root: Path, found: Found) -> None:
    """Pack the journals, after their runs' rows in the catalogue were made: listing them then needs none of it unpacked."""
    if found.journals:
        catalogue.listed(root, args.project)
    total = sum(file.stat().st_size for file in found.journals) // MEGABYTE + 1
    for _ in output.moving(args, _packing(found), total, "Packing (MB)"):
        pass


def _packing(found: Found) -> Iterator[int]:
    """Pack one journal after the other, yielding how many megabytes are done. One that cannot be packed stays as it is."""
    done = 0
    for file in found.journals:
        steps, before = packing(file), done
        try:
            while True:
                done = before + next(steps)
                yield done // MEGABYTE
        except StopIteration as end:
            _note(file, end.value, found)
        except (OSError, JournalError) as error:
            found.kept[f"could not be packed: {error}"] += 1


def _note(file: Path, packed: Packed | None, found: Found) -> None:
    if packed is None:
        found.kept[f"{HARDLY}, or was written to meanwhile"] += 1
    else:
        found.packed.append(packed)
        Path(f"{file}.alive").unlink(missing_ok=True)


def expected(file: Path, kept: Counter[str]) -> Packed | None:
    """Return what packing would make of a journal, by some blocks of it that are packed to nowhere."""
    raw, stored = file.stat().st_size, estimate(file)
    if stored > GAIN * raw:
        kept[HARDLY] += 1
        return None
    return Packed(file.with_suffix(PACKED), raw, stored)


def _age(text: str) -> float:
    match = _AGE.fullmatch(text.strip())
    if not match:
        raise SettingError(f"--older-than {text!r} is not an age. Nothing was deleted. Write for example 12h, 30d or 8w.")
    return int(match[1]) * _SECONDS[match[2]]


# Journals. Each condition says why a journal has to stay, or None; one reason is enough.


def being_written(journal: Journal) -> str | None:
    return "is still being written" if journal.status() != "killed" and not _ended(journal) else None


def has_no_end(journal: Journal) -> str | None:
    return None if _ended(journal) else "has no end record, which shows how its process died"


def ended_badly(journal: Journal) -> str | None:
    statuses = {record.data.status for record in journal.records(Kind.END)}
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


def not_forwarded(journal: Journal) -> str | None:
    """Keep what a gateway that this run is forwarded to does not have whole."""
    behind = not_at(journal.path.parent.parent, journal.path)
    return f"is not at {', '.join(behind)} yet (fanfold server forward)" if behind else None


def may_grow(journal: Journal) -> str | None:
    """Keep an ended journal that may be added to: exit handlers log after the end, and a spool has to be brought home."""
    home = origin_of(journal.path, journal.header)
    locked = is_locked(Path(f"{home}.alive")) if home is not None and journal.header.boot == boot_id() else None
    if locked is None:
        return "ended a moment ago, perhaps on another node" if _silence(journal) < LOST_SECONDS else None
    if locked:
        return "is still being written"
    return "is not copied from its spool yet" if home is not None and home != journal.path and home.exists() else None


def too_small(journal: Journal) -> str | None:
    return "is too small to gain by packing" if journal.size < WORTH_BYTES else None


HARDLY = "would hardly get smaller"
PACK: tuple[Callable[[Journal], str | None], ...] = (not_delivered, not_forwarded, being_written, may_grow, too_small)
KEEP: tuple[Callable[[Journal], str | None], ...] = (
    not_delivered, holds_data, being_written, has_no_end, ended_badly, holds_damage,
)  # fmt: skip


def reason_to_keep(journal: Journal) -> str | None:
    """Return the first reason why a journal must stay."""
    return next((why for condition in KEEP if (why := condition(journal))), None)


# What can go


class Judged(NamedTuple):
    """One journal: why it stays as it is (None: it need not), whether it holds nothing, whether somebody may write to it."""

    path: Path
    size: int
    why: str | None
    empty: bool = False
    live: bool = False


def look(folder: Path, found: Found) -> None:
    """See what can go in one run's directory, which of its journals can be packed, and why the others stay as they are."""
    judged = [judge(file) for file in directory.journal_files(folder)]
    live = any(one.live for one in judged)
    for one in judged:
        why = one.why or ("belongs to a run that is still running" if live and not one.empty else None)
        if why:
            found.kept[why] += 1
        elif one.empty:
            found.leftovers.append(Leftover(one.path, "an empty journal", one.size))
        else:
            found.journals.append(one.path)
    found.leftovers += [*orphans(folder), *stale_blobs(folder), *half_packed(folder)]


def judge(file: Path) -> Judged:
    """Read one journal. It is let go again: a run may have more of them than a process may hold open."""
    if file.suffix == PACKED:
        return Judged(file, 0, "is packed already")
    journal = _read(file)
    if journal is None:
        return Judged(file, 0, "cannot be read")
    if not journal.begun:  # perhaps a process that starts in this moment
        return Judged(file, 0, "cannot be read", live=time.time() - file.stat().st_mtime < LOST_SECONDS)
    why, empty = reason_to_keep(journal), not holds_data(journal)
    if not empty:
        why = next((reason for condition in PACK if (reason := condition(journal))), None)
    return Judged(file, journal.size, why, empty, bool(being_written(journal) or may_grow(journal)))


def _read(file: Path) -> Journal | None:
    try:
        journal = Journal(file)
        journal.refresh()
    except (OSError, JournalError):
        return None
    return journal


def _silence(journal: Journal) -> float:
    """Return for how many seconds its process has given no sign of life."""
    return time.time() - journal.seen / 1e9


@dataclass(frozen=True)
class _File:
    path: Path
    size: int
    age: float


def _files(folder: Path) -> Iterator[_File]:
    """Yield a folder's plain files; links are not followed, and the folder itself must not be one."""
    if folder.is_symlink():
        return
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    stat = entry.stat(follow_symlinks=False)
                    yield _File(Path(entry.path), stat.st_size, time.time() - stat.st_mtime)
    except (FileNotFoundError, NotADirectoryError):
        return


def orphans(folder: Path) -> Iterator[Leftover]:
    """Yield `.alive` files that no journal needs any more: theirs is gone, or ended."""
    for file in _files(folder / "journal"):
        if not file.path.name.endswith(f"{SUFFIX}.alive") or file.age < LOST_SECONDS or is_locked(file.path):
            continue
        journal = _read(file.path.with_name(file.path.name.removesuffix(".alive")))
        if journal is None or not journal.begun or journal.status() == "killed":
            yield Leftover(file.path, "the lock of a process that is gone", file.size)


def stale_blobs(folder: Path) -> Iterator[Leftover]:
    """Yield what a process was writing into `blobs/` when it died."""
    for file in _files(folder / "blobs"):
        match = re.fullmatch(r"\.(\d+)-[0-9a-f]{8}", file.path.name)
        if match and file.age > STALE_SECONDS and not Path(f"/proc/{match[1]}").exists():
            yield Leftover(file.path, "half a blob of a process that is gone", file.size)


def half_packed(folder: Path) -> Iterator[Leftover]:
    """Yield what a killed `prune` was writing: the journal it belongs to is still there."""
    for file in _files(folder / "journal"):
        match = re.fullmatch(rf"\..+({SUFFIX}|{PACKED})\.(\d+)-[0-9a-f]{{8}}", file.path.name)
        if match and file.age > LOST_SECONDS and not Path(f"/proc/{match[2]}").exists():
            yield Leftover(file.path, "half a packed journal of a process that is gone", file.size)


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


def _report(args: argparse.Namespace, found: Found) -> None:
    if args.json:
        deleted = [{"path": str(one.path), "why": one.why, "bytes": one.bytes} for one in found.leftovers]
        packed = [{"path": str(p.path), "bytes": p.raw - p.stored, "raw": p.raw, "packed": p.stored} for p in found.packed]
        told = {"dry_run": args.dry_run, "bytes": found.freed, "kept": dict(found.kept), "deleted": deleted, "packed": packed}
        output.print_json({**told, "estimated": args.dry_run and bool(packed)})
        return
    for gone in found.leftovers:
        output.remark(args, f"  {gone.path}: {gone.why}")
    for one in found.packed:
        output.remark(args, f"  {one.path}: {size(one.raw)} in {size(one.stored)}")
    bytes_gone = sum(gone.bytes for gone in found.leftovers)
    print(f"{'would delete' if args.dry_run else 'deleted'} {plural(len(found.leftovers), 'leftover')}, {size(bytes_gone)}.")
    if found.packed:
        _report_packed(args, found.packed)
    for why, count in found.kept.most_common():
        print(f"kept {plural(count, 'journal')}: each {why}.")


def _report_packed(args: argparse.Namespace, packed: list[Packed]) -> None:
    raw, stored = sum(one.raw for one in packed), sum(one.stored for one in packed)
    what = f"{plural(len(packed), 'journal')}: {size(raw)} in"
    if args.dry_run:
        print(f"would pack {what} about {size(stored)}, {size(raw - stored)} freed (an estimate, from a sample of each).")
    else:
        print(f"packed {what} {size(stored)}, {size(raw - stored)} freed.")
