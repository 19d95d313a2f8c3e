"""Watch the node a run trains on, so that a slow or dying run shows its cause beside its loss.

One small reader per source, one daemon thread per node; a reader that fails takes nothing else with it.
`python -m fanfold.probes.system` prints one sample.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from fanfold import errors
from fanfold.threads import Background

from .cgroup import Cgroup
from .gpus import GB, Gpus, Reader, percent

MB = 1e6
FIRST_SAMPLE = 1.0  # seconds; a run shorter than the interval has a sample too
LONGEST_FORK_WAIT = 2.0  # seconds since a sample began; one that hangs holds up nobody after that
SHORTEST_WINDOW = 0.1  # seconds; below it the kernel's 10 ms ticks would decide the rate


class SystemProbe:
    """Sample the node each `interval` seconds and hand the values to `write`, from a thread of its own.

    `gpus` keeps only these GPUs, by the index this process knows them under; `readers` replaces the sources.
    """

    def __init__(
        self,
        write: Callable[[dict[str, float]], None],
        *,
        interval: float = 10.0,
        disk_path: str = ".",
        gpus: Sequence[int] | None = None,
        readers: Sequence[Reader] | None = None,
    ) -> None:
        self._write = write
        self._interval = max(interval, SHORTEST_WINDOW)
        self._readers = default_readers(disk_path, gpus) if readers is None else readers
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it runs already."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._stopping = threading.Event()
        stopping = self._stopping
        thread = Background(lambda: self._run(stopping), "system", stopping.set)
        with errors.guard("start the system probe"):
            self._thread = thread
            thread.start()

    def sample(self) -> dict[str, float]:
        """Read every source once; rates cover the time since the sample before, so the first has none."""
        values: dict[str, float] = {}
        with _whole():
            for reader in self._readers:
                with errors.guard(f"read system metrics ({reader_name(reader)})"):
                    values.update(reader())
        return values

    def stop(self, timeout: float = 1.0) -> None:
        """Take a last sample and end the thread; when a query hangs, leave it behind after `timeout` seconds."""
        thread = self._thread
        # A forked child has no such thread and must not touch the event: its lock may have been held at the fork.
        if thread is None or not thread.is_alive():
            return
        self._stopping.set()
        if thread is threading.current_thread():
            return
        thread.join(timeout)
        self._thread = None
        if thread.is_alive():
            errors.notices.once(
                "system probe hangs",
                f"A system metric's query did not return within {timeout:g} s at the end of the run. "
                "The run ends without its last system sample; nothing else is missing. "
                "Look at the GPU driver and the run's disk, or pass system=False to fanfold.init.",
            )

    def _run(self, stopping: threading.Event) -> None:
        self.sample()  # not written: it opens the libraries and gives the first rates something to count from
        pause = min(FIRST_SAMPLE, self._interval)
        while not stopping.wait(pause):
            self._emit()
            pause = self._interval
        self._emit()

    def _emit(self) -> None:
        values = self.sample()
        left_behind = self._thread is not threading.current_thread()  # the run may have ended while a query hung
        if values and not left_behind:
            with errors.guard("write system metrics"):
                self._write(values)


class Whole:
    """Let a fork wait for a sample under way: a child that inherits NVML half opened hangs when it begins to use CUDA."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = 0.0
        self._forking = threading.local()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        held = self._lock.acquire(timeout=LONGEST_FORK_WAIT)  # a sample of an ended run may still hang
        self._begun = time.monotonic()
        try:
            yield
        finally:
            if held:
                self._lock.release()

    def _before(self) -> None:
        left = self._begun + LONGEST_FORK_WAIT - time.monotonic()
        self._forking.held = self._lock.acquire(timeout=max(left, 0.0))

    def _in_parent(self) -> None:
        if self._forking.held:
            self._lock.release()

    def _in_child(self) -> None:
        self._lock = threading.Lock()


_whole = Whole()


def default_readers(disk_path: str, gpus: Sequence[int] | None) -> list[Reader]:
    """List the sources of a sample."""
    rates, cgroup = Rates(), Cgroup()
    return [
        functools.partial(cpu, rates, cgroup),
        functools.partial(process, rates),
        functools.partial(memory, cgroup),
        swap,
        functools.partial(disk_space, disk_path),
        functools.partial(disk_traffic, rates),
        functools.partial(network, rates),
        Gpus(gpus),
    ]


def reader_name(reader: Reader) -> str:
    """Name a reader in a warning."""
    plain = reader.func if isinstance(reader, functools.partial) else reader
    return str(getattr(plain, "__name__", type(plain).__name__))


class Rates:
    """Turn counters that only grow into amounts per second since the sample before."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, tuple[float, float, float | None]] = {}

    def __call__(self, counters: Mapping[str, float]) -> dict[str, float]:
        """Return the rate of each counter that has one."""
        now = self._clock()
        rates = {name: self._rate(name, count, now) for name, count in counters.items()}
        return {name: rate for name, rate in rates.items() if rate is not None}

    def _rate(self, name: str, count: float, now: float) -> float | None:
        then, before, rate = self._last.get(name, (-math.inf, math.inf, None))
        if now - then < SHORTEST_WINDOW:
            return rate
        rate = (count - before) / (now - then) if count >= before else None  # it wrapped, or restarted
        self._last[name] = (now, count, rate)
        return rate


def cpu(rates: Rates, cgroup: Cgroup) -> dict[str, float]:
    """Read CPU use: of the container's quota where it has one, else of the node."""
    import psutil

    source, cores = "node cpu", float(psutil.cpu_count() or 1)
    used, quota = cgroup.cpu()
    if quota < cores:
        source, cores = "cgroup cpu", quota
    else:
        times = psutil.cpu_times()._asdict()
        idle = ("idle", "iowait", "guest", "guest_nice")  # guest time is inside user time already
        used = sum(seconds for kind, seconds in times.items() if kind not in idle)
    rate = rates({source: used}).get(source)
    return {} if rate is None else {"system/cpu": percent(rate, cores)}


def process(rates: Rates) -> dict[str, float]:
    """Read this process's own CPU, memory and threads; its children are not walked."""
    import psutil

    me = psutil.Process()
    values = rates({"system/process/cpu": 100.0 * time.process_time()})
    values["system/process/rss_gb"] = me.memory_info().rss / GB
    values["system/process/threads"] = float(me.num_threads())
    return values


def memory(cgroup: Cgroup) -> dict[str, float]:
    """Read memory use: of the container's limit where it has one, else of the node."""
    import psutil

    node = psutil.virtual_memory()
    used, limit = cgroup.memory()
    if limit >= node.total:
        used, limit = node.total - node.available, node.total
    return {"system/memory": percent(used, limit), "system/memory_gb": used / GB}


def swap() -> dict[str, float]:
    """Read the node's swap, if it has any."""
    import psutil

    node = psutil.swap_memory()
    return {"system/swap_gb": node.used / GB} if node.total else {}


def disk_space(path: str) -> dict[str, float]:
    """Read how full the disk of `path` is, as `df` counts it."""
    import psutil

    disk = psutil.disk_usage(path)
    return {"system/disk": percent(disk.used, disk.used + disk.free), "system/disk_free_gb": disk.free / GB}


def disk_traffic(rates: Rates) -> dict[str, float]:
    """Read what the node's disks move."""
    import psutil

    try:
        each = psutil.disk_io_counters(perdisk=True, nowrap=False) or {}
        disks = {name: each[name] for name in hardware(tuple(each), "/sys/block")}
        if each and not disks:
            disks = {"all": psutil.disk_io_counters(nowrap=False)}
    except NotImplementedError:  # a sandbox without disk counters: normal, not a warning
        return {}
    read_bytes = {name: disk.read_bytes for name, disk in disks.items() if disk}
    write_bytes = {name: disk.write_bytes for name, disk in disks.items() if disk}
    return {
        **traffic(rates, "system/disk/read_mb_s", read_bytes),
        **traffic(rates, "system/disk/write_mb_s", write_bytes),
    }


def network(rates: Rates) -> dict[str, float]:
    """Read what the node's network cards move, without the loopback."""
    import psutil

    cards = psutil.net_io_counters(pernic=True, nowrap=False) or {}
    outward = tuple(name for name in cards if name not in {"lo", "lo0"})
    chosen = hardware(outward, "/sys/class/net") or outward
    return {
        **traffic(rates, "system/net/recv_mb_s", {name: cards[name].bytes_recv for name in chosen}),
        **traffic(rates, "system/net/sent_mb_s", {name: cards[name].bytes_sent for name in chosen}),
    }


@functools.lru_cache(maxsize=16)
def hardware(names: tuple[str, ...], folder: str) -> tuple[str, ...]:
    """Keep real devices: bridges, LVM and RAID count the same bytes a second time."""
    return tuple(name for name in names if Path(folder, name, "device").exists())


def traffic(rates: Rates, key: str, counters: Mapping[str, float]) -> dict[str, float]:
    """Add the rates of all devices; one that has just appeared counts from its second sample on."""
    found = rates({f"{key} {name}": count for name, count in counters.items()})
    return {key: sum(found.values()) / MB} if found else {}


def main() -> None:
    """Print one sample as JSON, its rates over one second."""
    import json

    probe = SystemProbe(lambda _: None)
    probe.sample()
    time.sleep(1.0)
    print(json.dumps(probe.sample(), indent=2))


if __name__ == "__main__":
    main()
