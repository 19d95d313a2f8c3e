"""Stamps made while saving: every saver's own file, hooks that come and go, ranks and workers, and no loader notices."""

from __future__ import annotations

import functools
import hashlib
import importlib.abc
import importlib.util
import io
import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import fsspec
import gguf
import numpy as np
import onnx
import pytest
import safetensors.numpy
import skops.io
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import fanfold
from fanfold.provenance import automatic, savers, stamper
from fanfold.provenance import hooks as hooking
from fanfold.provenance.record import NAME
from stamped_models import FORMATS, check_skops, export, model, onnx_model, regression, same_weights

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


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
    found = fanfold.inspect(tmp_path / "m.pt")
    assert (found["stamp"], found["facts"]["producer_info"]) == (None, {"mine": 1})


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


def test_an_asynchronous_save_is_stamped_as_of_its_beginning(tmp_path, caplog):
    import torch.distributed.checkpoint as dcp

    class Slow(dcp.FileSystemWriter):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            self.go_on = threading.Event()

        def set_up_storage_writer(self, *args: Any, **kwargs: Any) -> None:
            assert self.go_on.wait(60)
            super().set_up_storage_writer(*args, **kwargs)

    original = dcp.FileSystemWriter.finish
    during, after = Slow(tmp_path / "during"), Slow(tmp_path / "after")
    with fanfold.init("p", dir=tmp_path / "runs", quiet=True, system=False, stamp=True) as run:
        first = dcp.async_save(model().state_dict(), storage_writer=during)
        run.log({"x": 1.0}, step=1)
        during.go_on.set()
        first.result(60)
        second = dcp.async_save(model().state_dict(), storage_writer=after)
        run.log({"x": 1.0}, step=2)
    after.go_on.set()
    second.result(60)
    stamps = [fanfold.inspect(tmp_path / name)["stamp"]["run"] for name in ("during", "after")]
    assert [(stamp["id"], stamp["step"]) for stamp in stamps] == [(run.id, None), (run.id, 1)]
    (listed,) = fanfold.open(run.id, dir=tmp_path / "runs").files
    assert (Path(listed["path"]).name, listed["s"]) == ("during", None)
    assert "after was stamped after run" in caplog.text
    fanfold.init("p", dir=tmp_path / "runs", quiet=True, system=False, stamp=True).finish()
    assert dcp.FileSystemWriter.finish is original


def test_a_checkpoint_of_safetensors_files_from_dcp_is_stamped_and_listed(tmp_path):
    import torch.distributed.checkpoint as dcp

    folder = tmp_path / "hf"
    with fanfold.init("p", dir=tmp_path / "runs", quiet=True, system=False, stamp=True) as run:
        dcp.save(model().state_dict(), storage_writer=dcp.HuggingFaceStorageWriter(str(folder)), no_dist=True)
    assert fanfold.inspect(folder)["stamp"]["run"]["id"] == run.id
    assert [entry["path"] for entry in fanfold.open(run.id, dir=tmp_path / "runs").files] == [str(folder)]


class LogsWhenSaved:
    """A model that takes so long to save that training continues meanwhile."""

    def __reduce__(self) -> Any:
        fanfold.log({"x": 1.0}, step=8)
        return dict, ()


def test_a_file_is_stamped_with_the_step_at_which_its_save_began(tmp_path):
    with fanfold.init("p", dir=tmp_path / "runs", quiet=True, system=False, stamp=True) as run:
        run.log({"x": 1.0}, step=7)
        torch.save(LogsWhenSaved(), tmp_path / "m.pt")
    assert fanfold.inspect(tmp_path / "m.pt")["stamp"]["run"]["step"] == 7
    assert [entry["s"] for entry in fanfold.open(run.id, dir=tmp_path / "runs").files] == [7]


def test_a_file_stamped_after_its_run_names_a_run_that_does_not_list_it(tmp_path, caplog):
    with fanfold.init("p", dir=tmp_path / "runs", quiet=True, system=False) as run:
        pass
    for name in ("a.pt", "b.pt"):
        torch.save(model().state_dict(), tmp_path / name)
        assert fanfold.stamp(tmp_path / name)["run"]["id"] == run.id
    assert fanfold.open(run.id, dir=tmp_path / "runs").files == []
    assert caplog.text.count("the run does not list the file") == 1


def test_a_run_that_is_turned_off_stamps_nothing_and_is_no_run(tmp_path, monkeypatch):
    monkeypatch.setenv("FANFOLD_MODE", "disabled")
    with fanfold.init("p", stamp=True):
        torch.save(model().state_dict(), tmp_path / "m.pt")
        assert fanfold.inspect(tmp_path / "m.pt")["stamp"] is None
        assert "run" not in fanfold.stamp(tmp_path / "m.pt")
        assert fanfold.stamp(tmp_path / "m.pt", step=3)["run"] == {"step": 3}


def test_a_file_that_fsspec_opened_is_stamped_here_and_elsewhere(tmp_path):
    with fanfold.init("p", dir=tmp_path / "runs", quiet=True, system=False, stamp=True) as run:
        for place in (f"file://{tmp_path}/m.pt", "memory://bucket/m.pt"):
            with fsspec.open(place, "wb") as file:
                torch.save(model().state_dict(), file)
    assert fanfold.inspect(tmp_path / "m.pt")["stamp"]["run"]["id"] == run.id
    assert same_weights(torch.load(tmp_path / "m.pt", weights_only=True))
    assert NAME.encode() in fsspec.filesystem("memory").cat("/bucket/m.pt")
    (listed,) = fanfold.open(run.id, dir=tmp_path / "runs").files
    assert (listed["path"], listed["size"]) == (str(tmp_path / "m.pt"), (tmp_path / "m.pt").stat().st_size)


def test_it_is_said_once_that_the_old_kind_of_torch_save_has_no_room_for_a_stamp(tmp_path, caplog):
    with fanfold.init("p", dir=tmp_path / "runs", quiet=True, system=False, stamp=True):
        torch.save(model().state_dict(), io.BytesIO(), _use_new_zipfile_serialization=False)
        assert "old kind" not in caplog.text
        for name in ("a.pt", "b.pt"):
            torch.save(model().state_dict(), tmp_path / name, _use_new_zipfile_serialization=False)
            assert same_weights(torch.load(tmp_path / name, weights_only=True))
    assert caplog.text.count("old kind") == 1


def test_a_file_object_is_stamped_too(tmp_path):
    with fanfold.init("p", dir=tmp_path / "runs", quiet=True, system=False, stamp=True) as run:
        with (tmp_path / "m.pt").open("wb") as file:
            torch.save(model().state_dict(), file)
    assert fanfold.inspect(tmp_path / "m.pt")["stamp"]["run"]["id"] == run.id


TARGETS = """
    import io, sys, tempfile, torch, fanfold

    class Nameless(io.RawIOBase):
        def writable(self):
            return True
        def write(self, data):
            return len(data)

    weights = torch.nn.Linear(3, 4).state_dict()
    run = fanfold.init("p", dir="runs", quiet=True, system=False, stamp=True)
    torch.save(weights, io.BufferedWriter(Nameless()))
    for opened in (open("raw.pt", "wb", buffering=0), tempfile.NamedTemporaryFile(suffix=".pt", dir=".")):
        with opened as file:
            torch.save(weights, file)
            assert fanfold.inspect(file.name)["stamp"]["run"]["id"] == run.id
    torch.save(weights, sys.stdout.buffer)  # a pipe
    run.finish()
"""


def test_torch_saves_into_whatever_it_can_write_to(tmp_path):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(TARGETS)],
        cwd=tmp_path, capture_output=True, timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert set(torch.load(io.BytesIO(done.stdout), weights_only=True)) == {"weight", "bias"}


class Neighbour(importlib.abc.MetaPathFinder):
    """Another library's way to see imports: it asks everybody, itself and us included, and wraps what they found."""

    busy = False

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if self.busy or name != "safetensors.numpy":
            return None
        self.busy = True
        found = importlib.util.find_spec(name)
        self.busy = False
        return found


def test_a_reloaded_library_is_hooked_again_beside_other_import_hooks(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [Neighbour(), *sys.meta_path])
    with fanfold.init("p", dir=tmp_path / "runs", quiet=True, system=False, stamp=True) as run:
        del sys.modules["safetensors.numpy"]
        importlib.import_module("safetensors.numpy")
        safetensors.numpy.save_file({"a": np.ones(3)}, tmp_path / "n.safetensors")
    safetensors.numpy.save_file({"a": np.ones(3)}, tmp_path / "after.safetensors")
    stamps = [fanfold.inspect(tmp_path / f"{name}.safetensors")["stamp"] for name in ("n", "after")]
    assert [stamp and stamp["run"]["id"] for stamp in stamps] == [run.id, None]
    assert "parent" not in stamps[0]  # stamped twice, it would be made from itself


def test_hooks_come_off_in_any_order_with_others(tmp_path):
    originals = {(hook.module, hook.path): _named(hook) for hook in savers.HOOKS if hook.module in sys.modules}
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
    assert {(hook.module, hook.path): _named(hook) for hook in savers.HOOKS if (hook.module, hook.path) in originals} == originals
    assert automatic._later not in sys.meta_path


def _named(hook: hooking.Hook) -> Any:
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


NATIVE = """
    import torch, fanfold
    from fanfold.probes.native import library
    from fanfold.provenance import stamper

    def told(name):
        return fanfold.inspect(name)["stamp"]

    beside = torch._C.ScriptModule.save  # as C++ saves: our hook in Python is not asked
    script = torch.jit.script(torch.nn.Linear(3, 4))
    run = fanfold.init("p", dir="runs", quiet=True, system=False, stamp=True, ops=True)
    if library.current() is None:
        raise SystemExit("no native library for this torch")
    torch.jit.save(script, "own.pt", _extra_files={stamper.NAME: '{"mine": 1}'})
    assert told("own.pt") is None and fanfold.inspect("own.pt")["facts"]["producer_info"] == {"mine": 1}
    beside(script._c, "later.pt", {})
    assert told("later.pt")["run"]["id"] == run.id
    whole, stamper.Stamper.text = stamper.Stamper.text, lambda *_: 1 / 0
    torch.jit.save(script, "failed.pt")
    assert told("failed.pt") is None
    stamper.Stamper.text = whole
    run.finish()
    beside(script._c, "after.pt", {})
    assert told("after.pt") is None
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the native part is for Linux")
def test_what_cpp_saves_is_stamped_also_after_a_file_with_the_callers_own(tmp_path):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(NATIVE)],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr


LIGHTNING = """
    import fsspec, io, sys, torch, fanfold

    def save(library, run, name):
        class Model(library.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(2, 1)
            def training_step(self, batch, index):
                return self.layer(batch).square().mean()
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        made = Model()
        trainer = library.Trainer(max_steps=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
                                  enable_progress_bar=False, enable_model_summary=False)
        trainer.fit(made, torch.utils.data.DataLoader(torch.ones(2, 2)))
        trainer.save_checkpoint(f"{name}.ckpt")
        trainer.save_checkpoint(f"memory://bucket/{name}.ckpt")
        assert (b"producer_info" in fsspec.filesystem("memory").cat(f"/bucket/{name}.ckpt")) == bool(run)
        plain = torch.load(f"{name}.ckpt", weights_only=True)
        assert plain["global_step"] == 1 and plain.keys() == trainer._checkpoint_connector.dump_checkpoint().keys()
        for loaded in (plain["state_dict"], Model.load_from_checkpoint(f"{name}.ckpt").state_dict()):
            assert all(torch.equal(value, loaded[key]) for key, value in made.state_dict().items())
        trainer.fit(made, torch.utils.data.DataLoader(torch.ones(2, 2)), ckpt_path=f"{name}.ckpt")
        assert fanfold.inspect(f"{name}.ckpt")["format"] == "torch.save"
        print(name, ((fanfold.inspect(f"{name}.ckpt")["stamp"] or {}).get("run") or {}).get("id"), run and run.id)

    def start():
        return fanfold.init("p", dir="runs", quiet=True, system=False, stamp=True)

    run = start()
    assert not any("lightning" in name and "fanfold" not in name for name in sys.modules)
    import lightning.pytorch, pytorch_lightning
    libraries = {"new": lightning.pytorch, "old": pytorch_lightning}
    for name, library in libraries.items():
        save(library, run, f"late-{name}")
    torch.save({}, buffer := io.BytesIO())
    assert b"producer_info" not in buffer.getvalue()  # a buffer of anybody else's is left alone, as before
    run.finish()
    for name, library in libraries.items():
        save(library, None, f"none-{name}")
    run = start()
    for name, library in libraries.items():
        save(library, run, f"early-{name}")
    run.finish()
    print(*(file["path"].rpartition("/")[2] for file in fanfold.open(run.id, dir="runs").files))
"""


@pytest.mark.timeout(240)
def test_lightnings_checkpoints_are_stamped_while_a_run_stamps_and_load_as_before(tmp_path):
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(LIGHTNING)],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    *saved, listed = done.stdout.splitlines()[-7:]
    for line in saved:
        name, stamped, by = line.split()
        assert (stamped == by) and ((by == "None") == name.startswith("none")), line
    assert listed.split() == ["early-new.ckpt", "early-old.ckpt"]


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
        monkeypatch.setattr(stamper.Stamper, "text", lambda *_: 1 / 0)
        for file, save, check in FORMATS.values():
            save(tmp_path / file)
            check(tmp_path / file)
            assert fanfold.inspect(tmp_path / file)["stamp"] is None
    assert "could not stamp" in caplog.text


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


def test_a_stamp_names_the_data_that_the_run_knows_of(tmp_path):
    (tmp_path / "train").mkdir()
    for name in ("a.csv", "b.csv"):
        (tmp_path / "train" / name).write_text(name)
    found = []
    with fanfold.init("p", dir=tmp_path / "runs", quiet=True, system=False, stamp=True, config={"lr": 1.0}) as run:
        for number in range(5):
            if number == 1:
                run.config["data"] = {"root": "/mnt", "size": 3}  # a table is no name
                run.config["dataset"] = ["wiki-2024", "books"]
            elif number == 2:
                run.artifact(tmp_path / "train" / "a.csv", kind="dataset")
            elif number == 3:
                run.artifact(tmp_path / "train", "all", kind="dataset")
            save_file(model().state_dict(), tmp_path / "m.safetensors")
            if number == 4:
                fanfold.stamp(tmp_path / "m.safetensors", data="by hand")
            found.append(fanfold.inspect(tmp_path / "m.safetensors")["stamp"].get("data"))
    lines = subprocess.run("sha256sum a.csv b.csv", shell=True, cwd=tmp_path / "train", capture_output=True, check=True).stdout
    one = {"name": "a.csv", "digest": f"sha256:{lines[:64].decode()}"}
    both = {"name": "all", "digest": f"sha256:{hashlib.sha256(lines).hexdigest()}"}
    assert found == [None, ["wiki-2024", "books"], [one], [one, both], "by hand"]


def test_skops_bytes_and_every_part_of_a_gguf_model_are_stamped(tmp_path):
    with fanfold.init("p", dir=tmp_path / "runs", quiet=True, system=False, stamp=True) as run:
        (tmp_path / "bytes.skops").write_bytes(skops.io.dumps(regression()))
        with (tmp_path / "open.skops").open("wb") as file:
            skops.io.dump(regression(), file)
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=1)
        for name in ("a", "b"):
            writer.add_tensor(name, np.arange(10, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    parts = sorted(tmp_path.glob("*.gguf"))
    assert [gguf.GGUFReader(part).tensors[0].name for part in parts] == ["a", "b"]
    for path in (*parts, tmp_path / "bytes.skops", tmp_path / "open.skops"):
        assert fanfold.inspect(path)["stamp"]["run"]["id"] == run.id
    check_skops(tmp_path / "bytes.skops")
    assert [Path(saved["path"]) for saved in fanfold.open(run.id, dir=tmp_path / "runs").files] == parts
