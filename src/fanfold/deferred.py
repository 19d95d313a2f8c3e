"""Numbers still on a device: copied without a sync on the caller's thread, journalled when they land.

The waiting thread makes no CUDA call at all. Each copy into pinned memory is followed on its stream by the copy of a
mark, and the thread looks at the mark: polling an event from a thread would break a graph capture going on in another.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from .errors import guard

POLL_SECONDS = 0.1
FLUSH_SECONDS = 0.002
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
    then: Callable[[Call, dict[str, Any]], None] | None


_FLUSH = Call(-1, 0, 0)


class NoRoom(Exception):
    """The ring is full, or copies cannot be launched now."""


class CudaRing:
    """Pinned slots for one CUDA device; `launch` costs one stack and two small asynchronous copies."""

    def __init__(self, device: Any) -> None:
        import torch

        self.torch = torch
        self._free = list(range(SLOTS))  # a stack: a few slots are used again and again, and their views stay at hand
        self._staging = torch.zeros((SLOTS, WIDTH * 8), dtype=torch.uint8, device=device)
        self._pinned = torch.zeros((SLOTS, WIDTH * 8), dtype=torch.uint8, pin_memory=True)
        landed = torch.zeros(SLOTS, dtype=torch.int64, pin_memory=True)
        self._landed = landed.numpy()  # the same memory, looked at without any torch call
        self._landing = landed.unbind()
        self._marks = torch.arange(1, SLOTS + 1, dtype=torch.int64, device=device).unbind()
        self._views: dict[tuple[int, Any, int], tuple[Any, Any]] = {}

    def _take_slot(self) -> int:
        try:
            return self._free.pop()
        except IndexError:
            raise NoRoom("more values were in flight than the ring holds") from None

    def _view(self, slot: int, dtype: Any, count: int) -> tuple[Any, Any]:
        """Return a slot's room on the device and on the host, seen as `count` scalars."""
        key = (slot, dtype, count)
        found = self._views.get(key)
        if found is None:
            if len(self._views) > 4 * SLOTS:
                self._views.clear()
            found = self._views[key] = (self._staging[slot].view(dtype)[:count], self._pinned[slot].view(dtype)[:count])
        return found

    def launch(self, tensors: Sequence[Any]) -> tuple[Callable[[], bool], Callable[[], Sequence[Any]]]:
        """Start the copy of up to WIDTH scalars of one dtype, on the current stream; return ready() and read()."""
        slot = self._take_slot()
        staged, target = self._view(slot, tensors[0].dtype, len(tensors))
        try:
            with self.torch.no_grad():
                self.torch.stack(tensors, out=staged)
                target.copy_(staged, non_blocking=True)
                self._landing[slot].copy_(self._marks[slot], non_blocking=True)
        except RuntimeError:
            self._free.append(slot)
            raise
        landed, free = self._landed, self._free

        def read() -> Sequence[Any]:
            values: Sequence[Any] = target.tolist()
            landed[slot] = 0
            free.append(slot)
            return values

        return lambda: bool(landed[slot]), read

    def launch_array(self, tensor: Any) -> tuple[Callable[[], bool], Callable[[], Any]]:
        """Start the copy of a whole tensor into pinned memory of its own."""
        slot = self._take_slot()
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

    def __init__(
        self,
        landed: Callable[[Sequence[tuple[Call, Sequence[str], Sequence[Any]]]], None],
        lose: Callable[[Call, Sequence[str], str], None],
    ) -> None:
        self._landed = landed
        self._lose = lose
        self._rings: dict[int, CudaRing] = {}
        self._capturing: Callable[[], bool] | None = None
        self._reset()

    def _reset(self) -> None:
        self._parts: SimpleQueue[Part | None] = SimpleQueue()  # re-entrant: a signal handler may log while we put
        self._waiting: list[Part] = []
        self._closing = self._hurry = False
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

    def launch_alike(self, tensors: Sequence[Any]) -> Any:
        """Start one copy for scalars of one CUDA device and dtype; None when they are not that (any more)."""
        first = tensors[0]
        if not first.is_cuda or first.ndim or len(tensors) > WIDTH:
            return None
        dtype = first.dtype
        for tensor in tensors:
            if tensor.dtype is not dtype:  # stack() would convert, and a large integer would be rounded
                return None
        try:
            return self._ring(first.get_device(), first).launch(tensors)
        except NoRoom as reason:
            return str(reason)
        except RuntimeError:  # another device, or not all of them scalars
            return None

    @staticmethod
    def _group_of(tensor: Any) -> Any:
        device = getattr(tensor, "device", None)
        kind = getattr(device, "type", None)
        return (kind, device, tensor.dtype) if kind is not None and hasattr(tensor, "is_cuda") else None

    def _start(self, group: Any, tensors: Sequence[Any]) -> tuple[Callable[[], bool], Callable[[], Sequence[Any]]]:
        if group is not None and group[0] == "cuda":
            return self._ring(tensors[0].get_device(), tensors[0]).launch([tensor.reshape(()) for tensor in tensors])
        if group is not None:  # another accelerator: a copy on the device now, the wait in our thread
            copies = [tensor.detach().clone() for tensor in tensors]
            return _always, lambda: [copy.item() for copy in copies]
        return _always, lambda: [_jax_item(array) for array in tensors]  # JAX arrays never change: keep the reference

    def _ring(self, index: int, tensor: Any) -> CudaRing:
        capturing = self._capturing
        if capturing is None:
            import torch

            capturing = self._capturing = torch.cuda.is_current_stream_capturing
        if capturing():
            raise NoRoom("a CUDA graph was being captured; log after the replay instead")
        ring = self._rings.get(index)
        if ring is None:
            ring = self._rings[index] = CudaRing(tensor.device)
        return ring

    def launch_array(self, tensor: Any) -> Any:
        """Start the copy of a whole tensor (an image, a histogram's data); return ready() and read(), or a reason."""
        group = self._group_of(tensor)
        if group is not None and group[0] == "cuda":
            try:
                return self._ring(tensor.get_device(), tensor).launch_array(tensor)
            except NoRoom as reason:
                return str(reason)
        copy = tensor.detach().clone() if group is not None else tensor
        return _always, lambda: copy

    def watch(
        self, call: Call, keys: Sequence[str], launched: Any, then: Callable[[Call, dict[str, Any]], None] | None = None
    ) -> None:
        """Hand a launched part to the waiting thread: scalars go to `landed` together, an array to its own `then`."""
        if isinstance(launched, str):
            self._lose(call, keys, launched)
            return
        ready, read = launched
        self._enqueue(Part(call, keys, ready, read, then))

    def _enqueue(self, part: Part) -> None:
        self._parts.put(part)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fanfold-deferred", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._closing:
            self._collect()
            self._land()
            # Always: what lands meanwhile is taken in at once, with one turn at the GIL. flush() is in more of a hurry.
            time.sleep(FLUSH_SECONDS if self._hurry else POLL_SECONDS)

    def _collect(self) -> None:
        """Take what was launched; with nothing to wait for, wait for that."""
        with contextlib.suppress(Empty):
            while part := self._parts.get(block=not self._waiting):
                self._waiting.append(part)

    def _land(self) -> None:
        """Take in every part that is there; the others keep their order."""
        waiting: list[Part] = []
        landed: list[tuple[Call, Sequence[str], Sequence[Any]]] = []
        for part in self._waiting:
            if not part.ready() or (part.call is _FLUSH and (waiting or landed)):
                waiting.append(part)
                continue
            with guard("read a value from its device"):
                values = part.read()
                if part.then is None:
                    landed.append((part.call, part.keys, values))
                else:
                    part.then(part.call, {"": values})
        if landed:
            with guard("journal the values that landed"):
                self._landed(landed)
        self._waiting = waiting

    def flush(self, timeout: float) -> bool:
        """Wait until everything launched so far has landed and is journalled; tell whether it has."""
        if self._thread is None:
            return True
        done = threading.Event()  # a token in the same queue: it is reached when all before it has landed
        self._hurry = True
        self._enqueue(Part(_FLUSH, (), _always, list, lambda _call, _values: done.set()))
        landed = done.wait(timeout)
        self._hurry = False
        return landed

    def close(self, timeout: float) -> None:
        """Wait, then mark what has not landed as lost."""
        self.flush(timeout)
        self._closing = True
        if self._thread is not None:
            self._hurry = True
            self._parts.put(None)
            self._thread.join(min(timeout, 1.0) + POLL_SECONDS)
        for part in [part for part in self._waiting if part.call is not _FLUSH]:
            self._lose(part.call, part.keys, "its copy from the device had not landed when the run finished")


def _always() -> bool:
    return True


def _jax_item(array: Any) -> Any:
    local = array if array.is_fully_addressable else array.addressable_data(0)
    import numpy as np

    item = np.asarray(local).reshape(()).item()
    return item if isinstance(item, (bool, int)) else float(item)  # bfloat16 gives an object of its own
