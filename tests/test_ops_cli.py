"""`fanfold ops`: the top, by what it can be split, two runs compared, and the forms other systems read."""

import json
import subprocess
import sys

import pytest
from prometheus_client import parser

import fanfold
from fanfold.cli import main
from fanfold.probes.native import build
from ops_child import count, program, run, with_device

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the native part is for Linux")

TWO = """
import torch
for name, width in (("narrow", 4), ("wide", 400)):
    run = begin({"every": 1}, name=name)
    model = torch.nn.Linear(width, width); optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for i in range(8):
        with fanfold.label(model="a" if i % 2 else "b"):
            optimizer.zero_grad(); model(torch.ones(4, width)).sum().backward(); optimizer.step()
    run.finish()
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two profiled runs, the second with a wider model."""
    build.build()
    tmp = tmp_path_factory.mktemp("ops")
    run(program(tmp, TWO), FANFOLD_DIR=str(tmp / "runs"))
    return tmp / "runs"


SPREAD = """
os.environ["FANFOLD_NODE"] = "node" + os.environ["RANK"]
import torch, torch.distributed as dist
run = begin({"every": 1}, name="spread")
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4)); optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for i in range(8):
    optimizer.zero_grad(); model(torch.ones(4, 4)).sum().backward(); optimizer.step()
dist.destroy_process_group()
run.finish()
"""


@pytest.fixture(scope="module")
def spread(two, tmp_path_factory):
    """A third run beside them: the narrow model in two processes under DDP, as if on two nodes."""
    path = program(tmp_path_factory.mktemp("spread"), SPREAD)
    env = {"FANFOLD_DIR": str(two), "FANFOLD_RUN_ID": "spread"}
    run(path, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", **env)
    return two


def ask(capsys, *words) -> str:
    assert main(["ops", *words]) == 0
    return capsys.readouterr().out


def test_the_top_and_how_it_splits(two, capsys):
    rows = json.loads(ask(capsys, "wide", "--dir", str(two), "--json", "--top", "0"))
    linear = {row["op"]: row for row in rows}["aten::linear"]
    assert (linear["calls"], linear["observed"]) == (8, 8)
    by = json.loads(ask(capsys, "wide", "--dir", str(two), "--json", "--top", "0", "--by", "label", "--by", "rank"))
    assert {(row["label"], row["rank"], row["calls"]) for row in by if row["op"] == "aten::linear"} == {
        ("model=a", 0, 4),
        ("model=b", 0, 4),
    }
    both = json.loads(ask(capsys, "--project", "p", "--dir", str(two), "--json", "--top", "0"))
    assert {row["op"]: row for row in both}["aten::linear"]["calls"] == 16
    assert [row["self_ns"] for row in both] == sorted((row["self_ns"] for row in both), reverse=True)
    table = ask(capsys, "wide", "--dir", str(two), "--top", "3")
    assert len(table.splitlines()) == 4
    assert "share" in table.splitlines()[0]


def test_diff_says_what_got_slower_and_parts_can_be_compared(two, capsys):
    rows = json.loads(ask(capsys, "diff", "narrow", "wide", "--dir", str(two), "--json", "--top", "0"))
    addmm = {row["op"]: row for row in rows if row["scope"] == "forward"}["aten::addmm"]
    assert addmm["calls_per_step_a"] == addmm["calls_per_step_b"] == 1
    assert addmm["ratio"] == pytest.approx(addmm["mean_b_ns"] / addmm["mean_a_ns"])
    changes = [row["self_per_step_ns"] for row in rows]
    assert changes == sorted(changes, reverse=True)
    assert json.loads(ask(capsys, "diff", "wide@label=model=a", "wide@label=model=b", "--dir", str(two), "--json"))
    assert main(["ops", "diff", "wide", "--dir", str(two)]) == 2
    assert main(["ops", "trace", "wide", "--dir", str(two)]) == 2  # it has ended
    assert "takes no more steps" in capsys.readouterr().err


def test_ddp_is_seen_by_node_with_its_collectives_and_backward(spread, capsys):
    rows = fanfold.open("spread", dir=spread).ops()
    for rank in (0, 1):
        assert count(rows, "DistributedDataParallel.forward", rank=rank, kind="collective") == 8
        assert count(rows, "AddmmBackward0", rank=rank, scope="backward") == 8
        assert count(rows, "c10d::allreduce_", rank=rank, scope="backward", kind="collective") >= 8  # from inside backward
        assert count(rows, "gloo:all_reduce", rank=rank, kind="collective") >= 8
    split = json.loads(ask(capsys, "spread", "--dir", str(spread), "--json", "--top", "0", "--by", "node"))
    assert {(row["node"], row["calls"]) for row in split if row["op"] == "aten::linear"} == {("node0", 8), ("node1", 8)}


@pytest.mark.parametrize("part", ["spread", "spread@rank=1", "spread@node=node0"])
def test_runs_of_other_numbers_of_processes_compare_per_step(part, spread, capsys):
    rows = json.loads(ask(capsys, "diff", "narrow", part, "--dir", str(spread), "--json", "--top", "0"))
    addmm = {row["op"]: row for row in rows if row["scope"] == "forward"}["aten::addmm"]
    assert addmm["calls_per_step_a"] == addmm["calls_per_step_b"] == 1


TIMED = """
import time, torch
from fanfold.probes import image
run = begin({"every": 1}, name="timed")
def timed(): return sum(row["device_count"] for row in image.parse(image.take(library.current())).rows)
x, end = torch.ones(2), time.monotonic() + 60
while timed() <= 1024 and time.monotonic() < end:  # as many as can be under way at a time; and no optimizer
    for _ in range(2000): x.tan()
run.finish()
"""


def test_device_time_needs_no_steps_and_is_in_every_form(tmp_path, capsys):
    run(program(tmp_path, with_device(tmp_path, TIMED)), FANFOLD_DIR=str(tmp_path / "runs"))
    (found,) = fanfold.runs(dir=tmp_path / "runs")
    (tan,) = [row for row in found.ops() if row["op"] == "aten::tan"]
    assert tan["device_count"] > 1024
    assert main(["ops", "timed", "--dir", str(tmp_path / "runs")]) == 0
    shown = capsys.readouterr()
    assert "device mean" in shown.out
    assert "500 µs" in shown.out
    assert "calls could not be timed on the device" in shown.err  # in the second before the first were read
    text = ask(capsys, "timed", "--dir", str(tmp_path / "runs"), "--format", "prometheus")
    families = {family.name: family.samples for family in parser.text_string_to_metric_families(text)}
    seconds = {sample.labels["op"]: sample.value for sample in families["fanfold_op_device_seconds"]}
    calls = {sample.labels["op"]: sample.value for sample in families["fanfold_op_device_timed_calls"]}
    assert calls["aten::tan"] == tan["device_count"]
    assert seconds["aten::tan"] == pytest.approx(tan["device_count"] * 0.5e-3)
    sent = json.loads(ask(capsys, "timed", "--dir", str(tmp_path / "runs"), "--format", "otlp"))
    metrics = {metric["name"]: metric for metric in sent["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]}
    assert max(point["asDouble"] for point in metrics["fanfold.op.device_seconds"]["sum"]["dataPoints"]) == pytest.approx(
        seconds["aten::tan"]
    )


def test_without_a_device_no_form_speaks_of_one(two, capsys):
    for name in ("prometheus", "otlp"):
        assert "device" not in ask(capsys, "wide", "--dir", str(two), "--format", name)


def test_prometheus_reads_it(two, capsys):
    families = {
        family.name: family
        for family in parser.text_string_to_metric_families(ask(capsys, "wide", "--dir", str(two), "--format", "prometheus"))
    }
    calls = [sample for sample in families["fanfold_op_calls"].samples if sample.labels["op"] == "aten::linear"]
    assert sorted((sample.labels["label"], sample.value) for sample in calls) == [("model=a", 4.0), ("model=b", 4.0)]
    assert sum(sample.value for sample in families["fanfold_op_host_seconds"].samples) > 0


def test_opentelemetry_reads_it(two, capsys):
    code = """
import sys
from google.protobuf.json_format import Parse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
request = Parse(sys.stdin.read(), ExportMetricsServiceRequest())
metrics = {m.name: m for m in request.resource_metrics[0].scope_metrics[0].metrics}
def op(point): return {a.key: a.value.string_value for a in point.attributes}["op"]
print(sum(p.as_double for p in metrics["fanfold.op.calls"].sum.data_points if op(p) == "aten::linear"))
print(sum(p.count for p in metrics["fanfold.op.duration"].histogram.data_points if op(p) == "aten::linear"))
for p in metrics["fanfold.op.duration"].histogram.data_points:
    assert sum(p.bucket_counts) == p.count and len(p.bucket_counts) == len(p.explicit_bounds) + 1
"""
    text = ask(capsys, "wide", "--dir", str(two), "--format", "otlp")
    done = subprocess.run([sys.executable, "-c", code], input=text, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["8.0", "8"], done.stderr


def test_a_run_without_a_profile_says_how_to_get_one(tmp_path, capsys):
    fanfold.init("p", dir=tmp_path, quiet=True, system=False).finish()
    assert main(["ops", "-", "--dir", str(tmp_path)]) == 1
    assert "FANFOLD_OPS=1" in capsys.readouterr().err
