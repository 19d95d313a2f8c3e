"""Journals on network filesystems: written to a node-local spool, and mirrored by offset from a thread.

A network filesystem may stall a write for seconds, and training must not wait for it. The mirror only ever appends, so the
file in the run's directory is always a complete prefix of the journal.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ..process import digest
from .files import open_to_write
from .format import SUFFIX
from .liveness import is_locked
from .origin import default_roots, is_private, use_root

NETWORK = frozenset(
    (
        "9p afs beegfs ceph cifs cvmfs fhgfs fuse.ceph fuse.gcsfuse fuse.glusterfs fuse.goofys fuse.juicefs "
        "fuse.rclone fuse.s3fs fuse.sshfs glusterfs gpfs lustre mfs ncpfs nfs nfs4 orangefs pvfs2 smb3 smbfs "
        "virtiofs weka wekafs"
    ).split()
)
_CHUNK = 1 << 20


def filesystem_of(path: Path) -> str:
    """Return the type of the filesystem that holds `path`, or "" if the system does not report it."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    best, kind = "", ""
    target = os.path.realpath(path)
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = fields[1].encode().decode("unicode_escape")
        inside = point == "/" or target == point or target.startswith(point + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind


def is_network(path: Path) -> bool:
    return filesystem_of(path) in NETWORK


def _check_private(root: Path) -> None:
    """Raise if another user may have prepared the spool: its files determine where bytes are copied to."""
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not is_private(root):
        raise PermissionError(f"the spool {root} is not a folder that only you can write to; set FANFOLD_SPOOL_DIR to one")


class Spool:
    """A node-local directory whose journals are copied, as they grow, to the run's own directory."""

    def __init__(self, root: Path, target: Path) -> None:
        self.target = target
        _check_private(root)
        use_root(root)
        self.directory = root / f"{digest(str(target))}-{os.getpid()}"
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.directory / "target").write_text(str(target), encoding="utf-8", errors="surrogateescape")

    @classmethod
    def found(cls, directory: Path) -> Spool:
        """Return a spool that an earlier process left behind."""
        spool = cls.__new__(cls)
        spool.directory = directory
        spool.target = Path((directory / "target").read_text(encoding="utf-8", errors="surrogateescape"))
        return spool

    def mirror(self) -> int:
        """Append to each mirrored journal the new bytes of its original; return the number of bytes copied."""
        self.target.mkdir(parents=True, exist_ok=True, mode=0o700)
        return sum(_append(source, self.target / source.name) for source in self.directory.glob(f"*{SUFFIX}"))

    def finish(self) -> None:
        """Mirror the rest and remove the spool; journals that child processes still write to stay for `recover`."""
        busy = [journal.name for journal in self.directory.glob(f"*{SUFFIX}") if is_locked(Path(f"{journal}.alive"))]
        self.mirror()
        for name in self.directory.iterdir():
            if not busy or (name.name != "target" and not name.name.startswith(tuple(busy))):
                name.unlink(missing_ok=True)
        if not busy:
            self.directory.rmdir()


def _append(source: Path, target: Path) -> int:
    """Copy the bytes that `target` lacks. Safe to run concurrently: each byte has a fixed offset, whoever writes it."""
    with source.open("rb") as file, os.fdopen(open_to_write(target), "r+b") as copy:
        before = at = os.fstat(copy.fileno()).st_size
        while chunk := os.pread(file.fileno(), _CHUNK, at):
            at += os.pwrite(copy.fileno(), chunk, at)
        if at > before:
            os.fsync(copy.fileno())
        return at - before


def recover(*roots: Path, runs: Path) -> int:
    """Finish spools whose processes are gone; return how many journals were copied. Roots of other users are left alone.

    A root may have been named by a settings file, and a spool names where it is copied to. So spools outside our own default
    roots are copied only to runs in the directory `runs`.
    """
    count, trusted = 0, default_roots()
    for directory in (found for root in roots if is_private(root) for found in root.glob("*-*")):
        journals = list(directory.glob(f"*{SUFFIX}"))
        if not journals or any(is_locked(Path(f"{journal}.alive")) for journal in journals):
            continue
        with contextlib.suppress(OSError):
            spool = Spool.found(directory)
            if directory.parent in trusted or _is_inside(spool.target, runs):
                spool.finish()
                count += len(journals)
    return count


def _is_inside(journals: Path, runs: Path) -> bool:
    """Return whether a folder of journals is that of a run in a directory of runs, and reached through no link below it."""
    run = journals.parent
    if len(journals.parts) < 4 or journals.name != "journal" or ".." in journals.parts:
        return False
    return run.parent.parent.samefile(runs) and not any(map(os.path.islink, (run.parent, run, journals)))
