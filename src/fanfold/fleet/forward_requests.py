"""Requests to jobs, fetched from a gateway by the forwarder that serves rank 0 of their runs, and left in those runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

import msgspec

from ..errors import FanfoldError, notices
from ..journal import requests
from .client import Client, Unreachable
from .forward_run import Following

FETCH_SECONDS = 2.0
OLD_GATEWAY_SECONDS = 600.0
MAX_RUNS = 1000  # in one question
REMEMBERED = 10_000


class RequestMail:
    """Fetches requests every few seconds, for runs whose rank 0 may be alive here. Failures are retried by the next fetch."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._next = 0.0
        self._got: dict[str, list[tuple[str, str]]] = {}  # by project: left in a run, and not acknowledged yet
        self._seen: deque[str] = deque(maxlen=REMEMBERED)

    def fetch(self, runs: Iterable[Following]) -> None:
        """Fetch what waits at the gateway, if it is time to."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + FETCH_SECONDS
        projects: dict[str, dict[str, Following]] = {project: {} for project, got in self._got.items() if got}
        for run in runs:
            if any(tail.name.startswith("0-") for tail in run.tails.values()):
                projects.setdefault(run.project, {})[run.id] = run
        for project, here in projects.items():
            try:
                self._fetch(project, dict(list(here.items())[-MAX_RUNS:]))
            except Unreachable as error:
                old = error.status in (404, 405)  # a gateway of an earlier version
                self._next = time.monotonic() + (OLD_GATEWAY_SECONDS if old else FETCH_SECONDS)
                return

    def _fetch(self, project: str, here: dict[str, Following]) -> None:
        got = self._got.pop(project, [])[:REMEMBERED]
        try:
            found = self._client.requests(project, list(here), got)
        except Unreachable:
            self._got[project] = got
            raise
        late = time.time() - found.now  # the gateway's clock may be wrong, or ours
        for run, request in found.requests:
            if run in here:
                self._leave(here[run], msgspec.structs.replace(request, expires=request.expires + late))
                self._got.setdefault(project, []).append((run, request.id))

    def _leave(self, run: Following, request: requests.JobRequest) -> None:
        if request.id in self._seen:
            return
        self._seen.append(request.id)
        try:
            requests.leave(run.path, request)
        except (OSError, FanfoldError) as error:
            notices.once(f"request:{run.path}", f"a request to run {run.id} could not be passed on: {error}")
