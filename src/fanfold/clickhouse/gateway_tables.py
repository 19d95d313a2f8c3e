"""Tables a gateway needs beside the runs: tokens, the audit log, saved views, sent notifications. All gateways share them."""

from __future__ import annotations

import json
import secrets
import threading
import time
from dataclasses import asdict
from typing import Any

import msgspec

from ..fleet.audit import AuditEntry
from ..fleet.tokens import Token, TokenBook, token_from
from ..journal import requests
from ..journal.requests import JobRequest
from ..store.changes import VIEW, WORKSPACE
from ..store.run import StoredRun
from .batch import u64
from .database import Database
from .run import FleetRun

LEASE_SECONDS = 30.0  # after so long without a claim, another gateway sends the notifications
FRESH_SECONDS = 1.0  # how long a revoked token may still work at another gateway


class TokenTable(TokenBook):
    """Tokens in a table; the last row of a revoked token is empty."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._recent: dict[str, Token] = {}
        self._until = 0.0
        self._lock = threading.Lock()

    def known(self) -> dict[str, Token]:
        found = self.database.ask("SELECT id, argMax(token, version) AS text FROM tokens GROUP BY id HAVING text != ''")
        return {token.id: token for token in (token_from(json.loads(text)) for text in found["text"])}

    def recent(self) -> dict[str, Token]:
        with self._lock:
            if time.monotonic() >= self._until:
                self._recent = self.known()
                self._until = time.monotonic() + FRESH_SECONDS
            return self._recent

    def at_hand(self) -> dict[str, Token] | None:
        return self._recent if time.monotonic() < self._until else None

    def used(self) -> bool:
        return bool(int(self.database.ask("SELECT count() AS number FROM tokens")["number"][0]))

    def _set(self, id: str, token: Token | None) -> None:
        self.database.insert("tokens", {"id": [id], "token": [json.dumps(asdict(token)) if token else ""]})
        self._until = 0.0


class AuditTable:
    """The audit log, in an append-only table."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def write(self, entry: AuditEntry) -> None:
        self.database.insert("audit", {"entry": [msgspec.json.encode(entry)]})

    def read(self, limit: int = 1000) -> list[AuditEntry]:
        found = self.database.ask("SELECT entry FROM audit ORDER BY at DESC LIMIT {limit:UInt32}", limit=limit)
        return [msgspec.json.decode(entry, type=AuditEntry) for entry in reversed(found["entry"].tolist())]


class RequestTable:
    """Requests to running jobs, until their forwarder has them; the last row of such a request is empty."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._recent: dict[int, list[JobRequest]] = {}
        self._until = 0.0
        self._lock = threading.Lock()

    def put(self, run: int, request: JobRequest) -> None:
        self._set(run, request.id, requests.encode(request).decode())

    def remove(self, run: int, id: str) -> None:
        self._set(run, id, "")

    def _set(self, run: int, id: str, text: str) -> None:
        self.database.insert("requests", {"run": u64([run]), "id": [id], "request": [text]})
        self._until = 0.0

    def waiting(self) -> dict[int, list[JobRequest]]:
        """Return the valid requests by run. Forwarders ask often, so the table is read at most once a second."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._recent = self._read()
                self._until = time.monotonic() + FRESH_SECONDS
            return self._recent

    def _read(self) -> dict[int, list[JobRequest]]:
        since = int((time.time() - requests.MAX_SECONDS) * 1e6)
        rows = self.database.ask(
            "SELECT run, id, argMax(request, version) AS text FROM requests WHERE version >= {since:UInt64} "
            "GROUP BY run, id HAVING text != '' ORDER BY id LIMIT 10000", since=since,
        )  # fmt: skip
        found: dict[int, list[JobRequest]] = {}
        for run, text in zip(rows["run"].tolist(), rows["text"].tolist(), strict=True):
            request = requests.decode(text)
            if request.expires > time.time():
                found.setdefault(run, []).append(request)
        return found


class ViewTable:
    """Views, rules and workspaces in a table; the last row of a deleted one is empty. Names except views' begin with a kind."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def all(self, project: str, kind: str = VIEW) -> dict[str, str]:
        mark = "" if kind == VIEW else f"\0{kind} "
        found = self.database.ask(
            "SELECT name, argMax(fragment, version) AS text FROM views WHERE project = {project:String} "
            f"AND {'NOT ' * (not mark)}startsWith(name, concat(char(0), {{kind:String}})) "
            "GROUP BY name HAVING text != '' ORDER BY name", project=project, kind=mark[1:],
        )  # fmt: skip
        names, fragments = (found[column].tolist() for column in ("name", "text"))
        rows = {name.decode(): fragment.decode() for name, fragment in zip(names, fragments, strict=True)}
        return {name.removeprefix(mark): text for name, text in rows.items()}

    def save(self, project: str, name: str, fragment: str | None, kind: str = VIEW) -> None:
        name = name.lstrip("\0") if kind == VIEW else f"\0{kind} {name}"
        row: dict[str, Any] = {"project": [project], "name": [name], "fragment": [fragment or ""]}
        self.database.insert("views", row)

    def workspace(self, project: str, user: str = "") -> str:
        found = self.database.ask(
            "SELECT argMax(fragment, version) AS text FROM views WHERE project = {project:String} "
            "AND name = concat(char(0), {name:String}) GROUP BY name", project=project, name=f"{WORKSPACE} {user}",
        )["text"].tolist()  # fmt: skip
        return str(found[0].decode()) if found else ""

    def keep_workspace(self, project: str, fragment: str, user: str = "") -> None:
        self.save(project, user, fragment, WORKSPACE)


class NoticePages:
    """What gateways sent about one run, a line each."""

    def __init__(self, database: Database, run: int) -> None:
        self.database = database
        self.run = run

    def read(self) -> list[dict[str, Any]]:
        found = self.database.ask("SELECT line FROM notices WHERE run = {run:UInt64} ORDER BY at", run=self.run)
        return [json.loads(line) for line in found["line"].tolist()]

    def append(self, line: dict[str, Any]) -> None:
        import numpy as np

        self.database.insert(
            "notices", {"run": np.array([self.run], np.uint64), "line": [json.dumps(line)]}, token=secrets.token_hex(8)
        )


class NoticeState:
    """What gateways sent, in the database they share. The one that started first sends; another takes over when it is silent."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.holder = f"{time.time_ns():020d}-{secrets.token_hex(4)}"
        self._claimed = 0
        self._until = 0.0
        self._leads = False

    def leads(self) -> bool:
        if time.monotonic() >= self._until:
            self.database.insert("leases", {"name": ["notify"], "holder": [self.holder]}, token=secrets.token_hex(8))
            found = self.database.ask(
                "SELECT holder FROM leases WHERE name = 'notify' GROUP BY holder HAVING max(version) > "
                "toUnixTimestamp64Micro(now64(6)) - {silent:UInt64} ORDER BY holder LIMIT 1",
                silent=int(LEASE_SECONDS * 1e6),
            )  # fmt: skip
            first = found["holder"].tolist()
            self._leads = bool(first) and first[0].decode() == self.holder and self._claimed > 0  # others had time to claim, too
            self._claimed += 1
            self._until = time.monotonic() + LEASE_SECONDS / 6
        return self._leads

    def pages(self, run: StoredRun | None) -> NoticePages:
        return NoticePages(self.database, run.number if isinstance(run, FleetRun) else 0)

    def close(self) -> None:
        """Nothing to release: another gateway takes over when the claim is old."""
