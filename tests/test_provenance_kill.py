"""A stamp that is killed at any moment leaves a file that loads, or one that the next stamp puts right; never one that is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fanfold
from fanfold.errors import FanfoldError
from fanfold.provenance import undo
from fanfold.provenance.look import undo_note
from stamped_models import training

SMALL = {"a.bias": torch.arange(1200.0), "b.weight": torch.arange(50_000.0), "c.weight": torch.arange(1000, dtype=torch.int16)}
LARGE = {"a.weight": torch.arange(50_000.0), "b.bias": torch.arange(1200.0)}
WAYS = {"carried": SMALL, "carried, long on the disk": SMALL, "inserted": LARGE, "filled": SMALL}

# Forks a child for each call that changes something on the disk, kills it before that call or in the middle of it, and says how many there were.
KILLER = """
    import os, shutil, signal, sys
    from pathlib import Path
    import fanfold

    def child(path, last, middle):
        calls = 0
        def deadly(owner, name):
            plain = getattr(owner, name)
            def call(*given, **named):
                nonlocal calls
                calls += 1
                if calls == last:
                    if middle and name == "pwrite":
                        plain(given[0], bytes(given[1])[: len(given[1]) // 2], given[2])
                    os.kill(os.getpid(), signal.SIGKILL)
                return plain(*given, **named)
            setattr(owner, name, call)
        for owner, name in ((os, "pwrite"), (os, "ftruncate"), (os, "fsync"), (Path, "replace"), (Path, "unlink")):
            deadly(owner, name)
        fanfold.stamp(path, filler="x" * 1000, note="killed")
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


def same(path, weights):
    loaded = load_file(path)
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    with safe_open(path, "pt") as file:
        assert all(torch.equal(file.get_tensor(name), weights[name]) for name in weights)


@pytest.mark.parametrize("way", WAYS)
def test_a_kill_at_any_moment_loses_no_weight(way, tmp_path):
    model = tmp_path / "m.safetensors"
    save_file(WAYS[way], model)
    if way == "filled":  # there is room of an earlier stamp
        fanfold.stamp(model, filler="y" * 2000)
    if way == "carried, long on the disk":  # each step waits for the one before
        os.utime(model, (time.time() - 3600,) * 2)
    killer = [sys.executable, "-c", textwrap.dedent(KILLER), str(model), str(tmp_path / "killed")]
    done = subprocess.run(killer, capture_output=True, text=True, timeout=240, check=True)
    stages = [int(line) for line in done.stdout.split()]
    assert min(stages) >= {"carried": 6, "carried, long on the disk": 11, "inserted": 8, "filled": 5}[way]
    half = 0
    for place in (tmp_path / "killed").iterdir():
        file = place / model.name
        try:
            same(file, WAYS[way])
        except Exception:
            half += 1
            with pytest.raises(FanfoldError, match=r"a kill cut a stamp short.*fanfold\.stamp"):
                fanfold.inspect(file)
        fanfold.stamp(file, note="again")
        assert fanfold.inspect(file)["stamp"]["extra"]["note"] == "again"
        same(file, WAYS[way])
        assert not undo_note(file).exists()
    assert half  # else the kills struck nothing that matters


def test_small_tensors_in_front_make_way_and_nothing_else_moves(tmp_path, run):
    model = tmp_path / "m.safetensors"
    save_file(SMALL, model)
    size, inode = model.stat().st_size, model.stat().st_ino
    fanfold.stamp(model)
    assert (model.stat().st_ino, model.stat().st_size) == (inode, size + SMALL["a.bias"].nbytes)
    assert fanfold.inspect(model)["stamp"]["run"]["id"] == run.id
    same(model, SMALL)
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
        same(model, weights)
        found = fanfold.inspect(model)
        assert (found["stamp"]["run"]["step"], found["facts"]["metadata"]["mine"]) == (step, "kept")


def test_a_note_beside_a_file_that_was_saved_anew_is_only_taken_away(tmp_path, run):
    model = tmp_path / "m.safetensors"
    save_file(LARGE, model)
    undo_note(model).write_bytes(b'{"size": 10, "start": 4}\nxxxx')
    assert fanfold.inspect(model)["stamp"] is None  # it is whole, so it can be read
    fanfold.stamp(model)
    same(model, LARGE)
    assert not undo_note(model).exists()


def test_a_note_that_says_nothing_is_told_of(tmp_path, run):
    model = tmp_path / "m.safetensors"
    save_file(SMALL, model)
    os.truncate(model, model.stat().st_size - 8)
    undo_note(model).write_bytes(b"rubbish")
    with pytest.raises(FanfoldError, match="cannot be put right"):
        fanfold.stamp(model)
    assert undo_note(model).exists()


def half_inserted(model):
    """Leave a file as a kill does right after the filesystem made room in front of it."""
    save_file(LARGE, model)
    code = """
        import os, signal, sys, fanfold
        from fanfold.provenance import safetensors
        safetensors._put = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        fanfold.stamp(sys.argv[1])
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(model)], timeout=60).returncode == -signal.SIGKILL
    assert model.read_bytes()[:4096] == bytes(4096)


def test_what_a_kill_left_is_mended_on_another_filesystem_too(tmp_path, run, monkeypatch):
    half_inserted(tmp_path / "m.safetensors")
    monkeypatch.setattr(undo, "move", lambda *_: False)  # as after a copy to one that cannot take a block away
    fanfold.stamp(tmp_path / "m.safetensors")
    same(tmp_path / "m.safetensors", LARGE)
    assert not undo_note(tmp_path / "m.safetensors").exists()


def test_a_file_that_lost_its_end_as_well_is_not_called_mended(tmp_path, run):
    model = tmp_path / "m.safetensors"
    half_inserted(model)
    os.truncate(model, 100_000)
    before = model.read_bytes()
    with pytest.raises(FanfoldError, match="has 100000 bytes, which no stamp leaves"):
        fanfold.stamp(model)
    assert (model.read_bytes(), undo_note(model).exists()) == (before, True)


def test_a_child_forked_meanwhile_does_not_keep_the_lock(tmp_path, run, monkeypatch):
    model = tmp_path / "m.safetensors"
    save_file(SMALL, model)
    copy, children = undo.copy, []

    def forking(*given):
        children.append(os.fork())
        if not children[0]:
            time.sleep(60)
            os._exit(0)
        copy(*given)

    monkeypatch.setattr(undo, "copy", forking)
    fanfold.stamp(model)
    monkeypatch.undo()
    monkeypatch.setattr("fanfold.provenance.anew.WAIT_SECONDS", 5.0)
    try:
        fanfold.stamp(model, note="again")
        same(model, SMALL)
        import fcntl

        with model.open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            monkeypatch.setattr("fanfold.provenance.anew.WAIT_SECONDS", 0.1)
            with pytest.raises(FanfoldError, match="another process has been stamping it"):
                fanfold.stamp(model)
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)


def test_ctrl_c_in_the_middle_leaves_the_file_as_it_was(tmp_path, run, monkeypatch):
    model = tmp_path / "m.safetensors"
    save_file(SMALL, model)
    before = model.read_bytes()
    monkeypatch.setattr(undo, "copy", lambda *_: signal.default_int_handler(signal.SIGINT, None))
    with pytest.raises(KeyboardInterrupt):
        fanfold.stamp(model)
    monkeypatch.undo()
    assert model.read_bytes() == before
    assert not undo_note(model).exists()


@pytest.mark.parametrize("way", ["carried", "inserted"])
def test_a_model_that_is_loaded_keeps_its_weights(way, tmp_path, run):
    path = tmp_path / "m.safetensors"
    save_file(WAYS[way], path)
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
    assert all(torch.equal(here[name], WAYS[way][name]) for name in here)
    seen, _ = there.communicate("\n", timeout=60)
    assert seen.strip() == str({name: float(WAYS[way][name].float().sum()) for name in here})
    same(path, WAYS[way])
    assert fanfold.inspect(path)["stamp"]["run"]["step"] == 2
    del here
    inode = path.stat().st_ino
    fanfold.stamp(path, filler="x" * 20_000)
    assert path.stat().st_ino == inode  # nobody looks at it any more, so in place


def test_who_opens_a_file_that_is_being_stamped_waits_for_it(tmp_path, run, monkeypatch):
    path = tmp_path / "m.safetensors"
    save_file(SMALL, path)
    code = """
        import sys
        from safetensors.torch import load_file
        print("ready", flush=True)
        input()
        print(len(load_file(sys.argv[1])))
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert child.stdout.readline() == "ready\n"
    copy = undo.copy

    def slow(*given):
        print(file=child.stdin, flush=True)
        time.sleep(1)
        assert child.poll() is None
        copy(*given)

    monkeypatch.setattr(undo, "copy", slow)
    fanfold.stamp(path)
    assert child.communicate(timeout=60)[0] == "3\n"


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
    assert not undo_note(model).exists()
