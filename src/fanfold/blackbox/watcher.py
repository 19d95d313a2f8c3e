"""The watcher of a node: a process beside the job that sees when a rank stands still, freezes or dies, and writes it down.

It never stops the job. It has a journal of its own, opened when there is something to write, and ends after the last rank of
its node. Run as `python -m fanfold.blackbox.watcher`, with its setup on stdin.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..errors import guard
from ..journal import Kind, Writer
from ..journal.files import open_to_write
from ..journal.format import unpack
from ..journal.writer import try_lock
from ..probes.cgroup import Cgroup, read_table
from ..process import boot_id, digest, started_at, stat_of
from . import activity, stacks
from .pulse import FOLDER, Pulse, Spot, as_data, read_all
from .requests import request
from .verdict import PAST_END, Standing, Verdict, explain, judge, standing
from .verdict import place as place_of

LOOK_SECONDS = 1.0
FIRST_SECONDS = 30.0  # that a node may have no rank yet
ANSWER_SECONDS = 2.0
MAX_HANGS, MAX_DEATHS = 16, 64
PAUSE_SECONDS = 15.0
OLD_SECONDS = 30.0  # a pulse of another node that is older counts as unseen


class Outside:
    """A rank of this node, seen from outside: is its process there, does its pulse beat, does it use CPU."""

    def __init__(self, pulse: Pulse) -> None:
        self.pulse = pulse
        self.descriptor = activity.descriptor_of(pulse.pid)
        self.frozen_since, self.stopped = 0.0, False
        self._mark: tuple[float, float] | None = None

    def alive(self) -> bool:
        fields = stat_of(self.pulse.pid)
        if not fields or fields[0] in ("Z", "X"):
            return False
        return not self.pulse.born or started_at(self.pulse.pid) == self.pulse.born

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def replaced(self) -> bool:
        """Return whether the process runs another program now (exec): the signal that asks for stacks would end that."""
        return bool(self.pulse.signal) and not activity.catches(self.pulse.pid, self.pulse.signal)

    def standing(self, now: float, seconds: float) -> Standing:
        found = standing(self.pulse, now, seconds, self.frozen_since)
        found.why = "is stopped (SIGSTOP or a debugger)" if self.stopped and found.state == "frozen" else found.why
        return found

    def look(self, pulse: Pulse, now: float, interval: float) -> None:
        """Take the newest pulse. If it stopped, the GIL is held: see whether whoever holds it computes."""
        self.pulse = pulse
        if now - pulse.time < 3 * interval + 2.0:
            self._mark, self.frozen_since = None, 0.0
            return
        cpu = activity.cpu_of_all(pulse.pid)
        since, before = self._mark or (now, cpu)
        self.stopped = activity.thread_state(pulse.pid, pulse.pid) in ("T", "t")
        works = activity.thread_state(pulse.pid, pulse.pid) == "R"
        if works or cpu < before or cpu - before > 0.05 * (now - since) + 0.2:
            self._mark, self.frozen_since = (now, cpu), 0.0
        else:
            self._mark, self.frozen_since = (since, before), since


class Watcher:
    """Looks at the ranks of this node every second, until the last one has ended."""

    def __init__(self, run: Path, header: Mapping[str, Any], seconds: float, processes: int) -> None:
        self.run, self.folder, self.seconds = run, run / FOLDER, seconds
        self.processes = processes  # of the job on this node
        self.header = {**header, "role": "blackbox", "pid": os.getpid(), "process": secrets.token_hex(8)}
        self.interval = min(LOOK_SECONDS, seconds / 4)
        self.writer: Writer | None = None
        self.local: dict[str, Outside] = {}
        self.finishing: dict[str, Outside] = {}  # their run has ended, and their process is still there
        self.gone: dict[int, str] = {}  # ranks that died or left, and how
        self.hanging: str = ""  # the current hang
        self.hangs = self.deaths = self._gone_before = 0
        self._boot, self._oom = boot_id(), _kernel_kills()
        self._began = self._looked = time.time()
        self._ignored_until = 0.0

    def serve(self) -> None:
        while self.look():
            self._wait()
        for name, pulse in self._pulses().items():
            if pulse.boot == self._boot and pulse.node == self.header["node"]:
                with contextlib.suppress(OSError):
                    (self.folder / name).unlink()
        if self.writer is not None:
            self.writer.close({"t": time.time_ns(), "status": "finished"})

    def _wait(self) -> None:
        """Wait for the next look, or until a rank dies: the order of deaths tells which one was the cause."""
        poller = select.poll()
        for one in self.local.values():
            if one.descriptor >= 0:
                poller.register(one.descriptor, select.POLLIN)
        poller.poll(self.interval * 1000)

    def look(self) -> bool:
        """Look once; return whether there is anything left to watch."""
        now = time.time()
        others = []
        for name, pulse in self._pulses().items():
            if pulse.boot != self._boot or pulse.node != self.header["node"]:
                others += [pulse] if now - pulse.time < OLD_SECONDS and not pulse.ended else []
            else:
                self._take(name, pulse, now)
        for name, one in list(self.local.items()):
            if not one.alive():
                del self.local[name]
                self.finishing.pop(name, None)
                with guard("record the death of a rank"):
                    self._died(one, now)
                one.close()
        if self._was_paused(now):
            self._ignored_until = now + self.seconds
        if now >= self._ignored_until:
            with guard("look for a hang"):
                self._judge(now, others)
        starting = not self.gone and not self.finishing and now - self._began < FIRST_SECONDS
        return bool(self.local) or starting

    def _take(self, name: str, pulse: Pulse, now: float) -> None:
        """Take the newest pulse of a rank of this node."""
        known = self.local.get(name)
        if pulse.ended:
            self._ended(name, pulse)
        elif known is None:
            if pulse.rank not in self.gone:
                self.local[name] = Outside(pulse)
        elif known.replaced() and known.alive():
            self.local.pop(name).close()
            self.gone.setdefault(pulse.rank, "runs another program")
        else:
            known.look(pulse, now, self.interval)

    def _ended(self, name: str, pulse: Pulse) -> None:
        """Note that a rank has ended its run. While its process is there, it may do more that others wait for."""
        one = self.local.pop(name, None) or self.finishing.pop(name, None) or Outside(pulse)
        if one.alive() and not one.replaced():
            self.finishing[name] = one
        else:
            one.close()
            self.gone.setdefault(pulse.rank, "has finished")

    def _was_paused(self, now: float) -> bool:
        """Return whether this process, and so perhaps the whole node, did not run for a while, or the clock was set."""
        before, self._looked = self._looked, now
        return not -1.0 < now - before < self.interval + PAUSE_SECONDS

    def _pulses(self) -> dict[str, Pulse]:
        return {name: one for name, one in read_all(self.folder).items() if one.attempt == self.header["attempt"]}

    # Hangs

    def _judge(self, now: float, others: list[Pulse]) -> None:
        ranks = [one.standing(now, self.seconds) for one in self.local.values()]
        ranks += [standing(pulse, now, self.seconds) for pulse in others]
        ranks += [Standing(rank=one.pulse.rank, state="busy", why=PAST_END, where=one.pulse.where)
                  for one in self.finishing.values()]  # fmt: skip
        ranks += [Standing(rank=rank, state="gone", why=why) for rank, why in self.gone.items()]
        here = {one.pulse.rank for one in (*self.local.values(), *self.finishing.values())} | set(self.gone)
        found = judge(ranks, int(self.header["world"]), self.seconds, unseen=len(here) < self.processes)
        if found is None:
            moving = self.local and not any(one.overdue for one in ranks)
            if self.hanging and moving and len(self.gone) == self._gone_before:
                self._event({"kind": "moves", "id": self.hanging})
                self._alert("Training moves again", "The ranks that stood still take steps again.", "info")
                self.hanging = ""
            return
        if not self.hanging and self.hangs < MAX_HANGS:
            self.hangs += 1
            self.hanging, self._gone_before = secrets.token_hex(6), len(self.gone)
            self._record(found)

    def _record(self, found: Verdict) -> None:
        """Ask all ranks for their stacks, take those of frozen ranks from outside, and raise an alert."""
        request(self.folder, self.hanging)
        time.sleep(ANSWER_SECONDS)  # the signal may interrupt what a frozen rank waits for: the others answer first
        for one in list(self.local.values()):
            if one.frozen_since and time.time() - one.frozen_since >= self.seconds:
                with guard("take the stacks of a frozen rank"):
                    self._take_stacks(one, found)
        found = explain(found.ranks)
        self._event({"kind": "hang", "id": self.hanging, "data": msgspec.to_builtins(found)})
        self._alert("Training hangs", found.text, "error")

    def _take_stacks(self, one: Outside, found: Verdict) -> None:
        """Make a process whose GIL is held write its stacks, by a signal that Python code need not handle."""
        pulse = one.pulse
        path = self.folder / Path(pulse.stacks).name
        if pulse.signal not in stacks.signals() or one.stopped or not one.alive() or one.replaced() or not path.is_file():
            return
        before = path.stat().st_size
        os.kill(pulse.pid, pulse.signal)
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline and path.stat().st_size == before:
            time.sleep(0.05)
        time.sleep(0.1)
        threads = stacks.threads_in(stacks.text_of(path, before))
        frames = next((thread["frames"] for thread in threads if thread["id"] == pulse.thread), None)
        last = as_data(pulse)
        if frames:
            last["where"] = frames
            for stands in found.ranks:
                stands.where = msgspec.convert(frames, list[Spot]) if stands.rank == pulse.rank else stands.where
        data = {"pulse": last, "threads": threads, "collectives": []}
        self._event({"kind": "stacks", "id": self.hanging, "who": pulse.rank, "data": data})

    # Deaths

    def _died(self, one: Outside, now: float) -> None:
        """Record that a process is gone without having ended its run, with its last position and that of the others."""
        pulse, status = one.pulse, activity.exit_status(one.pulse.pid, one.descriptor)
        end = self._end_of(pulse)
        path = self.folder / Path(pulse.stacks).name
        text = stacks.text_of(path)
        name = stacks.fatal_signal(text)
        kills = _kernel_kills()
        cause = _cause(name, status, short=kills > self._oom)
        self._oom = kills
        self.gone[pulse.rank] = f"ended ({end})" if end else _words(cause)[0]
        if self.deaths >= MAX_DEATHS or end:
            return
        self.deaths += 1
        threads = stacks.threads_in(text) if name else []
        where = next((thread["frames"] for thread in threads if thread["current"]), None)
        last = as_data(pulse)
        if where:
            last["where"] = where
        alive = [as_data(other.pulse) for other in self.local.values()]
        code = os.waitstatus_to_exitcode(status) if status is not None else None
        data = {
            "cause": cause,
            "code": code,
            "seen": now,
            "crashed": path.stat().st_mtime if name else None,
            "pulse": last,
            "threads": threads,
            "others": alive,
            "text": text if name else "",
        }
        self._event({"kind": "death", "who": pulse.rank, "data": data})
        self._alert(*_message(pulse, cause, place_of(msgspec.convert(last["where"], list[Spot]))), "error")

    def _end_of(self, pulse: Pulse) -> str:
        """Return the status that a process wrote itself, after an exception or a signal that it could handle; "" if none."""
        from ..journal.directory import journal_files
        from ..journal.reader import Journal

        for path in journal_files(self.run):
            if path.name.startswith(f"{pulse.rank}-"):
                journal = Journal(path)
                journal.refresh()
                ends = [record.data.status for record in journal.records(Kind.END)]
                if journal.header.process == pulse.process and ends:
                    return str(ends[-1])
        return ""

    # Writing

    def _event(self, event: Mapping[str, Any]) -> None:
        self._append({"event": "blackbox", **event})

    def _alert(self, title: str, text: str, level: str) -> None:
        step = max((one.pulse.step for one in self.local.values()), default=-1)
        self._append({"event": "alert", "title": title, "text": text, "level": level, "s": step})

    def _append(self, event: Mapping[str, Any]) -> None:
        if self.writer is None:
            self.writer = Writer(self.run / "journal", self.header)
        self.writer.append((Kind.EVENT, {"t": time.time_ns(), **event}), keep=True)
        self.writer.sync()


def _cause(fatal: str, status: int | None, *, short: bool) -> str:
    """Return how a process died: by a signal, exit(), or the kernel because memory was short. `fatal`: what its stacks say."""
    code = -signal.SIGKILL if status is None and short else None if status is None else os.waitstatus_to_exitcode(status)
    if fatal or code is None:
        return fatal or "gone"
    if code >= 0:
        return "exit"
    if code == -signal.SIGKILL:
        return "out of memory" if short else "killed"
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"


def _words(cause: str) -> tuple[str, str]:
    """Return what happened to a process, and more about it."""
    known = {
        "gone": ("is gone", "It left no trace: it was killed (SIGKILL), or ended itself by os._exit()."),
        "exit": ("ended without a word", "It called os._exit(), or a native library called exit()."),
        "killed": ("was killed", "It left no trace: SIGKILL from a person, a scheduler or a container runtime."),
        "out of memory": ("was killed by the kernel", "The job's memory limit was reached: out of memory on the host."),
    }
    return known.get(cause, (f"crashed with {cause}", ""))


def _message(pulse: Pulse, cause: str, where: str) -> tuple[str, str]:
    what, more = _words(cause)
    step = f", step {pulse.step}" if pulse.step >= 0 else ""
    return f"Rank {pulse.rank} {what}", f"On {pulse.node}{step}, {where}. {more}".strip()


def _kernel_kills() -> float:
    """Return how many processes of this job the kernel has killed because memory was short."""
    names = ("memory.events", "memory.oom_control")  # cgroup v2 and v1
    tables = (read_table(folder / name) for folder in Cgroup().folders("memory") for name in names)
    return next((table["oom_kill"] for table in tables if "oom_kill" in table), 0.0)


def main() -> None:
    for name in ("SIGTERM", "SIGHUP"):  # the launcher ends the job: what its end shows is still to be written
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    setup = unpack(sys.stdin.buffer.read())
    run, header = Path(setup["run"]), setup["header"]
    lock = open_to_write(run / FOLDER / f"watcher-{digest(header['node'], boot_id(), header['attempt'])}.lock")
    if try_lock(lock) is False:  # where a launcher gives no local ranks, several processes start one
        return
    with contextlib.suppress(KeyboardInterrupt):
        Watcher(run, header, float(setup["hang"]), int(setup["processes"])).serve()


if __name__ == "__main__":
    main()
