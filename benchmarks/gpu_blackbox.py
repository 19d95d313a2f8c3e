"""What the black box costs on a GPU, and whether it finds what it should there: `python benchmarks/gpu_blackbox.py [--seconds N] [--json FILE]`.

The cost is the ratio of a training step with the black box to the same step without, in blocks that alternate: the black box as it is
after the first steps (pulse, and a look at the allocator each second), ten looks a second (their excess divided by ten bounds what one
costs, where the host's own noise hides it), and the allocator's history, which is on for the first two steps and while memory grows.
How long it is on is measured in whole runs. Then: a program that runs out of memory, collectives of NCCL that do not finish (behind a
busy stream, and among four ranks that share the GPU), and the health of the GPU. `--only cost,stuck` for some of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
import fanfold
from fanfold.blackbox.memory import MemoryRecorder
from fanfold.blackbox.watch import Watch
from fanfold.store import open_run
from fanfold.store.blackbox import hangs, memory_errors

BLOCK_SECONDS, SHORT_SECONDS = 2.0, 0.4  # two looks, four looks
VARIANTS = ("nothing", "nothing again", "black box")
WITH_HISTORY = (*VARIANTS, "history")  # in one round of four: its cost is large, and a few blocks show it
OFTEN = "ten looks a second"


def cost(kind: str, folder: str, seconds: float) -> dict:
    """Return the ratio of a step with each part of the black box to one without, by blocks that alternate."""
    import torch

    from gpu import Steps

    steps_of, parts = Steps(kind, None), Parts(torch, folder)
    found = blocks(kind, steps_of, parts, (VARIANTS, VARIANTS, VARIANTS, WITH_HISTORY), BLOCK_SECONDS, seconds * 0.6)
    found |= blocks(kind, steps_of, parts, (("nothing", OFTEN),), SHORT_SECONDS, seconds * 0.4)
    found["one look a second, by ten"] = {name: 1 + (found[OFTEN]["ratio"] - 1) / 10 if name == "ratio" else found[OFTEN]["error"] / 10
                                          for name in ("ratio", "error")}  # fmt: skip
    parts.close()
    return found


def blocks(kind: str, steps_of, parts: Parts, turns: tuple[tuple[str, ...], ...], length: float, seconds: float) -> dict:
    """Time blocks of steps, each round with the variants of its turn, and compare each with the bare block of its round."""
    steps = max(3, round(length / steps_of.timed("nothing", 20)))
    pairs: dict[str, list[tuple[float, float]]] = {variant: [] for variants in turns for variant in variants}
    end, repeat = time.monotonic() + seconds, 0
    while time.monotonic() < end or repeat < 9:
        variants = turns[repeat % len(turns)]
        turn, times = repeat % len(variants), {}
        for variant in variants[turn:] + variants[:turn]:
            with parts.on(variant):
                steps_of.timed("nothing", 3)
                times[variant] = steps_of.timed("nothing", steps)
        if repeat:  # the first round warms up
            for variant, found in times.items():
                pairs[variant].append((found, times["nothing"]))
        repeat += 1
    return {variant: summary(kind, variant, found, steps) for variant, found in pairs.items()}


def summary(kind: str, variant: str, pairs: list[tuple[float, float]], steps: int) -> dict:
    """Print and return the median ratio of neighbouring blocks, its quartiles, and how far chance moves the median."""
    ratios = [with_it / without for with_it, without in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4)
    error = 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5
    ms = statistics.median(with_it for with_it, _ in pairs) * 1e3
    print(
        f"{kind:44s} {variant:18s} {ms:8.3f} ms/step  x{middle:.4f} +- {error:.4f} [{low:.4f}, {high:.4f}] of {len(ratios)}",
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

    def _settled(self, interval: float) -> Watch:
        """Return the watch of a rank whose first steps are over."""
        self._number += 1
        folder = Path(self._folder) / "pulses"
        folder.mkdir(exist_ok=True)
        recorder = MemoryRecorder(folder, 0, lambda _: True)
        recorder._own = recorder._asked = True
        recorder._reserved = 1 << 60
        watch = Watch(folder, {"rank": 0, "process": str(self._number)}, lambda: self._number, lambda _: True,
                      interval=interval, chores=[recorder.look])  # fmt: skip
        watch.start()
        return watch

    @contextlib.contextmanager
    def on(self, variant: str):
        history = self._torch.cuda.memory._record_memory_history
        interval = {"black box": 1.0, OFTEN: 0.1}.get(variant)
        watch = self._settled(interval) if interval else None
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
torch.cuda._sleep(int(40e9))  # 20 s: the collective waits behind it, as it would for another rank
dist.all_reduce(x)
torch.cuda.synchronize()  # MARK stuck
run.finish()
"""


RANKS = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
os.environ["NCCL_HOSTID"] = f"node{rank}"  # NCCL refuses ranks of one node that share a GPU
import torch
import torch.distributed as dist
import fanfold

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(0)
run = fanfold.init("stuck", id=sys.argv[2], dir=sys.argv[1], quiet=True, system=False, blackbox={"hang": 8})
both = device == "cuda" and dist.is_gloo_available()
dist.init_process_group("cpu:gloo,cuda:nccl" if both else "nccl" if device == "cuda" else "gloo")
pair = dist.new_group([0, 1])
x = torch.ones(1024, device=device)
on_cpu = torch.ones(2, device="cpu" if both or device == "cpu" else device)

def sleeps():
    time.sleep(600)  # MARK sleeps

def diverges():
    dist.all_reduce(x, group=pair); x.sum().item()  # MARK diverges

def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)  # MARK is_killed

def save_checkpoint():
    time.sleep(25)

if rank < 2:
    dist.all_reduce(x, group=pair)
for step in range(8):
    dist.all_reduce(on_cpu)
    if step == 5 and rank == 1:
        globals()[sys.argv[2]]()
    dist.all_reduce(x); x.sum().item()  # on a GPU it waits here
    run.log({"step": step})
run.finish()
dist.destroy_process_group()
"""
JOB_SECONDS = 80.0
# What `fanfold hang` has to say of each; nothing: it must not be called a hang.
FAULTS = {
    "sleeps": ("3 of 4 ranks wait in all_reduce number ", "; rank 1 has not arrived; rank 1 ", "{fault}.py:{line} in {fault}"),
    "diverges": ("3 of 4 ranks wait in all_reduce number ", "; rank 1 has not arrived; rank 1 ", "{fault}.py:{line} in {fault}"),
    "is_killed": ("Rank 1 ended first", "SIGKILL"),
    "save_checkpoint": (),
}


def stuck(folder: str) -> dict:
    """Return what runs say about collectives of NCCL that do not finish, or that others are merely late for."""
    found = {"behind a busy stream": behind_a_stream(folder)}
    print(json.dumps(found, indent=1), flush=True)
    with ThreadPoolExecutor(2) as pool:  # two jobs at once: what they do is wait
        return found | dict(zip(FAULTS, pool.map(lambda fault: among_ranks(folder, fault), FAULTS), strict=True))


def behind_a_stream(folder: str) -> dict:
    """Start a collective that does not finish; return what the run says about it."""
    script = Path(folder) / "stuck.py"
    script.write_text(STUCK)
    done = subprocess.run([sys.executable, str(script), folder], capture_output=True, text=True, check=False, timeout=150)
    found = said(folder, "stuck")
    ok = f"stuck.py:{line_of(STUCK, 'stuck')} " in found["text"] and "in all_reduce number 4 of 1024 float" in found["text"]
    return {"ok": ok, **found, "exit": done.returncode, "stderr": done.stderr[-500:]}


def among_ranks(folder: str, fault: str) -> dict:
    """Run four ranks of NCCL on one GPU, of which rank 1 does something wrong; return what the run says about it."""
    script, log = Path(folder) / f"{fault}.py", Path(folder) / f"{fault}.log"
    script.write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(script), folder, fault]
    env = {**os.environ, "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1",
           "NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1"}  # fmt: skip
    began = time.monotonic()
    with log.open("w") as file:
        job = subprocess.Popen(command, env=env, stdout=file, stderr=file, start_new_session=True)
    while time.monotonic() - began < JOB_SECONDS and (running := job.poll() is None):
        time.sleep(1.0)
        if fault in ("sleeps", "diverges") and said(folder, fault)["answered"] == 4:
            break
    seconds = time.monotonic() - began
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGTERM)
    job.wait(60)
    wanted = [word.format(fault=fault, line=line_of(RANKS, fault)) for word in FAULTS[fault]]
    for _ in range(5):  # the watcher writes its last
        time.sleep(2.0)
        found = said(folder, fault)
        found["ok"] = all(word in found["text"] for word in wanted) if wanted else not (found["hangs"] or running)
        if wanted and found["ok"]:
            break
    found |= {"over by itself": not running, "seconds": seconds, "log": log.read_text()[-1500:]}
    print(fault, json.dumps(found, indent=1), flush=True)
    return found


def said(folder: str, run_id: str) -> dict:
    """Return what `fanfold hang` says of a run, and how many ranks answered with their stacks."""
    path = Path(folder) / "stuck" / run_id
    if not (path / "journal").is_dir():
        return {"text": "", "hangs": [], "answered": 0}
    seen = hangs(open_run(path))
    answered = max((sum(bool(one.threads) for one in hang.ranks) for hang in seen), default=0)
    command = [sys.executable, "-m", "fanfold", "hang", run_id, "--dir", folder]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"})
    collectives = [len(one.collectives) for hang in seen for one in hang.ranks]
    return {
        "text": shown.stdout + shown.stderr,
        "hangs": [hang.text for hang in seen],
        "answered": answered,
        "collectives": collectives,
    }


def line_of(program: str, mark: str) -> int:
    return next(n for n, text in enumerate(program.splitlines(), 1) if f"# MARK {mark}" in text)


HEALTH = ("util", "memory", "power_w", "temp_c", "sm_mhz", "mem_mhz", "power_limit_w", "throttle", "ecc_corrected", "ecc_uncorrected",
          "remapped_rows", "remap_failed", "pcie_replays", "sm_active", "sm_occupancy", "tensor_active", "dram_active")  # fmt: skip


def health() -> dict:
    """Return two samples of the GPU's metrics, with work between them, and what a sample costs."""
    import torch

    from fanfold.probes.gpu_health import SLOWDOWNS
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
    spent = (time.process_time() - began) / 20 * 1e3
    watch = getattr(reader._xids, "__self__", None)
    missing = [name for name in HEALTH if f"system/gpu/0/{name}" not in second]
    reasons = [
        word
        for bit, word in {1: "idle", 4: "power cap", **SLOWDOWNS}.items()
        if int(second.get("system/gpu/0/throttle", 0)) & bit
    ]
    return {"ok": not missing, "missing": missing, "clocks lowered for": reasons, "Xid events": watch is not None and watch._events is not None,
            "first": first, "second": second, "faults": faults, "cpu ms": spent}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--seconds", type=float, default=240.0, help="how long to measure the cost")
    parser.add_argument("--only", default="cost,whole,oom,stuck,health", help="some of cost,whole,oom,stuck,health")
    parser.add_argument("--kind", default="", help="measure the cost of steps with this in their name alone, such as MLP")
    args = parser.parse_args()
    from gpu import KINDS

    found: dict = {}
    kinds = [kind for kind in KINDS if args.kind in kind]
    os.environ.setdefault("FANFOLD_CACHE_DIR", tempfile.mkdtemp())
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # the programs started below use these sources, too
    with tempfile.TemporaryDirectory() as folder:
        parts = {
            "oom": lambda: {when: out_of_memory(folder, when) for when in ("early", "late")},
            "stuck": lambda: stuck(folder),
            "health": health,
            "cost": lambda: {kind: cost(kind, folder, args.seconds * 0.7 / len(kinds)) for kind in kinds},
            "whole": lambda: whole(folder, args.seconds * 0.15),
        }
        for name, part in parts.items():
            if name in args.only.split(","):
                try:
                    found[name] = part()
                except Exception as error:  # the other parts may be worth their device time
                    found[name] = {"error": f"{type(error).__name__}: {error}"}
                print(name, json.dumps(found[name], indent=1, default=str), flush=True)
                if args.json:  # after each part: what was measured stays if a later one is cut off
                    Path(args.json).write_text(json.dumps(found, indent=1, default=str))


if __name__ == "__main__":
    main()
