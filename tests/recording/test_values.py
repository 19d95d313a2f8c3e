"""What may be logged: every kind of number, texts, nesting, media, and what happens to the rest."""

import decimal
import fractions
import logging
import math

import numpy as np
import pytest
import torch

import fanfold
from fanfold.errors import ValueRefused
from fanfold.values import split


def logged(runs_dir, value, key="x", **options):
    """Log one value and read it back."""
    run = fanfold.init("p", dir=runs_dir, quiet=True, system=False, **options)
    run.log({key: value}, step=0)
    run.finish()
    return fanfold.open(run.path)


NUMPY = [np.float16, np.float32, np.float64, np.longdouble, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32,
         np.uint64, np.bool_]  # fmt: skip
TORCH = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.int32,
         torch.int16, torch.int8, torch.uint8, torch.bool]  # fmt: skip


@pytest.mark.parametrize("kind", NUMPY, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("wrap", [lambda v: v, np.asarray, lambda v: np.asarray([v])], ids=["scalar", "0-d", "one element"])
def test_numpy_scalars_of_every_dtype_are_numbers(runs_dir, kind, wrap):
    value = wrap(kind(1))
    got = logged(runs_dir, value).series("x").values
    assert got.tolist() == [1]
    assert got.dtype.kind == {"f": "f", "i": "i", "u": "i", "b": "b"}[np.dtype(kind).kind]


@pytest.mark.parametrize("kind", [float, np.float64, np.float32, np.float16, torch.float32, torch.bfloat16], ids=str)
def test_numbers_that_are_float32_by_their_type_take_half_the_space(runs_dir, kind):
    def value(number):
        return torch.tensor(number, dtype=kind) if isinstance(kind, torch.dtype) else kind(number)

    run = fanfold.init("p", dir=runs_dir, quiet=True, system=False)
    for step in range(200):
        run.log({f"m{key}": value(step / 8 + key) for key in range(10)}, step=step)
    assert run.summary["m3"] == 199 / 8 + 3
    run.finish()
    stored = fanfold.open(run.path)
    assert stored.series("m9").values.tolist() == [float(value(step / 8 + 9)) for step in range(200)]
    rows = [rows for rows in stored.journals[0].rows.values() if len(rows) == 200]
    assert [shown.stride for shown in rows] == [12 + 16 + 10 * (8 if kind in (float, np.float64) else 4)]


@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_torch_scalars_of_every_dtype_are_numbers(runs_dir, dtype):
    value = torch.tensor(1.5).to(dtype) if dtype.is_floating_point else torch.tensor(1).to(dtype)
    assert logged(runs_dir, value).series("x").values.tolist() == [1.5 if dtype.is_floating_point else 1]


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7976931348623157e308, 0.1, 2**62 + 1, -(2**63), 2**63 - 1]
)
def test_extreme_numbers_are_exact(runs_dir, value):
    got = logged(runs_dir, value).series("x").values[0].item()
    assert type(got) is type(value)
    assert (math.isnan(got) and math.isnan(value)) or (got == value and math.copysign(1, got) == math.copysign(1, value))


@pytest.mark.parametrize("value", [decimal.Decimal("0.5"), fractions.Fraction(1, 2)])
def test_other_real_numbers_become_floats(runs_dir, value):
    assert logged(runs_dir, value).series("x").values.tolist() == [0.5]


def test_an_integer_beyond_64_bits_is_a_float_and_said(runs_dir, caplog):
    with caplog.at_level(logging.WARNING, "fanfold"):
        assert logged(runs_dir, 2**70).series("x").values.tolist() == [2.0**70]
        assert logged(runs_dir, 10**400, key="y").series("y").values.tolist() == [math.inf]
    assert len(caplog.records) == 2


def test_nested_dicts_join_their_keys(runs_dir):
    run = fanfold.init("p", dir=runs_dir, quiet=True, system=False)
    run.log({"a": {"b": {"c": 1.0}, 2: 2.0}, "d": "text", "e": {}}, step=0)
    run.finish()
    stored = fanfold.open(run.path)
    assert stored.keys() == ["a/b/c", "a/2"]
    assert [point.text for point in stored.texts("d")] == ["text"]


def test_one_key_spelled_twice_keeps_the_last_and_says_so(runs_dir, caplog):
    with caplog.at_level(logging.WARNING, "fanfold"):
        parts = split({"a/b": 1, "c": 5.0, "a": {"b": 2.5}})
    assert (parts.numbers, parts.types) == ({"c": 5.0, "a/b": 2.5}, ["d", "d"])
    assert "is twice in one log() call" in caplog.text


def test_one_key_spelled_twice_is_one_value_whatever_its_kinds(runs_dir, caplog):
    run = fanfold.init("p", dir=runs_dir, quiet=True, system=False)
    run.log({"a/b": "text", "a": {"b": 1.5}, "c/d": 2.5, "c": {"d": "last"}}, step=0)
    run.finish()
    stored = fanfold.open(run.path)
    assert stored.series("a/b").values.tolist() == [1.5]
    assert stored.summary["c/d"] == "last"
    assert [record.message.count("is twice") for record in caplog.records].count(1) == 2


@pytest.mark.parametrize("text", ["", "hi", "ü€🙂", "\ud800 lone", "a\x00b", "x" * 70_000])
def test_texts_are_kept(runs_dir, text):
    stored = logged(runs_dir, text)
    if len(text) > 65_536:
        assert stored.media("x")[0].load().text == text
    else:
        assert [point.text for point in stored.texts("x")] == [text.encode("utf-8", "backslashreplace").decode()]


@pytest.mark.parametrize(
    "value",
    [None, object(), 1j, b"bytes", torch.empty((), device="meta"), [object()]],
    ids=["None", "object", "complex", "bytes", "meta tensor", "list"],
)
def test_an_unknown_kind_is_said_once_per_key_and_stops_nothing(runs_dir, caplog, value):
    run = fanfold.init("p", dir=runs_dir, quiet=True, system=False)
    with caplog.at_level(logging.WARNING, "fanfold"):
        for step in range(3):
            run.log({"bad": value, "good": step}, step=step)
    run.finish()
    assert len(caplog.records) == 1
    assert "'bad' of type" in caplog.records[0].message
    assert fanfold.open(run.path).series("good").values.tolist() == [0, 1, 2]


def test_strict_raises_instead(runs_dir):
    run = fanfold.init("p", dir=runs_dir, quiet=True, system=False, strict=True)
    with pytest.raises(ValueRefused, match=r"'x' of type builtins\.NoneType was not logged"):
        run.log({"x": None})
    run.finish()


def test_a_tensor_with_grad_is_a_number_and_its_graph_is_let_go(runs_dir):
    weight = torch.ones((), requires_grad=True)
    assert logged(runs_dir, weight * 2).series("x").values.tolist() == [2.0]


def test_jax_values_land_without_waiting(runs_dir):
    import jax.numpy as jnp

    run = fanfold.init("p", dir=runs_dir, quiet=True, system=False)
    for step in range(20):
        run.log({"f": jnp.float32(step) * 2, "b": jnp.bfloat16(1.5), "i": jnp.int32(step), "plain": step}, step=step)
    run.finish()
    stored = fanfold.open(run.path)
    assert stored.series("f").values.tolist() == [2.0 * step for step in range(20)]
    assert stored.series("i").values.tolist() == list(range(20))
    assert set(stored.series("b").values.tolist()) == {1.5}
    assert stored.series("plain").steps.tolist() == list(range(20))
    assert stored.lost_values == []


def test_a_jax_tracer_is_refused_with_the_reason(runs_dir, caplog):
    import jax

    run = fanfold.init("p", dir=runs_dir, quiet=True, system=False)

    @jax.jit
    def step(x):
        run.log({"inside": x})
        return x * 2

    with caplog.at_level(logging.WARNING, "fanfold"):
        assert step(2.0) == 4.0
    assert "tracer" in caplog.text
    run.finish()


def test_a_dtensor_is_never_gathered(runs_dir, caplog):
    """A sharded value would need a collective; a replicated one is read locally."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = distribute_tensor(torch.tensor(2.5), mesh, [Replicate()])
        from torch.distributed.tensor import DTensor

        partial = DTensor.from_local(torch.tensor(1.0), mesh, [Partial()])
        with caplog.at_level(logging.WARNING, "fanfold"):
            parts = split({"whole": whole, "partial": partial})
        assert parts.numbers == {"whole": 2.5}
        assert "never calls a collective" in caplog.text
    finally:
        dist.destroy_process_group()


def test_media_convert_by_themselves(runs_dir):
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt
    import pandas as pd
    from PIL import Image

    figure, axes = plt.subplots()
    axes.plot([1, 2])
    run = fanfold.init("p", dir=runs_dir, quiet=True, system=False)
    run.log({"pil": Image.new("RGB", (4, 3)), "many": [Image.new("L", (2, 2))] * 3, "fig": figure, "df": pd.DataFrame({"a": [1, 2]}),
             "array": np.arange(10.0), "tensor": torch.randn(50), "list": [1, 2, 3], "n": 1}, step=4)  # fmt: skip
    plt.close(figure)
    run.finish()
    stored = fanfold.open(run.path)
    kinds = {key: [point.kind for point in stored.media(key)] for key in stored.keys("media")}
    assert kinds == {"pil": ["image"], "many": ["image"] * 3, "fig": ["figure"], "df": ["table"], "array": ["histogram"],
                     "tensor": ["histogram"], "list": ["histogram"]}  # fmt: skip
    assert stored.media("pil")[0].load().array().shape == (3, 4, 3)
    assert list(stored.table("df").column("a")) == [1, 2]
    assert stored.media("array")[0].step == 4


def test_media_are_taken_as_they_were(runs_dir):
    run = fanfold.init("p", dir=runs_dir, quiet=True, system=False)
    pixels = np.zeros((4, 4, 3), np.uint8)
    for step in range(20):
        pixels[:] = step
        run.log({"image": fanfold.Image(pixels)}, step=step)
    run.finish()
    got = [int(point.load().array().max()) for point in fanfold.open(run.path).media("image")]
    assert got == list(range(20))


def test_an_80_mb_table_goes_to_a_blob(runs_dir):
    import pandas as pd

    table = np.random.default_rng(0).random((1_000_000, 10))
    run = fanfold.init("p", dir=runs_dir, quiet=True, system=False)
    run.log({"t": pd.DataFrame(table, columns=[f"c{i}" for i in range(10)])}, step=0)
    run.finish(timeout=60)
    stored = fanfold.open(run.path)
    assert sum(journal.size for journal in stored.journals) < 1_000_000
    assert np.array_equal(np.asarray(stored.table("t").column("c3")), table[:, 3])
