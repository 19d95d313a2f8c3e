"""Importing from SwanLab: its own logs, what fanfold sent there, several starts of one run, and damage."""

import math
import os
import random
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import fanfold
from fanfold.transfer.events import Artifact, Left, Mark, Rows, Values
from fanfold.transfer.swanlab import SwanLabImporter
from round_trip import (
    brought_back,
    played,
    points,
    run_in,
    same_bytes,
    same_file,
    same_images,
    same_texts,
    send,
)

SETTINGS = {"SWANLAB_MODE": "offline"}
# What a user of SwanLab does, with SwanLab's own calls.
OWN_CALLS = """
    import swanlab, numpy as np, sys
    swanlab.init(project="proj", experiment_name="exp", mode="offline", log_dir="swan", tags=["t"], description="notes",
                 config={"lr": 0.1, "nested": {"a": [1, 2], "none": None, "text": "x: y\\nz"}}, **eval(sys.argv[1]))
    for i in range(20):
        swanlab.log({"loss": 1 / (i + 1), "deep": {"er": i}}, step=i * 2)
    swanlab.log({"nan": float("nan"), "down": -float("inf")}, step=50)
    pixels = np.full((4, 5, 3), 7, np.uint8)
    swanlab.log({"image": swanlab.Image(pixels, caption="c"), "text": swanlab.Text("hello"),
                 "images": [swanlab.Image(pixels), swanlab.Image(pixels + 1)]}, step=51)
    swanlab.log({"table": swanlab.ECharts(swanlab.echarts.Table().add(["a", "b"], [[1, "x"]]))}, step=52)
    print("printed line")
    swanlab.finish()
"""


def play(folder: Path, **arguments: str) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(OWN_CALLS), repr(arguments)], cwd=folder, env={**os.environ, **SETTINGS, "HOME": str(folder)},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "swan"


@pytest.fixture(scope="module")
def product(tmp_path_factory) -> Path:
    """A folder that SwanLab itself wrote."""
    return play(tmp_path_factory.mktemp("swanlab"))


def test_runs_that_swanlab_wrote_are_carried_with_everything(product, tmp_path):
    run, account = brought_back(product, tmp_path)
    assert (run.project, run.name, run.status, run.tags, run.notes) == ("proj", "exp", "finished", ["t"], "notes")
    assert run.config == {"lr": 0.1, "nested": {"a": [1, 2], "none": None, "text": "x: y\nz"}}
    series = run.series("loss")
    assert (series.steps.tolist(), series.values.tolist()) == ([i * 2 for i in range(20)], [1 / (i + 1) for i in range(20)])
    assert run.series("deep/er").values.tolist() == list(range(20))
    assert math.isnan(run.series("nan").values[0])
    assert run.series("down").values[0] == -math.inf
    picture = run.media("image")[0].load()
    assert (picture.caption, picture.array()[0, 0].tolist()) == ("c", [7, 7, 7])
    assert [point.load().array()[0, 0, 0] for point in run.media("images")] == [7, 8]
    assert [(point.step, point.text) for point in run.texts("text")] == [(51, "hello")]
    assert run.media("table")[0].load().rows == [[1, "x"]]
    assert b"printed line\n" in run.console()
    assert account.left == []


def test_a_run_sent_to_swanlab_comes_back_equal(tmp_path):
    original = played(tmp_path, 21)
    send(tmp_path, "swanlab", {"log_dir": str(tmp_path / "swan")}, **SETTINGS)
    run, account = brought_back(tmp_path / "swan", tmp_path / "back")
    assert run.id == original.id
    assert (run.name, run.status, run.group) == (original.name, original.status, original.group)
    assert (run.tags, run.notes, run.assigned) == (original.tags, original.notes, original.assigned)
    for key in ("loss", "val/acc", "count", "odd"):
        assert [point[:2] for point in points(run, key)] == [
            point[:2] for point in points(original, key)
        ]  # SwanLab has its own times
    assert run.config == original.config
    same_texts(original, run, "essay")
    same_images(original, run, "image")
    assert [point.load().rows for point in run.media("table")] == [
        [["" if cell is None else cell for cell in row] for row in point.load().rows] for point in original.media("table")
    ]
    same_bytes(original, run, "audio")
    same_file(original, run, "model.bin")
    assert len([artifact for artifact in run.artifacts if artifact["kind"] == "echarts"]) == 3  # histograms are charts there
    assert account.left == []


def test_several_starts_of_one_run_are_its_attempts(tmp_path):
    play(tmp_path, id="same")
    (account,) = fanfold.import_runs(tmp_path / "swan", dir=tmp_path / "back")
    play(tmp_path, id="same", resume="allow")
    assert len(list((tmp_path / "swan").glob("run-*"))) == 2
    (account,) = fanfold.import_runs(tmp_path / "swan", dir=tmp_path / "back")
    assert account.outcome == "updated"
    run = run_in(tmp_path / "back")
    assert len(run.attempts) == 2
    assert run.series("loss").steps.tolist() == [i * 2 for i in range(20)]


def logs(folder: Path) -> list[Path]:
    return list(folder.glob("run-*/run-*.swanlab"))


def test_a_torn_end_is_read_when_it_is_complete(product, tmp_path):
    shutil.copytree(product, tmp_path / "swan")
    (log,) = logs(tmp_path / "swan")
    whole = log.read_bytes()
    position, found = None, []
    for size in (0, 5, 7, 100, 777, 1500, len(whole) - 3, len(whole)):
        log.write_bytes(whole[:size])
        for run in SwanLabImporter().find(tmp_path / "swan"):
            made = list(SwanLabImporter().read(run, position))
            position = next((event.position for event in made if isinstance(event, Mark)), position)
            found += made
    assert not [event for event in made if isinstance(event, Left)]
    rows = [
        value
        for event in found
        if isinstance(event, Rows) and "loss" in event.columns
        for value in event.columns["loss"].tolist()
    ]
    assert rows == [1 / (i + 1) for i in range(20)]


def test_damaged_logs_never_raise(product, tmp_path):
    shutil.copytree(product, tmp_path / "swan")
    (log,) = logs(tmp_path / "swan")
    rng, whole = random.Random(4), log.read_bytes()
    for _ in range(1000):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        log.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.3 else data)
        for run in SwanLabImporter().find(tmp_path / "swan"):
            list(SwanLabImporter().read(run))


def test_a_log_of_another_version_is_reported(product, tmp_path):
    shutil.copytree(product, tmp_path / "swan")
    (log,) = logs(tmp_path / "swan")
    log.write_bytes(log.read_bytes()[:6] + b"\x01" + log.read_bytes()[7:])
    (found,) = SwanLabImporter().find(tmp_path / "swan")
    (left,) = SwanLabImporter().read(found)
    assert "version 1 of its format" in left.why


def test_no_file_outside_of_the_folder_is_read(product, tmp_path):
    shutil.copytree(product, tmp_path / "deep" / "swan")
    (tmp_path / "secret.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (picture, *_) = (tmp_path / "deep/swan").glob("run-*/media/image/*.png")
    picture.unlink()
    picture.symlink_to(tmp_path / "secret.png")
    (found,) = SwanLabImporter().find(tmp_path / "deep" / "swan")
    events = list(SwanLabImporter().read(found))
    assert any(left.what == "image" for left in events if isinstance(left, Left))
    inside = [path for event in events if isinstance(event, Artifact) for _, path in event.files]
    assert all(path.is_relative_to(tmp_path / "deep") for path in inside)
    assert len([event for event in events if isinstance(event, Values)]) >= 2
