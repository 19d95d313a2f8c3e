"""Where a journal is written: beside its run, or in this user's spool.

A journal's header names its spool, and a run folder may come from anywhere. So a spool is used only if it is a folder in this
user's own spool root: no other path named by a header is opened, listed, copied or removed.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import notices
from ..settings import resolve

if TYPE_CHECKING:
    from .bodies import Header

_used: set[str] = set()  # roots that this process writes spools to


def default_root() -> Path:
    import tempfile  # with the libraries it imports it takes longer than all of the journal's modules

    return Path(tempfile.gettempdir()) / f"fanfold-spool-{os.getuid() if hasattr(os, 'getuid') else 0}"


def is_private(folder: Path) -> bool:
    """Return whether this is a folder, not a link, that belongs to this user and that nobody else can write to."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and (
        not hasattr(os, "getuid") or (found.st_uid == os.getuid() and not found.st_mode & 0o022)
    )


def spool_roots() -> list[Path]:
    """Return where this user's spools may be: the configured root, or the default one and those created if it was taken."""
    configured = resolve("spool_dir")
    return [Path(os.path.abspath(configured))] if configured else default_roots()  # noqa: PTH100 - links stay


def default_roots() -> list[Path]:
    """Return the roots that only this library fills; another may be named, and filled, by whoever wrote a settings file."""
    return [default_root(), *_spare_roots()]


def _new_root(root: Path) -> Path:
    import tempfile

    return Path(tempfile.mkdtemp(prefix=f"{root.name}-", dir=root.parent))


def choose_root() -> Path:
    """Return the spool root if none is configured: a folder in the temporary directory, where others can write, too.

    Another user may have created a folder of that name. A folder with another name is then used instead.
    """
    root = default_root()
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700)
    if is_private(root):
        return root
    spare = next(iter(_spare_roots()), None) or _new_root(root)
    notices.once(
        f"spool:{root}",
        f"{root} is not a folder that only you can write to; another user may have made it. The journal is spooled in {spare} "
        "instead, and nothing is lost. Remove the other one, or set FANFOLD_SPOOL_DIR to a folder of yours on a local disk.",
    )
    return spare


def _spare_roots() -> list[Path]:
    root = default_root()
    return [found for found in sorted(root.parent.glob(f"{root.name}-*")) if is_private(found)]


def _is_ours(root: Path) -> bool:
    if str(root) in _used:
        return True
    default, configured = default_root(), resolve("spool_dir")
    if configured:
        return root == Path(os.path.abspath(configured))  # noqa: PTH100 - links are not resolved
    if root == default:
        return is_private(root) or not os.path.lexists(root)
    return root.parent == default.parent and root.name.startswith(f"{default.name}-") and is_private(root)


def use_root(root: Path) -> None:
    """Remember a spool root that this process was configured to use."""
    _used.add(os.path.abspath(root))  # noqa: PTH100 - links are not resolved


def environment() -> dict[str, str]:
    """Return the environment variable that passes this process's spool root to a child process, if it uses one."""
    return {"FANFOLD_SPOOL_DIR": next(iter(_used))} if len(_used) == 1 else {}


def spool_of(header: Header) -> Path | None:
    """Return the spool folder named by a header, if it is this user's own."""
    if not header.spool:
        return None
    spool = Path(os.path.normpath(header.spool))
    return spool if _is_ours(spool.parent) else None


def origin_of(path: Path, header: Header) -> Path | None:
    """Return the file a journal's process writes: itself, or the one in its spool; None if the spool is not this user's."""
    if not header.spool:
        return path
    spool = spool_of(header)
    return spool / path.name if spool is not None else None
