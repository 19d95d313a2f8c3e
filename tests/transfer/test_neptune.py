"""Importing from Neptune: exported Parquet, offline folders and local databases of its clients, and damage."""

import base64
import datetime
import json
import math
import os
import random
import sqlite3
import subprocess
import sys
import textwrap
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fanfold
from fanfold.transfer.events import Definition, End, Facts, Left, Rows, Start
from fanfold.transfer.neptune import NeptuneImporter
from paths import DATA
from round_trip import (
    brought_back,
    flat_config,
    played,
    same_bytes,
    same_file,
    same_images,
    same_points,
    same_texts,
    send,
)

# The columns that neptune-exporter writes.
SCHEMA = pa.schema([
    ("project_id", pa.string()), ("run_id", pa.string()), ("attribute_path", pa.string()), ("attribute_type", pa.string()),
    ("step", pa.decimal128(18, 6)), ("timestamp", pa.timestamp("ms", tz="UTC")), ("int_value", pa.int64()),
    ("float_value", pa.float64()), ("string_value", pa.string()), ("bool_value", pa.bool_()),
    ("datetime_value", pa.timestamp("ms", tz="UTC")), ("string_set_value", pa.list_(pa.string())),
    ("file_value", pa.struct([("path", pa.string())])),
    ("histogram_value", pa.struct([("type", pa.string()), ("edges", pa.list_(pa.float64())), ("values", pa.list_(pa.float64()))])),
])  # fmt: skip
BEGAN = datetime.datetime(2025, 1, 2, 3, 4, 5, 678_000, tzinfo=datetime.timezone.utc)
PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAQAAAAECAIAAAAmkwkpAAAADElEQVR4nGNgIB0AAAA0AAF2Xq7DAAAAAElFTkSuQmCC")


class Export:
    """A folder as neptune-exporter leaves it."""

    def __init__(self, folder: Path) -> None:
        self.data, self.files = folder / "data" / "ws_proj-1a", folder / "files" / "ws_proj-1a"
        self.data.mkdir(parents=True)
        self.files.mkdir(parents=True)
        self.rows: list[dict[str, object]] = []

    def add(self, path: str, kind: str, step: object = None, seconds: float | None = None, **value: object) -> None:
        when = None if seconds is None else BEGAN + datetime.timedelta(seconds=seconds)
        at = None if step is None else Decimal(str(step))
        self.rows.append({"project_id": "ws/proj", "run_id": "RUN-1", "attribute_path": path, "attribute_type": kind, "step": at,
                          "timestamp": when, **value})  # fmt: skip

    def write(self, part: int = 0, **options: object) -> Path:
        path = self.data / f"RUN-1-2b_part_{part}.parquet"
        pq.write_table(pa.Table.from_pylist(self.rows, SCHEMA), path, **options)
        self.rows = []
        return path


@pytest.fixture
def export(tmp_path) -> Export:
    found = Export(tmp_path / "exports")
    found.add("sys/name", "string", string_value="my run")
    found.add("sys/creation_time", "datetime", datetime_value=BEGAN)
    found.add("sys/description", "string", string_value="notes")
    found.add("sys/tags", "string_set", string_set_value=["b", "a"])
    found.add("sys/owner", "string", string_value="someone")
    found.add("sys/failed", "bool", bool_value=False)
    found.add("parameters/lr", "float", float_value=0.1)
    found.add("parameters/n", "int", int_value=3)
    found.add("parameters/when", "datetime", datetime_value=BEGAN)
    return found


def test_an_export_is_carried_with_everything(export, tmp_path):
    for i in range(100):
        export.add(
            "train/loss", "float_series", i, i, float_value=None if i == 7 else 1 / (i + 1)
        )  # pandas writes NaN as nothing
    export.add("said", "string_series", 3, 3, string_value="hello")
    export.add("monitoring/1a/stdout", "string_series", 3, 3, string_value="printed")
    export.add("monitoring/1a/cpu", "float_series", 0, 4, float_value=50.0)
    export.add(
        "histogram",
        "histogram_series",
        4,
        4,
        histogram_value={"type": "COUNTING", "edges": [0.0, 1.0, 2.0], "values": [3.0, 4.0]},
    )
    export.add("model", "file", file_value={"path": "RUN-1/model.bin"})
    export.add("pictures", "file_series", 5, 5, file_value={"path": "RUN-1/pictures/step_5.png"})
    export.add("code", "file_set", file_value={"path": "RUN-1/code"})
    (export.files / "RUN-1/pictures").mkdir(parents=True)
    (export.files / "RUN-1/code").mkdir()
    (export.files / "RUN-1/model.bin").write_bytes(b"weights")
    (export.files / "RUN-1/pictures/step_5.png").write_bytes(PNG)
    (export.files / "RUN-1/code/main.py").write_text("print()")
    export.write()
    run, account = brought_back(tmp_path / "exports", tmp_path / "back")
    assert (run.project, run.name, run.notes, run.tags, run.status) == ("proj", "my run", "notes", ["a", "b"], "finished")
    assert run.config == {"parameters/lr": 0.1, "parameters/n": 3, "parameters/when": BEGAN.isoformat()}
    assert (run.facts["user"], round(run.started, 3)) == ("someone", BEGAN.timestamp())
    series = run.series("train/loss")
    assert series.steps.tolist() == list(range(100))
    assert str(series.values.tolist()) == str([math.nan if i == 7 else 1 / (i + 1) for i in range(100)])
    assert [round(time, 3) for time in series.times.tolist()] == [round(BEGAN.timestamp() + i, 3) for i in range(100)]
    assert [(point.step, point.text) for point in run.texts("said")] == [(3, "hello")]
    assert run.console() == b"printed\n"
    assert run.series("system/monitoring/1a/cpu").values.tolist() == [50.0]
    assert run.media("histogram")[0].load().counts.tolist() == [3, 4]
    assert bytes(run.media("pictures")[0].load().encode().data) == PNG
    found = {artifact["name"]: run.artifact_file(artifact["files"][0]["blob"]).read_bytes() for artifact in run.artifacts}
    assert found == {"model": b"weights", "code": b"print()"}
    assert account.left == []


def test_decimal_steps_are_exact_on_their_x_axis(export, tmp_path):
    steps = [Decimal("0.000001") * i for i in (0, 1, 2, 500_000, 1_000_003)]
    for i, step in enumerate(steps):
        export.add("loss", "float_series", step, i, float_value=float(i))
        export.add("other", "float_series", i, i, float_value=float(i))
    export.write()
    run, _ = brought_back(tmp_path / "exports", tmp_path / "back")
    assert run.metric("loss")["x"] == "neptune/step"
    drawn = run.curve("loss")
    assert drawn.axis == "neptune/step"
    assert drawn.x.tolist() == [float(step) for step in steps]
    assert run.curve("other").x.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_several_parts_are_one_run_and_a_damaged_one_leaves_the_others(export, tmp_path):
    for part in range(3):
        for i in range(10):
            export.add("loss", "float_series", part * 10 + i, i, float_value=float(i))
        path = export.write(part)
    run, _ = brought_back(tmp_path / "exports", tmp_path / "back")
    assert run.series("loss").steps.tolist() == list(range(30))
    middle = path.with_name(path.name.replace("_2", "_1"))
    data = bytearray(middle.read_bytes())
    data[4:200] = bytes(196)
    middle.write_bytes(data)
    run, account = brought_back(tmp_path / "exports", tmp_path / "again")
    assert {0, 9, 20, 29} <= set(run.series("loss").steps.tolist())
    assert [left.what for left in account.left] == ["parts of the export"]


def test_a_damaged_run_does_not_hide_the_others(export, tmp_path):
    export.add("loss", "float_series", 1, 1, float_value=1.0)
    path = export.write()
    data = bytearray(path.read_bytes())
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    data[footer : footer + 4] = b"\xff" * 4  # its names are there, but it cannot be parsed
    path.with_name("OTHER-3c_part_0.parquet").write_bytes(data)
    accounts = fanfold.import_runs(path.parent, dir=tmp_path / "back")
    assert [account.name for account in accounts if account.outcome == "imported"] == ["my run"]


def test_forks_name_their_parent(export, tmp_path):
    export.add("sys/forking/parent", "string", string_value="RUN-0")
    export.add("sys/forking/step", "float", float_value=12.0)
    export.write()
    run, _ = brought_back(tmp_path / "exports", tmp_path / "back")
    assert run.facts["neptune"] | {"forking/parent": "RUN-0", "forking/step": 12.0} == run.facts["neptune"]
    assert run.group == "RUN-0"


def test_an_export_names_no_other_place_to_read(export, tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    (export.files / "link").symlink_to(tmp_path / "secret.txt")
    for i, path in enumerate(("../../../secret.txt", str(tmp_path / "secret.txt"), "link", "missing")):
        export.add(f"file{i}", "file", file_value={"path": path})
    export.write()
    run, account = brought_back(tmp_path / "exports", tmp_path / "back")
    assert run.artifacts == []
    assert [(left.what, left.count) for left in account.left] == [("files", 4)]


def test_a_large_export_is_read_in_batches_and_importing_twice_adds_nothing(export, tmp_path):
    for i in range(200_000):
        export.rows.append({"project_id": "ws/proj", "run_id": "RUN-1", "attribute_path": f"m{i % 3}", "attribute_type": "float_series",
                            "step": Decimal(i), "timestamp": BEGAN, "float_value": float(i)})  # fmt: skip
    export.write(row_group_size=50_000)
    run, account = brought_back(tmp_path / "exports", tmp_path / "back")
    assert account.points == 200_000
    assert run.series("m1").values.tolist() == [float(i) for i in range(1, 200_000, 3)]
    (again,) = fanfold.import_runs(tmp_path / "exports", dir=tmp_path / "back")
    assert (again.outcome, again.points) == ("unchanged", 0)


def test_damaged_exports_never_raise(export, tmp_path):
    for i in range(50):
        export.add("loss", "float_series", i, i, float_value=float(i))
    path = export.write()
    rng, whole = random.Random(5), path.read_bytes()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 20)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.2 else data)
        for account in fanfold.import_runs(path.parent, dir=tmp_path / "back", dry_run=True):
            assert account.outcome == "would be imported"


# Offline folders of the 1.x client

OFFLINE = """
    import datetime, neptune, numpy as np
    from neptune.types import File
    run = neptune.init_run(mode="offline", name="my name", tags=["b", "a"], description="notes", capture_stdout=False, git_ref=False,
                           capture_stderr=False, capture_hardware_metrics=False, source_files=[])
    run["parameters"] = {"lr": 0.1, "n": 3, "flag": True, "gone": "x"}
    for i in range(20):
        run["train/loss"].append(1 / (i + 1), step=i)
        run["counted"].append(i)
    run["emptied"].append(1.0)
    run["said"].append("hello", step=2)
    run["pictures"].append(File.as_image(np.zeros((4, 4, 3))), name="n", description="d", step=2)
    run["file"].upload(File.from_content("content", extension="txt"))
    del run["parameters/gone"]
    del run["emptied"]
    run["assigned"] = 1.0
    run["assigned"].assign(2.0)
    run["sys/tags"].remove("b")
    run.stop()
"""


def test_an_offline_run_is_replayed(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(OFFLINE)], cwd=tmp_path, env={**os.environ, "NEPTUNE_DATA_DIRECTORY": ".neptune"},
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run, account = brought_back(tmp_path / ".neptune", tmp_path / "back")
    assert (run.name, run.notes, run.tags) == ("my name", "notes", ["a"])
    assert run.config == {"parameters/lr": 0.1, "parameters/n": 3, "parameters/flag": True, "assigned": 2.0}
    assert run.series("train/loss").values.tolist() == [1 / (i + 1) for i in range(20)]
    assert run.series("counted").steps.tolist() == list(range(20))
    assert sorted(run.keys()) == ["counted", "train/loss"]
    assert [(point.step, point.text) for point in run.texts("said")] == [(2, "hello")]
    assert (run.media("pictures")[0].step, run.media("pictures")[0].load().caption) == (2, "n: d")
    (artifact,) = run.artifacts
    assert (artifact["name"], run.artifact_file(artifact["files"][0]["blob"]).read_bytes()) == ("file", b"content")
    assert account.left == []


def test_a_run_sent_to_an_offline_folder_comes_back_equal(tmp_path):
    original = played(tmp_path, 31)
    send(tmp_path, "neptune", NEPTUNE_MODE="offline")
    run, account = brought_back(next((tmp_path / "runs").rglob("offline")), tmp_path / "back")
    assert (run.id, run.project) == (original.id, original.project)
    assert (run.name, run.status, run.notes, run.group) == (original.name, original.status, original.notes, original.group)
    assert (sorted(run.tags), run.assigned) == (sorted(original.tags), original.assigned)
    for key in ("loss", "val/acc", "count", "odd"):
        same_points(original, run, key, time_unit=1e-5)
    wanted = {
        key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in flat_config(original).items()
    }
    assert flat_config(run) == wanted
    same_texts(original, run, "essay")
    same_images(original, run, "image")
    same_bytes(original, run, "audio")
    same_file(original, run, "model.bin")
    assert account.left == []


def offline(folder: Path, *operations: dict) -> Path:
    run = folder / ".neptune" / "offline" / "run__1a__2__3b"
    run.mkdir(parents=True, exist_ok=True)
    (run / "metadata.json").write_text(json.dumps({"containerId": "1a", "createdAt": BEGAN.isoformat()}))
    lines = [json.dumps({"obj": operation, "version": i, "at": 1.7e9 + i}) for i, operation in enumerate(operations, 1)]
    (run / "data-1.log").write_text("\n".join(lines) + "\n")
    return run


def test_offline_runs_keep_fractions_of_steps(tmp_path):
    values = [{"value": float(i), "step": i / 4, "ts": 1.7e9 + i} for i in range(4)]
    run = offline(tmp_path, {"type": "LogFloats", "path": ["a", "b"], "values": values})
    (found,) = NeptuneImporter().find(run.parent)
    events = list(NeptuneImporter().read(found))
    assert Definition(key="a/b", options={"x": "neptune/step"}) in events
    (rows,) = [event for event in events if isinstance(event, Rows)]
    assert (rows.steps.tolist(), rows.columns["neptune/step"].tolist()) == ([0, 25, 50, 75], [0.0, 0.25, 0.5, 0.75])
    assert [event for event in events if isinstance(event, End)] == [End(status="finished", time_ns=1_700_000_001_000_000_000)]


def test_an_offline_run_names_no_other_place_to_read(tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    run = offline(
        tmp_path / "deep",
        {"type": "UploadFile", "path": ["a"], "ext": "txt", "file_path": str(tmp_path / "secret.txt"), "tmp_file_name": None},
        {"type": "UploadFile", "path": ["b"], "ext": "txt", "file_path": None, "tmp_file_name": "../../../../../secret.txt"},
        {"type": "UploadFileSet", "path": ["c"], "file_globs": [str(tmp_path / "*")], "reset": "False"},
    )
    (found,) = NeptuneImporter().find(run.parent)
    events = list(NeptuneImporter().read(found))
    assert {type(event) for event in events} <= {Start, Facts, Left, End, type(events[-1])}
    assert [(event.what, event.count) for event in events if isinstance(event, Left)] == [("files", 2), ("sets of files", 1)]


def test_damaged_offline_folders_never_raise(tmp_path):
    values = [{"value": 1.0, "step": 1, "ts": 1.7e9}]
    run = offline(
        tmp_path,
        {"type": "AssignFloat", "path": ["x"], "value": 1.0}, {"type": "AssignDatetime", "path": ["d"], "value": 1735776000000},
        {"type": "LogFloats", "path": ["a"], "values": values}, {"type": "LogStrings", "path": ["b"], "values": values},
        {"type": "LogImages", "path": ["c"], "values": [{"value": {"data": base64.b64encode(PNG).decode()}, "step": 1, "ts": 1.7e9}]},
        {"type": "AddStrings", "path": ["sys", "tags"], "values": ["a"]},
    )  # fmt: skip
    rng, whole = random.Random(6), (run / "data-1.log").read_bytes()
    for _ in range(1000):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data))] = rng.choice(b'0123456789"{}[],:ntfe- \n\xff')
        (run / "data-1.log").write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.2 else data)
        for found in NeptuneImporter().find(run.parent):
            list(NeptuneImporter().read(found))


# Local databases of neptune-scale


def local_database(folder: Path, *operations: tuple[int, bytes]) -> Path:
    path = folder / "run_operations.sqlite3"
    with sqlite3.connect(path) as database:
        database.executescript("""
            CREATE TABLE run_operations (sequence_id INTEGER PRIMARY KEY AUTOINCREMENT, timestamp INTEGER, operation_type INTEGER,
                operation BLOB, operation_size_bytes INTEGER);
            CREATE TABLE metadata (id INTEGER PRIMARY KEY, version TEXT, project TEXT, run_id TEXT);
            CREATE TABLE file_upload_requests (id INTEGER PRIMARY KEY, source_path TEXT, destination TEXT, is_temporary INTEGER);
            INSERT INTO metadata VALUES (1, 'v5', 'ws/proj', 'RUN-X');
        """)
        for kind, data in operations:
            database.execute("INSERT INTO run_operations VALUES (NULL, 0, ?, ?, ?)", (kind, data, len(data)))
    return path


# What neptune-scale 0.30 wrote for log_configs, log_metrics, add_tags, remove_tags and log_string_series.
SCALE = json.loads((DATA / "neptune_scale.json").read_text())


def test_a_local_database_is_carried(tmp_path):
    path = local_database(tmp_path, *((kind, base64.b64decode(data)) for kind, data in SCALE))
    run, account = brought_back(path, tmp_path / "back")
    assert (run.project, run.name, run.tags, run.group) == ("proj", "exp", ["t1"], "g1")
    assert run.config == {"parameters/lr": 0.1, "parameters/n": 3, "b": True, "s": "x", "d": "2025-01-02T00:00:00+00:00"}
    assert str(run.series("acc").values.tolist()) == "[0.0, nan, 2.0]"
    assert run.curve("loss").x.tolist() == [0.0, 0.5, 1.0]
    assert [point.text for point in run.texts("txt")] == ["hello"]
    assert run.media("h")[0].load().counts.tolist() == [3, 4]
    assert account.left == []


def test_pickled_parts_are_counted_and_never_loaded(tmp_path):
    path = local_database(tmp_path, (7, b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR."), (0, b"\xff\xff"))
    (account,) = fanfold.import_runs(path, dir=tmp_path / "back")
    assert sorted(left.what for left in account.left) == ["operations", "requests to upload files"]
    assert not (tmp_path / "ran").exists()


def test_damaged_local_databases_never_raise(tmp_path):
    path = local_database(tmp_path, *((kind, base64.b64decode(data)) for kind, data in SCALE))
    rng, whole = random.Random(7), path.read_bytes()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 30)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        for found in NeptuneImporter().find(path):
            list(NeptuneImporter().read(found))
    assert os.listdir(tmp_path) == [path.name]
