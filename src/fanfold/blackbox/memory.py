"""Out of memory on a GPU: the allocator's history is recorded in bounded form, and what holds the memory is kept at an error.

Nothing touches CUDA before the program does: recording begins when the program's own first use initialises it. A stack for each
allocation costs too much for every step, so it is recorded until the second step is over, when parameters, gradients and the
optimizer's state are allocated, and while the memory in use grows, for a bounded share of the time. memory="always" records all
the time.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from ..errors import guard, outcome
from ..journal import blobs
from ..journal.files import create
from ..probes import labels
from .position import line_text, spots
from .pulse import Spot
from .verdict import own_line

Clock = Callable[[], float]
ENTRIES = 50_000  # allocations and frees in the history
MAX_ERRORS = 3  # snapshots of one process: a program may try again with a smaller batch
MAX_SNAPSHOT = 64 << 20
FEWER_ENTRIES = 2_000
GROWTH_SECONDS, GROWTH_STEPS = 30.0, 2  # since the allocator last took more memory: later steps use the same memory again
FIRST_STEPS = 2  # recorded whatever they cost
CREDIT_SECONDS, CREDIT_SHARE = 30.0, 0.05  # of recording after them: at once, and of all time. A step takes up to 1.16 as long
LONG_SECONDS = 3.0  # between two looks: training stood still, and allocated nothing
LARGEST, FRAMES = 20, 24
LIVE = ("active_allocated", "active_awaiting_free", "active_pending_free")


class Holder(Struct):
    """Live allocations made by the same lines of code, or under the same label."""

    size: int = 0
    count: int = 0
    largest: int = 0
    label: str = ""
    where: list[Spot] = []


class MemoryUse(Struct):
    """What a GPU's memory was used for when an allocation failed. Sizes are in bytes."""

    device: int = 0
    requested: int = 0
    total: int = 0
    free: int = 0
    allocated: int = 0  # by tensors
    reserved: int = 0  # by the allocator
    unknown: int = 0  # allocated before recording began, or by code without Python frames
    where: list[Spot] = []  # the allocation that failed
    by_stack: list[Holder] = []
    by_label: list[Holder] = []


class _Observer:
    """The one observer that torch has of ours: it cannot be removed, so it calls the run that is open, if any."""

    attached = False
    current: MemoryRecorder | None = None


class MemoryRecorder:
    """Records the allocator's history of this process, and keeps a snapshot when memory runs out."""

    def __init__(
        self,
        run: Path,
        rank: int,
        write: Callable[[Mapping[str, Any]], bool],
        *,
        always: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        self._run, self._rank, self._write, self._always, self._clock = run, rank, write, always, clock
        self._own = False  # the history is ours, not the program's
        self._recording = False
        self._grown_at, self._grown_after = 0.0, 0  # time, steps
        self._looked_at, self._credit = 0.0, CREDIT_SECONDS
        self._reserved = 0
        self._errors = 0
        self._asked = False

    def look(self, steps: int) -> None:
        """Once torch is imported, begin to record as soon as the program uses CUDA. `steps`: how many it has taken."""
        torch = sys.modules.get("torch")
        cuda = sys.modules.get("torch.cuda")
        if self._own and cuda is not None:
            self._adapt(cuda, steps)
        if self._asked or cuda is None or not hasattr(cuda, "memory") or not hasattr(torch, "version"):
            return
        self._asked = True
        if getattr(cuda, "_lazy_call", None) is not None and cuda._is_compiled():  # noqa: SLF001 - torch has no public way
            cuda._lazy_call(self._begin)  # noqa: SLF001 - at once, or when the program initialises CUDA

    def _begin(self) -> None:
        with guard("record the history of GPU memory"):
            import torch

            _Observer.current = self
            if not _Observer.attached:
                torch._C._cuda_attach_out_of_memory_observer(_out_of_memory)  # noqa: SLF001 - documented for this use
                _Observer.attached = True
            known, _ = outcome(torch._C._cuda_isHistoryEnabled)  # noqa: SLF001 - else the program's own recording is lost
            self._own = not known
            if self._own:
                self._grown_at = self._looked_at = self._clock()
                self._record(torch.cuda, on=True)
            if (setter := getattr(torch._C, "_cuda_setMemoryMetadata", None)) is not None:  # noqa: SLF001
                labels.follow(setter)

    def _adapt(self, cuda: Any, steps: int) -> None:
        """Record the first steps, and while the memory in use grows, as long as there is credit for it."""
        now = self._clock()
        passed, self._looked_at = now - self._looked_at, now
        starting = steps < FIRST_STEPS
        spent = min(passed, LONG_SECONDS) if self._recording and not starting else 0.0
        self._credit = min(CREDIT_SECONDS, self._credit + CREDIT_SHARE * passed) - spent
        reserved = sum(int(cuda.memory_reserved(device)) for device in range(cuda.device_count()))
        if reserved > self._reserved:
            self._grown_at, self._grown_after = now, steps
        self._reserved = reserved
        grows = now - self._grown_at < GROWTH_SECONDS and steps - self._grown_after < GROWTH_STEPS
        wanted = self._always or (grows and (starting or self._credit > 0.0))
        if wanted != self._recording:
            self._record(cuda, on=wanted)

    def _record(self, cuda: Any, *, on: bool) -> None:
        """Turn the history on or off. Allocations that are live keep their stacks."""
        self._recording = on
        how = {"context": "alloc", "stacks": "python", "max_entries": ENTRIES} if on else {}
        cuda.memory._record_memory_history("all" if on else None, **how)  # noqa: SLF001 - documented, in spite of its name

    def stop(self) -> None:
        """Stop recording, and stop reacting to errors."""
        if self._recording:
            with guard("stop recording the history of GPU memory"):
                self._record(sys.modules["torch.cuda"], on=False)
        self._own = False
        if _Observer.current is self:
            _Observer.current = None
            labels.follow(None)

    def failed(self, device: int, requested: int, total: int, free: int) -> None:
        """Keep what holds the memory; called on the thread whose allocation failed, before the error is raised."""
        self._errors += 1
        if self._errors > MAX_ERRORS:
            return
        import torch

        snapshot = torch.cuda.memory._snapshot()  # noqa: SLF001 - documented, in spite of its name
        use = summarize(snapshot, device)
        use.requested, use.total, use.free = requested, total, free
        use.where = [Spot(**spot) for spot in _own_frames()]
        name = f"memory-rank{self._rank}-{self._errors}.pickle"
        files = []
        with guard("keep the snapshot of GPU memory"):
            files = [{"path": name, **self._keep(snapshot, name)}]
        import msgspec

        self._write({"event": "blackbox", "kind": "memory", "data": msgspec.to_builtins(use), "files": files})
        self._write(
            {"event": "alert", "level": "warning", "title": f"Rank {self._rank} is out of GPU memory", "text": sentence(use)}
        )

    def _keep(self, snapshot: dict[str, Any], name: str) -> dict[str, Any]:
        """Store a snapshot in the form of torch's viewer, with a shorter history if it is too large."""
        data = pickle.dumps(snapshot)
        if len(data) > MAX_SNAPSHOT:
            traces = [trace[-FEWER_ENTRIES:] for trace in snapshot.get("device_traces") or []]
            data = pickle.dumps({**snapshot, "device_traces": traces})
        if len(data) > MAX_SNAPSHOT:
            raise ValueError(f"it is larger than {MAX_SNAPSHOT >> 20} MB")
        aside = self._run / "blackbox" / f".{name}.{time.time_ns()}"
        try:
            with create(aside) as file:
                file.write(data)
            blob, size = blobs.put_file(self._run, aside)
        finally:
            with contextlib.suppress(OSError):
                aside.unlink()
        return {"blob": blob, "size": size}


def _own_frames() -> list[dict[str, Any]]:
    """Return the frames of this thread that are not ours: the code whose allocation failed."""
    frame = sys._getframe()  # noqa: SLF001 - the documented way
    here = {__file__, guard.__code__.co_filename}
    while frame is not None and frame.f_code.co_filename in here:
        frame = frame.f_back  # type: ignore[assignment]
    return spots(frame, most=FRAMES)


def _out_of_memory(device: int, requested: int, total: int, free: int) -> None:
    current = _Observer.current
    if current is not None:
        with guard("keep what holds the GPU's memory"):
            current.failed(device, requested, total, free)


def summarize(snapshot: Mapping[str, Any], device: int) -> MemoryUse:
    """Return what the live allocations of a GPU are for, the largest first."""
    use = MemoryUse(device=device)
    stacks: dict[Any, Holder] = {}
    named: dict[str, Holder] = {}
    traces = snapshot.get("device_traces") or []
    told = {entry.get("addr"): entry.get("user_metadata") for entry in (traces[device] if device < len(traces) else ())
            if entry.get("action") == "alloc" and entry.get("user_metadata")}  # fmt: skip
    for segment in snapshot.get("segments") or []:
        if segment.get("device") != device:
            continue
        use.reserved += int(segment.get("total_size") or 0)
        for block in segment.get("blocks") or []:
            if block.get("state") in LIVE:
                label = block.get("user_metadata") or told.get(block.get("address")) or ""
                _count(use, block, str(label), stacks, named)
    use.by_stack = _largest(stacks.values())
    use.by_label = _largest(named.values())
    return use


def _count(use: MemoryUse, block: Mapping[str, Any], label: str, stacks: dict[Any, Holder], named: dict[str, Holder]) -> None:
    size = int(block.get("size") or 0)
    use.allocated += size
    frames = [frame for frame in block.get("frames") or [] if str(frame.get("filename") or "").endswith((".py", ">"))]
    if not frames:
        use.unknown += size
    else:
        key = tuple((frame["filename"], frame["line"]) for frame in frames[:FRAMES])
        _add(stacks.setdefault(key, Holder(where=_spots(frames), label=label)), size)
    if label:
        _add(named.setdefault(label, Holder(label=label)), size)


def _add(holder: Holder, size: int) -> None:
    holder.size += size
    holder.count += 1
    holder.largest = max(holder.largest, size)


def _spots(frames: list[Mapping[str, Any]]) -> list[Spot]:
    return [Spot(str(one["filename"]), int(one["line"]), str(one["name"])) for one in frames[:FRAMES]]


def _largest(holders: Iterable[Holder]) -> list[Holder]:
    found = sorted(holders, key=lambda holder: -holder.size)[:LARGEST]
    for holder in found:
        for spot in holder.where:
            spot.code = line_text(spot.file, spot.line)
    return found


def sentence(use: MemoryUse) -> str:
    """Return an error of the allocator in one sentence, with what holds most."""
    asked = own_line(use.where)
    by = f" by {asked.file.rpartition('/')[2]}:{asked.line} in {asked.name}" if asked is not None else ""
    text = f"{size_text(use.requested)} could not be allocated{by} on cuda:{use.device}; {size_text(use.allocated)} are in use"
    if not use.by_stack:
        return f"{text}."
    most = use.by_stack[0]
    spot = own_line(most.where) or Spot()
    share = f", {most.size / use.allocated:.0%} of them by" if use.allocated else ", most of them by"
    return f"{text}{share} {spot.file.rpartition('/')[2]}:{spot.line} in {spot.name}{f': {spot.code}' if spot.code else ''}."


def size_text(size: float) -> str:
    """Return a number of bytes in GiB or MiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
