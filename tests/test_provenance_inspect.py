"""Reading stamps: damaged and hostile files in bounded memory, and the command."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from safetensors.torch import save_file

import fanfold
from fanfold.cli import main
from fanfold.errors import FanfoldError
from fanfold.provenance.record import NAME
from stamped_models import FORMATS, model, training

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
