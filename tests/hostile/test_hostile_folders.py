"""Run folders that hold pipes, sockets, devices and links: nothing waits for them, and nothing is read through them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

import fanfold
from fanfold.errors import FanfoldError, JournalError, RunNotFound
from fanfold.fleet.forward_run import Following
from fanfold.fleet.intake import DirectoryIntake
from fanfold.journal import blobs
from fanfold.journal.files import open_inside, open_regular
from fanfold.journal.mapping import map_file
from fanfold.publish.answers import Answers
from fanfold.server import app
from fanfold.store.query import LocalStore
from fleet_tools import Gateway


@pytest.fixture
def run(tmp_path: Path) -> fanfold.Run:
    run = fanfold.init("llm", dir=tmp_path / "runs", id="r1", system=False, quiet=True)
    run.log({"loss": 1.0, "img": fanfold.Image(np.zeros((2, 2, 3), np.uint8))}, step=0)
    run.finish()
    return run


def odd(place: Path, kind: str) -> None:
    """Put something that is not a file where a file is expected."""
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            here = Path.cwd()
            os.chdir(place.parent)  # the name of a socket may not be long
            one.bind(place.name)
            os.chdir(here)
    elif kind == "device":
        place.symlink_to("/dev/zero")
    else:
        target = place.parent.parent / "target"
        target.write_bytes(b"secret")
        place.symlink_to(target)


@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "link"])
def test_what_is_no_regular_file_is_never_waited_for_nor_read(run, kind, tmp_path):
    journal = run.path / "journal"
    for name in ("0-1111111111111111.ffj", "0-2222222222222222.ffz", "0-3333333333333333.ffj.alive"):
        odd(journal / name, kind)
    for folder, name in (("relay", "wandb-x.cursor"), ("forward", "x.json"), ("ops", "0-1.ops"), ("ops", "trace.json")):
        (run.path / folder).mkdir(exist_ok=True)
        odd(run.path / folder / name, kind)
    blob = hashlib.sha256(kind.encode()).hexdigest()
    (run.path / "blobs" / blob[:2]).mkdir(parents=True, exist_ok=True)
    odd(run.path / "blobs" / blob[:2] / blob, kind)
    for words in (["ls", "--json"], ["show", "r1", "--json"], ["ops", "r1", "--json"], ["prune", "--json", "--dry-run"]):
        command = [sys.executable, "-m", "fanfold", *words, "--dir", str(tmp_path / "runs")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, check=False)
        assert "Traceback" not in done.stderr
        if words[0] in ("ls", "show"):
            assert done.returncode == 0, done.stderr
            assert "r1" in json.dumps(json.loads(done.stdout))
    assert fanfold.open(run.path).series("loss").values.tolist() == [1.0]
    with pytest.raises((JournalError, OSError)):
        blobs.get(run.path, blob)
    client = TestClient(app(tmp_path / "runs"), base_url="http://127.0.0.1:8642")
    asked = {"project": "llm", "run": "r1", "blob": blob}
    assert client.get("/media", params=asked).status_code == 404
    following = Following(run.path, "http://gateway")
    assert following._size(blob) is None
    assert DirectoryIntake(tmp_path / "runs").missing("llm", "r1", [blob]) == {blob: 0}


@pytest.mark.parametrize("level", ["blobs", "first"])
def test_a_blob_behind_a_linked_folder_is_not_read(run, level, tmp_path):
    data = b"somebody's secret"
    name = hashlib.sha256(data).hexdigest()
    outside = tmp_path / "outside"
    (outside / name[:2]).mkdir(parents=True)
    (outside / name[:2] / name).write_bytes(data)
    blobs_folder = run.path / "blobs"
    if level == "blobs":
        blobs_folder.rename(run.path / "old")
        blobs_folder.symlink_to(outside)
    else:
        blobs_folder.joinpath(name[:2]).symlink_to(outside / name[:2])
    with pytest.raises(JournalError, match="link"):
        blobs.get(run.path, name)
    client = TestClient(app(tmp_path / "runs"), base_url="http://127.0.0.1:8642")
    assert client.get("/media", params={"project": "llm", "run": "r1", "blob": name}).status_code == 404
    assert Following(run.path, "http://gateway")._size(name) is None


def test_a_run_reached_through_a_link_above_it_still_has_its_blobs(run, tmp_path):
    (tmp_path / "elsewhere").symlink_to(tmp_path / "runs")
    name = next((run.path / "blobs").glob("??/*")).name
    assert blobs.get(tmp_path / "elsewhere" / "llm" / "r1", name) == blobs.get(run.path, name)


def test_a_linked_project_is_not_followed_and_a_linked_directory_is(run, tmp_path):
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "plink").symlink_to(run.path.parent)
    assert fanfold.runs(dir=tmp_path / "evil") == []
    assert fanfold.runs("plink", dir=tmp_path / "evil") == []
    with pytest.raises(RunNotFound):
        LocalStore(tmp_path / "evil").run("plink", "r1")
    (tmp_path / "named").symlink_to(tmp_path / "runs")
    assert [one.id for one in fanfold.runs("llm", dir=tmp_path / "named")] == ["r1"]
    assert LocalStore(tmp_path / "named").run("llm", "r1").id == "r1"


LIMITED = """
import resource, runpy
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
runpy.run_module("fanfold", run_name="__main__")
"""


@pytest.mark.parametrize("words", [["usage"], ["ls", "--json"], ["sync"]])
def test_a_sparse_journal_costs_nothing_and_is_named(run, words, tmp_path):
    sparse = run.path / "journal" / "1-1111111111111111.ffj"
    sparse.write_bytes(next((run.path / "journal").glob("0-*.ffj")).read_bytes()[:200])
    os.truncate(sparse, 40 << 30)
    if words == ["sync"]:
        (run.path / "relay").mkdir()
        (run.path / "relay" / "x.cursor").write_text("{}")
    command = [sys.executable, "-c", LIMITED, *words, "--dir", str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, check=False)
    assert f"{sparse} cannot be read: it is a sparse file" in done.stderr
    assert "permissions" not in done.stderr
    assert "Cannot allocate" not in done.stderr
    if words[0] == "ls":
        assert [one["id"] for one in json.loads(done.stdout)] == ["r1"]


READ_IMAGE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
import fanfold
from fanfold.store.query import LocalStore
from fanfold.tools.table import asked
(image,) = fanfold.open("r1", dir=sys.argv[1]).media("img")
for read in (image.load, asked(LocalStore(sys.argv[1]), "media", {"run": "r1", "key": "img"}, write=False)[1]):
    try:
        print(read()["points"][0]["kind"])
    except fanfold.errors.JournalError as error:
        print(error)
"""


def test_a_sparse_medium_costs_nothing(run, tmp_path):
    (image,) = fanfold.open(run.path).media("img")  # a patch of uncommitted changes is a blob, too
    os.truncate(blobs.path_of(run.path, image.entry["blob"]), 40 << 30)
    command = [sys.executable, "-c", READ_IMAGE, str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    said, listed = done.stdout.splitlines() or [done.stderr, ""]
    assert "almost nothing but holes" in said
    assert listed == "image"  # agents get no picture of more than a megabyte, so it is not read


def test_a_published_answer_is_replaced_by_no_other_of_its_name(tmp_path):
    """The names are short hashes that a run can be made to hit."""
    answers = Answers(LocalStore(tmp_path / "runs"), tmp_path)
    answers.put("api/run", "llm", "a", answer="first")
    answers.put("api/run", "llm", "a", answer="second")
    (file,) = tmp_path.glob("*.json")
    assert file.read_text() == '"first"'
    assert list(answers.left_out.values()) == [1]


def test_a_file_as_long_as_the_memory_can_be_mapped(tmp_path):
    """Reserving the addresses of a long journal must not count as memory that is used."""
    with (tmp_path / "long").open("w+b") as file:
        os.truncate(file.fileno(), 1 << 42)
        found = map_file(file.fileno(), 1 << 42)
    assert found[(1 << 42) - 1] == 0
    with pytest.raises(TypeError):
        found[0] = 1


def test_regular_files_are_opened_and_others_are_errors(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(b"x")
    with open_regular(tmp_path / "a" / "file") as file:
        assert file.read() == b"x"
    with open_inside(tmp_path, "a", "file") as file:
        assert file.read() == b"x"
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(tmp_path / "a")


def test_prune_removes_nothing_behind_a_linked_folder_and_passes_a_pipe(run, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    half = outside / ".4194304-0123abcd"  # as a process that is gone leaves it
    half.write_bytes(b"somebody's")
    os.utime(half, (1, 1))
    (run.path / "blobs").rename(run.path / "old")
    (run.path / "blobs").symlink_to(outside)
    odd(run.path / "ops", "pipe")
    command = [sys.executable, "-m", "fanfold", "prune", "--json", "--dir", str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert half.exists()
    (run.path / "blobs").unlink()
    odd(run.path / "blobs", "pipe")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_run_folder_whose_name_is_not_text_hides_no_other(run, tmp_path):
    shutil.copytree(run.path, run.path.with_name(os.fsdecode(b"\xff\xfe")))
    client = TestClient(app(tmp_path / "runs"), base_url="http://127.0.0.1:8642")
    answer = client.get("/api/runs", params={"project": "llm"})
    assert answer.status_code == 200
    assert [one["id"] for one in answer.json()["runs"]] == ["r1"]
    assert "not UTF-8" in answer.text


# Folders of a run that are links


OWN_FOLDERS = ("journal", "blobs", "relay", "forward", "ops", "trackers", "probes", "blackbox", "agreement")


def command(*words: str, where: Path) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, "-m", "fanfold", *words, "--dir", str(where)]
    return subprocess.run(whole, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, check=False)


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def linked(run, tmp_path) -> Path:
    """A run directory as somebody else hands it on: its journals are a link to those of a private run."""
    folder = tmp_path / "evil" / "llm" / "copied"
    folder.mkdir(parents=True)
    (folder / "journal").symlink_to(run.path / "journal")
    return folder


def test_a_linked_folder_of_journals_is_no_run_to_any_reader(run, linked, tmp_path):
    root, before = tmp_path / "evil", everything(run.path)
    assert fanfold.runs(dir=root) == []
    assert LocalStore(root).projects() == []
    assert LocalStore(root).changed()[1] == []
    for ask in (
        lambda: LocalStore(root).run("llm", "copied"),
        lambda: fanfold.open(linked),
        lambda: fanfold.open("r1", dir=root),
    ):
        with pytest.raises(RunNotFound):
            ask()
    client = TestClient(app(root), base_url="http://127.0.0.1:8642")
    assert client.get("/api/runs", params={"project": "llm"}).json()["runs"] == []
    assert client.get("/api/run", params={"project": "llm", "id": "copied"}).status_code == 404
    for words in (["ls"], ["show", "copied"], ["report", "copied", "-o", str(tmp_path / "x.html")], ["usage"], ["merge"],
                  ["prune"], ["rm", "copied", "--yes"], ["rm", str(linked), "--yes"], ["sync", "copied", "--to", "tensorboard"],
                  ["sync", str(linked), "--to", "tensorboard"]):  # fmt: skip
        done = command(*words, where=root)
        assert "Traceback" not in done.stderr, words
        assert "loss" not in done.stdout, words
    assert everything(run.path) == before
    assert DirectoryIntake(root).root == root
    with pytest.raises(FanfoldError, match="link"):
        DirectoryIntake(root).offset("llm", "copied", "0-" + "1" * 16)


def test_a_linked_run_directory_is_not_listed_but_opens_by_name(run, tmp_path):
    root = tmp_path / "evil"
    (root / "llm").mkdir(parents=True)
    (root / "llm" / "copied").symlink_to(run.path)
    assert fanfold.runs(dir=root) == []
    with pytest.raises(RunNotFound):
        LocalStore(root).run("llm", "copied")
    assert fanfold.open(root / "llm" / "copied").id == "r1"
    assert command("rm", str(root / "llm" / "copied"), "--yes", where=root).returncode != 0
    assert run.path.is_dir()
    with pytest.raises(FanfoldError, match="link"):
        DirectoryIntake(root).offset("llm", "copied", "0-" + "1" * 16)


@pytest.mark.parametrize("name", OWN_FOLDERS)
def test_nothing_is_written_or_removed_through_a_linked_folder_of_a_run(run, name, tmp_path, ends):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "precious").write_text("mine")
    folder = run.path / name
    if folder.exists():
        folder.rename(tmp_path / "aside")
    folder.symlink_to(mine)
    command("sync", "r1", "--to", "tensorboard", where=tmp_path / "runs")
    command("prune", where=tmp_path / "runs")
    gateway = ends(Gateway(tmp_path / "store"))
    command("forward", "--to", gateway.url, "--once", "--prune", where=tmp_path / "runs")
    with contextlib.suppress(FanfoldError):
        fanfold.init("llm", dir=tmp_path / "runs", id="r1", system=False, quiet=True, resume="allow").finish()
    assert everything(mine) == {"precious": b"mine"}


def test_a_link_in_place_of_a_relays_log_or_lock_is_not_written_through(run, tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (run.path / "relay").mkdir()
    for suffix in ("log", "lock"):
        (run.path / "relay" / f"tensorboard.{suffix}").symlink_to(mine)
    command("sync", "r1", "--to", "tensorboard", where=tmp_path / "runs")
    assert mine.read_text() == "mine"
