"""System metrics of the node a run trains on, so that the cause of a slow or dying run shows next to its loss.

One small reader per source, one daemon thread per node; a reader that fails does not affect the others.
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
from .gpu_health import Fault
from .gpus import GB, Gpus, Reader, percent

MB = 1e6
FIRST_SAMPLE = 1.0  # seconds; so that a run shorter than the interval has a sample, too
LONGEST_FORK_WAIT = 2.0  # seconds since a sample began; after that, a hanging sample delays no fork
SHORTEST_WINDOW = 0.1  # seconds; below it, the kernel's 10 ms ticks would dominate the rate


class SystemProbe:
    """A thread that samples the node every `interval` seconds and passes the values to `write`.

    `gpus` limits it to these GPUs, by their index in this process; `whole_node` extends it to GPUs that this process does not
    see. `report` is called with each new fault of a GPU, and how many GPUs there are. `children`: of processes, sample the
    descendants of this one. `readers` replaces the sources.
    """

    def __init__(
        self,
        write: Callable[[dict[str, float]], None],
        *,
        interval: float = 10.0,
        disk_path: str = ".",
        gpus: Sequence[int] | None = None,
        children: bool = False,
        readers: Sequence[Reader] | None = None,
        whole_node: bool = False,
        report: Callable[[Fault, int], object] | None = None,
    ) -> None:
        self._write = write
        self._interval = max(interval, SHORTEST_WINDOW)
        seen = Gpus(gpus, whole_node=whole_node, report=report) if readers is None else None
        self._readers = default_readers(disk_path, seen, children=children) if seen is not None else readers or ()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, unless it is already running."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._stopping = threading.Event()
        stopping = self._stopping
        thread = Background(lambda: self._run(stopping), "system", stopping.set)
        with errors.guard("start the system probe"):
            self._thread = thread
            thread.start()

    def sample(self) -> dict[str, float]:
        """Read every source once; rates cover the time since the previous sample, so the first has none."""
        values: dict[str, float] = {}
        with _whole():
            for reader in self._readers:
                with errors.guard(f"read system metrics ({reader_name(reader)})"):
                    values.update(reader())
        return values

    def stop(self, timeout: float = 1.0) -> None:
        """Take a last sample and end the thread; if a query hangs, abandon it after `timeout` seconds."""
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
        self.sample()  # not written: it opens the libraries and is the baseline for the first rates
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
    """A guard that makes forks wait for a running sample: a child that inherits a half-opened NVML hangs when it uses CUDA."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun = 0.0
        self._forking = threading.local()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        held = self._lock.acquire(timeout=LONGEST_FORK_WAIT)  # a sample of an ended run may still be hanging
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


def default_readers(disk_path: str, gpus: Reader, *, children: bool = False) -> list[Reader]:
    """Return the sources of a sample."""
    rates, cgroup = CounterRates(), Cgroup()
    return [
        functools.partial(cpu, rates, cgroup),
        functools.partial(descendants if children else process, rates),
        functools.partial(memory, cgroup),
        swap,
        functools.partial(disk_space, disk_path),
        functools.partial(disk_traffic, rates),
        functools.partial(network, rates),
        gpus,
    ]


def reader_name(reader: Reader) -> str:
    """Return a reader's name for warnings."""
    plain = reader.func if isinstance(reader, functools.partial) else reader
    return str(getattr(plain, "__name__", type(plain).__name__))


class CounterRates:
    """A converter of growing counters into rates per second since the previous sample."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, tuple[float, float, float | None]] = {}

    def __call__(self, counters: Mapping[str, float]) -> dict[str, float]:
        """Return the rates of the counters that have one."""
        now = self._clock()
        rates = {name: self._rate(name, count, now) for name, count in counters.items()}
        return {name: rate for name, rate in rates.items() if rate is not None}

    def _rate(self, name: str, count: float, now: float) -> float | None:
        then, before, rate = self._last.get(name, (-math.inf, math.inf, None))
        if now - then < SHORTEST_WINDOW:
            return rate
        rate = (count - before) / (now - then) if count >= before else None  # None: it wrapped, or restarted
        self._last[name] = (now, count, rate)
        return rate


def cpu(rates: CounterRates, cgroup: Cgroup) -> dict[str, float]:
    """Return CPU use, as a share of the container's quota if it has one, else of the node."""
    import psutil

    source, cores = "node cpu", float(psutil.cpu_count() or 1)
    used, quota = cgroup.cpu()
    if quota < cores:
        source, cores = "cgroup cpu", quota
    else:
        times = psutil.cpu_times()._asdict()
        idle = ("idle", "iowait", "guest", "guest_nice")  # guest time is already part of user time
        used = sum(seconds for kind, seconds in times.items() if kind not in idle)
    rate = rates({source: used}).get(source)
    return {} if rate is None else {"system/cpu": percent(rate, cores)}


def process(rates: CounterRates) -> dict[str, float]:
    """Return this process's own CPU, memory and threads, without its children."""
    import psutil

    me = psutil.Process()
    values = rates({"system/process/cpu": 100.0 * time.process_time()})
    values["system/process/rss_gb"] = me.memory_info().rss / GB
    values["system/process/threads"] = float(me.num_threads())
    return values


def descendants(rates: CounterRates) -> dict[str, float]:
    """Return the CPU, memory and threads of everything this process started, as one."""
    import psutil

    cpu, resident, threads = {}, 0, 0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error), child.oneshot():
            times = child.cpu_times()
            cpu[f"child cpu {child.pid}"] = 100.0 * (times.user + times.system)
            resident += child.memory_info().rss
            threads += child.num_threads()
    if not cpu:
        return {}
    busy = rates(cpu)
    values = {"system/process/cpu": sum(busy.values())} if busy else {}
    return {**values, "system/process/rss_gb": resident / GB, "system/process/threads": float(threads)}


def memory(cgroup: Cgroup) -> dict[str, float]:
    """Return memory use, as a share of the container's limit if it has one, else of the node."""
    import psutil

    node = psutil.virtual_memory()
    used, limit = cgroup.memory()
    if limit >= node.total:
        used, limit = node.total - node.available, node.total
    return {"system/memory": percent(used, limit), "system/memory_gb": used / GB}


def swap() -> dict[str, float]:
    """Return the node's swap use, if it has any."""
    import psutil

    node = psutil.swap_memory()
    return {"system/swap_gb": node.used / GB} if node.total else {}


def disk_space(path: str) -> dict[str, float]:
    """Return how full the disk of `path` is, as `df` reports it."""
    import psutil

    disk = psutil.disk_usage(path)
    return {"system/disk": percent(disk.used, disk.used + disk.free), "system/disk_free_gb": disk.free / GB}


def disk_traffic(rates: CounterRates) -> dict[str, float]:
    """Return the throughput of the node's disks."""
    import psutil

    try:
        each = psutil.disk_io_counters(perdisk=True, nowrap=False) or {}
        disks = {name: each[name] for name in hardware(tuple(each), "/sys/block")}
        if each and not disks:
            disks = {"all": psutil.disk_io_counters(nowrap=False)}
    except NotImplementedError:  # a sandbox without disk counters, which deserves no warning
        return {}
    read_bytes = {name: disk.read_bytes for name, disk in disks.items() if disk}
    write_bytes = {name: disk.write_bytes for name, disk in disks.items() if disk}
    return {
        **traffic(rates, "system/disk/read_mb_s", read_bytes),
        **traffic(rates, "system/disk/write_mb_s", write_bytes),
    }


def network(rates: CounterRates) -> dict[str, float]:
    """Return the throughput of the node's network cards, without the loopback."""
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
    """Return the physical devices: bridges, LVM and RAID count the same bytes a second time."""
    return tuple(name for name in names if Path(folder, name, "device").exists())


def traffic(rates: CounterRates, key: str, counters: Mapping[str, float]) -> dict[str, float]:
    """Return the total rate of all devices; a new one counts from its second sample on."""
    found = rates({f"{key} {name}": count for name, count in counters.items()})
    return {key: sum(found.values()) / MB} if found else {}


def main() -> None:
    """Print one sample as JSON, with rates over one second."""
    import json

    probe = SystemProbe(lambda _: None)
    probe.sample()
    time.sleep(1.0)
    print(json.dumps(probe.sample(), indent=2))


if __name__ == "__main__":
    main()
