"""Values still on a device: copied without a sync on the caller's thread, journalled when the copy has landed.

The waiting thread makes no CUDA call at all: polling an event would break a graph capture in another thread. Instead, a
free slot of the ring is filled with sentinels; the device overwrites them, and the thread checks whether any sentinel is
left.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Literal, NamedTuple

from ..errors import guard
from ..values import code_of, code_of_dtype

POLL_SECONDS = 0.1
FLUSH_SECONDS = 0.002
MARK_BYTES = 8
WIDTH = 63  # scalars per slot; with its mark a slot is 512 bytes
SLOT_BYTES = MARK_BYTES + WIDTH * 8
FIRST_SLOTS = 2048
MAX_BYTES = 64 << 20  # pinned memory per device; beyond it values are dropped and counted

# One 16-bit pattern, repeated: as float16, bfloat16, float32 and float64 it is a NaN with a payload that no computation
# produces. Each process picks one of 28 patterns at random.
_PICKED = int.from_bytes(os.urandom(4), "little") % 28
SENTINEL = (0x7FF1 + _PICKED % 14 | _PICKED // 14 << 15).to_bytes(2, "little")
_EMPTY_SLOT = SENTINEL * (SLOT_BYTES // 2)
_SENTINELS = {size: int.from_bytes(SENTINEL * (size // 2), "little") for size in (2, 4, 8)}
_FORMATS: dict[int, Literal["H", "I", "Q"]] = {2: "H", 4: "I", 8: "Q"}


class LogCall:
    """The log() call that a late part belongs to: whether a row announces it, and whether it was already counted as dropped."""

    __slots__ = ("announced", "dropped", "seq", "step", "time_ns")

    def __init__(self, seq: int, step: int, time_ns: int) -> None:
        self.seq, self.step, self.time_ns = seq, step, time_ns
        self.announced, self.dropped = True, False


class Flight:
    """A copy in flight: `landed()` returns whether it is complete, `read()` returns its values."""

    __slots__ = ()
    ring: Any = None
    code = ""  # how floats are packed, if the dtype tells
    stream = 0  # copies on one stream of a device land in launch order
    began = ended = 0  # launch counter before and after this copy's launch

    def landed(self) -> bool:
        return True

    def read(self) -> Any:
        return ()


class Ready(Flight):
    """A value that only has to be read, off the training thread."""

    __slots__ = ("_read", "code")

    def __init__(self, read: Callable[[], Any], code: str = "") -> None:
        self._read, self.code = read, code

    def read(self) -> Any:
        return self._read()


class LatePart(NamedTuple):
    """A flight and the call it belongs to."""

    call: LogCall
    keys: Sequence[str]
    flight: Flight
    then: Callable[[LogCall, dict[str, Any]], None] | None


Landed = tuple[LogCall, Sequence[str], Sequence[Any], str]  # values that have landed: of which keys, and how they are packed
_FLUSH = LogCall(-1, 0, 0)


class NoRoom(Exception):
    """Raised when the ring is full, or copies cannot be launched at the moment."""


class SlotView(NamedTuple):
    """A slot as scalars of one dtype: where the device writes each, where the host reads them, and the memory to watch."""

    targets: list[Any]
    values: Any
    watched: memoryview
    sentinel: int
    mark: list[Any] | None
    code: str


class SlotCopy(Flight):
    """Scalars on their way into a slot of a ring, or an array whose arrival is signalled by the slot's mark."""

    __slots__ = ("array", "began", "ended", "ring", "slot", "stream", "view")

    def __init__(self, ring: CudaRing, slot: int, view: SlotView, stream: int, began: int, ended: int, array: Any = None) -> None:
        self.ring, self.slot, self.view = ring, slot, view
        self.stream, self.began, self.ended = stream, began, ended
        self.array = array

    @property
    def code(self) -> str:  # type: ignore[override]
        return self.view.code

    def landed(self) -> bool:
        return self.view.sentinel not in self.view.watched.tolist()

    def read(self) -> Any:
        values = self.view.values.tolist() if self.array is None else self.array
        self.ring.release(self.slot)
        return values


class Slab:
    """Pinned host memory for a number of slots, and the same memory mapped for the device."""

    def __init__(self, torch: Any, device: Any, slots: int) -> None:
        host = torch.empty((slots, SLOT_BYTES), dtype=torch.uint8, pin_memory=True)
        self.memory = memoryview(host.numpy()).cast("B")
        self.memory[:] = _EMPTY_SLOT * slots
        self.host = host
        self.mapped = _mapped(torch, host, device)


def _mapped(torch: Any, host: Any, device: Any) -> Any:
    """Return a device tensor over pinned host memory, so that one kernel writes many scalars straight to the host.

    If the runtime cannot map it, return the host tensor: each scalar is then a separate asynchronous copy.
    """
    pointer = _device_pointer(host.data_ptr())
    if pointer is None:
        return host
    interface = {"shape": tuple(host.shape), "typestr": "|u1", "data": (pointer, False), "version": 3, "strides": None}
    mapped = torch.as_tensor(_Alias(interface, host), device=device)
    return mapped if mapped.data_ptr() == pointer else host  # torch made a copy, because the memory belongs to another device


class _Alias:
    """Memory described through the CUDA array interface; keeps its owner alive."""

    def __init__(self, interface: dict[str, Any], owner: Any) -> None:
        self.__cuda_array_interface__ = interface
        self.owner = owner


def _device_pointer(address: int) -> int | None:
    """Return the device address of pinned memory, from the CUDA runtime that torch loaded; None if there is none."""
    import ctypes

    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        runtime = ctypes.CDLL(next(line.split(maxsplit=5)[-1] for line in maps if "libcudart" in line))
        pointer = ctypes.c_void_p()
        failed = runtime.cudaHostGetDevicePointer(ctypes.byref(pointer), ctypes.c_void_p(address), 0)
        if failed:
            runtime.cudaGetLastError()  # clear it: torch checks for errors after its next kernel
    except (OSError, StopIteration, AttributeError):
        return None
    return None if failed else pointer.value


class CudaRing:
    """Pinned slots for one CUDA device. Grows up to MAX_BYTES before anything is dropped.

    `launch` is one kernel for floating-point scalars. Other dtypes have no spare bit pattern for a sentinel: a second
    launch on the same stream writes the slot's mark, and the mark is watched instead.
    """

    def __init__(self, device: Any) -> None:
        import torch

        self._torch = torch
        self._device = device
        self._index: int = device.index
        self._copy: Callable[..., None] = torch._foreach_copy_
        # Private torch functions: their public wrappers take as long as the launch itself.
        self._captured: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing  # noqa: SLF001 - see above
        self._stream_of: Callable[[int], int] = torch._C._cuda_getCurrentRawStream  # noqa: SLF001 - see above
        self._floats = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))
        self._slabs: list[Slab] = []
        self._free: list[int] = []  # a stack: the same few slots are reused, and their views stay cached
        self._views: dict[tuple[int, Any, int], SlotView] = {}
        self._growing = threading.RLock()  # re-entrant: a signal handler may log
        self._launches = itertools.count(1)
        with torch.inference_mode(False):
            self._one = [torch.ones((), dtype=torch.int64, device=device)]
        self._grow()

    def _grow(self) -> None:
        """Double the number of slots."""
        begin = FIRST_SLOTS << len(self._slabs) - 1 if self._slabs else 0
        slots = begin or FIRST_SLOTS
        if (begin + slots) * SLOT_BYTES > MAX_BYTES:
            raise NoRoom(f"more values were on their way than {MAX_BYTES >> 20} MB of pinned memory hold")
        # The first log() call may come from inference mode; these must be ordinary tensors.
        with self._torch.inference_mode(False), self._torch.cuda.device(self._device):
            self._slabs.append(Slab(self._torch, self._device, slots))
        self._free[:0] = range(begin + slots - 1, begin - 1, -1)  # below the slots in use, which have cached views

    def _take_slot(self) -> int:
        while True:
            try:
                return self._free.pop()
            except IndexError:
                with self._growing:
                    if not self._free:
                        self._grow()

    def _place(self, slot: int) -> tuple[Slab, int]:
        """Return the slab of a slot and its index there; each slab holds as many slots as all earlier ones together."""
        order = (slot // FIRST_SLOTS).bit_length()
        return self._slabs[order], slot - (FIRST_SLOTS << order - 1 if order else 0)

    def release(self, slot: int) -> None:
        """Return a slot to the ring after its values were read."""
        slab, place = self._place(slot)
        slab.memory[place * SLOT_BYTES : (place + 1) * SLOT_BYTES] = _EMPTY_SLOT
        self._free.append(slot)

    def _view(self, key: tuple[int, Any, int]) -> SlotView:
        view = self._make_view(*key)
        if key[0] < FIRST_SLOTS:  # bounded: later slots are only used in rare bursts
            if len(self._views) > 4 * FIRST_SLOTS:
                self._views.clear()
            self._views[key] = view
        return view

    def _make_view(self, slot: int, dtype: Any, count: int) -> SlotView:
        slab, place = self._place(slot)
        start = place * SLOT_BYTES
        size = dtype.itemsize
        with self._torch.inference_mode(False):
            target, host = slab.mapped[place].view(dtype), slab.host[place].view(dtype)
            some = slice(MARK_BYTES // size, MARK_BYTES // size + count)
            targets, values = list(target[some].unbind()), host[some]
            mark = None if dtype in self._floats else list(slab.mapped[place].view(self._torch.int64)[:1].unbind())
        if mark is not None:
            watched, size = slab.memory[start : start + MARK_BYTES], 8
        else:
            watched = slab.memory[start + MARK_BYTES : start + MARK_BYTES + count * size]
        return SlotView(targets, values, watched.cast(_FORMATS[size]), _SENTINELS[size], mark, code_of_dtype(dtype) or "")

    def capturing(self) -> bool:
        """Return whether a CUDA graph is being captured. CUDA refuses that on the default stream, whose number is 0."""
        return self._stream_of(self._index) != 0 and self._captured()

    def launch(self, tensors: Sequence[Any], dtype: Any) -> Launched:
        """Start copying up to WIDTH detached scalars of one dtype, on the current stream.

        A slot whose launch failed is never reused, since part of it may still be written.
        """
        try:
            slot = self._free.pop()
        except IndexError:
            slot = self._take_slot()
        key = (slot, dtype, len(tensors))
        view = self._views.get(key) or self._view(key)
        stream, began = self._stream_of(self._index), next(self._launches)
        self._copy(view.targets, tensors, True)
        if view.mark is not None:
            self._copy(view.mark, self._one, True)
        return self, slot, view, stream, began, next(self._launches)

    def launch_array(self, tensor: Any) -> SlotCopy:
        """Start copying a whole tensor into its own pinned memory; a number written to the slot signals its arrival."""
        torch = self._torch
        with torch.inference_mode(False):
            target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with torch.no_grad():
            target.copy_(tensor, non_blocking=True)
        return SlotCopy(*self.launch(self._one, torch.int64), target)


# What SlotCopy is made of. The waiting thread makes it: out of the caches, an object costs the training thread a microsecond.
Launched = tuple[CudaRing, int, SlotView, int, int, int]


class Deferred:
    """The copies from devices, launched in program order, and a thread that waits for them and passes them on."""

    def __init__(
        self,
        landed: Callable[[Sequence[Landed]], None],
        lose: Callable[[LogCall, Sequence[str], str], None],
    ) -> None:
        self._landed = landed
        self._lose = lose
        self._rings: dict[int, CudaRing] = {}
        self._reset()

    def _reset(self) -> None:
        self._parts: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()  # re-entrant: a signal handler may log during put()
        self._waiting: list[LatePart] = []
        self._closing = self._hurry = False
        self._thread: threading.Thread | None = None

    def after_fork_in_child(self) -> None:
        """Drop the parent's copies: they land in the parent, and CUDA does not survive a fork."""
        self._of_parent, self._rings = self._rings, {}  # keep a reference: freeing pinned memory is a CUDA call
        self._reset()

    def launch(self, tensors: Mapping[str, Any]) -> list[tuple[list[str], Any]]:
        """Start the copies for one call; return what `watch` expects. A copy that cannot be launched is returned as a reason."""
        groups: dict[Any, list[str]] = {}
        for key, tensor in tensors.items():
            groups.setdefault(self._group_of(tensor), []).append(key)
        launched: list[tuple[list[str], Any]] = []
        for group, keys in groups.items():
            for start in range(0, len(keys), WIDTH):
                some = keys[start : start + WIDTH]
                try:
                    launched.append((some, self._start(group, [tensors[key] for key in some])))
                except (NoRoom, RuntimeError) as reason:
                    launched.append((some, _reason(reason)))
        return launched

    def launch_alike(self, tensors: Sequence[Any]) -> Any:
        """Start one copy for scalars of one dtype, to the ring of the first one's device; return None if they differ.

        One that is elsewhere is copied correctly too, only more slowly, so the rest are not asked where they are: that
        would take every step as long as a tenth of the launch. Those with a gradient are detached, because turning
        gradients off and on takes a fifth of it.
        """
        dtype = tensors[0].dtype
        ring = self._rings.get(tensors[0].get_device())
        if ring is None or len(tensors) > WIDTH:
            return None
        attached = False
        for tensor in tensors:
            if tensor.dtype is not dtype or tensor.ndim:
                return None
            if tensor.requires_grad:
                attached = True
        try:
            if attached:
                tensors = [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]
            return None if ring.capturing() else ring.launch(tensors, dtype)
        except (NoRoom, RuntimeError) as reason:
            return _reason(reason)

    @staticmethod
    def _group_of(tensor: Any) -> Any:
        device = getattr(tensor, "device", None)
        kind = getattr(device, "type", None)
        return (kind, device, tensor.dtype) if kind is not None and hasattr(tensor, "is_cuda") else None

    def _start(self, group: Any, tensors: Sequence[Any]) -> Flight | Launched:
        if group is not None and group[0] == "cuda":
            scalars = [tensor.detach().reshape(()) for tensor in tensors]
            return self._ring(tensors[0].get_device(), tensors[0]).launch(scalars, tensors[0].dtype)
        if group is not None:  # another accelerator: copy on the device now, wait in our thread
            copies = [tensor.detach().clone() for tensor in tensors]
            return Ready(lambda: [copy.item() for copy in copies], code_of_dtype(group[2]) or "")
        return Ready(lambda: [_jax_item(array) for array in tensors])  # JAX arrays are immutable: keep the reference

    def _ring(self, index: int, tensor: Any) -> CudaRing:
        import torch

        if torch.cuda.is_current_stream_capturing():
            raise NoRoom("a CUDA graph was being captured; log after the replay instead")
        ring = self._rings.get(index)
        if ring is None:
            ring = self._rings.setdefault(index, CudaRing(tensor.device))
        return ring

    def launch_array(self, tensor: Any) -> Any:
        """Start copying a whole tensor (an image, the data of a histogram); return its flight, or the reason it failed."""
        group = self._group_of(tensor)
        if group is not None and group[0] == "cuda":
            try:
                return self._ring(tensor.get_device(), tensor).launch_array(tensor)
            except (NoRoom, RuntimeError) as reason:
                return _reason(reason)
        copy = tensor.detach().clone() if group is not None else tensor
        return Ready(lambda: copy)

    def watch(
        self, call: LogCall, keys: Sequence[str], launched: Any, then: Callable[[LogCall, dict[str, Any]], None] | None = None
    ) -> None:
        """Pass a launched part to the waiting thread: scalars go to `landed` in batches, an array to its own `then`."""
        if isinstance(launched, str):
            self._lose(call, keys, launched)
            return
        self._enqueue((call, keys, launched, then))

    def _enqueue(self, part: tuple[Any, ...]) -> None:
        self._parts.put(part)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fanfold-deferred", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._closing:
            self._collect()
            # Sleep always: values that land meanwhile are read together, taking the GIL once. flush() needs a shorter pause.
            time.sleep(FLUSH_SECONDS if self._hurry else POLL_SECONDS)
            self._collect()
            self._land()

    def _collect(self) -> None:
        """Collect launched parts; block only if nothing else is waiting."""
        with contextlib.suppress(Empty):
            while part := self._parts.get(block=not self._waiting):
                call, keys, launched, then = part
                flight = launched if isinstance(launched, Flight) else SlotCopy(*launched)
                self._waiting.append(LatePart(call, keys, flight, then))

    def _land(self) -> None:
        """Read every part that has landed; the others keep their order."""
        waiting: list[LatePart] = []
        landed: list[Landed] = []
        arrived = _arrived([part.flight for part in self._waiting])
        for part, here in zip(self._waiting, arrived, strict=True):
            if not here or (part.call is _FLUSH and (waiting or landed)):
                waiting.append(part)
                continue
            with guard("read a value from its device"):
                values = part.flight.read()
                if part.then is None:
                    landed.append((part.call, part.keys, values, part.flight.code * len(values) or _codes(values)))
                else:
                    part.then(part.call, {"": values})
        with guard("journal the values that landed"):
            self._landed(landed)
        self._waiting = waiting

    def flush(self, timeout: float) -> bool:
        """Wait until everything launched so far has landed and is journalled; return whether it has."""
        if self._thread is None or not self._thread.is_alive():  # never started, or closed
            return True
        done = threading.Event()  # a token in the same queue: reached once everything before it has landed
        self._hurry = True
        self._enqueue((_FLUSH, (), Flight(), lambda _call, _values: done.set()))
        landed = done.wait(timeout)
        self._hurry = False
        return landed

    def close(self, timeout: float) -> None:
        """Wait, then mark values that have not landed as lost."""
        self.flush(timeout)
        self._closing = True
        if self._thread is not None:
            self._hurry = True
            self._parts.put(None)
            self._thread.join(min(timeout, 1.0) + POLL_SECONDS)
        for part in [part for part in self._waiting if part.call is not _FLUSH]:
            self._lose(part.call, part.keys, "its copy from the device had not landed when the run finished")


def _codes(values: Sequence[Any]) -> str:
    return "".join([code_of(type(value)) or "d" for value in values])


def _reason(error: Exception) -> str:
    """Return the reason nothing was launched, in one line."""
    return (
        str(error).partition("\n")[0]
        if isinstance(error, NoRoom)
        else f"its copy could not be launched ({error})".partition("\n")[0]
    )


def _arrived(flights: Sequence[Flight]) -> list[bool]:
    """Return whether each flight is complete: it has no sentinel left, or a later flight on its stream has landed.

    A stream works in order, so a sentinel that remains after a later flight has landed is the value itself.
    """
    landed = [flight.landed() for flight in flights]
    newest: dict[Any, int] = {}
    for flight, here in zip(flights, landed, strict=True):
        if here and flight.ring is not None:
            place = (flight.ring, flight.stream)
            newest[place] = max(flight.began, newest.get(place, 0))
    return [
        here or flight.ended < newest.get((flight.ring, flight.stream), 0) for flight, here in zip(flights, landed, strict=True)
    ]


def _jax_item(array: Any) -> Any:
    local = array if array.is_fully_addressable else array.addressable_data(0)
    import numpy as np

    item = np.asarray(local).reshape(()).item()
    return item if isinstance(item, (bool, int)) else float(item)  # bfloat16 gives an object of its own type
