"""What the operator profile costs: CPU time of a training step with it, as a ratio to the same step without, in one process.

Each round measures every configuration once, in random order, beside the bare step; the figure is the median of the rounds'
ratios, with the middle half. CPU time, not wall time: it holds on a busy machine. `--quick` for fewer rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fanfold.probes import op_table, ops

LIMITS = {("default", "transformer"): 1.01, ("default", "mlp"): 1.02, ("p=1", "transformer"): 1.05, ("p=1", "mlp"): 1.09}
FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def mlp() -> Callable[[], None]:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return step(model, torch.randn(64, 256), torch.optim.SGD(model.parameters(), 1e-3))


def tiny() -> Callable[[], None]:
    """A step that is hardly more than its operators' dispatch: the worst that can be met, and nothing is promised of it."""
    return step(
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)), torch.randn(32, 64)
    )


def transformer() -> Callable[[], None]:
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    return step(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(8, 64, 128))


def step(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer | None = None) -> Callable[[], None]:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-4)

    def run() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return run


class Profiled:
    """The probe as init(ops=…) starts it, without a run around it."""

    def __init__(self, **options: Any) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="fanfold-bench-", ignore_cleanup_errors=True)
        self.written: list[int] = []
        found = ops.start(ops.OpsOptions(**options), self.write, path=Path(self.folder.name), rank=0, node="here")
        assert found is not None
        self.probe = found

    def write(self, facts: Any) -> bool:
        self.written.append(len(facts.get("table", b"")))
        return True

    def __enter__(self) -> Profiled:
        return self

    def __exit__(self, *_: object) -> None:
        self.probe.stop()
        FOLDERS.append(self.folder)  # taken away at the very end: giving back a mapped file takes time of whatever runs next


class TorchProfiler:
    """torch.profiler, always on; what stopping it costs is left out."""

    def __enter__(self) -> TorchProfiler:
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self.profiler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.profiler.stop()


class Empty:
    """The callbacks of a full observation that do nothing: what torch itself spends on being observed."""

    def __init__(self) -> None:
        class Callback(ctypes.Structure):
            _fields_ = (("start", ctypes.c_void_p), ("end", ctypes.c_void_p), ("sampling", ctypes.c_double),
                        ("scopes", ctypes.c_bool * 10), ("needs", ctypes.c_bool * 3))  # fmt: skip

        torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        self.add = torch_library["_ZN2at17addGlobalCallbackENS_22RecordFunctionCallbackE"]
        self.remove = torch_library["_ZN2at14removeCallbackEm"]
        self.add.argtypes, self.add.restype, self.remove.argtypes = [Callback], ctypes.c_uint64, [ctypes.c_uint64]
        self.callback = Callback(None, None, 1.0, (ctypes.c_bool * 10)(True, True, True, *[False] * 4, True))

    def __enter__(self) -> Empty:
        self.handle = self.add(self.callback)
        return self

    def __exit__(self, *_: object) -> None:
        self.remove(self.handle)


CONFIGURATIONS: dict[str, Callable[[], Any]] = {
    "default": Profiled,
    "sampling=0.01": lambda: Profiled(sampling=0.01),
    "p=1": lambda: Profiled(every=1),
    "torch alone": Empty,
    "torch.profiler": TorchProfiler,
}


def cpu_time(run: Callable[[], None], count: int) -> float:
    begin = time.process_time()
    for _ in range(count):
        run()
    return (time.process_time() - begin) / count


def one_round(run: Callable[[], None], count: int) -> dict[str, float]:
    """Measure each configuration between two measurements of the bare step."""
    ratios = {}
    for name in random.sample(list(CONFIGURATIONS), len(CONFIGURATIONS)):
        before = cpu_time(run, count)
        with CONFIGURATIONS[name]():
            run()
            seconds = cpu_time(run, count)
        ratios[name] = seconds / statistics.mean((before, cpu_time(run, count)))
    return ratios


def snapshot_cost(run: Callable[[], None]) -> tuple[float, int]:
    """Return the milliseconds and bytes of one snapshot of a full profile of the step."""
    with Profiled(every=1) as profiled:
        for _ in range(20):
            run()
        times = []
        for _ in range(9):
            begin = time.process_time()
            profiled.probe.snapshot()
            times.append(time.process_time() - begin)
        return statistics.median(times) * 1e3, profiled.written[-1]


NODES = 2000
BETWEEN_WINDOWS: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "default": Profiled,
    "ranges=True": lambda: Profiled(ranges=True),
}


def node_times(rounds: int) -> dict[str, list[float]]:
    """Measure a node of backward that does next to nothing, between windows, in nanoseconds of its thread."""
    start = torch.ones(1, requires_grad=True)
    found: dict[str, list[float]] = {name: [] for name in BETWEEN_WINDOWS}
    for _ in range(rounds):
        for name in random.sample(list(BETWEEN_WINDOWS), len(BETWEEN_WINDOWS)):
            with BETWEEN_WINDOWS[name]():
                for _ in range(5):
                    end = start
                    for _ in range(NODES):
                        end = end + 1
                    begin = time.thread_time()
                    end.backward()
                    found[name].append((time.thread_time() - begin) / NODES * 1e9)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rounds = args.rounds or (9 if args.quick else 21)
    figures: dict[str, Any] = {"torch": torch.__version__, "cores": os.cpu_count(), "rounds": rounds}
    for name, make, count in (("mlp", mlp, 200), ("transformer", transformer, 40), ("tiny mlp, AdamW", tiny, 200)):
        run = make()
        bare = cpu_time(run, 10) and min(cpu_time(run, 10) for _ in range(9))
        found = [one_round(run, count if not args.quick else max(count // 4, 20)) for _ in range(rounds)]
        print(f"\n{name}, {bare * 1e3:.2f} ms: CPU time of a step, ratio to none; median of {rounds} rounds (middle half)")
        for configuration in CONFIGURATIONS:
            ratios = [one[configuration] for one in found]
            low, middle, high = statistics.quantiles(ratios, n=4)
            limit = LIMITS.get((configuration, name))
            print(
                f"  {configuration:<16} {middle:.3f} ({low:.3f} to {high:.3f})"
                + (f"  promised: at most {limit}" if limit else "")
            )
            figures[f"{name} {configuration}"] = ratios
        milliseconds, size = snapshot_cost(run)
        hourly = size * min(60.0, ops.BYTES_PER_HOUR / max(size, 1)) / 1e6
        print(f"  snapshot {milliseconds:.2f} ms, {size:,} bytes, at most {hourly:.2f} MB an hour (promised: 5 ms, 1 MB); "
              f"table row {op_table.ROW_SIZE} bytes")  # fmt: skip
        figures[f"{name} snapshot"] = [milliseconds, size]
    nodes = node_times(rounds)
    print(f"\na node of backward, between windows, ns: median of {5 * rounds} times {NODES:,} (lowest)")
    for configuration, times in nodes.items():
        print(f"  {configuration:<16} {statistics.median(times):.0f} ({min(times):.0f})")
    figures["node of backward, ns"] = nodes
    if args.json:
        args.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
