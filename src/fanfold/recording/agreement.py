"""Agreement: every rank acts (stop, save, evaluate, …) after the same step, although only one of them asked for it.

A rank that stopped on its own would leave the others in a collective that never ends. A collective to agree would have to run
after every step. So ranks agree in rounds, through a board (boards.py), where every note is written once:

1. A rank with a request proposes a step T: the step it has just done, or, after a refusal, one beyond the furthest rank.
   Several may propose; the first note counts.
2. Each rank answers. Yes, if it has not left step T yet, and then it does not leave it before the round is decided: this is
   a promise, not an estimate of its speed. No, and how far it is, if it has left T.
3. If all answer yes, every rank acts after step T. If one answers no, nobody acts, and the next round proposes a later step.
   The distance grows with each refusal, so that a round succeeds however fast the ranks are.

Why this cannot deadlock: a training thread waits only in `at()`, after a complete step, and only for a round to be decided.
Rounds are decided by answers, and answers come from a thread of each rank that does not depend on any training: a rank inside a
collective, an evaluation or a save still answers. No rank stops before T, so all ranks can reach T.

Why it cannot hang: a round that is not decided within DEADLINE_SECONDS, because a rank was killed or its machine is gone, is
decided without that rank, again by the first note written; and a training thread never waits longer than HOLD_SECONDS. In both
cases this rank acts, so that it can save its state, and `missing` names the ranks that did not answer.

When all ranks ask at the same step, as they do for an evaluation that all of them see, the first round succeeds: no rank trains
longer than requested.
"""

from __future__ import annotations

import atexit
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import notices, outcome
from .boards import Board, folder_board, store_board

logger = logging.getLogger("fanfold.agreement")
DEADLINE_SECONDS = 10.0  # schedulers allow 30 seconds between SIGTERM and SIGKILL, and a checkpoint must fit in, too
HOLD_SECONDS = 15.0
REFUSED_SECONDS = 0.5  # after a refusal, how long to wait for the other answers: they tell how far the ranks are
TAKE_OVER_SECONDS = 1.0  # the proposing rank reads the answers; after this time any rank does
ALERT_SECONDS = 2.0  # after a round: the next one mostly follows at once, and is seen without the pause of an idle board
GROWTH = 4  # of the distance to the next proposed step

FLAGS = {
    "stop": "should_training_stop",
    "end epoch": "should_epoch_stop",
    "save": "should_save",
    "evaluate": "should_evaluate",
    "log": "should_log",
}


class Request(NamedTuple):
    """Something one rank wants all ranks to do: `actions` are keys of FLAGS, `kind` and `reason` explain why.

    `told` is a request from outside the job, as JSON (see requests.py): each is answered, so no two of them count as the same.
    """

    kind: str
    actions: tuple[str, ...]
    reason: str = ""
    told: str = ""


@dataclass
class Decision:
    """The actions of all ranks after `step`. `missing` are ranks that did not answer in time."""

    step: int
    requests: tuple[Request, ...]
    missing: tuple[int, ...] = ()
    delivered: int | None = field(default=None, compare=False)  # the step after which this rank received it
    applied: bool = field(default=False, compare=False)

    @property
    def actions(self) -> set[str]:
        return {action for request in self.requests for action in request.actions}

    def request(self, kind: str) -> Request | None:
        """Return the request of a kind, if it is part of this decision."""
        return next((request for request in self.requests if request.kind == kind), None)


class Agreement:
    """The ranks' agreement during one training. Without a board, a process is alone and agrees with itself immediately."""

    def __init__(
        self, board: Board | None, *, step: int = 0, last_step: float = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.board = board
        self._clock = clock
        self._last_step = last_step
        self._changed = threading.Condition(threading.RLock())  # a signal may arrive while the lock is held
        # Used by the training thread, guarded by the lock.
        self._reached = step  # the last step known to be done
        self._inside = False  # the training thread is in at(), and stays there if asked to
        self._trying = False  # it waits for the first round of its own request
        self._late = False  # it is in at() once more after the actions of the step: too late for requests from outside
        self._requests: list[Request] = []
        self._drafted: tuple[Request, ...] = ()  # those that are being proposed
        self._decisions: list[Decision] = []
        self.listeners: list[Callable[[Decision], object]] = []  # called on the training thread when a decision takes effect
        # State of the current round.
        self._round = 0
        self._proposal: dict[str, Any] | None = None
        self._promise: int | None = None
        self._since = 0.0
        self._alert_until = 0.0
        self._answered = False
        self._answers: dict[int, dict[str, Any]] = {}
        self._furthest = step
        self._refusals = 0
        self._lost = board is None
        self._closed = False
        self._woken = False
        self._missed = False
        self._thread: threading.Thread | None = None
        if board is not None:
            self._thread = threading.Thread(target=self._work, name="fanfold-agreement", daemon=True)
            self._thread.start()

    @property
    def alone(self) -> bool:
        """Whether there are no other ranks to agree with."""
        return self.board is None

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def complete(self) -> bool:
        """Whether every rank has answered so far; if not, a collective would wait for it forever."""
        return not self._missed

    # The training thread

    def request(self, request: Request) -> None:
        """Request something from any thread; it is decided in the background, or at the training thread's next at()."""
        with self._changed:
            self._add([request])
            self._wake()

    def withdraw(self, request: Request) -> bool:
        """Take a request back; return False if it is too late, because the ranks are deciding about it or have decided."""
        with self._changed:
            if request not in self._requests or request in self._drafted:
                return False
            self._requests.remove(request)
            return True

    def at(self, step: int, requests: Iterable[Request] = (), *, late: bool = False) -> tuple[Decision, ...]:
        """Return what to do now that `step` is done. Call it on every rank after every step; it may wait for a decision.

        `requests` are this rank's own. Calling it again after the same step returns the same decisions, and new ones. Pass `late`
        when the actions of the step are over: ranks that get a request from outside at different places would act differently.
        """
        with self._changed:
            self._late = late
            self._reached = max(step, self._reached)
            requests = tuple(requests)
            if not (requests or self._requests or self._decisions or self._promise is not None):
                return ()
            if self._add(requests):
                self._trying = True
            if late and not self._trying:
                return self._deliver(step)
            self._hold(step)
            return self._deliver(step)

    def _add(self, requests: Iterable[Request]) -> bool:
        new = [request for request in requests if request not in self._requests and not self._covered(request)]
        self._requests += new
        return bool(new)

    def _covered(self, request: Request) -> bool:
        """Return whether a pending decision already covers a request."""
        pending = [decision for decision in self._decisions if decision.delivered is None]
        if request.told:
            return any(request in decision.requests for decision in pending)
        return any(decision.actions >= set(request.actions) for decision in pending)

    def _hold(self, step: int) -> None:
        self._inside = True
        deadline = self._clock() + HOLD_SECONDS
        self._wake()
        while not self._lost and ((self._trying and self._requests) or (self._promise is not None and step >= self._promise)):
            left = deadline - self._clock()
            if left <= 0:
                self._lost = True
                break
            self._changed.wait(left)
        self._inside = self._trying = False
        if self._lost:
            self._act_alone(step)

    def _act_alone(self, step: int) -> None:
        wanted = list(self._requests)
        if self._proposal is not None:
            wanted += [request for request in self._proposal["requests"] if request not in wanted]
        self._requests, self._proposal, self._promise, self._drafted = [], None, None, ()
        if wanted:
            others = () if self.board is None else tuple(r for r in range(self.board.world_size) if r != self.board.rank)
            self._decisions.append(Decision(step, tuple(wanted), others))

    def _deliver(self, step: int) -> tuple[Decision, ...]:
        for decision in self._decisions:
            if decision.delivered is None and decision.step <= step:
                decision.delivered = step
                self._warn_of_missing(decision)
                for listener in self.listeners:
                    listener(decision)
        self._decisions = [decision for decision in self._decisions if decision.delivered in (None, step)]
        return tuple(decision for decision in self._decisions if decision.delivered == step)

    def _warn_of_missing(self, decision: Decision) -> None:
        if decision.missing:
            self._missed = True
            reasons = "; ".join(request.reason or request.kind for request in decision.requests)
            notices.once(
                "agreement:missing",
                f"fanfold: rank {', '.join(map(str, decision.missing))} did not answer within {DEADLINE_SECONDS:g} seconds when "
                f"all ranks were asked to {' and '.join(sorted(decision.actions))} ({reasons}). This rank does so after step "
                f"{decision.delivered} without waiting longer. Check whether that rank is still alive.",
            )

    def steer(
        self, control: Any, step: int, expected: Collection[str] = (), only: Collection[str] = FLAGS, *, late: bool = False
    ) -> None:
        """Make the flags of `control` the same on every rank after a step.

        A flag that is set here and neither `expected` on all ranks nor agreed on becomes a request: it is cleared, and set on all
        ranks after the step they agree on. `only` names the actions to consider.
        """
        decisions = self.at(step, late=late)
        known = {action for decision in decisions for action in decision.actions} | {*expected}
        wanted = tuple(action for action in only if getattr(control, FLAGS[action]) and action not in known)
        if wanted:
            for action in wanted:
                setattr(control, FLAGS[action], False)
            decisions = self.at(step, [Request("callback", wanted, f"a callback asked to {' and '.join(wanted)}")], late=late)
        self.apply(control, decisions)

    def apply(self, control: Any, decisions: Iterable[Decision]) -> None:
        """Set the flags of decisions, once per decision."""
        for decision in decisions:
            if not decision.applied:
                decision.applied = True
                for action in decision.actions:
                    setattr(control, FLAGS[action], True)

    def close(self) -> None:
        """Leave: the other ranks no longer wait for this one's answers."""
        with self._changed:
            self._closed = True
            self._wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(DEADLINE_SECONDS / 5)

    # The answering thread; only it accesses the board, so that a board that hangs does not block training

    def _wake(self) -> None:
        self._woken = True
        self._changed.notify_all()

    def _work(self) -> None:
        assert self.board is not None
        board = self.board
        while True:
            with self._changed:
                busy = self._proposal is not None or self._requests or self._clock() < self._alert_until
                self._changed.wait_for(lambda: self._woken or self._closed, board.busy_interval if busy else board.interval)
                self._woken = False
                closed, reached = self._closed, self._reached
                if self._lost and not closed:
                    return
            if closed:
                outcome(board.create, f"left/{board.rank}", str(reached))
                return
            error = outcome(self._turn)[1]
            if error is not None:
                logger.debug("the other ranks cannot be reached", exc_info=error)
                with self._changed:
                    self._lost = True
                    self._wake()
                return

    def _turn(self) -> None:
        """Advance the current round as far as possible."""
        assert self.board is not None
        if self._proposal is None and not self._open_round():
            return
        if not self._answered:
            self._answer()
        key = f"{self._round}/decision"
        text = self.board.read([key]).get(key)
        if text is None:
            verdict = self._verdict()
            if verdict is None:
                return
            text = self.board.create(key, json.dumps(verdict))
        self.board.forget(f"{self._round}/answer/{self.board.rank}")  # whoever still waits finds the decision
        with self._changed:
            self._close_round(json.loads(text))
            self._wake()

    def _open_round(self) -> bool:
        """Find or make the proposal of the next round; return whether there is one."""
        assert self.board is not None
        key = f"{self._round}/proposal"
        text = self.board.read([key]).get(key)
        if text is None:
            with self._changed:
                if not self._requests:
                    return False
                self._drafted = tuple(self._requests)
                draft = {"rank": self.board.rank, "step": self._target(), "requests": self._drafted}
            text = self.board.create(key, json.dumps(draft))
        proposal = json.loads(text)
        proposal["requests"] = [
            Request(kind, tuple(actions), reason, told) for kind, actions, reason, told in proposal["requests"]
        ]
        with self._changed:
            self._proposal, self._since, self._answered, self._answers = proposal, self._clock(), False, {}
        return True

    def _target(self) -> int:
        if self._inside and self._trying:
            return self._reached
        furthest = max(self._furthest, self._reached)
        target = furthest + GROWTH ** max(0, self._refusals - 1)
        return int(self._last_step) if furthest < self._last_step < target else target

    def _answer(self) -> None:
        assert self.board is not None and self._proposal is not None
        with self._changed:
            target = self._proposal["step"]
            late = self._late and any(request.told for request in self._proposal["requests"])
            yes = target > self._reached or (self._inside and target == self._reached and not late)
            if yes:
                self._promise = target
            answer = {"yes": yes, "reached": self._reached}
        self.board.create(f"{self._round}/answer/{self.board.rank}", json.dumps(answer))
        self._answered = True

    def _verdict(self) -> dict[str, Any] | None:
        """Return the round's outcome if it is decided. With all answers present, every rank finds the same."""
        assert self.board is not None and self._proposal is not None
        age = self._clock() - self._since
        if self._proposal["rank"] != self.board.rank and age < TAKE_OVER_SECONDS:
            return None
        missing = self._collect(age)
        refused = any(not answer["yes"] for answer in self._answers.values())
        furthest = max((answer["reached"] for answer in self._answers.values()), default=0)
        if refused and (not missing or age > REFUSED_SECONDS):
            return {"go": False, "furthest": furthest, "missing": []}
        if not missing or age > DEADLINE_SECONDS:
            return {"go": True, "furthest": furthest, "missing": missing}
        return None

    def _collect(self, age: float) -> list[int]:
        """Read new answers; return the ranks that have not answered. A rank that has left agrees to anything."""
        assert self.board is not None
        missing = [rank for rank in range(self.board.world_size) if rank not in self._answers]
        found = self.board.read([f"{self._round}/answer/{rank}" for rank in missing])
        for rank in missing:
            if (text := found.get(f"{self._round}/answer/{rank}")) is not None:
                self._answers[rank] = json.loads(text)
        missing = [rank for rank in missing if rank not in self._answers]
        if missing and age > REFUSED_SECONDS:
            left = self.board.read([f"left/{rank}" for rank in missing])
            missing = [rank for rank in missing if f"left/{rank}" not in left]
        return missing

    def _close_round(self, verdict: dict[str, Any]) -> None:
        assert self._proposal is not None
        if verdict["go"]:
            requests = tuple(self._proposal["requests"])
            decision = Decision(self._proposal["step"], requests, tuple(verdict["missing"]))
            self._decisions.append(decision)
            self._requests = [request for request in self._requests if not self._covered(request)]
            self._refusals = 0
        else:
            self._furthest = max(self._furthest, verdict["furthest"])
            self._refusals += 1
        self._proposal, self._promise, self._trying, self._drafted = None, None, False, ()
        self._round += 1
        self._alert_until = self._clock() + ALERT_SECONDS


_current: tuple[Any, Agreement] | None = None  # the state of the current training, and its agreement
_trainings = 0


def agreement_of(state: Any, run: Any = None) -> Agreement:
    """Return the agreement of a training, created on first use; `state` is the training's TrainerState.

    Ranks communicate through the process group's store, or in the directory of `run` if there is no group.
    """
    global _current, _trainings  # noqa: PLW0603 - one training at a time, whose callbacks are independent of each other
    if _current is not None and _current[0] is state and not _current[1].closed and not (run and _current[1].alone):
        return _current[1]
    end_agreement()
    # The number distinguishes trainings of one process group: ranks run the same program, so their counts match.
    name = str(_trainings + 1)
    board: Board | None = store_board(f"fanfold/agreement/{name}") or folder_board(name, run)
    if board is not None:
        _trainings += 1
        atexit.unregister(end_agreement)
        atexit.register(end_agreement)  # a thread inside the store's C++ code must not be cut off at interpreter exit
    _current = state, Agreement(board, step=state.global_step, last_step=state.max_steps or 0)
    return _current[1]


def end_agreement(state: Any = None) -> None:
    """End the agreement of a training; of any training if no state is given."""
    global _current  # noqa: PLW0603 - as above
    if _current is not None and (state is None or _current[0] is state):
        _current[1].close()
        _current = None
