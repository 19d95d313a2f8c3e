"""Stamps written by hand into real files: read back, replaced, whole or not at all, and no loader notices."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import fanfold
from fanfold.cli import main
from fanfold.errors import FanfoldError
from fanfold.provenance import zips
from fanfold.provenance.record import NAME
from stamped_models import BY_HAND, FORMATS, check_safetensors, model, same_weights, training

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture
def run(tmp_path):
    with training(tmp_path) as run:
        yield run


@pytest.mark.parametrize("name", BY_HAND)
def test_a_stamped_file_knows_its_run_and_loads_as_before(name, run, tmp_path):
    file, save, check = BY_HAND[name]
    path = tmp_path / file
    save(path)
    assert fanfold.inspect(path)["stamp"] is None
    told = fanfold.stamp(path, data="wiki-2024", note="first", hf_token="hf_abcdefghijklmnopqrstuvwxyz012345")
    found = fanfold.inspect(path)
    assert (found["format"], found["size"]) == (name.partition(",")[0], path.stat().st_size)
    assert found["stamp"] == json.loads(json.dumps(told))
    assert found["stamp"]["run"] | {"config": None} == {
        "id": run.id, "project": "p", "name": run.name, "attempt": 1, "rank": 0, "step": 41, "config": None,
    }  # fmt: skip
    assert (found["stamp"]["data"], found["stamp"]["extra"]["note"]) == ("wiki-2024", "first")
    assert found["stamp"]["packages"]["torch"] == torch.__version__
    assert b"sk-very-secret" not in path.read_bytes()
    assert b"hf_abcdefgh" not in path.read_bytes()
    check(path)
    assert [item.name for item in tmp_path.iterdir() if item.is_file()] == [file]  # inside, not beside


@pytest.mark.parametrize("name", BY_HAND)
def test_a_second_stamp_replaces_the_first(name, run, tmp_path):
    file, save, check = BY_HAND[name]
    path = tmp_path / file
    save(path)
    for step in (1, 2, 3):
        fanfold.stamp(path, step=step, filler="x" * 3000 * step)
        assert fanfold.inspect(path)["stamp"]["run"]["step"] == step
        check(path)


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


def test_a_format_without_room_gets_a_file_beside_it(tmp_path, run, caplog):
    torch.save(model().state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    fanfold.stamp(tmp_path / "old.pt")
    assert fanfold.inspect(tmp_path / "old.pt")["stamp"]["run"]["id"] == run.id
    assert same_weights(torch.load(tmp_path / "old.pt", weights_only=True))
    assert "no room for a stamp" in caplog.text


def test_an_archive_that_torch_did_not_write_has_the_members_it_had(tmp_path, run):
    path = tmp_path / "m.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.comment = b"mine"
        for name in ("a/\u00e4.json", "b.json"):
            archive.writestr(name, "{}")
    before = path.read_bytes()
    for size in (10, 70_000, 900_000):  # the last two are longer than readers look back, so the file is replaced
        fanfold.stamp(path, filler="x" * size)
        with zipfile.ZipFile(path) as archive:
            assert (archive.comment, archive.namelist(), archive.testzip()) == (b"mine", ["a/\u00e4.json", "b.json"], None)
        assert path.read_bytes().startswith(before)
        assert len(fanfold.inspect(path)["stamp"]["extra"]["filler"]) == size


def test_an_archive_that_somebody_adds_to_later_has_no_stamp_of_its_old_content(tmp_path, run):
    path = tmp_path / "m.npz"
    np.savez(path, a=np.ones(3))
    fanfold.stamp(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("more", "x" * 100)
    assert fanfold.inspect(path)["stamp"] is None


def test_hdf5_of_every_version_is_stamped_and_a_change_takes_the_stamp_away(tmp_path, run):
    import h5py

    for version in ("earliest", "v108", "latest"):
        path = tmp_path / f"{version}.h5"
        with h5py.File(path, "w", libver=version) as file:
            file["x"] = np.arange(1000)
            file.attrs["mine"] = "kept"
        fanfold.stamp(path, filler="x" * 100_000)
        with h5py.File(path) as file:
            assert np.array_equal(file["x"][:], np.arange(1000))
            assert (dict(file.attrs), list(file)) == ({"mine": "kept"}, ["x"])
        assert fanfold.inspect(path)["stamp"]["run"]["id"] == run.id
        for number in range(30):
            fanfold.stamp(path, number=number, filler="x" * 10_000)
            assert fanfold.inspect(path)["stamp"]["extra"]["number"] == number
        assert path.stat().st_size < 250_000  # earlier stamps make way
        with h5py.File(path, "r+", locking=False) as file:  # a child being started may hold the lock of the reader above
            file["y"] = np.arange(10)
        assert fanfold.inspect(path)["stamp"] is None


def test_gguf_of_either_byte_order_and_any_place_of_the_stamp_is_read_and_written(tmp_path, run):
    import gguf

    for order in (gguf.GGUFEndian.LITTLE, gguf.GGUFEndian.BIG):
        path = tmp_path / f"{order.name}.gguf"
        writer = gguf.GGUFWriter(path, "llama", endianess=order)
        # In the middle, where a tool that copies values may put it.
        writer.add_string("fanfold.producer_info", '{"stamp": 1, "note": "old"}')
        writer.add_array("tokenizer.ggml.tokens", [f"word {number}" for number in range(30_000)])
        writer.add_tensor("t", np.arange(100, dtype=np.float32))  # the writer swaps its bytes
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        assert fanfold.inspect(path)["stamp"]["note"] == "old"
        for size in (10, 9000, 10):
            fanfold.stamp(path, filler="x" * size)
            reader = gguf.GGUFReader(path)
            assert [(tensor.name, tensor.data.tolist()) for tensor in reader.tensors] == [("t", list(map(float, range(100))))]
            assert reader.fields["tokenizer.ggml.tokens"].contents(29_999) == "word 29999"
            assert fanfold.inspect(path)["stamp"]["extra"]["filler"] == "x" * size


def test_a_stamp_beside_a_file_is_not_believed_of_one_saved_in_its_place(tmp_path, run, capsys):
    path = tmp_path / "weights.npy"
    np.save(path, np.zeros(100_000))
    fanfold.stamp(path)
    path.rename(tmp_path / "kept.npy")
    (tmp_path / f"weights.npy.{NAME}").rename(tmp_path / f"kept.npy.{NAME}")
    assert fanfold.inspect(tmp_path / "kept.npy")["stamp"]["run"]["id"] == run.id
    np.save(tmp_path / "kept.npy", np.ones(100_000))  # as long, and other weights
    assert fanfold.inspect(tmp_path / "kept.npy")["stamp"] is None
    assert main(["inspect", str(tmp_path / "kept.npy")]) == 1
    assert "of another file" in capsys.readouterr().out


def test_a_folder_of_links_is_read_and_not_stamped(tmp_path, run):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()  # as the Hugging Face hub keeps what was downloaded
    save_file({"a": torch.ones(10)}, tmp_path / "blobs" / "0ab1")
    fanfold.stamp(tmp_path / "blobs" / "0ab1")
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "blobs" / "0ab1")
    before = (tmp_path / "blobs" / "0ab1").read_bytes()
    found = fanfold.inspect(tmp_path / "snapshot")
    assert (found["stamp"]["run"]["id"], found["size"]) == (run.id, len(before))
    fanfold.stamp(tmp_path / "snapshot")
    assert (tmp_path / "blobs" / "0ab1").read_bytes() == before


def test_what_no_json_holds_is_said_in_words_and_what_no_reader_takes_is_refused(tmp_path, run):
    torch.save(model().state_dict(), tmp_path / "m.pt")
    fanfold.stamp(tmp_path / "m.pt", most=float("inf"), scores=[float("nan"), 1.0])
    with zipfile.ZipFile(tmp_path / "m.pt") as archive:
        text = archive.read(f"m/extra/{NAME}")
    stamp = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert stamp["extra"] == {"most": "inf", "scores": ["nan", 1.0]}
    before = (tmp_path / "m.pt").read_bytes()
    with pytest.raises(FanfoldError, match="Give it less to say"):
        fanfold.stamp(tmp_path / "m.pt", note="x" * 1_100_000)
    for step in ("abc", "7", float("inf"), [1], torch.ones(2)):
        with pytest.raises(FanfoldError, match=r"is not a number\. Nothing was stamped"):
            fanfold.stamp(tmp_path / "m.pt", step=step)
    assert (tmp_path / "m.pt").read_bytes() == before


def test_odd_names_are_stamped_and_listed_and_what_is_no_file_is_refused(tmp_path, run):
    names = ["x" * 250 + ".pt", os.fsdecode(b"no text \xff.pt")]
    for name in names:
        with (tmp_path / name).open("wb") as file:
            torch.save(model().state_dict(), file)
        fanfold.stamp(tmp_path / name)
        assert fanfold.inspect(tmp_path / name)["stamp"]["run"]["id"] == run.id
    listed = {entry["path"].rpartition("/")[2] for entry in fanfold.open(run.id, dir=tmp_path / "runs").files}
    assert listed == {names[0], "no text \\xff.pt"}
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FanfoldError, match="neither a file nor a directory"):
        fanfold.stamp(tmp_path / "pipe")


def test_without_a_run_the_stamp_tells_of_code_and_environment(tmp_path, monkeypatch):
    monkeypatch.setattr("fanfold.recording.api._current", None)
    torch.save({}, tmp_path / "m.pt")
    stamp = fanfold.stamp(tmp_path / "m.pt")
    assert "run" not in stamp
    assert stamp["packages"]["python"].startswith("3.")
    assert fanfold.stamp(tmp_path / "m.pt", step=torch.tensor(7))["run"] == {"step": 7}


PATHS = {
    "": "the path is empty",
    "missing.pt": "missing.pt cannot be read: No such file",
    "a\0b": r"'a\\x00b' cannot be read: embedded null byte",
    "x" * 300: "x cannot be read: File name too long",
    "s3://bucket/m.pt": "s3://bucket/m.pt cannot be read: it is an address",
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("call", [fanfold.stamp, fanfold.inspect])
def test_a_path_that_leads_to_no_file_is_refused_and_no_other_is_touched(path, call, tmp_path, monkeypatch):
    torch.save({}, tmp_path / "other.pt")
    before = (tmp_path / "other.pt").read_bytes()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FanfoldError, match=PATHS[path]):
        call(path)
    assert (tmp_path / "other.pt").read_bytes() == before
    assert os.listdir(tmp_path) == ["other.pt"]


def test_a_kill_before_the_one_write_leaves_an_archive_as_it_was(tmp_path, run, monkeypatch):
    torch.save(model().state_dict(), tmp_path / "m.pt")
    before = (tmp_path / "m.pt").read_bytes()
    written = []
    monkeypatch.setattr(
        zips._ArchiveTail, "write", lambda self, data: written.append(data) or (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        fanfold.stamp(tmp_path / "m.pt")
    assert (tmp_path / "m.pt").read_bytes() == before
    monkeypatch.undo()
    fanfold.stamp(tmp_path / "m.pt")
    assert (tmp_path / "m.pt").read_bytes()[: len(before)] == before  # the old end stays in front of the new one


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


def test_a_link_stays_a_link_and_a_private_file_private(tmp_path, run):
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
