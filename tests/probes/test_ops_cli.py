"""`fanfold ops`: the top, by what it can be split, two runs compared, and the forms other systems read."""

import contextlib
import json
import os
import pty
import subprocess
import sys

import pytest
from prometheus_client import parser

import fanfold
from fanfold.cli import main
from fanfold.cli.text import took
from fanfold.probes.native import build
from fanfold.probes.worker_tables import pack_rows
from fanfold.store import ops as store
from fanfold.store.ops_formats import prometheus
from ops_child import count, program, run, with_device

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the native part is for Linux")

TWO = """
import torch
for name, width in (("narrow", 4), ("wide", 400)):
    run = begin({"every": 1}, name=name, tags=["big" if width > 4 else "small"])
    model = torch.nn.Linear(width, width); optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for i in range(8):
        with fanfold.label(model="a" if i % 2 else "b"):
            optimizer.zero_grad(); model(torch.ones(4, width)).sum().backward(); optimizer.step()
    run.finish()
"""


SERVED = """
import time, torch
for _ in range(2):
    run = fanfold.init("twins", ops={"every": 1}, name="twin", system=False, quiet=True)
    with fanfold.label(model="two\\nlines"): torch.ones(2).erf()
    run.finish()
for project, calls in (("served", 100), ("elsewhere", 700)):
    run = fanfold.init(project, ops={"every": 1}, name=f"{project}-{calls}", system=False, quiet=True)
    for i in range(calls):
        with torch.profiler.record_function(f"request {i}"): torch.ones(2).tan()
    run.finish()
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two profiled runs, the second with a wider model; in another project one that takes no steps, in a third one longer, and
    two of one name in a fourth."""
    build.build()
    tmp = tmp_path_factory.mktemp("ops")
    run(program(tmp, SERVED), FANFOLD_DIR=str(tmp / "runs"))
    run(program(tmp, TWO), FANFOLD_DIR=str(tmp / "runs"))
    return tmp / "runs"


SAMPLED = """
import torch
for name, calls in (("once", 1), ("twice", 2)):
    run = fanfold.init("sampled", ops={"sampling": 1.0}, name=name, system=False, quiet=True)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 1e-3)
    for i in range(8):
        for _ in range(calls): torch.ones(2).tan()
        optimizer.step()
    run.finish()
"""


def test_calls_sampled_at_random_are_told_and_compared_by_total_time(tmp_path, capsys):
    build.build()
    run(program(tmp_path, SAMPLED), FANFOLD_DIR=str(tmp_path / "runs"))
    assert main(["ops", "once", "--dir", str(tmp_path / "runs")]) == 0
    shown = capsys.readouterr()
    assert "0 ns" not in shown.out  # time of their own is not none, but unknown
    assert "sampled at random" in shown.err
    words = ("once", "twice", "--dir", str(tmp_path / "runs"))
    changes = [row["total_change_ns"] for row in compared(capsys, *words)["rows"]]
    assert changes == sorted(changes, reverse=True)
    table = ask(capsys, "diff", *words)
    assert table.split()[:4] == ["op", "scope", "total/step", "B/A"]


WORKERS = """
import torch
from torch.utils.data import DataLoader
class Noise(torch.utils.data.Dataset):
    def __len__(self): return 400
    def __getitem__(self, place): return torch.randn(50_000)
run = begin({"every": 2}, name="fed")
model = torch.nn.Linear(50_000, 1); optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for batch in DataLoader(Noise(), batch_size=4, num_workers=1):
    optimizer.zero_grad(); model(batch).sum().backward(); optimizer.step()
run.finish()
"""


def test_own_time_of_workers_is_unknown_and_their_operators_are_among_the_first(tmp_path, capsys):
    build.build()
    run(program(tmp_path, WORKERS), FANFOLD_DIR=str(tmp_path / "runs"))
    place = ("--dir", str(tmp_path / "runs"))
    rows = json.loads(ask(capsys, "fed", *place, "--json"))
    assert {row["self_ns"] is None for row in rows if row["scope"] == "sampled"} == {True}
    assert {row["self_ns"] is None for row in rows if row["scope"] == "forward"} == {False}
    times = [row["self_ns"] or row["total_ns"] for row in rows]
    assert times == sorted(times, reverse=True)
    assert main(["ops", "fed", *place]) == 0
    shown = capsys.readouterr()
    (randn,) = [line.split() for line in shown.out.splitlines() if line.startswith("aten::randn ")]
    (row,) = [row for row in rows if row["op"] == "aten::randn"]
    assert randn[:5] == ["aten::randn", "sampled", f"{row['calls']:,.0f}", *took(row["total_ns"]).split()]  # no self, no share
    assert "sampled at random" in shown.err
    twice = compared(capsys, "fed", "fed", *place)["rows"]
    assert {row["op"] for row in twice if row["self_change_ns"] is None} >= {"aten::randn", "aten::normal_"}
    assert ask(capsys, "diff", "fed", "fed", "--top", "0", *place).split()[2:4] == ["self/step", "total/step"]


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


def compared(capsys, *words) -> dict:
    return json.loads(ask(capsys, "diff", *words, "--json"))


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
    as_list = ask(capsys, "wide", "--dir", str(two), "--json", "--top", "0", "--by", "label,rank")
    assert json.loads(as_list) == by
    table = ask(capsys, "wide", "--dir", str(two), "--top", "3")
    assert len(table.splitlines()) == 4
    assert "share" in table.splitlines()[0]


def test_diff_says_what_got_slower_and_parts_can_be_compared(two, capsys):
    found = compared(capsys, "narrow", "wide", "--dir", str(two))
    addmm = {row["op"]: row for row in found["rows"] if row["scope"] == "forward"}["aten::addmm"]
    assert addmm["calls_a"] == addmm["calls_b"] == 1
    assert addmm["ratio"] == pytest.approx(addmm["mean_b_ns"] / addmm["mean_a_ns"])
    changes = [row["self_change_ns"] for row in found["rows"]]
    assert changes == sorted(changes, reverse=True)
    assert (found["unit"], found["a"]["word"], found["a"]["steps"]) == ("step", "narrow", 8)
    assert found["b"]["runs"] == [fanfold.open("wide", dir=two).id]
    assert compared(capsys, "wide@label=model=a", "wide@label=model=b", "--dir", str(two))["rows"]
    by = ask(capsys, "diff", "narrow", "wide", "--dir", str(two), "--by", "project,rank", "--top", "1").splitlines()
    assert by[0].split()[:4] == ["op", "scope", "project", "rank"]
    # The change comes first: a narrow terminal leaves the last columns out.
    table = ask(capsys, "diff", "narrow", "wide", "--dir", str(two), "--top", "1")
    assert table.split()[:4] == ["op", "scope", "self/step", "B/A"]
    assert main(["ops", "diff", "wide", "--dir", str(two)]) == 2
    assert main(["ops", "trace", "wide", "--dir", str(two)]) == 2  # it has ended
    assert "takes no more steps" in capsys.readouterr().err


def test_ddp_is_seen_by_node_with_its_collectives_and_backward(spread, capsys):
    rows = fanfold.open("spread", dir=spread).ops()
    for rank in (0, 1):
        assert count(rows, "DistributedDataParallel.forward", rank=rank, kind="collective") == 8
        assert count(rows, "AddmmBackward0", rank=rank, scope="backward") == 8
        assert count(rows, "c10d::allreduce_", rank=rank, scope="backward", kind="collective") >= 8  # from inside backward
        assert count(rows, "gloo:all_reduce", rank=rank, kind="collective") >= 7  # the last may end on its thread after the run
    split = json.loads(ask(capsys, "spread", "--dir", str(spread), "--json", "--top", "0", "--by", "node"))
    assert {(row["node"], row["calls"]) for row in split if row["op"] == "aten::linear"} == {("node0", 8), ("node1", 8)}


@pytest.mark.parametrize("part", ["spread", "spread@rank=1", "spread@node=node0"])
def test_runs_of_other_numbers_of_processes_compare_per_step(part, spread, capsys):
    rows = compared(capsys, "narrow", part, "--dir", str(spread))["rows"]
    addmm = {row["op"]: row for row in rows if row["scope"] == "forward"}["aten::addmm"]
    assert addmm["calls_a"] == addmm["calls_b"] == 1


def test_all_runs_of_a_version_a_tag_or_a_node_are_compared(spread, capsys):
    place = ("--dir", str(spread))
    torch = fanfold.open("wide", dir=spread).facts["packages"]["torch"]
    for a, b in (("@tag=small", "@tag=big"), ("narrow", f"@tag=big@torch={torch[:4]}"), ("narrow", f"@tag=big@torch={torch}")):
        assert compared(capsys, a, b, *place)["rows"] == compared(capsys, "narrow", "wide", *place)["rows"]
    nodes = compared(capsys, "@node=node0", "@node=node1", *place, "--kind", "operator")["rows"]
    assert nodes == compared(capsys, "spread@rank=0", "spread@rank=1", *place, "--kind", "operator")["rows"]
    assert not any("gloo" in row["op"] for row in nodes)
    both = compared(capsys, "narrow", f"@torch={torch}", "--project", "p", *place)
    assert {row["op"]: row["calls_b"] for row in both["rows"] if row["scope"] == "forward"}["aten::addmm"] == 1
    assert len(both["b"]["runs"]) == 3


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["diff", "narrow", "@tag=huge"], 1, "There are: big, small."),
        (["diff", "narrow", "@torch=1.2"], 1, "no run has torch 1.2"),
        (["diff", "narrow@rank=7", "wide"], 1, "There are: 0."),
        (["diff", "narrow", "@unheard-of=1"], 2, "Known: rank, node, label"),
        (["diff", "narrow@rank", "wide"], 2, "is not part of a run"),
        (["diff", "@project=twins@label=x", "wide"], 1, r"model=two\nlines."),
        (["diff", "narrow", "wide", "--format", "otlp"], 2, "Use --json"),
        (["wide", "--format", "otlp", "--by", "rank"], 2, "takes no --by"),
        (["wide", "--format", "prometheus", "--top", "3", "--json"], 2, "takes no --top and no --json"),
        (["--project", "nosuch", "--format", "prometheus"], 1, "no runs yet in project nosuch"),
        (["--project", "nosuch", "--status", "running", "--format", "otlp"], 1, "project nosuch"),
        (["wide", "--by", "lable"], 2, "Did you mean label?"),
        (["wide", "--kind", "collective"], 1, "nothing of that kind"),
        (["--project", "nosuch"], 1, "no runs yet in project nosuch"),
        (["--all", "--tag", "nosuch"], 1, "matches --tag"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(words, code, said, two, capsys):
    assert main(["ops", *words, "--dir", str(two)]) == code
    assert said in capsys.readouterr().err


def test_a_run_compared_with_itself_has_changed_nowhere(two, capsys):
    assert main(["ops", "diff", "wide", "wide", "--dir", str(two)]) == 0
    shown = capsys.readouterr()
    assert {line.split("  ")[0] for line in shown.out.splitlines()} > {"aten::addmm"}
    assert "+" not in shown.out
    assert "nothing differs" in shown.err


def test_runs_without_steps_are_compared_by_the_second(two, capsys):
    words = ("diff", "served-100", "elsewhere-700", "--dir", str(two))
    found = compared(capsys, *words[1:])
    tan = {row["op"]: row for row in found["rows"] if row["scope"] == "forward"}["aten::tan"]
    lives = [max(table.facts["now"] - table.facts["started"] for table in store.tables(fanfold.open(name, dir=two)))
             for name in words[1:3]]  # fmt: skip
    assert [tan["calls_a"], tan["calls_b"]] == pytest.approx([100e9 / lives[0], 700e9 / lives[1]])
    assert found["unit"] == "second"
    assert set(tan) == set(compared(capsys, "narrow", "wide", "--dir", str(two))["rows"][0])
    assert main(["ops", *words]) == 0
    shown = capsys.readouterr()
    assert "calls/s" in shown.out
    assert "per second" in shown.err


def test_a_table_has_the_first_rows_and_json_all_of_them(two, capsys):
    for words in (("elsewhere-700",), ("diff", "served-100", "elsewhere-700")):
        rows = [json.loads(ask(capsys, *words, "--dir", str(two), "--json", *more)) for more in ((), ("--top", "3"))]
        every, some = (found["rows"] if words[0] == "diff" else found for found in rows)
        assert len(every) > 700
        assert some == every[:3]
        assert len(ask(capsys, *words, "--dir", str(two)).splitlines()) == 21


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (["--top", "3", "narrow", "--by", "rank", "wide"], ["narrow", "wide", "--by", "rank", "--top", "3"]),
        (["diff", "--project", "p", "@tag=small", "@tag=big"], ["diff", "@tag=small", "@tag=big", "--project", "p"]),
        (["diff", "-@rank=0", "--project", "served", "-@thread=main"], ["diff", "served-100", "served-100"]),
        (["--project", "served", "diff", "--", "-@rank=0", "-"], ["diff", "served-100", "served-100"]),
        (["--project", "served", "--", "-"], ["served-100"]),
    ],
)
def test_options_and_words_come_in_any_order(words, same, two, capsys):
    assert ask(capsys, "--dir", str(two), *words) == ask(capsys, "--dir", str(two), *same)


def test_a_trace_is_asked_for_with_its_options_before_the_run(two, capsys):
    assert main(["ops", "trace", "--steps", "5", "wide", "--dir", str(two)]) == 2
    assert "takes no more steps" in capsys.readouterr().err


def test_runs_of_one_name_are_told_apart(two, capsys):
    table = ask(capsys, "--all", "--by", "run", "--dir", str(two), "--top", "0")
    runs = {tuple(line.split()[2:4]) for line in table.splitlines() if line.startswith("aten::erf ")}
    assert runs == {("twin", run.id) for run in fanfold.runs("twins", dir=two)}
    assert {line.split()[2] for line in table.splitlines() if line.startswith("aten::addmm ")} >= {"narrow", "wide"}


def test_a_terminal_that_does_not_know_its_width_gets_whole_numbers(two):
    ours, theirs = pty.openpty()  # 0 by 0 until somebody says otherwise
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")} | {"TERM": "dumb"}
    words = [sys.executable, "-m", "fanfold", "ops", "wide", "--top", "0", "--dir", str(two), "-q"]
    with (
        subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as child,
        open(ours, "rb", buffering=0) as end,
    ):
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while piece := end.read(65536):
                shown += piece
    assert child.returncode == 0, shown
    lines = shown.decode().splitlines()
    assert all(line.rstrip().endswith(("ns", "µs", "ms", " s")) for line in lines[-3:]), lines
    assert max(map(len, lines)) > 80  # some of all names are long, whichever took the most time


def test_all_projects_and_those_a_filter_leaves(two, capsys):
    rows = json.loads(ask(capsys, "--all", "--by", "project", "--dir", str(two), "--json", "--top", "0"))
    assert {row["project"]: row["calls"] for row in rows if row["op"] == "aten::tan"} == {"served": 100, "elsewhere": 700}
    for words in (("--tag", "big"), ("--name", "wi*"), ("--filter", "tag:big")):
        assert ask(capsys, *words, "--dir", str(two), "--json") == ask(capsys, "wide", "--dir", str(two), "--json")
    assert main(["ops", "narrow", "wide", "--dir", str(two)]) == 0
    assert "2 runs, 2 processes: 16 of 16 steps" in capsys.readouterr().err


def test_nothing_is_an_empty_list_and_a_page_without_samples(two, capsys):
    assert main(["ops", "--project", "nosuch", "--dir", str(two), "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == []
    assert list(
        parser.text_string_to_metric_families(ask(capsys, "--status", "running", "--dir", str(two), "--format", "prometheus"))
    )
    assert ask(capsys, "--status", "running", "--dir", str(two), "--format", "otlp") == ""


def test_numbers_are_whole_and_lines_short_enough_for_a_collector(two, capsys):
    stored = fanfold.open("elsewhere-700", dir=two)
    rows = stored.ops()
    assert " 12345678.9012346\n" in prometheus([(stored, [{**rows[0], "total_ns": 12_345_678_901_234_567, "scale": 1.0}])])
    text = ask(capsys, "elsewhere-700", "--dir", str(two), "--format", "prometheus")
    samples = [sample for family in parser.text_string_to_metric_families(text) for sample in family.samples]
    seconds = [sample.value for sample in samples if sample.name == "fanfold_op_observed_host_seconds_total"]
    assert sum(seconds) == pytest.approx(sum(row["total_ns"] for row in rows) / 1e9, rel=1e-12)
    assert len({(sample.name, *sample.labels.items()) for sample in samples}) == len(samples) == 6 * len(rows) + 2
    lines = ask(capsys, "elsewhere-700", "--dir", str(two), "--format", "otlp").splitlines()
    assert max(map(len, lines)) < 1 << 20
    points = [point for line in lines for metric in json.loads(line)["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]
              if metric["name"] == "fanfold.op.calls" for point in metric["gauge"]["dataPoints"]]  # fmt: skip
    assert len(points) == len(rows) > 700


TIMED = """
import time, torch
from fanfold.probes import op_table
run = begin({"every": 1}, name="timed")
def timed(): return sum(row["device_count"] for row in op_table.parse(op_table.take(library.current())).rows)
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


SCRAPED = """
import json, torch
from fanfold.store.ops_formats import prometheus
run = begin({"every": 10}, name="scraped")
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
texts = []
for step in range(120):
    if step % 50 == 2: torch.ones(3).erfinv()  # seen in the third step, and then hardly ever: its estimate wanders
    model(torch.ones(1, 2)).sum().backward(); optimizer.step()
    if step % 7 == 0: texts.append(prometheus([(stored, stored.ops()) for stored in [fanfold.open(run.path)]]))
run.finish()
print(json.dumps(texts))
"""


def test_counters_never_fall_while_a_run_goes_on(tmp_path):
    out, _ = run(program(tmp_path, SCRAPED), FANFOLD_DIR=str(tmp_path / "runs"))
    before: dict[tuple[str, ...], float] = {}
    kinds = {}
    for text in json.loads(out):
        for family in parser.text_string_to_metric_families(text):
            kinds[family.name] = family.type
            for sample in family.samples if family.type == "counter" else ():
                key = (sample.name, *map(str, sample.labels.items()))
                assert sample.value >= before.get(key, 0.0), key
                before[key] = sample.value
    assert {name for name, kind in kinds.items() if kind == "gauge"} == {
        f"fanfold_op_{name}" for name in ("calls", "host_seconds", "self_seconds")
    }
    steps = {key[0]: value for key, value in before.items() if "steps" in key[0]}
    assert steps == {"fanfold_steps_total": 120, "fanfold_observed_steps_total": pytest.approx(12, abs=2)}


def test_opentelemetry_reads_it(two, capsys):
    code = """
import sys
from google.protobuf.json_format import Parse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
request = Parse(sys.stdin.read(), ExportMetricsServiceRequest())
metrics = {m.name: m for m in request.resource_metrics[0].scope_metrics[0].metrics}
def op(point): return {a.key: a.value.string_value for a in point.attributes}["op"]
print(sum(p.as_double for p in metrics["fanfold.op.calls"].gauge.data_points if op(p) == "aten::linear"))
print(metrics["fanfold.steps"].sum.data_points[0].as_int, metrics["fanfold.observed_steps"].sum.is_monotonic)
print(sum(p.count for p in metrics["fanfold.op.duration"].histogram.data_points if op(p) == "aten::linear"))
for p in metrics["fanfold.op.duration"].histogram.data_points:
    assert sum(p.bucket_counts) == p.count and len(p.bucket_counts) == len(p.explicit_bounds) + 1
"""
    text = ask(capsys, "wide", "--dir", str(two), "--format", "otlp")
    done = subprocess.run([sys.executable, "-c", code], input=text, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["8.0", "8", "True", "8"], done.stderr


def test_a_run_without_a_profile_says_how_to_get_one(tmp_path, capsys):
    fanfold.init("p", dir=tmp_path, quiet=True, system=False).finish()
    assert main(["ops", "-", "--dir", str(tmp_path)]) == 1
    assert "FANFOLD_OPS=1" in capsys.readouterr().err


def test_a_profile_that_is_damaged_or_empty_is_not_called_none(tmp_path, capsys):
    damaged = fanfold.init("damaged", dir=tmp_path, quiet=True, system=False)
    damaged.finish()
    (damaged.path / "ops").mkdir()
    (damaged.path / "ops" / "0-1.ops").write_bytes(b"no table" * 100)
    assert main(["ops", damaged.id, "--dir", str(tmp_path)]) == 1
    assert "cannot be read: its file is damaged" in capsys.readouterr().err
    empty = fanfold.init("empty", dir=tmp_path, quiet=True, system=False)
    facts = {"rank": 0, "node": "n", "steps": 2, "observed": 0, "every": 100, "window": 1, "sampling": 0.0}
    empty._recorder.event("ops", {"id": "one", "facts": facts, "table": pack_rows([])})
    empty.finish()
    assert main(["ops", empty.id, "--dir", str(tmp_path)]) == 1
    assert "though a profile was kept: 0 of 2 steps observed in full" in capsys.readouterr().err


def test_a_run_without_steps_says_how_much_time_was_observed(tmp_path, capsys):
    run = fanfold.init("served", dir=tmp_path, quiet=True, system=False)
    facts = {"rank": 0, "node": "n", "steps": 0, "observed": 0, "every": 100, "window": 1, "sampling": 0.0, "seen_ns": 10**7,
             "started": 0, "now": 10**9}  # fmt: skip
    row = {"op": "aten::mul", "overload": "", "scope": "forward", "thread": "main", "label": "", "inputs": "", "all": False,
           "count": 1, "total_ns": 3000, "self_ns": 2000, "own_ns": 2000, "max_ns": 3000, "device_count": 0, "device_ns": 0,
           "hist": {}}  # fmt: skip
    run._recorder.event("ops", {"id": "one", "facts": facts, "table": pack_rows([row])})
    run.finish()
    assert main(["ops", run.id, "--dir", str(tmp_path)]) == 0
    assert "1 process: no optimizer steps, 10 ms of 1 s observed" in capsys.readouterr().err


def test_nobody_is_asked_for_a_trace_where_nobody_would_answer(tmp_path, capsys):
    run = fanfold.init("plain", dir=tmp_path, quiet=True, system=False)
    assert main(["ops", "trace", run.id, "--dir", str(tmp_path)]) == 2
    assert "records no operator profile" in capsys.readouterr().err
    run.finish()
