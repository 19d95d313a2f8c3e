"""Whether a job hangs, and whose fault it is: decided from the pulses of its ranks.

A rank stands still if its training thread stays on one line, uses no CPU and moves no data, or if a collective that it started
does not finish. Ranks in a collective wait for others, so the job hangs only if one of those stands still itself, has died or
has left; or if all of them wait, each for something else. While any of them works (a checkpoint, a compilation, a slow batch),
the job is merely slow, and gets WORKING or PATIENCE times as long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct

from .position import in_library
from .pulse import Collective, Pulse, Spot

PATIENCE = 10.0
WORKING = 30.0  # while a rank computes
USUAL_STEPS = 10.0  # a step may take this many times as long as usual
LISTED = 8
PAST_END = "past the end of its run"
NOT_WORKING = ("idle", PAST_END)  # at a prompt or in an event loop; or leaving


class Standing(Struct):
    """How one rank stands when the job hangs."""

    rank: int
    state: str  # still, waiting, frozen, busy, gone
    seconds: float = 0.0
    overdue: bool = False  # for longer than it should
    step: int = -1
    node: str = ""
    why: str = ""
    where: list[Spot] = []
    waiting: list[Collective] = []
    enqueued: dict[str, int] = {}


class Verdict(Struct):
    """A hang: the ranks the others wait for, the collective they wait in, and one sentence."""

    text: str
    culprits: list[int]
    ranks: list[Standing]
    collective: Collective | None = None
    missing: list[int] = []


def base_limit(pulse: Pulse, seconds: float) -> float:
    return max(seconds, USUAL_STEPS * pulse.usual)


def limit_of(pulse: Pulse, seconds: float) -> float:
    """Return how long a rank may stand on one line."""
    return base_limit(pulse, seconds) * (PATIENCE if pulse.busy else 1.0)


def standing(pulse: Pulse, now: float, seconds: float, frozen_since: float = 0.0) -> Standing:
    """Return how a rank stands now. `frozen_since`: its pulse stopped, and its process uses no CPU."""
    facts: dict[str, Any] = {name: getattr(pulse, name) for name in ("rank", "step", "node", "where", "waiting", "enqueued")}
    if frozen_since and now - frozen_since >= seconds:
        return Standing(state="frozen", seconds=now - frozen_since, overdue=True, **facts)
    idle = now - pulse.idle_since if pulse.idle_since else 0.0
    age = now - max(pulse.same_since, min(one.since for one in pulse.waiting)) if pulse.waiting and pulse.same_since else 0.0
    # A thread that waits for a GPU spins, and uses CPU; one that waits for gloo uses none.
    if pulse.waiting:
        silent = min(age, idle) if pulse.waiting[0].name.startswith("gloo") else age
        return Standing(state="waiting", seconds=age, overdue=silent >= base_limit(pulse, seconds), **facts)
    if idle >= limit_of(pulse, seconds) and pulse.busy != "idle":
        return Standing(state="still", seconds=idle, overdue=True, **facts)
    return Standing(state="busy", seconds=idle, why=pulse.busy, **facts)


def judge(ranks: Sequence[Standing], world: int, seconds: float, *, unseen: bool = False) -> Verdict | None:
    """Return what is wrong if the job hangs; None if it works, or may still be merely slow.

    `unseen`: other processes of this node belong to the job and have no pulse, so that nobody knows whether they work.
    """
    late = [one for one in ranks if one.overdue]
    if not late:
        return None
    longest = max(one.seconds for one in late)
    if any(one.state == "busy" and one.why not in NOT_WORKING for one in ranks):  # others may wait for that
        return explain(ranks) if longest >= WORKING * seconds else None
    stuck = any(one.state in ("still", "frozen") for one in late) and not unseen
    gone = any(one.state == "gone" for one in ranks)
    everyone = len({one.rank for one in ranks}) >= world and len(late) == len(ranks)
    if not (stuck or gone or everyone or longest >= PATIENCE * seconds):
        return None
    return explain(ranks)


def explain(ranks: Iterable[Standing]) -> Verdict:
    """Align the ranks by the collective that waits, and name those who have not arrived."""
    ranks = sorted(ranks, key=lambda one: one.rank)
    collective, group = _awaited(ranks)
    stuck = [one.rank for one in ranks if one.state in ("still", "frozen", "gone")]
    missing: list[int] = []
    odd: list[int] = []
    if collective is not None:
        missing = [one.rank for one in ranks if _awaits(collective, one)]
        odd = [one.rank for one in _different(ranks, collective) if not _follows(one, ranks, stuck)]
    else:
        stuck, group = _without_the_crowd(ranks, stuck)
    elsewhere = [one.rank for one in ranks if one.rank in missing and one.state != "waiting"]
    culprits = sorted(set(stuck) | set(odd)) or elsewhere or missing
    return Verdict(_sentence(ranks, collective, group, missing, odd, culprits), culprits, ranks, collective, missing)


def _without_the_crowd(ranks: Sequence[Standing], stuck: list[int]) -> tuple[list[int], list[Standing]]:
    """Return the ranks to blame, and those on the line where most stand: they wait for the former without a collective."""
    spots = {one.rank: own_line(one.where) for one in ranks if one.rank in stuck and one.state != "gone"}
    lines = Counter((spot.file, spot.line) for spot in spots.values() if spot is not None)
    line, count = lines.most_common(1)[0] if lines else (("", 0), 0)
    crowd = [rank for rank, spot in spots.items() if spot is not None and (spot.file, spot.line) == line]
    if count * 2 <= len(ranks) or count == len(stuck):
        return stuck, []
    return [rank for rank in stuck if rank not in crowd], [one for one in ranks if one.rank in crowd]


def _awaited(ranks: Sequence[Standing]) -> tuple[Collective | None, list[Standing]]:
    """Return the collective in which most ranks wait (at equal numbers, the earliest), and those ranks."""
    waits = [(one, collective) for one in ranks for collective in one.waiting[:1] if one.state == "waiting"]
    if not waits:
        return None, []
    counts = Counter(_key(collective) for _, collective in waits)
    best = max(counts, key=lambda key: (counts[key], -key[2]))
    found = [(one, collective) for one, collective in waits if _key(collective) == best]
    return found[0][1], [one for one, _ in found]


def _key(one: Collective) -> tuple[str, bool, int, str, str]:
    return one.group, one.p2p, one.seq, one.name, str(one.sizes)


def _is_in(one: Standing, collective: Collective) -> bool:
    return any(_key(mine) == _key(collective) for mine in one.waiting)


def _arrived(one: Standing, collective: Collective) -> bool:
    if _is_in(one, collective):
        return True
    number = (collective.group, collective.p2p, collective.seq)
    same_place = any((mine.group, mine.p2p, mine.seq) == number for mine in one.waiting)
    return not same_place and not collective.p2p and one.enqueued.get(collective.group, -1) >= collective.seq


def _awaits(collective: Collective, one: Standing) -> bool:
    """Return whether a collective needs a rank that has not come to it."""
    return (not collective.members or one.rank in collective.members) and not _arrived(one, collective)


def _different(ranks: Sequence[Standing], collective: Collective) -> list[Standing]:
    """Return the ranks that wait in another collective than most, though with the same number, or in another group."""
    return [one for one in ranks if one.state == "waiting" and not _is_in(one, collective)]


def _follows(one: Standing, ranks: Sequence[Standing], stuck: Sequence[int]) -> bool:
    """Return whether the collective that a rank waits in needs one that stands still: a group of a few ranks, mostly."""
    return any(_awaits(collective, other) for collective in one.waiting[:1] for other in ranks if other.rank in stuck)


def _sentence(
    ranks: Sequence[Standing], collective: Collective | None, group: Sequence[Standing], missing: list[int], odd: list[int],
    culprits: list[int],
) -> str:  # fmt: skip
    by_rank = {one.rank: one for one in ranks}
    parts = []
    if collective is not None:
        parts.append(f"{_count(len(group), len(ranks))} in {described(collective)}")
        if missing:
            parts.append(f"{listed(missing)} {'has' if len(missing) == 1 else 'have'} not arrived")
    elif group:
        parts.append(f"{_count(len(group), len(ranks))} {place(group[0].where)}")
    parts += [_of_one(by_rank[rank], odd) for rank in culprits[:LISTED]]
    if not culprits and group:
        parts.append(f"rank {group[0].rank} is {place(group[0].where)}")
    return "; ".join(parts) + "."


def _of_one(one: Standing, odd: list[int]) -> str:
    if one.state == "gone":
        return f"rank {one.rank} {one.why or 'is gone'}"
    if one.rank in odd and one.waiting:
        return f"rank {one.rank} waits in {described(one.waiting[0])} instead, {place(one.where)}"
    words = {"frozen": one.why or "is stuck in native code", "still": "stands still", "busy": f"is {one.why or 'busy'}"}
    word = words.get(one.state, "waits")
    seconds = f" for {one.seconds:.0f} s" if one.state in ("still", "frozen") else ""
    return f"rank {one.rank} {word}{seconds} {place(one.where)}"


def _count(some: int, all_: int) -> str:
    return f"{some} of {all_} ranks wait" if all_ > 1 else "the process waits"


def listed(ranks: Sequence[int]) -> str:
    """Return ranks as text: "rank 3", or "ranks 1, 2 and 3", shortened if they are many."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:LISTED]]
    more = f" and {len(ranks) - LISTED} more" if len(ranks) > LISTED else ""
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}" if not more else f"ranks {', '.join(shown)}{more}"


def described(one: Collective) -> str:
    """Return a collective as text: its name, sequence number and sizes."""
    sizes = ", ".join("x".join(map(str, size)) or "1" for size in one.sizes[:3])
    kind = f" of {sizes} {one.dtypes[0].lower()}" if sizes and one.dtypes else ""
    group = "" if one.group_name in ("default_pg", "") else f" in group {one.group_name}"
    return f"{one.name.rpartition(':')[2]} number {one.seq}{kind}{group}"


def place(where: Sequence[Spot]) -> str:
    """Return the line of the user's code that a thread is on."""
    spot = own_line(where)
    if spot is None:
        return "at an unknown place"
    code = f": {spot.code}" if spot.code else ""
    return f"at {spot.file.rpartition('/')[2]}:{spot.line} in {spot.name}{code}"


def own_line(where: Sequence[Spot]) -> Spot | None:
    """Return the innermost line outside the standard library and installed packages, else the innermost one."""
    own = (spot for spot in where if not in_library(spot.file))
    return next(own, where[0] if where else None)
