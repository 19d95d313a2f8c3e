"""Continuous, nearly free profiling of operators: counted in C++ (native/), read here, stored in the run.

The table is a memory-mapped file in the run, so nothing is lost when the process is killed; from time to time, and at the
end, it is copied to the journal, which is what gets forwarded. Without the native part, torch.profiler windows are used.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..errors import SettingError, notices
from ..settings import options_of
from . import api_usage, labels, op_table, profiler_session, step_hooks, trace, worker_tables
from .native import library as native

FOLDER = "ops"
FIRST_SECONDS, SNAPSHOT_SECONDS = 5.0, 60.0
BYTES_PER_HOUR = 1_000_000
MAX_EVERY = 1_000_000_000
EARLY_STEP = 3  # observed in every run, so that a short one has a profile; the two steps before it are warm-up
IDLE_SECONDS, MOMENT_MS = 5.0, 10  # a program without optimizer steps is observed for 10 ms of each second

Write = Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True)
class OpsOptions:
    """The options of init(ops=…): `window` steps out of every `every` are observed in full, or calls are sampled.

    `ranges`: observe the user's own ranges at every step, not only in windows.
    """

    window: int = 1
    every: int = 100
    sampling: float | None = None
    inputs: bool = False
    ranges: bool = False
    usage: bool = True
    rows: int = op_table.MAX_ROWS
    native: bool | str = True


def check(given: Any) -> OpsOptions | None:
    """Return the options of init(ops=…); None for no profile."""
    options = options_of(OpsOptions, "ops", given)
    if options is None:
        return None
    wrong = _wrong(options)
    if wrong:
        raise SettingError(f"init(ops={dict(given)!r}): {wrong}. The run was not started. See docs/operator-profile.md.")
    return options


def _wrong(options: OpsOptions) -> str:
    for name in ("window", "every", "rows"):
        if type(getattr(options, name)) is not int:
            return f"{name} must be a whole number"
    for name in ("inputs", "ranges", "usage"):
        if not isinstance(getattr(options, name), bool):
            return f"{name} must be True or False"
    if not 1 <= options.window <= options.every <= MAX_EVERY:
        return f"window must be 1 or more and not above every, and every at most {MAX_EVERY:,}"
    if options.sampling is not None and (type(options.sampling) not in (int, float) or not 0.0 < options.sampling <= 1.0):
        return "sampling must be a number above 0 and at most 1"
    if options.sampling is not None and options.inputs:
        return "inputs are recorded in windows only, so not with sampling"
    if options.native not in (True, False, "force"):
        return "native must be True, False or 'force'"
    if options.native is False and (options.ranges or options.sampling is not None):
        return "without the native part there are windows alone: neither ranges at every step nor sampling"
    return "" if 1 <= options.rows <= op_table.MAX_ROWS else f"rows must be from 1 to {op_table.MAX_ROWS}"


class OpCounter(Protocol):
    """A counter of operators: the native table, or profiler windows."""

    id: str

    def start(self) -> None: ...
    def snapshot(self) -> dict[str, Any]: ...
    def stop(self) -> None: ...
    def done(self) -> None: ...


class NativeTable:
    """The native library, counting into a file in the run."""

    def __init__(self, library: Any, options: OpsOptions, folder: Path | None, rank: int, node: str) -> None:
        self.library, self.options, self.folder, self.rank, self.node = library, options, folder, rank, node
        self.id = ""
        self.file: Path | None = None
        self.pid = os.getpid()
        self._unhook: Callable[[], None] | None = None

    def start(self) -> None:
        options = self.options
        place = b"" if self.folder is None else os.fsencode(self.folder)
        how = self.library.ff_start(
            place,
            self.node.encode()[:63],
            self.rank,
            options.rows,
            options.every,
            options.window,
            EARLY_STEP,
            options.sampling or 0.0,
            options.ranges,
        )
        self._unhook = step_hooks.install(self.library)
        facts = op_table.parse(op_table.take(self.library)).facts
        self.id = facts["id"]
        if how == 2 and self.folder is not None:
            self.file = self.folder / f"{self.rank}-{self.id}.ops"
        elif self.folder is not None:
            notices.once(
                "ops file",
                f"no file for the operator table could be made in {self.folder}. The profile is kept in memory and in the "
                "journal: up to a minute of it is lost if the process is killed. Free space or make the directory writable.",
            )

    def snapshot(self) -> dict[str, Any]:
        table = op_table.take(self.library)
        worker_tables.say_full(op_table.parse(table[: op_table.USAGE]).facts)
        return {"id": self.id, "table": op_table.pack(table)}

    def stop(self) -> None:
        if self._unhook is not None:
            self._unhook()
        self.library.ff_stop()

    def done(self) -> None:
        """Delete the file: the journal has its rows now."""
        if self.file is not None:
            with contextlib.suppress(OSError):
                self.file.unlink()
        self.library.ff_detach()


class OpsProbe:
    """The probe around a counter: copies it to the journal, serves trace requests, folds in workers that ended."""

    def __init__(
        self,
        counter: OpCounter,
        write: Write,
        options: OpsOptions,
        *,
        folder: Path,
        rank: int,
        clock: Callable[[], float] = time.monotonic,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self.counter, self._write, self._options, self._clock = counter, write, options, clock
        self._library = counter.library if isinstance(counter, NativeTable) else None
        self._leave = leave
        self._refreshed = b""
        self._next = clock() + FIRST_SECONDS
        self._began = clock()
        self._workers = worker_tables.Workers(folder, rank)
        self._trace = trace.Requests(folder, rank, write)
        self._compile_hooks: Callable[[], None] | None = None
        self._tell_compiling()  # at once if the compiler is loaded: it may start before the first tick

    def tick(self) -> None:
        """Run everything that is due; called every second, off the training thread."""
        self._tell_compiling()
        idle = self._clock() - self._began > IDLE_SECONDS and not self._options.sampling
        if self._library is not None and idle and not self._library.ff_steps():
            self._library.ff_moment(MOMENT_MS)
        self._hand_over_usage()
        self._trace.look()
        if self._clock() >= self._next:
            self.snapshot()

    def snapshot(self, *, last: bool = False) -> bool:
        """Copy the table to the journal; the larger it is, the later the next copy, to stay below a megabyte per hour."""
        facts = self.counter.snapshot()
        kept = self._write({"event": "ops", **facts})
        size = len(facts["table"]) + self._fold_workers(living=last)
        self._next = self._clock() + max(SNAPSHOT_SECONDS, 3600.0 * size / BYTES_PER_HOUR)
        return kept

    def refresh(self) -> None:
        """Copy a table that is only in memory to the journal, so that the run can be read now; a native table is a file."""
        if self._library is None:
            facts = self.counter.snapshot()
            if facts["table"] != self._refreshed:
                self._refreshed = facts["table"]
                self._write({"event": "ops", **facts})

    def _fold_workers(self, *, living: bool) -> int:
        if not self.counter.id or not self._workers.sweep(self.counter.id, living=living):
            return 0
        facts = self._workers.event(self.counter.id)
        if self._write({"event": "ops", **facts}):
            self._write_usage(self._workers.usage)
            self._workers.forget()
        return len(facts["table"])

    def _hand_over_usage(self) -> None:
        if self._options.usage:
            self._write_usage(api_usage.take())

    def _write_usage(self, records: list[dict[str, Any]]) -> None:
        for record in records if self._options.usage else ():
            self._write({"event": "usage", **record})

    def _tell_compiling(self) -> None:
        """Count calls made by the compiler itself separately: a thousand calls that belong to no step."""
        library, module = self._library, sys.modules.get("torch._dynamo.callback")
        handler = getattr(module, "callback_handler", None)  # None while the module is still being imported
        if library is None or handler is None or self._compile_hooks is not None:
            return
        began = handler.register_start_callback(lambda _args: library.ff_compiling(1))
        ended = handler.register_end_callback(lambda _args: library.ff_compiling(-1))

        def remove() -> None:
            with contextlib.suppress(ValueError):  # the user may have cleared torch's list
                handler.remove_start_callback(began)
                handler.remove_end_callback(ended)

        self._compile_hooks = remove

    def stop(self, timeout: float = 0.0) -> None:
        """Remove the callbacks and write the last snapshot."""
        global _active  # noqa: PLW0603 - torch has one table of callbacks per process
        self.counter.stop()
        if self._compile_hooks is not None:
            self._compile_hooks()
        self._trace.stop(timeout / 2)
        self._leave()
        self._hand_over_usage()
        if self.snapshot(last=True):
            self.counter.done()
        _active = None


_active: OpsProbe | None = None
_forks_watched = False


def start(options: OpsOptions, write: Write, *, path: Path, rank: int, node: str, local: bool = True) -> OpsProbe | None:
    """Start the profile of a run in this process; return None, with a warning, if that is not possible."""
    global _active  # noqa: PLW0603 - torch has one table of callbacks per process
    if _active is not None:
        notices.once(
            "ops twice",
            "another run of this process has the operator profile. This run goes without one. Finish the other first.",
        )
        return None
    if options.usage:
        api_usage.watch()  # before torch is imported: the import is the first event
    if native.torch_folder() is None and "torch" not in sys.modules:
        notices.once(
            "ops torch",
            "ops=True profiles PyTorch, which is not installed. The run goes without a profile. Install torch or drop ops.",
        )
        return None
    folder = path / FOLDER
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    counter = _counter(options, folder if local else None, rank, node)
    leave = profiler_session.watch()  # its step listener must be the first
    counter.start()
    labels.renew()
    _active = OpsProbe(counter, write, options, folder=folder, rank=rank, leave=leave)
    _watch_forks()
    return _active


def refresh() -> None:
    """Write the current profile of this process to its run."""
    if _active is not None:
        _active.refresh()


def _counter(options: OpsOptions, folder: Path | None, rank: int, node: str) -> OpCounter:
    from .profiler_windows import ProfilerWindows

    def windows() -> ProfilerWindows:
        return ProfilerWindows(options.window, options.every, inputs=options.inputs, rank=rank, node=node, rows=options.rows)

    if options.native is False:
        return windows()
    try:
        library = native.bind(force=options.native == "force")
        native.describe_inputs(library, options.inputs)
    except native.NativeUnavailable as error:
        notices.once(
            "ops native",
            f"the native operator probe is off: {error}. The profile comes from torch.profiler windows instead: one step of "
            f"{options.every} is slower, labels are not seen{', and sampling is not possible' if options.sampling else ''}. "
            "See docs/operator-native.md for what it needs.",
        )
        return windows()
    return NativeTable(library, options, folder, rank, node)


def _watch_forks() -> None:
    global _forks_watched  # noqa: PLW0603 - os.register_at_fork cannot be undone
    if not _forks_watched:
        os.register_at_fork(after_in_child=_after_fork_in_child)
        _forks_watched = True


def _after_fork_in_child() -> None:
    """Make a forked child count into its own table; the parent's probe takes care of that file."""
    global _active  # noqa: PLW0603 - as above
    profiler_session.after_fork_in_child()
    if _active is None:
        return
    library = native.current()
    if library is not None and isinstance(_active.counter, NativeTable):
        library.ff_child()
    _active = None
