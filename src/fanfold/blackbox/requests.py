"""Requests for stacks: one file in the run that every rank looks at each second, and answers with an event in its journal."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ..atomic import replace_text
from ..journal.files import read_list

REQUEST = "request.json"
MAX_WAITING = 8
MOST_BYTES = 4096


def request(folder: Path, token: str) -> None:
    """Ask every process of a run for its stacks."""
    replace_text(folder / REQUEST, json.dumps([*asked(folder)[-MAX_WAITING + 1 :], token]), mode=0o600)


def asked(folder: Path) -> list[str]:
    """Return the latest requests, oldest first."""
    return [one for one in read_list(folder / REQUEST, MOST_BYTES) if _fine(one)]


def _fine(token: object) -> bool:
    return isinstance(token, str) and token.isalnum() and len(token) < 64


class StackRequests:
    """The requests that a process has not answered yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._changed = -1
        self._seen = set(asked(folder))  # old requests are not for us

    def new(self) -> list[str]:
        try:
            changed = os.stat(self._folder / REQUEST).st_mtime_ns  # noqa: PTH116 - a Path for each second is a waste
        except OSError:
            return []
        if changed == self._changed:
            return []
        found = [one for one in asked(self._folder) if one not in self._seen]
        self._seen.update(found)
        self._changed = changed
        return found
