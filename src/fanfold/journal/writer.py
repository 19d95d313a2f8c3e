"""The writing end of a journal: one write(2) per call, no lock on the fast path, a new file when one fails.

`Sheet` is one open file; `Writer` is a process's sequence of sheets. `Run.log` packs rows itself through `Sheet.shapes`
(the fast path); everything else goes through `Writer.append` and `Writer.row`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO
from zlib import crc32

from ..atomic import sync_folders
from ..errors import JournalError, notices
from .files import create
from .format import HEAD, MAGIC, MAX_BODY, MAX_KEYS, SUFFIX, Kind, Layout, Shape, covered, frame, new_id, pack, seed_of

if sys.platform != "win32":
    import fcntl

MAX_SHAPES = 16_384
MAX_LATEST = 1 << 17  # keys whose last value is kept in memory
MAX_HELD = 1_024  # frames kept in memory while nothing can be written
MAX_HELD_BYTES = 16 << 20
MAX_RESTORED = 64
RETRY_SECONDS = 1.0
HIGH_DESCRIPTOR = 700
SETTLE_SECONDS = 0.02
_I32 = range(-(1 << 31), 1 << 31)
_DSYNC: int = getattr(os, "O_DSYNC", 0)

# Paths of the .alive locks this process holds. A reader in the same process must not open them: closing any
# descriptor of a file drops all POSIX locks the process has on it.
held: set[str] = set()

# Descriptors taken out of use. Another thread may be about to write to one, so for a while we keep its number and
# point it at a file that rejects writes: the late write fails and is repeated on the next sheet.
_retired: deque[tuple[float, int]] = deque()


def try_lock(fd: int, *, shared: bool = False) -> bool | None:
    """Take a POSIX lock without waiting: False if another process holds it, None if the filesystem has no locks."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.lockf(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (errno.EAGAIN, errno.EACCES) else None
    return True


def _retire(fd: int) -> None:
    try:
        null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # no descriptor left: release the number immediately
        os.close(fd)
        return
    os.dup2(null, fd, inheritable=False)
    os.close(null)
    _retired.append((time.monotonic() + 2.0, fd))
    while _retired and _retired[0][0] < time.monotonic():
        os.close(_retired.popleft()[1])


class Orphan:
    """A deleted journal whose bytes can still be read: the kernel keeps them while a descriptor is open (Linux)."""

    def __init__(self, sheet: Sheet) -> None:
        self.path = sheet.path
        self._source = moved_up(os.open(f"/proc/self/fd/{sheet.fd}", os.O_RDONLY | os.O_CLOEXEC))
        self._target: int | None = None  # the restored file

    def keep(self) -> bool:
        """Restore the file, even if it was deleted again; return False if that is not possible now."""
        if self._target is None:
            return self._restore()
        source, target = os.fstat(self._source), os.fstat(self._target)
        if target.st_nlink == 0 or source.st_size != target.st_size:  # the latter: a write was still in progress
            return self._restore()
        if self._source != self._target:
            os.close(self._source)
            self._source = self._target
        return True

    def _restore(self) -> bool:
        """Write the bytes under the old name, through a temporary file, so that a reader never sees the file shrink."""
        aside = self.path.with_name(f"{self.path.name}.{os.urandom(4).hex()}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with create(aside) as file:
                self._copy(file)
                time.sleep(SETTLE_SECONDS)  # a write in progress when the sheet was abandoned has ended by now
                self._copy(file)
            target = moved_up(os.open(aside, os.O_RDONLY | os.O_CLOEXEC))
            aside.replace(self.path)
        except OSError:
            with contextlib.suppress(OSError):
                aside.unlink()
            return False
        if self._target not in (None, self._source):
            os.close(self._target)  # type: ignore[arg-type]
        self._target = target
        return True

    def _copy(self, target: BinaryIO) -> None:
        while chunk := os.pread(self._source, 1 << 20, target.tell()):
            target.write(chunk)

    def drop(self) -> None:
        for fd in {self._source, self._target} - {None}:
            os.close(fd)  # type: ignore[arg-type]


def moved_up(fd: int) -> int:
    """Move a descriptor to a high number, if the limit allows, and return it.

    A program that closes every descriptor, to become a daemon, gets low numbers for its next files. A journal with such a
    number would then write into the program's own file.
    """
    if sys.platform == "win32":
        return fd
    try:
        high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH_DESCRIPTOR)
    except OSError:  # above the limit of open files
        return fd
    os.close(fd)
    return high


class Packer:
    """A shape ready to write: `head + crc32(body, crc) + body` is a frame, `body = pack(id, time, step, *values)`.

    `last` is the body of the last row written, so a run's summary needs no file access. A Counter also counts each row.
    """

    __slots__ = ("crc", "head", "id", "last", "pack", "shape", "unpack")
    last: bytes | None

    def __init__(self, shape: Shape, seed: int) -> None:
        layout = struct.Struct(shape.codes)
        self.shape = shape
        self.id = shape.id
        self.last = None
        self.pack: Callable[..., bytes] = layout.pack
        self.unpack: Callable[[bytes], tuple[Any, ...]] = layout.unpack
        self.head = HEAD.pack(MAGIC, Kind.ROW, shape.layout, layout.size, 0)[:8]
        self.crc = covered(Kind.ROW, layout.size, seed, shape.layout)


class Counter(Packer):
    """A packer that counts its rows once written, for keys whose summary rule needs all values."""

    __slots__ = ("_count", "_last")

    def __init__(self, shape: Shape, seed: int, count: Callable[[bytes], None]) -> None:
        self._count = count
        super().__init__(shape, seed)

    @property
    def last(self) -> bytes | None:
        return self._last

    @last.setter
    def last(self, body: bytes | None) -> None:
        self._last = body
        if body is not None:
            self._count(body)


NO_SHAPES: Mapping[tuple[Any, ...], Packer] = MappingProxyType({})
Counting = Callable[[Shape], "Callable[[bytes], None] | None"]
Latest = dict[str, tuple[int, Any]]  # by key: when it was logged, and the value


class Sheet:
    """One open journal file. `shapes` maps (*keys, *types of values) to the packer of a row with a 32-bit step.

    While it is NO_SHAPES, every call takes the slow path, which first writes the rows of earlier calls.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], *, power: bool = False) -> None:
        self.path = path
        self.id: str = header["journal"]
        self.seed = seed_of(self.id)
        self._known: dict[tuple[Any, ...], Packer] = {}
        self.shapes: Mapping[tuple[Any, ...], Packer] = self._known
        self._others: dict[tuple[Any, ...], Packer] = {}
        self._past: Latest = {}
        self._ids = itertools.count()
        self.alive = -1
        # With O_DSYNC a write returns when it is on disk: no second call could fail after the first succeeded.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (_DSYNC if power else 0)
        self.fd = moved_up(os.open(path, flags, 0o600))
        try:
            self._lock_alive()
            if not self.write(frame(Kind.HEADER, pack(dict(header)), 0)):
                raise OSError(errno.ENOSPC, "the journal's header could not be written whole (disk full?)")
            if power:
                sync_folders([path.parent, *path.parent.parents[:3]])  # its name survives a power cut, too
        except OSError:
            self.discard()
            raise

    def _lock_alive(self) -> None:
        name = f"{self.path}.alive"
        self.alive = moved_up(os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        held.add(name)
        try_lock(self.alive)  # where the filesystem has no locks, readers rely on heartbeats

    def write(self, *pieces: bytes) -> int:
        """Write frames in one call; return how many are complete in the file, or raise OSError."""
        data = b"".join(pieces)
        done = os.write(self.fd, data)
        if done == len(data):
            return len(pieces)
        return sum(1 for end in itertools.accumulate(map(len, pieces)) if end <= done)

    def packer(self, keys: Sequence[str], types: str, layout: int, origin: str, counting: Counting) -> tuple[Packer, bytes]:
        """Return the packer for a shape, and the shape frame to write with it if the shape is new."""
        key = (layout, origin, types, *keys)
        found = self._others.get(key)
        if found:
            return found, b""
        if len(self._others) >= MAX_SHAPES:  # bounded memory: an old shape is simply declared again
            self.forget_shapes()
        shape = Shape(next(self._ids), int(layout), types, tuple(keys), origin)
        count = counting(shape)
        packer = Packer(shape, self.seed) if count is None else Counter(shape, self.seed, count)
        return packer, frame(Kind.SHAPE, shape.body(), self.seed)

    def forget_shapes(self) -> None:
        """Treat every shape as new again; the last value of each key is kept."""
        self._past = self.latest()
        self._others.clear()
        self._known.clear()

    def open_fast_path(self) -> None:
        """Let calls with known keys and types write their rows themselves again."""
        self.shapes = self._known

    def latest(self) -> Latest:
        """Return each key's last value in this sheet, by time."""
        found = dict(self._past)
        rows = [(packer, packer.unpack(packer.last)) for packer in list(self._others.values()) if packer.last is not None]
        for packer, row in sorted(rows, key=lambda pair: pair[1][1]):
            keys = packer.shape.keys
            merge(found, dict(zip(keys, ((row[1], value) for value in row[len(row) - len(keys) :]), strict=True)))
        return found

    def publish(self, packer: Packer, signature: tuple[Any, ...] | None) -> None:
        """Make a shape available to rows, after its frame was written."""
        shape = packer.shape
        key = (shape.layout, shape.origin, shape.types, *shape.keys)
        self._others[key] = packer
        if signature is not None:
            self._known[signature] = packer

    def sync(self) -> None:
        os.fdatasync(self.fd) if hasattr(os, "fdatasync") else os.fsync(self.fd)

    @property
    def deleted(self) -> bool:
        """Return whether the file was deleted."""
        try:
            return os.fstat(self.fd).st_nlink == 0
        except OSError:
            return False  # closed at this moment by another thread

    def release(self) -> None:
        """Release the lock: from now on readers may judge this journal as ended."""
        if self.alive >= 0:
            os.close(self.alive)
            self.alive = -1
        held.discard(f"{self.path}.alive")

    def close(self, *, ended: bool) -> None:
        """Stop writing; with `ended`, the END frame is authoritative and the lock file is removed."""
        if ended:
            with contextlib.suppress(OSError):
                os.unlink(f"{self.path}.alive")  # noqa: PTH108 - the directory may be gone
        self.release()
        fd, self.fd = self.fd, -1
        _retire(fd)

    def discard(self) -> None:
        """Undo a sheet whose header could not be written, leaving no empty file behind."""
        self.release()
        os.close(self.fd)
        for name in (self.path, Path(f"{self.path}.alive")):
            with contextlib.suppress(OSError):
                name.unlink()

    def abandon_in_child(self) -> None:
        """Close the parent's descriptors in a forked child; this does not affect the parent's lock."""
        for fd in (self.fd, self.alive):
            with contextlib.suppress(OSError):
                os.close(fd)
        held.discard(f"{self.path}.alive")
        self.alive = self.fd = -1


def merge(found: Latest, new: Latest) -> None:
    """Add newer values, up to MAX_LATEST keys: a program with new keys in every call must not fill the memory."""
    for key, point in new.items():
        old = found.get(key)
        if (old is None and len(found) < MAX_LATEST) or (old is not None and old[0] <= point[0]):
            found[key] = point


class Writer:
    """The journals of one process: one after the other, each opened because the previous one failed."""

    def __init__(self, directory: Path, header: Mapping[str, Any], *, durability: str = "process") -> None:
        self.directory = directory
        self.header = dict(header)
        self.power = durability == "power"
        self.dropped = 0
        self.closed = False
        self._lock = threading.RLock()  # re-entrant: a signal handler may log while this thread opens a sheet
        self._retry_at = 0.0
        self._synced: tuple[str, int] = ("", 0)
        self._last: str | None = None
        self._orphans: list[Orphan] = []
        self._restored: list[Orphan] = []
        self._paths: list[Path] = []
        self._held: list[tuple[Kind, Any]] = []
        self._held_at, self._held_pause = 0.0, RETRY_SECONDS
        self._past: Latest = {}
        self.counting: Counting = lambda _shape: None
        self.sheet: Sheet | None = self._open()

    # The methods below follow a journal's life: open, write, fail over, sync, close.

    def _open(self) -> Sheet:
        journal_id = new_id()
        header = {
            **self.header,
            "journal": journal_id,
            "started": time.time_ns(),
            "mono": time.monotonic_ns(),
            "follows": self._last,
            "dropped": self.dropped,
        }
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        sheet = Sheet(self.directory / f"{header['rank']}-{journal_id}{SUFFIX}", header, power=self.power)
        self._last = sheet.id
        self._paths.append(sheet.path)
        return sheet

    def append(self, *frames: tuple[Kind, Any], keep: bool = False) -> bool:
        """Write msgpack frames in one call; return False if they could not be written, which counts values as dropped.

        With `keep`, such frames wait in memory until the disk accepts them again, and the result is True.
        """
        if keep:
            frames = tuple(self._fitting(kind, value) for kind, value in frames)
        bodies = [(kind, pack(value)) for kind, value in frames]

        def build(sheet: Sheet, done: int) -> tuple[list[bytes], list[Any]]:
            return [frame(kind, body, sheet.seed) for kind, body in bodies[done:]], []

        done = self._attempt(build, len(bodies))
        return self._rest(frames[done:], counted=not done, keep=keep)

    def _fitting(self, kind: Kind, facts: Any) -> tuple[Kind, Any]:
        """Return facts that fit into a frame: the largest ones are left out, since they could never be written."""
        if len(pack(facts)) <= MAX_BODY:
            return kind, facts
        facts = dict(facts)
        while len(pack(facts)) > MAX_BODY:
            name = max(facts, key=lambda name: len(pack(facts[name])))
            size = len(pack(facts.pop(name)))
            notices.once(
                f"fact:{name}",
                f"the {name} of the run is {size / 1e6:,.0f} MB, over the limit of {MAX_BODY / 1e6:.0f} MB. It is not recorded; "
                "everything else is. Store large content with run.artifact().",
            )
        return kind, facts

    def row(
        self,
        values: Mapping[str, Any],
        types: str,
        *,
        time_ns: int,
        step: int | None,
        layout: int = 0,
        call: tuple[int, ...] = (),
        origin: str = "",
        signature: tuple[Any, ...] | None = None,
        beside: Sequence[tuple[Kind, Any]] = (),
    ) -> bool:
        """Write one row, its shape if new, and the frames `beside` it, all in one write(2)."""
        if len(values) > MAX_KEYS:
            return self._wide_row(values, types, beside, time_ns=time_ns, step=step, layout=layout, call=call, origin=origin)
        bodies = [(kind, pack(value)) for kind, value in beside]
        head: tuple[int, ...] = () if step is None else (step,)
        layout |= Layout.STEP_NONE if step is None else 0 if step in _I32 else Layout.STEP_WIDE

        def build(sheet: Sheet, done: int) -> tuple[list[bytes], list[Any]]:
            extras = [frame(kind, extra, sheet.seed) for kind, extra in bodies[max(0, done - 1) :]]
            if done:
                return extras, []
            packer, declaration = sheet.packer(tuple(values), types, layout, origin, self.counting)
            body = packer.pack(packer.id, time_ns, *head, *call, *values.values())
            row = declaration + frame(Kind.ROW, body, sheet.seed, packer.shape.layout)
            known = None if packer.shape.layout & Layout.STEP_WIDE else signature
            return [row, *extras], [(packer, body, known if declaration or known else False)]

        done = self._attempt(build, 1 + len(bodies))
        if not done and (origin or not (values or beside)):  # a probe's row, or a call represented by its late parts
            return False
        return self._rest([(Kind.ROW, None), *beside][done:], counted=not done)

    def _wide_row(self, values: Mapping[str, Any], types: str, beside: Sequence[tuple[Kind, Any]], **place: Any) -> bool:
        """Write a call with more keys than a shape may have as several rows; the first one announces late parts."""
        items, written = list(values.items()), True
        for start in range(0, len(items), MAX_KEYS):
            some = dict(items[start : start + MAX_KEYS])
            written = self.row(some, types[start : start + MAX_KEYS], beside=beside, **place) and written
            beside, place["layout"], place["call"] = (), place["layout"] & ~(Layout.PENDING | Layout.LATE), ()
        return written

    def rows(self, items: Sequence[tuple[Any, ...]]) -> int:
        """Write many rows in one write(2), each (layout, keys, types, time, step, call, values); return how many were written."""

        def build(sheet: Sheet, done: int) -> tuple[list[bytes], list[Any]]:
            pieces, written = [], []
            new: dict[tuple[Any, ...], tuple[Packer, bytes]] = {}
            for layout, keys, types, time_ns, step, call, values in items[done:]:
                wide = layout if step in _I32 else layout | Layout.STEP_WIDE
                key = (types, wide, *keys)
                packer, declaration = new.get(key) or sheet.packer(keys, types, wide, "", self.counting)
                new[key] = packer, b""
                body = packer.pack(packer.id, time_ns, step, *call, *values)
                pieces.append(declaration + packer.head + crc32(body, packer.crc).to_bytes(4, "little") + body)
                written.append((packer, body, None if declaration else False))
            return pieces, written

        return self._attempt(build, len(items))

    def drop(self, call: Any) -> None:
        """Count a call as dropped, only once, whichever of its parts failed first."""
        with self._lock:
            if not call.dropped:
                call.dropped = True
                self.dropped += 1

    def _attempt(self, build: Callable[[Sheet, int], tuple[list[bytes], list[Any]]], count: int) -> int:
        """Write `count` frames to the open sheet, retrying incomplete ones once on a new sheet; return how many were written.

        `build` creates the frames for a sheet, without the first ones that an earlier sheet has; and for each row its packer,
        its body, and the signature to publish the packer under (False: already published).
        """
        failures = done = 0
        while failures < 2 and done < count:
            sheet = self.sheet or self._reopen()
            if sheet is None:
                break
            try:
                pieces, rows = build(sheet, done)
                whole = sheet.write(*pieces)
            except OSError as error:
                failures += self.fail(sheet, error)
                continue
            except JournalError as error:
                notices.once("frame", f"a log() call is too large for the journal: {error}. It is dropped. Training continues.")
                break
            for packer, body, signature in rows[:whole]:
                if signature is not False:
                    sheet.publish(packer, signature)
                packer.last = body
            done += whole
            if whole < len(pieces):
                failures += self.fail(sheet, OSError(errno.ENOSPC, "only a part of a frame was written (disk full?)"))
        if failures > 1:  # a new file fails as well: do not create one with every call
            self._retry_at = time.monotonic() + RETRY_SECONDS
        return done

    def _rest(self, frames: Sequence[tuple[Kind, Any]], *, counted: bool, keep: bool = False) -> bool:
        """Handle frames that could not be written: those to keep wait in memory, logged values are counted as dropped.

        The rest of a partly written call waits as well: a call is either recorded or dropped.
        """
        if not frames:
            return True
        values = any(kind in (Kind.ROW, Kind.VALUES) for kind, _ in frames)
        with self._lock:
            if (keep or (values and not counted)) and not self.closed:
                for kind, value in frames:
                    self._hold(kind, value)
                return True
            if values:
                self.dropped += 1
        return False

    def _hold(self, kind: Kind, value: Any) -> None:
        """Keep a frame in memory until it can be written. Facts and definitions replace older ones of the same name."""
        if kind == Kind.INFO:
            for i, (other, facts) in enumerate(self._held):
                if other == Kind.INFO and len(pack(facts)) + len(pack(value)) <= MAX_BODY:
                    self._held[i] = (kind, {**facts, **value})
                    return
        elif kind == Kind.EVENT and value.get("event") == "metric":
            self._held = [
                (k, v) for k, v in self._held if k != kind or (v.get("event"), v.get("key")) != ("metric", value["key"])
            ]
        self._held.append((kind, value))
        while len(self._held) > MAX_HELD or sum(len(pack(held)) for held in self._held[:-1]) > MAX_HELD_BYTES:
            oldest = next((i for i, (k, _) in enumerate(self._held) if k != Kind.INFO), 0)
            kind, _ = self._held.pop(oldest)
            self.dropped += kind == Kind.VALUES
            notices.once(
                "held",
                f"more than {MAX_HELD:,} alerts, images and definitions wait for space on the disk. The oldest are lost. "
                "Free space.",
            )

    def _write_held(self, sheet: Sheet) -> bool:
        """Write the frames waiting in memory. Return False, and wait longer next time, if that failed and broke the sheet."""
        if time.monotonic() < self._held_at:
            return True
        try:
            while self._held:
                some = self._held[:64]
                whole = sheet.write(*(frame(kind, pack(value), sheet.seed) for kind, value in some))
                del self._held[:whole]
                if whole < len(some):
                    self._held.append(self._held.pop(0))  # one that is too large must not block the others
                    raise OSError(errno.ENOSPC, "only a part of a frame was written (disk full?)")
        except OSError:
            self._held_pause = min(2 * self._held_pause, 3600.0)
            self._held_at = time.monotonic() + self._held_pause
            return False
        self._held_pause = RETRY_SECONDS
        return True

    def latest(self) -> dict[str, Any]:
        """Return the last value of each key logged by this process, without reading any file."""
        with self._lock:
            found, sheet = dict(self._past), self.sheet
            if sheet is not None:
                merge(found, sheet.latest())
        return {key: value for key, (_, value) in found.items()}

    def recount(self) -> dict[Path, int]:
        """Declare every shape again because `counting` has changed; return how far each journal was written without it."""
        with self._lock:
            if self.sheet is not None:
                self.sheet.forget_shapes()
            return {path: path.stat().st_size for path in self._paths if path.exists()}

    def fail(self, sheet: Sheet, error: BaseException) -> bool:
        """Abandon a sheet after a failed write; the next write opens a new one. Return False if another thread was first."""
        with self._lock:
            if self.sheet is not sheet:
                return False
            self._let_go(sheet)
            if not self.closed:
                notices.once(
                    f"journal:{self.directory}",
                    f"could not write to {sheet.path}: {error}. Training continues. A new journal is opened as soon as "
                    "possible; values logged until then are dropped and counted. Free space or restore the directory.",
                )
            return True

    def _let_go(self, sheet: Sheet) -> None:
        """Stop writing to a sheet, keeping the last values."""
        merge(self._past, sheet.latest())
        self.sheet = None
        sheet.close(ended=False)

    def _reopen(self) -> Sheet | None:
        with self._lock:
            if self.sheet is not None or self.closed:
                return self.sheet
            if time.monotonic() < self._retry_at:
                return None
            try:
                sheet = self._open()
                if not self._write_held(sheet):  # too large for the space left: numbers may still fit
                    sheet.close(ended=False)
                    sheet = self._open()
            except OSError:
                self._retry_at = time.monotonic() + RETRY_SECONDS
                return None
            self.sheet = sheet
            return sheet

    def sync(self) -> None:
        """Sync what was written since the last call. Never called on the training thread by default."""
        self.rescue()
        if self._held:
            self._flush_held()
        sheet = self.sheet
        if sheet is None:
            return
        try:
            size = os.fstat(sheet.fd).st_size
            if (sheet.id, size) != self._synced:
                sheet.sync()
                self._synced = (sheet.id, size)
        except OSError as error:
            self.fail(sheet, error)

    def _flush_held(self) -> None:
        with self._lock:
            sheet = self.sheet
            if sheet is None:
                self._reopen()
            elif not self._write_held(sheet):
                self.fail(sheet, OSError(errno.ENOSPC, "the disk is full"))

    def rescue(self) -> None:
        """Detect that the open file was deleted: continue in a new one, and restore the old one.

        Where the system allows it (Linux), nothing logged is lost, provided the process lives until the next check: every
        second, at flush() and at finish(). A failed restore is retried at the next check, and a restored journal that is deleted
        again is restored again. Blobs stay deleted.
        """
        sheet = self.sheet
        if sheet is not None and sheet.deleted:
            self._give_up_deleted(sheet)
        orphans, self._orphans = self._orphans, []
        restored, self._restored = self._restored, []
        for orphan in (*restored, *orphans):
            (self._restored if orphan.keep() else self._orphans).append(orphan)
        while len(self._restored) > MAX_RESTORED:  # each uses a descriptor
            self._restored.pop(0).drop()
            notices.once(
                f"removed often:{self.directory}",
                f"{self.directory} was deleted more than {MAX_RESTORED} times during the run. The oldest journals cannot be "
                "restored if it happens again. Stop whatever deletes the directory.",
            )

    def _give_up_deleted(self, sheet: Sheet) -> None:
        with self._lock:
            if self.sheet is not sheet:
                return
            with contextlib.suppress(OSError):
                self._orphans.append(Orphan(sheet))
            self._let_go(sheet)
            self._reopen()
        notices.once(
            f"removed:{self.directory}",
            f"{sheet.path} was deleted during the run. "
            + ("It is restored" if self._orphans else "Its values are lost")
            + ", and logging continues in a new journal beside it. Images and artifacts that were stored are not restored. "
            "Finish or kill the run before deleting its directory.",
        )

    def end(self, end: Mapping[str, Any] | None) -> None:
        """Write the frames waiting in memory and the last frame, if any. Retry delays are ignored: this is the last chance."""
        self.rescue()
        self._retry_at = self._held_at = 0.0
        if self._held:
            self._flush_held()
            self._retry_at = 0.0
        if end is not None:
            self.append((Kind.END, {**end, "dropped": self.dropped}))

    def close(self, end: Mapping[str, Any] | None) -> None:
        """Write the last frame, if any, and close the journal."""
        self.end(end)
        with self._lock:
            self.closed = True
            sheet, self.sheet = self.sheet, None
            if sheet is not None:
                merge(self._past, sheet.latest())
                with contextlib.suppress(OSError):
                    sheet.sync()
                sheet.close(ended=end is not None)
            while self._restored:
                self._restored.pop().drop()

    def after_fork_in_child(self, header: Mapping[str, Any]) -> None:
        """Start over in a forked child: the parent's file stays untouched, ours is opened on first use."""
        self._lock = threading.RLock()
        sheet, self.sheet = self.sheet, None
        self.header.update(header)
        self._last = None
        self.dropped = 0
        self._retry_at = 0.0
        for orphan in (*self._orphans, *self._restored):
            orphan.drop()
        self._orphans, self._restored = [], []
        self._held = []
        if sheet is not None:
            merge(self._past, sheet.latest())
            sheet.abandon_in_child()
