"""Attempts of a run: which journals belong to each, in what order, and how each ended."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

from ..journal import Journal, Kind
from ..journal.bodies import End
from ..journal.format import EXEC

# Status of an attempt, given the statuses of its ranks: the first of these that any rank has. `running` comes after the failures
# because a job with a dead rank is not healthy, even if other ranks still run.
ORDER = ("failed", "killed", "lost", "preempted", "running", "finished")
UNFINISHED = frozenset({"failed", "killed", "lost", "preempted"})
UNNUMBERED = 1 << 30  # of attempts without rank 0


class Attempt:
    """One attempt of a run: the journals its processes wrote."""

    def __init__(self, key: str, journals: Sequence[Journal] = ()) -> None:
        self.key = key
        self.journals = list(journals)

    @property
    def mains(self) -> list[Journal]:
        return [journal for journal in self.journals if journal.header.role == "main"]

    @property
    def started(self) -> int:
        return min((journal.header.started for journal in self.mains or self.journals), default=0)

    @property
    def seen(self) -> int:
        """Return the last sign of life of its processes, in nanoseconds. Edits of the run do not count."""
        return max((journal.seen for journal in self.journals if journal.header.role != "editor"), default=self.started)

    @property
    def order(self) -> tuple[int, int]:
        """Return the sort key: the number rank 0 gave the attempt when it started. Clocks count where numbers repeat."""
        numbers = [j.header.ordinal or 0 for j in self.mains if j.header.rank == 0]
        return (min(numbers) if numbers else UNNUMBERED, self.started)

    def ends(self) -> list[dict[str, Any]]:
        """Return how each rank's process ended, or its current status if it has not."""
        return [_end_of(chain) for chain in _chains(self.mains)]

    def verdict(self) -> dict[str, Any]:
        """Return the earliest end that explains the attempt's status."""
        ends = self.ends()
        if not ends:
            return {"status": "lost", "rank": None, "error": None}
        status = next(word for word in ORDER if any(end["status"] == word for end in ends))
        # Ranks stopped because another one failed are a consequence; the first to fail is the cause.
        return min((end for end in ends if end["status"] == status), key=lambda end: end["time"] or 1 << 62)


def _chains(mains: Sequence[Journal]) -> list[list[Journal]]:
    """Group the journals of one process: after a full disk ends a journal, the process continues in the next one."""
    chains: dict[Any, list[Journal]] = {}
    for journal in mains:
        chains.setdefault(_process(journal), []).append(journal)
    return list(chains.values())


def _end_of(chain: Sequence[Journal]) -> dict[str, Any]:
    rank = chain[-1].header.rank
    for journal in reversed(chain):
        for record in reversed(list(journal.records(Kind.END))):
            end: End = record.data
            status = end.status if end.status in ORDER else "finished"
            return {"status": status, "rank": rank, "time": end.t, "error": end.error, "reason": end.reason,
                    "signal": end.signal, "exit_code": end.exit_code}  # fmt: skip
    last = chain[-1]
    return {
        "status": last.status(),
        "rank": rank,
        "time": None,
        "error": None,
        "reason": None,
        "signal": None,
        "exit_code": None,
    }


def group(journals: Sequence[Journal]) -> list[Attempt]:
    """Group journals into attempts, oldest first; within an attempt sort them by rank, then in the order they were opened."""
    attempts: list[Attempt] = []
    by_key: dict[str, list[Journal]] = {}
    for journal in _adopted(sorted(journals, key=_opened)):
        by_key.setdefault(str(journal.header.attempt), []).append(journal)
    for key, members in by_key.items():
        attempts += _split(key, members)
    numbers = [attempt.order[0] for attempt in attempts if attempt.order[0] != UNNUMBERED]
    if len(set(numbers)) < len(numbers):  # one began without the journals of those before it, which a forwarder had pruned
        return sorted(attempts, key=lambda attempt: attempt.started)
    return sorted(attempts, key=lambda attempt: attempt.order)


def _opened(journal: Journal) -> tuple[int, int, int]:
    # The processes of a rank share a node, so its monotonic clock orders them; wall clocks may be set back.
    header = journal.header
    return header.rank, header.mono, header.started


def _adopted(journals: Sequence[Journal]) -> Sequence[Journal]:
    """Assign journals with a damaged header to the only attempt; with several attempts they form their own."""
    keys = {journal.header.attempt for journal in journals} - {None}
    if len(keys) == 1:
        for journal in journals:
            if journal.header.attempt is None:
                journal.header.attempt = next(iter(keys))
    return journals


def _split(key: str, members: Sequence[Journal]) -> list[Attempt]:
    """Split restarts that share a launcher's key: each start of rank 0 opens an attempt, other journals join the nearest."""
    starts = _starts(members)
    if len(starts) <= 1:
        return [Attempt(key, members)]
    by_number: dict[int, list[Journal]] = {}
    for start in starts:
        by_number.setdefault(_number(start), []).append(start)
    again = len(by_number) < len(starts)
    attempts = {start.id: Attempt(f"{key}.{place if again else _number(start)}") for place, start in enumerate(starts, 1)}
    by_process = {_process(start): start for start in starts}
    by_time = {_began(start): start for start in reversed(starts)}
    times = sorted(by_time)
    for journal in members:
        number = journal.header.ordinal if journal.header.rank == 0 else None
        if number is not None and number in by_number:
            start = by_process.get(_process(journal)) or _last_before(_began(journal), by_number[number])
        else:
            start = by_time[_nearest(times, _began(journal))]
        attempts[start.id].journals.append(journal)
    return list(attempts.values())


def _starts(members: Sequence[Journal]) -> list[Journal]:
    """Return the first journal of each start of rank 0, oldest first.

    Starts are numbered, but by the journals on their node: where those before were pruned, or are on another node, the numbers
    begin again, and clocks count. A program inside `fanfold exec` has the number of the process around it, and is no start.
    """
    found: dict[int, list[Journal]] = {}
    firsts = (j for j in members if j.header.rank == 0 and j.header.role == "main" and not j.header.follows)
    for journal in sorted(firsts, key=_began):
        same = found.setdefault(_number(journal), [])
        if not same or not _is_inside(journal, same[-1]):
            same.append(journal)
    starts = [start for _, same in sorted(found.items()) for start in same]
    return starts if len(starts) == len(found) else sorted(starts, key=_began)


def _last_before(moment: int, starts: Sequence[Journal]) -> Journal:
    """Return the last of some starts, oldest first, that was not after a moment; the first if all were."""
    return starts[max(0, bisect_right(starts, moment, key=_began) - 1)]


def _began(journal: Journal) -> int:
    return journal.header.started


def _number(journal: Journal) -> int:
    return journal.header.ordinal or 1


def _process(journal: Journal) -> str:
    return journal.header.process or journal.id


def _is_inside(journal: Journal, around: Journal) -> bool:
    return around.header.launcher == EXEC != journal.header.launcher


def _nearest(times: Sequence[int], moment: int) -> int:
    """Return which of some ascending times is nearest to a moment. There may be thousands of each."""
    place = bisect_left(times, moment)
    return min(times[max(0, place - 1) : place + 1], key=lambda time: abs(time - moment))
