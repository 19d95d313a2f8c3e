"""Numbers still on a device: copied without a sync on the caller's thread, journalled when they land.

The waiting thread makes no CUDA call at all. Each copy into pinned memory is followed on its stream by the copy of a
mark, and the thread looks at the mark: polling an event from a thread would break a graph capture going on in another.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .errors import guard

POLL_SECONDS = 0.02
SLOTS = 2048
WIDTH = 64  # scalars in one slot


class Call(NamedTuple):
    """The log() call a late part belongs to."""

    seq: int
    step: int
    time_ns: int


@dataclass
class Part:
    """Something on its way: when it is there, and how to read it."""

    call: Call
    keys: Sequence[str]
    ready: Callable[[], bool]
    read: Callable[[], Sequence[Any]]
    then: Callable[[Call, dict[str, Any]], None]


_FLUSH = Call(-1, 0, 0)


class NoRoom(Exception):
    """The ring is full, or copies cannot be launched now."""


class CudaRing:
    """Pinned slots for one CUDA device; `launch` costs one stack and two small asynchronous copies."""

    def __init__(self, device: Any) -> None:
        import torch

        self.torch = torch
        self.device = device
        self._free: deque[int] = deque(range(SLOTS))
        self._bytes = torch.zeros((SLOTS, WIDTH * 8), dtype=torch.uint8, pin_memory=True)
        landed = torch.zeros(SLOTS, dtype=torch.int64, pin_memory=True)
        self._landed = landed.numpy()  # the same memory, looked at without any torch call
        self._landing = landed.unbind()
        self._marks = torch.arange(1, SLOTS + 1, dtype=torch.int64, device=device).unbind()
        self._views: dict[tuple[int, Any, int], Any] = {}

    def capturing(self) -> bool:
        return bool(self.torch.cuda.is_current_stream_capturing())

    def _view(self, slot: int, dtype: Any, count: int) -> Any:
        key = (slot, dtype, count)
        found = self._views.get(key)
        if found is None:
            if len(self._views) > 4 * SLOTS:
                self._views.clear()
            found = self._views[key] = self._bytes[slot].view(dtype)[:count]
        return found

    def launch(self, tensors: Sequence[Any]) -> tuple[Callable[[], bool], Callable[[], Sequence[Any]]]:
        """Start the copy of up to WIDTH scalars of one dtype, on the current stream; return ready() and read()."""
        try:
            slot = self._free.popleft()
        except IndexError:
            raise NoRoom("more values were in flight than the ring holds") from None
        with self.torch.no_grad():
            stacked = self.torch.stack([tensor.reshape(()) for tensor in tensors])
            target = self._view(slot, stacked.dtype, len(tensors))
            target.copy_(stacked, non_blocking=True)
            self._landing[slot].copy_(self._marks[slot], non_blocking=True)
        landed = self._landed

        def read() -> Sequence[Any]:
            values: Sequence[Any] = target.tolist()
            landed[slot] = 0
            self._free.append(slot)
            return values

        return lambda: bool(landed[slot]), read

    def launch_array(self, tensor: Any) -> tuple[Callable[[], bool], Callable[[], Any]]:
        """Start the copy of a whole tensor into pinned memory of its own."""
        try:
            slot = self._free.popleft()
        except IndexError:
            raise NoRoom("more values were in flight than the ring holds") from None
        with self.torch.no_grad():
            source = tensor.detach()
            target = self.torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            target.copy_(source, non_blocking=True)
            self._landing[slot].copy_(self._marks[slot], non_blocking=True)
        landed = self._landed

        def read() -> Any:
            landed[slot] = 0
            self._free.append(slot)
            return target

        return lambda: bool(landed[slot]), read


class Deferred:
    """Launch copies in program order; a thread of its own waits for them and hands them on."""

    def __init__(self, lose: Callable[[Call, Sequence[str], str], None]) -> None:
        self._lose = lose
        self._rings: dict[Any, CudaRing] = {}
        self._reset()

    def _reset(self) -> None:
        self._parts: deque[Part] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None

    def after_fork_in_child(self) -> None:
        """Forget the parent's copies: they land in the parent, and CUDA does not survive a fork."""
        self._rings = {}
        self._reset()

    def launch(self, tensors: Mapping[str, Any]) -> list[tuple[list[str], Any]]:
        """Start the copies for one call; return what `watch` wants. What cannot be launched comes back as a reason."""
        groups: dict[Any, list[str]] = {}
        for key, tensor in tensors.items():
            groups.setdefault(self._group_of(tensor), []).append(key)
        launched: list[tuple[list[str], Any]] = []
        for group, keys in groups.items():
            for start in range(0, len(keys), WIDTH):
                some = keys[start : start + WIDTH]
                try:
                    launched.append((some, self._start(group, [tensors[key] for key in some])))
                except NoRoom as reason:
                    launched.append((some, str(reason)))
        return launched

    @staticmethod
    def _group_of(tensor: Any) -> Any:
        device = getattr(tensor, "device", None)
        kind = getattr(device, "type", None)
        return (kind, device, tensor.dtype) if kind is not None and hasattr(tensor, "is_cuda") else None

    def _start(self, group: Any, tensors: Sequence[Any]) -> tuple[Callable[[], bool], Callable[[], Sequence[Any]]]:
        if group is not None and group[0] == "cuda":
            return self._ring(group[1]).launch(tensors)
        if group is not None:  # another accelerator: a copy on the device now, the wait in our thread
            copies = [tensor.detach().clone() for tensor in tensors]
            return _always, lambda: [copy.item() for copy in copies]
        return _always, lambda: [_jax_item(array) for array in tensors]  # JAX arrays never change: keep the reference

    def _ring(self, device: Any) -> CudaRing:
        import torch

        if torch.cuda.is_current_stream_capturing():
            raise NoRoom("a CUDA graph was being captured; log after the replay instead")
        ring = self._rings.get(device)
        if ring is None:
            ring = self._rings[device] = CudaRing(device)
        return ring

    def launch_array(self, tensor: Any) -> Any:
        """Start the copy of a whole tensor (an image, a histogram's data); return ready() and read(), or a reason."""
        group = self._group_of(tensor)
        if group is not None and group[0] == "cuda":
            try:
                return self._ring(group[1]).launch_array(tensor)
            except NoRoom as reason:
                return str(reason)
        copy = tensor.detach().clone() if group is not None else tensor
        return _always, lambda: copy

    def watch(self, call: Call, keys: Sequence[str], launched: Any, then: Callable[[Call, dict[str, Any]], None]) -> None:
        """Hand a launched part to the waiting thread; `then(call, values)` runs there when it has landed."""
        if isinstance(launched, str):
            self._lose(call, keys, launched)
            return
        ready, read = launched
        self._enqueue(Part(call, keys, ready, read, then))

    def _enqueue(self, part: Part) -> None:
        self._parts.append(part)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fanfold-deferred", daemon=True)
            self._thread.start()
        self._wake.set()

    def _run(self) -> None:
        while not self._closing:
            if not self._parts:
                self._wake.wait()
                self._wake.clear()
                continue
            if not self._land():
                time.sleep(POLL_SECONDS)

    def _land(self) -> int:
        """Take in every part that is there, first come first served per stream; return how many."""
        waiting: list[Part] = []
        count = 0
        for _ in range(len(self._parts)):
            part = self._parts.popleft()
            if not part.ready() or (part.call is _FLUSH and waiting):
                waiting.append(part)
                continue
            count += 1
            with guard("read a value from its device"):
                values = part.read()
                part.then(part.call, dict(zip(part.keys, values, strict=True)) if part.keys else {"": values})
        self._parts.extendleft(reversed(waiting))
        return count

    def flush(self, timeout: float) -> bool:
        """Wait until everything launched so far has landed and is journalled; tell whether it has."""
        if self._thread is None:
            return True
        done = threading.Event()  # a token in the same queue: it is reached when all before it has landed
        self._enqueue(Part(_FLUSH, (), _always, list, lambda _call, _values: done.set()))
        return done.wait(timeout)

    def close(self, timeout: float) -> None:
        """Wait, then mark what has not landed as lost."""
        self.flush(timeout)
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(min(timeout, 1.0) + POLL_SECONDS)
        for part in [part for part in self._parts if part.call is not _FLUSH]:
            self._lose(part.call, part.keys, "its copy from the device had not landed when the run finished")


def _always() -> bool:
    return True


def _jax_item(array: Any) -> Any:
    local = array if array.is_fully_addressable else array.addressable_data(0)
    import numpy as np

    item = np.asarray(local).reshape(()).item()
    return item if isinstance(item, (bool, int)) else float(item)  # bfloat16 gives an object of its own
