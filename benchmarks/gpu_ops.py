"""What the operator profile costs and shows on a GPU: default and full modes, device time by event pairs, graph capture.

Wall time per step with the device synchronised around each measurement, ratio to the bare step beside it: the median of interleaved
rounds, the middle half, and the ratio of all time to all time. A part of `python benchmarks/gpu.py`; alone on a machine with CUDA, too.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from fanfold.probes import op_table, ops
from fanfold.probes.native import library
from ops import CONFIGURATIONS, LIMITS, Profiled, step

LIMITS = {**LIMITS, ("default", "gpu"): 1.01}
MODES = {"nothing": contextlib.nullcontext, **CONFIGURATIONS}  # how far apart two bare steps are is the measure of all others


def wall_time(run: Callable[[], None], count: int) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(count):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / count


SIZES = {"busy device": (64, 512), "busy host": (8, 256)}  # sequences, length: which of the two a step waits for
BLOCK = 10  # steps: the host's clock drifts within a second by more than what is measured


def training_step(batch: int, length: int) -> Callable[[], None]:
    """A step of a small transformer in bf16."""
    layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).to("cuda", torch.bfloat16)
    return step(model, torch.randn(batch, length, 768, device="cuda", dtype=torch.bfloat16))


def overhead(size: str, seconds: float, names: list[str]) -> None:
    run = training_step(*SIZES[size])
    wall_time(run, 20)
    ratios: dict[str, list[float]] = {name: [] for name in names}
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    bare = wall_time(run, BLOCK)
    began, rounds = time.monotonic(), 0
    while rounds < 9 or time.monotonic() < began + seconds:
        rounds += 1
        for name in random.sample(names, len(names)):
            with MODES[name]():
                run()
                took = wall_time(run, BLOCK)
            run()
            before, bare = bare, wall_time(run, BLOCK)
            ratios[name].append(took / statistics.mean((before, bare)))
            spent[name].append((took, statistics.mean((before, bare))))
    print(f"{size}: transformer step of {bare * 1e3:.2f} ms on the GPU, ratio to none; median of {rounds} rounds (middle half)")
    for name, found in ratios.items():
        low, middle, high = statistics.quantiles(found, n=4)
        limit = LIMITS.get((name, "gpu"))
        whole = "{1:.3f} [{0:.3f}, {2:.3f}]".format(*whole_ratio(spent[name]))
        promise = f"  promised: at most {limit}" if limit else ""
        print(f"{name:<16} {middle:.3f} ({low:.3f} to {high:.3f}), all in all {whole}{promise}", flush=True)


def whole_ratio(pairs: list[tuple[float, float]]) -> list[float]:
    """Return the ratio of all time to all time, between the ends of its 95 % interval (by resampling the pairs)."""

    def ratio(some: list[tuple[float, float]]) -> float:
        return sum(a for a, _ in some) / sum(b for _, b in some)

    drawn = sorted(ratio(random.choices(pairs, k=len(pairs))) for _ in range(1000))
    return [drawn[25], ratio(pairs), drawn[974]]


def device_time() -> None:
    """Compare device time by event pairs with what a large product really takes."""
    a = torch.randn(4096, 4096, device="cuda")
    torch.mm(a, a)
    truth = wall_time(lambda: torch.mm(a, a), 50)
    model = nn.Linear(8, 8).cuda()
    tick = step(model, torch.randn(4, 8, device="cuda"))
    with Profiled(every=1):
        for _ in range(400):
            torch.mm(a, a)
        torch.cuda.synchronize()
        time.sleep(1.1)  # pairs are read at a step's end, once a second at most
        tick()
        rows = [
            row
            for row in op_table.parse(op_table.take(library.current())).rows
            if row["op"] == "aten::mm" and row["device_count"]
        ]
    for row in rows:
        print(f"mm 4096: device {row['device_ns'] / row['device_count'] / 1e6:.3f} ms by {row['device_count']} pairs, "
              f"host {row['total_ns'] / row['count'] / 1e6:.3f} ms, really {truth * 1e3:.3f} ms")  # fmt: skip
    if not rows:
        print("mm 4096: no event pair was read")


def unfinished() -> None:
    """Ask for pairs the device has not come to yet: "not ready" must not reach torch, which would raise it."""
    a = torch.randn(8192, 8192, device="cuda")
    with Profiled(every=1):
        for _ in range(120):
            torch.mm(a, a)
        begin = torch.cuda.Event()
        begin.record()
        time.sleep(1.1)
        waiting = not begin.query()
        for _ in range(100):
            a.add_(0)
    torch.cuda.synchronize()
    print(f"pairs asked for while the device was {'still busy' if waiting else 'idle (too fast for this)'}: no error left behind")


def capture() -> None:
    """Capture and replay a graph while everything is observed and pairs are due: it has to succeed, and replays show no operators."""
    x = torch.randn(256, 256, device="cuda")
    with Profiled(every=1):
        for _ in range(100):
            x @ x
        torch.cuda.synchronize()
        time.sleep(1.1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(100):
                y = x @ x
        for _ in range(100):
            graph.replay()
        torch.cuda.synchronize()
        seen = sum(row["count"] for row in op_table.parse(op_table.take(library.current())).rows if row["op"] == "aten::mm")
    assert torch.allclose(y, x @ x, atol=1e-2)
    print(f"graph of 100 captured and replayed 100 times; aten::mm seen {seen} times, none of them in a replay")


def capture_beside() -> None:
    """Capture a graph while another thread works on the device and reads its pairs."""
    x, stop = torch.randn(256, 256, device="cuda"), threading.Event()

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                x @ x

    with Profiled(every=1):
        other = threading.Thread(target=work)
        other.start()
        for _ in range(4):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                begin = time.monotonic()
                while time.monotonic() < begin + 0.6:
                    y = x @ x
                    time.sleep(0.01)
            graph.replay()
        stop.set()
        other.join()
        torch.cuda.synchronize()
    assert torch.allclose(y, x @ x, atol=1e-2)
    print("four graphs captured while another thread was timed")


ASLEEP = """
import ctypes, os, time
import torch
import fanfold
run = fanfold.init("asleep", ops={"every": 1}, quiet=True)
for step in range(50):  # forward only: torch's own backward starts the driver, whatever it works on
    run.log({"mean": torch.ones(4, 8).exp().mean().item()}, step=step)
begin = time.monotonic()
if (pid := os.fork()) == 0:
    os._exit(0 if torch.ones(3, device="cuda").sum().item() == 3 else 1)
waited = time.monotonic() - begin
in_child = "works" if os.waitpid(pid, 0)[1] == 0 else "FAILS"
flags, active = ctypes.c_uint(), ctypes.c_int()
ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active))
print(f"a program that leaves the device alone: context {'MADE' if active.value else 'none'}, "
      f"CUDA in a child forked at once {in_child} (the fork took {waited * 1e3:.0f} ms)")
run.finish()
"""


def asleep() -> None:
    """Profile a program that does not use the device: no context may be made for it."""
    done = subprocess.run([sys.executable, "-c", ASLEEP], capture_output=True, text=True, timeout=120, check=False)
    print(done.stdout.strip() or f"FAILED: {done.stderr[-2000:]}")


def measure(seconds: float, only: str = "", size: str = "") -> None:
    library.bind()  # or the reason why not
    ops.EARLY_STEP = 1 << 40  # observed once in every run; here it would be once in every block
    path = Path(library.current()._name)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, Python {sys.version.split()[0]}; self-test passed: {path}")
    asleep()
    device_time()
    unfinished()
    capture()
    capture_beside()
    for one in SIZES:
        if size in ("", one):
            overhead(one, seconds, [name for name in MODES if only in ("", name) or name == "nothing"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=100, help="for each size of step; nine rounds at least")
    parser.add_argument("--only", default="", help="one of the modes, such as default")
    parser.add_argument("--size", default="", help=f"one of {', '.join(SIZES)}")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("No CUDA device is here: nothing was measured.")
        return 1
    measure(args.seconds, args.only, args.size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
