"""Folding for delivery: the values that the ranks of one attempt logged at a step become one point once every rank passed it."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import notices
from ..journal.bodies import Header

JOIN_SECONDS = 60.0
ALONE = frozenset({"mean", "min", "max", "sum", "last"})  # for a single rank, these equal the value itself


@dataclass
class Step:
    """Everything collected for one step: values by key and rank, and the frames they came in."""

    step: int
    since: float
    again: bool = False
    partial: bool = False
    time: int = 0
    values: dict[str, dict[int, tuple[int, Any]]] = field(default_factory=dict)
    frames: list[Any] = field(default_factory=list)
    result: dict[str, float] = field(default_factory=dict)

    @property
    def ranks(self) -> set[int]:
        return {rank for found in self.values.values() for rank in found}


class Folding:
    """The folded keys of one attempt: steps being collected, and steps that are ready."""

    def __init__(
        self, policy: Mapping[str, str], partial: Iterable[int], clock: Callable[[], float], hold: float, *, patient: bool = True
    ) -> None:
        self.policy = dict(policy)
        self.steps: dict[int, Step] = {}
        self.ready: dict[int, Step] = {}
        self.partial = set(partial)  # sent early; some rank has not passed them yet
        self.late = 0
        self.clock = clock
        self.hold = hold
        self.patient = patient
        self.began = clock()
        self._below = -float("inf")  # every step before this one was passed by all ranks
        self._known: dict[str, str | None] = {}

    def how(self, key: str) -> str | None:
        """Return how a key is folded: by its own name, else by the first matching pattern."""
        if key not in self._known:
            pattern = next((word for word in self.policy if fnmatch.fnmatchcase(key, word)), None)
            self._known[key] = self.policy.get(key) or (self.policy[pattern] if pattern is not None else None)
        return self._known[key]

    def pick(self, values: Mapping[str, Any], header: Header) -> dict[str, Any]:
        """Return the values to fold."""
        alone = (header.world or 1) == 1
        return {key: value for key, value in values.items() if (how := self.how(key)) and not (alone and how in ALONE)}

    def add(self, rank: int, step: int, time: int, values: Mapping[str, Any], frame: Any) -> None:
        """Add the values one rank logged; if it logs a key twice in a step, the last value counts."""
        if step in self.partial:
            frame.left -= 1
            self._say_late(rank, step)
            return
        found = self.steps.get(step)
        if found is None:
            found = self.steps[step] = Step(step, self.clock(), again=step < self._below)
        found.time = max(found.time, time)
        found.frames.append(frame)
        for key, value in values.items():
            found.values.setdefault(key, {})[rank] = (time, value)

    def _say_late(self, rank: int, step: int) -> None:
        self.late += 1
        notices.once(
            "relay:late rank",
            f"rank {rank} logged step {step} after its fold had gone to the tracker. The tracker keeps the value without it; the "
            "store has every rank and is exact. Later cases are counted. Raise FANFOLD_HOLD to wait longer for slow ranks.",
        )

    def passed(self, tracks: Sequence[Any]) -> float:
        """Return the first step that some rank may still log: all earlier steps are complete."""
        newest: dict[int, Any] = {}
        for track in tracks:  # in the order they were opened: after a full disk, a process continues in a new journal
            if track.main:
                newest[track.rank] = track
        world = max((track.journal.header.world or 1 for track in newest.values()), default=1)
        joining = len(newest) < world and self.clock() - self.began < JOIN_SECONDS
        # On a busy node a short rank 0 may end before another rank has begun: following a run means waiting for that rank, too.
        if joining and (self.patient or not all(track.through() for track in newest.values())):
            return -float("inf")
        now = self.clock()
        return min((track.passed(now, self.hold) for track in newest.values()), default=-float("inf"))

    def fold(self, tracks: Sequence[Any], stuck: bool) -> None:
        """Fold the steps that all ranks have passed, and those whose time is up."""
        if not self.steps and not self.partial:
            return
        passed = self.passed(tracks)
        ranks = len({track.rank for track in tracks if track.main})
        done = [step for step in sorted(self.steps) if self._complete(self.steps[step], passed, ranks, stuck)]
        for step in done:
            self.ready[step] = self.steps.pop(step)
            if self.ready[step].partial and step >= passed:
                self.partial.add(step)
        self._reduce([self.ready[step] for step in done])
        self._below = max(self._below, passed)
        self.partial = {step for step in self.partial if step >= passed}

    def _complete(self, step: Step, passed: float, ranks: int, stuck: bool) -> bool:
        if passed == float("inf") or (step.step < passed and not step.again) or (step.again and len(step.ranks) >= ranks):
            return True
        if not stuck or self.clock() - step.since <= self.hold:
            return False
        step.partial = True
        notices.once(
            "relay:partial fold",
            f"step {step.step} was folded with {len(step.ranks)} rank(s) because others did not pass it within {self.hold:g} s. "
            "The tracker has that value; the store keeps every rank and is always exact. Later cases are counted.",
        )
        return True

    def _reduce(self, steps: Sequence[Step]) -> None:
        """Fold key by key, all steps at once, with the same rule as the store."""
        import numpy as np

        from ..fold import fold

        for key in dict.fromkeys(key for step in steps for key in step.values):
            holders = [step for step in steps if key in step.values]
            rows = [(rank, step.step, *pair) for step in holders for rank, pair in step.values[key].items()]
            found, at, times, values = zip(*rows, strict=True)
            result = fold(str(self.how(key)), np.array(found), np.array(at), np.array(times), np.array(values, np.float64))
            for step, value in zip(sorted(holders, key=lambda one: one.step), result.values.tolist(), strict=True):
                step.result[key] = value
