"""What the black box costs on a GPU, and whether it finds what it should there: `python benchmarks/gpu_blackbox.py [--seconds N] [--json FILE]`.

The cost is the ratio of a training step with the black box to the same step without, in blocks that alternate: the black box as it is
after the first steps (pulse, and a look at the allocator each second), and the allocator's history, which is on for the first two
steps and while memory grows. How long it is on is measured in whole runs. Then: a program that runs out of memory, a collective that
does not finish, and the health of the GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
import fanfold
from fanfold.blackbox.memory import MemoryRecorder
from fanfold.blackbox.watch import Watch
from fanfold.store import open_run
from fanfold.store.blackbox import hangs, memory_errors

BLOCK_SECONDS = 2.0  # two looks
VARIANTS = ("nothing", "nothing again", "black box")
WITH_HISTORY = (*VARIANTS, "history")  # in one round of four: its cost is large, and a few blocks show it


def cost(kind: str, folder: str, seconds: float) -> dict:
    """Return the ratio of a step with each part of the black box to one without, by blocks that alternate."""
    import torch

    from gpu import Steps

    steps_of = Steps(kind, None)
    steps = max(3, round(BLOCK_SECONDS / steps_of.timed("nothing", 20)))
    parts = Parts(torch, folder)
    pairs: dict[str, list[tuple[float, float]]] = {variant: [] for variant in WITH_HISTORY}
    end, repeat = time.monotonic() + seconds, 0
    while time.monotonic() < end or repeat < 9:
        variants = WITH_HISTORY if repeat % 4 == 3 else VARIANTS
        turn, times = repeat % len(variants), {}
        for variant in variants[turn:] + variants[:turn]:
            with parts.on(variant):
                steps_of.timed("nothing", 3)
                times[variant] = steps_of.timed("nothing", steps)
        if repeat:  # the first round warms up
            for variant, found in times.items():
                pairs[variant].append((found, times["nothing"]))
        repeat += 1
    parts.close()
    return {variant: summary(kind, variant, found, steps) for variant, found in pairs.items()}


def summary(kind: str, variant: str, pairs: list[tuple[float, float]], steps: int) -> dict:
    """Print and return the median ratio of neighbouring blocks, its quartiles, and how far chance moves the median."""
    ratios = [with_it / without for with_it, without in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4)
    error = 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5
    ms = statistics.median(with_it for with_it, _ in pairs) * 1e3
    print(
        f"{kind:44s} {variant:14s} {ms:8.3f} ms/step  x{middle:.4f} +- {error:.4f} [{low:.4f}, {high:.4f}] of {len(ratios)}",
        flush=True,
    )
    return {"ms": ms, "ratio": middle, "error": error, "quartiles": [low, high], "blocks": len(ratios), "steps": steps}


class Parts:
    """The parts of the black box, each on for one block."""

    def __init__(self, torch, folder: str) -> None:
        self._torch, self._folder = torch, folder
        self._number = 0
        self._run = fanfold.init("cost", dir=folder, quiet=True, system=False, blackbox=False)
        time.sleep(5.0)  # the facts of the run are collected

    def _settled(self) -> Watch:
        """Return the watch of a rank whose first steps are over."""
        self._number += 1
        folder = Path(self._folder) / "pulses"
        folder.mkdir(exist_ok=True)
        recorder = MemoryRecorder(folder, 0, lambda _: True)
        recorder._own = recorder._asked = True
        recorder._reserved = 1 << 60
        watch = Watch(
            folder, {"rank": 0, "process": str(self._number)}, lambda: self._number, lambda _: True, chores=[recorder.look]
        )
        watch.start()
        return watch

    @contextlib.contextmanager
    def on(self, variant: str):
        history = self._torch.cuda.memory._record_memory_history
        watch = self._settled() if variant == "black box" else None
        if variant == "history":
            history("all", context="alloc", stacks="python", max_entries=50_000)
        yield
        if watch is not None:
            watch.stop(1.0)
        elif variant == "history":
            history(None)

    def close(self) -> None:
        self._run.finish()


WHOLE = """
import json, sys, time
import torch
import fanfold
from fanfold.blackbox.memory import MemoryRecorder

on, last, record = [0.0], [None], MemoryRecorder._record
def timed(self, cuda, **how):
    now = time.monotonic()
    if last[0] is not None:
        on[0] += now - last[0]
    last[0] = now if how["on"] else None
    record(self, cuda, **how)
MemoryRecorder._record = timed
if sys.argv[4] == "grows":  # 30 s would be most of this run
    from fanfold.blackbox import memory
    memory.CREDIT_SECONDS = 5.0
run = fanfold.init("whole", dir=sys.argv[1], quiet=True, blackbox=True)
sys.path.insert(0, sys.argv[2])
from gpu import KINDS, Steps
steps = Steps(list(KINDS)[1], None)
kept, began, count = [], time.monotonic(), 0
while time.monotonic() - began < float(sys.argv[3]):
    steps.step("nothing")
    torch.cuda.synchronize()
    count += 1
    if sys.argv[4] == "grows" and count % 20 == 0:
        kept.append(torch.empty(32 << 20, dtype=torch.uint8, device="cuda"))
took = time.monotonic() - began
if last[0] is not None:
    on[0] += time.monotonic() - last[0]
print(json.dumps({"seconds": took, "steps": count, "history on for": on[0]}))
run.finish()
"""


def whole(folder: str, seconds: float) -> dict:
    """Return how long the allocator's history is on in a whole run: one with steady memory, and one whose memory grows all the time."""
    script = Path(folder) / "whole.py"
    script.write_text(WHOLE)
    found = {}
    for how in ("steady", "grows"):
        command = [sys.executable, str(script), folder, str(Path(__file__).parent), str(seconds), how]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds + 120)
        lines = done.stdout.strip().splitlines()
        found[how] = json.loads(lines[-1]) if lines else {"error": done.stderr[-2000:]}
    return found


OUT_OF_MEMORY = """
import sys
import time
import torch
import fanfold

class Hoarder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.small, self.kept = torch.nn.Linear(64, 64), []

    def forward(self, x):
        self.kept.append(torch.empty(4 << 30, dtype=torch.uint8, device="cuda"))  # MARK hoard
        return self.small(x)

late = sys.argv[2] == "late"
if late:  # the first steps are over, and memory grows again
    from fanfold.blackbox import memory
    memory.GROWTH_SECONDS = 3.0
run = fanfold.init("oom", id=sys.argv[2], dir=sys.argv[1], quiet=True, blackbox=True)
model = Hoarder().cuda()
x = torch.randn(8, 64, device="cuda")
if late:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        model.small(x).sum().backward()
        optimizer.step()
        time.sleep(1.5)
    assert not torch._C._cuda_isHistoryEnabled()
for step in range(100):
    if late:
        time.sleep(0.5)
    with fanfold.label(model="hoarder"):
        x = model(x)
    run.log({"step": step})
"""


def out_of_memory(folder: str, when: str) -> dict:
    """Run out of memory, at the start or late; return what the run says about it."""
    script = Path(folder) / "hoard.py"
    script.write_text(OUT_OF_MEMORY)
    done = subprocess.run([sys.executable, str(script), folder, when], capture_output=True, text=True, check=False, timeout=200)
    (failed,) = memory_errors(open_run(Path(folder) / "oom" / when))[-1:] or [None]
    if failed is None:
        return {"error": done.stderr[-3000:]}
    line = next(n for n, text in enumerate(OUT_OF_MEMORY.splitlines(), 1) if "# MARK hoard" in text)
    most = failed.use.by_stack[0]
    found = {"text": failed.text, "files": failed.files, "right line": any((s.file, s.line) == (str(script), line) for s in most.where),
             "labels": [(one.label, one.size) for one in failed.use.by_label], "unknown": failed.use.unknown,
             "allocated": failed.use.allocated, "asked": str(failed.use.where[:1]), "exit": done.returncode, "stderr": done.stderr[-300:]}  # fmt: skip
    import torch

    found["metadata"] = hasattr(torch._C, "_cuda_setMemoryMetadata")
    if failed.files:
        snapshot, page = Path(folder) / "s.pickle", Path(folder) / "s.html"
        snapshot.write_bytes(open_run(Path(folder) / "oom" / when).blob(failed.files[0]["blob"]))
        viewer = Path(torch.cuda.__file__).parent / "_memory_viz.py"
        drawn = subprocess.run([sys.executable, str(viewer), "trace_plot", str(snapshot), "-o", str(page)],
                               capture_output=True, text=True, check=False)  # fmt: skip
        found["viewer"] = (drawn.returncode == 0 and page.stat().st_size > 10_000) or drawn.stderr[-500:]
    return found


STUCK = """
import sys
import torch
import torch.distributed as dist
import fanfold

torch.cuda.set_device(0)
dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29517", rank=0, world_size=1)
run = fanfold.init("stuck", id="stuck", dir=sys.argv[1], quiet=True, system=False, blackbox={"hang": 5})
x = torch.ones(1024, device="cuda")
for step in range(3):
    dist.all_reduce(x)
    torch.cuda.synchronize()
    run.log({"step": step})
torch.cuda._sleep(int(60e9))  # the collective waits behind it, as it would for another rank
dist.all_reduce(x)
torch.cuda.synchronize()  # MARK stuck
run.finish()
"""


def stuck(folder: str) -> dict:
    """Start a collective that does not finish; return what the run says about it."""
    script = Path(folder) / "stuck.py"
    script.write_text(STUCK)
    done = subprocess.run([sys.executable, str(script), folder], capture_output=True, text=True, check=False, timeout=150)
    run = open_run(Path(folder) / "stuck" / "stuck")
    line = next(n for n, text in enumerate(STUCK.splitlines(), 1) if "# MARK stuck" in text)
    return {"hangs": [hang.text for hang in hangs(run)], "line": line, "collectives": [len(one.collectives) for hang in hangs(run)
            for one in hang.ranks], "exit": done.returncode, "stderr": done.stderr[-500:]}  # fmt: skip


def health() -> dict:
    """Return two samples of the GPU's metrics, with work between them, and what a sample costs."""
    import torch

    from fanfold.probes.gpus import Gpus

    reader, faults = Gpus(), []
    reader._report = lambda fault, _: faults.append(str(fault))
    first = reader()
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    end = time.monotonic() + 3
    while time.monotonic() < end:
        x @ x
        torch.cuda.synchronize()
    second = reader()
    began = time.process_time()
    for _ in range(20):
        reader()
    return {"first": first, "second": second, "faults": faults, "cpu ms": (time.process_time() - began) / 20 * 1e3,
            "queries": sorted(reader._gpus[0]) if reader._gpus else []}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--seconds", type=float, default=240.0, help="how long to measure the cost")
    parser.add_argument("--only", choices=("cost", "whole", "oom", "stuck", "health"))
    parser.add_argument("--kind", default="", help="measure the cost of steps with this in their name alone, such as MLP")
    args = parser.parse_args()
    from gpu import KINDS

    found: dict = {}
    os.environ.setdefault("FANFOLD_CACHE_DIR", tempfile.mkdtemp())
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # the programs started below use these sources, too
    with tempfile.TemporaryDirectory() as folder:
        parts = {
            "oom": lambda: {when: out_of_memory(folder, when) for when in ("early", "late")},
            "stuck": lambda: stuck(folder),
            "health": health,
            "cost": lambda: {kind: cost(kind, folder, args.seconds * 0.7 / 3) for kind in list(KINDS)[:3] if args.kind in kind},
            "whole": lambda: whole(folder, args.seconds * 0.15),
        }
        for name, part in parts.items():
            if args.only in (None, name):
                found[name] = part()
                print(name, json.dumps(found[name], indent=1, default=str), flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1, default=str))


if __name__ == "__main__":
    main()
