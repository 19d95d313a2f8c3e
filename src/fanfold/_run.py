"""init() and Run: the user's verbs. Each call becomes frames in this process's own journal, and nothing else happens here.

The fast path of `Run.log` is one dictionary look-up, one struct.pack, one crc and one write(2).
"""

from __future__ import annotations

import itertools
import os
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from zlib import crc32

from . import lifecycle
from ._config import Config, as_mapping, plain
from ._join import Place, find_place, open_writer
from ._summary import Metric
from .deferred import Call, Deferred
from .encoder import Encoder
from .errors import RunError, guard, notices
from .journal import Kind, blobs
from .journal.format import Layout
from .keeper import Keeper
from .mask import mask
from .settings import resolve
from .values import Parts, clean_text, code_of, split

time_ns = time.time_ns
os_write = os.write
FACTS_SECONDS = 2.0
MAX_STEP = (1 << 63) - 1
MAX_TEXTS = 128
MAX_PLANS = 256
_PENDING, _LATE = int(Layout.PENDING), int(Layout.LATE)


class Plan(NamedTuple):
    """How a call of a known signature splits: scalars on one device, and numbers that are here already."""

    device: tuple[str, ...]
    numbers: tuple[str, ...]
    types: str


class Run:
    """One experiment, seen from one of its processes. Made by fanfold.init()."""

    def __init__(self, place: Place, options: Mapping[str, Any]) -> None:
        self.id = place.run_id
        self.project = place.project
        self.path = place.path
        self.rank = place.me.rank
        self.world_size = place.me.world_size
        self.attempt = place.ordinal
        self.group: str | None = options["group"]
        self.strict: bool = options["strict"]
        self.quiet: bool = options["quiet"]
        self._place = place
        self._writer = open_writer(place, options)
        self.name = str(place.name)
        self._seq = itertools.count(1)
        self._given = self._counted = place.first_step - 1
        self._auto = itertools.count(place.first_step)
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._status = "running"
        self._late_calls = 0
        self._media_parts = 0
        self._worker = False
        self._finish_lock = threading.RLock()  # re-entrant: a signal handler may finish a run that is being finished
        self._deferred = Deferred(self._lose)
        self._encoder = Encoder(self.path, self._media_landed)
        self.config = Config(as_mapping(options["config"]), self._config_changed)
        self._tags: tuple[str, ...] = tuple(options["tags"])
        self._summary: dict[str, Any] = {}
        self._stoppers: list[Callable[[float], None]] = []
        self._info(self._first_facts(options))
        self._keeper = Keeper([self._writer.rescue, self._writer.sync, *place.chores], self._beat)

    def _first_facts(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Say what is known at the start; a resumed run keeps what it is not told anew."""
        facts: dict[str, Any] = {"group": self.group, "tags": list(self._tags), "notes": options["notes"]}
        facts |= {"config": mask(plain(self.config)), "name": options["name"]}
        if self._place.resumed:
            return {name: fact for name, fact in facts.items() if fact}
        return {**facts, "name": self.name}

    # Logging

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        *,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        commit: bool | None = None,
    ) -> None:
        """Record values under a step (default: the number of this call). Returns when they are safe from kill -9.

        Numbers on a device are copied without a sync and recorded when they land. `log_kwargs` goes to trackers by
        name. Nothing is refused for its step: it may be late, repeated or out of order.
        """
        try:
            sheet = self._writer.sheet
            signature = (*values, *map(type, values.values()))
            packer = sheet.shapes[signature]  # type: ignore[union-attr]
            if step is None:
                step = self._next_step()
                body = packer.pack(packer.id, time_ns(), step, *values.values())
            else:
                body = packer.pack(packer.id, time_ns(), step, *values.values())
                if step > self._given:  # noqa: PLR1730 - a call of max() costs as much as the crc
                    self._given = step
            if log_kwargs is not None or commit is not None:
                raise KeyError
        except (KeyError, AttributeError, TypeError, ValueError, OverflowError, struct.error):
            self._log_slowly(values, step, log_kwargs, commit)
            return
        data = packer.head + crc32(body, packer.crc).to_bytes(4, "little") + body
        try:
            done = os_write(sheet.fd, data)  # type: ignore[union-attr]
        except OSError as error:
            done = -1
            self._writer.fail(sheet, error)  # type: ignore[arg-type]
        if done != len(data):
            self._recover(sheet, done, values, step)

    def _next_step(self) -> int:
        """Count this call, going on from the highest step given. Threads that leave out the step get different numbers."""
        step = next(self._auto)
        if step <= self._given:
            self._auto = itertools.count(int(self._given) + 1)
            step = next(self._auto)
        self._counted = min(step, MAX_STEP)
        return self._counted

    @property
    def _high(self) -> int:
        return max(int(self._given), self._counted)

    def _recover(self, sheet: Any, done: int, values: Mapping[str, Any], step: int) -> None:
        if done >= 0:
            self._writer.fail(sheet, OSError(f"only {done} bytes of a frame were written (disk full?)"))
        self._log_slowly(values, step, None, None)

    def _log_slowly(
        self,
        values: Mapping[str, Any],
        step: Any,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None,
        commit: bool | None,
    ) -> None:
        """Log anything: new shapes, nested dicts, texts, media, device values, a broken journal, a finished run."""
        if self._writer.closed:
            notices.once(
                f"finished:{self.id}",
                f"log() was called after run {self.name} had finished; the values are dropped and counted. "
                "Log before finish(), or start another run with fanfold.init().",
            )
            return
        if commit is not None:
            notices.once("commit", "log(commit=…) is wandb's; fanfold records every call at once. The values are recorded.")
        if self._plans and log_kwargs is None and self._log_by_plan(values, step):
            return
        now = time_ns()
        parts = split(values, strict=self.strict)
        number = self._step(step)
        signature = (*values, *map(type, values.values())) if parts.direct else None
        if parts.device and signature and not parts.texts and not parts.media and len(self._plans) < MAX_PLANS:
            self._plans[signature] = Plan(tuple(parts.device), tuple(parts.numbers), "".join(parts.types))
        self._write_parts(
            Call(0, number, now), parts, signature if parts.plain else None, plain(log_kwargs) if log_kwargs else None
        )

    def _log_by_plan(self, values: Mapping[str, Any], step: Any) -> bool:
        """Take the short way for a call like an earlier one: ten device scalars cost about thirty microseconds."""
        try:
            signature = (*values, *map(type, values.values()))
            plan = self._plans[signature]
            launched = self._deferred.launch_alike([values[key] for key in plan.device])
        except (KeyError, TypeError, AttributeError):
            return False
        if launched is None:
            return False
        call = Call(next(self._seq), self._step(step), time_ns())
        numbers = {key: values[key] for key in plan.numbers}
        self._writer.row(numbers, plan.types, time_ns=call.time_ns, step=call.step, layout=_PENDING, call=(call.seq, 1))
        self._deferred.watch(call, plan.device, launched, self._landed)
        return True

    def _step(self, step: Any) -> int:
        """Return the step as an integer, whatever was given."""
        if step is None:
            return self._next_step()
        try:
            number = int(step)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            number = None
        if number is None or not -(1 << 63) <= number < 1 << 63:
            notices.once(f"step:{type(step).__name__}", f"step={step!r} is no 64-bit integer; the call's number is used instead.")
            return self._next_step()
        if number != step:
            notices.once(
                "step:fraction",
                f"step={step!r} is no whole number and was cut to {number}. Log it as a value to keep it.",
            )
        self._given = max(self._given, number)
        return number

    def _write_parts(self, call: Call, parts: Parts, signature: tuple[Any, ...] | None, kwargs: Any) -> None:
        """Write what is there now in one write(2), announcing the parts that come later."""
        launched = self._deferred.launch(parts.device) if parts.device else []
        late = len(launched) + bool(parts.media)
        head: tuple[int, ...] = ()
        if late:
            call = call._replace(seq=next(self._seq))
            head = (call.seq, late)
        beside: list[tuple[Kind, Any]] = []
        if parts.texts or kwargs:
            texts = list(parts.texts.items())
            for start in range(0, len(texts) or 1, MAX_TEXTS):  # a frame has a limit, a call has not
                some = dict(texts[start : start + MAX_TEXTS])
                beside.append((Kind.VALUES, {"s": call.step, "t": call.time_ns, "v": some, "k": kwargs}))
        if parts.numbers or late:
            layout = _PENDING if late else 0
            self._writer.row(parts.numbers, "".join(parts.types), time_ns=call.time_ns, step=call.step, layout=layout,
                             call=head, signature=signature, beside=beside)  # fmt: skip
        elif beside:
            self._writer.append(*beside)
        for keys, what in launched:
            self._deferred.watch(call, keys, what, self._landed)
        if parts.media:
            self._take_media(call, parts.media)

    # What comes later: device values and media

    def _landed(self, call: Call, values: Mapping[str, Any]) -> None:
        types = "".join([code_of(type(value)) or "d" for value in values.values()])
        self._writer.row(values, types, time_ns=call.time_ns, step=call.step, layout=_LATE,
                         call=(call.seq,))  # fmt: skip

    def _lose(self, call: Call, keys: Sequence[str], why: str) -> None:
        names = list(keys)
        self._late_calls += len(names)
        notices.once(
            f"lost:{why}",
            f"{len(names)} device value(s) ({', '.join(names[:3])}) could not be recorded: {why}. Training goes on; "
            "the gap is marked in the journal, and every such value is counted.",
        )
        self._writer.append((Kind.LOST, {"q": call.seq, "s": call.step, "t": call.time_ns, "keys": names, "why": why}))

    def _take_media(self, call: Call, media: dict[str, Any]) -> None:
        """Encode media elsewhere; those still on a device are copied first, and encoded when their last part is there."""
        items = [item for value in media.values() for item in (value if isinstance(value, list) else [value])]
        waiting = [part for item in items for part in item.waiting()]
        if not waiting:
            self._encoder.put(call, media)
            return
        left = len(waiting)

        def landing(part: Any) -> Callable[[Call, dict[str, Any]], None]:
            def land(_call: Call, values: dict[str, Any]) -> None:
                nonlocal left
                part.resolve(host_array(values[""]))
                left -= 1
                if not left:
                    self._encoder.put(call, media)

            return land

        launched = [(part, self._deferred.launch_array(part.pending)) for part in waiting]
        refused = next((what for _, what in launched if isinstance(what, str)), None)
        if refused is not None:  # a picture with a hole is no picture: the call's media are lost together, and marked
            self._lose(call, list(media), refused)
            return
        for part, what in launched:
            self._deferred.watch(call, (), what, landing(part))

    def _media_landed(self, call: Call, entries: Mapping[str, Any]) -> None:
        self._writer.append((Kind.VALUES, {"q": call.seq, "s": call.step, "t": call.time_ns, "v": dict(entries)}))

    # Facts about the run

    def _info(self, facts: Mapping[str, Any]) -> None:
        self._writer.append((Kind.INFO, {"t": time_ns(), **facts}))

    def _event(self, name: str, facts: Mapping[str, Any]) -> None:
        self._writer.append((Kind.EVENT, {"t": time_ns(), "event": name, **facts}))

    def _config_changed(self, config: Config) -> None:
        self._info({"config": mask(plain(config))})

    @property
    def tags(self) -> tuple[str, ...]:
        return self._tags

    @tags.setter
    def tags(self, tags: Sequence[str]) -> None:
        self._tags = tuple([tags] if isinstance(tags, str) else tags)
        self._info({"tags": [clean_text(str(tag)) for tag in self._tags]})

    @property
    def status(self) -> str:
        return self._status

    @property
    def summary(self) -> Summary:
        """What each key comes down to, read from the journals; assign to it to add facts of your own."""
        return Summary(self)

    @property
    def is_main_process(self) -> bool:
        return self._place.me.main

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does nothing on other ranks."""
        return function if self.is_main_process else lambda *_args, **_kwargs: None

    def define_metric(
        self, key: str, x: str | None = None, *, summary: str | None = None, step_metric: str | None = None
    ) -> None:
        """Say what a key (or `val/*`) is drawn over, and what it comes down to: last, min, max, mean, sum, count, first, none."""
        metric = Metric.check(key, x or step_metric, summary)
        self._event("metric", {"key": metric.key, **metric.as_dict()})

    def alert(self, title: str, text: str = "", *, level: str = "warning") -> None:
        """Record something a person should see."""
        if level not in ("info", "warning", "error"):
            raise ValueError(f"alert(level={level!r}) is not known. Nothing was recorded. Known: info, warning, error.")
        self._event(
            "alert",
            {"title": clean_text(str(title)), "text": clean_text(str(text)), "level": level, "s": int(self._high)},
        )

    def artifact(self, path: str | os.PathLike[str], name: str | None = None, *, kind: str = "file", **metadata: Any) -> None:
        """Keep a copy of a file, or of every file in a folder, with the run. The same content is stored once."""
        source = Path(path)
        if not source.exists():
            raise FileNotFoundError(f"artifact({os.fspath(path)!r}) does not exist. Nothing was stored.")
        files = sorted(item for item in source.rglob("*") if item.is_file()) if source.is_dir() else [source]
        entries = []
        for item in files:
            blob, size = blobs.put_file(self.path, item)
            inner = item.relative_to(source).as_posix() if source.is_dir() else item.name
            entries.append({"path": clean_text(inner), "blob": blob, "size": size})
        self._event("artifact", {"name": clean_text(name or source.name), "kind": kind, "files": entries,
                                 "metadata": mask(plain(metadata)), "s": int(self._high)})  # fmt: skip

    # The end

    def _beat(self) -> None:
        self._writer.append((Kind.BEAT, [time_ns(), time.monotonic_ns(), int(self._high), self._writer.dropped]))

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until device values and media have landed and all is on the disk; tell whether it is, within `timeout`."""
        deadline = time.monotonic() + (3600.0 if timeout is None else timeout)
        done = self._deferred.flush(max(0.0, deadline - time.monotonic()))
        done = self._encoder.flush(max(0.0, deadline - time.monotonic())) and done
        self._writer.sync()
        for chore in self._place.chores:
            with guard("copy the journal to its directory"):
                chore()
        return done

    def finish(self, timeout: float = 30.0, status: str = "finished", *, exit_code: int | None = None) -> None:
        """End the run in this process. Returns within `timeout`, always."""
        with self._finish_lock:
            if self._status != "running":
                return
            self._status = status if not exit_code else "failed"
        self._end(timeout, self._status, None, exit_code)

    def _end(self, timeout: float, status: str, error: str | None, exit_code: int | None = None, *, close: bool = True) -> None:
        if self._worker:  # a forked child ends its own journal; the run is its parent's to end
            self._end_worker()
            return
        deadline = time.monotonic() + timeout
        self._keeper.stop(min(1.0, timeout))
        for stop in self._stoppers:
            with guard("stop a probe"):
                stop(max(0.0, deadline - time.monotonic()))
        self._deferred.close(max(0.0, deadline - time.monotonic()))
        self._encoder.flush(max(0.0, deadline - time.monotonic()))
        end = self._end_frame(status, error, exit_code)
        if close:
            self._encoder.close()
            self._writer.close(end)
            lifecycle.leave(self)
        else:
            self._writer.append((Kind.END, end))
            self._writer.sync()
        with guard("copy the journal to its directory"):
            self._place.done(close)
        self._say_end(status)

    def _end_frame(self, status: str, error: str | None, exit_code: int | None = None) -> dict[str, Any]:
        return {"t": time_ns(), "status": status, "error": error, "exit_code": exit_code, "high": int(self._high),
                "lost": self._late_calls, "dropped": self._writer.dropped, "said": dict(notices.counts)}  # fmt: skip

    def _say_end(self, status: str) -> None:
        if self._writer.dropped:
            print(
                f"fanfold: {self._writer.dropped} log call(s) of run {self.name} could not be written and are lost.",
                file=sys.stderr,
            )
        if self._place.me.main and not self.quiet:
            print(f"fanfold: run {self.name} {status} · fanfold show {self.id}", file=sys.stderr)

    def end_by_signal(self, status: str, name: str) -> None:
        """Write the last frame from a signal handler; the process is about to die."""
        self._status = status
        self._writer.rescue()
        self._writer.append((Kind.END, {**self._end_frame(status, None), "signal": name}))

    def end_at_exit(self, status: str, error: str | None, exit_code: int) -> None:
        """End an unfinished run at interpreter exit. The journal stays open: other exit handlers may still log."""
        if self._status == "running":
            self._status = status
            self._end(10.0, status, error, exit_code, close=False)

    def after_fork_in_child(self) -> None:
        """Become a worker of the same rank: own journal on first use, no threads, no end of the parent's run."""
        self._worker = True
        self._place.after_fork_in_child()
        self._finish_lock = threading.RLock()
        self._writer.after_fork_in_child(self._place.worker_header())
        self._deferred.after_fork_in_child()
        self._encoder.after_fork_in_child()
        self._keeper = Keeper([], lambda: None)
        self._stoppers = []
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            # Such children leave by os._exit, which runs no atexit handler. Their finalizers are cleared right after the
            # fork, so ours is registered a moment later.
            util.register_after_fork(self, lambda run: util.Finalize(run, run._end_worker, exitpriority=0))  # noqa: SLF001 - ours

    def _end_worker(self) -> None:
        if self._writer.sheet is not None:
            self._encoder.flush(5.0)
            self._writer.close({"t": time_ns(), "status": "finished", "high": int(self._high)})

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.finish()
            return
        with self._finish_lock:
            if self._status != "running":
                return
            self._status = "killed" if isinstance(error, KeyboardInterrupt) else "failed"
        self._end(30.0, self._status, "".join(traceback.format_exception(kind, error, trace)), 1)

    def __repr__(self) -> str:
        return f"<fanfold run {self.name} ({self.id}) of {self.project}: {self._status}, {self.path}>"


class Summary(dict[str, Any]):
    """A run's summary as of now: computed from the journals, plus what the user assigned."""

    def __init__(self, run: Run) -> None:
        from .store import open_run

        self._run = run
        super().__init__({**open_run(run.path).summary, **run._summary})  # noqa: SLF001 - the other half of Run

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def update(self, *args: Any, **kwargs: Any) -> None:
        new = plain(dict(*args, **kwargs))
        super().update(new)
        self._run._summary.update(new)  # noqa: SLF001 - the other half of Run
        self._run._info({"summary": dict(self._run._summary)})  # noqa: SLF001 - the other half of Run


def host_array(value: Any) -> Any:
    """Return a landed tensor or JAX array as numpy; bfloat16 and float8, which numpy lacks, become float32."""
    import numpy as np

    if hasattr(value, "is_cuda"):
        value = value.cpu()
        return value.float().numpy() if value.dtype.is_floating_point and value.dtype.itemsize < 4 else value.numpy()
    return np.asarray(value)


def start(options: Mapping[str, Any]) -> Run:
    """Open a run for this process and start what looks after it."""
    place = find_place(options)
    try:
        run = Run(place, options)
    except OSError as error:
        raise RunError(
            f"no journal can be written in {place.path}: {error.strerror or error}. The run was not started. "
            "Make the directory writable, or choose another with fanfold.init(dir=…) or FANFOLD_DIR."
        ) from error
    lifecycle.enter(run)
    run._keeper.start()  # noqa: SLF001 - the other half of Run
    _start_probes(run, options)
    if place.me.main and not run.quiet:
        again = f", attempt {place.ordinal}" if place.ordinal > 1 else ""
        print(f"fanfold: run {run.name} ({run.id}{again}) → {run.path}", file=sys.stderr)
    return run


def _start_probes(run: Run, options: Mapping[str, Any]) -> None:
    gatherer = threading.Thread(target=_gather, args=(run,), name="fanfold-facts", daemon=True)
    gatherer.start()
    run._stoppers.append(lambda timeout: gatherer.join(min(timeout, FACTS_SECONDS)))  # noqa: SLF001 - the other half of Run
    if options["console"]:
        from .console import Console

        console = Console(run.path, run._place.worker_header("console"))  # noqa: SLF001 - the other half of Run
        console.start()
        run._stoppers.insert(0, console.stop)  # noqa: SLF001 - the other half of Run
    if options["system"] and run._place.me.local_main:  # noqa: SLF001 - the other half of Run
        from .probes.system import SystemProbe

        def write(values: Mapping[str, float]) -> None:
            run._writer.row(values, "d" * len(values), time_ns=time_ns(), step=None, origin="system")  # noqa: SLF001 - as above

        probe = SystemProbe(write, disk_path=str(run.path))
        probe.start()
        run._stoppers.append(lambda timeout: probe.stop(min(timeout, 0.5)))  # noqa: SLF001 - the other half of Run


def _gather(run: Run) -> None:
    """Collect what the run knows of itself, off the training thread: git, packages, hardware."""
    # Media too, though nothing here needs them: a signal handler that logs must not meet a half-imported module later.
    from . import facts, media  # noqa: F401
    from .git import patch as patch_of

    with guard("gather facts about this process"):
        found = facts.gather()
        git = found.get("git")
        if run.is_main_process and isinstance(git, dict) and git.get("dirty"):
            patch, cut = patch_of(git["root"])
            git["patch"] = {"blob": blobs.put(run.path, patch), "size": len(patch), "cut": cut}
        run._info({"facts": plain(found)})  # noqa: SLF001 - the other half of Run


def options_for(project: str | None, *, file: Mapping[str, Any], **given: Any) -> dict[str, Any]:
    """Resolve every option of init() by the one rule: argument, environment, settings file, default."""
    names = (
        "name",
        "group",
        "notes",
        "tags",
        "console",
        "system",
        "durability",
        "strict",
        "resume",
        "quiet",
        "spool",
        "spool_dir",
    )
    options = {name: resolve(name, given.get(name), file=file) for name in names}
    options["project"] = resolve("project", project, file=file)
    options["id"] = resolve("run_id", given.get("id"), file=file)
    options["config"] = given.get("config")
    options["root"] = given["root"]
    return options
