"""A stamp that is killed at any moment leaves a file that loads: the old one or the new one, and never a half of either."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import h5py
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fanfold
import fault_table
from fanfold.errors import FanfoldError
from fanfold.provenance import replace
from stamped_models import training

SMALL = {"a.bias": torch.arange(1200.0), "b.weight": torch.arange(50_000.0), "c.weight": torch.arange(1000, dtype=torch.int16)}
LARGE = {"a.weight": torch.arange(50_000.0), "b.bias": torch.arange(1200.0)}
MANY = {f"layer{n}.weight": torch.full((4,), float(n)) for n in range(900)}  # a table of contents beyond 64 KiB


def save_onnx(weights: dict[str, torch.Tensor], path: Path) -> None:
    values = [
        helper.make_tensor(name, TensorProto.FLOAT, list(value.shape), value.float().tolist()) for name, value in weights.items()
    ]
    graph = helper.make_graph([], "g", [], [], initializer=values)
    onnx.save(helper.make_model(graph), path)


def same_safetensors(path: Path, weights: dict[str, torch.Tensor]) -> None:
    loaded = load_file(path)
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    with safe_open(path, "pt") as file:
        assert all(torch.equal(file.get_tensor(name), weights[name]) for name in weights)


def same_torch(path: Path, weights: dict[str, torch.Tensor]) -> None:
    loaded = torch.load(path)
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def same_onnx(path: Path, weights: dict[str, torch.Tensor]) -> None:
    found = {item.name: onnx.numpy_helper.to_array(item) for item in onnx.load(path).graph.initializer}
    assert {name: value.tolist() for name, value in found.items()} == {
        name: value.float().tolist() for name, value in weights.items()
    }


def save_npz(weights: dict[str, torch.Tensor], path: Path) -> None:
    np.savez(path, **{name: value.numpy() for name, value in weights.items()})


def same_npz(path: Path, weights: dict[str, torch.Tensor]) -> None:
    with np.load(path) as loaded:
        assert loaded.files == list(weights)
        assert all(np.array_equal(loaded[name], weights[name].numpy()) for name in weights)


def save_hdf5(weights: dict[str, torch.Tensor], path: Path) -> None:
    with h5py.File(path, "w") as file:
        for name, value in weights.items():
            file[name] = value.numpy()


def same_hdf5(path: Path, weights: dict[str, torch.Tensor]) -> None:
    with h5py.File(path, locking=False) as file:
        assert all(np.array_equal(file[name][:], weights[name].numpy()) for name in weights)


def save_gguf(weights: dict[str, torch.Tensor], path: Path) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in weights.items():
        writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def same_gguf(path: Path, weights: dict[str, torch.Tensor]) -> None:
    found = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    assert all(np.array_equal(found[name], weights[name].numpy()) for name in weights)


Format = tuple[str, Callable[..., None], Callable[..., None]]
SAFETENSORS: Format = ("m.safetensors", save_file, same_safetensors)
TORCH: Format = ("m.pt", torch.save, same_torch)
NPZ: Format = ("m.npz", save_npz, same_npz)
HDF5: Format = ("m.h5", save_hdf5, same_hdf5)
GGUF: Format = ("m.gguf", save_gguf, same_gguf)
ONNX: Format = ("m.onnx", save_onnx, same_onnx)
WAYS = {
    "safetensors, small tensor first": (SAFETENSORS, SMALL), "safetensors, large tensor first": (SAFETENSORS, LARGE),
    "safetensors, stamped before": (SAFETENSORS, SMALL), "torch.save": (TORCH, SMALL), "torch.save, stamped before": (TORCH, SMALL),
    "torch.save, many tensors": (TORCH, MANY), "ONNX": (ONNX, SMALL), "ONNX, stamped before": (ONNX, SMALL),
    "npz": (NPZ, SMALL), "npz, stamped before": (NPZ, SMALL), "npz, many arrays": (NPZ, MANY), "HDF5": (HDF5, SMALL),
    "HDF5, stamped before": (HDF5, SMALL), "GGUF": (GGUF, SMALL), "GGUF, stamped before": (GGUF, SMALL),
}  # fmt: skip

LONG = [f"again: {way}" for way in WAYS]  # the same, for the table of `make faults`

# Forks a child for each call that changes something on the disk, kills it before that call or in the middle of it, and prints how many there were.
KILLER = """
    import io, os, shutil, signal, sys
    from pathlib import Path
    import fanfold
    from fanfold.provenance import replace

    def child(path, last, middle):
        calls = 0
        def die(when, half=lambda: None):
            nonlocal calls
            calls += 1
            if calls == last:
                if middle:
                    half()
                os.kill(os.getpid(), signal.SIGKILL)
        def deadly(owner, name, half=None):
            plain = getattr(owner, name)
            def call(*given, **named):
                die(name, (lambda: half(plain, given)) if half else lambda: None)
                return plain(*given, **named)
            setattr(owner, name, call)
        deadly(os, "pwrite", lambda plain, given: plain(given[0], bytes(given[1])[: len(given[1]) // 2], given[2]))
        deadly(os, "copy_file_range", lambda plain, given: plain(given[0], given[1], 1000, *given[3:]))
        for owner, name in ((os, "ftruncate"), (os, "fsync"), (Path, "replace"), (Path, "unlink")):
            deadly(owner, name)
        def watched(file):
            def write(data):
                die("write", lambda: (plain_write(bytes(data)[: len(data) // 2]), file.flush()))
                return plain_write(data)
            plain_write = file.write
            class Watched:
                def __getattr__(self, name):
                    return write if name == "write" else getattr(file, name)
                def __enter__(self):
                    file.__enter__()
                    return self
                def __exit__(self, *args):
                    return file.__exit__(*args)
            return Watched()
        plain_open, plain_fdopen = Path.open, os.fdopen
        Path.open = lambda self, mode="r", *args, **named: watched(f) if "+" in mode and (f := plain_open(self, mode, *args, **named)) else plain_open(self, mode, *args, **named)
        os.fdopen = lambda fd, mode="r", *args, **named: watched(plain_fdopen(fd, mode, *args, **named)) if "w" in mode else plain_fdopen(fd, mode, *args, **named)
        fanfold.stamp(path, filler="x" * 9000, note="killed")
        os._exit(0)

    file, folder = Path(sys.argv[1]), Path(sys.argv[2])
    for middle in (False, True):
        last = 0
        while True:
            last += 1
            place = folder / f"{last}-{int(middle)}"
            place.mkdir(parents=True)
            shutil.copy2(file, place / file.name)
            pid = os.fork()
            if not pid:
                child(place / file.name, last, middle)
            if os.waitpid(pid, 0)[1] == 0:
                break
        print(last - 1)
"""


@pytest.fixture
def run(tmp_path):
    with training(tmp_path) as run:
        yield run


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.faults if way in LONG else ()) for way in [*WAYS, *LONG]])
def test_a_kill_at_any_moment_leaves_a_file_that_loads(way, tmp_path):
    way = way.removeprefix("again: ")
    (name, save, same), weights = WAYS[way]
    model = tmp_path / name
    save(weights, model)
    if "stamped before" in way:
        fanfold.stamp(model, filler="y" * 2000)
    killer = [sys.executable, "-c", textwrap.dedent(KILLER), str(model), str(tmp_path / "killed")]
    done = subprocess.run(killer, capture_output=True, text=True, timeout=240, check=True)
    stages = [int(line) for line in done.stdout.split()]
    assert min(stages) >= (1 if name in ("m.pt", "m.npz", "m.h5") and weights is SMALL else 4), stages
    torn, lost, killed = 0, 0, list((tmp_path / "killed").iterdir())
    for place in killed:
        try:
            same(place / name, weights)
        except Exception:
            lost += 1
    fault_table.record(
        "a stamp killed at each write to a model file (points: files that load)", times=len(killed), points=len(killed), lost=lost
    )
    for place in killed:
        file = place / name
        same(file, weights)
        torn += file.read_bytes() != model.read_bytes() or len(list(place.iterdir())) > 1
        fanfold.stamp(file, note="again")
        assert fanfold.inspect(file)["stamp"]["extra"]["note"] == "again"
        same(file, weights)
    assert torn  # otherwise the kills struck nothing that matters


def test_an_archive_loads_wherever_the_write_behind_it_is_cut(tmp_path):
    path = tmp_path / "m.pt"
    torch.save(SMALL, path)
    before = path.read_bytes()
    fanfold.stamp(path, filler="x" * 40_000)
    after = path.read_bytes()
    assert after.startswith(before) and len(after) > len(before) + 40_000
    for cut in range(len(before), len(after), 997):
        path.write_bytes(after[:cut])
        same_torch(path, SMALL)


def test_what_a_killed_stamp_left_beside_the_file_is_no_model(tmp_path, run):
    model = tmp_path / "m.safetensors"
    save_file(SMALL, model)
    script = """
        import os, signal, sys, fanfold
        os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        fanfold.stamp(sys.argv[1])
    """
    for _ in range(2):
        killed = subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(model)], timeout=60, check=False)
        assert killed.returncode == -signal.SIGKILL
        (left,) = tmp_path.glob(".m.safetensors.*.stamping")  # the second one has removed that of the first
        assert left.stat().st_size > model.stat().st_size
    kept = [".m.safetensors.00000000-7.stamping", ".other.safetensors.00000000-7.stamping"]  # another node's, another file's
    for name in (*kept, ".m.safetensors.00000000-8.stamping"):
        (tmp_path / name).write_bytes(b"half")
    os.utime(tmp_path / ".m.safetensors.00000000-8.stamping", (0, 0))
    fanfold.stamp(model)
    same_safetensors(model, SMALL)
    assert sorted(item.name for item in tmp_path.glob(".*")) == kept
    for name in kept:
        (tmp_path / name).unlink()
    assert sorted(item.name for item in tmp_path.iterdir()) == ["m.safetensors", "runs"]


@pytest.mark.parametrize(
    "weights",
    [
        {"a": torch.arange(400.0), "b": torch.arange(50_001, dtype=torch.float16)},  # the end is no whole word
        {"a": torch.zeros(0), "b": torch.arange(401.0), "c": torch.arange(50_001.0), "d": torch.zeros(0)},
        {"a": torch.zeros(3, dtype=torch.bool), "b": torch.zeros(5, dtype=torch.uint8)},
        {"a": torch.zeros(0)},
    ],
    ids=["unaligned", "empty-tensors", "tiny", "nothing"],
)
def test_odd_layouts_load_as_before(weights, tmp_path, run):
    model = tmp_path / "m.safetensors"
    save_file(weights, model, metadata={"format": "pt", "mine": "kept"})
    for step in (1, 2):
        fanfold.stamp(model, step=step, filler="x" * 900 * step)
        same_safetensors(model, weights)
        found = fanfold.inspect(model)
        assert (found["stamp"]["run"]["step"], found["facts"]["metadata"]["mine"]) == (step, "kept")


def test_a_child_forked_meanwhile_does_not_keep_the_lock(tmp_path, run, monkeypatch):
    model = tmp_path / "m.safetensors"
    save_file(SMALL, model)
    copy, children = replace.copy_rest, []

    def forking(*given):
        children.append(os.fork())
        if not children[0]:
            time.sleep(60)
            os._exit(0)
        copy(*given)

    monkeypatch.setattr("fanfold.provenance.safetensors.copy_rest", forking)
    fanfold.stamp(model)
    monkeypatch.undo()
    monkeypatch.setattr("fanfold.provenance.replace.WAIT_SECONDS", 5.0)
    try:
        fanfold.stamp(model, note="again")
        same_safetensors(model, SMALL)
        import fcntl

        with model.open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            monkeypatch.setattr("fanfold.provenance.replace.WAIT_SECONDS", 0.1)
            with pytest.raises(FanfoldError, match="another process has been stamping it"):
                fanfold.stamp(model)
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)


def test_ctrl_c_in_the_middle_leaves_the_file_as_it_was(tmp_path, run, monkeypatch):
    model = tmp_path / "m.safetensors"
    save_file(SMALL, model)
    before = model.read_bytes()
    monkeypatch.setattr("fanfold.provenance.safetensors.copy_rest", lambda *_: signal.default_int_handler(signal.SIGINT, None))
    with pytest.raises(KeyboardInterrupt):
        fanfold.stamp(model)
    assert model.read_bytes() == before
    assert sorted(item.name for item in tmp_path.iterdir()) == ["m.safetensors", "runs"]


def test_where_the_kernel_cannot_copy_the_file_is_stamped_all_the_same(tmp_path, run, monkeypatch):
    model = tmp_path / "m.safetensors"
    save_file(LARGE, model)
    calls = []

    def refuse(source: int, target: int, count: int, at: int) -> int:
        calls.append(at)
        if len(calls) > 1:
            raise OSError("another filesystem")
        return real(source, target, 1000, at)

    real = os.copy_file_range
    monkeypatch.setattr(os, "copy_file_range", refuse)
    fanfold.stamp(model)
    monkeypatch.undo()
    assert len(calls) == 2
    same_safetensors(model, LARGE)
    assert fanfold.inspect(model)["stamp"]["run"]["id"] == run.id


@pytest.mark.parametrize("weights", [SMALL, LARGE], ids=["small first", "large first"])
def test_a_model_that_is_loaded_keeps_its_weights(weights, tmp_path, run):
    path = tmp_path / "m.safetensors"
    save_file(weights, path)
    here = load_file(path)  # a view of the file, not a copy
    code = """
        import sys, torch
        from safetensors.torch import load_file
        loaded = load_file(sys.argv[1])
        print("loaded", flush=True)
        input()
        print({name: float(value.float().sum()) for name, value in loaded.items()})
    """
    there = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert there.stdout.readline() == "loaded\n"
    for step in (1, 2):
        fanfold.stamp(path, step=step, filler="x" * 900 * step)
    assert all(torch.equal(here[name], weights[name]) for name in here)
    seen, _ = there.communicate("\n", timeout=60)
    assert seen.strip() == str({name: float(weights[name].float().sum()) for name in here})
    same_safetensors(path, weights)
    assert fanfold.inspect(path)["stamp"]["run"]["step"] == 2


@pytest.mark.parametrize(
    "offsets",
    [[[0, 400_000], [0, 4800]], [[0, 4800], [4900, 400_000]], [[-8, 4800], [4800, 400_000]], [[0, 4800, 9], [4800, 400_000]], ["ab", [0, 8]],
     [["0", "4800"], [4800, 400_000]], [[0, 4800.0], [4800, 400_000]]],
    ids=["overlapping", "holes", "negative", "three", "text", "numbers as text", "fractions"],
)  # fmt: skip
def test_a_header_that_lies_is_not_carried_out(offsets, tmp_path, run):
    head = json.dumps({f"t{i}": {"dtype": "U8", "shape": [1], "data_offsets": ends} for i, ends in enumerate(offsets)}).encode()
    model = tmp_path / "m.safetensors"
    model.write_bytes(len(head).to_bytes(8, "little") + head + bytes(range(250)) * 1600)
    try:
        fanfold.stamp(model)
    except FanfoldError as error:
        assert "cannot be read" in str(error)
    assert model.read_bytes().endswith(bytes(range(250)) * 1600)
