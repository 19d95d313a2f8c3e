"""What people may see and change, by user and by group, from `--grant` and a file. Tokens carry their own rights.

Grants are looked up at every request, so that removing one from the file takes effect at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SettingError
from .tokens import ALL, READ, SCOPES, WRITE, Token, check_owner

EVERYONE = "*"  # anyone who is logged in
USER, GROUP = "user", "group"
Right = tuple[str, str]  # scope, project


@dataclass(frozen=True)
class Person:
    """A logged-in person and what their grants allow."""

    name: str
    rights: frozenset[Right]

    @property
    def label(self) -> str:
        return f"user {self.name}"

    @property
    def may_write(self) -> bool:
        return any(scope == WRITE for scope, _ in self.rights)

    def allows(self, scope: str, project: str) -> bool:
        return bool(self.rights & {(scope, project), (scope, ALL)})


@dataclass(frozen=True)
class Anybody:
    """Any user of this machine, at a gateway without tokens and logins."""

    label: str = "anybody on this machine"
    may_write: bool = True

    def allows(self, scope: str, project: str) -> bool:  # noqa: ARG002 - the interface
        return True


Holder = Token | Person | Anybody  # the caller of a request


class Grants:
    """Rights by user and group. The file is read again whenever it changes."""

    def __init__(self, given: Sequence[str] = (), path: Path | None = None) -> None:
        self.path = path
        self._given = [_parsed(text) for text in given]
        self._listed: list[tuple[str, str, Right]] = []
        self._seen: tuple[int, int, int] | None = None
        self._refresh()  # reports an invalid file before the gateway starts

    def person(self, name: str, groups: Iterable[str] = ()) -> Person:
        """Return a person with everything they are granted."""
        self._refresh()
        names = {(USER, name), (EVERYONE, EVERYONE), *((GROUP, group) for group in groups)}
        found = {right for kind, whose, right in (*self._given, *self._listed) if (kind, whose) in names}
        read_too = {(READ, project) for scope, project in found if scope == WRITE}  # permission to write includes reading
        return Person(name, frozenset(found | read_too))

    def known(self, groups: Iterable[str]) -> list[str]:
        """Return the groups that have any grant: a session need not carry the others."""
        self._refresh()
        named = {whose for kind, whose, _ in (*self._given, *self._listed) if kind == GROUP}
        return sorted(named.intersection(groups))

    def _refresh(self) -> None:
        if self.path is None:
            return
        try:
            found = self.path.stat()
        except OSError as error:
            raise SettingError(f"{self.path} cannot be read: {error.strerror}. Nobody is let in by it. Restore it.") from error
        seen = (found.st_ino, found.st_mtime_ns, found.st_size)
        if seen != self._seen:
            if found.st_mode & 0o022:
                raise SettingError(f"others can change {self.path}. Nobody is let in by it. Run: chmod go-w {self.path}")
            check_owner(self.path, "Nobody is let in by it")
            self._listed = list(_listed(_load(self.path), self.path))
            self._seen = seen


def _parsed(text: str) -> tuple[str, str, Right]:
    """Parse `user:NAME=PROJECT:SCOPE`, splitting at the last equals sign: group names may contain others."""
    who, _, what = text.rpartition("=")
    kind, _, name = who.partition(":")
    if who == EVERYONE:
        kind, name = EVERYONE, EVERYONE
    if kind not in (USER, GROUP, EVERYONE) or not name:
        raise SettingError(
            f"--grant {text!r} cannot be understood. The gateway was not started. Write user:NAME=PROJECT:SCOPE, "
            "group:NAME=PROJECT:SCOPE or '*=PROJECT:SCOPE'."
        )
    return kind, name, _right(what, f"--grant {text!r}")


def _right(text: Any, origin: str) -> Right:
    project, _, scope = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    if not project.strip() or scope not in SCOPES:
        raise SettingError(
            f"{origin} grants {text!r}, which is not PROJECT:SCOPE. Nobody is let in by it. Scopes: {', '.join(SCOPES)}; "
            "the project '*' is all of them."
        )
    return scope, project


def _load(path: Path) -> Mapping[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        found: Mapping[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{path} is not valid TOML: {error}. Nobody is let in by it. Correct it.") from error
    return found


def _listed(found: Mapping[str, Any], path: Path) -> Iterable[tuple[str, str, Right]]:
    unknown = sorted(set(found) - {"users", "groups", "everyone"})
    if unknown:
        raise SettingError(
            f"{path} has unknown parts: {', '.join(unknown)}. Nobody is let in by it. Known: [users], [groups], everyone."
        )
    parts = {USER: found.get("users", {}), GROUP: found.get("groups", {}), EVERYONE: {EVERYONE: found.get("everyone", [])}}
    for kind, names in parts.items():
        if not isinstance(names, Mapping) or not all(isinstance(rights, list) for rights in names.values()):
            raise SettingError(f'{path}: a name stands for a list such as ["llm:read"]. Nobody is let in by it. Correct it.')
        yield from ((kind, name, _right(text, str(path))) for name, rights in names.items() for text in rights)
