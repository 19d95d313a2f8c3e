"""Labels: they follow forward, asynchronous forks and backward, and never get in the way of torch.profiler."""

import sys

import pytest

import fanfold
from fanfold.probes.native import build
from ops_child import last_json, program, run, stored

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the native part is for Linux")


@pytest.fixture(scope="session", autouse=True)
def built():
    build.build()


FOLLOWS = """
import torch
@torch.jit.script
def inner(x): return x.sinh()
@torch.jit.script
def outer(x):
    task = torch.jit.fork(inner, x)
    return torch.jit.wait(task)
run = begin({"every": 1})
with fanfold.label(model="encoder"):
    torch.ones(2).tan()
    with fanfold.label(request=42): torch.ones(2).cos()
    outer(torch.ones(2))
torch.ones(2).cosh()
x = torch.ones(2, requires_grad=True)
with fanfold.label(model="forward"): y = x.exp().sum()
with fanfold.label(model="backward"): y.backward()
def elsewhere(): torch.ones(2).atan()
with fanfold.label(model="here"):
    thread = threading.Thread(target=elsewhere); thread.start(); thread.join()
try:
    with fanfold.label(model="gone"): raise KeyError
except KeyError: pass
torch.ones(2).erf()
run.finish()
"""


def test_a_label_follows_what_is_done_in_its_name(runs_dir, tmp_path):
    run(program(tmp_path, FOLLOWS))
    labels = {}
    for row in stored(runs_dir).ops():
        labels.setdefault(row["op"], set()).add(row["label"])
    assert labels["aten::tan"] == {"model=encoder"}
    assert labels["aten::cos"] == {"model=encoder,request=42"}
    assert labels["aten::sinh"] == {"model=encoder"}  # on a thread of torch's own
    assert labels["aten::cosh"] == labels["aten::erf"] == {""}
    assert labels["aten::exp"] == {"model=forward"}
    assert labels["ExpBackward0"] == {"model=backward"}  # the label at backward(), not at forward
    assert labels["aten::atan"] == {""}  # a new Python thread starts without


UNNESTED = """
import asyncio, torch
x = torch.ones(2)
with fanfold.label(early="yes"):
    run = begin({"every": 1})
    x.tan()
async def answer(request, seconds):
    with fanfold.label(request=request): await asyncio.sleep(seconds)
async def answers(): await asyncio.gather(answer(1, 0.01), answer(2, 0.05))
asyncio.run(answers())
x.cos()
def items(name):
    with fanfold.label(items=name): yield
first = items("here"); next(first)
with fanfold.label(model="m"):
    first.close(); x.sin()
x.sinh()
again = fanfold.label(model="again")
with again:
    with again: pass
    x.cosh()
x.erf()
second = items("there"); next(second)
def elsewhere(): second.close(); x.erfc()
thread = threading.Thread(target=elsewhere); thread.start(); thread.join()
with fanfold.label(model="after"): x.atan()
x.asin()
class Mute:
    def __str__(self): raise ValueError("no text")
with fanfold.label(model=Mute(), request=1): x.exp()
with fanfold.label(model="fine"): x.exp2()
class Deep(torch.autograd.Function):  # backward inside backward, so deep that torch goes on in a thread of its own
    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        if ctx.depth:
            with torch.enable_grad(): Deep.apply(torch.ones(2, requires_grad=True), ctx.depth - 1).sum().backward()
            return grad, None
        with fanfold.label(part="inner"): grad.log()
        grad.log2()
        return grad, None
for _ in range(2):
    with fanfold.label(model="outer"): Deep.apply(torch.ones(2, requires_grad=True), 70).sum().backward()
run.finish()
"""


def test_labels_that_do_not_nest_end_all_the_same(runs_dir, tmp_path):
    _, err = run(program(tmp_path, UNNESTED))
    labels = {}
    for row in stored(runs_dir).ops():
        labels.setdefault(row["op"].removeprefix("aten::"), set()).add(row["label"])
    assert labels["tan"] == {"early=yes"}
    assert labels["sin"] == {"model=m"}
    assert labels["cosh"] == {"model=again"}
    assert labels["atan"] == {"model=after"}
    assert labels["exp2"] == {"model=fine"}
    for op in ("cos", "sinh", "erf", "erfc", "asin", "exp"):
        assert labels[op] == {""}, op
    assert err.count("could not write a label: ValueError: no text") == 1
    assert labels["log"] == {"model=outer,part=inner"}  # on a thread that has the outer label from torch
    assert labels["log2"] == {"model=outer"}


ORDERS = """
import torch
from torch.profiler import profile, ProfilerActivity
def profiler(): return profile(activities=[ProfilerActivity.CPU])
run = begin({"every": 1})
first = profiler(); first.start()
with fanfold.label(model="under"):
    torch.ones(2).tan()
    first.stop()
    torch.ones(2).cos()
with fanfold.label(model="around"):
    second = profiler(); second.start(); torch.ones(2).sinh()
torch.ones(2).cosh(); second.stop()
with profiler():
    with fanfold.label(model="inside"): torch.ones(2).erf()
third = profiler(); third.start()
with fanfold.label(model="late"):
    x = torch.ones(2, requires_grad=True); x.exp().sum().backward()
third.stop()
run.finish()
assert "aten::sinh" in {event.name for event in second.events()}
"""


def test_labels_and_profilers_come_and_go_in_any_order(runs_dir, tmp_path):
    run(program(tmp_path, ORDERS))
    labels = {}
    for row in stored(runs_dir).ops():
        labels.setdefault(row["op"], set()).add(row["label"])
    expected = {"aten::tan": "under", "aten::cos": "under", "aten::sinh": "around", "aten::erf": "inside", "ExpBackward0": "late"}
    assert {op: labels[op] for op in expected} == {op: {f"model={name}"} for op, name in expected.items()}
    assert labels["aten::cosh"] == {""}


MANY = """
import torch
run = begin({"every": 1})
for i in range(400):
    with fanfold.label(request=i): torch.ones(2).tan()
run.finish()
"""


def test_too_many_labels_are_said_and_counted_together(runs_dir, tmp_path):
    _, err = run(program(tmp_path, MANY))
    assert err.count("more than 254 different labels") == 1
    tan = {row["label"]: row["count"] for row in stored(runs_dir).ops() if row["op"] == "aten::tan"}
    assert sum(tan.values()) == 400
    assert tan["(other labels)"] > 100
    assert tan["request=7"] == 1


TWO_RUNS = """
import torch
entered, go, x = threading.Event(), threading.Event(), torch.ones(2)
def serve():
    with fanfold.label(model="server"):
        with fanfold.label(request="first"):
            x.tan(); entered.set(); go.wait()
            x.cos()
        x.sin()
with begin({"every": 1}) as first:
    thread = threading.Thread(target=serve); thread.start(); entered.wait()
    with fanfold.label(customer="acme-secret"): x.tan()
    for i in range(300):
        with fanfold.label(i=i): x.tan()
with fanfold.label(model="mine"):
    with fanfold.label(part="outer"):
        with fanfold.label(part="inner"):
            with begin({"every": 1}) as second:
                x.exp(); go.set(); thread.join()
                for i in range(240):
                    with fanfold.label(i=f"{i}."): x.tan()
                (table,) = (second.path / "ops").glob("*.ops")
                print(json.dumps([first.id, second.id, [word in table.read_bytes() for word in (b"acme", b"self-test", b"first")]]))
        with begin({"every": 1}) as third: x.exp()
        x.neg()
"""


def test_a_run_has_no_label_of_an_earlier_one_but_those_that_threads_still_have(runs_dir, tmp_path):
    out, _ = run(program(tmp_path, TWO_RUNS))
    _, second, told = last_json(out)
    assert told == [False, False, True]
    rows = fanfold.open(second, dir=runs_dir).ops()
    labels = {op: {row["label"] for row in rows if row["op"] == f"aten::{op}"} for op in ("tan", "cos", "sin", "exp")}
    assert labels["exp"] == {"model=mine,part=inner"}
    assert labels["cos"] == {"model=server,request=first"}  # set before this run began, on another thread
    assert labels["sin"] == {"model=server"}  # its outer block came back in this run
    assert labels["tan"] == {f"model=mine,part=inner,i={i}." for i in range(240)}


def test_a_zero_byte_in_a_label_is_written_out(runs_dir, tmp_path):
    code = """
import torch
with begin({"every": 1}):
    with fanfold.label(model="a\\0b", part="c"): torch.ones(2).tan()
"""
    run(program(tmp_path, code))
    assert {row["label"] for row in stored(runs_dir).ops() if row["op"] == "aten::tan"} == {r"model=a\0b,part=c"}


def test_without_a_profile_a_label_costs_nothing_and_needs_no_torch(tmp_path):
    code = """
for _ in range(3):
    with fanfold.label(model="m"): pass
assert "torch" not in sys.modules
"""
    run(program(tmp_path, code), imports=True)
