"""Importing from Trackio: databases of several versions, what fanfold sent there, and damage."""

import math
import os
import random
import sqlite3
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

import fanfold
from fanfold.transfer.events import Definition, End, Left, Rows
from fanfold.transfer.trackio import TrackioImporter
from paths import DATA
from round_trip import (
    brought_back,
    flat_config,
    played,
    points,
    run_in,
    same_bytes,
    same_file,
    same_histograms,
    same_images,
    same_points,
    same_tables,
    same_texts,
    send,
)

# What a user of Trackio does, with Trackio's own calls.
OWN_CALLS = """
    import trackio, numpy as np
    run = trackio.init(project="proj", name="run one", embed=False, auto_log_gpu=False, auto_log_cpu=False, group="g",
                       config={"lr": 0.1, "nested": {"a": [1, 2]}})
    for i in range(20):
        trackio.log({"loss": 1 / (i + 1), "said": f"text {i}", "deep": {"er": i}})
    trackio.log({"nan": float("nan"), "inf": float("inf"), "down": -float("inf"), "flag": True, "none": None, "big": 2**60})
    pixels = np.full((4, 5, 3), 7, np.uint8)
    trackio.log({"image": trackio.Image(pixels, caption="c"), "histogram": trackio.Histogram([1, 2, 3]), "step": 5,
                 "table": trackio.Table(columns=["a", "picture"], data=[[1, trackio.Image(pixels)]]),
                 "markdown": trackio.Markdown("# head"), "html": trackio.Html("<b>x</b>")})
    trackio.alert("Loss is high", "look at it", level=trackio.AlertLevel.ERROR)
    trackio.log_system({"cpu": 3.0})
    artifact = trackio.Artifact("weights", type="model")
    open("w.bin", "wb").write(b"weights")
    artifact.add_file("w.bin")
    run.log_artifact(artifact)
    trackio.finish()
"""
SETTINGS = {"HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module")
def product(tmp_path_factory) -> Path:
    """A folder that Trackio itself wrote."""
    folder = tmp_path_factory.mktemp("trackio")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(OWN_CALLS)], cwd=folder, capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, **SETTINGS, "TRACKIO_DIR": str(folder / "trackio"), "HF_HOME": str(folder / "hf")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder / "trackio"


def test_runs_that_trackio_wrote_are_carried_with_everything(product, tmp_path):
    run, account = brought_back(product, tmp_path)
    assert (run.project, run.name, run.group) == ("proj", "run one", "g")
    assert run.config == {"lr": 0.1, "nested": {"a": [1, 2]}}
    assert run.series("loss").values.tolist() == [1 / (i + 1) for i in range(20)]
    assert run.series("deep/er").steps.tolist() == list(range(20))
    assert [point.text for point in run.texts("said")] == [f"text {i}" for i in range(20)]
    assert math.isnan(run.series("nan").values[0])
    assert (run.series("inf").values[0], run.series("down").values[0]) == (math.inf, -math.inf)
    assert (run.series("flag").values[0], run.series("big").values[0], run.series("step").values[0]) == (True, 2**60, 5)
    picture = run.media("image")[0].load()
    assert (picture.caption, picture.array()[0, 0, :3].tolist()) == ("c", [7, 7, 7])
    assert run.media("histogram")[0].load().counts.sum() == 3
    row = run.media("table")[0].load().rows[0]
    assert (row[0], row[1].array()[0, 0, :3].tolist()) == (1, [7, 7, 7])
    assert "<b>x</b>" in run.media("html")[0].load().html
    assert [(alert["title"], alert["text"], alert["level"]) for alert in run.alerts] == [("Loss is high", "look at it", "error")]
    assert run.series("system/cpu").values.tolist() == [3.0]
    (artifact,) = run.artifacts
    assert (artifact["name"], run.artifact_file(artifact["files"][0]["blob"]).read_bytes()) == ("weights", b"weights")
    assert [(left.what, left.count) for left in account.left] == [("empty values", 1)]


def test_times_are_the_originals_and_importing_twice_adds_nothing(product, tmp_path):
    run, _ = brought_back(product, tmp_path)
    with sqlite3.connect(product / "proj.db") as database:
        stamps = [row[0] for row in database.execute("SELECT timestamp FROM metrics ORDER BY id LIMIT 20")]
    from datetime import datetime

    assert [round(time * 1e6) for time in run.series("loss").times] == [
        round(datetime.fromisoformat(stamp).timestamp() * 1e6) for stamp in stamps
    ]
    before = points(run, "loss")
    (again,) = fanfold.import_runs(product, dir=tmp_path)
    assert again.outcome == "unchanged"
    assert points(run_in(tmp_path), "loss") == before


def test_rows_added_later_are_the_only_ones_read_again(product):
    (found,) = TrackioImporter().find(product / "proj.db")
    position = next(
        event.position for event in TrackioImporter().read(found) if hasattr(event, "position") and event.position["alerts"]
    )
    assert not [
        event
        for event in TrackioImporter().read(found, {**position, "metrics": 19})
        if isinstance(event, Rows) and "loss" not in event.columns and event.steps is None
    ]
    assert not [event for event in TrackioImporter().read(found, position) if isinstance(event, Rows)]


def test_a_run_sent_to_trackio_comes_back_equal(tmp_path):
    original = played(tmp_path, 11, "run.alert('Careful', 'now', level='error')")
    send(tmp_path, "trackio", TRACKIO_DIR=str(tmp_path / "trackio"), **SETTINGS)
    run, account = brought_back(tmp_path / "trackio", tmp_path / "back")
    assert run.id == original.id
    assert (run.name, run.status, run.group) == (original.name, original.status, original.group)
    assert (run.tags, run.notes, run.assigned) == (original.tags, original.notes, original.assigned)
    for key in ("loss", "val/acc", "count", "odd"):
        same_points(original, run, key)
    assert flat_config(run) == flat_config(original)
    same_texts(original, run, "essay")
    same_images(original, run, "image")
    same_histograms(original, run, "histogram")
    same_tables(original, run, "table")
    same_bytes(original, run, "audio")
    same_file(original, run, "model.bin")
    assert [(alert["title"], alert["text"], alert["level"]) for alert in run.alerts] == [("Careful", "now", "error")]
    assert account.left == []


OLD = """
    CREATE TABLE metrics (id INTEGER PRIMARY KEY AUTOINCREMENT, timestamp TEXT, run_name TEXT, step INTEGER, metrics TEXT);
    CREATE TABLE configs (id INTEGER PRIMARY KEY AUTOINCREMENT, run_name TEXT, config TEXT, created_at TEXT);
    INSERT INTO metrics VALUES (1, '2025-08-01T10:00:00.250000', 'a run', 0, '{"loss": 0.5}'),
        (2, '2025-08-01T10:00:01', 'a run', 1, CAST('{"loss": "NaN"}' AS BLOB)), (3, '2025-08-01T10:00:01', 'other', 1, '{"x": 1}');
    INSERT INTO configs VALUES (1, 'a run', '{"lr": 0.1}', '2025-08-01T10:00:02');
"""


def old_database(folder: Path, more: str = "") -> Path:
    with sqlite3.connect(folder / "old project.db") as database:
        database.executescript(OLD + more)
    return folder / "old project.db"


def test_databases_that_know_runs_by_name_are_read(tmp_path):
    accounts = fanfold.import_runs(old_database(tmp_path), dir=tmp_path / "back")
    assert sorted(account.name for account in accounts) == ["a run", "other"]
    (run,) = [run for run in fanfold.runs(dir=tmp_path / "back") if run.name == "a run"]
    assert (run.project, run.config, run.status) == ("old project", {"lr": 0.1}, "finished")
    assert str(run.series("loss").values.tolist()) == "[0.5, nan]"
    assert [round(time, 6) for time in run.series("loss").times.tolist()] == [1754042400.25, 1754042401.0]


def test_a_database_that_trackio_0_9_wrote_is_read(tmp_path):
    with zipfile.ZipFile(DATA / "trackio_0_9_1.zip") as archive:
        archive.extractall(tmp_path)
    run, account = brought_back(tmp_path / "trackio", tmp_path / "back")
    assert (run.name, run.config) == ("run one", {"lr": 0.1, "n": {"a": [1, 2]}})
    assert run.series("loss").values.tolist() == [1.0, 0.5, 1 / 3]
    assert (run.media("img")[0].load().caption, run.media("img")[0].load().array().shape[:2]) == ("c", (4, 4))
    assert [left.what for left in account.left] == ["empty values"]


def test_steps_with_a_fraction_keep_their_exact_value_as_the_x_axis(tmp_path):
    path = old_database(tmp_path, "INSERT INTO metrics VALUES (4, '2025-08-01T10:00:03', 'a run', 1.25, '{\"loss\": 0.125}');")
    found = next(found for found in TrackioImporter().find(path) if found.name == "a run")
    events = list(TrackioImporter().read(found))
    assert [event for event in events if isinstance(event, Definition)] == [Definition(key="loss", options={"x": "trackio/step"})]
    (rows,) = [event for event in events if isinstance(event, Rows)]
    assert rows.columns["trackio/step"].tolist() == [0.0, 1.0, 1.25]
    assert len(set(rows.steps.tolist())) == 3


def test_a_path_that_leads_out_of_the_media_folder_is_not_read(tmp_path):
    (tmp_path / "secret.png").write_bytes(b"\x89PNG\r\n\x1a\nsecret")
    for name in ("../secret.png", str(tmp_path / "secret.png")):
        value = f'{{"image": {{"_type": "trackio.image", "file_path": "{name}", "caption": null}}}}'
        (tmp_path / "old project.db").unlink(missing_ok=True)
        path = old_database(tmp_path, f"INSERT INTO metrics VALUES (4, '2025-08-01T10:00:03', 'a run', 3, '{value}');")
        found = next(found for found in TrackioImporter().find(path) if found.name == "a run")
        left = [event for event in TrackioImporter().read(found) if isinstance(event, Left)]
        assert [(event.what, "leads out" in event.why) for event in left] == [("trackio.image", True)]


def test_damaged_databases_never_raise_and_nothing_is_written_beside(product, tmp_path):
    rng, whole = random.Random(3), (product / "proj.db").read_bytes()
    path = tmp_path / "proj.db"
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 60)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.3 else data)
        for found in TrackioImporter().find(path):
            assert [event for event in TrackioImporter().read(found) if not isinstance(event, End)]
    assert os.listdir(tmp_path) == ["proj.db"]
