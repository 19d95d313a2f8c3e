"""Rank 0's side of requests from outside: picks them up, hands them to the ranks, and writes every answer into the journal."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import guard
from ..journal import requests, writer
from ..journal.liveness import is_locked
from ..journal.requests import JobRequest
from .agreement import Agreement, Request
from .recorder import Recorder

KIND = "tell"
REMEMBERED = 4096
NOBODY = "the program has not looked at requests: it reads run.control once per step, or trains with a callback"


class Inbox:
    """The open requests of a run. A background thread looks for new ones; the training thread answers them."""

    def __init__(self, recorder: Recorder, refusal: Callable[[JobRequest], str], step: Callable[[], int]) -> None:
        self.agreement: Agreement | None = None  # of the training that takes requests now
        self._listened = False  # whether any training of this process has taken requests
        self._recorder, self._refusal, self._step = recorder, refusal, step
        self._open: dict[str, JobRequest] = {}
        self._sent: dict[str, Request] = {}  # those that the ranks know of
        self._seen: deque[str] = deque(maxlen=REMEMBERED)

    def look(self, run: Path) -> None:
        """Take new requests, and give up those that nobody carried out in time.

        A process whose program does not take requests leaves them to another one of rank 0, if there is one: a training under
        `fanfold exec`, or beside an evaluation. Only those that have expired are nobody's.
        """
        for request in requests.take(run, lambda one: self._listened or one.expires <= time.time() or not _has_another_main(run)):
            if request.id not in self._seen:  # a gateway may deliver one twice
                self._seen.append(request.id)
                with guard("accept a request to this run"):
                    self._accept(request)
        for request in list(self._open.values()):
            if request.expires <= time.time():
                self._expire(request)

    def _accept(self, request: JobRequest) -> None:
        self._open[request.id] = request
        self._write(request, "asked", None, "")
        if self.agreement is not None:
            self._hand_over(request, self.agreement)

    def listen(self, agreement: Agreement) -> None:
        """Hand the open requests to the ranks of a training, and from now on every new one."""
        if self.agreement is agreement:
            return
        self.agreement, self._listened = agreement, True
        for request in list(self._open.values()):
            self._hand_over(request, agreement)

    def _hand_over(self, request: JobRequest, agreement: Agreement) -> None:
        if request.expires <= time.time():
            return  # it is about to be answered as expired
        if why := self._refusal(request):
            self.answer(request, "refused", why)
            return
        actions = () if request.action == "set" else (request.action,)
        sent = self._sent[request.id] = Request(KIND, actions, f"{request.by} asked", requests.encode(request).decode())
        agreement.request(sent)

    def _expire(self, request: JobRequest) -> None:
        sent = self._sent.get(request.id)
        if sent is None:
            self.answer(request, "expired", NOBODY)
        elif self.agreement is None or self.agreement.withdraw(sent):
            self.answer(request, "expired", "no step ended in time")

    def answer(self, request: JobRequest, state: str, why: str, step: int | None = None) -> None:
        """Write the answer to a request, once."""
        if self._open.pop(request.id, None) is not None:
            self._sent.pop(request.id, None)
            after = self._step() if step is None else step
            self._write(request, state, after if state == "done" else None, why)

    def _write(self, request: JobRequest, state: str, step: int | None, why: str) -> None:
        known = {"id": request.id, "action": request.action, "values": request.values, "by": request.by}
        self._recorder.event("request", {**known, "state": state, "s": step, "why": why})

    def show_knobs(self, knobs: Mapping[str, Any]) -> None:
        """Record what is adjustable."""
        self._recorder.info({"knobs": dict(knobs)})

    def close(self, run: Path) -> None:
        """Answer everything that is still open."""
        self.look(run)
        for request in list(self._open.values()):
            self.answer(request, "refused", "the run ended first")


def _has_another_main(run: Path) -> bool:
    """Return whether another process of this machine writes as rank 0 of a run."""
    locks = (run / "journal").glob("0-*.alive")
    return any(str(lock) not in writer.held and is_locked(lock) for lock in locks)
