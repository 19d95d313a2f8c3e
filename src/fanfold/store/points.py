"""The visible points of one key and rank: chunks in order of their steps, decoded only when accessed.

A chunk is a part of a journal, or of a segment made from one. Hiding, cutting and bucketing work on chunks, so that a long series
is never loaded into memory as a whole unless its steps go backwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..journal import Journal
from ..journal.walker import NO_STEP
from . import deadline, forks
from .segments import SegmentChunk, place, positions, stored

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .run import StoredRun

STEPLESS = ("system/", "energy/")  # metrics without steps, which a fork does not inherit


@dataclass
class Loaded:
    """A chunk whose columns are in memory."""

    steps: NDArray[Any]
    times: NDArray[np.float64]
    values: NDArray[Any]
    _ascending: bool | None = None

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def axis(self) -> NDArray[Any]:
        return self.steps

    @property
    def narrow(self) -> NDArray[Any]:
        return self.values

    @property
    def ascending(self) -> bool:
        if self._ascending is None:
            self._ascending = bool((self.steps[1:] >= self.steps[:-1]).all())
        return self._ascending

    @property
    def kind(self) -> np.dtype[Any]:
        return self.values.dtype

    @property
    def began(self) -> float:
        return float(self.times[0])

    @property
    def bounds(self) -> tuple[int, int]:
        if self.ascending:
            return int(self.steps[0]), int(self.steps[-1])
        return int(self.steps.min()), int(self.steps.max())

    def cut(self, start: int, stop: int) -> Loaded:
        return Loaded(self.steps[start:stop], self.times[start:stop], self.values[start:stop], self._ascending)

    def pick(self, which: NDArray[Any]) -> Loaded:
        return Loaded(self.steps[which], self.times[which], self.values[which])


# Some points of one key, in the order they were written. `axis` are the steps and `narrow` the values in their stored form:
# cheaper to access, and the same numbers.
Chunk = Loaded | SegmentChunk


@dataclass
class Points:
    """The points a rank logged under a key, by step; `restarts` has the step and time at which each later attempt began.

    `forked`: the step and time of the run's own first point, if those before it are inherited from the run it was forked from.
    """

    key: str
    rank: int
    chunks: list[Chunk]
    restarts: list[tuple[int, float]] = field(default_factory=list)
    kinds: set[np.dtype[Any]] = field(default_factory=set)  # of all logged points, hidden or not
    forked: tuple[int, float] | None = None

    def __len__(self) -> int:
        return sum(map(len, self.chunks))

    def columns(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[Any]]:
        """Return all points as three arrays."""
        import numpy as np

        whole = joined(self.chunks)
        kind = np.result_type(*self.kinds) if self.kinds else whole.kind
        return whole.steps, whole.times, whole.values.astype(kind, copy=False)

    def statistics(self) -> dict[str, Any]:
        """Return min, max, mean, first, last and count, and the first step of the min and of the max.

        Min, max and mean ignore NaN if there are other numbers. The steps are None for metrics logged without steps.
        """
        import numpy as np

        count, total, low, high = 0, 0.0, float("nan"), float("nan")
        low_step: int | None = None
        high_step: int | None = None
        for chunk in self.chunks:
            deadline.check()
            values = chunk.narrow.astype(np.float64, copy=False)
            kept = ~np.isnan(values) if np.isnan(values.max()) else slice(None)
            numbers, steps = values[kept], chunk.axis[kept]
            if len(numbers):
                with np.errstate(invalid="ignore", over="ignore"):  # inf - inf is NaN, which is the correct result
                    total += float(numbers.sum())
                lowest, highest = int(numbers.argmin()), int(numbers.argmax())
                if not low <= numbers[lowest]:
                    low, low_step = float(numbers[lowest]), _step(steps[lowest])
                if not high >= numbers[highest]:
                    high, high_step = float(numbers[highest]), _step(steps[highest])
                count += len(numbers)
        return {
            "min": low, "max": high, "mean": total / count if count else float("nan"), "count": len(self),
            "first": self.chunks[0].values[0].item(), "last": self.chunks[-1].values[-1].item(),
            "min_step": low_step, "max_step": high_step,
        }  # fmt: skip


def _step(step: Any) -> int | None:
    return None if int(step) == NO_STEP else int(step)


Held = list[tuple[int, Journal]]  # journals, each with the index of its attempt
Elders = list[tuple[dict[int, Held], int]]  # the journals of a fork's ancestors by rank, nearest first, and their last step


def held(run: StoredRun, key: str, *, own: bool = True) -> dict[int, Held]:
    """Return the journals with numbers under a key by rank, lowest first; unless `own`, with the ranks of a fork's ancestors."""
    found: dict[int, Held] = {}
    for attempt, journal in run.holding(key):
        if journal.count(key):
            found.setdefault(journal.header.rank, []).append((attempt, journal))
    for ranks, _ in [] if own else _elders(run, key):
        for rank in ranks:
            found.setdefault(rank, [])
    return dict(sorted(found.items()))


def _elders(run: StoredRun, key: str) -> Elders:
    if run.fork is None or key.startswith(STEPLESS):
        return []
    return [(held(ancestor.run, key), ancestor.last) for ancestor in forks.ancestors(run)]


def holders(run: StoredRun, key: str, *, own: bool = False) -> list[int]:
    """Return the ranks that logged numbers under a key, lowest first; a fork has those of its parent, too, unless `own`."""
    return list(held(run, key, own=own))


def points(run: StoredRun, key: str, rank: int, *, raw: bool = False, own: bool = False) -> Points:
    """Collect a rank's points over its attempts. Each attempt hides earlier points from its first step on, unless `raw`.

    The points that a fork inherits count as those of an earlier attempt; `own` and `raw` leave them out.
    """
    elders = [] if own or raw else _elders(run, key)
    return _points(held(run, key).get(rank, []), key, rank, raw=raw, elders=elders)


def points_by_rank(run: StoredRun, key: str, *, raw: bool = False, own: bool = False) -> Iterator[Points]:
    """Yield the points of each rank; searching the journals once per rank would take the square of their number."""
    elders = [] if own or raw else _elders(run, key)
    ranks = held(run, key, own=own or raw)
    found = (_points(journals, key, rank, raw=raw, elders=elders) for rank, journals in ranks.items())
    return (one for one in found if one.chunks)  # a fork may be before the first point of its parent


def _points(journals: Held, key: str, rank: int, *, raw: bool, elders: Elders) -> Points:
    deadline.check()
    attempts: dict[int, list[Journal]] = {}
    for attempt, journal in journals:
        attempts.setdefault(attempt, []).append(journal)
    inherited = _inherited(elders, key, rank)
    lives = [logged for members in attempts.values() if (logged := [one for journal in members for one in chunks(journal, key)])]
    begins = [(int(logged[0].axis[0]), logged[0].began) for logged in lives]
    kinds = {chunk.kind for logged in (inherited, *lives) for chunk in logged}
    forked: tuple[int, float] | None = None
    if inherited:
        forked = begins.pop(0) if begins else (inherited[-1].bounds[1] + 1, float(inherited[-1].times[-1]) + 1e-6)
        lives.insert(0, inherited)
    kept = [chunk for logged in lives for chunk in logged] if raw else _visible(lives)
    return Points(key, rank, kept if raw else in_order(kept), begins if inherited else begins[1:], kinds, forked)


def _visible(lives: Sequence[list[Chunk]]) -> list[Chunk]:
    """Return what later attempts leave of earlier ones: each hides the steps from its first one on.

    From the last attempt to the first, each chunk is cut once, at the lowest step that hides any of it: there may be thousands
    of attempts.
    """
    kept: list[list[Chunk]] = []
    limit: int | None = None
    for logged in reversed(lives):
        kept.append(logged if limit is None else _until(logged, limit))
        first = int(logged[0].axis[0])
        if first != NO_STEP:
            limit = first if limit is None else min(limit, first)
    return [chunk for some in reversed(kept) for chunk in some]


def _inherited(elders: Elders, key: str, rank: int) -> list[Chunk]:
    """Return what a rank's curve begins with in a fork: the points of its ancestors up to where each was forked."""
    found: list[Chunk] = []
    for ranks, last in reversed(elders):
        whole = _points(ranks.get(rank, []), key, rank, raw=False, elders=[])
        own = [part for chunk in whole.chunks if len(part := stepped(chunk))]
        if own:
            found = _until(found, own[0].bounds[0])
        found += _until(own, last + 1)
    return found


def _until(parts: Iterable[Chunk], step: int) -> list[Chunk]:
    """Return the parts of chunks before a step."""
    return [part for chunk in parts if (part := before(chunk, step)) is not None]


def stepped(chunk: Chunk) -> Chunk:
    """Leave out points without a step; they come first in a sorted chunk."""
    if chunk.bounds[0] != NO_STEP:
        return chunk
    import numpy as np

    return chunk.cut(int(positions(chunk.axis, np.array([NO_STEP]), "right")[0]), len(chunk))


def chunks(journal: Journal, key: str) -> list[Chunk]:
    """Return one journal's points of a key, in the order they were written."""
    found, end = stored(journal, key)
    column = journal.column(key, since=end)
    return [*found, *([Loaded(*column)] if len(column.steps) else [])]


def before(chunk: Chunk, step: int) -> Chunk | None:
    """Return the part of a chunk before a step, sorted by step if the chunk was not: it may be cut again."""
    low, high = chunk.bounds
    if high < step:
        return chunk
    if low >= step:
        return None
    if chunk.ascending:
        return chunk.cut(0, place(chunk.axis, step))
    return before(in_order([chunk])[0], step)


def in_order(parts: Sequence[Chunk]) -> list[Chunk]:
    """Return chunks whose steps never go backwards: unchanged if that already holds, else as one sorted chunk."""
    if all(part.ascending for part in parts) and all(one.bounds[1] <= two.bounds[0] for one, two in pairwise(parts)):
        return list(parts)
    import numpy as np

    whole = joined(parts)
    return [whole.pick(np.argsort(whole.steps, kind="stable"))]


def joined(parts: Sequence[Chunk]) -> Loaded:
    """Load chunks into memory as one."""
    import numpy as np

    if not parts:
        return Loaded(np.empty(0, np.int64), np.empty(0), np.empty(0), True)
    if len(parts) == 1:
        only = parts[0]
        return only if isinstance(only, Loaded) else Loaded(only.steps, only.times, only.values)
    steps = np.concatenate([part.steps for part in parts]).astype(np.int64, copy=False)
    return Loaded(steps, np.concatenate([part.times for part in parts]), np.concatenate([part.values for part in parts]))


def reduce(rule: str, values: Any) -> Any:
    """Reduce a series to one number by a summary rule; min, max and mean ignore NaN if there are other numbers."""
    import numpy as np

    if rule == "count":
        return len(values)
    if rule == "first":
        return values[0].item()
    if rule == "sum":
        return values.sum().item()
    numbers = values[~np.isnan(values.astype(np.float64))]
    if not len(numbers):
        return float("nan")
    return getattr(numbers, rule)().item()
