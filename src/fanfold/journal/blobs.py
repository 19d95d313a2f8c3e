"""Blobs: media and artifacts of a run, named by the hash of their content and written before the frame that names them."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ..atomic import beside
from ..errors import JournalError
from .files import create, is_folder, is_mostly_holes, open_inside

if TYPE_CHECKING:
    import hashlib

MOST_HOLES = 64  # times what is written in a file; one of a few blocks can claim terabytes
_NAME = re.compile(r"[0-9a-f]{64}")
_CHUNK = 1 << 20


def _sha256(data: bytes | memoryview = b"") -> hashlib._Hash:
    import hashlib  # loads OpenSSL: not for a run that stores nothing

    return hashlib.sha256(data)


def path_of(run: Path, name: str) -> Path:
    """Return the path of a blob. The name must be a hash: a run directory is untrusted, and a path must not escape it."""
    if not _NAME.fullmatch(name):
        raise JournalError(f"{name!r} is not the name of a blob (64 hexadecimal digits)")
    return run / "blobs" / name[:2] / name


def put(run: Path, data: bytes | memoryview) -> str:
    """Store bytes; return their name. The same content is stored once."""
    return _store(run, iter([data]), _sha256(data).hexdigest())


def put_pieces(run: Path, chunks: Iterator[bytes], name: str) -> None:
    """Store a blob that arrives in pieces; raise and discard it if its content does not match its name."""
    stored = _store(run, iter(chunks))
    if stored != name:
        path_of(run, stored).unlink(missing_ok=True)
        raise JournalError(f"the content received for blob {name} does not match its hash. It was not kept. Fetch it again.")


def put_file(run: Path, source: Path) -> tuple[str, int]:
    """Store a file's content; return its name and size."""
    return _store(run, _chunks(source)), source.stat().st_size


def put_open(run: Path, file: BinaryIO) -> str:
    """Store the content of an open file; return its name."""
    return _store(run, _pieces(file))


def digest_of(files: list[tuple[str, str]]) -> str:
    """Return the digest of one file, as sha256sum prints it, or of several by path and content; each is a (path, blob) pair."""
    if len(files) == 1:
        return f"sha256:{files[0][1]}"
    lines = "".join(f"{blob}  {path}\n" for path, blob in files)  # the output format of sha256sum, so that anybody can compute it
    return f"sha256:{_sha256(lines.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _chunks(source: Path) -> Iterator[bytes]:
    with source.open("rb") as file:
        yield from _pieces(file)


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK):
        yield chunk


def _store(run: Path, chunks: Iterator[bytes | memoryview], name: str | None = None) -> str:
    """Write to a temporary file, then rename: a blob exists completely or not at all."""
    if name is not None and path_of(run, name).exists():
        return name
    folder = run / "blobs"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    digest = _sha256()
    with beside(folder / "blob") as aside:
        with create(aside) as file:
            for chunk in chunks:
                digest.update(chunk)
                file.write(chunk)
        target = path_of(run, digest.hexdigest())
        target.parent.mkdir(exist_ok=True, mode=0o700)
        aside.replace(target)
    return digest.hexdigest()


def opened(run: Path, name: str) -> BinaryIO:
    """Open a stored blob: a regular file of the run, not reached through a link."""
    path = path_of(run, name)
    try:
        return open_inside(run, *path.parts[-3:])
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EINVAL, errno.ENOTDIR, errno.ENXIO):
            raise JournalError(f"{path} is a link or not a plain file, as blobs are. It was not read.") from error
        raise


def names(run: Path) -> Iterator[str]:
    """Yield the names of a run's blobs, ignoring folders and files that are links."""
    top = run / "blobs"
    if not is_folder(top):
        return
    for folder in sorted(top.glob("[0-9a-f][0-9a-f]")):
        if is_folder(folder):
            with os.scandir(folder) as entries:
                found = [entry.name for entry in entries if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)]
            yield from sorted(found)


def is_here(run: Path, name: str) -> bool:
    """Return whether a blob is in the run, as a plain file."""
    try:
        opened(run, name).close()
    except (OSError, JournalError):
        return False
    return True


def get(run: Path, name: str) -> bytes:
    """Read a blob, checking that its content still matches its name."""
    path = path_of(run, name)
    with opened(run, name) as file:
        if is_mostly_holes(path, MOST_HOLES):
            raise JournalError(f"{path} is almost nothing but holes, which would fill the memory. It was not read. Delete it.")
        data = file.read()
    if _sha256(data).hexdigest() != name:
        raise JournalError(f"{path} is damaged: its content does not match its name. Delete it, or restore it from a copy.")
    return data
