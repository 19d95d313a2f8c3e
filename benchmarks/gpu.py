"""What logging ten device scalars per step costs on a GPU, and whether they arrive as they were.

Runs on any machine with CUDA and PyTorch: `python benchmarks/gpu.py [--quick] [--json FILE]`. Variants of one training step,
interleaved, medians of repeats, as ratios to the step that computes the ten scalars and logs nothing:
  item      float(tensor) for each scalar, what a tracker does with a tensor
  tolist    one stack and one .tolist()
  fanfold   run.log({... ten tensors ...}, step=i)
Then the promises: overwritten in place after log(), every dtype, side streams, graph capture, a full ring, images, kill -9.
Then the operator profile (gpu_ops.py). `--only logging` or `--only ops` for one half.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
import fanfold

DEVICE = "cuda"


# What bounds the step decides what a synchronisation costs: the host, both in balance, or the device.
KINDS = {
    "MLP 24x256 (host-bound)": ("mlp", 24, 256, 64, 0, 40),
    "transformer 6x512 (balanced)": ("transformer", 6, 512, 64, 256, 25),
    "transformer 12x768, batch 16 (device-bound)": ("transformer", 12, 768, 16, 512, 24),
    "transformer 12x768, batch 32 (device-bound)": ("transformer", 12, 768, 32, 512, 12),
}


def make(kind: str):
    torch.manual_seed(0)
    family, layers, width, batch, length, _ = KINDS[kind]
    if family == "mlp":
        model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)])
        data = torch.randn(batch, width, device=DEVICE)
    else:
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, batch_first=True, dropout=0.0)
        model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        data = torch.randn(batch, length, width, device=DEVICE)
    model, data = model.to(DEVICE, dtype=torch.bfloat16), data.to(torch.bfloat16)
    return model, data, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


class Steps:
    """One model, stepped under every variant in turn, so that all see the same clocks and temperature."""

    def __init__(self, kind: str, run) -> None:
        self.model, self.data, self.optimizer = make(kind)
        self.run = run
        self.sink: list = []
        self.count = 0

    def step(self, variant: str) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(self.data).float().pow(2).mean()
        loss.backward()
        self.optimizer.step()
        value = loss.detach()
        scalars = [value * (i + 1) for i in range(10)]
        self.count += 1
        if variant == "item":
            self.sink.append([float(t) for t in scalars])
        elif variant == "tolist":
            self.sink.append(torch.stack(scalars).tolist())
        elif variant == "fanfold":
            self.run.log({f"m{i}": t for i, t in enumerate(scalars)}, step=self.count)

    def timed(self, variant: str, steps: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step(variant)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps


def quartiles(values: list[float]) -> tuple[float, float, float]:
    return tuple(statistics.quantiles(values, n=4))


def bench(kind: str, repeats: int, run) -> dict:
    """Time short blocks of steps, every variant in turn and in changing order, and compare each block with its neighbours."""
    steps_of, steps = Steps(kind, run), KINDS[kind][-1]
    variants = ["nothing", "item", "tolist", "fanfold"]
    for variant in variants:
        steps_of.timed(variant, 3 * steps)
    times = {variant: [] for variant in variants}
    for repeat in range(repeats):
        turn = repeat % len(variants)
        for variant in variants[turn:] + variants[:turn]:
            times[variant].append(steps_of.timed(variant, steps))
    rows = {}
    for variant in variants:
        low, middle, high = quartiles([a / b for a, b in zip(times[variant], times["nothing"], strict=True)])
        rows[variant] = {"ms": statistics.median(times[variant]) * 1e3, "ratio": middle, "quartiles": [low, high]}
        rows[variant]["of_medians"] = statistics.median(times[variant]) / statistics.median(times["nothing"])
        print(
            f"{kind:44s} {variant:8s} {rows[variant]['ms']:8.3f} ms/step  x{middle:.3f} [{low:.3f}, {high:.3f}]  of medians x{rows[variant]['of_medians']:.3f}",
            flush=True,
        )
    return rows


def host_cost(run) -> dict:
    """Host time of one call on the training thread, at the pace of a training loop (one call each 3 ms)."""
    scalars = {f"m{i}": torch.ones((), device=DEVICE) * i for i in range(10)}
    row = {}
    for name, call in {
        "fanfold": lambda i: run.log(scalars, step=i),
        "launches alone": lambda i: torch.stack(list(scalars.values())).to("cpu", non_blocking=True),
        "item": lambda i: [float(t) for t in scalars.values()],
    }.items():
        times = []
        for i in range(600):
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            call(i)
            times.append((time.perf_counter_ns() - start) / 1e3)
            time.sleep(0.003)
        row[name] = statistics.median(times)
    print("host time of ten device scalars, us: " + ", ".join(f"{name} {value:.1f}" for name, value in row.items()), flush=True)
    return row


def check_promises(folder: str) -> list[str]:
    done: list[str] = []
    run = fanfold.init("promises", dir=folder, quiet=True, system=False)
    # As it was: overwritten in place right after log().
    value = torch.zeros((), device=DEVICE)
    for i in range(500):
        value.fill_(float(i))
        run.log({"overwritten": value}, step=i)
        value.fill_(-1.0)
    # Every dtype.
    expected = {}
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ):
        tensor = (
            torch.tensor(1.5, device=DEVICE).to(dtype) if dtype.is_floating_point else torch.tensor(1, device=DEVICE).to(dtype)
        )
        expected[str(dtype)] = tensor.float().item()
        run.log({f"dtype/{dtype}": tensor}, step=0)
    run.log(
        {
            "big": torch.tensor(2**62 + 1, device=DEVICE),
            "grad": torch.tensor(2.5, device=DEVICE, requires_grad=True),
            "nan": torch.tensor(float("nan"), device=DEVICE),
            "mixed": 7,
            "one_element": torch.ones(1, device=DEVICE),
        },
        step=0,
    )
    # A side stream.
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        run.log({"side": torch.full((), 3.25, device=DEVICE)}, step=0)
    # Media from the device.
    run.log(
        {
            "image": fanfold.Image(torch.rand(3, 32, 32, device=DEVICE)),
            "hist": fanfold.Histogram(torch.randn(10_000, device=DEVICE)),
        },
        step=0,
    )
    # A graph captured while values are in flight; logging inside the capture is refused, the capture is not disturbed.
    static = torch.ones(8, device=DEVICE)
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(3):
            static.mul(2).sum()
    torch.cuda.current_stream().wait_stream(warm)
    for i in range(200):
        run.log({"inflight": static.sum()}, step=i)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # capture_error_mode "global": any forbidden call from any thread breaks it
        out = static.mul(2).sum()
        run.log({"captured": out}, step=0)
        deadline = time.monotonic() + 0.2  # the waiting thread polls meanwhile
        while time.monotonic() < deadline:
            pass
    for i in range(100):
        static.fill_(float(i))
        graph.replay()
        run.log({"replayed": out}, step=i)
    ok = run.flush(30)
    run.finish()
    stored = fanfold.open(run.id, dir=folder)

    def same(what: str, got, want) -> None:
        if list(got) != list(want):
            raise SystemExit(f"FAILED {what}: got {list(got)[:5]}…, want {list(want)[:5]}…")
        done.append(what)

    same("flush() waited for all", [ok], [True])
    same("overwritten in place: 500 values as they were", stored.series("overwritten").values, [float(i) for i in range(500)])
    for name, want in expected.items():
        same(f"{name}", [float(stored.series(f"dtype/{name}").values[0])], [want])
    same("int64 beyond 2**53", [int(stored.series("big").values[0])], [2**62 + 1])
    same(
        "requires_grad, one element, mixed", [stored.series(k).values[0] for k in ("grad", "one_element", "mixed")], [2.5, 1.0, 7]
    )
    same("NaN", [bool(stored.series("nan").values[0] != stored.series("nan").values[0])], [True])
    same("side stream", stored.series("side").values, [3.25])
    same("in flight before a capture: 200", [len(stored.series("inflight"))], [200])
    same("graph capture undisturbed, 100 replays logged", stored.series("replayed").values, [i * 16.0 for i in range(100)])
    same("inside a capture: marked as lost", [x["keys"] for x in stored.lost_values], [["captured"]])
    same(
        "image and histogram from the device",
        [stored.media("image")[0].load().array().shape, stored.media("hist")[0].kind],
        [(32, 32, 3), "histogram"],
    )
    done += check_full_ring(folder) + check_kill(folder)
    return done


def check_full_ring(folder: str) -> list[str]:
    """A GPU that does not get on: the ring fills, values are counted as lost, the caller never waits."""
    run = fanfold.init("ring", dir=folder, quiet=True, system=False)
    value = torch.ones((), device=DEVICE)
    run.log({"x": value}, step=0)
    run.flush()
    torch.cuda._sleep(4_000_000_000)
    worst = 0.0
    for i in range(1, 251):  # three launches a call; beyond about 1,000 the driver itself makes every caller wait
        start = time.perf_counter()
        run.log({"x": value}, step=i)
        worst = max(worst, time.perf_counter() - start)
    run.finish(timeout=60)
    stored = fanfold.open(run.id, dir=folder)
    kept, lost = len(stored.series("x")), sum(len(entry["keys"]) for entry in stored.lost_values)
    if kept + lost != 251:
        raise SystemExit(f"FAILED stalled GPU: {kept} kept + {lost} lost of 251")
    return [f"stalled GPU: {kept} kept + {lost} lost = 251, worst call {worst * 1e3:.2f} ms"]


def check_kill(folder: str) -> list[str]:
    """Kill -9: everything that had landed is there."""
    child = subprocess.Popen([sys.executable, __file__, "--child", folder], stdout=subprocess.PIPE, text=True)
    run_id = child.stdout.readline().strip()
    time.sleep(3.0)
    before = len(fanfold.open(run_id, dir=folder).series("x"))
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    stored = fanfold.open(run_id, dir=folder)
    after = len(stored.series("x"))
    steps = stored.series("x").steps
    if after < before or list(steps) != list(range(len(steps))) or stored.status != "killed":
        raise SystemExit(f"FAILED kill -9: {before} landed before, {after} after, {stored.status}")
    return [f"kill -9: {before} landed before the look, {after} there after, no gap, status killed"]


def child(folder: str) -> None:
    run = fanfold.init("killed", dir=folder, quiet=True, system=False)
    print(run.id, flush=True)
    value = torch.zeros((), device=DEVICE)
    for i in range(10_000_000):
        run.log({"x": value.add_(1)}, step=i)
        time.sleep(0.0005)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--repeats", type=int, default=80, help="blocks of each variant")
    parser.add_argument("--only", choices=("logging", "ops"))
    parser.add_argument("--child")
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return
    if args.only != "ops":
        logging(12 if args.quick else args.repeats, args.json)
    if args.only != "logging":
        import gpu_ops

        gpu_ops.measure(10 if args.quick else 100)


def logging(repeats: int, file: str | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FANFOLD_CACHE_DIR"] = folder + "/cache"
        print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, Python {sys.version.split()[0]}", flush=True)
        run = fanfold.init("bench", dir=folder, quiet=True, system=False)
        results: dict = {"host": host_cost(run)}
        for kind in KINDS:
            results[kind] = bench(kind, repeats, run)
        run.finish()
        stored = fanfold.open(run.id, dir=folder)
        results["lost"] = sum(len(entry["keys"]) for entry in stored.lost_values)
        print(f"values lost in the benchmark: {results['lost']}")
        results["promises"] = check_promises(folder)
        for line in results["promises"]:
            print("  kept:", line)
    if file:
        Path(file).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
