"""Asking something of a running job, and waiting for its answer, which is an event in the journal of its rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from ..journal import requests
from ..journal.requests import Answer, JobRequest

if TYPE_CHECKING:
    from .run import StoredRun

POLL_SECONDS: Final = 0.1
GRACE_SECONDS: Final = 3.0  # after a request has expired, for the job to say so


def tell(
    run: StoredRun, action: str, values: Mapping[str, Any] | None = None, *, wait: bool = True,
    timeout: float = requests.SECONDS, by: str = "", leave: Callable[[JobRequest], None] | None = None,
    waiting: Callable[[], object] = lambda: None,
) -> Answer:  # fmt: skip
    """Ask something of a run's job; return its answer. The request is valid for `timeout` seconds.

    `leave` puts the request where the job finds it (default: into the run's directory); `waiting` is called once after a while.
    """
    request = requests.new(action, values, by=by, seconds=timeout)
    asked = Answer(id=request.id, action=request.action, state="asked", values=request.values, by=request.by)
    if why := not_running(run.reopened()):
        return _with(asked, "refused", why)
    (leave or run.leave_request)(request)
    return awaited(run, request, asked, waiting) if wait else asked


def not_running(run: StoredRun) -> str:
    """Return why no job can take a request, or an empty text."""
    status = run.status
    if status == "running" or any(attempt.verdict()["status"] == "running" for attempt in run.attempts):
        return ""  # an evaluation that has ended may be a later attempt than the training
    return f"the run is not running: it is {status}"


def answer_to(run: StoredRun, id: str) -> Answer | None:
    """Return what the job has said about a request so far."""
    found = next((one for one in reversed(run.requests) if one["id"] == id), None)
    names = ("id", "action", "state", "values", "by", "step", "why")
    return None if found is None else Answer(**{name: found[name] for name in names})


def answer_so_far(run: StoredRun, id: str) -> Answer:
    """Return what became of a request; one that the run's job cannot answer any more is refused."""
    ended = not_running(run)
    found = answer_to(run, id) or Answer(id=id, action="", state="asked")
    return _with(found, "refused", f"{ended}, and did not answer") if ended and found.state == "asked" else found


def awaited(run: StoredRun, request: JobRequest, asked: Answer, waiting: Callable[[], object]) -> Answer:
    began, until = time.monotonic(), time.monotonic() + max(0.0, request.expires - time.time())
    told = False
    while True:
        now = run.reopened()
        ended = not_running(now)  # first: what the journal says afterwards is final
        found = answer_to(now.reopened() if ended else now, request.id) or asked
        if found.state != "asked":
            return found
        if ended:
            run.withdraw_request(request.id)
            return _with(found, "refused", f"{ended}, and did not answer")
        if time.monotonic() > until + GRACE_SECONDS:
            return _given_up(run, found)
        if not told and time.monotonic() - began > GRACE_SECONDS:
            told = True
            waiting()
        time.sleep(POLL_SECONDS)


def _given_up(run: StoredRun, found: Answer) -> Answer:
    if run.withdraw_request(found.id):
        return _with(found, "expired", "the job did not pick it up: it hangs, or its fanfold is too old")
    return _with(found, "asked", "the job has not answered yet; it may still act at the end of its current step")


def _with(answer: Answer, state: Any, why: str) -> Answer:
    return Answer(id=answer.id, action=answer.action, state=state, values=answer.values, by=answer.by, why=why)
