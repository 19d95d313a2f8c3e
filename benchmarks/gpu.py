"""What logging ten device scalars per step costs on a GPU, and whether they arrive as they were.

Runs on any machine with CUDA and PyTorch: `python benchmarks/gpu.py [--quick] [--json FILE]`. Variants of one training step,
interleaved, medians of repeats, as ratios to the step that computes the ten scalars and logs nothing:
  item      float(tensor) for each scalar, what a tracker does with a tensor
  tolist    one stack and one .tolist()
  fanfold   run.log({... ten tensors ...}, step=i)
Then the promises: overwritten in place after log(), every dtype, side streams, graph capture, a full ring, images, kill -9.
Then the operator profile (gpu_ops.py). `--only logging` or `--only ops` for one half, `--only scalars` for the times alone,
`--only call` for the host time of one call.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
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
        self.inside: dict[str, list[int]] = collections.defaultdict(list)  # ns of the host in what a variant does

    def step(self, variant: str) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(self.data).float().pow(2).mean()
        loss.backward()
        self.optimizer.step()
        value = loss.detach()
        scalars = [value * (i + 1) for i in range(10)]
        self.count += 1
        begin = time.perf_counter_ns()
        if variant == "item":
            self.sink.append([float(t) for t in scalars])
        elif variant == "tolist":
            self.sink.append(torch.stack(scalars).tolist())
        elif variant == "fanfold":
            self.run.log({f"m{i}": t for i, t in enumerate(scalars)}, step=self.count)
        self.inside[variant].append(time.perf_counter_ns() - begin)

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
        host = statistics.median(steps_of.inside[variant]) / 1e3
        rows[variant]["host_us"], rows[variant]["host_share"] = host, host / statistics.median(times["nothing"]) / 1e6
        print(
            f"{kind:44s} {variant:8s} {rows[variant]['ms']:8.3f} ms/step  x{middle:.3f} [{low:.3f}, {high:.3f}]  of medians x{rows[variant]['of_medians']:.3f}"
            f"  inside {host:.1f} us = {rows[variant]['host_share']:.2%} of a step",
            flush=True,
        )
    return rows


def host_cost(run) -> dict:
    """Host time of one call on the training thread, at the pace of a training loop (one call each 3 ms), in blocks that alternate."""
    scalars = {f"m{i}": torch.ones((), device=DEVICE) * i for i in range(10)}
    targets = list(torch.zeros(10, device=DEVICE).unbind())
    calls = {
        "fanfold": lambda i: run.log(scalars, step=i),
        "the one launch alone": lambda i: torch._foreach_copy_(targets, list(scalars.values()), True),
        "item": lambda i: [float(t) for t in scalars.values()],
    }
    times = {name: [] for name in calls}
    for block in range(9):
        for name, call in calls.items():
            for i in range(110):
                torch.cuda.synchronize()
                start = time.perf_counter_ns()
                call(110 * block + i)
                took = (time.perf_counter_ns() - start) / 1e3
                if i >= 10:  # the first calls of a block find the caches of the block before
                    times[name].append(took)
                time.sleep(0.003)
    row = {name: statistics.median(some) for name, some in times.items()}
    print("host time of ten device scalars, us: " + ", ".join(f"{name} {value:.1f}" for name, value in row.items())
          + f"; fanfold to item {row['fanfold'] / row['item']:.2f}", flush=True)  # fmt: skip
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
    done += (
        check_first_use(folder)
        + check_tight_loop(folder)
        + check_full_ring(folder)
        + check_kill(folder)
        + check_lightning(folder)
    )
    return done


def first_in_inference_mode(run) -> None:
    with torch.inference_mode():
        run.log({"x": torch.zeros((), device=DEVICE), "n": torch.zeros((), dtype=torch.int64, device=DEVICE)}, step=0)


def first_in_no_grad(run) -> None:
    with torch.no_grad():
        run.log({"x": torch.zeros((), device=DEVICE), "n": torch.zeros((), dtype=torch.int64, device=DEVICE)}, step=0)


def first_in_autocast(run) -> None:
    with torch.autocast(DEVICE, torch.bfloat16):
        weight = torch.eye(8, device=DEVICE)
        run.log({"x": (weight @ weight).sum() - 8, "n": torch.zeros((), dtype=torch.int64, device=DEVICE)}, step=0)


def first_in_a_compiled_function(run, mode: str | None = None) -> None:
    def step(x):
        y = x * 0
        run.log({"x": y, "n": torch.zeros((), dtype=torch.int64, device=DEVICE)}, step=0)
        return y + 1

    torch.compile(step, mode=mode)(torch.ones((), device=DEVICE))


def first_in_a_compiled_function_with_graphs(run) -> None:
    first_in_a_compiled_function(run, "reduce-overhead")


def first_in_a_hook(run) -> None:
    x = torch.zeros((), device=DEVICE, requires_grad=True)
    zero = torch.zeros((), dtype=torch.int64, device=DEVICE)
    y = x * 1
    y.register_hook(lambda grad: run.log({"x": grad * 0, "n": zero}, step=0))
    y.backward()


def first_in_threads(run) -> None:
    def work(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for i in range(500):
                run.log({f"thread{number}": torch.full((), float(i), device=DEVICE)}, step=i)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    run.log({"x": torch.zeros((), device=DEVICE), "n": torch.zeros((), dtype=torch.int64, device=DEVICE)}, step=0)
    for thread in threads:
        thread.join()


FIRST_USES = (first_in_inference_mode, first_in_no_grad, first_in_autocast, first_in_a_compiled_function,
              first_in_a_compiled_function_with_graphs, first_in_a_hook, first_in_threads)  # fmt: skip


def check_first_use(folder: str) -> list[str]:
    """Whatever mode the first device value is logged in, later ones arrive from training, evaluation and another thread."""
    done = []
    for first in FIRST_USES:
        run = fanfold.init("first", dir=folder, quiet=True, system=False)
        first(run)

        def log(i: int, run=run) -> None:
            x = torch.full((), float(i), device=DEVICE, requires_grad=i % 2 == 0)
            run.log({"x": x, "n": torch.full((), i, dtype=torch.int64, device=DEVICE)}, step=i)

        for i in range(1, 100):
            log(i)
        with torch.inference_mode():
            run.log({"x": torch.full((), 100.0, device=DEVICE), "n": torch.full((), 100, device=DEVICE)}, step=100)
        thread = threading.Thread(target=log, args=(101,))
        thread.start()
        thread.join()
        run.finish()
        stored = fanfold.open(run.id, dir=folder)
        wanted = [float(i) for i in range(102)]
        got = [list(stored.series(key).values) for key in ("x", "n")]
        threads = [list(stored.series(f"thread{n}").values) for n in range(4)] if first is first_in_threads else []
        if got != [wanted, wanted] or any(values != [float(i) for i in range(500)] for values in threads) or stored.lost_values:
            raise SystemExit(
                f"FAILED {first.__name__}: {[len(values) for values in got]} of 102, {threads and [len(t) for t in threads]}"
            )
        done.append(f"{first.__name__.replace('_', ' ')}: 102 of 102 floats and integers as they were")
    return done


def check_tight_loop(folder: str) -> list[str]:
    """As many calls as the loop can make: the ring grows, and nothing is dropped."""
    run = fanfold.init("tight", dir=folder, quiet=True, system=False)
    value = torch.zeros((), device=DEVICE)
    count = 102_000
    start = time.perf_counter()
    for i in range(count):
        run.log({"x": value}, step=i)
        value += 1
    took = time.perf_counter() - start
    pinned = sum(slab.host.nbytes for ring in run._recorder._deferred._rings.values() for slab in ring._slabs)
    run.finish(timeout=60)
    stored = fanfold.open(run.id, dir=folder)
    if list(stored.series("x").values) != [float(i) for i in range(count)] or stored.lost_values:
        raise SystemExit(f"FAILED tight loop: {len(stored.series('x'))} of {count}, lost {len(stored.lost_values)}")
    return [f"tight loop: {count:,} of {count:,} calls kept, {took / count * 1e6:.1f} us a call, {pinned / 1e6:.0f} MB pinned"]


def check_lightning(folder: str) -> list[str]:
    """Lightning's sanity check logs its first device value in inference mode; training then goes on."""
    try:
        import lightning.pytorch as pl
    except ImportError:
        try:
            import pytorch_lightning as pl
        except ImportError:
            return []
    from fanfold.frameworks.lightning import FanfoldLogger

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1)

        def training_step(self, batch, index):
            loss = self.layer(batch).pow(2).mean()
            self.logger.experiment.log({"by_hand": loss.detach()}, step=self.global_step)
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch, index):
            loss = self.layer(batch).pow(2).mean()
            self.logger.experiment.log({"val_by_hand": loss}, step=self.global_step)
            self.log("val_loss", loss)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    logger = FanfoldLogger(project="lightning", dir=folder)
    data = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=8)
    trainer = pl.Trainer(logger=logger, accelerator="gpu", devices=1, max_epochs=3, log_every_n_steps=1, enable_progress_bar=False,
                         enable_checkpointing=False, enable_model_summary=False)  # fmt: skip
    trainer.fit(Model(), data, data)
    run = logger.experiment
    run.finish()
    stored = fanfold.open(run.id, dir=folder)
    kept = (len(stored.series("by_hand")), len(stored.series("val_by_hand")))
    if kept[0] != 24 or kept[1] < 1 or stored.lost_values:
        raise SystemExit(f"FAILED Lightning: {kept}, lost {stored.lost_values}")
    return [f"Lightning fit with validation: {kept[0]} training values of 24, {kept[1]} steps with validation values"]


def check_full_ring(folder: str) -> list[str]:
    """A GPU that stands still: the caller never waits for it, and every value is kept or counted as lost."""
    run = fanfold.init("ring", dir=folder, quiet=True, system=False)
    value = torch.ones((), device=DEVICE)
    run.log({"x": value}, step=0)
    run.flush()
    torch.cuda._sleep(4_000_000_000)
    worst = 0.0
    for i in range(1, 251):  # beyond about 1,000 launches the driver itself makes every caller wait
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
    parser.add_argument("--only", choices=("call", "scalars", "logging", "ops"))
    parser.add_argument("--child")
    args = parser.parse_args()
    if args.child:
        child(args.child)
        return
    if args.only != "ops":
        kinds = () if args.only == "call" else KINDS
        logging(12 if args.quick else args.repeats, args.json, kinds, promises=args.only not in ("call", "scalars"))
    if args.only in (None, "ops"):
        import gpu_ops

        gpu_ops.measure(10 if args.quick else 100)


def logging(repeats: int, file: str | None, kinds: Iterable[str], *, promises: bool = True) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FANFOLD_CACHE_DIR"] = folder + "/cache"
        print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, Python {sys.version.split()[0]}", flush=True)
        run = fanfold.init("bench", dir=folder, quiet=True, system=False)
        results: dict = {"host": host_cost(run)}
        for kind in kinds:
            results[kind] = bench(kind, repeats, run)
        run.finish()
        stored = fanfold.open(run.id, dir=folder)
        results["lost"] = sum(len(entry["keys"]) for entry in stored.lost_values)
        print(f"values lost in the benchmark: {results['lost']}")
        results["promises"] = check_promises(folder) if promises else []
        for line in results["promises"]:
            print("  kept:", line)
    if file:
        Path(file).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
