"""run.control: requests from outside the job, as flags that the program's own loop looks at, and knobs, which they may turn.

Rank 0 picks requests up (inbox.py). The ranks agree after which step they act (agreement.py), so all of them see the same flags
and knobs after the same step. A step ends at a boundary: where the program reads `should_stop` or calls `step()`, or where a
training callback says so (callbacks/tell.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import describe, guard, logger, outcome, shown
from ..journal.requests import JobRequest, Value, decode
from .agreement import Agreement, Decision, agreement_of, end_agreement
from .inbox import Inbox
from .recorder import Recorder

REMEMBERED = 4096  # requests carried out, in case one arrives twice


class Knob:
    """A value that may be changed from outside while the program runs: read `value`, or use it as a number."""

    def __init__(
        self, name: str, value: Value, low: float | None = None, high: float | None = None, *,
        change: Callable[[Any], None] | None = None, current: Callable[[], Any] | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.min, self.max = low, high
        self._value: Any = value
        self._change, self._current = change, current

    @property
    def value(self) -> Any:
        return self._value if self._current is None else self._current()

    def checked(self, value: Any) -> Value:
        """Return a new value in the knob's own type, or raise ValueError with the reason why it cannot be that."""
        kind = type(self._value)
        if kind is str:
            return str(value)
        if isinstance(value, str) or isinstance(value, bool) != (kind is bool):
            raise ValueError(f"{self.name} cannot be {value!r}: it is {'true or false' if kind is bool else 'a number'}")
        if kind is int and value != int(value):
            raise ValueError(f"{self.name} cannot be {value!r}: it is a whole number")
        if kind is int and abs(value) >= 1 << 63:
            raise ValueError(f"{self.name} cannot be {value!r}: it is too large")
        if (self.min is not None and not value >= self.min) or (self.max is not None and not value <= self.max):
            raise ValueError(f"{self.name} cannot be {value!r}: it is between {self.range}")
        return kind(value)  # type: ignore[no-any-return]

    @property
    def range(self) -> str:
        low, high = ("…" if end is None else f"{end:g}" for end in (self.min, self.max))
        return f"{low} and {high}"

    def turn(self, value: Value) -> None:
        """Change the value; raise what the program's own code raises."""
        if self._change is not None:
            self._change(value)
        self._value = value

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, form: str) -> str:
        return format(self.value, form)

    def __repr__(self) -> str:
        return f"<knob {self.name}: {self.value}>"


class _OwnLoop:
    """The training of a hand-written loop, as far as an agreement needs to know it."""

    global_step = 0
    max_steps = 0


class Control:
    """What was asked of this run from outside (`fanfold tell`). Every rank has to pass the same boundaries.

    `should_stop` stays true once it is; the other flags are true from one boundary to the next. Reading `should_stop` is a
    boundary, unless the program calls `step()` or a callback steers its training.
    """

    def __init__(self, run: Any = None, recorder: Recorder | None = None) -> None:
        self._run = run
        self._recorder = recorder
        self._knobs: dict[str, Knob] = {}
        self._stopping = False
        self._up: set[str] = set()
        self._due: dict[str, list[JobRequest]] = {}  # flags that nobody has acted on yet
        self._carried: deque[str] = deque(maxlen=REMEMBERED)
        self._own = _OwnLoop()
        self._boundaries = 0
        self._without = ""  # the ranks that the last decision was made without
        self._step: int | None = None
        self._explicit = False
        self._agreement: Agreement | None = None
        self._steered: object = None  # by this callback of the training
        self._cannot: dict[str, str] = {}
        main = recorder is not None and recorder.member.me.main
        self._inbox = Inbox(recorder, self._refusal, self._step_now) if main and recorder is not None else None

    # The program's own loop

    @property
    def should_stop(self) -> bool:
        """Whether to leave the training loop now. Reading it ends a step; see the class."""
        if not self._stopping and not self._explicit:
            self._boundary(None)
        return self._flag("stop") or self._stopping

    @property
    def should_save(self) -> bool:
        """Whether to save a checkpoint now."""
        return self._flag("save")

    @property
    def should_evaluate(self) -> bool:
        """Whether to evaluate now."""
        return self._flag("evaluate")

    @property
    def should_log(self) -> bool:
        """Whether to log now."""
        return self._flag("log")

    def step(self, step: int | None = None) -> None:
        """Mark the end of a training step, on every rank; `step` is its number, for the answers."""
        self._explicit = True
        self._boundary(step)

    def _boundary(self, step: int | None) -> None:
        if self._steered:
            return
        with guard("look for requests to this run"):
            if self._agreement is None or self._agreement.closed:
                self._listen(agreement_of(self._own, self._run))
                self._boundaries = 0
            self._boundaries += 1
            self._step = step
            self._pass(self._boundaries)

    def _flag(self, action: str) -> bool:
        if action in self._due and not self._steered:
            self.did(action)
        return action in self._up

    # Knobs

    def knob(
        self, name: str, value: Value, low: float | None = None, high: float | None = None, *,
        change: Callable[[Any], None] | None = None, current: Callable[[], Any] | None = None,
    ) -> Knob:  # fmt: skip
        """Register a value as adjustable, once; return its knob. `change` puts a new value into effect."""
        known = self._knobs.get(name)
        if known is not None and change is None:
            return known
        knob = Knob(name, value, low, high, change=change, current=current)
        if not isinstance(name, str) or not name or not isinstance(value, Value):
            raise TypeError(
                f"knob({shown(name)}, {shown(value)}) needs a name, and a number, bool or text. It is not adjustable."
            )
        knob.checked(value)
        self._knobs[name] = knob
        self._show_knobs()
        return knob

    def forget_knob(self, name: str) -> None:
        """Make a value no longer adjustable."""
        self._knobs.pop(name, None)

    def _show_knobs(self) -> None:
        if self._inbox is not None:
            now = {one.name: {"value": one.value, "min": one.min, "max": one.max} for one in self._knobs.values()}
            self._inbox.show_knobs(now)

    def _refusal(self, request: JobRequest) -> str:
        """Return why a request cannot be carried out, or an empty text. Ranks are asked only about those that can."""
        if request.action in self._cannot:
            return self._cannot[request.action]
        for name, value in request.values.items():
            if name not in self._knobs:
                adjustable = ", ".join(sorted(self._knobs)) or "nothing"
                return f"{name} is not adjustable. Adjustable: {adjustable}"
            error = outcome(self._knobs[name].checked, value)[1]
            if error is not None:
                return str(error)
        return ""

    # Boundaries, for the loop above and for callbacks that steer a training

    def steer(self, by: object, agreement: Agreement, cannot: Mapping[str, str]) -> None:
        """Let a callback pass the boundaries of this run's training, instead of any other one, until `release`.

        `cannot` are the actions that this training cannot do, and why.
        """
        self._steered, self._cannot = by, dict(cannot)
        self._listen(agreement)

    @property
    def steered(self) -> object:
        """The callback that passes the boundaries, if there is one."""
        return self._steered

    def release(self, by: object) -> None:
        """End the training that `steer` began. Requests that come from here on wait for the next one."""
        if by is not self._steered:
            return
        self.did("stop")
        self._settle("training ended first")
        self._steered, self._agreement, self._cannot = None, None, {}
        self._up.clear()
        if self._inbox is not None:
            self._inbox.agreement = None

    def pass_boundary(self, by: object, step: int) -> tuple[Decision, ...]:
        """Pass the boundary after a step of a steered training; return what the ranks decided for it."""
        if by is not self._steered:
            return ()
        self._step = step
        return self._pass(step)

    def _listen(self, agreement: Agreement) -> None:
        self._agreement = agreement
        if self._delivered not in agreement.listeners:
            agreement.listeners.append(self._delivered)
        if self._inbox is not None:
            self._inbox.listen(agreement)

    def _pass(self, boundary: int) -> tuple[Decision, ...]:
        if self._up:
            self._settle("the training loop does not do that" if self._steered else "")
            self._up.clear()
        return self._agreement.at(boundary) if self._agreement is not None else ()

    def _settle(self, why: str) -> None:
        """Answer the requests that nobody acted on."""
        for action, requests in self._due.items():
            unread = f"the program does not read run.control.should_{action}"
            self._answer(requests, "refused", why or unread)
        self._due = {}

    def _delivered(self, decision: Decision) -> None:
        """Put into effect what the ranks have decided; called on the training thread of every rank."""
        for request in decision.requests:
            if request.told:
                with guard("carry out a request"):
                    self._without = _without(decision.missing)
                    self._carry_out(decode(request.told.encode()))

    def _carry_out(self, request: JobRequest) -> None:
        if request.id in self._carried:
            return
        self._carried.append(request.id)
        if request.action == "set":
            self._turn_knobs(request)
            return
        self._up.add(request.action)
        self._due.setdefault(request.action, []).append(request)
        if request.action == "stop":
            self._stopping = True
            if self._inbox is not None:
                logger.warning("fanfold: %s asked to stop; training stops after step %s.", request.by, self._step_now())

    def _turn_knobs(self, request: JobRequest) -> None:
        found = {self._knobs[name]: value for name, value in request.values.items() if name in self._knobs}
        error = outcome(_turn, found)[1]
        self._answer([request], "done" if error is None else "refused", "" if error is None else describe(error))
        self._show_knobs()

    def did(self, action: str, why: str = "", *, step: int | None = None, state: str = "done") -> None:
        """Answer the requests for an action that is being carried out, after `step` if that is not the last boundary's."""
        self._answer(self._due.pop(action, ()), state, why, step)

    def _answer(self, requests: Iterable[JobRequest], state: str, why: str, step: int | None = None) -> None:
        if self._inbox is not None:
            for request in requests:
                self._inbox.answer(request, state, why or (self._without if state == "done" else ""), step)

    def _step_now(self) -> int:
        if self._step is not None or self._recorder is None:
            return self._step or 0
        return max(0, int(self._recorder.high))

    # The background of rank 0, and the end

    def look(self) -> None:
        """Pick up new requests; called four times a second on rank 0."""
        if self._inbox is not None:
            self._inbox.look(self._run.path)

    def close(self, _timeout: float = 0.0) -> None:
        """Answer everything that is still open: the run ends."""
        if self._inbox is not None:
            self._inbox.close(self._run.path)
        end_agreement(self._own)


def _turn(found: dict[Knob, Value]) -> None:
    for knob, value in found.items():
        knob.turn(knob.checked(value))


def _without(missing: tuple[int, ...]) -> str:
    return f"without rank {', '.join(map(str, missing))}, which did not answer" if missing else ""
