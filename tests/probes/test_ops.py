"""The operator profile: what it counts, exactly, on real torch; windows, sampling, workers, kills, full tables, fallbacks."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fanfold
from fanfold.errors import SettingError
from fanfold.probes import op_table
from fanfold.probes import ops as probe
from fanfold.probes.native import build
from fanfold.probes.profiler_windows import ProfilerWindows
from fanfold.store.ops import tables
from ops_child import count, last_json, program, run, said, start, stored, with_device
from paths import ROOT

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the native part is for Linux")


@pytest.fixture(scope="session", autouse=True)
def built():
    """Build the library once, beside its sources, as a wheel has it."""
    build.build()


EXACT = """
import torch
@torch.library.custom_op("mine::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x.clone() * 2
@torch.jit.script
def scripted(x):
    return x.sinh()
run = begin({"every": 1})
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for _ in range(20):
    optimizer.zero_grad()
    with torch.profiler.record_function("my range"):
        model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
for _ in range(7):
    twice(torch.ones(2)); scripted(torch.ones(2))
def elsewhere():
    for _ in range(5): torch.ones(2).tan()
thread = threading.Thread(target=elsewhere); thread.start(); thread.join()
with torch.inference_mode():
    torch.ones(2).cosh()
@torch.compile(backend="eager")
def compiled(x): return x.atan() + 1
for _ in range(4): compiled(torch.ones(3))
live = sum(row["count"] for row in run.ops() if row["op"] == "aten::linear")
run.finish()
print(json.dumps({"live": live, "left": os.listdir(run.path / "ops")}))
"""


def test_every_call_is_counted_with_its_scope_and_thread(runs_dir, tmp_path):
    out, _ = run(program(tmp_path, EXACT))
    rows = stored(runs_dir).ops()
    assert last_json(out) == {"live": 20, "left": []}  # seen while it ran; at the end the journal has it all
    assert count(rows, "aten::linear", scope="forward", thread="main") == 20
    assert count(rows, "AddmmBackward0", scope="backward") == 20
    assert count(rows, "aten::mm") == count(rows, "aten::mm", scope="backward")  # forward calls addmm
    assert count(rows, "my range", scope="user", kind="range") == 20
    assert count(rows, "Optimizer.step#SGD.step", scope="user", kind="optimizer") == 20
    assert count(rows, "mine::twice") == 7
    assert count(rows, "aten::sinh") == 7
    assert count(rows, "scripted", scope="torchscript") == 7
    assert count(rows, "aten::tan", thread="thread") == count(rows, "aten::tan") == 5
    assert count(rows, "aten::cosh") == 1
    regions = [row for row in rows if row["kind"] == "compiled region"]
    assert sum(row["count"] for row in regions) >= 4
    assert any(row["op"].startswith("Torch-Compiled Region") for row in regions)
    assert all(row["scale"] == 1.0 for row in rows)


def test_times_nest_and_quantiles_stay_within(runs_dir, tmp_path):
    run(program(tmp_path, EXACT.partition("for _ in range(7)")[0] + "run.finish()"))
    rows = stored(runs_dir).ops()
    (linear,) = [row for row in rows if row["op"] == "aten::linear"]
    (addmm,) = [row for row in rows if row["op"] == "aten::addmm"]
    assert addmm["total_ns"] < linear["total_ns"]
    assert 0 < linear["self_ns"] <= linear["total_ns"] - addmm["total_ns"]
    assert 0 < linear["p50_ns"] <= linear["p99_ns"] <= linear["max_ns"] <= linear["total_ns"]
    assert sum(linear["hist"].values()) == 20


TRAIN = """
import torch
run = begin({ops})
model = torch.nn.Linear(8, 8); optimizer = torch.optim.SGD(model.parameters(), 1e-3); x = torch.ones(4, 8)
for _ in range({steps}):
    optimizer.zero_grad(); model(x).sum().backward(); optimizer.step()
run.finish()
"""


def test_windows_observe_whole_steps_and_say_what_they_stand_for(runs_dir, tmp_path):
    run(program(tmp_path, TRAIN.format(ops={"every": 50, "window": 2}, steps=1000)))
    rows = stored(runs_dir).ops()
    (linear,) = [row for row in rows if row["op"] == "aten::linear"]
    assert 40 <= linear["count"] <= 41  # two of each fifty, and the third step
    assert linear["count"] * linear["scale"] == pytest.approx(1000)
    assert count(rows, "AddmmBackward0") == linear["count"]
    (step,) = [row for row in rows if row["op"] == "Optimizer.step#SGD.step"]
    assert step["count"] == linear["count"]  # windows hold the whole of a step, the optimizer's own range included
    assert 0 < step["self_ns"] < step["total_ns"]
    assert [(table.facts["steps"], table.facts["observed"]) for table in tables(stored(runs_dir))] == [(1000, linear["count"])]


ALWAYS = """
import ctypes, time, torch
from fanfold.probes import step_hooks
from torch.utils.data.dataloader import _BaseDataLoaderIter as Iterator
torchs = Iterator.__next__
cpu = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
watched = cpu._ZN2at18hasGlobalCallbacksEv
watched.restype = ctypes.c_bool
class Items(torch.utils.data.Dataset):
    def __len__(self): return 400
    def __getitem__(self, at):
        if at == 217: time.sleep(0.2)
        return torch.ones(8)
class Stumbles(torch.optim.SGD):
    def step(self, closure=None):
        if not closure: raise RuntimeError("not today")
        return None
run = begin({options})
model = torch.nn.Linear(8, 8); optimizer = torch.optim.SGD(model.parameters(), 1e-3)
seen = []
for x in torch.utils.data.DataLoader(Items(), batch_size=None):
    with torch.profiler.record_function("forward of mine"): y = model(x)
    y.sum().backward(); optimizer.step(); seen.append(watched())
stumbling = Stumbles(model.parameters(), 1e-3)
for _ in range(3):
    try: stumbling.step()
    except RuntimeError: pass
    stumbling.step(lambda: None)
again = Iterator.__next__
def wrapped(self): return again(self)
Iterator.__next__ = wrapped
first = run.id
run.finish()
kept = Iterator.__next__ is wrapped and len(list(torch.utils.data.DataLoader(range(5)))) == 5
Iterator.__next__ = torchs
run = begin({options})
run.finish()
left = [step_hooks._Heard.library is not None, bool(step_hooks._Heard.listeners), Iterator.__next__ is not torchs, watched()]
print(json.dumps({{"id": first, "watched": sum(seen), "kept": kept, "left": left}}))
"""


@pytest.mark.parametrize("ranges", [False, True])
def test_steps_and_waits_are_counted_and_torch_has_no_callback_between_windows(runs_dir, tmp_path, ranges):
    options = {"every": 50, "ranges": ranges}
    out, _ = run(program(tmp_path, ALWAYS.format(options=options)))
    facts = last_json(out)
    found = {row["op"]: row for row in fanfold.open(facts["id"], dir=runs_dir).ops() if row["scope"] == "user"}
    waits = found["enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__(Items)"]
    assert (waits["count"], waits["scale"], waits["kind"]) == (401, 1.0, "data")  # the last finds no more
    assert waits["max_ns"] > 200_000_000  # one stall, wherever the windows were
    (table,) = tables(fanfold.open(facts["id"], dir=runs_dir))
    assert table.facts["steps"] == 403  # those that ended
    observed = table.facts["observed"]
    assert 8 <= observed <= 10  # one in each fifty begun, and the third step
    for mine in (found["forward of mine"], found["Optimizer.step#SGD.step"]):
        if ranges:
            assert (mine["count"], mine["scale"]) == (400, 1.0)
        else:  # the last window may fall on one of the three steps that stumble, which are not among these rows
            assert mine["count"] in (observed, observed - 1)
            assert mine["scale"] == pytest.approx(403 / observed)
    assert facts["watched"] == 400 if ranges else facts["watched"] < 20
    assert facts["kept"]
    assert facts["left"] == [False] * 4


WAITS = """
import time, torch
from fanfold.probes import ops
ops.IDLE_SECONDS = 1e9  # nothing is observed: the least that can be known of a wait
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 6
    def __getitem__(self, at): time.sleep(0.05); return torch.ones(8)
if __name__ == "__main__":
    run = begin(True)
    model = torch.nn.Linear(8, 8)
    for how in ("fork", "spawn"):
        for x in torch.utils.data.DataLoader(Slow(), num_workers=1, multiprocessing_context=how): model(x)
    for x in torch.utils.data.DataLoader(Slow()): model(x)
    os.mkfifo(run.path / "ops" / f"0-{os.getpid()}.ops")
    run.finish()
"""


def test_waits_without_steps_count_apart_and_unseen_workers_are_reported(runs_dir, tmp_path):
    _, err = run(program(tmp_path, WAITS))
    rows = [row for row in stored(runs_dir).ops() if row["kind"] == "data"]  # nor does a pipe among the tables hold anybody up
    assert [(row["op"].rpartition("#")[2], row["count"]) for row in sorted(rows, key=lambda row: row["count"])] == [
        ("_SingleProcessDataLoaderIter.__next__(Slow)", 7),
        ("_MultiProcessingDataLoaderIter.__next__(Slow)", 14),
    ]
    for row in rows:
        assert row["self_ns"] >= row["total_ns"] * 0.9 > 200e6
    assert said(err, "workers are started by spawn") == 1


WHOLE_STEPS = """
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook as register
from fanfold.probes import trace
class Plain(torch.optim.Optimizer):  # torch's own break the graph
    def __init__(self, parameters): super().__init__(parameters, {})
    def step(self):
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]: parameter.add_(parameter.grad, alpha=-1e-3)
graphs = []
model = torch.nn.Linear(4, 4); optimizer = Plain(model.parameters())
for parameter in model.parameters(): parameter.grad = torch.ones_like(parameter)
@torch.compile(backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)
def step(x):
    y = model(x).sum(); optimizer.step(); return y
step(torch.ones(4))
for _ in range(10):
    run = begin({"every": 3})
    waiting = trace.StepTrace(2, print)
    step(torch.ones(4)); step(torch.ones(4))
    waiting.stop()
    run.finish()
run, steps = begin({"every": 5}), []
register(lambda *_: (steps.append(1), len(steps) == 3 and run.finish()))
register(lambda *_: None)  # torch walks its hooks while the run ends
for _ in range(5): optimizer.step()
print(json.dumps({"graphs": len(graphs), "steps": len(steps), "id": run.id}))
"""


def test_compiled_steps_are_compiled_once_for_all_runs(runs_dir, tmp_path):
    out, _ = run(program(tmp_path, WHOLE_STEPS))
    found = last_json(out)
    assert found["graphs"] <= 2  # without hooks, and with
    assert found["steps"] == 5
    (table,) = tables(fanfold.open(found["id"], dir=runs_dir))
    assert table.facts["steps"] == 3


RAISING = """
import time, torch
class Stumbles(torch.optim.SGD):
    def step(self, closure=None): raise RuntimeError("not today")
def work():
    time.sleep(0.001)
    for _ in range(20): torch.ones(200, 200) @ torch.ones(200, 200)
model = torch.nn.Linear(4, 4)
run = begin({"every": 1})
good, bad = torch.optim.SGD(model.parameters(), 1e-3), Stumbles(model.parameters(), 1e-3)
for name, optimizer in (("fine", good), ("raises", bad)) * 5:
    with torch.profiler.record_function(name):
        try: optimizer.step()
        except RuntimeError: pass
        work()
with torch.profiler.record_function("epoch"):
    for _ in range(600):
        with torch.profiler.record_function("inner"):
            try: bad.step()
            except RuntimeError: pass
pid = os.fork()
if not pid:  # a child with a run of its own, while its parent's goes on
    mine = begin({"every": 10}, id="child")
    for x in torch.utils.data.DataLoader(range(100), batch_size=None): good.step()
    mine.finish()
    os._exit(0)
os.waitpid(pid, 0)
run.finish()
print(json.dumps({"id": run.id}))
"""


def test_steps_that_raise_disturb_nothing_and_a_forked_run_counts_once(runs_dir, tmp_path):
    out, _ = run(program(tmp_path, RAISING))
    rows = fanfold.open(last_json(out)["id"], dir=runs_dir).ops()
    found = {row["op"]: row for row in rows if row["scope"] == "user"}
    assert found["fine"]["count"] == found["raises"]["count"] == 5
    products = sum(row["total_ns"] for row in rows if row["op"] == "aten::matmul")
    within = sum(found[name]["total_ns"] - found[name]["self_ns"] for name in ("fine", "raises"))
    assert within >= products > 0  # products belong to neither's own time
    assert (found["epoch"]["count"], found["inner"]["count"]) == (1, 600)
    assert found["Optimizer.step#Stumbles.step"]["count"] == 605
    (table,) = tables(fanfold.open(last_json(out)["id"], dir=runs_dir))
    assert table.facts["steps"] == 5  # those that ended
    child = fanfold.open("child", dir=runs_dir)
    assert count(child.ops(), "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__(range)") == 101
    assert [table.facts["steps"] for table in tables(child)] == [100]


CROWDED = """
import asyncio, torch
from fanfold.probes.native import library
models = [torch.nn.Linear(2, 2) for _ in range(2)]
optimizers = [torch.optim.SGD(model.parameters(), 1e-3) for model in models]
x, paths = torch.ones(2, 2), []
names = "tan cos sin exp log abs neg ceil floor round sqrt rsqrt erf erfc sinh cosh tanh asin acos atan".split()
begun = threading.Event()
def prepare():
    while not begun.is_set():
        for name in names: getattr(x, name)()
for _ in range(6): threading.Thread(target=prepare).start()
with begin({"every": 10}) as run:  # two optimizers take turns
    begun.set()
    for _ in range(1000):
        for model, optimizer, op in zip(models, optimizers, (torch.sin, torch.cos)):
            op(model(x)).sum().backward(); optimizer.step()
paths.append(str(run.path))
together = threading.Barrier(40)
def serve():
    together.wait()
    for _ in range(5):
        for name in names: getattr(x, name)()
async def answer(number):
    with torch.profiler.record_function(f"request {number}"):
        x.tan(); await asyncio.sleep(0.01 * number); x.tan()
async def answers(): await asyncio.gather(*(answer(number) for number in range(4)))
with begin({"every": 1, "rows": 200}) as run:
    for _ in range(2):
        threads = [threading.Thread(target=serve) for _ in range(40)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
    asyncio.run(answers())
    for number in range(300):
        with torch.profiler.record_function(f"batch {number}"), torch.profiler.record_function(f"ProfilerStep#{number}"): x.log1p()
paths.append(str(run.path))
for _ in range(12):
    with begin({"every": 2}) as run: x.tan()  # no step, and so no window
    paths.append(str(run.path))
print(json.dumps(paths))
"""


def test_turns_threads_and_ranges_that_do_not_nest_are_counted_as_they_are(runs_dir, tmp_path):
    out, err = run(program(tmp_path, CROWDED))
    turns, crowd, *idle = [fanfold.open(path).ops() for path in last_json(out)]
    sin, cos = (count(turns, op, scope="forward", thread="main") for op in ("aten::sin", "aten::cos"))
    assert 60 < sin < 140  # 100 expected; with one phase for all, 0 or 200
    assert sin + cos in (199, 200, 201)
    assert {name: count(crowd, f"aten::{name}", thread="thread") for name in ("tan", "atan")} == {"tan": 400, "atan": 400}
    assert "table is full" not in err
    assert "probe is off" not in err  # though others worked while it was tried
    for row in crowd:
        assert sum(row["hist"].values()) == row["count"]
    assert [count(crowd, f"request {number}", scope="user") for number in range(4)] == [1, 1, 1, 1]
    assert count(crowd, "aten::log1p") == count(crowd, "ProfilerStep#") == 300
    assert sum(row["count"] for row in crowd if row["op"].startswith("batch ")) == 300
    assert count(crowd, "batch 0") == 1
    assert count(crowd, "batch #") > 200  # numbered ranges are left a quarter of the table
    assert not any(rows for rows in idle)


def test_profiler_windows_take_turns_too():
    windows = ProfilerWindows(1, 10, inputs=False, rank=0, node="")
    due = [step for step in range(1, 2001) if windows._due(step)]
    assert 199 <= len(due) <= 201
    assert 60 < sum(step % 2 for step in due) < 140


def test_a_short_run_shows_its_third_step(runs_dir, tmp_path):
    run(program(tmp_path, TRAIN.format(ops=True, steps=5)))
    assert count(stored(runs_dir).ops(), "aten::linear") in (1, 2)  # two if the random phase falls there


def test_the_environment_switches_the_profile_on(runs_dir, tmp_path):
    code = TRAIN.format(ops=None, steps=5).replace("begin(None)", 'fanfold.init("p", system=False, quiet=True)')
    run(program(tmp_path, code), FANFOLD_OPS="1")
    assert count(stored(runs_dir).ops(), "aten::linear") in (1, 2)


COMPILED = """
import torch, torch._dynamo
from fanfold.probes.native import library
run = begin({"every": 1})  # the compiler is loaded, and starts before the first tick
def first(x): return x.atan().sum()
def second(x): return x.asinh().sum()
for function in (first, second):
    compiled = torch.compile(function, backend="aot_eager")
    for _ in range(3): compiled(torch.ones(3, requires_grad=True)).backward()
L = library.current()
L.ff_compiling(-1)  # an end whose beginning nobody heard
L.ff_compiling(1); torch.ones(2).erf(); L.ff_compiling(-1)
L.ff_compiling(1)
thread = threading.Thread(target=L.ff_compiling, args=(-1,)); thread.start(); thread.join()  # the last to end is another thread
torch.ones(2).erfc()
run.finish()
"""


def test_what_the_compiler_runs_is_counted_apart_and_its_regions_are_named(runs_dir, tmp_path):
    run(program(tmp_path, COMPILED))
    rows = stored(runs_dir).ops()
    for op in ("aten::atan", "aten::asinh"):
        assert count(rows, op, scope="forward") in (3, 4)  # one more where torch checks the first call, under a dispatch mode
        assert count(rows, op, scope="compile", kind="compiling") > 4
    assert count(rows, "CompiledFunction", kind="compiled region") == 6
    assert count(rows, "CompiledFunctionBackward", kind="compiled region", scope="backward") == 6
    assert (count(rows, "aten::erf", scope="compile"), count(rows, "aten::erf")) == (1, 1)
    assert count(rows, "aten::erfc", scope="forward") == 1


def test_a_torch_that_cannot_be_imported_is_said_once_and_the_run_goes_on(runs_dir, tmp_path):
    broken = tmp_path / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text('raise ImportError("libcudart.so.12: cannot open shared object file")')
    (broken / "lib").symlink_to(Path(importlib.util.find_spec("torch").origin).parent / "lib")
    code = 'run = begin(True)\nrun.log({"loss": 1.0})\nrun.finish()\n'
    _, err = run(program(tmp_path, code), imports=True, PYTHONPATH=str(broken.parent))
    assert err.count("could not profile operators: ImportError: libcudart.so.12") == 1
    assert stored(runs_dir).status == "finished"
    assert list(stored(runs_dir).series("loss").values) == [1.0]


SAMPLED = """
import torch
from fanfold.probes import op_table, ops
from fanfold.probes.native import library
run = begin({"sampling": 0.05})
picks, L = [], library.current()
x = torch.ones(2)
for i in range(4000):
    x.tan()
    if i < 400:
        picks.append(sum(r["count"] for r in op_table.parse(op_table.take(L)).rows if r["op"] == "aten::tan"))
run.finish()
print(json.dumps(picks))
"""


def test_sampling_picks_other_calls_in_each_process(runs_dir, tmp_path):
    path = program(tmp_path, SAMPLED)
    first, second = (last_json(run(path)[0]) for _ in range(2))
    assert first != second
    runs = fanfold.runs(dir=runs_dir)
    for row in (row for one in runs for row in one.ops() if row["op"] == "aten::tan"):
        assert row["scale"] == pytest.approx(20)
        assert 100 < row["count"] < 320  # 200 expected; six standard deviations
        assert (row["scope"], row["self_ns"]) == ("sampled", 0)


SAMPLED_ALL = """
import torch
@torch.jit.script
def scripted(x):
    return x.sinh()
run = begin({"sampling": 1.0})
model = torch.nn.Linear(8, 8)
for _ in range(20):
    model(torch.ones(4, 8)).sum().backward()
    scripted(torch.ones(2))
run.finish()
"""


def test_sampling_draws_from_operators_nodes_of_backward_and_torchscript_functions(runs_dir, tmp_path):
    run(program(tmp_path, SAMPLED_ALL))
    rows = stored(runs_dir).ops()
    for name in ("aten::linear", "AddmmBackward0", "scripted", "aten::sinh"):
        assert count(rows, name, scope="sampled") == 20, name


WORKERS = """
import multiprocessing, torch
class Items(torch.utils.data.Dataset):
    def __len__(self): return 40
    def __getitem__(self, i): return torch.ones(2).asinh()
def forked():
    for _ in range(11): torch.ones(2).acosh()
def spawned(dir, id):
    run = fanfold.init("p", ops={"every": 1}, id=id, system=False, quiet=True)
    for _ in range(13): torch.ones(2).atanh()
    run.finish()
if __name__ == "__main__":
    run = begin({"every": 1})
    for _ in range(2):
        for batch in torch.utils.data.DataLoader(Items(), batch_size=4, num_workers=2): batch.tan()
    child = multiprocessing.get_context("fork").Process(target=forked); child.start(); child.join()
    child = multiprocessing.get_context("spawn").Process(target=spawned, args=("", run.id)); child.start(); child.join()
    assert child.exitcode == 0
    if (pid := os.fork()) == 0:
        if (grandchild := os.fork()) == 0:
            torch.ones(2).erfc(); os._exit(0)
        os._exit(os.waitpid(grandchild, 0)[1])
    assert os.waitpid(pid, 0)[1] == 0
    kept = torch.utils.data.DataLoader(Items(), batch_size=20, num_workers=1, persistent_workers=True)
    for batch in kept: pass  # its worker lives on
    run.finish()
    print(json.dumps(os.listdir(run.path / "ops")))
"""


def test_workers_forked_and_spawned_children_count_their_own(runs_dir, tmp_path):
    out, _ = run(program(tmp_path, WORKERS))
    rows = stored(runs_dir).ops()
    assert count(rows, "aten::asinh", role="worker") == count(rows, "aten::asinh") == 120
    assert count(rows, "aten::erfc", role="worker") == 1
    assert count(rows, "aten::acosh", role="worker") == 11
    assert count(rows, "aten::tan", role="main") == count(rows, "aten::tan") == 20
    assert count(rows, "aten::atanh", role="main") == 13
    (stall,) = [row for row in rows if row["kind"] == "data"]
    assert stall["count"] == 25  # each epoch asks once more than it has batches
    assert last_json(out) == []  # the files of all children are folded into the journal


RANKS = """
import torch, torch.distributed as dist
run = begin({"every": 1})
dist.init_process_group("gloo")
x = torch.ones(4)
for _ in range(3 + dist.get_rank()): x.tan()
for _ in range(6): dist.all_reduce(x)
dist.destroy_process_group()
run.finish()
"""


def test_ranks_and_collectives(runs_dir, tmp_path):
    run(program(tmp_path, RANKS), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    rows = stored(runs_dir).ops()
    assert [count(rows, "aten::tan", rank=rank) for rank in (0, 1)] == [3, 4]
    assert [count(rows, "c10d::allreduce_", rank=rank, kind="collective") for rank in (0, 1)] == [6, 6]
    assert count(rows, "gloo:all_reduce", kind="collective") == 12


KILLED = """
import torch
run = begin({"every": 1})
for _ in range(500): torch.ones(2).cosh()
fanfold.log_api_usage_once("killed.api")
print("ready", flush=True)
sys.stdin.read()
"""


def test_rows_survive_a_kill(runs_dir, tmp_path):
    process = subprocess.Popen(
        [sys.executable, str(program(tmp_path, KILLED))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    found = stored(runs_dir)
    assert found.status == "killed"
    assert count(found.ops(), "aten::cosh") == 500
    assert "killed.api" in {record["key"] for record in found.usage()}


FULL = """
import torch
run = begin({"every": 1, "rows": 16})
for i in range(100):
    with torch.profiler.record_function("request " + chr(256 + i)): torch.ones(2).tan()
run.finish()
"""


def test_a_full_table_is_said_and_counted(runs_dir, tmp_path):
    _, err = run(program(tmp_path, FULL))
    assert err.count("operator table is full: it holds 16 rows") == 1
    found = stored(runs_dir)
    assert len(found.ops()) == 16
    assert count(found.ops(), "aten::tan") == 100  # rows it has stay exact
    from fanfold.store.ops import tables

    (table,) = tables(found)
    assert table.facts["overflow"] > 80


def test_windows_without_the_native_part_are_bounded_too(runs_dir, tmp_path):
    code = TRAIN.format(ops={"every": 1, "rows": 16, "native": False}, steps=8)
    numbered = code.replace(
        "optimizer.zero_grad();", 'with torch.profiler.record_function(f"request {_}"): x.tan()\n    optimizer.zero_grad();'
    )
    _, err = run(program(tmp_path, numbered))
    assert err.count("operator table is full: it holds 16 rows") == 1
    found = stored(runs_dir)
    assert len(found.ops()) == 16
    assert count(found.ops(), "aten::tan") == 4  # every other step
    from fanfold.store.ops import tables

    (table,) = tables(found)
    assert table.facts["overflow"] > 20


LOAD = """
import torch
from fanfold.probes.native import library
run = begin({"every": 1000})
L = library.current()
stop = threading.Event()
def work():
    x = torch.ones(8, requires_grad=True)
    while not stop.is_set(): (x * 2).sum().backward()
def toggle():
    for i in range(400): L.ff_window(i % 2)
threads = [threading.Thread(target=work) for _ in range(4)]
toggles = [threading.Thread(target=toggle) for _ in range(4)]
for t in threads + toggles: t.start()
codes = []
for _ in range(10):
    pid = os.fork()
    if pid == 0:
        for _ in range(200): torch.ones(2).erf()
        os._exit(0)
    codes.append(os.waitpid(pid, 0)[1])
for t in toggles: t.join()
stop.set()
for t in threads: t.join()
L.ff_window(1)
for _ in range(30): torch.ones(2).erfc()
run.finish()
print(json.dumps(codes))
"""


def test_callbacks_come_and_go_under_load_and_forks(runs_dir, tmp_path):
    out, _ = run(program(tmp_path, LOAD))
    assert last_json(out) == [0] * 10
    rows = stored(runs_dir).ops()
    assert count(rows, "aten::erfc") == 30
    for row in rows:
        assert sum(row["hist"].values()) == row["count"]


FALLBACK = """
import time, torch
from fanfold.probes.native import library
{break_it}
run = begin({{"every": 1, "inputs": {inputs}}})
model = torch.nn.Linear(8, 8); optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for _ in range(6):
    optimizer.zero_grad(); model(torch.ones(4, 8)).sum().backward(); optimizer.step()
live = lambda: sum(row["count"] for row in run.ops() if row["op"] == "aten::linear")
until = time.monotonic() + 20  # the last window is read in a thread
while live() < 3 and time.monotonic() < until: time.sleep(0.05)
print(live())
run.finish()
"""
BREAKS = {
    "unknown torch": ('library.torch_version = lambda: "9.9.0"', False, "torch 9.9.0 is not among the versions"),
    "self-test": ('library.self_test = lambda library: "nothing was seen"', False, "self-test on torch"),
    "self-test raises": ("library.self_test = lambda library: 1 / 0", False, "ZeroDivisionError: division by zero"),
    "another library": (
        "from fanfold.probes.native import build; build.compiler = lambda: None; build.beside = lambda: library.torch_folder() / 'libc10.so'",
        False,
        "is damaged, or is another file than the one that was built; no C++ compiler was found",
    ),
    "no compiler": ("from fanfold.probes.native import build; build.compiler = lambda: None", True, "no C++ compiler was found"),
}


@pytest.mark.parametrize("how", BREAKS)
def test_without_the_native_part_profiler_windows_serve(how, runs_dir, tmp_path):
    break_it, inputs, reason = BREAKS[how]
    out, err = run(program(tmp_path, FALLBACK.format(break_it=break_it, inputs=inputs)))
    assert err.count("the native operator probe is off") == 1
    assert reason in err
    rows = stored(runs_dir).ops()
    (linear,) = [row for row in rows if row["op"] == "aten::linear"]
    assert (linear["count"], linear["scale"]) == (3, 2.0)  # every other step
    assert count(rows, "AddmmBackward0", scope="backward") == 3
    assert count(rows, "aten::mm", scope="backward") == count(rows, "aten::mm") == 3  # what backward calls is backward
    assert last_json(out) == 3  # seen while it ran
    if inputs:
        assert any("[4, 8]" in row["inputs"] for row in rows if row["op"] == "aten::linear")


DAMAGE = """
from pathlib import Path
from fanfold.probes.native import build, library
from fanfold.settings import cache_directory
good = build.beside().read_bytes()
middle = len(good) // 2
damages = [good[:0], *(good[:size] for size in (64, 4096, 20_000, 60_000, len(good) - 1)), good + b"x",
           good[:middle] + bytes([good[middle] ^ 1]) + good[middle + 1 :], Path(sys.executable).read_bytes()]
found = build.compiler
here, cached = Path(sys.argv[0]).with_name("beside.so"), cache_directory() / "native" / build.library_name()
build.beside = lambda: here
cached.parent.mkdir(parents=True)
for damage in damages:
    here.write_bytes(damage); cached.write_bytes(damage)
    build.compiler = lambda: None
    try: library.load()
    except library.NativeUnavailable as error: assert all(f"{path} is damaged" in str(error) for path in (here, cached)), error
    else: raise SystemExit("a damaged library was loaded")
build.compiler = found
os.environ["FANFOLD_CACHE_DIR"] = str(cached.parent / "nowhere" / "else")  # a library carried there alone
carried = cache_directory() / "native" / cached.name
carried.parent.mkdir(parents=True); carried.write_bytes(good)
here.chmod(0o400); assert library._open().ff_version() == 1
carried.unlink(); carried.write_bytes(good[:20_000])
assert library._open().ff_version() == 1 and build.intact(carried)
assert [each.name for each in carried.parent.iterdir()] == [carried.name]
"""


def test_a_damaged_library_is_never_loaded_and_is_built_anew(tmp_path):
    run(program(tmp_path, DAMAGE))


INPUTS = """
import torch
from fanfold.probes.native import build, library
from fanfold.settings import cache_directory
damaged = cache_directory() / "native" / f"libfanfold_inputs-{build.digest('inputs.cpp', extra=torch.__version__)}.so"
damaged.parent.mkdir(parents=True)
damaged.write_bytes(build.beside().read_bytes()[:20_000])
run = begin({"every": 1, "inputs": True})
for size in (3, 5):
    for _ in range(4): torch.nn.functional.linear(torch.ones(2, size), torch.ones(6, size))
torch.ones(2, dtype=torch.int64).neg()
torch.cat([torch.ones(2), torch.ones(3, dtype=torch.bfloat16)])
torch._foreach_neg([torch.ones(4, 1)] * 9)
torch.cat([torch.ones(1, 1000, 1000, 1, 1, 1)] * 3)
torch.ones(5, 6)[:, torch.tensor([1, 2])]
torch.ones(0).cos(); torch.ones([1] * 30).cos()
torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]).sin()
wide = torch.ones([1] * 12); wide.addcmul(wide, wide)
for _ in range(400): torch.nn.functional.linear(torch.ones(2, 7), torch.ones(6, 7))
run.finish()
"""


def test_inputs_tell_shapes_and_dtypes_apart(runs_dir, tmp_path):
    _, err = run(program(tmp_path, with_device(tmp_path, INPUTS)), timeout=280)
    assert "native operator probe is off" not in err
    rows = stored(runs_dir).ops()
    assert count(rows, "aten::linear", inputs="float32[2,3] float32[6,3]") == 4
    assert count(rows, "aten::linear", inputs="float32[2,5] float32[6,5]") == 4
    assert count(rows, "aten::neg", inputs="int64[2]") == 1
    ops = ("addcmul", "cat", "_foreach_neg", "index", "cos", "sin")
    inputs = {op: {row["inputs"] for row in rows if row["op"] == f"aten::{op}"} for op in ops}
    assert inputs == {
        "addcmul": {"float32[1,1,1,1,1,1,1,1,+4] float32[1,1,1,1,1,1,1,1,+4] ..."},
        "cat": {"(float32[2] bfloat16[3])", "(float32[1,1000,1000,1,1,1] +2)"},  # as many as there is room for
        "_foreach_neg": {"(float32[4,1] float32[4,1] float32[4,1] +6)"},
        "index": {"float32[5,6] (none int64[2])"},
        "cos": {"float32[0]", "float32[1,1,1,1,1,1,1,1,+22]"},
        "sin": {"float32[?]", "float32[5]"},  # a nested tensor's sizes are several; what it is made of has one
    }
    texts = [row["inputs"] for row in rows]
    assert all(text.count("[") == text.count("]") and text.count("(") == text.count(")") for text in texts)
    (timed,) = [row for row in rows if row["inputs"] == "float32[2,7] float32[6,7]" and row["op"] == "aten::linear"]
    assert 0 < timed["device_count"] < 400  # one in eight
    assert timed["device_ns"] == timed["device_count"] * 500_000


MANNERS = """
import torch, time
run = begin({"every": 1})
def work(times):
    before = device.called()
    for _ in range(times): torch.ones(4).exp()
    return device.called() - before
def in_child(awake):
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        device.lay_down(awake)
        os.write(write, b"%d" % work(400)); os._exit(0)
    os.waitpid(pid, 0)
    return int(os.read(read, 20))
device.lay_down(0)
told = {"asleep": work(400), "its child": in_child(1)}
device.lay_down(1)
told["awake"] = work(400)
time.sleep(1.1); work(100)
told |= {"left": device.left(), "child": in_child(1)}
run.finish()
print(json.dumps(told))
"""


def test_the_device_is_touched_where_the_program_uses_it_and_nowhere_else(runs_dir, tmp_path):
    out, _ = run(program(tmp_path, with_device(tmp_path, MANNERS)))
    told = last_json(out)
    assert told["asleep"] == 0  # or a context would be made on a device nobody asked for
    assert told["its child"] > 0
    assert told["awake"] > 0
    assert told["left"] == 0  # "not ready" would be raised by torch after its next kernel
    assert told["child"] == 0  # a context does not outlive a fork
    assert any(row["device_count"] for row in stored(runs_dir).ops())


TRACED = """
import torch
run = begin(True)
model = torch.nn.Linear(8, 8); optimizer = torch.optim.SGD(model.parameters(), 1e-3)
print("ready", flush=True)
while not any(name.startswith("trace-") and name.endswith("rank0.json") for name in os.listdir(run.path / "ops")):
    optimizer.zero_grad(); model(torch.ones(4, 8)).sum().backward(); optimizer.step()
run.finish()
"""


def test_a_running_job_is_traced_on_request(runs_dir, tmp_path):
    process = start(program(tmp_path, TRACED))
    try:
        assert process.stdout.readline() == "ready\n"
        asked = [sys.executable, "-m", "fanfold", "ops", "trace", "-", "--steps", "3", "--json"]
        told = json.loads(subprocess.run(asked, capture_output=True, text=True, timeout=120, check=True).stdout)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
    (file,) = told["traces"]
    with open(file) as trace:
        names = [event.get("name") for event in json.load(trace)["traceEvents"]]
    assert names.count("Optimizer.step#SGD.step") == 3
    assert "aten::linear" in names


CUT = """
import time, torch
from fanfold.probes import trace
model = torch.nn.Linear(8, 8); optimizer = torch.optim.SGD(model.parameters(), 1e-3)
def step():
    optimizer.zero_grad(); model(torch.ones(4, 8)).sum().backward(); optimizer.step()
def on(): return torch.autograd.profiler._is_profiler_enabled
found = []
for elsewhere in (False, True):
    run = begin(True)
    trace.request(run.path / "ops", 1000, "abc")
    end = time.monotonic() + 60
    while not on() and time.monotonic() < end: step()
    found.append(on())
    if elsewhere:
        thread = threading.Thread(target=run.finish); thread.start(); thread.join()
        step()
    else:
        run.finish()
    found.append(on())
run = begin(True)
mine = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]); mine.start()
for token in ("def", "ghi"): trace.request(run.path / "ops", 2, token)
end = time.monotonic() + 2.5
while time.monotonic() < end:
    step(); time.sleep(0.05)  # all of it is kept by the profiler
mine.stop()
found.append(sum(event.name == "aten::linear" for event in mine.events()) > 10)
paths = [run.path / "ops" / f"trace-{token}-rank0.json" for token in ("def", "ghi")]
end = time.monotonic() + 60
while not paths[0].exists() and time.monotonic() < end: step()
while not on() and not paths[1].exists() and time.monotonic() < end: step()
step(); step(); run.finish()  # the last step of the second trace is the run's last
found.append([path.exists() for path in paths])
print(json.dumps(found))
"""


def test_the_end_of_a_run_ends_a_trace_under_way(runs_dir, tmp_path):
    out, err = run(program(tmp_path, CUT))
    assert last_json(out) == [True, False, True, False, True, [True, True]]  # two more wait for the program's own profiler
    assert "could not" not in err
    assert err.count("waiting: another profiler is on") == 1


GIVES_WAY = """
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from fanfold.probes import profiler_session, trace
model = torch.nn.Linear(8, 8)
def train(steps):
    mine = torch.nn.Linear(8, 8); optimizer = torch.optim.SGD(mine.parameters(), 1e-3)
    for _ in range(steps): optimizer.zero_grad(); mine(torch.ones(4, 8)).sum().backward(); optimizer.step()
def under_way(steps):  # a trace of so many steps
    trace.request(folder, steps, f"t{steps}")
    requests.look(); train(2)
    return profiler_session.ProfilerTurns.ours is not None
def own(steps=4):
    with profile(activities=[ProfilerActivity.CPU]) as seen: train(steps)
    return sum(event.name == "aten::addmm" for event in seen.events())
def in_thread(work):
    got = []
    thread = threading.Thread(target=lambda: got.append(work())); thread.start(); thread.join()
    return got[0]
run = begin(True)
folder = run.path / "apart"  # the run itself would answer in its own
requests = trace.Requests(folder, 7, lambda facts: steps.append(facts["steps"]) or True)
steps, found = [], []
for number, work in ((100, own), (200, lambda: in_thread(own))):
    found += [under_way(number), work(), profiler_session.ProfilerTurns.ours is None]
    requests._exporting.join()
waiting = profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=1)); waiting.start()
found += [under_way(3)]  # its warm-up counts
waiting.step(); train(1); waiting.stop()
found += [sum(event.name == "aten::addmm" for event in waiting.events())]
train(8); requests._exporting.join(); requests.stop(0)
run.finish()
print(json.dumps({"found": found, "steps": steps, "files": sorted(path.name for path in folder.glob("*rank7.json"))}))
"""


def test_a_trace_ends_before_the_programs_own_profile_begins(runs_dir, tmp_path):
    out, err = run(program(tmp_path, GIVES_WAY))
    assert last_json(out) == {
        "found": [True, 4, True, True, 4, True, False, 1],  # its profiles are whole, on whichever thread
        "steps": [1, 1, 3],
        "files": ["trace-t100-rank7.json", "trace-t200-rank7.json", "trace-t3-rank7.json"],
    }
    assert err.count("a trace ended after 1 of 100 steps") == 1
    assert "no active profiling session" not in err


WINDOWS_GIVE_WAY = """
run = begin({"native": False, "every": 2})
found = [own() for _ in range(12) if not train(3)]
found += [in_thread(own) for _ in range(4) if not train(3)]
threads = [threading.Thread(target=train, args=(100,)) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
if os.fork() == 0:
    train(5); os._exit(0)
codes = os.wait()[1]
train(5)
seen = len(run.ops())
for _ in range(20):
    with record_function("epoch"): train(5)  # one that begins in a window and ends in another
run.finish()
print(json.dumps([found, codes, seen > 0]))
"""


def test_windows_of_torch_profiler_give_way_too_and_survive_threads_and_ranges(runs_dir, tmp_path):
    out, err = run(program(tmp_path, GIVES_WAY.partition("run = begin")[0] + WINDOWS_GIVE_WAY))
    assert last_json(out) == [[4] * 16, 0, True]
    assert "could not" not in err
    (table,) = tables(stored(runs_dir))
    assert table.facts["steps"] == 16 * 7 + 300 + 5 + 100
    assert table.facts["observed"] > 10


WINDOWS_BESIDE_A_THREAD = """
import time, torch
from fanfold.store.ops import tables
run = begin({"native": False, "every": 2})
model = torch.nn.Linear(8, 8); optimizer = torch.optim.SGD(model.parameters(), 1e-3)
def train(steps):
    for _ in range(steps): optimizer.zero_grad(); model(torch.ones(4, 8)).sum().backward(); optimizer.step()
def compute():
    began.set()
    while not stop.is_set(): large @ large
def windows():
    return [table.facts["windows"] for table in tables(stored)]
large, began, stop = torch.rand(3000, 3000), threading.Event(), threading.Event()
thread = threading.Thread(target=compute); thread.start(); began.wait()
time.sleep(0.2)
train(20)  # a window ends while the other thread is inside a call
rows = run.ops()
stored = fanfold.open(run.id, dir=run.path.parent.parent)
before = windows()
stop.set(); thread.join()
train(20)
run.ops(); stored.refresh()
print(json.dumps([len(rows) > 5, min(row["self_ns"] for row in rows) >= 0, before, windows()]))
run.finish()
"""


def test_windows_survive_a_thread_that_always_computes_and_its_end(runs_dir, tmp_path):
    out, _ = run(program(tmp_path, WINDOWS_BESIDE_A_THREAD))
    found, positive, (before,), (after,) = last_json(out)
    assert found and positive
    assert 1 <= before < after - 5


def test_windows_of_torch_profiler_without_a_step_are_said_to_be_empty(runs_dir, tmp_path):
    _, err = run(program(tmp_path, 'import torch\nrun = begin({"native": False})\ntorch.ones(2).tan()\nrun.finish()'))
    assert err.count("the operator profile is empty") == 1
    assert stored(runs_dir).ops() == []


def test_options_that_cannot_be_are_refused_before_anything_is_written(tmp_path):
    wrongs = [{"windw": 1}, {"every": 0}, {"sampling": 2.0}, {"window": 5, "every": 2}, {"sampling": 0.1, "inputs": True}, 7,
              {"every": "100"}, {"every": 100.0}, {"every": 10**30}, {"window": None}, {"rows": 1.5}, {"sampling": "0.1"},
              {"sampling": True}, {"inputs": "no"}, {"usage": 1}, {"sampling": 0.1, "native": False}]  # fmt: skip
    for wrong in wrongs:
        with pytest.raises(SettingError):
            fanfold.init("p", dir=tmp_path / "none", ops=wrong)
    assert not (tmp_path / "none").exists()
    assert probe.check({}) == probe.check(True) == probe.OpsOptions()


class Table:
    """A counter that has a table of any size."""

    id = "0" * 16

    def __init__(self, size):
        self.size = size

    def start(self): ...
    def stop(self): ...
    def done(self): ...

    def snapshot(self):
        return {"id": self.id, "table": bytes(self.size)}


@pytest.mark.parametrize("size", [4_000, 200_000])
def test_an_hour_of_snapshots_stays_below_a_megabyte(size, tmp_path):
    now, written = [0.0], []
    watch = probe.OpsProbe(
        Table(size),
        lambda facts: written.append(facts) or True,
        probe.OpsOptions(usage=False),
        folder=tmp_path,
        rank=0,
        clock=lambda: now[0],
    )
    while now[0] < 3600:
        now[0] += 1
        watch.tick()
    assert 1 <= len(written) <= 60
    assert sum(len(facts["table"]) for facts in written[1:]) <= 1_000_000


def test_a_damaged_table_is_no_table(tmp_path):
    for data in (b"", b"x" * 200_000, op_table.MAGIC + b"\xff" * 200_000):
        with pytest.raises(op_table.NotATable):
            op_table.parse(op_table.from_file(data))
    with pytest.raises(op_table.NotATable):
        op_table.unpack(b"not zlib")


def test_a_cpp_operator_of_ones_own_appears(tmp_path, monkeypatch):
    monkeypatch.setenv("FANFOLD_DIR", str(tmp_path / "runs"))
    script = ROOT / "examples" / "custom_op" / "run.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert "example::swish: 50 calls" in done.stdout, done.stderr


SERVING = """
import time, torch
from fanfold.probes import ops
ops.IDLE_SECONDS = 0.0
run = begin(True)
x, end = torch.ones(2), time.monotonic() + 60
while time.monotonic() < end:
    for _ in range(1000): x.tan()
    if any(row["op"] == "aten::tan" for row in run.ops()): break
run.finish()
"""


def test_a_program_without_an_optimizer_is_observed_for_moments(runs_dir, tmp_path):
    run(program(tmp_path, SERVING))
    (tan,) = [row for row in stored(runs_dir).ops() if row["op"] == "aten::tan"]
    assert tan["count"] > 0
    assert tan["scale"] > 5  # a hundredth of the time, or less in so short a run


STARTS_LATE = """
import time, torch, torch._dynamo
from fanfold.probes.native import library
run = begin(True)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loss = model(torch.ones(2)).sum()  # the forward of the first step
moment = threading.Thread(target=library.current().ff_moment, args=(5000,))
moment.start(); time.sleep(1)  # it has begun, and is not over
loss.backward(); optimizer.step()
optimizer.step()  # not observed either: the third is the first that is
moment.join()
run.finish()
"""


def test_a_first_step_that_a_moment_saw_in_part_does_not_count_as_observed(runs_dir, tmp_path):
    run(program(tmp_path, STARTS_LATE))
    assert [(table.facts["steps"], table.facts["observed"]) for table in tables(stored(runs_dir))] == [(2, 0)]


EXPORTED = """
import warnings, zipfile, torch
run = begin(True, stamp=True)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    model = torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2))
def extra(path): return {name.partition("extra/")[2]: zipfile.ZipFile(path).read(name) for name in zipfile.ZipFile(path).namelist() if "/extra/" in name}
warnings.simplefilter("error")
model.save("python.pt")
model._c.save("cpp.pt")  # past every Python hook
(name,) = extra("cpp.pt")
model.save("own.pt", _extra_files={name: b"mine"})
own = extra("own.pt")[name].decode()
run.finish()
model._c.save("after.pt")
print(json.dumps({"python": list(extra("python.pt")), "cpp": list(extra("cpp.pt")), "own": own, "after": list(extra("after.pt")),
                  "run": fanfold.inspect("cpp.pt")["stamp"]["run"]["id"] == run.id}))
"""


def test_what_cpp_exports_is_stamped_too_and_the_callers_own_file_wins(runs_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = last_json(run(program(tmp_path, EXPORTED))[0])
    assert found["python"] == found["cpp"] != []
    assert (found["own"], found["after"], found["run"]) == ("mine", [], True)


def test_tables_of_the_first_version_are_read_as_they_were_meant():
    def row_of(version: int, scope: int, ranges: int = 0) -> dict:
        head = [
            op_table.MAGIC,
            version,
            op_table.ROW_SIZE,
            8,
            1,
            0,
            100,
            1,
            0,
            7,
            0,
            0,
            0.0,
            1,
            1,
            1,
            0,
            1000,
            10,
            *[0] * 8,
            b"",
            ranges,
            *[0] * 4,
        ]
        table = bytearray(op_table.USAGE + op_table.ROW_SIZE)
        op_table.HEAD.pack_into(table, 0, *head)
        op_table.ROW.pack_into(table, op_table.USAGE, 1, 4, 0, 0, 0, scope, 0, 0, 0, 10, 50, 0, 0, 9, 0, 0, b"mine", b"")
        facts, (row,) = (parsed := op_table.parse(bytes(table))).facts, parsed.rows
        return {"op": row["op"], "scope": row["scope"], "scale": op_table.scale_of(facts, row)}

    assert (
        row_of(1, op_table.USER)
        == row_of(2, op_table.TOLD)
        == row_of(2, op_table.USER, 1)
        == {"op": "mine", "scope": "user", "scale": 1}
    )
    assert row_of(2, op_table.USER)["scale"] == row_of(1, 0)["scale"] == 100
    with pytest.raises(op_table.NotATable):
        row_of(3, 0)
