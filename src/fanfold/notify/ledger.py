"""What was sent about a run, to whom: a line for each intent and each outcome, on disk before anything else happens.

An intent without an outcome was interrupted by a crash. Whether it arrived is unknown, so it is sent again, under the same id.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from ..journal.files import open_regular, open_to_write

LEDGER, GATEWAY = "notify.sent", "gateway.sent"  # beside the cursors of a run: of its own notifier, and of a gateway
MOST_BYTES = 64 << 20


class Pages(Protocol):
    """Where the lines of one run are kept."""

    def read(self) -> list[dict[str, Any]]:
        """Return all lines, oldest first."""

    def append(self, line: dict[str, Any]) -> None:
        """Store a line durably before returning."""


class FilePages:
    """Lines in a file beside the run, readable by its owner only."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        try:
            with open_regular(self.path) as file:
                text = file.read(MOST_BYTES).decode("utf-8", "replace")
        except OSError:
            return []
        lines = []
        for line in text.splitlines():
            with contextlib.suppress(ValueError):  # a line cut off by a crash: it was not acted on
                found = json.loads(line)
                if isinstance(found, dict):
                    lines.append(found)
        return lines

    def append(self, line: dict[str, Any]) -> None:
        self.path.parent.mkdir(exist_ok=True, mode=0o700)
        fd = open_to_write(self.path, os.O_APPEND)
        try:
            size = os.fstat(fd).st_size
            cut_off = size > 0 and os.pread(fd, 1, size - 1) != b"\n"  # by a crash
            data = b"\n" * cut_off + json.dumps(line).encode() + b"\n"
            if os.write(fd, data) < len(data):  # the next line begins on its own
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            os.fsync(fd)
        finally:
            os.close(fd)


class Ledger:
    """The state of one run's notifications: which events each service has been told."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.lines = pages.read()
        self.told: dict[str, set[str]] = {}  # by service: ids of events
        self.open: dict[tuple[str, str], dict[str, Any]] = {}  # by service and message: intents without an outcome
        self.times: dict[str, list[float]] = {}  # by service: when messages were sent
        for line in self.lines:
            self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        service, message, state = str(line.get("to")), str(line.get("message")), line.get("state")
        if state == "intent":
            self.open[service, message] = line
        elif state in ("sent", "failed"):
            intent = self.open.pop((service, message), None)
            if state == "sent" and intent is not None:
                self.told.setdefault(service, set()).update(map(str, intent.get("events") or ()))
                self.times.setdefault(service, []).append(float(line.get("at") or 0.0))

    def write(self, state: str, **facts: Any) -> None:
        """Store a line and apply it."""
        line = {"at": time.time(), "state": state, **facts}
        self.pages.append(line)
        self.lines.append(line)
        self._take(line)

    def begin(self, since: float, services: Iterable[str]) -> None:
        """Note from when on each service is told; earlier events are never sent to it."""
        new = sorted(set(services) - set(self.since))
        if new or not self.begun:
            self.write("began", since=since, services=new)

    @property
    def begun(self) -> bool:
        return any(line.get("state") == "began" for line in self.lines)

    @property
    def since(self) -> dict[str, float]:
        """Return the services that notifications are meant for, each with the time from which on it is told."""
        began = [line for line in self.lines if line.get("state") == "began"]
        return {str(name): float(line["since"]) for line in reversed(began) for name in line.get("services") or ()}
