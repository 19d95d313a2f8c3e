"""Reading stamps: damaged and hostile files in bounded memory, and the command."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import textwrap
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import safetensors.numpy
import torch
from safetensors.torch import save_file

import fanfold
from fanfold.cli import main
from fanfold.errors import FanfoldError
from fanfold.provenance import tail, zips
from fanfold.provenance.record import NAME
from stamped_models import FORMATS, model, onnx_model, training

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture
def run(tmp_path):
    with training(tmp_path) as run:
        yield run


def zip_bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m/data.pkl", b"")
        archive.writestr(f"m/extra/{NAME}", b" " * 300_000_000)


def many_members(path: Path) -> None:
    """No two members have the same name."""
    entry = struct.Struct("<4s6H3I5H2I").pack(b"PK\x01\x02", 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0)
    count = 1_000_000
    table = b"".join(entry + b"m/%06x" % number for number in range(count))
    end = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(table), 4)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, 4 + len(table), 1)
    last = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    path.write_bytes(b"PK\x03\x04" + table + end + locator + last)


def giant_header(path: Path) -> None:
    with path.open("wb") as file:
        file.write((1 << 40).to_bytes(8, "little") + b"{")
        file.truncate((1 << 40) + 8)  # a sparse file that is as long as it says


def deep_header(path: Path) -> None:
    head = b'{"a":' + b"[" * 1_000_000
    path.write_bytes(len(head).to_bytes(8, "little") + head)


def field(number: int, size: int, begin: bytes) -> bytes:
    """Return the head of a field of an ONNX model, and how it begins."""
    return bytes([number << 3 | 2]) + varint(size) + begin


def varint(value: int) -> bytes:
    return (bytes([value & 0x7F | 0x80]) + varint(value >> 7)) if value > 0x7F else bytes([value])


def long_metadata(path: Path) -> None:
    """Fill a sparse file with values of metadata of two megabytes each, after stamps as long as they may be."""
    with path.open("wb") as file:
        file.write(b"\x08\x0a" + field(7, 0, b""))
        for number in range(200):
            name = NAME if number < 10 else f"k{number:03}"
            size, value = 2_000_000, 2_000_000 - 6 - len(name)
            start = file.tell() + len(field(14, size, b""))
            file.write(field(14, size, field(1, len(name), name.encode()) + field(2, value, b"")))
            file.truncate(start + size)
            file.seek(start + size)


def many_entries(path: Path) -> None:
    """Name a new opset and a new key of metadata in each of as many fields as there may be, none of them the same."""
    fields = []
    for number in range(49_000):
        key = f"{number:06}".encode() * 100
        pair = field(1, len(key), key)
        fields += [field(14, len(pair), pair), field(8, len(pair), pair)]
    path.write_bytes(b"\x08\x0a" + field(7, 0, b"") + b"".join(fields))


def header(path: Path, text: bytes) -> None:
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def many_names(path: Path) -> None:
    """Write names with a space behind them, as the format allows."""
    header(path, b"{" + b",".join(b'"%x" :0' % number for number in range(3_000_000)) + b"}")


def much_metadata(path: Path) -> None:
    header(path, b'{"__metadata__":{' + b",".join(b'"%x" :"1"' % number for number in range(2_500_000)) + b"}}")


def long_shape(path: Path) -> None:
    header(path, b'{"a":{"dtype":"F32","shape":[' + b"999," * 8_000_000 + b'1],"data_offsets":[0,16]}}')


def long_stamp(path: Path) -> None:
    header(path, b'{"__metadata__":{"producer_info.json":"[' + b"0," * 10_000_000 + b'0]"}}')


HOSTILE = {
    "names.safetensors": many_names,
    "metadata.safetensors": much_metadata,
    "shape.safetensors": long_shape,
    "stamp.safetensors": long_stamp,
    "bomb.pt": zip_bomb,
    "members.pt": many_members,
    "giant.safetensors": giant_header,
    "deep.safetensors": deep_header,
    "long.onnx": long_metadata,
    "many.onnx": many_entries,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_costs_little_memory_and_gives_a_clear_answer(name, tmp_path):
    HOSTILE[name](tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent("""
            import sys, fanfold
            from pathlib import Path
            from fanfold.provenance import inspect
            def most():  # kB; what getrusage tells has the parent's memory in it
                return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
            before = most()
            try:
                print(inspect(sys.argv[1])["stamp"])
            except fanfold.FanfoldError as error:
                print("refused:", error)
            print(most() - before)
        """), str(tmp_path / name)], capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    answer, more = done.stdout.rsplit("\n", 2)[:2]
    on_disk = (tmp_path / name).stat().st_blocks // 2
    assert int(more) < 60_000 + 2 * on_disk, done.stdout + done.stderr  # kB: a header is read as a whole, and little more
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


CUTS = {
    "m.safetensors": [0, 5, 8, 60, -1, -4],
    "m.pt": [0, 1, 60, -1],
    "m.pth": [0, 1],
    "m.pt2": [0, 3, -1],
    "m.torchscript": [1],
    "m.onnx": [0, 5, -1],
    "m.keras": [0, 1, 60, -1],
    "m.skops": [0, 1, -1],
    "m.h5": [0, 20, -1],
    "m.gguf": [0, 2, 12, 60, 300, -49],  # its last 48 bytes fill up a block
    "m.ckpt": [0, -1],
    "m.bin": [0, -1],
}
SAVE = {".safetensors": "safetensors", ".pt2": "torch.export", ".onnx": "ONNX", ".torchscript": "TorchScript", ".keras": "Keras", ".skops": "skops",
        ".h5": "HDF5", ".gguf": "GGUF"}  # fmt: skip


@pytest.mark.parametrize("name", CUTS)
def test_a_file_that_was_cut_is_damaged_and_is_not_stamped(name, tmp_path, run, capsys):
    path = tmp_path / name
    FORMATS[SAVE.get(path.suffix, "torch.save")][1](path)
    whole = path.read_bytes()
    for cut in CUTS[name]:
        left = whole[:cut]
        path.write_bytes(left)
        assert main(["inspect", str(path)]) == 2, cut
        assert f"{path} cannot be read: " in capsys.readouterr().err
        with pytest.raises(FanfoldError, match="cannot be read"):
            fanfold.stamp(path)
        assert path.read_bytes() == left
        assert {item.name for item in tmp_path.iterdir() if item.is_file()} == {name}


@pytest.mark.parametrize("tail", [b"more", b""], ids=["more", "less"])
def test_tensors_that_do_not_end_where_the_file_ends_are_told_of(tail, tmp_path):
    head = b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[100,116]}}'
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(116 if tail else 16) + tail)
    with pytest.raises(FanfoldError, match=r"its header tells of 116 bytes of tensors, and 1[26]0? are there"):
        fanfold.inspect(path)


def test_endings_that_others_use_too_and_pickles_are_not_called_damaged(tmp_path, capsys):
    (tmp_path / "m.bin").write_bytes(b"another program's weights")
    torch.save(model().state_dict(), tmp_path / "m.pt", _use_new_zipfile_serialization=False, pickle_protocol=3)
    assert main(["inspect", str(tmp_path / "m.bin")]) == main(["inspect", str(tmp_path / "m.pt")]) == 1
    assert capsys.readouterr().out.count("no stamp") == 2


def sharded(folder: Path) -> list[Path]:
    from transformers import BertConfig, BertModel

    tiny = BertModel(BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8))
    tiny.save_pretrained(folder, max_shard_size="2KB")
    return sorted(folder.glob("*.safetensors"))


def test_shards_that_are_cut_or_missing_are_named(tmp_path, run, capsys):
    cut, missing, *others = sharded(tmp_path)
    fanfold.stamp(tmp_path)
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "pytorch_model-00001.bin"}}')  # not fetched
    assert main(["inspect", str(tmp_path)]) == 0
    os.truncate(cut, cut.stat().st_size - 100)
    missing.unlink()
    capsys.readouterr()
    assert main(["inspect", str(tmp_path)]) == 2
    told = capsys.readouterr().out
    assert f"damaged   {cut} cannot be read: it was cut short" in told
    assert f"damaged   {missing} cannot be read: it is missing, and model.safetensors.index.json names it" in told
    assert told.count("damaged") == 2
    for shard in (cut, *others):
        shard.unlink()
    assert len([entry for entry in fanfold.inspect(tmp_path)["files"] if "error" in entry]) == 2 + len(others) + 1


@pytest.mark.parametrize("index", ["", "[1]", '{"weight_map": {"a": 1}}'])
def test_an_index_that_says_nothing_is_damaged(index, tmp_path):
    save_file(model().state_dict(), tmp_path / "m.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert [entry["format"] for entry in fanfold.inspect(tmp_path)["files"]] == ["safetensors", "broken"]


def test_the_paths_that_an_index_names_are_not_followed(tmp_path):
    (tmp_path / "secret").write_text("of this size")
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(model().state_dict(), folder / "m.safetensors")
    named = {"a": "m.safetensors", "b": "../secret", "c": "\0" * 300}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    assert [entry["size"] for entry in fanfold.inspect(folder)["files"] if "error" in entry] == [0, 0]


def test_a_part_of_a_sharded_checkpoint_that_was_cut_is_named(tmp_path, run, capsys):
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": model().state_dict()}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    fanfold.stamp(tmp_path / "dcp")
    assert main(["inspect", str(tmp_path / "dcp")]) == 0
    part = tmp_path / "dcp" / "__0_0.distcp"
    os.truncate(part, part.stat().st_size - 1)
    assert main(["inspect", str(tmp_path / "dcp")]) == 2
    assert f"damaged   {part} cannot be read: it was cut short" in capsys.readouterr().out


def zipped(path: Path, stamp: bytes, *, method: int = zipfile.ZIP_STORED) -> bytearray:
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("m/data.pkl", b"")
        archive.writestr(f"m/extra/{NAME}", stamp)
    return bytearray(path.read_bytes())


def changed(path: Path) -> None:
    path.write_bytes(zipped(path, b'{"stamp": 1, "run": {"id": "mine"}}').replace(b"mine", b"your"))


def claims_less(path: Path) -> None:
    data = zipped(path, b" " * 300_000, method=zipfile.ZIP_DEFLATED)
    place = data.rfind(b"PK\x01\x02") + 24
    data[place : place + 4] = (300).to_bytes(4, "little")
    path.write_bytes(data)


def long_onnx_stamp(path: Path) -> None:
    pair = field(1, len(NAME), NAME.encode()) + field(2, 3_000_000, b" " * 3_000_000)
    path.write_bytes(b"\x08\x0a" + field(2, 1, b"x") + field(7, 0, b"") + field(14, len(pair), pair))


UNREADABLE = {
    "300,000,000 bytes, and 1,048,576 are read": zip_bomb,
    "its checksum is wrong": changed,
    "not as long as the archive says": claims_less,
    "nested too deeply": lambda path: zipped(path, b'{"stamp":1,"extra":' + b'{"a":' * 900 + b"1" + b"}" * 901),
    "is nested too deeply": lambda path: zipped(path, b"[" * 500_000),
    "it is not JSON": lambda path: zipped(path, b""),
    "it is not a JSON object": lambda path: zipped(path, b"[1]"),
    "it has 3,000,025 bytes": long_onnx_stamp,
    "it has 20,000,003 bytes": long_stamp,
}


@pytest.mark.parametrize("why", UNREADABLE)
def test_a_stamp_that_cannot_be_read_is_not_called_none(why, tmp_path, capsys):
    path = tmp_path / "model"
    UNREADABLE[why](path)
    for words in ([], ["--json"]):
        assert main(["inspect", str(path), *words]) == 2
        told = capsys.readouterr().err
        assert f"{path} has a stamp that cannot be read: " in told
        assert why in told


def test_a_stamp_as_deep_as_any_that_is_written_is_read(tmp_path, run):
    deep: Any = "end"
    for _ in range(200):
        deep = {"a": deep}
    torch.save(model().state_dict(), tmp_path / "m.pt")
    told = fanfold.stamp(tmp_path / "m.pt", deep=deep)
    assert fanfold.inspect(tmp_path / "m.pt")["stamp"] == told


def test_a_stamp_is_read_where_torch_was_told_to_write_no_checksums(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        with fanfold.init("p", dir=tmp_path / "runs", quiet=True, system=False, stamp=True) as run:
            torch.save(model().state_dict(), tmp_path / "m.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert fanfold.inspect(tmp_path / "m.pt")["stamp"]["run"]["id"] == run.id


def test_what_another_program_says_under_that_name_is_shown_as_its_own(tmp_path, capsys):
    torch.jit.save(torch.jit.script(model()), str(tmp_path / "m.pt"), _extra_files={NAME: '{"mine": 1, "run": {"id": "x"}}'})
    (tmp_path / NAME).write_text("{}")
    assert main(["inspect", str(tmp_path / "m.pt")]) == 1
    told = capsys.readouterr().out
    assert "foreign   another program's producer_info.json: mine=1, run={'id': 'x'}" in told
    assert "no stamp" in told
    assert main(["inspect", str(tmp_path)]) == 1
    assert "another program's producer_info.json: it is empty" in capsys.readouterr().out


@pytest.mark.parametrize("lie", [(28, b"\xff\xff"), (30, b"\xff"), (6, b"\xff")], ids=["lengths", "name", "version"])
def test_a_table_of_contents_that_no_saver_writes_is_not_written_on(lie, tmp_path, run):
    path = tmp_path / "m.pt"
    torch.save(model().state_dict(), path)
    whole = bytearray(path.read_bytes())
    table = whole.find(b"PK\x01\x02")
    offset, lies = lie
    place = table + (46 if offset == 30 else offset)
    whole[place : place + len(lies)] = lies
    whole[table + 9] |= 0x08  # names are UTF-8, it says
    path.write_bytes(whole)
    with pytest.raises(FanfoldError, match="damaged"):
        fanfold.stamp(path)
    assert path.read_bytes() == whole
    assert [item.name for item in tmp_path.iterdir() if item.is_file()] == ["m.pt"]


def answer_or_error(path: Path) -> None:
    try:
        assert set(fanfold.inspect(path)) == {"path", "format", "size", "stamp", "facts"}
    except FanfoldError as error:
        assert str(path) in str(error)


def test_fields_of_an_onnx_file_that_are_of_another_kind_are_passed_over(tmp_path):
    odd = b"\x08\x05\x12\x01x"  # the key is a number; as an opset, the domain is one and the version a text
    model = b"\x08\x0a" + field(7, 0, b"") + field(14, len(odd), odd) + field(8, len(odd), odd) + b"\x10\x05"
    (tmp_path / "m.onnx").write_bytes(model)
    assert fanfold.inspect(tmp_path / "m.onnx")["facts"] == {"metadata": {"": "x"}, "opsets": {"ai.onnx": None}, "ir_version": 10}


def test_long_metadata_of_an_onnx_file_is_cut_and_its_stamp_is_not(tmp_path, run):
    long = onnx_model()
    onnx.helper.set_model_props(long, {"short": "kept", "long": "x" * 3_000_000})
    onnx.save(long, tmp_path / "m.onnx")
    fanfold.stamp(tmp_path / "m.onnx", note="y" * 900_000)
    found = fanfold.inspect(tmp_path / "m.onnx")
    assert len(found["stamp"]["extra"]["note"]) == 900_000
    assert found["facts"]["metadata"]["short"] == "kept"
    assert found["facts"]["metadata"]["long"].lstrip("x") == "…"
    assert len(found["facts"]["metadata"]["long"]) < 100_000


# Kills a child before each call that changes something on the disk, whoever makes it, and says how many there were.
KILLER = """
    import os, shutil, signal, sys
    from pathlib import Path
    import fanfold

    def child(path, last):
        calls = 0
        def watch(frame, event, arg):
            nonlocal calls
            if event == "c_call" and arg.__name__ in ("pwrite", "truncate", "ftruncate", "replace", "rename"):
                calls += not isinstance(getattr(arg, "__self__", None), (str, bytes))
                if calls == last:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.setprofile(watch)
        fanfold.stamp(path, note="new")
        os._exit(0)

    fanfold.stamp(shutil.copy2(sys.argv[1], sys.argv[2]))  # what is read once, and what is imported, is there
    last, status = 0, 1
    while status:
        last += 1
        place = Path(f"{sys.argv[2]}-{last}.onnx")
        shutil.copy2(sys.argv[1], place)
        pid = os.fork()
        if not pid:
            child(place, last)
        status = os.waitpid(pid, 0)[1]
    print(last - 1)
"""


def foreign_entry(stamp: dict[str, Any]) -> bytes:
    """Return a stamp as another writer may put it: of a length that none of ours has, so that none fits in its place."""
    text = json.dumps(stamp).encode().ljust(16_382)
    body = field(1, len(NAME), NAME.encode()) + field(2, len(text), text) + b"\x18\x01"
    return field(14, len(body), body)


@pytest.mark.parametrize("older", ["none", "longer", "shorter", "foreign", "not at the end"])
def test_an_onnx_stamp_that_is_killed_leaves_a_model_that_loads(older, tmp_path):
    model = tmp_path / "m.onnx"
    onnx.save(onnx_model(), str(model))
    if older == "foreign":
        model.write_bytes(model.read_bytes() + foreign_entry({"mine": 1}))
    elif older != "none":
        fanfold.stamp(model, note="" if older == "shorter" else "old" * 500)
    if older == "not at the end":
        model.write_bytes(model.read_bytes() + b"\x28\x01")  # a version behind it
    size, told = model.stat().st_size, fanfold.inspect(model)["stamp"]
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLER), str(model), str(tmp_path / "killed")],
        capture_output=True, text=True, timeout=120, check=True)  # fmt: skip
    assert int(done.stdout) >= 1
    for number in range(1, int(done.stdout) + 1):
        killed = tmp_path / f"killed-{number}.onnx"
        assert fanfold.inspect(killed)["stamp"] == told  # the last of the calls changes the file
        FORMATS["ONNX"][2](killed)
    whole = tmp_path / f"killed-{int(done.stdout) + 1}.onnx"
    assert fanfold.inspect(whole)["stamp"]["extra"] == {"note": "new"}
    FORMATS["ONNX"][2](whole)
    if older == "longer":
        assert whole.stat().st_size < size  # the longer one is gone


@pytest.mark.parametrize("name", ["torch.save", "TorchScript", "torch.export", "skops"])
def test_an_archive_does_not_grow_with_every_stamp_also_when_one_is_killed(name, tmp_path):
    file, save, check = FORMATS[name]
    path = tmp_path / file
    save(path)
    plain = path.stat().st_size
    sizes = []
    for number in range(12):
        fanfold.stamp(path, number=number, note=os.urandom(4000).hex())
        sizes.append(path.stat().st_size)
        assert fanfold.inspect(path)["stamp"]["extra"]["number"] == number
        check(path)
    assert max(sizes) < plain + tail.SLACK + 3 * (sizes[0] - plain)
    assert any(later < size for size, later in pairwise(sizes))
    for _ in range(12):
        fanfold.stamp(path, number=-1, note=os.urandom(4000).hex())
        with path.open("rb") as opened:
            _, last, old = zips._survey(opened, path)
        if old - last > tail.SLACK:  # the next one ends it
            break
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLER), str(path), str(tmp_path / "killed")],
        capture_output=True, text=True, timeout=120, check=True)  # fmt: skip
    assert int(done.stdout) == 2  # the write, and the cut
    for number in (1, 2):
        killed = tmp_path / f"killed-{number}.onnx"
        assert fanfold.inspect(killed)["stamp"]["extra"]["number"] == -1
        check(killed)
    whole = tmp_path / "killed-3.onnx"
    assert fanfold.inspect(whole)["stamp"]["extra"] == {"note": "new"}
    assert whole.stat().st_size < sizes[0]
    check(whole)


def test_what_is_no_model_file_is_said(tmp_path):
    (tmp_path / "text").write_text("hello")
    assert fanfold.inspect(tmp_path / "text")["format"] == "unknown"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FanfoldError, match="neither a file nor a directory"):
        fanfold.inspect(tmp_path / "pipe")
    with pytest.raises(FanfoldError, match="cannot be read"):
        fanfold.inspect(tmp_path / "missing")
    with pytest.raises(FanfoldError, match=r"^s3://bucket/m.pt cannot be read: it is an address"):
        fanfold.inspect("s3://bucket/m.pt")


def test_a_folder_tells_its_newest_stamp_and_which_of_its_files_are_damaged(tmp_path, run, capsys):
    folder = tmp_path / "last"
    folder.mkdir()
    torch.save(model().state_dict(), folder / "b.pt")
    fanfold.stamp(folder, step=1)
    told = json.loads((folder / NAME).read_text())
    (folder / NAME).write_text(json.dumps({**told, "time": "2020-01-01T00:00:00Z"}))
    fanfold.stamp(folder / "b.pt", step=2)  # as the next epoch's saving does
    assert fanfold.inspect(folder)["stamp"]["run"]["step"] == 2
    (folder / "a.pt").write_bytes((folder / "b.pt").read_bytes()[:500])
    assert main(["inspect", str(folder)]) == 2
    assert f"damaged   {folder / 'a.pt'} cannot be read: the end of the archive is missing" in capsys.readouterr().out


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


def test_the_command_finds_runs_whose_names_need_encoding(tmp_path, capsys):
    with fanfold.init("p q/r", id="a/b", dir=tmp_path / "runs", quiet=True, system=False):
        torch.save(model().state_dict(), tmp_path / "m.pt")
        fanfold.stamp(tmp_path / "m.pt")
    words = ["inspect", str(tmp_path / "m.pt"), "--dir", str(tmp_path / "runs"), "--project"]
    assert (main([*words, "p q/r"]), main([*words, "other"])) == (0, 0)
    assert capsys.readouterr().out.count("fanfold show a/b") == 1


def test_the_command_loads_only_what_it_needs(tmp_path):
    torch.save(model().state_dict(), tmp_path / "m.pt")
    fanfold.stamp(tmp_path / "m.pt")
    program = (
        "import sys; from fanfold.cli import main; code = main(['inspect', 'm.pt', '-q']); print(*sys.modules); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "fanfold.provenance.zips" in loaded
    assert not loaded & {
        "torch",
        "numpy",
        "msgspec",
        "ctypes",
        "zipfile",
        "rich",
        "fanfold.journal",
        "fanfold.store",
        "fanfold.drawing",
    }


SHAPES = ["[Infinity]", "[-1]", "[9223372036854775807,9223372036854775807]", '"12"', "[" + "2," * 200 + "2]", "[1e400]"]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_that_no_tensor_has_is_refused(shape, tmp_path):
    head = f'{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":[0,0]}}}}'.encode()
    (tmp_path / "m.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    with pytest.raises(FanfoldError, match="its header"):
        fanfold.inspect(tmp_path / "m.safetensors")


@pytest.mark.parametrize("count", [1, 101])
def test_kinds_of_numbers_that_there_are_not_are_refused(count, tmp_path):
    kinds = ["F" * 1000] if count == 1 else [f"F{number}" for number in range(count)]
    head = json.dumps({kind: {"dtype": kind, "shape": [], "data_offsets": [0, 0]} for kind in kinds}).encode()
    (tmp_path / "m.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    with pytest.raises(FanfoldError, match="its header"):
        fanfold.inspect(tmp_path / "m.safetensors")


def test_the_command_says_long_things_in_short(tmp_path, run, capsys):
    torch.save(model().state_dict(), tmp_path / "m.pt")
    fanfold.stamp(tmp_path / "m.pt", note="x" * 500_000)
    assert main(["inspect", str(tmp_path / "m.pt")]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) < 3000
    assert main(["inspect", str(tmp_path / "m.pt"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["stamp"]["extra"]["note"]) == 500_000


def test_the_command_shows_hostile_texts_and_never_obeys_them(tmp_path, run):
    evil = "\x1b[2J\x1b]0;owned\x07\u202e"
    stamp = {
        "stamp": 1, "run": {"id": str(run.path), "name": evil, "project": evil, "step": evil},
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
    from fanfold.provenance import read

    torch.save(model().state_dict(), tmp_path / "m.pt")
    for number in range(30):
        (tmp_path / f"{number}.jpg").write_bytes(b"x")
    monkeypatch.setattr(read, "MAX_ENTRIES", 10)
    walked = []
    monkeypatch.setattr(read.os, "walk", lambda path: walked.append(path) or iter([(str(path), [], _counted(walked, path))]))
    assert read.size_of(tmp_path) > 0
    assert len(walked) <= 12


def _counted(seen: list[Any], folder: Path) -> Any:
    for item in sorted(folder.iterdir()):
        if item.is_file():
            seen.append(item)
            yield item.name


def test_the_id_torch_gives_a_file_is_shown(tmp_path, capsys):
    torch.save(model().state_dict(), tmp_path / "m.pt")
    assert main(["inspect", str(tmp_path / "m.pt")]) == 1
    id = fanfold.inspect(tmp_path / "m.pt")["facts"]["serialization_id"]
    assert f"id        {id} (as in `fanfold usage --files`)" in capsys.readouterr().out
