"""Handler, control, state, flow, progress and early stopping: what a loop may rely on."""

import copy
import dataclasses
import inspect
import io
import json
import logging
import math
import pickle
import signal
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fanfold
from fanfold.callbacks import (
    CallbackError,
    CallbackHandler,
    DefaultFlowCallback,
    EarlyStoppingCallback,
    Event,
    ExportableState,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)

EVENTS = [event.value for event in Event]


class Recorder(TrainerCallback):
    """Note every event, by the name it is given."""

    def __init__(self, notes=None, name="r"):
        self.notes = [] if notes is None else notes
        self.name = name


for _event in EVENTS:
    setattr(Recorder, _event, lambda self, *args, _event=_event, **kwargs: self.notes.append((self.name, _event)))


def handler_of(*callbacks, **options):
    return CallbackHandler([DefaultFlowCallback, *callbacks], "model", "tokenizer", "optimizer", "scheduler", **options)


def arguments(**given):
    return SimpleNamespace(**{
        "logging_strategy": "steps", "logging_first_step": False, "logging_steps": 5, "eval_strategy": "steps", "eval_steps": 5,
        "eval_delay": 0, "save_strategy": "steps", "save_steps": 5, "metric_for_best_model": "loss", "greater_is_better": False,
        "load_best_model_at_end": True, **given,
    })  # fmt: skip


# Events


def test_methods_are_the_events():
    methods = [name for name, thing in vars(TrainerCallback).items() if inspect.isfunction(thing)]
    assert methods == EVENTS
    assert len(EVENTS) == 17
    assert all(event in Event.__doc__ for event in EVENTS)
    assert all(name in vars(CallbackHandler) for name in EVENTS)


# Handler


def test_every_callback_hears_every_event_in_order_with_what_the_loop_has():
    seen = []

    class Full(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            seen.append((args, state, control, kwargs))

    handler = handler_of(Full)
    handler.train_dataloader, handler.eval_dataloader = "train", "eval"
    control = TrainerControl()
    assert handler.on_save("args", "state", control) is control
    assert seen == [("args", "state", control, {
        "model": "model", "processing_class": "tokenizer", "optimizer": "optimizer", "lr_scheduler": "scheduler",
        "train_dataloader": "train", "eval_dataloader": "eval",
    })]  # fmt: skip
    notes = []
    handler = handler_of(Recorder(notes, "a"), PrinterCallback, Recorder(notes, "b"))
    for event in ("on_init_end", "on_train_begin", "on_step_begin", "on_train_end"):
        getattr(handler, event)(None, TrainerState(), TrainerControl())
    assert notes == [
        (name, event) for event in ("on_init_end", "on_train_begin", "on_step_begin", "on_train_end") for name in "ab"
    ]


def test_extras_come_by_keyword():
    seen = {}

    class Extras(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen["logs"] = logs

        def on_evaluate(self, args, state, control, metrics, **kwargs):
            seen["metrics"] = metrics

    handler, logs = handler_of(Extras()), {"loss": 1.0}
    handler.on_log(None, None, TrainerControl(), logs)
    handler.on_evaluate(None, None, TrainerControl(), {"eval_loss": 2.0})
    assert seen["logs"] is logs
    assert seen["metrics"] == {"eval_loss": 2.0}


def test_a_returned_control_replaces_the_one_before():
    first, second, seen = TrainerControl(), TrainerControl(should_log=True), []

    class Returns(TrainerCallback):
        def on_step_end(self, *args, **kwargs):
            return second

    class Sees(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(control)

    handler = CallbackHandler([Returns, Sees, DefaultFlowCallback], *[None] * 4)
    returned = handler.on_step_end(arguments(), TrainerState(max_steps=9), first)
    assert seen == [second]
    assert returned is second


def test_the_handler_sets_switches_back_before_it_tells():
    on = TrainerControl(True, True, True, True, True)
    handler = handler_of()
    for event, off in {
        "on_train_begin": {"should_training_stop"},
        "on_epoch_begin": {"should_epoch_stop"},
        "on_step_begin": {"should_save", "should_evaluate", "should_log"},
        "on_save": {"should_save"},
        "on_prediction_step": set(),
    }.items():
        control = getattr(handler, event)(None, TrainerState(), copy.copy(on))
        assert {name for name, value in vars(control).items() if not value} == off
    assert not handler.on_log(None, None, copy.copy(on), {}).should_log
    assert not handler.on_evaluate(None, None, copy.copy(on), {}).should_evaluate


def test_callbacks_are_added_popped_and_removed_as_class_or_instance(caplog):
    mine = Recorder()
    handler = handler_of(mine)
    assert handler.callback_list == "DefaultFlowCallback\nRecorder"
    assert handler.pop_callback(Recorder) is mine
    assert handler.pop_callback(Recorder) is None
    handler.add_callback(Recorder)
    handler.remove_callback(TrainerCallback)  # a base class matches the first of its subclasses
    assert handler.callback_list == "Recorder"
    handler.remove_callback(PrinterCallback)
    with pytest.raises(ValueError, match="Recorder is not among the callbacks"):
        handler.remove_callback(mine)
    assert caplog.records == []
    handler.add_callback(Recorder)
    assert str(Recorder) in caplog.messages[0]
    handler.add_callback(Recorder)
    assert len(caplog.messages) == 2  # each time: the second addition is another mistake
    CallbackHandler([], *[None] * 4)
    assert "DefaultFlowCallback" in caplog.messages[2]


@pytest.mark.parametrize("wrong", ["wandb", print, dict, 3, None, SimpleNamespace()], ids=repr)
def test_what_is_no_callback_is_refused_by_name(wrong):
    name = wrong.__name__ if isinstance(wrong, type) else type(wrong).__name__
    with pytest.raises(TypeError, match=f"{name} is not a callback"):
        handler_of(wrong)


def test_a_callback_need_not_inherit_anything():
    class Duck:
        calls = 0

        def on_step_end(self, args, state, control, **kwargs):
            self.calls += 1

    duck = Duck()
    handler = handler_of(duck)
    handler.on_train_begin(None, TrainerState(), TrainerControl())
    handler.on_step_end(arguments(), TrainerState(max_steps=3), TrainerControl())
    assert duck.calls == 1


def test_the_list_may_change_at_any_time():
    notes = []

    class Changes(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            handler.remove_callback(self)
            handler.remove_callback(gone)
            handler.add_callback(Recorder(notes, "added"))

    gone = Recorder(notes, "gone")
    handler = handler_of(Changes, Recorder(notes, "next"), gone)
    logging.getLogger("fanfold.callbacks").disabled = True
    handler.on_train_begin(None, TrainerState(), TrainerControl())
    logging.getLogger("fanfold.callbacks").disabled = False
    assert notes == [("next", "on_train_begin"), ("added", "on_train_begin")]
    handler.callbacks[:] = [gone]  # users do that
    handler.on_step_begin(None, TrainerState(), TrainerControl())
    assert notes[2:] == [("gone", "on_step_begin")]
    gone.on_save = lambda *args, **kwargs: notes.append("by hand")
    handler.on_save(None, TrainerState(), TrainerControl())
    assert notes[3:] == ["by hand"]


def test_a_method_put_on_a_callback_by_hand_is_called_from_the_next_epoch_on():
    calls, plain = [], PrinterCallback()
    handler = handler_of(plain)
    handler.on_step_begin(None, TrainerState(), TrainerControl())
    plain.on_step_begin = lambda *args, **kwargs: calls.append(1)
    handler.on_epoch_begin(None, TrainerState(), TrainerControl())
    handler.on_step_begin(None, TrainerState(), TrainerControl())
    assert calls == [1]


# Callbacks that raise


class Raises(TrainerCallback):
    def __init__(self, error=None, event="on_log"):
        self.error = error or ConnectionError(111, "refused")
        setattr(self, event, self._raise)

    def _raise(self, *args, **kwargs):
        raise self.error


def test_the_error_names_callback_and_event_and_is_caught_as_what_it_was():
    handler = handler_of(Raises)
    with pytest.raises(ConnectionError) as caught:
        handler.on_log(None, TrainerState(global_step=12), TrainerControl(), {})
    error = caught.value
    assert isinstance(error, CallbackError)
    assert isinstance(error, fanfold.FanfoldError)
    assert (error.callback, error.event, error.step, error.errno) == ("Raises", "on_log", 12, 111)
    assert "Raises raised in on_log, at step 12: ConnectionError: [Errno 111] refused" in str(error)
    assert error.__cause__ is handler.callbacks[1].error
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), isinstance(again, ConnectionError)) == (str(error), True)


class Awkward(Exception):
    def __init__(self, needed, *, also):
        super().__init__(f"{needed} {also}")
        self.also = also


@pytest.mark.parametrize(
    "error", [Awkward(1, also=2), KeyError("k"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), StopIteration(3)]
)
def test_any_exception_can_be_named(error):
    with pytest.raises(type(error)) as caught:
        handler_of(Raises(error)).on_log(None, TrainerState(), TrainerControl(), {})
    assert isinstance(caught.value, CallbackError)
    assert caught.value.__cause__ is error
    assert vars(error).items() <= vars(caught.value).items()


def test_leaving_is_no_error_of_the_callback():
    for leave in (KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(leave)) as caught:
            handler_of(Raises(leave)).on_log(None, TrainerState(), TrainerControl(), {})
        assert caught.value is leave


def test_the_others_hear_of_the_exception_and_of_the_end_once():
    notes, bad = [], Raises()
    handler = handler_of(Recorder(notes, "before"), bad, Raises(ValueError("late"), "on_exception"), Recorder(notes, "after"))
    handler.on_train_begin(None, TrainerState(), TrainerControl())
    notes.clear()
    with pytest.raises(CallbackError) as caught:
        handler.on_log(None, TrainerState(), TrainerControl(), {})
    told = [("before", "on_exception"), ("after", "on_exception"), ("before", "on_train_end"), ("after", "on_train_end")]
    assert notes == [("before", "on_log"), *told]
    handler.on_exception(None, TrainerState(), TrainerControl(), caught.value)  # the loop tells it, too
    assert len(notes) == 5


def test_a_callback_that_raises_at_the_end_keeps_nobody_from_ending():
    notes = []
    handler = handler_of(Recorder(notes, "before"), Raises(event="on_train_end"), Recorder(notes, "after"))
    handler.on_train_begin(None, TrainerState(), TrainerControl())
    notes.clear()
    with pytest.raises(CallbackError):
        handler.on_train_end(None, TrainerState(), TrainerControl())
    assert sorted(notes) == sorted([
        ("before", "on_train_end"), ("before", "on_exception"), ("after", "on_exception"), ("after", "on_train_end"),
    ])  # fmt: skip


def test_an_exception_in_the_loop_reaches_our_callbacks_and_transformers():
    from transformers import TrainerCallback as Theirs

    notes = []

    class Foreign(Theirs):
        def on_train_end(self, *args, **kwargs):
            notes.append("theirs ends")

    class Mine(TrainerCallback):
        def on_exception(self, args, state, control, exception, **kwargs):
            notes.append(exception)

    handler, error = handler_of(Foreign, Mine), RuntimeError("out of memory")
    handler.on_train_begin(None, TrainerState(), TrainerControl())
    control = TrainerControl()
    assert handler.on_exception(None, TrainerState(), control, error) is control
    assert notes == [error, "theirs ends"]
    notes.clear()
    handler.on_exception(None, TrainerState(), control, RuntimeError("while evaluating, training is over"))
    assert len(notes) == 1


def test_disable_goes_on_without_the_callback(caplog):
    notes = []
    handler = handler_of(Raises, Recorder(notes), on_error="disable")
    for _ in range(3):
        handler.on_log(None, TrainerState(global_step=2), TrainerControl(), {})
    assert notes == [("r", "on_log")] * 3
    assert [type(callback) for callback in handler.disabled] == [Raises]
    assert len(caplog.messages) == 1
    assert "Raises raised in on_log, at step 2, and is not called any more" in caplog.messages[0]
    with pytest.raises(fanfold.SettingError, match="Known: raise, disable"):
        handler_of(on_error="ignore")


def test_the_flow_is_never_disabled():
    handler = handler_of(on_error="disable")
    with pytest.raises(CallbackError, match="DefaultFlowCallback raised in on_step_end"):
        handler.on_step_end(SimpleNamespace(), TrainerState(), TrainerControl())


def test_an_error_keeps_no_training_alive():
    """A long-lived handler must not hold the frames, and with them the tensors, of an exception that is over."""
    import gc
    import weakref

    class Big:
        pass

    handler, big = handler_of(Raises), Big()
    seen = weakref.ref(big)

    def train(held):
        handler.on_log(None, TrainerState(), TrainerControl(), {})

    with pytest.raises(CallbackError) as caught:
        train(big)
    handler.pop_callback(Raises).error = None
    del caught, big
    gc.collect()
    assert seen() is None


# Control and state


def test_control_starts_with_every_switch_off_and_can_be_kept():
    control = TrainerControl()
    assert not any(vars(control).values())
    assert len(vars(control)) == 5
    for name in ("_new_training", "_new_epoch", "_new_step"):
        getattr(control, name)()
    control = TrainerControl(should_save=True, should_training_stop=True)
    assert TrainerControl.from_state(control.state()) == control
    control._new_step()
    assert (control.should_save, control.should_training_stop) == (False, True)
    with pytest.raises(NotImplementedError, match="Bare has no state"):
        type("Bare", (ExportableState,), {})().state()


values = st.one_of(st.floats(), st.integers(-(10**15), 10**15), st.text(), st.none())


@given(history=st.lists(st.dictionaries(st.text(), values)), step=st.integers(0), metric=st.none() | st.floats())
def test_state_comes_back_from_json_as_it_was(tmp_path_factory, history, step, metric):
    path = tmp_path_factory.mktemp("state") / "trainer_state.json"
    state = TrainerState(global_step=step, log_history=history, best_metric=metric, stateful_callbacks=[EarlyStoppingCallback(3)])
    state.save_to_json(str(path))
    back = TrainerState.load_from_json(str(path))
    assert repr(back) == repr(
        dataclasses.replace(state, log_history=[dict(sorted(logs.items())) for logs in history])
    )  # NaN != NaN
    assert [file.name for file in path.parent.iterdir()] == ["trainer_state.json"]


def test_odd_metrics_do_not_break_a_checkpoint(tmp_path):
    path = tmp_path / "state.json"
    history = [
        {
            "a": np.float32(0.5),
            "b": torch.tensor(2.0, dtype=torch.bfloat16),
            "c": np.array([1, 2]),
            "d": {"e": np.int64(3)},
            "f": EVENTS.count,
        }
    ]
    TrainerState(log_history=history, trial_params={"lr": np.float64(0.1)}).save_to_json(path)
    back = TrainerState.load_from_json(path)
    assert back.log_history[0] | {"f": ""} == {"a": 0.5, "b": 2.0, "c": [1, 2], "d": {"e": 3}, "f": ""}
    assert path.read_text().endswith("}\n")
    assert list(json.loads(path.read_text())) == sorted(json.loads(path.read_text()))


def test_a_field_of_a_newer_version_is_carried_along(tmp_path):
    path = tmp_path / "state.json"
    path.write_text(json.dumps({"global_step": 7, "invented_later": [1]}))
    state = TrainerState.load_from_json(path)
    assert state.global_step == 7
    state.save_to_json(path)
    assert json.loads(path.read_text())["invented_later"] == [1]


def test_a_share_of_the_steps_becomes_steps():
    state = TrainerState()
    state.compute_steps(SimpleNamespace(logging_steps=0.1, eval_steps=None, save_steps=30), 95)
    assert (state.logging_steps, state.eval_steps, state.save_steps) == (10, 500, 30)


def test_training_references_are_taken_over():
    trainer = SimpleNamespace(
        hp_name=lambda trial: f"trial-{trial}", _trial=4, is_local_process_zero=lambda: True, is_world_process_zero=lambda: False
    )
    state = TrainerState()
    state.init_training_references(trainer, 10, 2, {"lr": 0.1})
    assert (state.trial_name, state.trial_params, state.max_steps, state.num_train_epochs) == ("trial-4", {"lr": 0.1}, 10, 2)
    assert (state.is_local_process_zero, state.is_world_process_zero) == (True, False)
    state.init_training_references(trainer, 10, 2, SimpleNamespace(params={"lr": 0.2}))
    assert state.trial_params == {"lr": 0.2}


def test_states_do_not_grow_with_every_save():
    stoppers = [EarlyStoppingCallback(1), EarlyStoppingCallback(2)]
    state = TrainerState(stateful_callbacks=[*stoppers, TrainerControl()])
    for counter in range(3):
        for stopper in stoppers:  # what Transformers' Trainer does at each save
            stopper.early_stopping_patience_counter = counter
            state.stateful_callbacks["EarlyStoppingCallback"].append(stopper.state())
    kept = state.stateful_callbacks["EarlyStoppingCallback"]
    assert [one["args"]["early_stopping_patience"] for one in kept] == [1, 2]
    assert [one["attributes"]["early_stopping_patience_counter"] for one in kept] == [2, 2]
    assert copy.deepcopy(state).stateful_callbacks == state.stateful_callbacks
    assert pickle.loads(pickle.dumps(state)).stateful_callbacks == state.stateful_callbacks
    assert not isinstance(state.stateful_callbacks["AddedOnResume"], list)
    with pytest.raises(TypeError, match=r"Recorder.*ExportableState"):
        TrainerState(stateful_callbacks=[Recorder()])


def test_states_go_back_into_the_objects_that_are_there(caplog):
    from transformers import EarlyStoppingCallback as Theirs

    first = handler_of(EarlyStoppingCallback(5, 0.2), Theirs(4))
    first.callbacks[1].early_stopping_patience_counter = 3
    states = json.loads(json.dumps(first.export_states()))
    assert [one["args"]["early_stopping_patience"] for one in states["EarlyStoppingCallback"]] == [5, 4]
    ours, theirs = EarlyStoppingCallback(), Theirs()
    second = handler_of(ours, PrinterCallback, theirs)
    second.restore_states({**states, "TrainerControl": TrainerControl().state()})
    assert [type(c).__name__ for c in second.callbacks] == [
        "DefaultFlowCallback",
        "EarlyStoppingCallback",
        "PrinterCallback",
        "EarlyStoppingCallback",
    ]
    assert second.callbacks[1] is ours
    assert (ours.early_stopping_patience, ours.early_stopping_threshold, ours.early_stopping_patience_counter) == (5, 0.2, 3)
    assert theirs.early_stopping_patience == 4
    assert caplog.records == []
    handler_of().restore_states(states)
    assert "EarlyStoppingCallback" in caplog.messages[-1]


# Flow


def flow(steps, **given):
    """Return the steps at which the flow asks to log, evaluate, save and stop."""
    args, state, control = arguments(**given), TrainerState(max_steps=steps), TrainerControl()
    state.compute_steps(args, steps)
    asked = {"log": [], "evaluate": [], "save": [], "training_stop": []}
    for state.global_step in range(1, steps + 1):
        control._new_step()
        DefaultFlowCallback().on_step_end(args, state, control)
        for name, at in asked.items():
            if getattr(control, f"should_{name}"):
                at.append(state.global_step)
    return list(asked.values())


def test_flow_by_steps():
    assert flow(12) == [[5, 10], [5, 10, 12], [5, 10, 12], [12]]
    assert flow(12, logging_first_step=True, eval_delay=6, logging_last_step=True) == [
        [1, 5, 10, 12],
        [10, 12],
        [5, 10, 12],
        [12],
    ]
    assert flow(12, logging_steps=0.25, eval_strategy="no", save_steps=4) == [[3, 6, 9, 12], [], [4, 8, 12], [12]]
    assert flow(3, logging_strategy="no", eval_strategy="epoch", save_strategy="epoch") == [[], [], [], [3]]


def test_flow_by_epoch():
    control = TrainerControl()
    args = arguments(logging_strategy="epoch", eval_strategy="epoch", save_strategy="epoch", eval_delay=2)
    DefaultFlowCallback().on_epoch_end(args, TrainerState(epoch=1.0), control)
    assert (control.should_log, control.should_evaluate, control.should_save) == (True, False, True)
    DefaultFlowCallback().on_epoch_end(args, TrainerState(epoch=2.0), control)
    assert control.should_evaluate


def test_the_steps_before_an_early_stop_are_logged_too():
    control = TrainerControl(should_training_stop=True)
    DefaultFlowCallback().on_epoch_end(arguments(logging_last_step=True), TrainerState(global_step=7), control)
    assert control.should_log


# Early stopping


def evaluations(metrics, *, best=None, patience=2, threshold=0.0, greater=False):
    """Return after which evaluation training is stopped, best updated after each as a Trainer does; None if never."""
    stopper, control = EarlyStoppingCallback(patience, threshold), TrainerControl()
    args, state = arguments(greater_is_better=greater), TrainerState(best_metric=best)
    for at, metric in enumerate(metrics, 1):
        stopper.on_evaluate(args, state, control, metrics={"eval_loss": metric})
        if control.should_training_stop:
            return at
        if state.best_metric is None or (metric > state.best_metric if greater else metric < state.best_metric):
            state.best_metric = metric
    return None


@pytest.mark.parametrize(
    ("metrics", "options", "stopped"),
    [
        ([3.0, 2.0, 1.0], {}, None),
        ([1.0, 1.0, 1.0], {}, 3),
        ([1.0, 2.0, 0.5, 2.0, 2.0], {}, 5),
        ([1.0, 0.95, 0.9], {"threshold": 0.1}, 3),
        ([1.0, 0.5], {"threshold": None, "patience": 1}, None),
        ([1.0, 2.0, 3.0], {"greater": True}, None),
        ([1.0, math.nan, math.nan], {}, 3),
    ],
)
def test_early_stopping(metrics, options, stopped):
    assert evaluations(metrics, **options) == stopped


def test_early_stopping_says_what_to_set(caplog):
    for without, argument in [
        ({"metric_for_best_model": None}, "metric_for_best_model"),
        ({"eval_strategy": "no"}, "eval_strategy"),
    ]:
        for caught_as in (fanfold.SettingError, AssertionError):
            with pytest.raises(caught_as, match=f"Set {argument}"):
                handler_of(EarlyStoppingCallback).on_train_begin(arguments(**without), TrainerState(), TrainerControl())
    assert caplog.records == []
    EarlyStoppingCallback().on_train_begin(arguments(load_best_model_at_end=False), TrainerState(), TrainerControl())
    assert "load_best_model_at_end=True" in caplog.messages[0]
    control = TrainerControl()
    EarlyStoppingCallback(1).on_evaluate(arguments(), TrainerState(best_metric=0.0), control, metrics={"eval_accuracy": 1.0})
    assert "looks for eval_loss" in caplog.messages[1]
    assert "eval_accuracy" in caplog.messages[1]
    assert not control.should_training_stop


# Progress


def test_printing_leaves_the_logs_as_they_are(capsys):
    logs = {"loss": 0.123456, "total_flos": 1e9, "note": "x"}
    for zero in (True, False):
        PrinterCallback().on_log(None, TrainerState(is_local_process_zero=zero), None, logs=logs)
    assert capsys.readouterr().out == "{'loss': '0.1235', 'note': 'x'}\n"
    assert logs == {"loss": 0.123456, "total_flos": 1e9, "note": "x"}


def test_the_bar_follows_steps_logs_and_evaluation():
    screen, out, state = io.StringIO(), io.StringIO(), TrainerState(max_steps=4)
    logs = {"loss": 0.123456, "text": "y" * 200, "total_flos": 1}
    bar = ProgressCallback(max_str_len=50)
    with redirect_stderr(screen), redirect_stdout(out):
        bar.on_train_begin(None, state, None)
        for state.global_step in (1, 2, 4):
            bar.on_step_end(None, state, None)
        bar.on_prediction_step(None, state, None, eval_dataloader=[1, 2])
        bar.on_prediction_step(None, state, None, eval_dataloader=iter([1]))  # a stream has no length: no bar of its own
        assert (bar.training_bar.n, bar.prediction_bar.n, bar.prediction_bar.total) == (4, 1, 2)
        bar.on_evaluate(None, state, None, metrics={})
        bar.on_log(None, state, None, logs=logs)
        bar.on_train_end(None, state, None)
        bar.on_train_end(None, state, None)  # again, after an exception
    assert (bar.training_bar, bar.prediction_bar) == (None, None)
    assert "4/4" in screen.getvalue()
    assert "0.1235" in out.getvalue()
    assert "200 characters" in out.getvalue()
    assert len(logs["text"]) == 200


def test_only_the_first_process_shows_a_bar():
    bar, state = ProgressCallback(), TrainerState(max_steps=4, is_world_process_zero=False)
    for event in ("on_train_begin", "on_step_end", "on_prediction_step", "on_evaluate", "on_log", "on_train_end"):
        getattr(bar, event)(None, state, None)
    assert bar.training_bar is None


def test_importing_the_callbacks_imports_nothing_heavy_and_takes_no_signal(tmp_path):
    import subprocess
    import sys

    code = "import sys, signal, fanfold; fanfold.callbacks.TrainerCallback; fanfold.callbacks.PreemptionCallback\n"
    code += "print([m for m in ('numpy', 'torch', 'tqdm', 'transformers') if m in sys.modules], signal.getsignal(15))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"[] {signal.SIG_DFL}"
