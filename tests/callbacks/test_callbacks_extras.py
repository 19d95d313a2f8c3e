"""Norms, throughput, non-finite numbers, stragglers and preemption: measured in real training, read back from the run."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fanfold
import warm_python
from fanfold.callbacks import (
    CallbackHandler,
    DefaultFlowCallback,
    NonFiniteCallback,
    NormsCallback,
    PreemptionCallback,
    StragglerCallback,
    ThroughputCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

ARGS = SimpleNamespace(logging_strategy="no", logging_first_step=False, eval_strategy="no", save_strategy="no", per_device_train_batch_size=4,
                       gradient_accumulation_steps=2)  # fmt: skip


class Clock:
    """Time that passes when told to."""

    now = 100.0

    def __call__(self):
        return self.now


def train(model, *callbacks, steps=4, loss=lambda model: model(torch.ones(3, 2)).square().sum(), during=lambda step: None):
    """Train by hand, telling the callbacks what a loop tells them; return state, control and the gradients of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handler = CallbackHandler([DefaultFlowCallback, *callbacks], model, None, optimizer, None)
    state, control, gradients = TrainerState(max_steps=steps), TrainerControl(), []
    handler.on_train_begin(ARGS, state, control)
    while not control.should_training_stop:
        handler.on_step_begin(ARGS, state, control)
        loss(model).backward()
        during(state.global_step + 1)
        gradients.append([p.grad.clone() for p in model.parameters()])
        handler.on_pre_optimizer_step(ARGS, state, control)
        optimizer.step()
        handler.on_optimizer_step(ARGS, state, control)
        optimizer.zero_grad()
        state.global_step += 1
        handler.on_step_end(ARGS, state, control)
    handler.on_train_end(ARGS, state, control)
    return state, control, gradients


@pytest.fixture
def run(runs_dir):
    with fanfold.init("callbacks", system=False) as run:
        yield run


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))


# Norms


def test_norms_are_those_of_gradients_before_and_weights_after_the_step(run):
    trained = model()
    _, _, gradients = train(trained, NormsCallback(every=2, per_parameter=True))
    stored = fanfold.open(run.path)
    series = stored.series("norm/gradient")
    assert series.steps.tolist() == [2, 4]
    wanted = [math.sqrt(sum(float(g.square().sum()) for g in gradients[at])) for at in (1, 3)]
    assert series.values == pytest.approx(wanted, rel=1e-6)
    assert stored.series("norm/gradient/1.weight").values == pytest.approx([float(gradients[at][2].norm()) for at in (1, 3)])
    assert stored.series("norm/weight").values[-1] == pytest.approx(
        math.sqrt(sum(float(p.detach().square().sum()) for p in trained.parameters()))
    )
    assert stored.series("norm/weight/0.bias").values[-1] == pytest.approx(float(trained[0].bias.detach().norm()))


def test_what_is_not_asked_for_is_not_logged(run):
    train(model(), NormsCallback(every=1, gradients=False))
    assert fanfold.open(run.path).keys() == ["norm/weight"]


def test_histograms_are_counted_where_the_tensor_is_and_say_what_numpy_says(run):
    trained = model()
    train(trained, NormsCallback(every=4, gradients=False, histograms=True))
    run.flush()
    weight = trained[0].weight.detach().numpy().reshape(-1)
    shown = fanfold.open(run.path).media("histogram/weight/0.weight")[0].load()
    assert shown.counts.tolist() == np.histogram(weight, 64)[0].tolist()
    assert (shown.min, shown.max) == pytest.approx((weight.min(), weight.max()))
    assert (shown.mean, shown.std) == pytest.approx((weight.mean(), weight.std()), rel=1e-5)
    assert shown.edges == pytest.approx(np.histogram(weight, 64)[1], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    ("values", "count", "odd"),
    [
        ([1.0, math.nan, 3.0, math.inf, -math.inf, math.inf], 2, (1, 2, 1)),
        ([2.0, 2.0], 2, (0, 0, 0)),
        ([math.nan], 0, (1, 0, 0)),
    ],
)
def test_a_histogram_on_a_device_counts_what_is_not_finite_beside_the_bins(values, count, odd):
    from fanfold.callbacks._common import CountedHistogram

    shown = CountedHistogram(torch.tensor(values))
    assert (shown.count, sum(shown.counts), (shown.nan, shown.pos_inf, shown.neg_inf)) == (count, count, odd)
    assert all(np.diff(shown.edges) > 0)
    assert shown.encode().meta["counts"]


def test_a_large_tensor_is_sampled_evenly():
    from fanfold.callbacks import _common

    shown = _common.CountedHistogram(torch.linspace(0, 1, 3 * _common.SAMPLE + 5))
    assert _common.SAMPLE / 2 < shown.count <= _common.SAMPLE
    assert max(shown.counts) - min(shown.counts) <= 2


def test_a_model_without_parameters_is_said_once(run, caplog):
    norms = NormsCallback(every=1)
    for _ in range(3):
        norms.on_optimizer_step(ARGS, TrainerState(), TrainerControl(), model=SimpleNamespace())
    assert len(caplog.messages) == 1
    assert "named_parameters" in caplog.messages[0]


def test_without_a_run_it_is_said_once_and_training_goes_on(caplog, monkeypatch):
    monkeypatch.setattr("fanfold.recording.api._current", None)
    state, _, _ = train(model(), NormsCallback(every=1), ThroughputCallback(every=1), NonFiniteCallback())
    assert state.global_step == 4
    assert sorted(message.split()[1] for message in caplog.messages) == ["NormsCallback", "ThroughputCallback"]


@pytest.mark.parametrize("kind", [NormsCallback, ThroughputCallback, NonFiniteCallback, StragglerCallback])
def test_an_interval_must_be_a_number_of_steps(kind):
    for wrong in (0, -1, 0.5):
        with pytest.raises(fanfold.SettingError, match=rf"{kind.__name__}\(every={wrong}\)"):
            kind(every=wrong)


# Non-finite numbers


def poison(step, at, trained):
    if step == at:
        trained[1].weight.grad[0, 1] = math.nan
        trained[1].bias.grad.fill_(math.inf)


@pytest.mark.parametrize("action", ["warn", "stop", "raise"])
def test_the_first_nan_is_named_by_step_parameter_and_rank(run, caplog, action, monkeypatch):
    monkeypatch.setenv("FANFOLD_RANK", "3")
    trained, finder = model(), NonFiniteCallback(action=action)
    if action == "raise":
        with pytest.raises(FloatingPointError, match=r"gradient of 1.weight, 1.bias at step 2 on rank 3"):
            train(trained, finder, during=lambda step: poison(step, 2, trained))
        stopped = 2
    else:
        state, _, _ = train(trained, finder, steps=5, during=lambda step: poison(step, 2, trained))
        stopped = state.global_step
    assert stopped == (5 if action == "warn" else 2)
    assert finder.found[0] == (2, 3, "gradient", ("1.weight", "1.bias"))
    assert finder.count == (4 if action == "warn" else 1)  # the weights were poisoned with it
    assert len([message for message in caplog.messages if "not finite" in message]) == 1
    alert = fanfold.open(run.path).alerts[0]
    assert "1.weight, 1.bias at step 2 on rank 3" in alert["text"]


def test_finite_gradients_of_any_size_are_no_finding(run):
    finder = NonFiniteCallback()
    train(model(), finder, steps=1, loss=lambda m: 1e25 * m(torch.ones(3, 2)).sum())  # its square overflows
    assert finder.found == []


def test_a_nan_in_the_logs_is_named_by_its_key(run):
    finder = NonFiniteCallback()
    finder.on_log(ARGS, TrainerState(global_step=9), TrainerControl(), logs={"loss": math.nan, "lr": 0.1, "note": "nan"})
    assert finder.found == [(9, 0, "value", ("loss",))]
    with pytest.raises(fanfold.SettingError, match="Known: warn, stop, raise"):
        NonFiniteCallback(action="explode")


# Throughput


def test_throughput_counts_training_time_only(run):
    clock, trained = Clock(), model()
    meter = ThroughputCallback(every=4, tokens_per_step=1000, peak_flops=1e6, clock=clock)

    class Evaluates(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                clock.now += 50
                meter.on_evaluate(args, state, control)

    def pass_time(step):
        clock.now += 0.5

    train(trained, meter, Evaluates(), steps=8, during=pass_time)
    stored = fanfold.open(run.path)
    seconds = 0.5
    size = sum(p.numel() for p in trained.parameters())
    figures = {key.removeprefix("throughput/"): stored.series(key).values.tolist() for key in [*stored.keys()]}
    assert figures["steps_per_second"] == pytest.approx([1 / seconds] * 2)
    assert figures["samples_per_second"] == pytest.approx([8 / seconds] * 2)
    assert figures["tokens_per_second"] == pytest.approx([1000 / seconds] * 2)
    assert figures["tflops"] == pytest.approx([6 * size * 1000 / seconds / 1e12] * 2)
    assert figures["mfu"] == pytest.approx([6 * size * 1000 / seconds / 1e6] * 2)
    assert stored.series("throughput/mfu").steps.tolist() == [4, 8]


def test_throughput_takes_tokens_from_the_state_and_leaves_out_what_nobody_knows(run):
    clock, state = Clock(), TrainerState()
    meter = ThroughputCallback(every=1, clock=clock)
    meter.on_train_begin(SimpleNamespace(), state, TrainerControl(), model=None)
    for state.global_step, state.num_input_tokens_seen in ((1, 300), (2, 900)):
        meter.on_step_begin(SimpleNamespace(), state, TrainerControl())
        clock.now += 2.0
        meter.on_step_end(SimpleNamespace(), state, TrainerControl())
    stored = fanfold.open(run.path)
    assert stored.keys() == ["throughput/steps_per_second", "throughput/tokens_per_second"]
    assert stored.series("throughput/tokens_per_second").values.tolist() == [150.0, 300.0]


# Stragglers

RANK = """
import sys, fanfold
from fanfold.callbacks import StragglerCallback, TrainerControl, TrainerState
from types import SimpleNamespace
run = fanfold.init("stragglers", system=False)
class Clock:
    now = 0.0
    def __call__(self): return self.now
clock, state, control = Clock(), TrainerState(), TrainerControl()
callback = StragglerCallback(every=2, patience=2, clock=clock)
callback.on_train_begin(None, state, control)
for step in range(1, 9):
    clock.now += float(sys.argv[2])
    callback.on_step_begin(None, state, control)
    clock.now += float(sys.argv[1])
    state.global_step = step
    callback.on_step_end(None, state, control)
    if step == 4:
        clock.now += 1000
        callback.on_evaluate(None, state, control)
if run.rank == 0:
    sys.stdin.readline()  # the others are done
callback.on_train_end(None, state, control)
if run.rank == 0:
    print([tuple(found) for found in callback.found])
run.finish()
"""


def test_the_rank_the_others_wait_for_is_named(runs_dir):
    times = {0: ("1.0", "0.1"), 1: ("1.1", "0.1"), 2: ("1.0", "0.5"), 3: ("2.0", "0.1")}
    ranks = {
        rank: warm_python.Popen(
            [sys.executable, "-c", RANK, *given], libraries="torch",
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank), "FANFOLD_RUN_ID": "slow"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, given in times.items()
    }  # fmt: skip
    for rank in (1, 2, 3):
        _, err = ranks[rank].communicate(timeout=60)
        assert ranks[rank].returncode == 0, err
    out, err = ranks[0].communicate("\n", timeout=60)
    assert ranks[0].returncode == 0, err
    found = {(rank, key): ratio for rank, key, _, ratio in eval(out)}
    assert set(found) == {(3, "time/compute"), (2, "time/data")}
    assert found[3, "time/compute"] == pytest.approx(2.0)
    assert "rank 3 takes 2.00 times as long as the others in its steps" in err
    stored = fanfold.open("slow")
    assert stored.series("time/step", fold="mean").max_rank.tolist()[:4] == [3] * 4
    assert stored.series("time/data", rank=2).values[1] == pytest.approx(0.5)


def test_one_process_waits_for_nobody(run):
    lag = StragglerCallback(every=1)
    train(model(), lag, steps=4)
    assert (lag.found, lag._thread) == ([], None)


# Preemption


class Saves(TrainerCallback):
    """Remember at which steps the loop was told to save."""

    def __init__(self):
        self.steps = []

    def on_step_end(self, args, state, control, **kwargs):
        if control.should_save:
            self.steps.append(state.global_step)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_saves_stops_and_gives_the_handlers_back(run, name, caplog):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    preemption, saves = PreemptionCallback(), Saves()
    state, _, _ = train(
        model(), preemption, saves, steps=9, during=lambda step: step == 3 and signal.raise_signal(getattr(signal, name))
    )
    assert (state.global_step, saves.steps, preemption.received) == (3, [3], name)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before
    assert f"{name} received: a checkpoint is saved and training stops after step 3" in caplog.text
    assert run.status == "running"


def test_after_a_preempted_training_the_program_goes_on_to_its_end(run):
    from fanfold.recording import lifecycle

    train(model(), PreemptionCallback(), steps=9, during=lambda step: step == 3 and signal.raise_signal(signal.SIGTERM))
    time.sleep(lifecycle.STUCK_SECONDS + 1)  # else the signal would end the process now
    run.log({"after": 1.0})


def test_without_a_signal_nothing_changes(run):
    before, preemption, saves = signal.getsignal(signal.SIGTERM), PreemptionCallback(), Saves()
    state, _, _ = train(model(), preemption, saves)
    assert (state.global_step, saves.steps, preemption.received) == (4, [], None)
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_exception_gives_the_handlers_back():
    before = signal.getsignal(signal.SIGTERM)

    class Breaks(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        train(model(), PreemptionCallback(), Breaks())
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_signal_acts_as_it_did_before():
    heard = []
    signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    try:
        train(model(), PreemptionCallback(), steps=3, during=lambda step: [signal.raise_signal(signal.SIGUSR1) for _ in range(2)])
        assert heard == [1]
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_off_the_main_thread_it_is_said(caplog):
    thread = threading.Thread(target=train, args=(model(), PreemptionCallback()))
    thread.start()
    thread.join()
    assert "main thread only" in caplog.text
    with pytest.raises(fanfold.SettingError, match="SIGWRONG is not known"):
        PreemptionCallback(["SIGWRONG"])


PREEMPTED = """
import os, signal, sys, time, torch, torch.distributed as dist
from fanfold.callbacks import PreemptionCallback, TrainerControl, TrainerState
dist.init_process_group("gloo")
state, control, callback = TrainerState(), TrainerControl(), PreemptionCallback()
callback.on_train_begin(None, state, control)
began = time.monotonic()
while not control.should_training_stop and time.monotonic() - began < 60:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.02)
    state.global_step += 1
    if state.global_step == 20 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    callback.on_step_end(None, state, control)
callback.on_train_end(None, state, control)
open(f"{sys.argv[1]}/{dist.get_rank()}", "w").write(f"{state.global_step} {control.should_save} {callback.received}")
dist.destroy_process_group()
"""


def test_ranks_agree_on_the_step_when_one_is_signalled(tmp_path):
    script = Path(tmp_path / "preempted.py")
    script.write_text(PREEMPTED)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), str(tmp_path)]
    warm_python.run(
        launch, libraries="torch", check=True, timeout=100, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    ends = [(tmp_path / str(rank)).read_text().split(maxsplit=2) for rank in (0, 1)]
    assert ends[0][0] == ends[1][0]
    assert int(ends[0][0]) > 20
    assert [end[1:] for end in ends] == [["True", "another rank's signal"], ["True", "SIGTERM"]]


def test_measuring_asks_for_no_value():
    """With tensors that have none, whatever would wait for a device (item(), bool(), nonzero()) raises."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    from fanfold.callbacks import _common

    with FakeTensorMode():
        fake = torch.nn.Linear(4, 3)
        for parameter in fake.parameters():
            parameter.grad = torch.empty_like(parameter)
        names, tensors = _common.tensors_of(fake, gradients=True)
        assert names == ["weight", "bias"]
        for order in (2.0, math.inf):
            norm = _common.together(_common.norms_of(tensors, order)).norm()
        assert tuple(_common._count(tensors[0]).shape) == (7 + _common.BINS,)
        with pytest.raises(DataDependentOutputException):
            float(norm)
