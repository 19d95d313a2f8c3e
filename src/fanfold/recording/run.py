"""Run: its public methods other than log(), and how a run starts and ends. Each call becomes frames in this process's journal."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import RunError, SettingError, clean_text, guard, notices, outcome, shown, verb
from ..facts.mask import mask, mask_traceback
from ..journal import Kind, blobs
from ..plain import plain
from ..settings import MAX_NAMES
from ..threads import Background
from ..values import text_of
from . import lifecycle
from .config import Config
from .history import History
from .join import Place, find_place, open_writer
from .keeper import Keeper
from .options import Options
from .recorder import Recorder
from .summary import Metric, Tallies

time_ns = time.time_ns
FACTS_SECONDS = 2.0

STATUSES = ("finished", "failed", "killed", "preempted")
LEVELS = ("info", "warning", "error")


class Run(Recorder):
    """One experiment, as seen from one of its processes. Created by fanfold.init().

    Methods never raise into training code: a value that cannot be recorded is counted, and logged as a warning once.
    With strict=True the error is raised instead.
    """

    def __init__(self, place: Place, options: Options) -> None:
        self.id = place.run_id
        self.project = place.project
        self.rank = place.me.rank
        self.world_size = place.me.world_size
        self.attempt = place.ordinal
        self._quiet: bool = options.quiet
        self._history = History(place.path, place.me.rank, place.attempt, resumed=place.resumed)
        known = self._history.facts()  # a resumed run starts with its earlier facts and adds to them
        place.name = options.name or known.get("name") or place.name
        super().__init__(open_writer(place, options), place.path, place.first_step, strict=options.strict)
        self._place = place
        self._name = str(place.name)
        self._group: str | None = options.group or known.get("group")
        self._notes: str | None = options.notes or known.get("notes")
        self._tags: tuple[str, ...] = tuple(options.tags or known.get("tags") or ())
        self._status = "running"
        self._worker = False
        self._finish_lock = threading.RLock()  # re-entrant: a signal handler may finish a run that is being finished
        self._verdict: tuple[str, str | None, int | None] = ("running", None, None)  # status, error, exit code
        self._finisher: threading.Thread | None = None  # the thread that ends the run
        self._ended = threading.Event()
        self._end_written = False
        config = {**(known.get("config") or {}), **options.config}
        self.config = Config(config, self._config_changed, strict=self.strict)
        self._summary: dict[str, Any] = dict(known.get("summary") or {})
        self._datasets: dict[str, str] = {}  # name and digest of each artifact of kind "dataset"
        self._tallies = Tallies()
        self._tallies.metrics = known.get("metrics") or {}
        self._writer.counting = self._tallies.counting
        self._stoppers: list[Callable[[float], None]] = []
        self._attached: Any = None
        self._forwarding: Any = None
        self._wanted: dict[str, Any] = {}
        self._info(self._first_facts(options))
        self._keeper = Keeper([self._writer.rescue, self._writer.sync, *place.chores], self._beat)
        self._ending = lifecycle.Ending(self._end_by_signal, self._deliver_here, self._end_at_exit, self._after_fork_in_child)

    def _first_facts(self, options: Options) -> dict[str, Any]:
        """Return the facts known at the start; a resumed run writes only those passed to init()."""
        facts: dict[str, Any] = {"group": self._group, "tags": [text_of(tag) for tag in self._tags], "notes": self._notes}
        facts |= {"config": mask(plain(self.config)), "name": self._name}
        if self._place.resumed:
            return {name: fact for name, fact in facts.items() if getattr(options, name)}
        return facts

    # Facts about the run

    def _info(self, facts: Mapping[str, Any]) -> None:
        self._append(Kind.INFO, {"t": time_ns(), **facts})

    def _event(self, name: str, facts: Mapping[str, Any]) -> None:
        self._append(Kind.EVENT, {"t": time_ns(), "event": name, **facts})

    def _append(self, kind: Kind, facts: dict[str, Any]) -> None:
        """Write facts; those that the disk rejects are kept and written later."""
        if self._writer.closed:
            notices.once(
                f"ended:{self.id}",
                f"run {self._name} was changed after it had finished. The change is not recorded. Make it before finish(), or "
                "edit the run in the dashboard.",
            )
            return
        self._writer.append((kind, facts), keep=True)

    def _config_changed(self, config: Config) -> None:
        self._info({"config": mask(plain(config))})

    @property
    def name(self) -> str:
        return self._name

    @name.setter
    @verb("set the run's name")
    def name(self, name: str) -> None:
        self._name = text_of(name)
        self._info({"name": self._name})

    @property
    def notes(self) -> str | None:
        return self._notes

    @notes.setter
    @verb("set the run's notes")
    def notes(self, notes: str | None) -> None:
        self._notes = None if notes is None else text_of(notes)
        self._info({"notes": self._notes})

    @property
    def group(self) -> str | None:
        return self._group

    @group.setter
    @verb("set the run's group")
    def group(self, group: str | None) -> None:
        self._group = None if group is None else text_of(group)
        self._info({"group": self._group})

    @property
    def tags(self) -> tuple[str, ...]:
        return self._tags

    @tags.setter
    @verb("set the run's tags")
    def tags(self, tags: Sequence[str]) -> None:
        self._tags = tuple(text_of(tag) for tag in ([tags] if isinstance(tags, str) else itertools.islice(tags, MAX_NAMES)))
        self._info({"tags": list(self._tags)})

    @property
    def status(self) -> str:
        return self._status

    @property
    def summary(self) -> Summary:
        """Return the summary of each key logged by this process; assign to it to add entries of your own."""
        return Summary(self)

    @verb("compute the summary", dict)
    def _summarised(self) -> dict[str, Any]:
        latest = {**self._history.latest, **self._writer.latest(), **self._texts}
        return self._tallies.summarise(latest.items(), self._history.tally)

    @verb("add to the summary", dict)
    def _summarise(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        new: dict[str, Any] = plain(dict(*args, **kwargs))
        self._summary.update(new)
        self._info({"summary": dict(self._summary)})
        return new

    @verb("remove from the summary")
    def _unsummarise(self, keys: Sequence[str]) -> None:
        """Remove entries the user assigned. Summaries of logged metrics are computed, and stay."""
        for key in keys:
            self._summary.pop(key, None)
        self._info({"summary": dict(self._summary)})
        if any(key in self._summarised() for key in keys):
            notices.once(
                f"summary:{self.id}",
                "the summary of a logged metric cannot be removed. To leave it out: define_metric(…, summary='none').",
            )

    @property
    def is_main_process(self) -> bool:
        return self._place.me.main

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function itself on the main process, and a function that does nothing on other ranks."""
        return function if self.is_main_process else lambda *_args, **_kwargs: None

    @verb("define a metric")
    def define_metric(
        self, key: str, x: str | None = None, *, summary: str | None = None, step_metric: str | None = None
    ) -> None:
        """Set the x axis of a key (or of `val/*`) and its summary statistic: last, min, max, mean, sum, count, first, none."""
        metric = Metric.check(key, x or step_metric, summary)
        pattern = text_of(metric.key)
        self._event("metric", {"key": pattern, **metric.as_dict()})
        before = {known for known in self._writer.latest() if self._tallies.needs(known)}
        self._tallies.metrics = {**self._tallies.metrics, pattern: metric.as_dict()}
        marks = self._writer.recount()
        for known in self._writer.latest():
            if known not in before and self._tallies.needs(known):
                self._history.uncounted(known, marks)

    @verb("record an alert")
    def alert(self, title: str, text: str = "", *, level: str = "warning") -> None:
        """Record an alert: something a person should see."""
        if level not in LEVELS:
            raise ValueError(f"alert(level={shown(level)}) is not known. Nothing was recorded. Known: {', '.join(LEVELS)}.")
        self._event("alert", {"title": text_of(title), "text": text_of(text), "level": level, "s": int(self._high)})

    @verb("store an artifact")
    def artifact(self, path: str | os.PathLike[str], name: str | None = None, *, kind: str = "file", **metadata: Any) -> None:
        """Keep a copy of a file, or of every file in a folder, with the run. The same content is stored once."""
        source = Path(path)
        if not source.exists() or not os.fspath(path):  # an empty path would be the current directory
            raise FileNotFoundError(f"artifact({os.fspath(path)!r}) does not exist. Nothing was stored.")
        if not source.is_file() and not source.is_dir():
            raise ValueError(f"artifact({os.fspath(path)!r}) is neither a file nor a folder. Nothing was stored.")
        files = sorted(item for item in source.rglob("*") if item.is_file()) if source.is_dir() else [source]
        entries = []
        for item in files:
            blob, size = blobs.put_file(self.path, item)
            inner = item.relative_to(source).as_posix() if source.is_dir() else item.name
            entries.append({"path": clean_text(inner), "blob": blob, "size": size})
        named = text_of(name or source.name)
        self._event("artifact", {"name": named, "kind": text_of(kind), "files": entries,
                                 "metadata": mask(plain(metadata)), "s": int(self._high)})  # fmt: skip
        if kind == "dataset":  # the run's stamps list its datasets: see provenance/record.py
            self._datasets[named] = blobs.digest_of([(str(entry["path"]), str(entry["blob"])) for entry in entries])

    # Trackers

    def _attach(self, chosen: Sequence[Any], options: Options) -> None:
        """Start a relay for each tracker, on global rank 0 only; other ranks just know the names."""
        from ..relay.attach import Attached, check_folds

        self._wanted = {item if isinstance(item, str) else item.name: item for item in chosen}
        fold = check_folds(options.fold)
        if not self.is_main_process:
            return
        attached = Attached(self.path, list(chosen), options.tracker_kwargs, fold, options.relay)
        if fold:
            self._info({"fold": fold})
        attached.start()
        self._attached = attached
        self._keeper.chores.append(attached.look_after)
        if attached.here:
            lifecycle.end_before_libraries()

    @property
    def trackers(self) -> list[str]:
        """Return the names of the trackers this run is sent to."""
        return list(self._wanted)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name, or the library's own object with `unwrap` (under relay="thread").

        On other ranks this is an object of the same class whose methods all do nothing.
        """
        from ..relay.attach import handle

        return handle(name, self._wanted, self._attached, unwrap)

    # Probe results

    @verb("read the operator profile", list)
    def ops(self) -> list[dict[str, Any]]:
        """Return the current operator profile of all processes of the run; see StoredRun.ops."""
        from ..probes import ops
        from ..store import open_run

        ops.refresh()
        return open_run(self.path).ops()

    def _hand_over_usage(self) -> None:
        """Write which APIs were used, immediately: without an operator profile nothing else collects them."""
        from ..probes import api_usage

        for record in api_usage.take():
            self._writer.append((Kind.EVENT, {"event": "usage", **record}), keep=True)

    # The end

    def _beat(self) -> None:
        self._writer.append((Kind.BEAT, [time_ns(), time.monotonic_ns(), int(self._high), self._writer.dropped]))

    @verb("flush the run", bool)
    def flush(self, timeout: float | None = None) -> bool:
        """Wait until device values and media have landed and all is on disk; return whether that is so within `timeout`."""
        deadline = time.monotonic() + (3600.0 if timeout is None else timeout)
        done = self._deferred.flush(max(0.0, deadline - time.monotonic()))
        done = self._encoder.flush(max(0.0, deadline - time.monotonic())) and done
        self._writer.sync()
        for chore in self._place.chores:
            with guard("copy the journal to its directory"):
                chore()
        return done

    @verb("finish the run")
    def finish(self, timeout: float = 30.0, status: str = "finished", *, exit_code: int | None = None) -> None:
        """End the run in this process. Always returns within `timeout`."""
        status = "failed" if outcome(lambda: bool(exit_code))[0] else self._known_status(status)
        seconds, _ = outcome(lambda: float(timeout))
        code, _ = outcome(lambda: None if exit_code is None else max(min(int(exit_code), 1 << 31), -(1 << 31)))
        if self._claim_end(status, None, code):
            self._end(30.0 if seconds is None else seconds)

    def _claim_end(self, status: str, error: str | None, exit_code: int | None) -> bool:
        """Set how the run ended; return False if another caller has already done so, and will write the end."""
        with self._finish_lock:
            if self._status != "running":
                return False
            self._verdict = (status, error, exit_code)
            self._finisher = threading.current_thread()
            self._status = status
            return True

    def _known_status(self, status: str) -> str:
        known = "finished"
        with guard("end the run with that status", strict=self.strict):
            if status not in STATUSES:
                raise SettingError(
                    f"finish(status={shown(status)}) is not known, and the run counts as finished. Known: {', '.join(STATUSES)}."
                )
            known = status
        return known  # noqa: RET504 - the guard may have caught the error

    @verb("end the run")
    def _end(self, timeout: float, *, close: bool = True) -> None:
        """Write the end claimed by _claim_end(), and wait for the trackers."""
        try:
            if self._worker:  # a forked child ends its own journal; only the parent ends the run
                self._end_worker()
            else:
                self._write_end(time.monotonic() + timeout, close=close)
                if close:
                    lifecycle.leave(self._ending)
        finally:
            self._ended.set()

    def _write_end(self, deadline: float, *, close: bool) -> None:
        timeout = max(0.0, deadline - time.monotonic())
        with guard("stop the keeper"):
            self._keeper.stop(min(1.0, timeout))
        for stop in self._stoppers:
            with guard("stop a probe"):
                stop(max(0.0, deadline - time.monotonic()))
        with guard("wait for device values and media"):
            self._deferred.close(max(0.0, deadline - time.monotonic()))
            self._encoder.flush(max(0.0, deadline - time.monotonic()))
        end = self._end_frame(*self._verdict)
        if close:
            self._encoder.close()
            self._writer.close(end)
        else:
            self._writer.end(end)
            self._writer.sync()
        self._end_written = True
        with guard("copy the journal to its directory"):
            self._place.done(close)
        left = (
            self._attached.wait(max(0.0, deadline - time.monotonic())) if self._attached is not None and not self._worker else []
        )
        left += self._attached.restarted() if self._attached is not None and not self._worker else []
        if self._forwarding is not None:
            left += self._forwarding.wait(self.path, self.rank, max(0.0, deadline - time.monotonic()))
        self._say_end(self._verdict[0], left)

    def _end_frame(self, status: str, why: str | None, exit_code: int | None = None) -> dict[str, Any]:
        """Return the last frame; `why` is the error of a failed run, or the reason one stopped early."""
        name, why = "reason" if status == "finished" else "error", why and mask_traceback(why)
        known = {"t": time_ns(), "status": status, name: why, "exit_code": exit_code}
        counts = {"lost": self._lost, "dropped": self._writer.dropped, "said": dict(notices.counts)}
        return {**known, "high": int(self._high), **counts}

    def _say_end(self, status: str, left: Sequence[str] = ()) -> None:
        for line in left:
            print(f"fanfold: {line}", file=sys.stderr)
        if self._writer.dropped:
            print(
                f"fanfold: {self._writer.dropped} log call(s) of run {self.name} could not be written and are lost.",
                file=sys.stderr,
            )
        if self._place.me.main and not self._quiet:
            print(f"fanfold: run {self.name} {status} · fanfold show {self.id}", file=sys.stderr)

    def _end_by_signal(self, status: str, name: str) -> None:
        """Write the last frame from a signal handler; the process is about to die."""
        if self._end_written:
            return
        self._status = status
        self._writer.end({**self._end_frame(status, None), "signal": name})

    def _end_at_exit(self, status: str, error: str | None, exit_code: int) -> None:
        """End an unfinished run at interpreter exit. The journal stays open: other exit handlers may still log."""
        here = self._attached is not None and self._attached.here  # a relay thread in this process does not outlive it
        timeout = 30.0 if here else 10.0
        if self._claim_end(status, error, exit_code):
            self._end(timeout, close=False)
        elif self._finisher is not None and self._finisher is not threading.current_thread() and self._finisher.is_alive():
            # A daemon thread (Ray Tune runs a trial in one) is finishing the run, and would die with the interpreter.
            self._ended.wait(timeout)
        elif self._finisher is not None and not self._end_written:
            self._end(timeout, close=False)  # the thread that was finishing the run was interrupted

    def _deliver_here(self, timeout: float) -> None:
        """Wait for trackers served from this process, which is about to die; those in their own processes continue."""
        if self._attached is not None and not self._worker:
            self._attached.wait_here(timeout)

    def _after_fork_in_child(self) -> None:
        """Become a worker of the same rank: its own journal on first use, no threads, and it never ends the parent's run."""
        self._worker = True
        self._place.after_fork_in_child()
        self._finish_lock = threading.RLock()
        self._ended = threading.Event()
        self._writer.after_fork_in_child(self._place.worker_header())
        self._deferred.after_fork_in_child()
        self._encoder.after_fork_in_child()
        self._tallies.after_fork_in_child()
        self._keeper = Keeper([], lambda: None)
        self._stoppers = []
        util = sys.modules.get("multiprocessing.util")
        if util is not None:
            # multiprocessing children leave through os._exit, which runs no atexit handler. Their finalizers are cleared right
            # after the fork, so ours is registered a moment later.
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
        status, text = lifecycle.judge(error)
        if self._claim_end(status, text, None if status == "finished" else 1):
            self._end(30.0)

    def __repr__(self) -> str:
        return f"<fanfold run {self.name} ({self.id}) of {self.project}: {self._status}, {self.path}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        from ..store import open_run

        return {**open_run(self.path)._repr_mimebundle_(), "text/plain": repr(self)}


class Summary(dict[str, Any]):
    """A snapshot of a run's summary: the computed summary of each key, plus what the user assigned."""

    def __init__(self, run: Run) -> None:
        self._run = run
        super().__init__({**run._summarised(), **run._summary})  # noqa: SLF001 - same module

    def __setitem__(self, key: str, value: Any) -> None:
        with guard("add to the summary", strict=self._run.strict):
            self.update({key: value})

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(self._run._summarise(*args, **kwargs))  # noqa: SLF001 - same module

    def __delitem__(self, key: str) -> None:
        with guard("remove from the summary", strict=self._run.strict):
            self._run._unsummarise([key])  # noqa: SLF001 - same module
            super().__delitem__(key)

    def pop(self, key: str, *default: Any) -> Any:
        value = super().get(key, *default)
        if key in self:
            del self[key]
        return value

    def clear(self) -> None:
        with guard("clear the summary", strict=self._run.strict):
            self._run._unsummarise(list(self))  # noqa: SLF001 - same module
            super().clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # a copy does not belong to the run


def start_alone(options: Options) -> Run:
    """Open a run for this process only, with its trackers but without probes; reporting callbacks write to it."""
    chosen = _chosen_trackers(options)
    run = Run(find_place(options, alone=True), options)
    lifecycle.enter(run._ending)  # noqa: SLF001 - same module
    run._keeper.start()  # noqa: SLF001 - same module
    if chosen:
        run._attach(chosen, options)  # noqa: SLF001 - same module
    return run


def start(options: Options, *, alone: bool = False) -> Run:
    """Open a run for this process and start its background threads and probes; `alone`: without the other ranks."""
    energy = _energy_arguments(options)
    ops = _ops_options(options)
    chosen = _chosen_trackers(options)  # first: an unknown name or a missing library fails here, before anything is written
    place = find_place(options, alone=alone)
    try:
        run = Run(place, options)
    except OSError as error:
        raise RunError(
            f"no journal can be written in {place.path}: {error.strerror or error}. The run was not started. "
            "Make the directory writable, or choose another with fanfold.init(dir=…) or FANFOLD_DIR."
        ) from error
    lifecycle.enter(run._ending)  # noqa: SLF001 - same module
    run._keeper.start()  # noqa: SLF001 - same module
    _start_probes(run, options)
    if energy is not None and place.me.local_main:
        _start_energy(run, energy)
    if ops is not None:
        _start_ops(run, ops)
    if options.stamp:
        from ..provenance import automatic

        run._stoppers.append(automatic.start(run))  # noqa: SLF001 - same module
    if chosen:
        run._attach(chosen, options)  # noqa: SLF001 - same module
    if options.server and place.me.local_main:
        with guard("start the forwarder", strict=options.strict):
            from ..fleet.destination import destination
            from ..fleet.launch import Forwarding

            gateway = destination(options.file)
            if gateway is not None:
                run._forwarding = Forwarding(options.root, gateway)  # noqa: SLF001 - same module
    if place.me.main and not options.quiet:
        again = f", attempt {place.ordinal}" if place.ordinal > 1 else ""
        print(f"fanfold: run {run.name} ({run.id}{again}) → {run.path}", file=sys.stderr)
    return run


def _chosen_trackers(options: Options) -> list[Any]:
    if not options.trackers and not options.fold and options.relay == "process":
        return []
    from ..relay.attach import check
    from ..relay.attach import resolve as resolve_trackers

    chosen = resolve_trackers(options.trackers)
    check(chosen, options.tracker_kwargs, options.fold, options.relay)
    return chosen


def _start_probes(run: Run, options: Options) -> None:
    gatherer = Background(lambda: _gather(run), "facts", lambda: None)
    gatherer.start()
    run._stoppers.append(lambda timeout: gatherer.join(min(timeout, FACTS_SECONDS)))  # noqa: SLF001 - same module
    if options.console:
        from .console import Console

        console = Console(run.path, run._place.worker_header("console"))  # noqa: SLF001 - same module
        console.start()
        run._stoppers.insert(0, console.stop)  # noqa: SLF001 - same module
    if options.system and run._place.me.local_main:  # noqa: SLF001 - same module
        from ..probes.system import SystemProbe

        def write(values: Mapping[str, float]) -> None:
            run._writer.row(values, "d" * len(values), time_ns=time_ns(), step=None, origin="system")  # noqa: SLF001 - as above

        probe = SystemProbe(write, disk_path=str(run.path))
        probe.start()
        run._stoppers.append(lambda timeout: probe.stop(min(timeout, 0.5)))  # noqa: SLF001 - same module


def _energy_arguments(options: Options) -> dict[str, Any] | None:
    """Return CodeCarbon's arguments if energy is measured: by its own option, or because it is named among the trackers."""
    if not options.energy and not options.trackers:
        return None
    from ..probes import energy

    if not (options.energy or energy.named(options.trackers)):
        return None
    arguments = dict(options.tracker_kwargs.get(energy.NAME, {}))
    energy.check(arguments)
    return arguments


def _ops_options(options: Options) -> Any:
    """Return the operator profile's options, checked before anything is written; None for no profile."""
    if not options.ops and options.ops != {}:  # an empty dict means the default options
        return None
    from ..probes import ops

    return ops.check(options.ops)


def _start_ops(run: Run, options: Any) -> None:
    from ..probes import ops
    from ..provenance import automatic

    def write(facts: Mapping[str, Any]) -> bool:
        kept = run._writer.append((Kind.EVENT, {"t": time_ns(), **facts}))  # noqa: SLF001 - same module
        if facts["event"] == "ops":  # the native library stamps files saved by C++: each snapshot updates its step
            with guard("bring the stamp of exported files up to date"):
                automatic.refresh()
        return kept

    place = run._place  # noqa: SLF001 - same module
    local = place.spool is None  # the table is written many times a second: never over a network filesystem
    with guard("profile operators", strict=run.strict):  # importing torch may fail
        probe = ops.start(options, write, path=run.path, rank=run.rank, node=place.me.node, local=local)
        if probe is not None:
            run._keeper.chores.append(probe.tick)  # noqa: SLF001 - same module
            run._stoppers.insert(0, probe.stop)  # noqa: SLF001 - same module


def _start_energy(run: Run, arguments: Mapping[str, Any]) -> None:
    from ..probes.energy import STOP_SECONDS, EnergyProbe

    def write(values: Mapping[str, float]) -> None:
        # Written at the run's current step, so that trackers plot it beside the loss.
        step = max(run._high, 0)  # noqa: SLF001 - same module
        run._writer.row(values, "d" * len(values), time_ns=time_ns(), step=step, origin="energy")  # noqa: SLF001 - as above

    probe = EnergyProbe(write, arguments=arguments, log=run.path / "probes" / f"energy-{run.rank}.log")
    probe.start()
    run._stoppers.append(lambda timeout: probe.stop(min(timeout, STOP_SECONDS)))  # noqa: SLF001 - same module


def _gather(run: Run) -> None:
    """Collect facts about the run off the training thread: git, packages, hardware."""
    # Import media too, though it is not needed here: a signal handler that logs must never meet a half-imported module.
    from .. import media  # noqa: F401
    from ..facts import collect

    with guard("gather facts about this process"):
        found = collect.gather()
        if run.is_main_process:
            with guard("keep the code of this run"):
                _keep_code(run.path, found)
        run._info({"facts": plain(found)})  # noqa: SLF001 - same module


def _keep_code(path: Path, facts: dict[str, Any]) -> None:
    """Save code that is not in the commit: the patch of tracked files, and untracked source files."""
    from ..facts.collect import entry_script
    from ..facts.git import patch as patch_of
    from ..facts.git import sources

    git = facts.get("git") or {}
    if git and not git.get("dirty"):
        return
    if git:
        patch, cut = patch_of(git["root"])
        git["patch"] = {"blob": blobs.put(path, patch), "size": len(patch), "cut": cut}
    kept, more = sources(git.get("root"), entry_script())
    if kept or more:
        files = [{"path": clean_text(name), "blob": blobs.put(path, text), "size": len(text)} for name, text in kept]
        facts["code"] = {"files": files, "left_out": more}
