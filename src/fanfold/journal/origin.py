"""Where a journal is written: beside its run, or in this user's spool.

A journal's header names its spool, and a run folder may come from anywhere. So a spool is used only if it is a folder of this
user's own spool root: no other path that a header names is opened, listed, copied or removed.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ..settings import resolve
from .bodies import Header

_used: set[str] = set()  # roots that this process writes spools to


def default_root() -> Path:
    return Path(tempfile.gettempdir()) / f"fanfold-spool-{os.getuid() if hasattr(os, 'getuid') else 0}"


def spool_root() -> Path:
    """Return this user's spool root: the configured one, or a folder of theirs in the system's temporary directory."""
    return Path(os.path.abspath(resolve("spool_dir") or default_root()))  # noqa: PTH100 - links are not resolved


def use_root(root: Path) -> None:
    """Remember a spool root that this process itself was told to use."""
    _used.add(os.path.abspath(root))  # noqa: PTH100 - links are not resolved


def environment() -> dict[str, str]:
    """Return the variable that tells a child process which spool root this process uses, if it uses one."""
    return {"FANFOLD_SPOOL_DIR": next(iter(_used))} if len(_used) == 1 else {}


def spool_of(header: Header) -> Path | None:
    """Return the spool folder that a header names, if it is this user's own."""
    if not header.spool:
        return None
    spool = Path(os.path.normpath(header.spool))
    return spool if str(spool.parent) in {*_used, str(spool_root())} else None


def origin_of(path: Path, header: Header) -> Path | None:
    """Return the file that a journal's process writes: itself, or the one in its spool; None if that spool is not this user's."""
    if not header.spool:
        return path
    spool = spool_of(header)
    return spool / path.name if spool is not None else None
