"""The visible points of one key and rank: chunks in order of their steps, decoded only when accessed.

A chunk is a part of a journal, or of a segment made from one. Hiding, cutting and bucketing work on chunks, so that a long series
is never loaded into memory as a whole unless its steps go backwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

from ..journal import Journal
from ..journal.walker import NO_STEP
from . import deadline
from .segments import place, stored

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .run import StoredRun


class Chunk(Protocol):
    """Some points of one key, in the order they were written.

    `axis` are the steps and `narrow` the values in their stored form: cheaper to access, and the same numbers.
    """

    @property
    def steps(self) -> NDArray[Any]: ...
    @property
    def axis(self) -> Any: ...
    @property
    def times(self) -> NDArray[np.float64]: ...
    @property
    def values(self) -> NDArray[Any]: ...
    @property
    def narrow(self) -> NDArray[Any]: ...
    @property
    def kind(self) -> np.dtype[Any]: ...
    @property
    def began(self) -> float: ...
    @property
    def bounds(self) -> tuple[int, int]: ...
    @property
    def ascending(self) -> bool: ...
    def __len__(self) -> int: ...
    def cut(self, start: int, stop: int) -> Chunk: ...


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


@dataclass
class Points:
    """The points a rank logged under a key, by step; `restarts` has the step and time at which each later attempt began."""

    key: str
    rank: int
    chunks: list[Chunk]
    restarts: list[tuple[int, float]] = field(default_factory=list)
    kinds: set[np.dtype[Any]] = field(default_factory=set)  # of all logged points, hidden or not

    def __len__(self) -> int:
        return sum(map(len, self.chunks))

    def columns(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[Any]]:
        """Return all points as three arrays."""
        import numpy as np

        whole = joined(self.chunks)
        kind = np.result_type(*self.kinds) if self.kinds else whole.kind
        return whole.steps, whole.times, whole.values.astype(kind, copy=False)

    def statistics(self) -> dict[str, Any]:
        """Return min, max, mean, first, last and count; the first three ignore NaN if there are other numbers."""
        import numpy as np

        count, total, low, high = 0, 0.0, float("nan"), float("nan")
        for chunk in self.chunks:
            deadline.check()
            values = chunk.narrow.astype(np.float64, copy=False)
            numbers = values[~np.isnan(values)] if np.isnan(values.max()) else values
            if len(numbers):
                with np.errstate(invalid="ignore", over="ignore"):  # inf - inf is NaN, which is the correct result
                    total += float(numbers.sum())
                low, high = float(np.fmin(low, numbers.min())), float(np.fmax(high, numbers.max()))
                count += len(numbers)
        return {
            "min": low, "max": high, "mean": total / count if count else float("nan"), "count": len(self),
            "first": self.chunks[0].values[0].item(), "last": self.chunks[-1].values[-1].item(),
        }  # fmt: skip


def holders(run: StoredRun, key: str) -> list[int]:
    """Return the ranks that logged numbers under a key, lowest first."""
    return sorted({journal.header.rank for _, journal in run.holding(key) if journal.count(key)})


def points(run: StoredRun, key: str, rank: int, *, raw: bool = False) -> Points:
    """Collect a rank's points over its attempts. Each attempt hides earlier points from its first step on, unless `raw`."""
    kept: list[Chunk] = []
    restarts: list[tuple[int, float]] = []
    kinds: set[np.dtype[Any]] = set()
    deadline.check()
    attempts: dict[int, list[Journal]] = {}
    for attempt, journal in run.holding(key):
        if journal.header.rank == rank:
            attempts.setdefault(attempt, []).append(journal)
    for journals in attempts.values():
        own = [chunk for journal in journals for chunk in chunks(journal, key)]
        if not own:
            continue
        first = int(own[0].axis[0])
        if kept:
            restarts.append((first, own[0].began))
        if first != NO_STEP and not raw:
            kept = [part for chunk in kept if (part := before(chunk, first)) is not None]
        kept += own
        kinds |= {chunk.kind for chunk in own}
    return Points(key, rank, kept if raw else in_order(kept), restarts, kinds)


def chunks(journal: Journal, key: str) -> list[Chunk]:
    """Return one journal's points of a key, in the order they were written."""
    found, end = stored(journal, key)
    column = journal.column(key, since=end)
    return [*found, *([Loaded(*column)] if len(column.steps) else [])]


def before(chunk: Chunk, step: int) -> Chunk | None:
    """Return the part of a chunk before a step."""
    low, high = chunk.bounds
    if high < step:
        return chunk
    if low >= step:
        return None
    if chunk.ascending:
        return chunk.cut(0, place(chunk.axis, step))
    whole = joined([chunk])
    return whole.pick(whole.steps < step)


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
