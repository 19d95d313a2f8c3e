"""Stamps: written into real files by hand and by every saver, read back without torch, and no loader notices."""

from __future__ import annotations

import functools
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import safetensors.numpy
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file  # by name, before any run: the hooks must reach it all the same
from torch import save as torch_save

import fanfold
from fanfold.errors import FanfoldError
from fanfold.provenance import automatic, zips
from fanfold.provenance import safetensors as st_format
from fanfold.provenance.record import NAME

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 4)


def same_weights(loaded: Any) -> bool:
    return all(torch.equal(value, model().state_dict()[name]) for name, value in loaded.items()) and len(loaded) == 2


def export() -> Any:
    return torch.export.export(model(), (torch.ones(2, 3),))


def onnx_model() -> onnx.ModelProto:
    tensor = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "g", [tensor("x", 1, [2])], [tensor("y", 1, [2])])
    return onnx.helper.make_model(graph, producer_name="test")


def save_jit(path: Path) -> None:
    torch.jit.save(torch.jit.script(model()), str(path))


def check_jit(path: Path) -> None:
    assert torch.equal(torch.jit.load(str(path))(torch.ones(2, 3)), model()(torch.ones(2, 3)))


def check_pt(path: Path) -> None:
    assert same_weights(torch.load(path, weights_only=True))
    assert same_weights(torch.load(path, weights_only=True, mmap=True))
    assert zipfile.ZipFile(path).testzip() is None


def check_safetensors(path: Path) -> None:
    assert same_weights(load_file(path))
    with safe_open(path, "np") as file:
        assert np.array_equal(file.get_tensor("weight"), model().weight.detach().numpy())


def check_pt2(path: Path) -> None:
    assert torch.equal(torch.export.load(path).module()(torch.ones(2, 3)), model()(torch.ones(2, 3)))


def check_onnx(path: Path) -> None:
    onnx.checker.check_model(str(path), full_check=True)
    loaded = onnx.load(str(path))
    assert [node.op_type for node in loaded.graph.node] == ["Relu"]
    assert len(loaded.metadata_props) <= 1


FORMATS = {
    "torch.save": ("m.pt", lambda path: torch_save(model().state_dict(), path), check_pt),
    "TorchScript": ("m.ts", save_jit, check_jit),
    "torch.export": ("m.pt2", lambda path: torch.export.save(export(), path), check_pt2),
    "safetensors": ("m.safetensors", lambda path: save_file(model().state_dict(), path, {"note": "mine"}), check_safetensors),
    "ONNX": ("m.onnx", lambda path: onnx.save(onnx_model(), str(path)), check_onnx),
}


@pytest.fixture
def run(tmp_path):
    with fanfold.init(
        "p", dir=tmp_path / "runs", quiet=True, system=False, config={"lr": 0.1, "api_key": "sk-very-secret"}
    ) as run:
        run.log({"loss": 1.0}, step=41)
        yield run


@pytest.mark.parametrize("name", FORMATS)
def test_a_stamped_file_knows_its_run_and_loads_as_before(name, run, tmp_path):
    file, save, check = FORMATS[name]
    path = tmp_path / file
    save(path)
    assert fanfold.inspect(path)["stamp"] is None
    told = fanfold.stamp(path, data="wiki-2024", note="first", hf_token="hf_abcdefghijklmnopqrstuvwxyz012345")
    found = fanfold.inspect(path)
    assert (found["format"], found["size"]) == (name, path.stat().st_size)
    assert found["stamp"] == json.loads(json.dumps(told))
    assert found["stamp"]["run"] | {"config": None} == {
        "id": run.id, "project": "p", "name": run.name, "attempt": 1, "rank": 0, "step": 41, "config": None,
    }  # fmt: skip
    assert (found["stamp"]["data"], found["stamp"]["extra"]["note"]) == ("wiki-2024", "first")
    assert found["stamp"]["packages"]["torch"] == torch.__version__
    assert b"sk-very-secret" not in path.read_bytes()
    assert b"hf_abcdefgh" not in path.read_bytes()
    check(path)


@pytest.mark.parametrize("name", FORMATS)
def test_a_second_stamp_replaces_the_first(name, run, tmp_path):
    file, save, check = FORMATS[name]
    path = tmp_path / file
    save(path)
    for step in (1, 2, 3):
        fanfold.stamp(path, step=step, filler="x" * 3000 * step)
        assert fanfold.inspect(path)["stamp"]["run"]["step"] == step
        check(path)


@pytest.mark.parametrize("name", FORMATS)
def test_everything_saved_while_a_run_stamps_is_stamped_and_listed(name, tmp_path):
    file, save, check = FORMATS[name]
    before, during, after = (tmp_path / f"{when}-{file}" for when in ("before", "during", "after"))
    save(before)
    with fanfold.init("p", dir=tmp_path / "runs", quiet=True, system=False, stamp=True) as run:
        run.log({"loss": 1.0}, step=7)
        save(during)
        check(during)
    save(after)
    stamps = [fanfold.inspect(path)["stamp"] for path in (before, during, after)]
    assert [stamp and stamp["run"]["id"] for stamp in stamps] == [None, run.id, None]
    (saved,) = fanfold.open(run.id, dir=tmp_path / "runs").files
    assert (saved["path"], saved["size"], saved["s"]) == (str(during), during.stat().st_size, 7)
    assert fanfold.inspect(saved["path"])["stamp"]["run"]["step"] == 7


def test_a_run_turned_on_by_the_environment_stamps(tmp_path, monkeypatch):
    monkeypatch.setenv("FANFOLD_STAMP", "1")
    with fanfold.init("p", dir=tmp_path / "runs", quiet=True, system=False) as run:
        safetensors.numpy.save_file({"a": np.ones(3)}, tmp_path / "n.safetensors")
    assert fanfold.inspect(tmp_path / "n.safetensors")["stamp"]["run"]["id"] == run.id


def test_the_callers_own_extra_file_wins(tmp_path):
    with fanfold.init("p", dir=tmp_path / "runs", quiet=True, system=False, stamp=True):
        torch.jit.save(torch.jit.script(model()), str(tmp_path / "m.pt"), _extra_files={NAME: '{"mine": 1}'})
    assert fanfold.inspect(tmp_path / "m.pt")["stamp"] == {"mine": 1}


def test_a_model_made_from_a_stamped_one_names_its_parent(tmp_path):
    for run_id, source, target in (("first", None, "base"), ("second", "base", "tuned")):
        with fanfold.init("p", id=run_id, dir=tmp_path / "runs", quiet=True, system=False, stamp=True) as run:
            run.log({"x": 1.0}, step=5)
            metadata = None
            if source:
                with safe_open(tmp_path / f"{source}.safetensors", "pt") as file:
                    metadata = file.metadata()
            save_file(model().state_dict(), tmp_path / f"{target}.safetensors", metadata=metadata)
            onnx.save(onnx.load(tmp_path / f"{source}.onnx") if source else onnx_model(), tmp_path / f"{target}.onnx")
    for kind in ("safetensors", "onnx"):
        stamp = fanfold.inspect(tmp_path / f"tuned.{kind}")["stamp"]
        assert (stamp["run"]["id"], stamp["parent"]["id"], stamp["parent"]["step"]) == ("second", "first", 5), kind
        assert "parent" not in fanfold.inspect(tmp_path / f"base.{kind}")["stamp"]


def test_buffers_and_the_parts_of_a_sharded_checkpoint_are_left_alone(tmp_path):
    import torch.distributed.checkpoint as dcp

    plain = io.BytesIO()
    torch.save(model().state_dict(), plain)
    with fanfold.init("p", dir=tmp_path / "runs", quiet=True, system=False, stamp=True) as run:
        buffer = io.BytesIO()
        torch.save(model().state_dict(), buffer)
        dcp.save(model().state_dict(), checkpoint_id=tmp_path / "sharded", no_dist=True)
    assert len(buffer.getvalue()) == len(plain.getvalue())
    found = fanfold.inspect(tmp_path / "sharded")
    assert (found["format"], found["stamp"]["run"]["id"]) == ("DCP checkpoint", run.id)
    assert not any(NAME.encode() in part.read_bytes() for part in (tmp_path / "sharded").glob("*.distcp"))
    loaded = torch.nn.Linear(3, 4).state_dict()
    dcp.load(loaded, checkpoint_id=tmp_path / "sharded", no_dist=True)
    assert same_weights(loaded)


def test_a_file_object_is_stamped_too(tmp_path):
    with fanfold.init("p", dir=tmp_path / "runs", quiet=True, system=False, stamp=True) as run:
        with (tmp_path / "m.pt").open("wb") as file:
            torch.save(model().state_dict(), file)
    assert fanfold.inspect(tmp_path / "m.pt")["stamp"]["run"]["id"] == run.id


def test_a_transformers_checkpoint_is_stamped_through_and_through(tmp_path, run):
    from transformers import BertConfig, BertModel

    tiny = BertModel(BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8))
    tiny.save_pretrained(tmp_path / "checkpoint")
    fanfold.stamp(tmp_path / "checkpoint")
    found = fanfold.inspect(tmp_path / "checkpoint")
    assert (found["format"], found["stamp"]["run"]["id"]) == ("Transformers model", run.id)
    assert [entry["stamp"]["run"]["id"] for entry in found["files"]] == [run.id]
    again = BertModel.from_pretrained(tmp_path / "checkpoint")
    assert all(torch.equal(a, b) for a, b in zip(tiny.state_dict().values(), again.state_dict().values(), strict=True))


def test_hooks_come_off_in_any_order_with_others(tmp_path):
    originals = {(hook.module, hook.path): _named(hook) for hook in automatic.HOOKS if hook.module in sys.modules}
    first = fanfold.init("p", dir=tmp_path / "runs", quiet=True, system=False, stamp=True)
    second = fanfold.init("p", dir=tmp_path / "runs", quiet=True, system=False, stamp=True)
    wrapped = safetensors.torch.serialize_file
    safetensors.torch.serialize_file = functools.partial(wrapped)  # somebody else's, on top of ours
    theirs = safetensors.torch.serialize_file
    save_file(model().state_dict(), tmp_path / "two.safetensors")
    first.finish()
    save_file(model().state_dict(), tmp_path / "one.safetensors")
    second.finish()
    save_file(model().state_dict(), tmp_path / "none.safetensors")
    stamps = [fanfold.inspect(tmp_path / f"{name}.safetensors")["stamp"] for name in ("two", "one", "none")]
    assert [stamp and stamp["run"]["id"] for stamp in stamps] == [second.id, second.id, None]
    assert safetensors.torch.serialize_file is theirs
    safetensors.torch.serialize_file = originals["safetensors.torch", "serialize_file"]
    assert {
        (hook.module, hook.path): _named(hook) for hook in automatic.HOOKS if (hook.module, hook.path) in originals
    } == originals
    assert automatic._later not in sys.meta_path


def _named(hook: automatic.Hook) -> Any:
    found: Any = sys.modules[hook.module]
    for part in hook.path.split("."):
        found = getattr(found, part)
    return found


def test_libraries_imported_after_init_are_hooked_and_inspect_imports_none_of_them(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent("""
            import sys, fanfold
            run = fanfold.init("p", dir="runs", quiet=True, system=False, stamp=True)
            import numpy, safetensors.numpy
            safetensors.numpy.save_file({"a": numpy.ones(3)}, "late.safetensors")
            run.finish()
            print(run.id)
        """)], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)  # fmt: skip
    looked = subprocess.run(
        [sys.executable, "-c", textwrap.dedent("""
            import sys, fanfold
            print(fanfold.inspect("late.safetensors")["stamp"]["run"]["id"])
            print([name for name in ("torch", "numpy", "safetensors", "onnx") if name in sys.modules])
        """)], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)  # fmt: skip
    assert looked.stdout.split("\n")[:2] == [done.stdout.strip(), "[]"]


def test_a_format_without_room_gets_a_file_beside_it(tmp_path, run, caplog):
    torch.save(model().state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    fanfold.stamp(tmp_path / "old.pt")
    assert fanfold.inspect(tmp_path / "old.pt")["stamp"]["run"]["id"] == run.id
    assert same_weights(torch.load(tmp_path / "old.pt", weights_only=True))
    assert "no room for a stamp" in caplog.text


def test_without_a_run_the_stamp_tells_of_code_and_environment(tmp_path, monkeypatch):
    monkeypatch.setattr("fanfold._api._current", None)
    torch.save({}, tmp_path / "m.pt")
    stamp = fanfold.stamp(tmp_path / "m.pt")
    assert "run" not in stamp
    assert stamp["packages"]["python"].startswith("3.")
    with pytest.raises(FanfoldError, match="does not exist"):
        fanfold.stamp(tmp_path / "missing.pt")


def test_stamping_moves_no_weight_where_the_filesystem_can_insert(tmp_path, run, monkeypatch):
    save_file({"a": torch.arange(100_000.0)}, tmp_path / "m.safetensors")
    inode = (tmp_path / "m.safetensors").stat().st_ino
    fanfold.stamp(tmp_path / "m.safetensors")
    assert (tmp_path / "m.safetensors").stat().st_ino == inode
    monkeypatch.setattr(st_format, "_move", lambda *_: False)  # another filesystem: the file is written anew beside itself
    save_file({"a": torch.arange(100_000.0)}, tmp_path / "n.safetensors")
    inode = (tmp_path / "n.safetensors").stat().st_ino
    fanfold.stamp(tmp_path / "n.safetensors")
    assert (tmp_path / "n.safetensors").stat().st_ino != inode
    for name in ("m", "n"):
        assert torch.equal(load_file(tmp_path / f"{name}.safetensors")["a"], torch.arange(100_000.0))
        assert fanfold.inspect(tmp_path / f"{name}.safetensors")["stamp"]["run"]["id"] == run.id
    assert sorted(item.name for item in tmp_path.iterdir()) == ["m.safetensors", "n.safetensors", "runs"]


def test_a_kill_before_the_one_write_leaves_an_archive_as_it_was(tmp_path, run, monkeypatch):
    torch.save(model().state_dict(), tmp_path / "m.pt")
    before = (tmp_path / "m.pt").read_bytes()
    written = []
    monkeypatch.setattr(zips._Tail, "write", lambda self, data: written.append(data) or (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        fanfold.stamp(tmp_path / "m.pt")
    assert (tmp_path / "m.pt").read_bytes() == before
    monkeypatch.undo()
    fanfold.stamp(tmp_path / "m.pt")
    assert (tmp_path / "m.pt").read_bytes()[: len(before)] == before  # the old end stays in front of the new one


# Hostile files


def zip_bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m/data.pkl", b"")
        archive.writestr(f"m/extra/{NAME}", b" " * 300_000_000)


def many_members(path: Path) -> None:
    entry = struct.Struct("<4s6H3I5H2I").pack(b"PK\x01\x02", 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"m"
    count = 2_000_000
    end = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(entry) * count, 4)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, 4 + len(entry) * count, 1)
    with path.open("wb") as file:
        file.write(b"PK\x03\x04")
        for _ in range(count // 10_000):
            file.write(entry * 10_000)
        file.write(end + locator + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0))


def giant_header(path: Path) -> None:
    with path.open("wb") as file:
        file.write((1 << 40).to_bytes(8, "little") + b"{")
        file.truncate((1 << 40) + 8)  # a sparse file that is as long as it says


def deep_header(path: Path) -> None:
    head = b'{"a":' + b"[" * 1_000_000
    path.write_bytes(len(head).to_bytes(8, "little") + head)


HOSTILE = {"bomb.pt": zip_bomb, "members.pt": many_members, "giant.safetensors": giant_header, "deep.safetensors": deep_header}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_costs_little_memory_and_gives_a_clear_answer(name, tmp_path):
    HOSTILE[name](tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent("""
            import resource, sys, fanfold
            from fanfold.provenance import inspect
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            try:
                print(inspect(sys.argv[1])["stamp"])
            except fanfold.FanfoldError as error:
                print("refused:", error)
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000)
        """), str(tmp_path / name)], capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    answer, little = done.stdout.rsplit("\n", 2)[:2]
    assert little == "True", done.stdout + done.stderr
    assert answer == "None" or answer.startswith("refused:")


@pytest.mark.parametrize("name", FORMATS)
def test_damage_anywhere_gives_an_answer_or_a_clear_error(name, tmp_path):
    file, save, _ = FORMATS[name]
    path = tmp_path / file
    save(path)
    fanfold.stamp(path)
    whole = path.read_bytes()
    for cut in range(0, len(whole), 1 + len(whole) // 60):
        path.write_bytes(whole[:cut])
        answer_or_error(path)
    for place in range(0, len(whole), 1 + len(whole) // 120):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        answer_or_error(path)


def answer_or_error(path: Path) -> None:
    try:
        assert set(fanfold.inspect(path)) == {"path", "format", "size", "stamp", "facts"}
    except FanfoldError as error:
        assert str(path) in str(error)


def test_what_is_no_model_file_is_said(tmp_path):
    (tmp_path / "text").write_text("hello")
    assert fanfold.inspect(tmp_path / "text")["format"] == "unknown"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FanfoldError, match="neither a file nor a directory"):
        fanfold.inspect(tmp_path / "pipe")
    with pytest.raises(FanfoldError, match="cannot be read"):
        fanfold.inspect(tmp_path / "missing")


# The command


def command(*words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "fanfold", "inspect", *words], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_the_command_finds_the_run_of_a_file(tmp_path, run):
    save_file(model().state_dict(), tmp_path / "m.safetensors")
    code, text = command(str(tmp_path / "m.safetensors"))
    assert code == 1
    assert "no stamp" in text
    fanfold.stamp(tmp_path / "m.safetensors")
    code, text = command(str(tmp_path / "m.safetensors"), "--dir", str(tmp_path / "runs"))
    assert code == 0
    assert f"{run.name} ({run.id}) of p, step 41" in text
    assert "16 parameters in 2 tensors (F32 x 2)" in text
    assert f"fanfold show {run.id}" in text
    code, text = command(str(tmp_path / "m.safetensors"), "--dir", str(tmp_path / "runs"), "--json")
    assert json.loads(text)["run"]["path"] == str(run.path)


# Every way of saving, and what may go wrong beside it


def trace(path: Path) -> None:
    torch.jit.trace(model(), torch.ones(2, 3)).save(str(path))


def doubled() -> Any:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    return torch.jit.script(double)


def save_buffer(path: Path) -> None:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(model()), buffer)
    path.write_bytes(buffer.getvalue())


SCRIPTS = {
    "trace": trace,
    "function": lambda path: doubled().save(str(path)),
    "saved function": lambda path: torch.jit.save(doubled(), str(path)),
    "extra files": lambda path: torch.jit.save(doubled(), str(path), _extra_files={"mine.txt": "kept"}),
    "lite": lambda path: torch.jit.script(model())._save_for_lite_interpreter(str(path)),
    "buffer": save_buffer,
}


def test_every_way_to_save_torchscript_is_stamped(tmp_path):
    with fanfold.init("p", dir=tmp_path / "runs", quiet=True, system=False, stamp=True) as run:
        for name, save in SCRIPTS.items():
            save(tmp_path / name)
    for name in SCRIPTS:
        found = fanfold.inspect(tmp_path / name)
        assert (found["format"], found["stamp"]["run"]["id"]) == ("TorchScript", run.id), name
        assert torch.jit.load(str(tmp_path / name))(torch.ones(2, 3)) is not None
    kept = {"mine.txt": ""}
    torch.jit.load(str(tmp_path / "extra files"), _extra_files=kept)
    assert kept["mine.txt"] in ("kept", b"kept")
    assert len(fanfold.open(run.id, dir=tmp_path / "runs").files) == len(SCRIPTS) - 1  # a buffer is no file


def test_a_package_of_compiled_code_is_stamped(tmp_path):
    from torch._inductor.package import package_aoti

    (tmp_path / "model.wrapper.so").write_bytes(b"machine code")
    with fanfold.init("p", dir=tmp_path / "runs", quiet=True, system=False, stamp=True) as run:
        package_aoti(str(tmp_path / "m.pt2"), {"model": [str(tmp_path / "model.wrapper.so")]})
    found = fanfold.inspect(tmp_path / "m.pt2")
    assert (found["format"], found["stamp"]["run"]["id"]) == ("AOTInductor package", run.id)
    assert [Path(entry["path"]).name for entry in fanfold.open(run.id, dir=tmp_path / "runs").files] == ["m.pt2"]


@pytest.mark.faults  # a C++ compiler takes a minute over it
@pytest.mark.timeout(600)
def test_a_stamped_aotinductor_package_loads_and_computes(tmp_path):
    with fanfold.init("p", dir=tmp_path / "runs", quiet=True, system=False, stamp=True) as run:
        path = torch._inductor.aoti_compile_and_package(export(), package_path=str(tmp_path / "m.pt2"))
        assert fanfold.inspect(path)["stamp"]["run"]["id"] == run.id
        fanfold.stamp(path, step=9)
    assert fanfold.inspect(path)["stamp"]["run"]["step"] == 9
    assert torch.allclose(torch._inductor.aoti_load_package(path)(torch.ones(2, 3)), model()(torch.ones(2, 3)))


@pytest.mark.parametrize("dynamo", [True, False])
def test_both_onnx_exporters_are_stamped(dynamo, tmp_path):
    with fanfold.init("p", dir=tmp_path / "runs", quiet=True, system=False, stamp=True) as run:
        torch.onnx.export(model(), (torch.ones(2, 3),), str(tmp_path / "m.onnx"), dynamo=dynamo, verbose=False)
        onnx.save(onnx_model(), str(tmp_path / "m.onnxtxt"))  # text: no place for a stamp, and nothing to complain of
    assert fanfold.inspect(tmp_path / "m.onnx")["stamp"]["run"]["id"] == run.id
    onnx.checker.check_model(str(tmp_path / "m.onnx"), full_check=True)
    assert onnx.load(tmp_path / "m.onnxtxt").graph.name == "g"
    (saved,) = fanfold.open(run.id, dir=tmp_path / "runs").files
    assert saved["path"] == str(tmp_path / "m.onnx")


def test_a_sharded_transformers_model_keeps_its_index_and_every_shard_is_stamped(tmp_path):
    from transformers import BertConfig, BertModel

    tiny = BertModel(BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=2, num_attention_heads=1, intermediate_size=8))
    with fanfold.init("p", dir=tmp_path / "runs", quiet=True, system=False, stamp=True) as run:
        tiny.save_pretrained(tmp_path / "checkpoint", max_shard_size="4KB")
    found = fanfold.inspect(tmp_path / "checkpoint")
    assert len(found["files"]) > 1
    assert {entry["stamp"]["run"]["id"] for entry in found["files"]} == {run.id}
    index = json.loads((tmp_path / "checkpoint" / "model.safetensors.index.json").read_text())
    assert {Path(entry["path"]).name for entry in found["files"]} == set(index["weight_map"].values())
    again = BertModel.from_pretrained(tmp_path / "checkpoint")
    assert all(torch.equal(a, b) for a, b in zip(tiny.state_dict().values(), again.state_dict().values(), strict=True))


def test_a_stamp_that_fails_leaves_the_saving_alone(tmp_path, monkeypatch, caplog):
    with fanfold.init("p", dir=tmp_path / "runs", quiet=True, system=False, stamp=True):
        monkeypatch.setattr(automatic.Stamper, "text", lambda *_: 1 / 0)
        for file, save, check in FORMATS.values():
            save(tmp_path / file)
            check(tmp_path / file)
            assert fanfold.inspect(tmp_path / file)["stamp"] is None
    assert "could not stamp" in caplog.text


def test_without_room_on_the_disk_a_file_stays_as_it_was(tmp_path):
    for name in ("torch.save", "safetensors", "ONNX"):
        FORMATS[name][1](tmp_path / FORMATS[name][0])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    code = """
        import resource, signal, sys, fanfold
        from pathlib import Path
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        for name in sys.argv[1:]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (Path(name).stat().st_size + 10, resource.RLIM_INFINITY))
            try:
                fanfold.stamp(name)
            except fanfold.FanfoldError as error:
                print("could not be stamped" in str(error) or "no space" in str(error))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *before],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["True"] * 3
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_many_processes_may_stamp_one_file(tmp_path):
    for file, save, _ in FORMATS.values():
        save(tmp_path / file)
    code = """
        import sys, fanfold
        for turn in range(6):
            for name in sys.argv[2:]:
                fanfold.stamp(name, who=sys.argv[1], filler="x" * 1500 * turn)
    """
    files = [file for file, _, _ in FORMATS.values()]
    work = [subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(n), *files], cwd=tmp_path) for n in range(3)]
    assert [child.wait(120) for child in work] == [0, 0, 0]
    for file, _, check in FORMATS.values():
        assert len(fanfold.inspect(tmp_path / file)["stamp"]["extra"]["filler"]) == 7500
        check(tmp_path / file)


def test_a_link_stays_a_link_and_a_private_file_private(tmp_path, run, monkeypatch):
    monkeypatch.setattr(st_format, "_move", lambda *_: False)  # so that the file is written anew, as on other filesystems
    save_file(model().state_dict(), tmp_path / "blob")
    (tmp_path / "blob").chmod(0o640)
    (tmp_path / "m.safetensors").symlink_to("blob")
    fanfold.stamp(tmp_path / "m.safetensors")
    assert (tmp_path / "m.safetensors").is_symlink()
    assert fanfold.inspect(tmp_path / "blob")["stamp"]["run"]["id"] == run.id
    assert (tmp_path / "blob").stat().st_mode & 0o777 == 0o640
    check_safetensors(tmp_path / "m.safetensors")


def test_an_archive_of_more_than_four_gigabytes_is_stamped(tmp_path, run):
    path = tmp_path / "large.pt"
    with path.open("wb") as file:
        file.write(b"PK\x03\x04")
        file.seek(5 << 30)  # a hole where the weights would be
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("m/data.pkl", b"pickle")
            archive.writestr("m/version", b"3")
    fanfold.stamp(path)
    fanfold.stamp(path, step=9)
    found = fanfold.inspect(path)
    assert (found["format"], found["facts"]["version"], found["stamp"]["run"]["step"]) == ("torch.save", "3", 9)
    with zipfile.ZipFile(path) as archive:
        assert archive.read("m/data.pkl") == b"pickle"
        assert json.loads(archive.read(f"m/extra/{NAME}"))["run"]["id"] == run.id


def test_other_zip_readers_find_a_stamped_archive_whole(tmp_path, run):
    torch.save(model().state_dict(), tmp_path / "m.pt")
    fanfold.stamp(tmp_path / "m.pt")
    fanfold.stamp(tmp_path / "m.pt", step=9)
    readers = [words for words in (["unzip", "-tq"], ["jar", "tf"], ["7z", "t"]) if shutil.which(words[0])]
    for words in readers:
        subprocess.run([*words, str(tmp_path / "m.pt")], check=True, capture_output=True, timeout=60)
    assert torch._C.PyTorchFileReader(str(tmp_path / "m.pt")).get_record(f"extra/{NAME}")


def test_ranks_and_forked_workers_stamp_what_they_save(tmp_path):
    code = """
        import os, numpy, safetensors.numpy, fanfold
        rank = os.environ["RANK"]
        run = fanfold.init("p", dir="runs", quiet=True, system=False, stamp=True)
        safetensors.numpy.save_file({"a": numpy.ones(3)}, f"rank{rank}.safetensors")
        child = os.fork()
        if not child:
            safetensors.numpy.save_file({"a": numpy.ones(3)}, f"worker{rank}.safetensors")
            os._exit(0)
        os.waitpid(child, 0)
        run.finish()
    """
    work = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
            cwd=tmp_path,
            env={**os.environ, "RANK": str(n), "LOCAL_RANK": str(n), "WORLD_SIZE": "2", "FANFOLD_RUN_ID": "together"},
        )
        for n in range(2)
    ]
    assert [child.wait(120) for child in work] == [0, 0]
    for name, rank in (("rank0", 0), ("rank1", 1), ("worker0", 0), ("worker1", 1)):
        stamp = fanfold.inspect(tmp_path / f"{name}.safetensors")["stamp"]
        assert (stamp["run"]["id"], stamp["run"]["rank"]) == ("together", rank)
    stored = fanfold.open("together", dir=tmp_path / "runs")
    names = {Path(entry["path"]).stem for entry in stored.files}
    assert names == {"rank0", "rank1", "worker0", "worker1"}
    shown = subprocess.run(
        [sys.executable, "-m", "fanfold", "show", "together", "--dir", "runs", "--all"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    assert all(f"{name}.safetensors" in shown for name in names)


SHAPES = ["[Infinity]", "[-1]", "[9223372036854775807,9223372036854775807]", '"12"', "[" + "2," * 200 + "2]", "[1e400]"]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_that_no_tensor_has_is_refused(shape, tmp_path):
    head = f'{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":[0,0]}}}}'.encode()
    (tmp_path / "m.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    with pytest.raises(FanfoldError, match="its header"):
        fanfold.inspect(tmp_path / "m.safetensors")


def test_the_command_shows_hostile_texts_and_never_obeys_them(tmp_path, run):
    evil = "\x1b[2J\x1b]0;owned\x07\u202e"
    stamp = {
        "run": {"id": str(run.path), "name": evil, "project": evil, "step": evil},
        "git": {"commit": evil, "remote": [evil]}, "command": [evil, {evil: 1}], "packages": {evil: evil},
        "node": {"cpu": evil, "gpus": 7}, "extra": [evil], "data": {evil: evil}, "parent": {"id": evil}, "time": [evil],
    }  # fmt: skip
    safetensors.numpy.save_file({evil: np.ones(2)}, tmp_path / "m.safetensors", {NAME: json.dumps(stamp), evil: evil})
    for words in ([], ["--json"]):
        code, text = command(str(tmp_path / "m.safetensors"), "--dir", str(tmp_path / "runs"), *words)
        assert code == 0
        assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert json.loads(text)["run"] is None  # a stamp names a run; a path in its place is not followed


def test_a_huge_folder_beside_a_model_is_not_walked_to_its_end(tmp_path, run, monkeypatch):
    from fanfold.provenance import look

    torch.save(model().state_dict(), tmp_path / "m.pt")
    for number in range(30):
        (tmp_path / f"{number}.jpg").write_bytes(b"x")
    monkeypatch.setattr(look, "MAX_ENTRIES", 10)
    walked = []
    monkeypatch.setattr(look.os, "walk", lambda path: walked.append(path) or iter([(str(path), [], _counted(walked, path))]))
    assert look.size_of(tmp_path) > 0
    assert len(walked) <= 12


def _counted(seen: list[Any], folder: Path) -> Any:
    for item in sorted(folder.iterdir()):
        if item.is_file():
            seen.append(item)
            yield item.name
