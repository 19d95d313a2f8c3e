"""Destinations approved by this user: the only ones that a copied run or a settings file may send data to.

Runs and settings files are passed around, so a destination in one cannot be trusted. Destinations that the user names
directly, by an argument or an environment variable, are remembered here: outside every run, in one small file each.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .atomic import replace_text
from .errors import logger


def folder() -> Path:
    """Return the folder of approvals: `fanfold/approved` in the user's configuration folder."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path("~/.config").expanduser()) / "fanfold" / "approved"


def remember(kind: str, destination: Mapping[str, Any], *, secret: str | None = None) -> None:
    """Approve a destination together with the secret meant for it; only a hash of the secret is stored."""
    if is_approved(kind, destination, secret=secret):
        return
    import json

    path = _path(kind, destination, secret)
    try:
        for made in (path.parent.parent, path.parent):  # `parents=True` would leave the mode of the first to the umask
            made.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_text(path, json.dumps({"kind": kind, "destination": destination}, default=str) + "\n", mode=0o600)
    except OSError as error:  # a read-only home: commands ask again next time
        logger.debug("cannot remember the destination %s: %s", kind, error)


def is_approved(kind: str, destination: Mapping[str, Any], *, secret: str | None = None) -> bool:
    """Return whether this user has approved this destination with this secret."""
    try:
        found = os.lstat(_path(kind, destination, secret))
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _path(kind: str, destination: Mapping[str, Any], secret: str | None) -> Path:
    import hashlib
    import json

    key = hashlib.sha256(secret.encode()).hexdigest() if secret is not None else None
    text = json.dumps([kind, destination, key], sort_keys=True, default=str)
    return folder() / f"{hashlib.sha256(text.encode()).hexdigest()}.json"
