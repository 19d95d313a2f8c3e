"""The rank the others wait for is named, by where it loses its time; where there is none, nobody is."""

import json
import os
import sys

import pytest

import fault_table
import warm_python
from paths import HELPERS

torch = pytest.importorskip("torch")

from fanfold.callbacks import StragglerCallback, TrainerControl, TrainerState  # noqa: E402

TRAIN = HELPERS / "straggler_train.py"


def found(folder, where, slow, ranks=2):
    """Train with a rank that is slow somewhere; return who was named."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(TRAIN)]
    done = warm_python.run(
        [*command, str(folder), where, str(slow)], capture_output=True, text=True, timeout=240, libraries="torch",
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "FANFOLD_DIR": str(folder / "runs")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return {(rank, key) for rank, key in json.loads((folder / "found.json").read_text())}


@pytest.mark.parametrize(("where", "key"), [("compute", "time/compute"), ("data", "time/data"), ("io", "time/compute")])
def test_a_slow_rank_is_named_by_where_it_loses_its_time(where, key, tmp_path):
    assert found(tmp_path, where, 1) == {(1, key)}


def test_without_a_slow_rank_nobody_is_named(tmp_path):
    assert found(tmp_path, "nowhere", -1) == set()


def test_waiting_for_another_rank_is_not_counted_as_computing():
    """The hook stays on the parameter that gets its gradient last, and the time from there to the update is left out."""
    clock = iter(range(1000))
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    callback, state, control = StragglerCallback(every=10, clock=lambda: float(next(clock))), TrainerState(), TrainerControl()
    callback.on_train_begin(None, state, control, model=model)
    for _ in range(3):
        callback.on_step_begin(None, state, control)
        model(torch.ones(1, 2)).sum().backward()
        for _ in range(50):
            next(clock)  # the other rank is late
        callback.on_pre_optimizer_step(None, state, control)
        state.global_step += 1
        callback.on_step_end(None, state, control)
    assert min(callback._times["time/step"]) > 50
    assert max(callback._times["time/compute"]) < 10
    assert [bool(parameter._post_accumulate_grad_hooks) for parameter in model.parameters()].count(True) == 1
    callback.on_train_end(None, state, control)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


@pytest.mark.faults
@pytest.mark.timeout(1800)  # twenty trainings, each of them with its own torchrun
def test_nobody_is_named_in_twenty_trainings_without_a_slow_rank(tmp_path):
    named = [found(tmp_path / str(turn), "nowhere", -1, ranks=2 + turn % 3) for turn in range(20)]
    fault_table.record("trainings without a slow rank (raised: ranks accused wrongly)", times=20, raised=sum(map(len, named)))
    assert named == [set()] * 20


@pytest.mark.faults
@pytest.mark.parametrize("slow", [0, 1, 2])
@pytest.mark.parametrize(("where", "key"), [("compute", "time/compute"), ("data", "time/data"), ("io", "time/compute")])
def test_any_slow_rank_among_three_is_named(where, key, slow, tmp_path):
    named = found(tmp_path, where, slow, ranks=3)
    wrong = len(named - {(slow, key)})
    fault_table.record("trainings with one slow rank (points: ranks named with the cause; raised: ranks accused wrongly)", points=1,
                       lost=int((slow, key) not in named), raised=wrong)  # fmt: skip
    assert named == {(slow, key)}
