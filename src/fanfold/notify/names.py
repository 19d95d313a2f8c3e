"""Names of addresses: they identify an address without revealing it, so they may be stored with a run."""

from __future__ import annotations

import hashlib
import shlex
from pathlib import PurePath
from urllib.parse import urlsplit

from ..errors import outcome

_ROUNDS = 20_000  # a name must not help to guess a short password in the address


def service_name(address: str) -> str:
    """Return the name of an address: its kind, and a few digits."""
    scheme, _, rest = address.partition(":")
    secret = hashlib.pbkdf2_hmac("sha256", address.encode(), b"fanfold notify", _ROUNDS).hex()
    return f"{_shown(scheme.lower(), rest)} {secret[:6]}"


def _shown(scheme: str, rest: str) -> str:
    """Return the part of an address that is not secret: the kind, with the host of a webhook or the name of a command."""
    if scheme == "cmd":
        words, _ = outcome(shlex.split, rest)
        return f"cmd:{PurePath(words[0]).name}" if words else "cmd"
    if scheme in ("http", "https"):
        host, _ = outcome(lambda: urlsplit(f"{scheme}:{rest}").hostname)
        return f"{scheme}://{host}"
    return scheme
