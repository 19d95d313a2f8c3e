"""Tables a gateway needs beside the runs: tokens, the audit log, saved views. All gateways share them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from ..errors import SettingError
from ..fleet.audit import Entry
from ..fleet.tokens import Token, make, match
from .database import Database

FRESH_SECONDS = 1.0  # how long a revoked token may still work at another gateway


class TokenTable:
    """Tokens in a table; the last row of a revoked token is empty."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._known: dict[str, Token] = {}
        self._until = 0.0
        self._lock = threading.Lock()

    def all(self) -> list[Token]:
        return list(self._read().values())

    def used(self) -> bool:
        return bool(int(self.database.ask("SELECT count() AS number FROM tokens")["number"][0]))

    def find(self, word: str) -> Token | None:
        return match(self._fresh(), word)

    def get(self, id: str) -> Token | None:
        found = self._fresh().get(id)
        return found if found is not None and not found.expired else None

    def create(
        self, name: str, *, projects: Sequence[str], scopes: Sequence[str], seconds: float | None = None
    ) -> tuple[Token, str]:
        token, word = make(name, projects=projects, scopes=scopes, seconds=seconds)
        self._write(token.id, json.dumps(asdict(token)))
        return token, word

    def revoke(self, id: str) -> Token:
        known = self._read()
        if id not in known:
            raise SettingError(
                f"there is no token {id!r}. Nothing was revoked. `fanfold server token list` shows them: {', '.join(known)}."
            )
        self._write(id, "")
        return known[id]

    def _write(self, id: str, text: str) -> None:
        self.database.insert("tokens", {"id": [id], "token": [text]})
        self._until = 0.0

    def _fresh(self) -> dict[str, Token]:
        with self._lock:
            if time.monotonic() >= self._until:
                self._known = self._read()
                self._until = time.monotonic() + FRESH_SECONDS
            return self._known

    def _read(self) -> dict[str, Token]:
        found = self.database.ask("SELECT id, argMax(token, version) AS text FROM tokens GROUP BY id HAVING text != ''")
        rows = [json.loads(text) for text in found["text"]]
        return {row["id"]: Token(**{**row, "projects": tuple(row["projects"]), "scopes": tuple(row["scopes"])}) for row in rows}


class AuditTable:
    """The audit log, in an append-only table."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def write(self, entry: Entry) -> None:
        self.database.insert("audit", {"entry": [msgspec.json.encode(entry)]})

    def read(self, limit: int = 1000) -> list[Entry]:
        found = self.database.ask("SELECT entry FROM audit ORDER BY at DESC LIMIT {limit:UInt32}", limit=limit)
        return [msgspec.json.decode(entry, type=Entry) for entry in reversed(found["entry"].tolist())]


class ViewTable:
    """Saved views in a table; the last row of a deleted view is empty."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def all(self, project: str) -> dict[str, str]:
        found = self.database.ask(
            "SELECT name, argMax(fragment, version) AS text FROM views WHERE project = {project:String} "
            "GROUP BY name HAVING text != '' ORDER BY name", project=project,
        )  # fmt: skip
        names, fragments = (found[column].tolist() for column in ("name", "text"))
        return {name.decode(): fragment.decode() for name, fragment in zip(names, fragments, strict=True)}

    def save(self, project: str, name: str, fragment: str | None) -> None:
        row: dict[str, Any] = {"project": [project], "name": [name], "fragment": [fragment or ""]}
        self.database.insert("views", row)
