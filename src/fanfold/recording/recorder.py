"""log(): its work on the training thread, and the work it hands to others.

The fast path is one dictionary look-up, one struct.pack, one crc and one write(2). Everything else (new shapes, texts,
nested dicts, media, values on a device, a broken disk) takes the slow path once, and then mostly a fast one again.
"""

from __future__ import annotations

import errno
import itertools
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from numbers import Number
from operator import itemgetter
from typing import Any, cast
from zlib import crc32

from ..errors import describe, guard, notices, outcome, shown, type_name
from ..journal import Kind, Writer
from ..journal.format import Layout
from ..journal.writer import NO_SHAPES
from ..plain import plain
from ..values import Parts, split
from .deferred import Deferred, Landed, LogCall
from .encoder import Encoder
from .join import Membership
from .tallies import Tallies
from .times import nanoseconds
from .uncompiled import skip_frames, uncompiled

time_ns = time.time_ns
os_write = os.write
MAX_STEP = (1 << 63) - 1
MAX_TEXTS = 128
MAX_PLANS = 256
MAX_SUMMARY_TEXTS = 1 << 14
RECORDING = "record a log() call"
_PENDING, _LATE = int(Layout.PENDING), int(Layout.LATE)
Row = tuple[int, Sequence[str], str, tuple[int, ...], Sequence[Any]]  # layout, keys, types, head, values


class DevicePlan:
    """How calls of a known signature split into scalars on one CUDA device and numbers already on the host."""

    __slots__ = ("device", "numbers", "pick", "types")

    def __init__(self, parts: Parts) -> None:
        self.device = tuple(parts.device)
        self.numbers = tuple(parts.numbers)
        self.types = "".join(parts.types)
        keys = itemgetter(*self.device)
        self.pick: Callable[[Mapping[str, Any]], Sequence[Any]] = keys if len(self.device) > 1 else lambda values: (keys(values),)


class Recorder:
    """Turns log() calls, and facts about the run, into frames of one process's journal."""

    def __init__(self, member: Membership, writer: Writer, *, strict: bool) -> None:
        self.strict = strict
        self.texts: dict[str, str] = {}  # the last text of each key
        self.lost = 0  # values that will never arrive
        self.tallies = Tallies()
        writer.counting = self.tallies.counting
        self.member = member
        self._writer = writer
        self._seq = itertools.count(1)
        self._given = self._counted = member.first_step - 1
        self._auto = itertools.count(member.first_step)
        self._plans: dict[tuple[Any, ...], DevicePlan] = {}
        self._unannounced: deque[LogCall] = deque()  # calls with values on a device alone, and no row yet
        self._announcing = threading.RLock()  # re-entrant: a signal handler may log
        self._deferred = Deferred(self.announce, self._lose)
        self._encoder = Encoder(member.path, self._media_landed, self._lose_media)
        skip_frames()

    @uncompiled
    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        *,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        commit: bool | None = None,
        time: float | datetime | None = None,
    ) -> None:
        """Record values; this is Run.log."""
        try:
            sheet = self._writer.sheet
            signature = (*values, *map(type, values.values()))
            packer = sheet.shapes.get(signature)  # type: ignore[union-attr]
            if packer is None:
                plan = self._plans.get(signature)
                if plan is not None and log_kwargs is None and time is None and self._log_from_device(plan, values, step):
                    return
                raise KeyError
            if step is None:
                step = self._next_step()
                body = packer.pack(packer.id, time_ns(), step, *values.values())
            else:
                body = packer.pack(packer.id, time_ns(), step, *values.values())
                if step > self._given:  # noqa: PLR1730 - calling max() costs as much as the crc
                    self._given = step
            if log_kwargs is not None or commit is not None or time is not None:
                raise KeyError
            data = packer.head + crc32(body, packer.crc).to_bytes(4, "little") + body
        except Exception:  # noqa: BLE001 - whatever the error, the slow path repeats the call under the guard
            self._log_slowly(values, step, log_kwargs, commit, time)
            return
        try:
            done = os_write(sheet.fd, data)  # type: ignore[union-attr]
        except OSError as error:
            self._recover(sheet, error, values, step)
            return
        if done == len(data):
            packer.last = body
        else:
            self._recover(sheet, OSError(errno.ENOSPC, "only a part of a frame was written (disk full?)"), values, step)

    def _next_step(self) -> int:
        """Count this call, continuing from the highest step given. Threads that omit the step get different numbers."""
        step = next(self._auto)
        if step <= self._given:
            self._auto = itertools.count(int(self._given) + 1)
            step = next(self._auto)
        self._counted = min(step, MAX_STEP)
        return self._counted

    @property
    def high(self) -> int:
        """The highest step so far; -1 if there is none."""
        return max(int(self._given), self._counted)

    def _recover(self, sheet: Any, error: OSError, values: Mapping[str, Any], step: int) -> None:
        """Log the values of a failed write once more, in the next journal."""
        with guard(RECORDING, strict=self.strict):
            self._writer.fail(sheet, error)
        self._log_slowly(values, step, None, None)

    def _log_slowly(
        self,
        values: Mapping[str, Any],
        step: Any,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None,
        commit: bool | None,
        time: Any = None,
    ) -> None:
        """Log anything: new shapes, nested dicts, texts, media, device values, a broken journal, a finished run.

        Training continues whatever goes wrong here. Only a call without a dict raises in every run.
        """
        with guard(RECORDING, strict=self.strict):
            sheet = self._writer.sheet
            if self._unannounced or (sheet is not None and sheet.shapes is NO_SHAPES):
                self.announce()
                self.log(values, step, log_kwargs=log_kwargs, commit=commit, time=time)
            else:
                self._log_anything(values, step, log_kwargs, commit, time)

    def _log_anything(self, values: Mapping[str, Any], step: Any, log_kwargs: Any, commit: bool | None, time: Any) -> None:
        if self._writer.closed:
            notices.once(
                f"finished:{self.member.run_id}",
                f"log() was called after run {self.member.name} had finished. The values are dropped and counted. "
                "Log before finish(), or start another run with fanfold.init().",
            )
            return
        if commit is not None:
            notices.once("commit", "log(commit=…) is wandb's. fanfold records every call at once. The values are recorded.")
        skip_frames()  # torch may have been imported after init()
        now = time_ns() if time is None else nanoseconds(time)
        parts = split(values, strict=self.strict)
        number = self._step(step)
        if parts.device and parts.direct and not parts.texts and not parts.media and len(self._plans) < MAX_PLANS:
            self._plans[parts.signature] = DevicePlan(parts)
        signature = parts.signature if parts.plain else None
        self._write_parts(LogCall(0, number, now), parts, signature, _kwargs(log_kwargs) if log_kwargs is not None else None)

    def _log_from_device(self, plan: DevicePlan, values: Mapping[str, Any], step: Any) -> bool:
        """Log scalars on a device the fast way, if an earlier call had the same signature; return False if they do not match it.

        Between two training steps our code drops out of the CPU caches, so each function here costs microseconds, and a
        write(2) ten. So a call without numbers gets its row when its values have landed, or before the next row of another
        call, whichever comes first.
        """
        launched = self._deferred.launch_alike(plan.pick(values))
        if launched is None:
            return False
        if type(step) is not int or not 0 <= step < 1 << 31:
            step = self._step(step)
        elif step > self._given:
            self._given = step
        call = LogCall(next(self._seq), step, time_ns())
        if plan.numbers:
            self._write_numbers(plan, call, [values[key] for key in plan.numbers])
        else:
            self._unannounced.append(call)
            sheet = self._writer.sheet
            if sheet is not None:
                sheet.shapes = NO_SHAPES
        self._deferred.watch(call, plan.device, launched)
        return True

    def announce(self, landed: Sequence[Landed] = ()) -> None:
        """Write the rows that calls still lack, in their order, and values that have landed: all with one write(2).

        A call whose values are among those gets an ordinary row; for the others, the row says that one part follows.
        """
        with self._announcing:
            waiting: dict[LogCall, Row] = {}
            while self._unannounced:
                call = self._unannounced.popleft()
                waiting[call] = _PENDING, (), "", (call.seq, 1), ()
            rest: list[tuple[LogCall, Row]] = []
            for call, keys, values, types in landed:
                if call in waiting:
                    waiting[call] = 0, keys, types, (), values
                else:
                    rest.append((call, (_LATE, keys, types, (call.seq,), values)))
            rows = [*waiting.items(), *rest]
            done = self._writer.rows([
                (layout, keys, types, call.time_ns, call.step, head, values)
                for call, (layout, keys, types, head, values) in rows
            ]) if rows else 0  # fmt: skip
            for call, (layout, *_) in rows[done:]:
                if layout == _PENDING:
                    call.announced = False
                else:
                    self._writer.drop(call)
            self._open_fast_path()

    def _open_fast_path(self) -> None:
        """Let known calls write their rows themselves, unless one on a device has come meanwhile."""
        sheet = self._writer.sheet
        if sheet is not None:
            sheet.open_fast_path()
            if self._unannounced:
                sheet.shapes = NO_SHAPES

    def _write_numbers(self, plan: DevicePlan, call: LogCall, numbers: Sequence[Any]) -> None:
        """Write the numbers of a call that also has values on a device."""
        if self._unannounced:
            self.announce()
        if not self._announced(plan, call, numbers):  # the first time, a step beyond 32 bits, or a failed disk
            call.announced = self._writer.row(
                dict(zip(plan.numbers, numbers, strict=True)), plan.types, time_ns=call.time_ns, step=call.step,
                layout=_PENDING, call=(call.seq, 1), signature=(plan,))  # fmt: skip
            call.dropped = not call.announced  # already counted by the writer

    def _announced(self, plan: DevicePlan, call: LogCall, numbers: Sequence[Any]) -> bool:
        """Write the row of a known call immediately, noting that one part follows later."""
        sheet: Any = self._writer.sheet
        packer: Any = sheet.shapes.get((plan,)) if sheet is not None else None
        if packer is None:
            return False
        try:
            body = packer.pack(packer.id, call.time_ns, call.step, call.seq, 1, *numbers)
            data = packer.head + crc32(body, packer.crc).to_bytes(4, "little") + body
            if os_write(sheet.fd, data) == len(data):
                packer.last = body
                return True
            self._writer.fail(sheet, OSError("only a part of a frame was written (disk full?)"))
        except struct.error:
            return False
        except OSError as error:
            self._writer.fail(sheet, error)
        return False

    def _step(self, step: Any) -> int:
        """Return the step as an integer, whatever was passed."""
        if step is None:
            return self._next_step()
        fits, _ = outcome(lambda: bool(abs(cast("Any", step)) < 1 << 64) if isinstance(step, Number) else True)
        number, _ = outcome(lambda: int(step)) if fits else (None, None)  # converting 10**999999 to an integer takes a minute
        if number is None or not -(1 << 63) <= number < 1 << 63:
            notices.once(
                f"step:{type_name(step)}",
                f"step={shown(step)} is not a 64-bit integer. The number of the call is used instead. Pass a whole number.",
            )
            return self._next_step()
        if not outcome(lambda: bool(number == step or str(step) == str(number)))[0]:
            notices.once(
                "step:fraction",
                f"step={shown(step)} is not a whole number and was cut to {number}. Log it as a value to keep it.",
            )
        self._given = max(self._given, number)
        return number

    def _write_parts(self, call: LogCall, parts: Parts, signature: tuple[Any, ...] | None, kwargs: Any) -> None:
        """Write the parts available now in one write(2), and announce those that follow later."""
        launched = self._deferred.launch(parts.device) if parts.device else []
        late = len(launched) + bool(parts.media)
        head: tuple[int, ...] = ()
        if late:
            call.seq = next(self._seq)
            head = (call.seq, late)
        beside: list[tuple[Kind, Any]] = []
        if parts.texts or kwargs:
            texts = list(parts.texts.items())
            for start in range(0, len(texts) or 1, MAX_TEXTS):  # a frame has a size limit, a call does not
                some = dict(texts[start : start + MAX_TEXTS])
                beside.append((Kind.VALUES, {"s": call.step, "t": call.time_ns, "v": some, "k": kwargs}))
        written = True
        if parts.numbers or late:
            layout = _PENDING if late else 0
            written = self._writer.row(parts.numbers, "".join(parts.types), time_ns=call.time_ns, step=call.step, layout=layout,
                             call=head, signature=signature, beside=beside)  # fmt: skip
        elif beside:
            written = self._writer.append(*beside)
        call.announced, call.dropped = written, not written and bool(parts.numbers or beside)  # already counted by the writer
        for keys, what in launched:
            self._deferred.watch(call, keys, what)
        if written and len(self.texts) < MAX_SUMMARY_TEXTS:
            self.texts.update(parts.texts)
        if parts.media:
            _, error = outcome(lambda: self._take_media(call, parts.media))
            if error is not None:
                self._lose(call, list(parts.media), describe(error))

    # Facts and events

    def info(self, facts: Mapping[str, Any]) -> None:
        """Record facts about the run; a later value of the same name replaces them."""
        self._append(Kind.INFO, {"t": time_ns(), **facts})

    def event(self, name: str, facts: Mapping[str, Any]) -> bool:
        """Record that something happened; return False if the run had already finished."""
        return self._append(Kind.EVENT, {"t": time_ns(), "event": name, **facts})

    def _append(self, kind: Kind, facts: dict[str, Any]) -> bool:
        """Write facts; those that the disk rejects are kept and written later."""
        if self._writer.closed:
            notices.once(
                f"ended:{self.member.run_id}",
                f"run {self.member.name} was changed after it had finished. The change is not recorded. Make it before "
                "finish(), or edit the run in the dashboard.",
            )
            return False
        return self._writer.append((kind, facts), keep=True)

    # The end

    def flush(self, timeout: float) -> bool:
        """Wait until device values and media have landed; return whether they have."""
        deadline = time.monotonic() + timeout
        landed = self._deferred.flush(timeout)
        return self._encoder.flush(max(0.0, deadline - time.monotonic())) and landed

    def drain(self, timeout: float) -> None:
        """Wait for device values and media; values still on a device after that are lost."""
        deadline = time.monotonic() + timeout
        self._deferred.close(timeout)
        self._encoder.flush(max(0.0, deadline - time.monotonic()))

    def close(self, end: Mapping[str, Any]) -> None:
        """Write the last frame and close the journal."""
        self._encoder.close()
        self._writer.close(end)

    def after_fork_in_child(self) -> None:
        """Continue in a journal of this process's own, opened on first use."""
        self._writer.after_fork_in_child(self.member.worker_header())
        self._unannounced.clear()
        self._announcing = threading.RLock()
        self._deferred.after_fork_in_child()
        self._encoder.after_fork_in_child()
        self.tallies.after_fork_in_child()

    # Late parts: device values and media

    def _lose(self, call: LogCall, keys: Sequence[str], why: str) -> None:
        """Warn about values that will never arrive, and mark them in the journal if it has a row for their call."""
        self.announce()
        names = list(keys)
        notices.once(
            f"lost:{why}",
            f"{len(names)} value(s) ({', '.join(names[:3])}) could not be recorded: {why}. Training continues. "
            "The gap is marked in the journal, and every such value is counted.",
        )
        if call.announced:
            self.lost += len(names)
            lost = {"q": call.seq, "s": call.step, "t": call.time_ns, "keys": names, "why": why}
            self._writer.append((Kind.LOST, lost), keep=True)

    def _lose_media(self, call: LogCall, keys: Sequence[str], why: str) -> None:
        """Count a call as dropped if its media could not be stored."""
        self._lose(call, keys, why)
        self._writer.drop(call)

    def _take_media(self, call: LogCall, media: dict[str, Any]) -> None:
        """Encode media in the background; those still on a device are copied first, and encoded when all parts have landed."""
        items = [item for value in media.values() for item in (value if isinstance(value, list) else [value])]
        waiting = [part for item in items for part in item.waiting()]
        if not waiting:
            self._encoder.put(call, media)
            return
        left = len(waiting)

        def landing(part: Any) -> Callable[[LogCall, dict[str, Any]], None]:
            def land(_call: LogCall, values: dict[str, Any]) -> None:
                nonlocal left
                part.resolve(host_array(values[""]))
                left -= 1
                if not left:
                    self._encoder.put(call, media)

            return land

        launched = [(part, self._deferred.launch_array(part.pending)) for part in waiting]
        refused = next((what for _, what in launched if isinstance(what, str)), None)
        if refused is not None:  # an incomplete image is useless: all media of the call are lost together, and marked
            self._lose(call, list(media), refused)
            return
        for part, what in launched:
            self._deferred.watch(call, (), what, landing(part))

    def _media_landed(self, call: LogCall, entries: Mapping[str, Any]) -> None:
        self._writer.append((Kind.VALUES, {"q": call.seq, "s": call.step, "t": call.time_ns, "v": dict(entries)}), keep=True)


def _kwargs(given: Any) -> dict[str, Any] | None:
    """Return the arguments for each tracker, by name, as plain data."""
    found = plain(given)
    if not isinstance(found, dict) or not all(isinstance(one, dict) for one in found.values()):
        notices.once(
            "log_kwargs",
            "log(log_kwargs=…) takes a dict of dicts, one for each tracker. It is ignored; the values are recorded. "
            'Write log_kwargs={"wandb": {...}}.',
        )
        return None
    return found


def host_array(value: Any) -> Any:
    """Return a landed tensor or JAX array as numpy; bfloat16 and float8, which numpy lacks, become float32."""
    import numpy as np

    if hasattr(value, "is_cuda"):
        value = value.cpu()
        return value.float().numpy() if value.dtype.is_floating_point and value.dtype.itemsize < 4 else value.numpy()
    return np.asarray(value)
