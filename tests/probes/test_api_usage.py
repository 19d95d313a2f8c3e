"""API usage: which keys a process used, once each; model files written and read; one's own keys; the question across runs."""

import json
import subprocess
import sys

import pytest

import fanfold
from fanfold.cli import main
from fanfold.probes.native import build
from ops_child import last_json, program, run, stored

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the native part is for Linux")


@pytest.fixture(scope="session", autouse=True)
def built():
    build.build()


USED = """
fanfold.log_api_usage_once("mine.early")
run = begin({"every": 1})   # before torch is imported
import torch
model = torch.nn.Linear(2, 2); torch.optim.SGD(model.parameters(), 0.1)
torch.save(model.state_dict(), "weights.pt"); torch.save(model.state_dict(), "weights.pt"); torch.load("weights.pt")
torch.jit.save(torch.jit.trace(model, torch.ones(1, 2)), "traced.pt")
for _ in range(3): fanfold.log_api_usage_once("mine.fit")
run.finish()
"""


def test_keys_are_recorded_once_and_files_each_time(runs_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(program(tmp_path, USED), imports=True)
    found = stored(runs_dir).usage()
    keys = [record["key"] for record in found if not record["data"]]
    assert len(keys) == len(set(keys))
    assert {
        "torch.python.import",
        "python.nn_module",
        "python.optimizer",
        "torch.save",
        "torch.load",
        "torch.jit.save",
        "mine.early",
        "mine.fit",
    } <= set(keys)
    written = [record["data"] for record in found if record["key"] == "pytorch.stream.writer.metadata"]
    assert [data["file_name"] for data in written].count("weights") == 2  # each save, though the key counts once
    assert all(int(data["file_size"]) > 0 and data["serialization_id"] for data in written if data["file_name"] == "weights")
    assert any(record["key"] == "pytorch.stream.reader.metadata" for record in found)
    asked = [sys.executable, "-m", "fanfold", "usage", "--json"]
    (who,) = json.loads(subprocess.run([*asked, "--api", "torch.jit.save"], capture_output=True, text=True, check=True).stdout)
    assert (who["run"], who["processes"]) == (stored(runs_dir).id, 1)
    assert who["versions"]["torch"].startswith("2.")
    files = json.loads(subprocess.run([*asked, "--files"], capture_output=True, text=True, check=True).stdout)
    assert {(row["file_name"], row["how"]) for row in files} >= {("weights", "written"), ("weights", "read")}
    assert subprocess.run([*asked, "--api", "torch.never"], capture_output=True, text=True).returncode == 1


FORKED = """
import multiprocessing, torch
use = torch._C._log_api_usage_once  # as torch itself does
def quiet():
    use("child.quiet")  # and no operator
def busy():
    use("child.before"); torch.ones(2).tan(); use("child.after")
    torch.save(torch.ones(2), "child.pt")
run = begin({"every": 1})
pids = []
for target in (quiet, busy):
    child = multiprocessing.get_context("fork").Process(target=target); child.start(); child.join(); pids.append(child.pid)
run.finish()
print(json.dumps({"pids": pids, "left": os.listdir(run.path / "ops")}))
"""


def test_forked_children_leave_what_they_used_under_their_own_pid(runs_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = last_json(run(program(tmp_path, FORKED), imports=True)[0])
    assert told["left"] == []
    quiet, busy = told["pids"]
    found = stored(runs_dir).usage()
    pids = {record["key"]: record["pid"] for record in found if record["key"].startswith("child.")}
    assert pids == {"child.quiet": quiet, "child.before": busy, "child.after": busy}
    written = [record for record in found if record["data"].get("file_name") == "child"]
    assert [record["pid"] for record in written] == [busy]


def test_usage_that_found_no_room_is_counted_and_said(runs_dir, tmp_path, capsys):
    code = """
import torch
run = begin({"every": 1})
for i in range(5000): torch._C._log_api_usage_once("x" * 100 + str(i))  # 560 kB, faster than it is fetched
torch.ones(2).tan()
run.finish()
"""
    run(program(tmp_path, code), imports=True)
    assert main(["ops", "-", "--dir", str(runs_dir)]) == 0
    assert "API usage records exceeded 64 kB per second" in capsys.readouterr().err


def test_ones_own_keys_need_neither_torch_nor_a_profile(runs_dir, tmp_path):
    code = """
run = begin(False)
for _ in range(3): fanfold.log_api_usage_once("mine.fit")
run.finish()
assert "torch" not in sys.modules
"""
    run(program(tmp_path, code), imports=True)
    assert [(record["key"], record["rank"]) for record in stored(runs_dir).usage()] == [("mine.fit", 0)]


def test_each_run_of_a_process_has_its_own_keys_whatever_they_are(runs_dir, tmp_path):
    code = """
import torch
class Silent:
    def __str__(self): raise RuntimeError("no words")
found = []
for ops in (True, True, False):
    run = begin(ops)
    for key in ("mine.fit", "mine.fit", Silent(), None, ["a"], b"x", "zero\\0", "\\ud800", "long" * 20_000): fanfold.log_api_usage_once(key)
    run.finish()
    found.append([record["key"][:20] for record in fanfold.open(run.path).usage()])
print(json.dumps(found))
"""
    first, second, without = last_json(run(program(tmp_path, code), imports=True)[0])
    mine = {"mine.fit", "Silent", "None", "['a']", "b'x'", "zero ", "?", "long" * 5}
    assert mine < set(first)
    assert "torch.python.import" in first
    assert sorted(second) == sorted({*mine, "torch.python.import"})  # torch itself says each key once per process
    assert sorted(without) == sorted(mine)


def test_keys_that_find_no_room_before_a_run_are_told_and_count_inside_it(runs_dir, tmp_path):
    code = """
for number in range(5000): fanfold.log_api_usage_once(f"mine.{number}")
run = begin(False)
for key in ("mine.new", "mine.4999", "mine.4999"): fanfold.log_api_usage_once(key)
run.finish()
print(json.dumps([record["key"] for record in fanfold.open(run.path).usage()]))
"""
    out, err = run(program(tmp_path, code), imports=True)
    assert err.count("wait for a run to write them") == 1
    # A run's own keys find room behind those that wait, also one that was dropped before.
    assert last_json(out) == [*(f"mine.{number}" for number in range(4096)), "mine.new", "mine.4999"]


def test_usage_across_runs_names_each(runs_dir, tmp_path):
    code = 'run = begin(False, name=sys.argv[1])\nfanfold.log_api_usage_once("old.api")\nrun.finish()'
    path = program(tmp_path, code)
    for name in ("a", "b"):
        subprocess.run([sys.executable, str(path), name], check=True)
    assert len(fanfold.runs(dir=runs_dir)) == 2
    asked = [sys.executable, "-m", "fanfold", "usage", "--json", "--project", "p", "--api", "old.*"]
    rows = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
    assert sorted(row["name"] for row in rows) == ["a", "b"]


def test_who_uses_it_is_a_count_of_processes_with_the_version_of_its_library(runs_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = """
import torch
run = begin({"every": 1})
for i in range(3): torch.save(torch.ones(2), f"{i}.pt")
fanfold.log_api_usage_once("rich.old_print")
run.finish()
"""
    run(program(tmp_path, code), imports=True)
    files = ("usage", "--dir", str(runs_dir), "--json")
    assert main([*files, "--api", "pytorch.stream.writer.metadata"]) == 0
    assert [row["processes"] for row in json.loads(capsys.readouterr().out)] == [1]
    assert main([*files]) == 0
    (row,) = (row for row in json.loads(capsys.readouterr().out) if row["key"] == "pytorch.stream.writer.metadata")
    assert (row["processes"], row["records"]) == (1, 3)
    assert main([*files, "--api", "rich.*"]) == 0
    (who,) = json.loads(capsys.readouterr().out)
    assert who["versions"].keys() >= {"rich", "torch", "python"}
    assert who["user"]
    assert main(["usage", "--dir", str(runs_dir), "--api", "rich.*"]) == 0
    assert "1 run uses rich.*" in capsys.readouterr().err
    assert main(["usage", "--dir", str(runs_dir), "--api", "rich.print"]) == 1
    assert "Did you mean rich.old_print?" in capsys.readouterr().err
    assert main(["usage", "--dir", str(runs_dir), "--project", "nosuch"]) == 1
    assert "no runs yet in project nosuch" in capsys.readouterr().err
