"""Accelerate's words with our tracking behind them: the real library, real trackers, real launchers."""

from __future__ import annotations

import inspect
import json
import os
import sqlite3
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path

import accelerate
import accelerate.tracking as theirs
import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import LoggerType as TheirLoggerType
from accelerate.utils import ProjectConfiguration

import fanfold
import fanfold.trackers as ours
import warm_python
from fanfold.frameworks.accelerate import Accelerator, FanfoldTracker, register
from fanfold.trackers import LoggerType

BOTH = pytest.mark.parametrize("module", [theirs, ours], ids=["accelerate.tracking", "fanfold.trackers"])


@pytest.fixture(autouse=True)
def fresh(runs_dir, monkeypatch):
    """Start with no state of Accelerate's, no custom tracker, and no system probe."""
    monkeypatch.setenv("FANFOLD_SYSTEM", "0")
    AcceleratorState._reset_state(reset_partial_state=True)
    known = [(module.LOGGER_TYPE_TO_CLASS, set(module.LOGGER_TYPE_TO_CLASS)) for module in (theirs, ours)]
    yield
    if fanfold.run is not None:
        fanfold.run.finish(1.0)
    AcceleratorState._reset_state(reset_partial_state=True)
    for table, names in known:
        for name in set(table) - names:
            del table[name]


def tracker_class(base=ours.GeneralTracker, name="lines"):
    """Make a tracker that keeps everything it is told, in order, as JSON lines."""

    class Lines(base):
        requires_logging_directory = False

        def __init__(self, path):
            super().__init__()
            self.path = Path(path)

        def start(self):
            self.file = self.path.open("a")
            self.say("start")

        @property
        def tracker(self):
            return self.file

        def say(self, *words):
            self.file.write(json.dumps(words, default=float) + "\n")
            self.file.flush()

        def store_init_configuration(self, values):
            self.say("config", values)

        def log(self, values, step=None, **kwargs):
            self.say("log", step, values, kwargs)

        def finish(self):
            self.say("finish")
            self.file.close()

        def extra(self):
            return "live"

    Lines.name = name
    return Lines


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def logged(path):
    return [(step, values) for word, *rest in lines(path) if word == "log" for step, values, _ in [rest]]


def scalars(folder):
    """Read what TensorBoard has in a folder and in those below: each run may have one of its own."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for place in sorted({path.parent for path in Path(folder).rglob("events.out.*")}):
        reader = EventAccumulator(str(place), size_guidance={"scalars": 0}).Reload()
        for tag in reader.Tags()["scalars"]:
            found.setdefault(tag, []).extend((event.step, event.value) for event in reader.Scalars(tag))
    return found


def child(code, tmp_path, *, launcher=(), check=True, libraries="accelerate", **env):
    """Run a script as a user would, with nothing of this process but its settings."""
    script = tmp_path / f"script{len(list(tmp_path.glob('script*')))}.py"
    script.write_text(textwrap.dedent(code))
    source = str(Path(fanfold.__file__).parents[1])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    done = warm_python.run(
        [sys.executable, *launcher, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=110, libraries=libraries,
        env={**kept, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **env},
    )  # fmt: skip
    assert not check or done.returncode == 0, done.stderr
    return done


# The rules of accelerate.tracking, kept by both


@BOTH
@pytest.mark.parametrize(
    ("body", "missing"),
    [
        ({}, "`name`, `requires_logging_directory`, `tracker`"),
        ({"name": "x"}, "`requires_logging_directory`, `tracker`"),
        ({"name": "x", "requires_logging_directory": False}, "`tracker`"),
        ({"requires_logging_directory": False, "tracker": property(lambda self: None)}, "`name`"),
    ],
)
def test_a_tracker_without_its_attributes_is_told_which(module, body, missing):
    with pytest.raises(NotImplementedError) as caught:
        type("Bare", (module.GeneralTracker,), body)()
    assert str(caught.value) == (
        "The implementation for this tracker class is missing the following required attributes. "
        f"Please define them in the class definition: {missing}"
    )


@BOTH
def test_the_property_tracker_is_not_evaluated_when_a_tracker_is_made(module):
    class Late(module.GeneralTracker):
        name, requires_logging_directory = "late", False

        @property
        def tracker(self):
            raise RuntimeError("not started")

    assert Late().main_process_only is True


@BOTH
def test_a_blank_tracker_does_nothing(module):
    blank = module.GeneralTracker(_blank=True)
    assert [blank.start(), blank.store_init_configuration({"a": 1}), blank.log({"a": 1}, step=1, x=2), blank.finish()] == [
        None
    ] * 4
    with pytest.raises(AttributeError):
        _ = blank.name


@BOTH
def test_decorating_and_making_a_tracker_does_not_set_up_the_process_state(module, tmp_path):
    class Marked(tracker_class(module.GeneralTracker)):
        start = module.on_main_process(tracker_class(module.GeneralTracker).start)

    Marked(tmp_path / "x")
    assert PartialState._shared_state == {}


@BOTH
def test_a_decorated_method_runs_here_and_keeps_its_name(module):
    PartialState(cpu=True)

    class Marked(module.GeneralTracker):
        name, requires_logging_directory, tracker = "marked", False, None

        @module.on_main_process
        def log(self, values, step=None):
            return values

    assert (Marked().log({"a": 1}), Marked.log.__name__) == ({"a": 1}, "log")


@BOTH
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda base: dict, "`tracker_class` must be a subclass of `GeneralTracker`, but got <class 'dict'>."),
        (lambda base: "wandb", "`tracker_class` must be a subclass of `GeneralTracker`, but got wandb."),
        (lambda base: type("A", (base,), {}), "The tracker class to register must define a non-empty `name` attribute."),
        (
            lambda base: type("A", (base,), {"name": ""}),
            "The tracker class to register must define a non-empty `name` attribute.",
        ),
        (
            lambda base: type("A", (base,), {"name": "a"}),
            (
                "The tracker class to register must define a `requires_logging_directory` class attribute. "
                "Set it to `True` if the tracker needs a logging directory, or `False` otherwise."
            ),
        ),
    ],
)
def test_what_is_no_tracker_class_is_not_registered(module, make, text):
    with pytest.raises(ValueError) as caught:
        module.register_tracker_class(make(module.GeneralTracker))
    assert str(caught.value) == text


@BOTH
def test_registering_a_name_again_warns_and_overwrites(module):
    first, second = tracker_class(module.GeneralTracker, "again"), tracker_class(module.GeneralTracker, "again")
    module.register_tracker_class(first)
    with pytest.warns(UserWarning, match="A tracker with the name 'again' is already registered and will be overwritten by"):
        module.register_tracker_class(second)
    assert module.LOGGER_TYPE_TO_CLASS["again"] is second


@BOTH
def test_names_are_filtered(module, tmp_path, monkeypatch):
    monkeypatch.delitem(module.LOGGER_TYPE_TO_CLASS, "lines", raising=False)  # other tests of this process may have one
    module.register_tracker_class(tracker_class(module.GeneralTracker))
    one = tracker_class(module.GeneralTracker)(tmp_path / "x")
    pick = module.filter_trackers
    board = module.LoggerType.TENSORBOARD
    assert pick(None) == []
    assert pick("tensorboard", "d") == pick(board, "d") == pick(["tensorboard", board, "tensorboard"], "d") == [board]
    assert pick(("tensorboard",), "d") == [board]
    assert pick([one, one]) == [one, one]
    assert pick([one, "tensorboard", "lines", "lines"], "d") == [one, board, "lines"]
    assert module.LoggerType("tensorboard") in pick("all", "d")
    assert pick([one, "all"], "d")[0] is one


@BOTH
@pytest.mark.parametrize("bad", ["nope", "TensorBoard", ours.TensorBoardTracker, {"tensorboard"}, 3], ids=str)
def test_what_names_no_tracker_is_refused(module, bad):
    with pytest.raises(ValueError) as caught:
        module.filter_trackers([bad], "d")
    assert str(caught.value).startswith(f"Unsupported logging capability: {bad}. Choose between ['all', 'aim', ")


@BOTH
def test_a_tracker_that_needs_a_directory_says_so(module):
    needs = tracker_class(module.GeneralTracker, "needs")
    needs.requires_logging_directory = True
    module.register_tracker_class(needs)
    for name in ("tensorboard", "needs"):
        with pytest.raises(ValueError) as caught:
            module.filter_trackers([name])
        assert str(caught.value) == f"Logging with `{name}` requires a `logging_dir` to be passed in."


def test_every_name_users_import_from_accelerate_tracking_is_here():
    defined = {name for name, value in vars(theirs).items() if getattr(value, "__module__", "") == theirs.__name__}
    checks = {name for name in vars(theirs) if name.startswith("is_") and name.endswith("_available")}
    wanted = defined | checks | {"LOGGER_TYPE_TO_CLASS", "LoggerType", "_available_trackers", "logger"}
    assert len(wanted) > 25
    there = set(ours.__all__) | set(vars(ours)) | set(ours._CHECKS) | {"_available_trackers"}
    assert sorted(wanted - there) == []
    assert ours.is_tensorboard_available() is theirs.is_tensorboard_available()
    assert set(theirs.LoggerType.list()) <= set(LoggerType.list())


def test_methods_have_the_signatures_of_accelerate():
    for name in ("__init__", "start", "store_init_configuration", "log", "finish"):
        mine, other = (inspect.signature(getattr(m.GeneralTracker, name)).parameters for m in (ours, theirs))
        assert [(p.name, p.kind, p.default) for p in mine.values()] == [(p.name, p.kind, p.default) for p in other.values()]
    wanted = {  # Accelerate's decorator hides the first two from inspect
        "init_trackers": {"project_name": inspect.Parameter.empty, "config": None, "init_kwargs": None},
        "log": {"values": inspect.Parameter.empty, "step": None, "log_kwargs": None},
        "get_tracker": _parameters(accelerate.Accelerator.get_tracker),
    }
    for name, parameters in wanted.items():
        assert _parameters(getattr(Accelerator, name)) == parameters
    assert _parameters(Accelerator) == {**_parameters(accelerate.Accelerator), "relay": "thread"}


def _parameters(function):
    return {p.name: p.default for p in inspect.signature(function).parameters.values() if p.name != "self"}


def test_logger_types_of_both_are_equal():
    assert LoggerType.WANDB == TheirLoggerType.WANDB
    assert TheirLoggerType.WANDB == LoggerType.WANDB
    assert LoggerType.WANDB != TheirLoggerType.MLFLOW
    assert len({LoggerType.WANDB, TheirLoggerType.WANDB}) == 1
    assert TheirLoggerType.WANDB in LoggerType and LoggerType(TheirLoggerType.WANDB) is LoggerType.WANDB


def test_a_folder_named_like_a_library_is_not_that_library(tmp_path, monkeypatch):
    from fanfold.trackers.registry import _found

    (tmp_path / "wandbish").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not _found("wandbish")
    (tmp_path / "wandbish" / "__init__.py").touch()
    import importlib

    importlib.invalidate_caches()
    assert _found("wandbish")


# Which trackers an Accelerator has


@pytest.mark.parametrize(
    "log_with",
    [
        "tensorboard",
        LoggerType.TENSORBOARD,
        TheirLoggerType.TENSORBOARD,
        ["tensorboard", TheirLoggerType.TENSORBOARD],
        ("tensorboard",),
    ],
    ids=["name", "our member", "their member", "both", "tuple"],
)
def test_a_tracker_is_named_in_many_ways(log_with, tmp_path):
    accelerator = Accelerator(cpu=True, log_with=log_with, project_dir=tmp_path)
    assert accelerator.log_with == [LoggerType.TENSORBOARD] == [TheirLoggerType.TENSORBOARD]
    assert isinstance(accelerator, accelerate.Accelerator) and accelerator.trackers == []


@pytest.mark.parametrize("base", [ours.GeneralTracker, theirs.GeneralTracker], ids=["ours", "theirs"])
def test_objects_and_registered_names_are_mixed_with_built_in_ones(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = ours if base is ours.GeneralTracker else theirs
    module.register_tracker_class(tracker_class(base, "registered"))
    accelerator = Accelerator(
        cpu=True, log_with=[tracker_class(base)(tmp_path / "a"), "tensorboard", "registered"], project_dir="out"
    )
    accelerator.init_trackers("b", init_kwargs={"other": {"x": 1}})
    assert [tracker.name for tracker in accelerator.trackers] == ["lines", "tensorboard", "registered"]
    accelerator.log({"loss": 0.5}, step=3)
    accelerator.end_training()
    assert logged(tmp_path / "a") == logged(tmp_path / "b") == [(3, {"loss": 0.5})]


def test_errors_and_warnings_of_the_constructor_are_those_of_accelerate(tmp_path):
    for cls in (accelerate.Accelerator, Accelerator):
        with pytest.raises(ValueError, match=r"Unsupported logging capability: nope\. Choose between "):
            cls(cpu=True, log_with="nope")
        with pytest.raises(ValueError, match=r"Logging with `tensorboard` requires a `logging_dir` to be passed in\."):
            cls(cpu=True, log_with="tensorboard")
        with pytest.warns(UserWarning, match=r"`log_with=\[\]` was passed but no supported trackers are currently installed."):
            cls(cpu=True, log_with=[])
        with pytest.raises(TypeError):
            cls(no_such_argument=1)
    with pytest.raises(fanfold.SettingError, match="Known: process, thread"):
        Accelerator(cpu=True, relay="pigeon")


def test_all_is_what_can_start_without_a_question(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "COMET_API_KEY", "NEPTUNE_API_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    mine = tracker_class()(tmp_path / "x")
    ours.register_tracker_class(tracker_class(name="extra"))
    found = Accelerator(cpu=True, log_with=[mine, "extra", "all"], project_dir=tmp_path).log_with
    assert found[:2] == [mine, "extra"] and LoggerType.TENSORBOARD in found
    assert all(ours.LOGGER_TYPE_TO_CLASS[str(item)].unusable() is None for item in found[2:])
    assert LoggerType.TENSORBOARD not in Accelerator(cpu=True, log_with="all").log_with  # it has nowhere to write


# What arrives


def test_every_kind_of_number_reaches_every_tracker(tmp_path):
    accelerator = Accelerator(cpu=True, log_with=["tensorboard", tracker_class()(tmp_path / "x")], project_dir=tmp_path / "out")
    accelerator.init_trackers("proj", config={"lr": 0.1, "layers": [1, 2], "nothing": None, "deep": {"er": 1}})
    for i in range(50):
        values = {"t": torch.tensor(i / 2), "bf16": torch.tensor(1.5, dtype=torch.bfloat16), "f32": np.float32(0.25),
                  "i64": np.int64(i), "one": torch.tensor([2.0]), "deep": {"er": np.float64(i)}, "word": "hello"}  # fmt: skip
        accelerator.log(values, step=i)
    accelerator.end_training()
    numbers = {"bf16": 1.5, "f32": 0.25, "one": 2.0}
    wanted = [(i, {"t": i / 2, **numbers, "i64": i, "deep/er": float(i), "word": "hello"}) for i in range(50)]
    assert logged(tmp_path / "x") == wanted
    seen = scalars(tmp_path / "out" / "proj")
    assert seen["t"] == [(i, i / 2) for i in range(50)] and seen["deep/er"] == [(i, float(i)) for i in range(50)]
    assert {key: len(points) for key, points in seen.items()} == dict.fromkeys(["t", "bf16", "f32", "i64", "one", "deep/er"], 50)
    assert lines(tmp_path / "x")[1] == ["config", {"lr": 0.1, "layers": [1, 2], "nothing": None, "deep": {"er": 1}}]
    assert [word for word, *_ in lines(tmp_path / "x")][-1] == "finish"


def test_log_kwargs_go_to_the_tracker_they_name(tmp_path):
    first, second = tracker_class()(tmp_path / "a"), tracker_class(name="second")(tmp_path / "b")
    accelerator = Accelerator(cpu=True, log_with=[first, second])
    accelerator.init_trackers("proj")
    accelerator.log({"x": 1}, step=0, log_kwargs={"second": {"commit": True}, "unknown": {"y": 1}})
    accelerator.end_training()
    assert lines(tmp_path / "a")[1:] == [["log", 0, {"x": 1}, {}], ["finish"]]  # and no configuration: none was given
    assert lines(tmp_path / "b")[1:] == [["log", 0, {"x": 1}, {"commit": True}], ["finish"]]


def test_the_callers_values_are_left_alone_and_steps_may_be_left_out(tmp_path):
    accelerator = Accelerator(cpu=True, log_with=tracker_class()(tmp_path / "x"))
    accelerator.log({"too": "early"})
    accelerator.init_trackers("proj")
    values = {"deep": {"er": torch.tensor(1.0)}}
    accelerator.log(values)
    accelerator.log(values)
    accelerator.end_training()
    assert list(values) == ["deep"] and isinstance(values["deep"]["er"], torch.Tensor)
    assert logged(tmp_path / "x") == [(0, {"deep/er": 1.0}), (1, {"deep/er": 1.0})]


def test_without_trackers_the_run_is_kept_all_the_same(runs_dir):
    accelerator = Accelerator(cpu=True)
    accelerator.init_trackers("proj", config={"lr": 1})
    accelerator.log({"loss": 1.0}, step=4)
    accelerator.end_training()
    (run,) = fanfold.runs(dir=runs_dir)
    assert (run.project, run.config, run.status, run.series("loss").steps.tolist()) == ("proj", {"lr": 1}, "finished", [4])


# Where it is written


@pytest.mark.parametrize(
    ("arguments", "runs", "board"),
    [
        (lambda: {"project_dir": "p"}, "p/.fanfold", "p"),
        (lambda: {"project_dir": Path("p")}, "p/.fanfold", "p"),
        (lambda: {"project_config": ProjectConfiguration(project_dir="p", logging_dir="l")}, "p/.fanfold", "l"),
        (lambda: {"project_config": ProjectConfiguration(logging_dir="l")}, "l/.fanfold", "l"),
        (lambda: {"project_dir": "p", "project_config": ProjectConfiguration(logging_dir="l")}, "p/.fanfold", "l"),
        (lambda: {"project_dir": "p", "project_config": ProjectConfiguration(project_dir="q")}, "q/.fanfold", "q"),
    ],
    ids=["text", "path", "both", "logging only", "filled in", "the configuration wins"],
)
def test_directories_are_where_accelerate_has_them(arguments, runs, board, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FANFOLD_DIR")
    accelerator = Accelerator(cpu=True, log_with="tensorboard", **arguments())
    accelerator.init_trackers("proj")
    accelerator.log({"x": 1.0}, step=1)
    accelerator.end_training()
    assert accelerator.run.path.parent.parent == tmp_path / runs
    assert scalars(tmp_path / board / "proj") == {"x": [(1, 1.0)]}
    AcceleratorState._reset_state(reset_partial_state=True)
    assert str(accelerate.Accelerator(cpu=True, log_with="tensorboard", **arguments()).logging_dir) == str(
        accelerator.logging_dir
    )


def test_fanfold_dir_says_where_runs_live(tmp_path, runs_dir):
    accelerator = Accelerator(cpu=True, project_dir=tmp_path / "p")
    accelerator.init_trackers("proj")
    accelerator.end_training()
    assert accelerator.run.path.parent.parent == runs_dir and not (tmp_path / "p" / ".fanfold").exists()


# More than once, and after the end


def test_starting_and_ending_twice_is_starting_and_ending_once(tmp_path, runs_dir):
    accelerator = Accelerator(cpu=True, log_with=tracker_class()(tmp_path / "x"))
    accelerator.init_trackers("proj", config={"a": 1})
    accelerator.init_trackers("proj", config={"b": 2})
    assert len(accelerator.trackers) == 1
    accelerator.log({"x": 1}, step=0)
    accelerator.end_training()
    accelerator.end_training()
    words = [word for word, *_ in lines(tmp_path / "x")]
    assert (words.count("start"), words.count("finish"), words.count("log")) == (1, 1, 1)
    (run,) = fanfold.runs(dir=runs_dir)
    assert run.config == {"a": 1, "b": 2}


def test_after_the_end_another_run_can_begin(tmp_path, runs_dir):
    accelerator = Accelerator(cpu=True, log_with=tracker_class()(tmp_path / "x"))
    for i in range(2):
        accelerator.init_trackers("proj")
        accelerator.log({"x": i}, step=i)
        accelerator.end_training()
    assert logged(tmp_path / "x") == [(0, {"x": 0}), (1, {"x": 1})]
    assert [run.status for run in fanfold.runs(dir=runs_dir)] == ["finished", "finished"]


def test_end_training_without_trackers_started_does_nothing():
    accelerator = Accelerator(cpu=True)
    accelerator.end_training()
    accelerator.end_training()
    assert accelerator.run is None


# Trackers that fail


class Failing(theirs.GeneralTracker):
    """Raise in one method, as often as it is told to."""

    name, requires_logging_directory, tracker = "failing", False, None

    def __init__(self, method, error, times=1 << 30):
        super().__init__()
        self.left, self.got = times, []

        def fail(*args, **kwargs):
            if self.left:
                self.left -= 1
                raise error
            return getattr(type(self), method)(self, *args, **kwargs)

        setattr(self, method, fail)

    def log(self, values, step=None, **kwargs):
        self.got.append((step, values))


@pytest.mark.parametrize("method", ["start", "store_init_configuration", "log", "finish"])
def test_a_tracker_that_raises_reaches_neither_the_loop_nor_the_others(method, tmp_path):
    bad = Failing(method, ConnectionError("down"))
    accelerator = Accelerator(cpu=True, log_with=[bad, "tensorboard", tracker_class()(tmp_path / "x")], project_dir=tmp_path)
    accelerator.init_trackers("proj", config={"a": 1})
    for i in range(20):
        accelerator.log({"x": i}, step=i)
    accelerator.end_training(timeout=4)
    assert logged(tmp_path / "x") == [(i, {"x": i}) for i in range(20)]
    assert lines(tmp_path / "x")[-1] == ["finish"]
    assert scalars(tmp_path / "proj")["x"] == [(i, float(i)) for i in range(20)]


@pytest.mark.parametrize("method", ["start", "log"])
def test_a_tracker_that_hangs_reaches_neither_the_loop_nor_the_others(method, tmp_path, monkeypatch):
    import fanfold.relay.attach as attach

    monkeypatch.setattr(attach, "START_SECONDS", 0.5)
    release = threading.Event()

    class Hanging(theirs.GeneralTracker):
        name, requires_logging_directory, tracker = "hanging", False, None

    setattr(Hanging, method, lambda self, *args, **kwargs: release.wait(60))
    accelerator = Accelerator(cpu=True, log_with=[Hanging(), tracker_class()(tmp_path / "x")])
    began = time.monotonic()
    accelerator.init_trackers("proj")
    for i in range(200):
        accelerator.log({"x": i}, step=i)
    assert time.monotonic() - began < 3
    accelerator.end_training(timeout=3)
    assert time.monotonic() - began < 8
    assert len(logged(tmp_path / "x")) == 200 and lines(tmp_path / "x")[-1] == ["finish"]
    release.set()


def test_an_outage_is_waited_out_and_nothing_comes_twice():
    bad = Failing("log", ConnectionError("down"), times=2)
    accelerator = Accelerator(cpu=True, log_with=bad)
    accelerator.init_trackers("proj")
    for i in range(5):
        accelerator.log({"x": i}, step=i)
    accelerator.end_training()
    assert bad.got == [(i, {"x": i}) for i in range(5)]


def test_a_start_that_fails_once_is_tried_again():
    bad = Failing("start", ConnectionError("down"), times=1)
    accelerator = Accelerator(cpu=True, log_with=bad)
    accelerator.init_trackers("proj")
    accelerator.log({"x": 1}, step=0)
    accelerator.end_training()
    assert bad.got == [(0, {"x": 1})]


def test_a_call_the_trackers_code_cannot_take_is_left_out_and_said(caplog):
    class Picky(Failing):
        def log(self, values, step=None, **kwargs):
            self.got.append((step, {key: value + 0 for key, value in values.items()}))  # a text cannot be added to

    picky = Picky("unused", None)
    accelerator = Accelerator(cpu=True, log_with=picky)
    accelerator.init_trackers("proj")
    for i in range(6):
        accelerator.log({"x": "text" if i % 3 == 1 else i}, step=i)
    accelerator.end_training()
    assert [step for step, _ in picky.got] == [0, 2, 3, 5]
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(said) == 1 and "'x'" in said[0] and "TypeError" in said[0]


def test_two_trackers_of_one_name_both_get_everything(tmp_path):
    cls = tracker_class()
    accelerator = Accelerator(cpu=True, log_with=[cls(tmp_path / "a"), cls(tmp_path / "b")])
    accelerator.init_trackers("proj")
    accelerator.log({"x": 1}, step=0)
    accelerator.end_training()
    assert logged(tmp_path / "a") == logged(tmp_path / "b") == [(0, {"x": 1})]


def test_arguments_that_are_objects_reach_a_tracker_by_name(tmp_path):
    ours.register_tracker_class(type("Opts", (tracker_class(name="opts"),), {"__init__": _keep_options}))
    accelerator = Accelerator(cpu=True, log_with="opts")
    marker = object()
    accelerator.init_trackers(str(tmp_path / "x"), init_kwargs={"opts": {"marker": marker}})
    assert accelerator.get_tracker("opts").marker is marker
    accelerator.log({"x": 1}, step=0)
    accelerator.end_training()
    assert logged(tmp_path / "x") == [(0, {"x": 1})]


def _keep_options(self, path, marker=None):
    self.path, self.marker = Path(path), marker


def test_random_numbers_are_as_they_would_be_without_trackers(tmp_path):
    class Seeding(tracker_class()):
        def start(self):
            torch.manual_seed(1337)
            np.random.seed(1337)
            super().start()

    torch.manual_seed(7)
    np.random.seed(7)
    wanted = (torch.rand(1).item(), np.random.rand())
    torch.manual_seed(7)
    np.random.seed(7)
    accelerator = Accelerator(cpu=True, log_with=Seeding(tmp_path / "x"))
    accelerator.init_trackers("proj")
    assert (torch.rand(1).item(), np.random.rand()) == wanted


# Trackers handed out


def test_the_live_tracker_is_handed_out(tmp_path):
    accelerator = Accelerator(cpu=True, log_with=["tensorboard", tracker_class()(tmp_path / "x")], project_dir=tmp_path)
    accelerator.init_trackers("proj")
    board = accelerator.get_tracker("tensorboard")
    assert isinstance(board, ours.TensorBoardTracker) and board is accelerator.trackers[0]
    assert accelerator.get_tracker("tensorboard", unwrap=True) is board.writer
    assert accelerator.get_tracker("lines").extra() == "live"
    board.log_images({"picture": np.zeros((1, 3, 4, 4), np.uint8)}, step=1)
    assert accelerator.get_tracker("fanfold", unwrap=True) is accelerator.run
    with pytest.raises(ValueError) as caught:
        accelerator.get_tracker("nope")
    assert str(caught.value) == "nope is not an available tracker stored inside the `Accelerator`."


def test_before_the_start_a_tracker_of_the_same_class_does_nothing(tmp_path):
    accelerator = Accelerator(cpu=True, log_with=["tensorboard", tracker_class()(tmp_path / "x")], project_dir=tmp_path)
    board, mine = accelerator.get_tracker("tensorboard"), accelerator.get_tracker("lines")
    assert isinstance(board, ours.TensorBoardTracker) and type(mine).__name__ == "Lines"
    assert (board.log_images({}), board.log({"x": 1}, step=1), mine.extra(), board.name) == (None, None, None, "tensorboard")
    assert board.writer.add_image("a", 1) is None and mine.tracker.anything["key"].log(1) is None
    assert accelerator.get_tracker("lines", unwrap=True).log_artifact("a") is None
    assert not (tmp_path / "x").exists()


def test_with_tracking_off_a_script_goes_through():
    accelerator = Accelerator(cpu=True)
    accelerator.init_trackers("proj")
    for name in ("tensorboard", "of my own"):
        assert accelerator.get_tracker(name).log({"x": 1}) is None
        assert accelerator.get_tracker(name, unwrap=True).log_artifact("x") is None
    assert isinstance(accelerator.get_tracker("tensorboard"), ours.TensorBoardTracker)


def test_the_object_of_a_tracker_that_could_not_start_does_nothing(tmp_path):
    (tmp_path / "file").touch()
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path / "file" / "below")
    accelerator.init_trackers("proj")
    assert accelerator.get_tracker("tensorboard", unwrap=True).add_scalar("x", 1.0) is None
    accelerator.log({"x": 1})
    accelerator.end_training(timeout=1)


def test_disabled_means_nothing_is_written(tmp_path, monkeypatch, runs_dir):
    monkeypatch.setenv("FANFOLD_MODE", "disabled")
    accelerator = Accelerator(cpu=True, log_with=tracker_class()(tmp_path / "x"))
    accelerator.init_trackers("proj", config={"a": 1})
    accelerator.init_trackers("proj")
    accelerator.log({"x": 1}, step=0)
    accelerator.get_tracker("lines").extra()
    accelerator.end_training()
    assert accelerator.trackers == [] and not (tmp_path / "x").exists() and not runs_dir.exists()


# Custom trackers: what people have written


def test_a_tracker_that_opens_sqlite_works_from_start_to_finish(tmp_path):
    class Database(ours.GeneralTracker):
        name, requires_logging_directory = "database", False

        def start(self):
            self.connection = sqlite3.connect(tmp_path / "x.db")
            self.connection.execute("create table points (step, loss)")

        @property
        def tracker(self):
            return self.connection

        def log(self, values, step=None):
            self.connection.execute("insert into points values (?, ?)", (step, values["loss"]))

        def finish(self):
            self.connection.commit()
            self.connection.close()

    accelerator = Accelerator(cpu=True, log_with=Database())
    accelerator.init_trackers("proj")
    for i in range(10):
        accelerator.log({"loss": torch.tensor(i / 4)}, step=i)
    accelerator.end_training()
    with sqlite3.connect(tmp_path / "x.db") as connection:
        assert connection.execute("select * from points").fetchall() == [(i, i / 4) for i in range(10)]
    connection.close()


@BOTH
def test_an_old_tracker_that_sets_up_when_it_is_made_works(module, tmp_path):
    PartialState(cpu=True)

    class Old(module.GeneralTracker):
        name, requires_logging_directory = "old", False

        @module.on_main_process
        def __init__(self, run_name):
            self.run = Path(run_name).open("w")  # noqa: SIM115 - closed by finish()

        @property
        def tracker(self):
            return self.run

        @module.on_main_process
        def store_init_configuration(self, values):
            self.run.write(json.dumps(["config", values]) + "\n")

        @module.on_main_process
        def log(self, values, step=None):
            self.run.write(json.dumps(["log", step, values, {}]) + "\n")

        @module.on_main_process
        def finish(self):
            self.run.close()

    accelerator = Accelerator(cpu=True, log_with=Old(tmp_path / "x"))
    accelerator.init_trackers("proj", config={"a": 1})
    accelerator.log({"x": 0.5}, step=2)
    accelerator.end_training()
    assert lines(tmp_path / "x") == [["config", {"a": 1}], ["log", 2, {"x": 0.5}, {}]]


GUIDE = """
    import torch
    from fanfold.frameworks.accelerate import Accelerator
    from accelerate.utils import LoggerType, ProjectConfiguration
    from accelerate.tracking import GeneralTracker, on_main_process
    from typing import Optional

    class MyCustomTracker(GeneralTracker):
        name = "mine"
        requires_logging_directory = False

        @on_main_process
        def __init__(self, run_name: str):
            self.run_name = run_name
            self.run = open(run_name, "w")

        @property
        def tracker(self):
            return self.run

        @on_main_process
        def store_init_configuration(self, values: dict):
            print("config", values, file=self.run)

        @on_main_process
        def log(self, values: dict, step: Optional[int] = None):
            print(step, values, file=self.run, flush=True)

    tracker = MyCustomTracker("some_run_name")
    config = ProjectConfiguration(project_dir=".", logging_dir="another/directory")
    accelerator = Accelerator(log_with=[tracker, LoggerType.TENSORBOARD], project_config=config, cpu=True)
    my_loss_function = torch.nn.functional.mse_loss
    config = {"num_iterations": 2, "learning_rate": 1e-2, "loss_function": str(my_loss_function)}
    accelerator.init_trackers("example_project", config=config)
    data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
    model = torch.nn.Linear(3, 1)
    my_model, my_optimizer, my_training_dataloader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.01), torch.utils.data.DataLoader(data, 4))
    device = accelerator.device
    my_model.to(device)
    step = 0
    for iteration in range(config["num_iterations"]):
        for inputs, targets in my_training_dataloader:
            my_optimizer.zero_grad()
            outputs = my_model(inputs)
            loss = my_loss_function(outputs, targets)
            accelerator.backward(loss)
            my_optimizer.step()
            accelerator.log({"training_loss": loss}, step=step)
            step += 1
    tensorboard = accelerator.get_tracker("tensorboard")
    run = accelerator.get_tracker("tensorboard", unwrap=True)
    if accelerator.is_main_process:
        run.add_text("note", "done")
    accelerator.end_training()
"""


def test_the_guides_script_runs_with_one_import_changed(tmp_path, runs_dir):
    child(GUIDE, tmp_path)
    text = (tmp_path / "some_run_name").read_text().splitlines()
    assert text[0].startswith("config {'num_iterations': 2") and [line[0] for line in text[1:]] == ["0", "1", "2", "3"]
    assert len(scalars(tmp_path / "another" / "directory" / "example_project")["training_loss"]) == 4
    (run,) = fanfold.runs(dir=runs_dir)
    assert (run.status, len(run.series("training_loss").values)) == ("finished", 4)


WANDB = """
    import wandb
    from accelerate.tracking import GeneralTracker, on_main_process
    from fanfold.frameworks.accelerate import Accelerator
    from typing import Optional

    class MyCustomTracker(GeneralTracker):
        name = "wandb"
        requires_logging_directory = False

        @on_main_process
        def __init__(self, run_name: str):
            self.run_name = run_name
            run = wandb.init(self.run_name)

        @property
        def tracker(self):
            return self.run.run

        @on_main_process
        def store_init_configuration(self, values: dict):
            wandb.config(values)

        @on_main_process
        def log(self, values: dict, step: Optional[int] = None):
            wandb.log(values, step=step)

    from accelerate import PartialState
    PartialState(cpu=True)
    tracker = MyCustomTracker("some_run_name")
    accelerator = Accelerator(log_with=tracker, cpu=True)
    hps = {"num_iterations": 5, "learning_rate": 1e-2}
    accelerator.init_trackers("my_project", config=hps)
    accelerator.log({"train_loss": 1.12, "valid_loss": 0.8}, step=1)
    accelerator.end_training()

    accelerator = Accelerator(log_with="wandb", cpu=True)
    accelerator.init_trackers("second", config=hps)
    accelerator.log({"train_loss": 1.5}, step=1)
    some_artifact_to_log = wandb.Artifact("rows", type="data")
    wandb_tracker = accelerator.get_tracker("wandb")
    wandb_tracker.run.log_artifact(some_artifact_to_log)
    wandb_tracker = accelerator.get_tracker("wandb", unwrap=True)
    with accelerator.on_main_process:
        wandb_tracker.log_artifact(some_artifact_to_log)
    @accelerator.on_main_process
    def here():
        return True
    assert here() is (True if accelerator.is_main_process else None)
    accelerator.end_training()
"""
OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_guides_wandb_examples_run_as_they_stand(ranks, tmp_path, runs_dir):
    """Even its custom tracker, whose configuration fails in wandb (`wandb.config(values)`): that is said, and values arrive."""
    from fanfold.trackers._wandb_log import WandbLog

    done = child(WANDB, tmp_path, launcher=LAUNCHERS["torchrun"] if ranks == 2 else (), **OFFLINE, HOME=str(tmp_path))
    assert done.stderr.count("cannot leave out its block") == ranks - 1
    assert "wandb does not take 'the configuration': TypeError" in done.stderr
    logs = [WandbLog(path).refresh() for path in (*tmp_path.rglob("*.wandb"), *runs_dir.rglob("*.wandb"))]
    logs = {log.path: log for log in logs}.values()
    assert sorted((log.keys["train_loss"], log.keys["valid_loss"], log.seen["artifact"]) for log in logs) == [
        (1, 0, 2),
        (1, 1, 0),
    ]
    assert sorted((run.project, run.ranks) for run in fanfold.runs(dir=runs_dir)) == [
        ("my_project", list(range(ranks))),
        ("second", list(range(ranks))),
    ]


def test_objects_of_a_trackers_library_go_to_that_tracker_only(tmp_path, runs_dir):
    from fanfold.trackers._wandb_log import WandbLog, put

    settings = {**OFFLINE, "HOME": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "trackio"), "SWANLAB_MODE": "offline"}
    done = child(
        """
        import aim, numpy as np, swanlab, trackio, wandb
        from fanfold.frameworks.accelerate import Accelerator
        from fanfold.trackers import GeneralTracker, native
        class Mine(GeneralTracker):
            name, requires_logging_directory, tracker, got = "mine", False, None, []
            def log(self, values, step=None):
                self.got.append(values)
        mine = Mine()
        accelerator = Accelerator(cpu=True, log_with=["wandb", "trackio", "swanlab", "aim", "tensorboard", mine], project_dir=".")
        accelerator.init_trackers("proj", init_kwargs={"fanfold": {"id": "r"}})
        pixels = np.zeros((4, 4, 3), np.uint8)
        picture = wandb.Image(pixels)
        accelerator.log({"x": 1, "w": {"image": picture}, "many": [picture, picture], "table": wandb.Table(["a"], [[1]]),
                         "s": swanlab.Text("hi"), "a": aim.Text("hi"), "k": trackio.Table(columns=["a"], data=[[1]])}, step=3)
        accelerator.log({"x": 2}, step=4)
        accelerator.end_training(timeout=60)
        assert mine.got[0]["w/image"] is picture and mine.got[0]["many"] == [picture, picture]
        assert not native._waiting, "kept after delivery"
        run = aim.Repo(".").get_run(next(aim.Repo(".").iter_runs()).hash)
        assert [text.data for text in run.get_text_sequence("a", aim.sdk.run.Context({})).values.values_list()] == ["hi"]
        """,
        tmp_path,
        **settings,
    )
    assert done.stderr.count("wandb.Image and other objects of that library go to its own tracker only") == 1
    assert "failed" not in done.stderr and "does not take" not in done.stderr, done.stderr
    (log,) = (WandbLog(path) for path in runs_dir.rglob("*.wandb"))
    rows = []
    for record in log.records():
        if record.WhichOneof("record_type") == "history":
            rows.append({})
            for item in record.history.item:
                put(rows[-1], item)
    first, second = rows
    assert (first["w/image"]["_type"], first["many"]["count"], first["table"]["_type"]) == ("image-file", 2, "table-file")
    assert (first["_step"], first["x"], second["x"]) == (3, 1, 2)
    assert {"s", "a", "k"}.isdisjoint(first)
    (database,) = (tmp_path / "trackio").glob("proj*.db")
    with sqlite3.connect(database) as connection:
        stored = [json.loads(metrics) for (metrics,) in connection.execute("select metrics from metrics")]
    connection.close()
    assert [row["k"]["_type"] for row in stored if "k" in row] == ["trackio.table"]
    assert [sorted(points) for points in scalars(tmp_path / "proj").values()] == [[(3, 1.0), (4, 2.0)]]
    (run,) = fanfold.runs(dir=runs_dir)
    assert run.media("w/image")[0].load().text == "wandb.Image, which only its own library can show"


def test_tensors_reach_mlflow_and_trackio_which_accelerate_leaves_out(tmp_path):
    settings = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db", "MLFLOW_DISABLE_TELEMETRY": "true",
                "TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path)}  # fmt: skip
    done = child(
        """
        import json, numpy as np, torch
        from fanfold.frameworks.accelerate import Accelerator
        accelerator = Accelerator(cpu=True, log_with=["mlflow", "trackio"])
        accelerator.init_trackers("proj", config={"lr": 0.1, "sizes": [1, 2]}, init_kwargs={"mlflow": {"run_name": "named"}})
        for i in range(5):
            accelerator.log({"loss": torch.tensor(i / 2), "n": np.int64(i), "deep": {"er": np.float32(0.5)}}, step=i)
        accelerator.end_training(timeout=60)
        import mlflow, sqlite3, glob
        client = mlflow.MlflowClient()
        (run,) = client.search_runs([client.get_experiment_by_name("proj").experiment_id])
        points = {key: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)] for key in ("loss", "n", "deep/er")}
        print(json.dumps([run.info.run_name, run.info.status, run.data.params["lr"], points]))
        """,
        tmp_path,
        **settings,
    )
    name, status, lr, points = json.loads(done.stdout.splitlines()[-1])
    wanted = {"loss": [i / 2 for i in range(5)], "n": [float(i) for i in range(5)], "deep/er": [0.5] * 5}
    assert (name, status, lr) == ("named", "FINISHED", "0.1")
    assert points == {key: [[i, value] for i, value in enumerate(values)] for key, values in wanted.items()}
    (database,) = (tmp_path / "trackio").glob("proj*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics order by step").fetchall()
    connection.close()
    assert [(step, json.loads(metrics)["loss"]) for step, metrics in rows] == [(i, i / 2) for i in range(5)]


# What the libraries themselves offer, as with Accelerate's own class


def test_the_current_run_of_every_library_is_ours(tmp_path, runs_dir):
    """`wandb.run`, `mlflow.log_metric`, `trackio.log` and their like are what users call beside the tracker."""
    done = child(
        """
        import json, logging
        logging.disable()
        from fanfold.frameworks.accelerate import Accelerator
        names = ["wandb", "mlflow", "trackio", "swanlab", "comet_ml", "clearml"]
        accelerator = Accelerator(cpu=True, log_with=names)
        accelerator.init_trackers("proj", config={"lr": 0.1})
        import clearml, comet_ml, mlflow, swanlab, trackio, wandb
        object_of = {name: accelerator.get_tracker(name, unwrap=True) for name in names}
        current = {
            "wandb": wandb.run is object_of["wandb"], "mlflow": mlflow.active_run().info.run_id == object_of["mlflow"].info.run_id,
            "swanlab": swanlab.get_run() is object_of["swanlab"], "clearml": clearml.Task.current_task() is object_of["clearml"],
            "comet_ml": comet_ml.get_running_experiment() is object_of["comet_ml"], "config": wandb.config["lr"] == 0.1,
        }
        accelerator.log({"loss": 1.0}, step=0)
        mlflow.log_metric("mine", 2.0, step=0)
        trackio.log({"mine": 2.0}, step=0)
        wandb.log({"mine": 2.0}, step=0)
        accelerator.end_training()
        client = mlflow.MlflowClient()
        runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
        left = [wandb.run, mlflow.active_run(), trackio.context_vars.current_run.get()]
        print(json.dumps([current, [(run.info.status, run.data.metrics) for run in runs], left]))
        """,
        tmp_path,
        **offline(tmp_path),
    )
    current, mlflow_runs, left = json.loads(done.stdout.splitlines()[-1])
    assert current == dict.fromkeys(current, True)
    assert mlflow_runs == [["FINISHED", {"loss": 1.0, "mine": 2.0}]]  # and no stray run beside it
    assert left == [None] * 3
    (database,) = (tmp_path / "trackio").glob("proj*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select metrics from metrics").fetchall()
    connection.close()
    assert sorted(tuple(json.loads(metrics).items()) for (metrics,) in rows) == [(("loss", 1.0),), (("mine", 2.0),)]
    assert wandb_steps(tmp_path) == {"loss": [0], "mine": [0]}


def offline(folder):
    """Return settings that keep every library on this disk."""
    (folder / "clearml.conf").write_text("sdk { development { report_use_subprocess: false } }\n")
    return {
        "WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off", "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/m.db",
        "MLFLOW_DISABLE_TELEMETRY": "true", "TRACKIO_DIR": str(folder / "trackio"), "SWANLAB_MODE": "offline",
        "SWANLAB_TERMINAL_PROXY_TYPE": "none", "COMET_START_ONLINE": "0", "COMET_DISABLE_AUTO_LOGGING": "1",
        "COMET_AUTO_LOG_CO2": "false", "CLEARML_OFFLINE_MODE": "1", "CLEARML_CONFIG_FILE": str(folder / "clearml.conf"),
        "HOME": str(folder), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip


def wandb_steps(folder):
    """Return the steps under which wandb has each key, in the order of its rows."""
    from fanfold.trackers._wandb_log import WandbLog, put

    found = {}
    for path in sorted(Path(folder).rglob("run-*.wandb")):
        for record in WandbLog(path).records():
            if record.WhichOneof("record_type") == "history":
                row = {}
                for item in record.history.item:
                    put(row, item)
                for key in row.keys() - {"_step", "_runtime", "_timestamp", "fanfold/step"}:
                    found.setdefault(key.partition("/")[0], []).append(row["fanfold/step"])
    return found


def test_calls_to_wandb_itself_share_the_steps_of_the_log(tmp_path, runs_dir):
    """wandb drops a row whose step is below the last one; the relay runs behind, and both must be kept."""
    child(
        """
        import numpy as np, wandb
        from fanfold.frameworks.accelerate import Accelerator
        accelerator = Accelerator(cpu=True, log_with="wandb")
        accelerator.init_trackers("proj")
        tracker = accelerator.get_tracker("wandb")
        for step in range(9):
            accelerator.log({"loss": float(step)}, step=step)
            tracker.log_images({"image": [np.zeros((4, 4, 3), dtype=np.uint8)]}, step=step)
            tracker.log({"mine": float(step)}, step=step)
            tracker.log_table("table", columns=["a"], data=[[step]], step=step)
            wandb.log({"global": float(step)}, step=step)
            accelerator.get_tracker("wandb", unwrap=True).log({"run": float(step)})
        accelerator.log({"late": 1.0}, step=2)
        tracker.log({"later": 1.0}, step=1)
        accelerator.end_training()
        """,
        tmp_path,
        **offline(tmp_path),
    )
    every = {key: list(range(9)) for key in ("loss", "image", "mine", "table", "global", "run")}
    assert wandb_steps(tmp_path) == {**every, "late": [2], "later": [1]}


def test_a_direct_call_sees_the_order_of_the_program(tmp_path, runs_dir):
    """A method of a built-in tracker is called when everything logged before it has been handed over."""
    accelerator = Accelerator(cpu=True, log_with="dvclive")
    accelerator.init_trackers("proj", init_kwargs={"dvclive": {"dir": str(tmp_path / "dvc")}})
    for step in range(20):
        accelerator.log({"loss": float(step)}, step=step)
        accelerator.get_tracker("dvclive").log({"mine": float(step)}, step=step)
        table = (tmp_path / "dvc" / "plots" / "metrics" / "loss.tsv").read_text().splitlines()
        assert len(table) == step + 2  # its head, and every point so far
    accelerator.end_training()


def test_arguments_for_a_tracker_object_reach_it_before_log_returns(tmp_path):
    accelerator = Accelerator(cpu=True, log_with=tracker_class()(tmp_path / "x"))
    accelerator.init_trackers("proj")
    accelerator.log({"loss": 1.0}, step=0, log_kwargs={"lines": {"commit": True}})
    assert lines(tmp_path / "x")[-1] == ["log", 0, {"loss": 1.0}, {"commit": True}]
    accelerator.end_training()


def test_accelerates_own_mlflow_tracker_works_from_both_threads(tmp_path, monkeypatch):
    """Its methods rely on MLflow's active run, which belongs to a thread; the relay's calls and the user's meet in one run."""
    done = child(
        """
        import json, mlflow
        from accelerate.tracking import MLflowTracker
        from fanfold.frameworks.accelerate import Accelerator
        tracker = MLflowTracker(experiment_name="exp")
        accelerator = Accelerator(cpu=True, log_with=tracker)
        accelerator.init_trackers("exp")
        accelerator.log({"ours": 1.0}, step=3)
        tracker.log({"mine": 2.0}, step=4)
        active = mlflow.active_run().info.run_id == tracker.active_run.info.run_id
        accelerator.end_training()
        client = mlflow.MlflowClient()
        runs = client.search_runs([one.experiment_id for one in client.search_experiments()])
        print(json.dumps([active, mlflow.active_run(), [(run.info.status, run.data.metrics) for run in runs]]))
        """,
        tmp_path,
        **offline(tmp_path),
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [True, None, [["FINISHED", {"ours": 1.0, "mine": 2.0}]]]


def test_tensorboard_files_are_where_accelerate_has_them_and_runs_do_not_mix(tmp_path):
    for value in (1.0, 2.0):
        accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path / "out")
        accelerator.init_trackers("proj")
        accelerator.log({"loss": value}, step=0)
        assert accelerator.get_tracker("tensorboard").counts() == {}  # of this run; the other's are not counted
        accelerator.end_training()
    files = sorted((tmp_path / "out" / "proj").glob("events.out.*"))
    assert len(files) == 2 and [file.is_file() for file in files] == [True, True]
    assert sorted(value for _, value in scalars(tmp_path / "out" / "proj")["loss"]) == [1.0, 2.0]


def test_clearml_has_the_names_that_accelerate_gives(tmp_path, runs_dir):
    done = child(
        """
        import json, logging
        logging.disable()
        from clearml.config import get_offline_dir
        from fanfold.frameworks.accelerate import Accelerator
        accelerator = Accelerator(cpu=True, log_with="clearml")
        accelerator.init_trackers("proj", config={"lr": 0.1, "name": "x"})
        accelerator.log({"eval_loss": 1.0, "loss": 2.0}, step=3)
        accelerator.log({"best": 4.0})
        folder = get_offline_dir(task_id=accelerator.get_tracker("clearml", unwrap=True).id)
        accelerator.end_training()
        events = [event for line in open(f"{folder}/metrics.jsonl") for event in json.loads(line)]
        task = json.load(open(f"{folder}/task.json"))
        print(json.dumps([sorted((e["metric"], e["variant"], e["value"]) for e in events), list(task["configuration"])]))
        """,
        tmp_path,
        **offline(tmp_path),
    )
    events, sections = json.loads(done.stdout.splitlines()[-1])
    assert events == [["Summary", "best", 4.0], ["loss", "eval", 1.0], ["loss", "train", 2.0]]
    assert sections == ["General"]


# How a run ends, and goes on


def test_a_crash_is_recorded_and_the_trackers_are_closed(tmp_path, runs_dir):
    done = child(
        """
        from fanfold.frameworks.accelerate import Accelerator
        from fanfold.trackers import GeneralTracker
        class Mine(GeneralTracker):
            name, requires_logging_directory, tracker = "mine", False, None
            def log(self, values, step=None): print("log", step, values, flush=True)
            def finish(self): print("finish", flush=True)
        accelerator = Accelerator(cpu=True, log_with=Mine())
        accelerator.init_trackers("proj")
        accelerator.log({"x": 1.0}, step=0)
        raise RuntimeError("the loss is gone")
        """,
        tmp_path,
        check=False,
    )
    assert done.returncode == 1 and done.stdout.splitlines() == ["log 0 {'x': 1.0}", "finish"]
    (run,) = fanfold.runs(dir=runs_dir)
    assert run.status == "failed" and "the loss is gone" in run.verdict["error"]


def test_training_goes_on_from_a_checkpoint_in_the_same_run(tmp_path, runs_dir):
    model = torch.nn.Linear(1, 1)
    for attempt in range(2):
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True, log_with=tracker_class()(tmp_path / "x"))
        accelerator.prepare(model)
        options = {"resume_from": tmp_path / "checkpoint"} if attempt else {}
        accelerator.init_trackers("proj", init_kwargs={"fanfold": options})
        accelerator.log({"x": attempt}, step=attempt)
        accelerator.save_state(str(tmp_path / "checkpoint"))
        accelerator.end_training()
    (run,) = fanfold.runs(dir=runs_dir)
    assert (run.series("x").steps.tolist(), len(run.attempts)) == ([0, 1], 2)
    assert logged(tmp_path / "x") == [(0, {"x": 0}), (1, {"x": 1})]
    accelerator.load_state(str(tmp_path / "checkpoint"))
    for folder, project, why in (
        (tmp_path, "proj", "names no run"),
        (tmp_path / "checkpoint", "other", "belongs to the project"),
    ):
        with pytest.raises(fanfold.RunError, match=why):
            accelerator.init_trackers(project, init_kwargs={"fanfold": {"resume_from": folder}})


def test_what_a_killed_process_left_reaches_the_tracker_when_the_run_goes_on(tmp_path, runs_dir):
    code = """
        import os, sys, threading
        from fanfold.frameworks.accelerate import Accelerator
        from fanfold.trackers import GeneralTracker
        class Mine(GeneralTracker):
            name, requires_logging_directory, tracker = "mine", False, None
            def log(self, values, step=None):
                if {blocked}:
                    threading.Event().wait()
                print("log", step, flush=True)
        accelerator = Accelerator(cpu=True, log_with=Mine())
        accelerator.init_trackers("proj", init_kwargs={{"fanfold": {{"id": "one"}}}})
        for i in range(3):
            accelerator.log({{"x": i}}, step=i + {first})
        if {blocked}:
            os._exit(9)
        accelerator.end_training()
    """
    assert child(code.format(blocked=True, first=0), tmp_path, check=False).returncode == 9
    done = child(code.format(blocked=False, first=3), tmp_path)
    assert done.stdout.split() == [word for i in range(6) for word in ("log", str(i))]


# Processes


def test_trackers_in_processes_of_their_own_get_everything(tmp_path):
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path, relay="process")
    accelerator.init_trackers("proj", init_kwargs={"tensorboard": {"flush_secs": 60}})
    assert [tracker.name for tracker in accelerator.trackers] == ["tensorboard"]
    for i in range(10):
        accelerator.log({"x": torch.tensor(float(i))}, step=i)
    with pytest.raises(fanfold.SettingError, match="relay='thread'"):
        accelerator.get_tracker("tensorboard", unwrap=True)
    accelerator.end_training(timeout=60)
    assert scalars(tmp_path / "proj")["x"] == [(i, float(i)) for i in range(10)]


RANKS = """
    import json, sys, time
    from pathlib import Path
    from fanfold.frameworks.accelerate import Accelerator
    from accelerate.tracking import GeneralTracker, on_main_process
    class Mine(GeneralTracker):
        name, requires_logging_directory = "mine", False
        def start(self): self.file = open("mine.txt", "a")
        @property
        def tracker(self): return self.file
        @on_main_process
        def log(self, values, step=None): print(step, values["rank"], file=self.file, flush=True)
        @on_main_process
        def extra(self): return "live"
        @on_main_process
        def finish(self): print("finish", file=self.file); self.file.close()
    accelerator = Accelerator(cpu=True, log_with=[Mine(), "tensorboard"], project_dir="out")
    rank = accelerator.process_index
    assert accelerator.num_processes == 2
    if {everywhere} or accelerator.is_main_process:
        accelerator.init_trackers("proj", config={{"lr": 1}})
    for i in range(20):
        accelerator.log({{"rank": rank, "x": i}}, step=i)
    mine, board = accelerator.get_tracker("mine"), accelerator.get_tracker("tensorboard")
    writer = accelerator.get_tracker("tensorboard", unwrap=True)
    writer.add_text("note", "from rank %d" % rank)
    board.log({{"by hand": rank}}, step=1)
    seen = [type(mine).__name__, mine.extra(), type(board).__name__, len(accelerator.trackers)]
    accelerator.wait_for_everyone()
    began = time.monotonic()
    if {everywhere} or accelerator.is_main_process:
        accelerator.end_training()
    seen.append(time.monotonic() - began < 15)
    if accelerator.is_main_process:
        seen.append(Path("mine.txt").read_text().splitlines()[-1])
        Path("done").touch()
    else:
        while not Path("done").exists():
            time.sleep(0.05)
    Path("seen%d" % rank).write_text(json.dumps(seen))
"""
LAUNCHERS = {
    # --multi_gpu is what starts one process per rank; the script's cpu=True decides where it computes.
    "accelerate launch": ("-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
                          "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"),
    "torchrun": ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("launcher", "everywhere"),
    [("accelerate launch", True), ("torchrun", True), ("torchrun", False)],
    ids=["accelerate launch", "torchrun", "torchrun, tracking on the main process only"],
)
def test_two_ranks_are_one_run_and_one_of_each_tracker(launcher, everywhere, tmp_path, runs_dir):
    child(RANKS.format(everywhere=everywhere), tmp_path, launcher=LAUNCHERS[launcher])
    assert json.loads((tmp_path / "seen0").read_text()) == ["Mine", "live", "TensorBoardTracker", 2, True, "finish"]
    assert json.loads((tmp_path / "seen1").read_text()) == ["Mine", None, "TensorBoardTracker", 0, True]
    assert (tmp_path / "mine.txt").read_text().splitlines() == [f"{i} 0" for i in range(20)] + ["finish"]
    seen = scalars(tmp_path / "out" / "proj")
    assert (seen["rank"], seen["by hand"]) == ([(i, 0.0) for i in range(20)], [(1, 0.0)])
    (run,) = fanfold.runs(dir=runs_dir)
    assert (run.ranks, run.status) == ([0, 1] if everywhere else [0], "finished")
    for rank in run.ranks:
        assert run.series("rank", rank=rank).values.tolist() == [rank] * 20


def test_trackers_are_finished_although_another_rank_has_not_ended(tmp_path, runs_dir):
    code = RANKS.format(everywhere=True).replace(
        "    if True or accelerator.is_main_process:\n        accelerator.end_training()",
        "    if accelerator.is_main_process:\n        accelerator.end_training()",
    )
    assert code.count("if True or") == 1
    child(code, tmp_path, launcher=LAUNCHERS["torchrun"])
    assert json.loads((tmp_path / "seen0").read_text())[-2:] == [True, "finish"]


# Our run inside Accelerate's own Accelerator


def test_accelerates_own_accelerator_takes_our_tracker(tmp_path, runs_dir):
    mine = tracker_class(theirs.GeneralTracker)(tmp_path / "x")
    accelerator = accelerate.Accelerator(cpu=True, log_with=[FanfoldTracker(project="mine", tags=["a"]), mine])
    accelerator.init_trackers("unused", config={"lr": 1, "deep": {"er": [1]}})
    accelerator.log({"loss": torch.tensor(0.5), "n": np.int64(1)}, step=3, log_kwargs={"lines": {"y": 1}})
    accelerator.get_tracker("fanfold").log_images({"picture": [np.zeros((4, 4, 3), np.uint8)]}, step=4)
    assert accelerator.get_tracker("fanfold", unwrap=True) is fanfold.run
    accelerator.end_training()
    accelerator.get_tracker("fanfold").finish()  # a second time, as Accelerate does it
    (run,) = fanfold.runs(dir=runs_dir)
    assert (run.project, list(run.tags), run.status, run.config) == ("mine", ["a"], "finished", {"lr": 1, "deep": {"er": [1]}})
    assert (run.series("loss").steps.tolist(), run.series("loss").values.tolist()) == ([3], [0.5])


def test_accelerates_own_accelerator_takes_our_name(runs_dir):
    register()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register()  # the same again is no news
    accelerator = accelerate.Accelerator(cpu=True, log_with="fanfold")
    accelerator.init_trackers("proj", config={"lr": 1}, init_kwargs={"fanfold": {"name": "first"}})
    accelerator.log({"loss": 0.5}, step=3)
    accelerator.end_training()
    (run,) = fanfold.runs(dir=runs_dir)
    assert (run.project, run.name, run.series("loss").values.tolist()) == ("proj", "first", [0.5])


def test_our_accelerator_does_not_track_itself_twice(runs_dir):
    accelerator = Accelerator(cpu=True, log_with=["fanfold", FanfoldTracker(tags=["a"])])
    accelerator.init_trackers("proj")
    accelerator.log({"x": 1}, step=0)
    accelerator.get_tracker("fanfold").log({"y": 2}, step=0)
    accelerator.end_training()
    (run,) = fanfold.runs(dir=runs_dir)
    assert (accelerator.trackers, list(run.tags), sorted(run.keys())) == ([], ["a"], ["x", "y"])


# fanfold.trackers in the place of accelerate.tracking


def test_our_module_stands_in_for_accelerate_tracking(tmp_path):
    done = child(
        """
        import sys
        import fanfold.trackers
        sys.modules["accelerate.tracking"] = fanfold.trackers
        import numpy as np, torch
        from accelerate import Accelerator
        from accelerate.tracking import GeneralTracker, TensorBoardTracker, on_main_process, register_tracker_class
        from accelerate.utils import LoggerType
        class Mine(GeneralTracker):
            name, requires_logging_directory = "mine", False
            def __init__(self, run_name): super().__init__(); self.run_name = run_name
            @on_main_process
            def start(self): self.got = []
            @property
            def tracker(self): return self.got
            @on_main_process
            def log(self, values, step=None, **kwargs): self.got.append((step, dict(values)))
        register_tracker_class(Mine)
        accelerator = Accelerator(cpu=True, log_with=[LoggerType.TENSORBOARD, "mine", Mine("b")], project_dir="out")
        accelerator.init_trackers("proj", config={"lr": 0.1, "layers": [1, 2], "deep": {"er": None}})
        assert type(accelerator.get_tracker("tensorboard")).__module__ == "fanfold.trackers.tensorboard"
        for i in range(3):
            accelerator.log({"a": np.float32(i), "b": torch.tensor(i), "deep": {"er": i}}, step=i)
        accelerator.end_training()
        print([tracker.run_name for tracker in accelerator.trackers], len(accelerator.get_tracker("mine", unwrap=True)))
        """,
        tmp_path,
        libraries=None,
    )
    assert done.stdout.strip() == "['proj', 'proj', 'b'] 3"
    seen = scalars(tmp_path / "out" / "proj")
    assert seen == {key: [(i, float(i)) for i in range(3)] for key in ("a", "b", "deep/er")}


def test_naming_the_frameworks_imports_none(tmp_path):
    code = """
        import sys, fanfold.frameworks, fanfold.trackers
        print([name for name in ("accelerate", "torch", "tensorboard", "wandb", "numpy") if name in sys.modules])
        print(fanfold.frameworks.accelerate.__name__)
    """
    done = child(code, tmp_path, libraries=None)
    assert done.stdout.splitlines() == ["[]", "fanfold.frameworks.accelerate"]
