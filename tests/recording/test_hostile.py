"""Whatever a run's verbs are given, training continues: every verb found on Run gets objects that misbehave."""

import ast
import collections
import collections.abc
import errno
import inspect
import logging
import os
import random
import resource
import shutil
import subprocess
import sys
import textwrap
import time
import warnings
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fanfold
import fault_table
from fanfold.recording.config import Config
from fanfold.recording.run import Run
from fanfold.recording.summary import SummaryView


class Bang(Exception):
    """What a hostile object raises."""

    def __str__(self):
        raise RuntimeError("not even this")

    __repr__ = __str__


def boom(*_args, **_kwargs):
    raise Bang


def raising(*names, base=object):
    """Return an object whose methods of these names raise."""
    return type("Hostile", (base,), dict.fromkeys(names, boom))()


def raising_class():
    return type("Liar", (), {"__class__": property(boom)})()


def strange_module(module):
    return type("Posing", (), {"__module__": module, "device": property(boom), "aval": 1, "size": 1, "item": boom})()


class Metaclass(type):
    @property
    def __module__(cls):
        raise Bang

    __hash__ = boom


class Changing(collections.abc.Mapping):
    """A mapping that is another one with each look."""

    def __init__(self):
        self.looks = 0

    def __getitem__(self, key):
        return Changing() if self.looks % 2 else self.looks

    def __iter__(self):
        self.looks += 1
        yield from ("a", "b")[: 1 + self.looks % 2]
        if self.looks % 3 == 0:
            raise RuntimeError("dictionary changed size during iteration")

    def __len__(self):
        return self.looks


class Growing(dict):
    """A dict that grows while it is read."""

    def items(self):
        for key in list(self):
            yield key, self[key]
            self[f"{key}x"] = 1
            if len(self) > 100:
                raise RuntimeError("dictionary changed size during iteration")


def self_referential():
    found = {"x": 1.0}
    found |= {"me": found, "again": found, "list": [found]}
    return found


def deep(levels=5_000):
    found = {"x": 1.0}
    for _ in range(levels):
        found = {"d": found}
    return found


def wide(levels=40):
    found = {"x": 1.0}
    for _ in range(levels):
        found = {"a": found, "b": found}
    return found


def deep_list(levels=5_000):
    found = [1.0]
    for _ in range(levels):
        found = [found]
    return found


def nested_tensor():
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def sparse_tensor():
    import torch

    return torch.eye(3).to_sparse()


def fake_tensor():
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(1)


HOSTILE = {
    "self-referential dict": self_referential,
    "deep dict": deep,
    "wide dict": wide,
    "deep list": deep_list,
    "nested tensor": nested_tensor,
    "sparse tensor": sparse_tensor,
    "fake tensor": fake_tensor,
    "raising repr and str": lambda: raising("__repr__", "__str__", "__format__"),
    "raising items": lambda: raising("items", base=dict),
    "raising iter": lambda: raising("__iter__", "__len__", "keys", "values", base=dict),
    "raising getitem": lambda: raising("__getitem__", "get", base=collections.UserDict),
    "raising iter of a list": lambda: raising("__iter__", "__len__", base=list),
    "raising len": lambda: raising("__len__", "__bool__"),
    "raising eq": lambda: raising("__eq__", "__ne__", "__lt__", "__gt__"),
    "raising hash": lambda: raising("__hash__", "__eq__"),
    "raising float": lambda: raising("__float__", "__int__", "__index__"),
    "raising float of a float": lambda: raising("__float__", "__eq__", "__repr__", base=float),
    "raising int": lambda: raising("__int__", "__index__", "__lt__", "__gt__", base=int),
    "raising array": lambda: raising("__array__", "__array_interface__", "tolist", "dtype", "size"),
    "raising getattr": lambda: raising("__getattr__", "__getattribute__"),
    "raising class": raising_class,
    "raising fspath": lambda: raising("__fspath__", base=os.PathLike),
    "raising text": lambda: raising("__str__", "encode", "__radd__", "__add__", "__eq__", "__hash__", base=str),
    "raising call": lambda: raising("__call__", "__name__"),
    "class of a raising metaclass": lambda: Metaclass("Meta", (), {}),
    "object of a raising metaclass": Metaclass("Meta", (), {}),
    "posing as torch": lambda: strange_module("torch"),
    "posing as jax": lambda: strange_module("jax"),
    "posing as numpy": lambda: strange_module("numpy"),
    "posing as nothing": lambda: strange_module(None),
    "changing mapping": Changing,
    "growing dict": lambda: Growing(a=1, b={"c": 2}),
    "endless mapping": lambda: collections.defaultdict(deep, {"a": wide(5)}),
    "huge integer": lambda: 10**6000,
    "huge negative integer": lambda: -(2**70),
    "lone surrogate": lambda: "\ud800 \x00 \uffff",
    "long text": lambda: "x" * 200_000,
    "bytes": lambda: b"\xff\x00",
    "object array": lambda: np.array([object(), None], dtype=object),
    "structured array": lambda: np.zeros(2, [("a", "f8"), ("b", "U5")]),
    "complex": lambda: 1j,
    "nan": lambda: float("nan"),
    "none": lambda: None,
    "empty": dict,
    "generator": lambda: (boom() for _ in range(3)),
    "a type": lambda: int,
    "a run": lambda: Run,
    "an exception": Bang,
}


class Maker(NamedTuple):
    """Makes a value when it is used: Hypothesis itself must not look at it."""

    name: str

    def __call__(self):
        return HOSTILE[self.name]() if self.name in HOSTILE else ast.literal_eval(self.name)


hostile = st.sampled_from(sorted(HOSTILE)).map(Maker)
values = st.one_of(
    hostile,
    st.one_of(st.integers(), st.text("abcé 🙂\x00", max_size=5), st.floats(allow_nan=False, allow_infinity=False)).map(
        lambda v: Maker(repr(v))
    ),
)
# These return something to the caller, so a wrong argument is an error.
NOT_VERBS = {"on_main_process", "get_tracker"}
METHODS = sorted(name for name, _ in inspect.getmembers(Run, inspect.isfunction) if name[0] != "_" and name not in NOT_VERBS)
SETTERS = sorted(name for name, found in inspect.getmembers(Run, lambda item: isinstance(item, property)) if found.fset)
PROPERTIES = sorted(name for name, found in inspect.getmembers(Run, lambda item: isinstance(item, property)) if name[0] != "_")
quick = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def start(folder, **options):
    return fanfold.init("p", dir=folder, **{"quiet": True, "system": False, **options})


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """One run that takes it all. What has no end is cut short earlier than usual, for the sake of time."""
    limits = pytest.MonkeyPatch()
    limits.setattr("fanfold.plain.MAX_ITEMS", 500)
    logging.getLogger("fanfold").setLevel(logging.CRITICAL)
    limits.setattr("fanfold.values.MAX_VALUES", 500)
    limits.chdir(tmp_path_factory.mktemp("empty"))
    run = start(tmp_path_factory.mktemp("hostile"))
    yield run
    limits.undo()
    run.log({"alive": 1.0}, step=7)
    run.finish()
    logging.getLogger("fanfold").setLevel(logging.NOTSET)
    stored = fanfold.open(run.path)
    assert stored.status == "finished"
    assert stored.series("alive").values.tolist() == [1.0]


def test_the_verbs_are_found():
    assert {"log", "alert", "artifact", "define_metric", "finish", "flush", "ops"} <= set(METHODS)
    assert {"name", "notes", "tags"} <= set(SETTERS) and "summary" in PROPERTIES


@pytest.mark.parametrize("name", sorted(set(METHODS) - {"log", "finish"}))
@quick
@given(data=st.data())
def test_no_verb_raises_whatever_it_is_given(live, name, data):
    method = getattr(live, name)
    parameters = [p for p in inspect.signature(method).parameters.values() if p.kind is not p.VAR_KEYWORD]
    makers = {p.name: data.draw(values) for p in parameters if p.default is p.empty or data.draw(st.booleans())}
    method(**{name: make() for name, make in makers.items()})
    method(*[data.draw(values)() for _ in range(data.draw(st.integers(0, 2)))])


@quick
@given(value=values, key=values, step=values)
def test_log_takes_any_value_key_and_step(live, value, key, step):
    live.log({"x": 1.0, "y": value()}, step=step())
    live.log({"deep": {"er": value()}, "z": 2}, step=step())
    pairs = type("Pairs", (dict,), {"items": lambda _: [(key(), 1.0), ("v", value())]})()
    live.log(pairs, step=step())


@quick
@given(value=values)
def test_log_itself_takes_anything(live, value):
    live.log(value())
    live.log({"x": 1.0}, log_kwargs=value(), commit=value())
    live.log({"x": 1.0}, log_kwargs={"wandb": value()})


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_no_verb_raises_over_thousands_of_hostile_calls(live):
    chance, raised, calls = random.Random(1), [], 0
    names = sorted(HOSTILE)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        name = chance.choice([*sorted(set(METHODS) - {"log", "finish"}), "log", "log", *SETTERS])
        hostile_names = [chance.choice(names) for _ in range(3)]
        one, other, third = (HOSTILE[each]() for each in hostile_names)
        calls += 1
        try:
            if name in SETTERS:
                setattr(live, name, one)
            elif name == "log":
                live.log({"x": 1.0, "y": one, "deep": {"z": other}}, step=third)
            else:
                method = getattr(live, name)
                parameters = [p for p in inspect.signature(method).parameters.values() if p.kind is not p.VAR_KEYWORD]
                wanted = [p.name for p in parameters if p.default is p.empty or chance.random() < 0.5]
                method(**dict(zip(wanted, [one, other, third] * len(wanted), strict=False)))
        except Exception as error:
            raised.append((name, hostile_names, type(error)))
    fault_table.record("hostile objects given to every verb of a run", times=calls, raised=len(raised))
    assert raised == []


@pytest.mark.parametrize("name", SETTERS)
@quick
@given(value=values)
def test_no_attribute_raises_whatever_is_assigned(live, name, value):
    setattr(live, name, value())
    getattr(live, name)


@pytest.mark.parametrize("name", PROPERTIES)
def test_every_property_can_be_read(live, name):
    getattr(live, name)
    repr(live)


CHANGES = [
    lambda target, key, value: target.__setitem__(key, value),
    lambda target, key, value: target.update({"k": value}),
    lambda target, key, value: target.update(value),
    lambda target, key, value: target.update(k=value),
]


@pytest.mark.parametrize("change", CHANGES)
@quick
@given(value=values, key=values)
def test_config_and_summary_take_anything(live, change, value, key):
    change(live.config, key(), value())
    change(live.summary, key(), value())
    live.config.hostile = value()
    live.config |= {"x": value()}
    live.config.setdefault("y", value())
    live.config.clear()
    live.log({"x": 1.0})


@pytest.mark.parametrize("kind", [Config, SummaryView])
def test_every_change_of_a_dict_that_is_journalled_is_guarded(kind):
    own = {name for name in ("__setitem__", "update") if name in vars(kind)}
    assert own == {"__setitem__", "update"}


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(timeout=values, status=values, code=values)
def test_a_run_is_finished_whatever_finish_is_given(tmp_path_factory, timeout, status, code):
    run = start(tmp_path_factory.mktemp("end"))
    seconds = timeout()
    run.finish(5.0 if isinstance(seconds, (int, float)) else seconds, status(), exit_code=code())
    assert run.status != "running"
    assert fanfold.open(run.path).status in ("finished", "failed")


def test_every_verb_of_a_strict_run_raises(tmp_path):
    run = start(tmp_path, strict=True)
    for mistake in (
        lambda: run.log({"x": object()}),
        lambda: run.log(raising("items", base=dict)),
        lambda: run.alert("x", level=raising("__eq__")),
        lambda: run.artifact(raising("__fspath__")),
        lambda: run.define_metric(raising("__str__")),
        lambda: run.config.update(object.__new__(int)),
        lambda: setattr(run, "tags", raising("__iter__")),
    ):
        with pytest.raises(Exception):  # noqa: B017 - any at all
            mistake()
    run.finish()


def test_a_bad_value_costs_only_itself(runs_dir, caplog):
    run = start(runs_dir)
    with caplog.at_level(logging.WARNING, "fanfold"):
        for step in range(3):
            run.log({"loss": 1.0 + step, "me": self_referential(), "deep": deep(), "bad": raising("__repr__", "__str__"), "n": step,
                     "tensor": nested_tensor(), "text": "kept"}, step=step)  # fmt: skip
    run.finish()
    stored = fanfold.open(run.path)
    assert stored.series("loss").values.tolist() == [1.0, 2.0, 3.0]
    assert stored.series("n").values.tolist() == [0, 1, 2]
    assert stored.series("me/x").values.tolist() == [1.0] * 3
    assert [point.text for point in stored.texts("text")] == ["kept"] * 3
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "'me/me'" in said and "it contains itself" in said and "64 levels deep" in said and "'bad'" in said
    assert "'tensor' of type torch.Tensor was not logged" in said


def test_what_has_no_end_is_cut(runs_dir, monkeypatch):
    monkeypatch.setattr("fanfold.values.MAX_VALUES", 5_000)
    run = start(runs_dir, config={"me": self_referential(), "deep": deep(), "list": deep_list(), "wide": wide()})
    run.log({"wide": wide(), "x": 1.0})
    run.finish()
    stored = fanfold.open(run.path)
    assert 100 < len(stored.keys()) <= 1 << 19
    assert stored.config["me"]["me"] == "…" and stored.config["me"]["x"] == 1.0


def test_ctrl_c_inside_a_value_is_not_swallowed(runs_dir):
    run = start(runs_dir)

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.log({"x": type("Slow", (), {"__module__": "numpy", "size": 1, "item": interrupt})()})
    run.finish()


def test_a_thread_that_changes_the_dict_costs_nothing(runs_dir):
    code = """
        import threading, fanfold
        run, shared, stop = fanfold.init("p", id="shared"), {}, threading.Event()
        def change():
            n = 0
            while not stop.is_set():
                n += 1
                shared[f"k{n % 500}"] = float(n)
                shared.pop(f"k{(n + 250) % 500}", None)
        thread = threading.Thread(target=change); thread.start()
        for step in range(2000):
            run.log(shared, step=step)
        stop.set(); thread.join()
        run.log({"end": 1.0})
        run.finish()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert fanfold.open("shared", dir=runs_dir).series("end").values.tolist() == [1.0]


def test_verbs_go_on_when_the_directory_is_gone(runs_dir, tmp_path, caplog):
    run = start(runs_dir)
    (tmp_path / "file").write_bytes(b"x")
    run.log({"x": 2.0})
    shutil.rmtree(run.path)
    assert run.summary["x"] == 2.0
    run.alert("gone")
    run.artifact(tmp_path / "file")
    run.config["a"] = 1
    run.ops()
    run.log({"x": 3.0})
    assert run.summary["x"] == 3.0
    run.finish()


def test_verbs_go_on_without_descriptors(runs_dir, tmp_path):
    code = """
        import errno, os, sys, fanfold
        run = fanfold.init("p", id="few")
        run.log({"x": 1.0, "t": "text"})
        import fanfold.store, fanfold.probes.ops, numpy
        held = []
        try:
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            assert error.errno == errno.EMFILE
        run.log({"x": 2.0}); run.log({"y": 3}); run.alert("low"); run.artifact(sys.executable); run.tags = ["a"]
        run.define_metric("x", summary="max"); run.ops(); run.log({"x": 1.5})
        assert run.summary["x"] == 2.0 or run.summary["x"] == 1.5, run.summary
        run.config["a"] = 1
        print(run.flush(1.0))
        for fd in held: os.close(fd)
        run.finish()
    """
    limits = (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120,
                          preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits))  # fmt: skip
    assert done.returncode == 0, done.stderr
    stored = fanfold.open("few", dir=runs_dir)
    assert stored.series("x").values.tolist() == [1.0, 2.0, 1.5]
    assert (stored.tags, stored.config["a"], [alert["title"] for alert in stored.alerts]) == (["a"], 1, ["low"])
    assert errno.EMFILE == 24 and "Too many open files" in done.stderr
