"""The system probe: what it reads, that a broken or hanging source harms nothing, and that it ends in time."""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import paths
from fanfold import errors
from fanfold.probes import gpus, system
from fanfold.probes.cgroup import Cgroup
from fanfold.probes.system import CounterRates, Gpus, SystemProbe

DOCS = paths.DOCS / "system-metrics.md"


def ignore(values: dict[str, float]) -> None:
    pass


def seconds(*times: float) -> Callable[[], float]:
    """A clock that shows these times, one per reading."""
    hand: Iterator[float] = iter(times)
    return lambda: next(hand)


def second_after_second() -> Callable[[], float]:
    return seconds(*map(float, range(100)))


# What a sample holds


def test_a_sample_of_this_node_holds_finite_numbers_under_documented_keys():
    probe = SystemProbe(ignore)
    probe.sample()
    time.sleep(2 * system.SHORTEST_WINDOW)  # rates need real time between two samples of the real node
    values = probe.sample()
    assert {"system/cpu", "system/process/cpu", "system/memory", "system/disk", "system/process/threads"} <= set(values)
    assert all(type(value) is float and math.isfinite(value) for value in values.values())
    documented = set(re.findall(r"`(system/[^`]+)`", DOCS.read_text()))
    assert {re.sub(r"/gpu/\d+/", "/gpu/<i>/", key) for key in values} <= documented


def test_percentages_and_sizes_agree_with_the_node():
    values = SystemProbe(ignore).sample()
    assert 0 < values["system/memory"] <= 100
    assert 0 < values["system/disk"] <= 100
    assert 0 < values["system/memory_gb"] <= psutil.virtual_memory().total / 1e9
    assert values["system/process/rss_gb"] == pytest.approx(psutil.Process().memory_info().rss / 1e9, rel=0.2)
    assert ("system/swap_gb" in values) == (psutil.swap_memory().total > 0)


def test_the_first_sample_has_no_rates():
    assert not [key for key in SystemProbe(ignore).sample() if key.endswith(("cpu", "_mb_s"))]


def test_a_busy_thread_raises_the_process_cpu():
    rates = CounterRates(second_after_second())
    system.process(rates)
    end = time.process_time() + 0.2
    busy = threading.Thread(target=lambda: [None for _ in iter(lambda: time.process_time() < end, False)])
    busy.start()
    busy.join()
    assert 20 <= system.process(rates)["system/process/cpu"] < 60  # 0.2 s of CPU in one second of our clock


def test_children_do_not_count_as_the_process():
    rates = CounterRates(second_after_second())
    system.process(rates)
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert system.process(rates)["system/process/cpu"] < 15


def test_busy_children_count_as_the_node():
    rates, cgroup = CounterRates(second_after_second()), Cgroup(table=Path("/nowhere"))
    system.cpu(rates, cgroup)
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert system.cpu(rates, cgroup)["system/cpu"] >= 0.25 * 100 / psutil.cpu_count()


def test_written_bytes_show_in_the_disk_rate(tmp_path: Path):
    def written() -> int:
        disks = psutil.disk_io_counters(perdisk=True, nowrap=False)
        return sum(disk.write_bytes for name, disk in disks.items() if Path("/sys/block", name, "device").exists())

    now = 0.0
    rates = CounterRates(lambda: now)
    assert system.disk_traffic(rates) == {}
    before = written()
    with (tmp_path / "file").open("wb") as file:
        file.write(os.urandom(8_000_000))
        file.flush()
        os.fsync(file.fileno())
    grown = written() - before
    now = 1.0
    values = system.disk_traffic(rates)
    assert values["system/disk/write_mb_s"] >= grown / 1e6
    assert values["system/disk/read_mb_s"] >= 0


def test_network_rates_come_with_the_second_sample():
    rates = CounterRates(second_after_second())
    assert system.network(rates) == {}
    assert {"system/net/recv_mb_s", "system/net/sent_mb_s"} == set(system.network(rates))


def test_a_counter_that_restarts_drops_one_rate():
    rates = CounterRates(second_after_second())
    assert [rates({"c": count}) for count in (5, 7, 1, 4)] == [{}, {"c": 2.0}, {}, {"c": 3.0}]


def test_two_samples_close_together_repeat_the_rate():
    rates = CounterRates(seconds(0.0, 2.0, 2.01, 4.0))
    assert [rates({"c": count}) for count in (0, 4, 5, 10)] == [{}, {"c": 2.0}, {"c": 2.0}, {"c": 3.0}]


def test_a_device_that_appears_does_not_spike_the_sum():
    rates = CounterRates(second_after_second())
    counts = [{"a": 1e6}, {"a": 3e6}, {"a": 5e6, "b": 9e9}, {"a": 7e6, "b": 9.001e9}]
    assert [system.traffic(rates, "k", each) for each in counts] == [{}, {"k": 2.0}, {"k": 2.0}, {"k": 3.0}]


# The thread


def test_stop_takes_a_last_sample_and_the_thread_is_gone():
    written: list[dict[str, float]] = []
    calls = iter(range(1, 100))
    probe = SystemProbe(written.append, interval=60, readers=[lambda: {"call": float(next(calls))}])
    probe.start()
    assert "fanfold-system" in [thread.name for thread in threading.enumerate()]
    probe.stop()
    assert written == [{"call": 2.0}]  # the first reading only primes the rates
    assert "fanfold-system" not in [thread.name for thread in threading.enumerate()]


def test_the_first_sample_comes_early_whatever_the_interval():
    written: queue.Queue[dict[str, float]] = queue.Queue()
    probe = SystemProbe(written.put, interval=3600)
    start = time.monotonic()
    probe.start()
    values = written.get(timeout=30)
    assert time.monotonic() - start >= system.FIRST_SAMPLE
    assert "system/cpu" in values
    probe.stop()


def test_samples_keep_coming_each_interval():
    written: queue.Queue[dict[str, float]] = queue.Queue()
    probe = SystemProbe(written.put, interval=0.1, readers=[lambda: {"one": 1.0}])
    probe.start()
    assert [written.get(timeout=10) for _ in range(3)] == [{"one": 1.0}] * 3
    probe.stop()


def test_starting_twice_is_one_thread_and_starting_again_after_stop_works():
    written: list[dict[str, float]] = []
    probe = SystemProbe(written.append, interval=60, readers=[lambda: {"one": 1.0}])
    for _ in range(2):
        probe.start()
        probe.start()
        assert [thread.name for thread in threading.enumerate()].count("fanfold-system") == 1
        probe.stop()
    assert len(written) == 2


def test_stop_without_start_and_stop_twice_do_nothing():
    written: list[dict[str, float]] = []
    probe = SystemProbe(written.append, readers=[lambda: {"one": 1.0}])
    probe.stop()
    probe.start()
    probe.stop()
    probe.stop()
    assert len(written) == 1


def test_stop_returns_in_time_when_a_source_hangs_and_nothing_is_written_later(caplog: pytest.LogCaptureFixture):
    entered, release = threading.Event(), threading.Event()
    written: list[dict[str, float]] = []

    def hanging() -> dict[str, float]:
        entered.set()
        release.wait(60)
        return {"late": 1.0}

    probe = SystemProbe(written.append, readers=[hanging])
    before = errors.notices.counts["system probe hangs"]
    probe.start()
    thread = probe._thread
    assert thread is not None
    assert entered.wait(10)
    start = time.monotonic()
    probe.stop(timeout=0.2)
    assert 0.2 <= time.monotonic() - start < 1.0
    assert thread.is_alive()
    assert thread.daemon
    assert errors.notices.counts["system probe hangs"] == before + 1
    release.set()
    thread.join(10)
    assert not thread.is_alive()
    assert written == []


def test_a_write_that_calls_stop_does_not_deadlock():
    done = threading.Event()

    def write(values: dict[str, float]) -> None:
        probe.stop()
        done.set()

    probe = SystemProbe(write, interval=0.1, readers=[lambda: {"one": 1.0}])
    probe.start()
    assert done.wait(10)
    probe.stop()
    assert probe._thread is None or not probe._thread.is_alive()


def test_a_write_that_raises_does_not_end_the_probe():
    attempts: queue.Queue[int] = queue.Queue()

    def write(values: dict[str, float]) -> None:
        attempts.put(1)
        raise OSError("disk full")

    probe = SystemProbe(write, interval=0.1, readers=[lambda: {"one": 1.0}])
    probe.start()
    assert [attempts.get(timeout=10) for _ in range(3)] == [1, 1, 1]
    probe.stop()


def test_a_broken_source_leaves_the_others_and_is_said_once(caplog: pytest.LogCaptureFixture):
    def broken_source() -> dict[str, float]:
        raise RuntimeError("no such sensor")

    probe = SystemProbe(ignore, readers=[broken_source, lambda: {"one": 1.0}])
    with caplog.at_level(logging.WARNING, "fanfold"):
        assert [probe.sample() for _ in range(3)] == [{"one": 1.0}] * 3
    assert len(caplog.records) == 1
    assert "(broken_source): RuntimeError: no such sensor" in caplog.text
    assert [count for cause, count in errors.notices.counts.items() if "(broken_source)" in cause] == [3]


def run_python(script: str) -> str:
    """Run a script in a fresh interpreter, warnings as errors but for Python's own on forking with threads."""
    command = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", script]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_a_forked_child_has_no_probe_thread_and_may_call_stop():
    out = run_python("""
import os, threading, time
from fanfold.probes.system import SystemProbe
written = []
probe = SystemProbe(written.append, interval=60)
probe.start()
if (child := os.fork()) == 0:
    start = time.monotonic()
    probe.stop()
    clean = threading.active_count() == 1 and time.monotonic() - start < 0.5 and written == []
    os._exit(0 if clean else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
probe.stop()
print(len(written))
""")
    assert out.split() == ["0", "1"]


def test_a_fork_waits_for_a_sample_and_goes_on_when_it_hangs():
    entered, let_go, inside = threading.Event(), threading.Event(), []

    def slow() -> dict[str, float]:
        inside.append(1)
        entered.set()
        time.sleep(0.3)
        inside.pop()
        return {}

    def hanging() -> dict[str, float]:
        inside.append(1)
        entered.set()
        let_go.wait(60)
        return {}

    def forked() -> int:
        if (pid := os.fork()) == 0:
            os._exit(len(inside))
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    probe = SystemProbe(ignore, readers=[slow])
    probe.start()
    assert entered.wait(10)
    assert forked() == 0  # the child has no half of a sample
    probe.stop()

    entered.clear()
    stuck = SystemProbe(ignore, readers=[hanging])
    stuck.start()
    assert entered.wait(10)
    assert forked() == 1  # after two seconds
    let_go.set()
    stuck.stop()


def test_importing_starts_nothing_and_imports_nothing_heavy():
    out = run_python("""
import sys, threading
import fanfold.probes.system
heavy = {"psutil", "pynvml", "amdsmi", "torch"}
print(threading.active_count(), sorted(heavy & set(sys.modules)))
""")
    assert out.strip() == "1 []"


def test_the_module_prints_one_sample_as_json():
    command = [sys.executable, "-W", "error", "-m", "fanfold.probes.system"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    values = json.loads(done.stdout)
    assert {"system/cpu", "system/process/cpu", "system/memory", "system/disk"} <= set(values)
    assert done.stderr == ""


# GPUs


@pytest.mark.skipif(gpus.nvidia_driver(), reason="this node has an NVIDIA driver")
def test_without_a_driver_there_are_no_gpu_keys_and_no_warning(caplog: pytest.LogCaptureFixture):
    before = sum(errors.notices.counts.values())
    assert Gpus()() == {}
    assert sum(errors.notices.counts.values()) == before
    assert caplog.records == []


def test_a_process_that_may_see_no_gpu_asks_no_driver(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpus.open_nvidia()[0] == {}


@pytest.mark.skipif(not gpus.nvidia_driver(), reason="needs an NVIDIA driver")
def test_a_gpu_of_this_node_answers_every_question():
    values = Gpus([0])()
    names = ("util", "memory", "memory_gb", "power_w", "temp_c", "sm_mhz")
    assert {f"system/gpu/0/{name}" for name in names} <= set(values)
    assert 0 < values["system/gpu/0/memory"] <= 100
    assert 0 < values["system/gpu/0/temp_c"] < 120


def test_a_gpu_query_that_fails_drops_only_its_metric_and_is_said_once(caplog: pytest.LogCaptureFixture):
    def lost() -> dict[str, float]:
        raise OSError("GPU is lost")

    gpu = {"fan": lost, "util": lambda: {"util": 7.0}}
    with caplog.at_level(logging.WARNING, "fanfold"):
        assert [gpus.read_gpu(gpu) for _ in range(2)] == [{"util": 7.0}] * 2
    assert len(caplog.records) == 1
    assert "a GPU's fan" in caplog.text


IDS = ["GPU-aa11", "GPU-aa22", "GPU-bb33"]


@pytest.mark.parametrize(
    ("setting", "devices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0", [0]),
        ("2, 0", [2, 0]),
        ("GPU-bb33,GPU-aa11", [2, 0]),
        ("GPU-b", [2]),
        ("GPU-a", []),  # two begin like this
        ("0,9,1", [0]),  # CUDA stops at the first it does not know
        ("1,1", []),  # CUDA shows none when one is repeated
        ("MIG-1234,MIG-GPU-aa11/1/0", ["MIG-1234", "MIG-GPU-aa11/1/0"]),
    ],
)
def test_visible_devices_are_resolved_as_cuda_does(setting: str | None, devices: list[int | str]):
    assert gpus.visible(setting, IDS) == devices


# A container's own limits


def lay_out(root: Path, files: dict[str, str]) -> Cgroup:
    """Write fixture files; `table` stands for /proc/self/cgroup, the rest for what is under /sys/fs/cgroup."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return Cgroup(table=root / "table", mount=root / "mount")


V2 = {
    "table": "0::/job",
    "mount/job/memory.max": "4000000",
    "mount/job/memory.current": "3000000",
    "mount/job/memory.stat": "anon 1\ninactive_file 1000000",
    "mount/job/cpu.max": "150000 100000",
    "mount/job/cpu.stat": "usage_usec 2500000\nuser_usec 1",
}
V1 = {
    "table": "4:memory:/job\n3:cpuacct,cpu:/job\n0::/",
    "mount/memory/job/memory.limit_in_bytes": "4000000",
    "mount/memory/job/memory.usage_in_bytes": "3000000",
    "mount/memory/job/memory.stat": "inactive_file 5\ntotal_inactive_file 1000000",
    "mount/cpu/job/cpu.cfs_quota_us": "150000",
    "mount/cpu/job/cpu.cfs_period_us": "100000",
    "mount/cpu/job/cpuacct.usage": "2500000000",
}
V1_APART = {
    **{name: text for name, text in V1.items() if "cpuacct.usage" not in name},
    "table": "4:memory:/job\n2:cpuacct:/job\n1:cpu:/job\n0::/",
    "mount/cpuacct/job/cpuacct.usage": "2500000000",
    "mount/unified/cgroup.procs": "1",
}
V1_COMBINED = {name.replace("mount/cpu/", "mount/cpuacct,cpu/"): text for name, text in V1.items()}
# Without a cgroup namespace the table names the node's path, which is not there inside the container.
CONTAINER_ROOT = {
    **{name.replace("/job/", "/"): text for name, text in V2.items()},
    "table": "0::/kubepods/pod1/container1",
}
OUTSIDE_NAMESPACE = {**CONTAINER_ROOT, "table": "0::/../job", "job/memory.max": "1", "job/memory.current": "1"}
OUTER_LIMIT = {
    **{name.replace("/job/", "/pod/"): text for name, text in V2.items()},
    "table": "0::/pod/box",
    "mount/pod/box/memory.max": "max",
    "mount/pod/box/memory.current": "1",
    "mount/pod/box/cpu.max": "800000 100000",
    "mount/pod/box/cpu.stat": "usage_usec 1",
}
LAYOUTS = {
    "v2": V2,
    "v1": V1,
    "v1, cpuacct apart, hybrid": V1_APART,
    "v1, combined folder": V1_COMBINED,
    "container root": CONTAINER_ROOT,
    "outside the namespace": OUTSIDE_NAMESPACE,
    "outer limit": OUTER_LIMIT,
}


@pytest.mark.parametrize("files", LAYOUTS.values(), ids=LAYOUTS)
def test_the_limits_of_a_container_are_found(tmp_path: Path, files: dict[str, str]):
    cgroup = lay_out(tmp_path, files)
    assert cgroup.memory() == (2_000_000, 4_000_000)  # 3 MB less 1 MB of cache the kernel can drop
    assert cgroup.cpu() == (2.5, 1.5)


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"table": "0::/"},
        {"table": "0::/job", "mount/job/memory.max": "max", "mount/job/cpu.max": "max 100000"},
        {"table": "1:cpu:/", "mount/cpu/cpu.cfs_quota_us": "-1", "mount/cpu/cpu.cfs_period_us": "100000"},
        {"table": "0::/job", "mount/job/memory.max": "4000000", "mount/job/cpu.max": "50000 100000"},  # use unreadable
    ],
    ids=["no cgroups", "root", "v2 without limits", "v1 without limits", "limits without use"],
)
def test_without_a_usable_limit_the_node_counts(tmp_path: Path, files: dict[str, str]):
    cgroup = lay_out(tmp_path, files)
    assert cgroup.memory()[1] == math.inf
    assert cgroup.cpu()[1] == math.inf
    node = psutil.virtual_memory()
    assert system.memory(cgroup)["system/memory_gb"] == pytest.approx((node.total - node.available) / 1e9, rel=0.2)


def test_memory_is_in_percent_of_the_containers_limit(tmp_path: Path):
    assert system.memory(lay_out(tmp_path, V2)) == {"system/memory": 50.0, "system/memory_gb": 0.002}


def test_the_huge_number_that_means_no_limit_in_v1_is_not_taken_for_one(tmp_path: Path):
    cgroup = lay_out(tmp_path, {**V1, "mount/memory/job/memory.limit_in_bytes": "9223372036854771712"})
    assert system.memory(cgroup)["system/memory_gb"] > 0.01


def test_cpu_is_in_percent_of_the_containers_quota(tmp_path: Path):
    cgroup = lay_out(tmp_path, {**V2, "mount/job/cpu.max": "50000 100000"})
    rates = CounterRates(second_after_second())
    assert system.cpu(rates, cgroup) == {}
    (tmp_path / "mount/job/cpu.stat").write_text("usage_usec 2750000\n")
    assert system.cpu(rates, cgroup) == {"system/cpu": 50.0}  # 0.25 s of CPU per second, of half a core
