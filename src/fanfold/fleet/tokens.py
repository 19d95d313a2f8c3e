"""Bearer tokens of a gateway, to read or write projects; only their hashes are stored, in a private file."""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..atomic import replace_text
from ..errors import SettingError
from ..settings import stranger

FILE_NAME = ".tokens.json"
READ, WRITE = "read", "write"
SCOPES = (READ, WRITE)
ALL = "*"
_PREFIX = "ffk"  # lets secret scanners and people recognize it


@dataclass(frozen=True)
class Token:
    """One token, without its secret. The secret's 32 random bytes cannot be guessed, so one round of hashing is enough."""

    id: str
    name: str
    hash: str
    projects: tuple[str, ...]
    scopes: tuple[str, ...]
    created: float
    expires: float | None = None

    def allows(self, scope: str, project: str) -> bool:
        """Return whether this token has `scope` for `project` (or for all, `*`)."""
        return scope in self.scopes and (ALL in self.projects or project in self.projects)

    @property
    def expired(self) -> bool:
        return self.expires is not None and self.expires <= time.time()

    @property
    def label(self) -> str:
        return f"token {self.id} ({self.name})"

    @property
    def may_write(self) -> bool:
        return WRITE in self.scopes


def make(name: str, *, projects: Sequence[str], scopes: Sequence[str], seconds: float | None = None) -> tuple[Token, str]:
    """Create a token; return it and the only copy of its secret."""
    _check(projects, scopes)
    id, now = secrets.token_hex(4), time.time()
    word = f"{_PREFIX}_{id}_{secrets.token_urlsafe(32)}"
    expires = None if seconds is None else now + seconds
    return Token(id, name, _hash(word), tuple(projects), tuple(scopes), now, expires), word


def match(known: Mapping[str, Token], word: str) -> Token | None:
    """Return the known token with this secret, comparing in constant time."""
    prefix, _, rest = word.partition("_")
    found = known.get(rest.partition("_")[0]) if prefix == _PREFIX else None
    same = hmac.compare_digest(_hash(word), found.hash if found else _hash(""))
    return found if found is not None and same and not found.expired else None


class TokenBook(ABC):
    """Storage for tokens. A revoked token stops working at once, at every gateway."""

    @abstractmethod
    def known(self) -> dict[str, Token]:
        """Return every token, by its id."""

    def recent(self) -> dict[str, Token]:
        """Return the tokens for a request, which may be a moment old."""
        return self.known()

    def at_hand(self) -> dict[str, Token] | None:
        """Return the same without waiting, or None if `recent` has to be asked."""
        return None

    @abstractmethod
    def used(self) -> bool:
        """Return whether a token was ever created, even if none is left: from then on, nobody gets in without one."""

    @abstractmethod
    def _set(self, id: str, token: Token | None) -> None:
        """Store a token, or delete it."""

    def all(self) -> list[Token]:
        """Return every token."""
        return list(self.known().values())

    def find(self, word: str) -> Token | None:
        """Return the valid token with this secret, or None."""
        return match(self.recent(), word)

    def get(self, id: str) -> Token | None:
        """Return a token by its id, if it exists and has not expired."""
        found = self.recent().get(id)
        return found if found is not None and not found.expired else None

    def create(
        self, name: str, *, projects: Sequence[str], scopes: Sequence[str], seconds: float | None = None
    ) -> tuple[Token, str]:
        """Create and store a token; return it and the only copy of its secret."""
        token, word = make(name, projects=projects, scopes=scopes, seconds=seconds)
        self._set(token.id, token)
        return token, word

    def revoke(self, id: str) -> Token:
        """Revoke a token and return it."""
        known = self.known()
        if id not in known:
            raise SettingError(
                f"there is no token {id!r}. Nothing was revoked. `fanfold server token list` shows them: {', '.join(known)}."
            )
        self._set(id, None)
        return known[id]


class Tokens(TokenBook):
    """The token file, reloaded whenever it changes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int, int] | None = None
        self._known: dict[str, Token] = {}

    def known(self) -> dict[str, Token]:
        self._refresh()
        return dict(self._known)

    def recent(self) -> dict[str, Token]:
        self._refresh()
        return self._known

    def used(self) -> bool:
        return self.path.exists() or self.path.is_symlink()

    def _refresh(self) -> None:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            self._seen, self._known = None, {}
            return
        seen = (found.st_ino, found.st_mtime_ns, found.st_size)
        if seen == self._seen:
            return
        if found.st_mode & 0o077:
            raise SettingError(f"others can read {self.path}. No token is taken from it. Run: chmod 600 {self.path}")
        check_owner(self.path, "No token is taken from it")
        self._known = _read(self.path)
        self._seen = seen

    def _set(self, id: str, token: Token | None) -> None:
        """Read, change and replace the file under a lock."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(self.path.with_name(f"{self.path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            kept = {other: one for other, one in self.known().items() if other != id} | ({id: token} if token else {})
            text = json.dumps({"tokens": [asdict(one) for one in kept.values()]}, indent=1)
            replace_text(self.path, text, sync=True, mode=0o600)
        finally:
            self._seen = None
            os.close(lock)


def check_owner(path: Path, effect: str) -> None:
    """Raise if a file that says who may do what was made by another user, such as one who may write to its folder."""
    if owner := stranger(path, path.parent):
        raise SettingError(f"{path} belongs to another user ({owner}). {effect}. Copy it to make it yours, or remove it.")


def _hash(word: str) -> str:
    return hashlib.sha256(word.encode("utf-8", "surrogatepass")).hexdigest()


def _check(projects: Sequence[str], scopes: Sequence[str]) -> None:
    if not projects or not all(project.strip() for project in projects):
        raise SettingError("a token needs a project. None was made. Name one with --for PROJECT, or '*' for all.")
    if not scopes or set(scopes) - set(SCOPES):
        raise SettingError(f"a token needs a scope. None was made. Known: {', '.join(SCOPES)}.")


def token_from(row: Mapping[str, Any]) -> Token:
    """Return a token as it was stored."""
    return Token(**{**row, "projects": tuple(row["projects"]), "scopes": tuple(row["scopes"])})


def _read(path: Path) -> dict[str, Token]:
    try:
        listed = [token_from(row) for row in json.loads(path.read_text(encoding="utf-8"))["tokens"]]
    except (ValueError, KeyError, TypeError) as error:
        raise SettingError(f"{path} is not a file of tokens: {error}. Nobody is let in. Restore it, or create tokens.") from error
    return {token.id: token for token in listed}
