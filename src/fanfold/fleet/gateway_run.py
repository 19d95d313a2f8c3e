"""A run at a gateway, opened from anywhere: its facts, which can be assigned, and requests to its job. Its points stay there."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Final

import msgspec

from ..errors import FanfoldError, notices
from ..journal import requests
from ..journal.requests import Answer
from ..settings import store_address
from ..store.attempts import Attempt
from ..store.changes import checked_facts
from ..store.rows import AttemptRow, RunRow
from ..store.run import Runs, StoredRun
from .client import Client
from .destination import destination
from .wire import Telling

LISTED: Final = 200  # the most runs that a gateway lists in one answer
POLL_SECONDS, GRACE_SECONDS = 0.3, 5.0
Address = str | os.PathLike[str] | None
_TOOLS = {"tags": "tag", "notes": "note", "name": "rename", "archived": "archive"}
_NUMBERS = {text: float(text) for text in ("NaN", "Infinity", "-Infinity")}  # as JSON has them


def reach(address: Address) -> Client:
    """Return a client for the gateway at an address, with the token that was given for it."""
    found = destination({}, str(store_address(address)))
    assert found is not None
    return Client(found.url, found.token, ca=found.ca)


def open_run(address: Address, word: str, project: str | None = None) -> GatewayRun:
    """Open one run by its id, its name or the beginning of its id; `-` is the newest."""
    client = reach(address)
    if word == "-" and project:
        found = client.tool("find", {"project": project, "limit": 1})["runs"]
        word = found[0]["id"] if found else word
    return GatewayRun(client, client.tool("show", {"run": in_project(word, project)}))


def in_project(word: str, project: str | None) -> str:
    """Return the name of a run as the gateway's tools understand it."""
    return f"{project}/{word}" if project and "/" not in word and word != "-" else word


def runs(address: Address, project: str | None = None, filter: str = "") -> Runs:
    """Return the newest runs of a gateway that match a filter."""
    client = reach(address)
    found = client.tool("find", {"project": project, "filter": filter, "limit": LISTED, "archived": True})
    if found["total"] > LISTED:
        notices.once(
            f"listed:{client.url}",
            f"{client.url} has {found['total']} such runs; only the newest {LISTED} are listed. Name a project or a filter.",
        )
    return Runs(GatewayRun(client, facts) for facts in found["runs"])


class GatewayRun(StoredRun):
    """A run at a gateway. `name`, `tags`, `notes` and `archived` can be assigned, `tell` reaches its job.

    What needs its points, such as `series`, raises: the gateway keeps them.
    """

    def __init__(self, client: Client, facts: dict[str, Any]) -> None:
        self._client = client
        row = _row(facts)
        super().__init__(Path("/", row.project, row.id), row)

    def refresh(self) -> StoredRun:
        self.__init__(self._client, self._shown())  # type: ignore[misc]
        return self

    def reopened(self) -> StoredRun:
        return GatewayRun(self._client, self._shown())

    def _shown(self) -> dict[str, Any]:
        return dict(self._client.tool("show", {"run": f"{self.project}/{self.id}"}))

    @property
    def place(self) -> str:
        return f"{self._client.url}/{self.project}/{self.id}"

    @property
    def store(self) -> str:
        return self._client.url

    @property
    def attempts(self) -> list[Attempt]:
        raise FanfoldError(
            f"the journals of run {self.id} are at {self._client.url}, and this needs them. Nothing was read. Use `fanfold "
            "points --dir`, the dashboard, or the store in which the gateway keeps its runs."
        )

    def pulled(self) -> Path:
        raise FanfoldError(f"run {self.id} cannot be copied from {self._client.url}. Nothing was read.")

    def _edit(self, facts: dict[str, Any]) -> None:
        new = checked_facts(facts)
        run = f"{self.project}/{self.id}"
        for name, value in new.items():
            if name == "tags":
                now = self._shown()["tags"]
                given: dict[str, Any] = {"runs": [run], "remove": [tag for tag in now if tag not in value], "add": value}
            elif name == "archived":
                given = {"runs": [run], "archived": value}
            elif name in _TOOLS:
                given = {"run": run, "name" if name == "name" else "text": value or ""}
            else:
                raise FanfoldError(f"the {name} of a run cannot be changed through a gateway. Nothing was changed.")
            self._client.tool(_TOOLS[name], given)
        self.refresh()

    def move(self, project: str) -> None:
        (moved,) = self._client.tool("move", {"runs": [f"{self.project}/{self.id}"], "project": project})
        self.__init__(self._client, self._client.tool("show", {"run": f"{project}/{moved['id']}"}))  # type: ignore[misc]

    def tell(self, action: str, /, *, wait: bool = True, timeout: float = requests.SECONDS, **values: Any) -> Answer:
        return ask_job(self._client, self.project, self.id, action, values, wait=wait, timeout=timeout)


def ask_job(client: Client, project: str, run: str, action: str, values: dict[str, Any], *, wait: bool, timeout: float) -> Answer:
    """Ask something of a run's job through its gateway; return the answer, which comes from the job's journal."""
    requests.new(action, values, seconds=timeout)  # a mistake is reported before anything is sent
    answer = client.tell(project, run, Telling(action, values, timeout))
    until = time.monotonic() + timeout + GRACE_SECONDS
    while answer.state == "asked" and wait and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
        answer = msgspec.structs.replace(client.answer(project, run, answer.id), action=action, values=values)
    return answer


def _row(facts: dict[str, Any]) -> RunRow:
    same: dict[str, Any] = {
        name: facts.get(name) for name in ("id", "project", "name", "group", "notes", "tags", "config", "seen", "archived")
    }
    summary = {key: _NUMBERS.get(value, value) if isinstance(value, str) else value for key, value in facts["summary"].items()}
    began = round((facts["seen"] - facts["duration"]) * 1e9)
    ranks = facts["ranks"] if isinstance(facts["ranks"], list) else list(range(facts["ranks"]))
    return RunRow(
        **same, created=facts["created"], rank_list=ranks, summary=summary, latest=summary,
        verdict={**(facts.get("cause") or {}), "status": facts["status"]},
        lives=[AttemptRow("", facts["status"], began, round(facts["seen"] * 1e9))],
    )  # fmt: skip
