"""What held a GPU's memory, from a snapshot in the form torch gives it. benchmarks/gpu_blackbox.py runs out of memory on a real GPU."""

import json
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest

import fanfold
from fanfold.blackbox.memory import CREDIT_SECONDS, CREDIT_SHARE, MemoryRecorder, sentence, summarize
from fanfold.probes import labels
from fanfold.store import open_run
from fanfold.store.blackbox import memory_errors

GIB = 1 << 30


def block(size, line, *, state="active_allocated", address=0, **more):
    frames = [
        {"filename": "/lib/python3.12/site-packages/torch/nn/modules/linear.py", "line": 134, "name": "forward"},
        {"filename": "/home/me/model.py", "line": line, "name": "forward"},
    ]
    return {"size": size, "state": state, "address": address, "frames": frames if line else [], **more}


def snapshot():
    blocks = [
        block(4 * GIB, 31, address=1), block(2 * GIB, 31, user_metadata="model=decoder"), block(GIB, 12),
        block(GIB, 0), block(9 * GIB, 31, state="inactive"),
    ]  # fmt: skip
    trace = [{"action": "alloc", "addr": 1, "user_metadata": "model=encoder"}, {"action": "free_completed", "addr": 1}]
    other = {"device": 1, "total_size": 50 * GIB, "blocks": [block(50 * GIB, 99)]}
    return {"segments": [{"device": 0, "total_size": 17 * GIB, "blocks": blocks}, other], "device_traces": [trace, []]}


def test_the_line_that_holds_most_comes_first():
    use = summarize(snapshot(), 0)
    assert (use.allocated, use.reserved, use.unknown) == (8 * GIB, 17 * GIB, GIB)
    assert [(one.size, one.count, one.largest, one.where[1].line) for one in use.by_stack] == [
        (6 * GIB, 2, 4 * GIB, 31),
        (GIB, 1, GIB, 12),
    ]
    assert {one.label: one.size for one in use.by_label} == {"model=encoder": 4 * GIB, "model=decoder": 2 * GIB}
    assert "75% of them by model.py:31 in forward" in sentence(use)


def test_a_snapshot_without_content_is_no_error():
    assert summarize({}, 0).allocated == 0
    assert sentence(summarize({}, 0)) == "0.0 MiB could not be allocated on cuda:0; 0.0 MiB are in use."


class Allocator:
    """The part of torch.cuda that the recorder calls, on a machine without a GPU."""

    def __init__(self):
        self.reserved, self.calls = 0, []
        self.memory = SimpleNamespace(_record_memory_history=lambda enabled, **how: self.calls.append(enabled))

    def device_count(self):
        return 1

    def memory_reserved(self, device):
        return self.reserved


def recorded(tmp_path, seconds, steps_at, reserved_at):
    """Look at the allocator each second; return in which seconds its history was on, and what was called."""
    now, cuda = [0.0], Allocator()
    recorder = MemoryRecorder(tmp_path, 0, lambda _: True, clock=lambda: now[0])
    recorder._own = True
    on = []
    for second in range(seconds):
        now[0], cuda.reserved = float(second), reserved_at(second)
        recorder._adapt(cuda, steps_at(second))
        on.append(recorder._recording)
    return on, cuda.calls


def test_stacks_are_recorded_until_two_steps_after_the_last_growth(tmp_path):
    """Loading takes 100 s, then there is a step each second; memory grows while loading, in the first step and at 300."""
    on, calls = recorded(
        tmp_path, 400, lambda second: max(0, second - 100), lambda second: min(second, 101) + 1 + (second >= 300)
    )
    assert [second for second in range(400) if on[second]] == [*range(103), 300, 301]
    assert calls == ["all", None, "all", None]


def test_memory_that_grows_all_the_time_is_recorded_for_a_bounded_share(tmp_path):
    on, _ = recorded(tmp_path, 3600, lambda second: 10 * second, lambda second: second + 1)
    assert all(on[1:25])
    assert sum(on) <= CREDIT_SECONDS + CREDIT_SHARE * 3600 + 2
    assert sum(on[1800:]) > 0.8 * CREDIT_SHARE * 1800


def test_a_program_that_takes_no_steps_is_recorded_while_its_memory_grows(tmp_path):
    on, _ = recorded(tmp_path, 300, lambda _: 0, lambda second: min(second, 200) + 1)
    assert on == [second < 230 for second in range(300)]


def test_memory_errors_are_read_back_and_saved(tmp_path):
    run = fanfold.init("p", id="r", dir=tmp_path, quiet=True, system=False)
    (tmp_path / "p" / "r" / "blackbox").mkdir()

    def write(facts):
        run._recorder.event(facts.pop("event"), facts)
        return True

    recorder = MemoryRecorder(run.path, 0, write)
    import msgspec

    use = summarize(snapshot(), 0)
    kept = recorder._keep(snapshot(), "memory-rank0-1.pickle")
    write({"event": "blackbox", "kind": "memory", "data": msgspec.to_builtins(use), "files": [{"path": "m.pickle", **kept}]})
    run.finish()
    (failed,) = memory_errors(open_run(run.path))
    assert failed.use == use
    command = [sys.executable, "-m", "fanfold", "memory", "r", "--dir", str(tmp_path)]
    shown = subprocess.run([*command, "--save", str(tmp_path / "out")], capture_output=True, text=True, check=False, timeout=60)
    assert shown.returncode == 3
    assert "/home/me/model.py:31 in forward" in shown.stdout
    assert pickle.loads((tmp_path / "out" / "memory-rank0-1.pickle").read_bytes()) == snapshot()
    again = subprocess.run([*command, "--save", str(tmp_path / "out")], capture_output=True, text=True, check=False, timeout=60)
    assert (again.returncode, "exists already" in again.stderr) == (2, True)
    document = subprocess.run([*command, "--json"], capture_output=True, text=True, check=False, timeout=60)
    assert json.loads(document.stdout)["errors"][0]["use"]["by_stack"][0]["size"] == 6 * GIB


def test_a_follower_hears_of_labels_as_they_begin_and_end():
    heard = []
    labels.follow(heard.append)
    try:
        with fanfold.label(model="a"), fanfold.label(request="1"):
            pass
    finally:
        labels.follow(None)
    assert heard == ["model=a", "model=a,request=1", "model=a", ""]


@pytest.mark.parametrize("data", [None, {}, {"device": "x"}, {"by_stack": [{"where": 3}]}])
def test_a_forged_memory_error_breaks_no_reader(data, tmp_path):
    run = fanfold.init("p", id="r", dir=tmp_path, quiet=True, system=False)
    run._recorder.event("blackbox", {"kind": "memory", "data": data})
    run._recorder.event("blackbox", {"kind": "hang", "data": data})
    run._recorder.event("blackbox", {"kind": "death", "who": 0, "data": data})
    run._recorder.event("blackbox", {"kind": "stacks", "id": "x", "data": data})
    run.finish()
    for command in ("memory", "hang"):
        done = subprocess.run(
            [sys.executable, "-m", "fanfold", command, "r", "--dir", str(tmp_path)], capture_output=True, check=False
        )
        assert done.returncode in (0, 3), done.stderr
