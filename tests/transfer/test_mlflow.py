"""Importing from MLflow: its own files of several versions, what fanfold sent there, growth, and damage."""

import json
import math
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import yaml

import fanfold
from fanfold.transfer import flat_yaml
from fanfold.transfer.events import Artifact, End, Facts, Left, Mark, Rows, Start, Values
from fanfold.transfer.importing import Import
from fanfold.transfer.mlflow import MLflowImporter
from paths import DATA
from round_trip import (
    RUN,
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

SETTINGS = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}

# What a user of MLflow does, with MLflow's own calls.
OWN_CALLS = """
    import sys, mlflow, numpy as np
    mlflow.set_tracking_uri(sys.argv[1])
    mlflow.set_experiment("exp: ü # x")
    with mlflow.start_run(run_name='a "name"', description="note\\nline two: x", tags={"team": "vision"}):
        mlflow.log_params({"lr": 0.1, "layers": 3, "text": "a\\nb", "a/b": "1e-3", "none": None})
        for i in range(50):
            mlflow.log_metric("train/loss", 1 / (i + 1), step=i * 2)
        mlflow.log_metrics({"nan": float("nan"), "inf": float("inf"), "down": -float("inf")}, step=7)
        mlflow.log_text("hello", "notes/a.txt")
        mlflow.log_image(np.full((4, 5, 3), 7, np.uint8), key="images/a", step=3)
        mlflow.log_table({"a": [1, 2], "b": ["x", "y"]}, "tab.json")
        mlflow.log_input(mlflow.data.from_numpy(np.zeros(3), name="ds"), context="training")
        with mlflow.start_run(nested=True, run_name="child"):
            mlflow.log_metric("c", 1)
    try:
        with mlflow.start_run(run_name="bad"):
            raise ValueError
    except ValueError:
        pass
    gone = mlflow.start_run(run_name="gone")
    mlflow.end_run()
    mlflow.delete_run(gone.info.run_id)
"""


pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning")  # MLflow's own affair


def _written(folder: Path, uri: str) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(OWN_CALLS), uri], env={**os.environ, **SETTINGS}, cwd=folder,
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def folder_store(tmp_path_factory) -> Path:
    """A folder with a file store that MLflow itself wrote."""
    folder = tmp_path_factory.mktemp("folder")
    return _written(folder, (folder / "mlruns").as_uri())


@pytest.fixture(scope="module")
def database_store(tmp_path_factory) -> Path:
    """A folder with a database that MLflow itself wrote."""
    folder = tmp_path_factory.mktemp("database")
    return _written(folder, f"sqlite:///{folder}/mlflow.db")


@pytest.fixture(params=["folder_store", "database_store"])
def product(request) -> Path:
    """Both, one after the other."""
    return request.getfixturevalue(request.param)


def named(directory: Path, name: str) -> fanfold.StoredRun:
    (found,) = [run for run in fanfold.runs(dir=directory) if run.name == name]
    return found


def check_own_calls(directory: Path) -> None:
    run = named(directory, 'a "name"')
    assert run.project == "exp: ü # x"
    assert run.status == "finished"
    assert run.notes == "note\nline two: x"
    assert run.tags == ["team=vision"]
    assert run.config == {"lr": 0.1, "layers": 3, "text": "a\nb", "a/b": "1e-3", "none": None}
    series = run.series("train/loss")
    assert series.steps.tolist() == [i * 2 for i in range(50)]
    assert series.values.tolist() == [1 / (i + 1) for i in range(50)]
    assert math.isnan(run.series("nan").values[0])
    assert (run.series("inf").values[0], run.series("down").values[0]) == (math.inf, -math.inf)
    (picture,) = run.media("images/a")
    assert (picture.step, picture.load().array().tolist()) == (3, np.full((4, 5, 3), 7).tolist())
    assert run.media("tab")[0].load().rows == [[1, "x"], [2, "y"]]
    (notes,) = [artifact for artifact in run.artifacts if artifact["name"] == "notes"]
    assert run.artifact_file(notes["files"][0]["blob"]).read_text() == "hello"
    (dataset,) = run.facts["mlflow"]["datasets"]
    assert (dataset["name"], dataset["tags"]) == ("ds", {"mlflow.data.context": "training"})
    assert named(directory, "child").group.startswith('a "name" (')
    assert named(directory, "bad").status == "failed"


def test_runs_that_mlflow_wrote_are_carried_with_everything(product, tmp_path):
    accounts = fanfold.import_runs(product, dir=tmp_path)
    assert {account.outcome for account in accounts} == {"imported"}
    assert [left for account in accounts for left in account.left] == []
    check_own_calls(tmp_path)
    assert len(accounts) == 4


def test_a_store_that_mlflow_2_wrote_is_carried_with_everything(tmp_path):
    """What the same calls wrote with MLflow 2.22."""
    with zipfile.ZipFile(DATA / "mlruns_2_22.zip") as archive:
        archive.extractall(tmp_path)
    accounts = fanfold.import_runs(tmp_path / "mlruns", dir=tmp_path / "back")
    assert [left for account in accounts for left in account.left] == []
    check_own_calls(tmp_path / "back")
    assert named(tmp_path / "back", 'a "name"').duration == pytest.approx(1.176)  # the files of this copy are newer


def test_times_and_durations_are_the_originals(product, tmp_path, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (product / "mlruns").as_uri() if (product / "mlruns/0").exists() else f"sqlite:///{product}/mlflow.db"
    client = MlflowClient(tracking_uri=uri)
    fanfold.import_runs(product, dir=tmp_path)
    for experiment in client.search_experiments():
        for run in client.search_runs([experiment.experiment_id]):
            ours = named(tmp_path, run.info.run_name)
            assert round(ours.started * 1000) == run.info.start_time
            assert round(ours.duration, 6) == round((run.info.end_time - run.info.start_time) / 1000, 6)
            for key in run.data.metrics:
                history = client.get_metric_history(run.info.run_id, key)
                assert sorted(int(t * 1000 + 0.5) for t in ours.series(key, raw=True).times) == sorted(
                    p.timestamp for p in history
                )


def test_importing_twice_adds_nothing(product, tmp_path):
    fanfold.import_runs(product, dir=tmp_path)
    before = points(named(tmp_path, 'a "name"'), "train/loss")
    accounts = fanfold.import_runs(product, dir=tmp_path)
    assert {account.outcome for account in accounts} == {"unchanged"}
    assert points(named(tmp_path, 'a "name"'), "train/loss") == before


# Round trips


def infinite(value: bytes) -> bool:
    return value in (np.float64(math.inf).tobytes(), np.float64(-math.inf).tobytes())


@pytest.mark.parametrize(("store", "seed"), [("folder", 1), ("database", 2)])
def test_a_run_sent_to_mlflow_comes_back_equal(store, seed, tmp_path):
    original = played(tmp_path, seed)
    uri = (tmp_path / "mlruns").as_uri() if store == "folder" else f"sqlite:///{tmp_path}/mlflow.db"
    send(tmp_path, "mlflow", MLFLOW_TRACKING_URI=uri, MLFLOW_EXPERIMENT_NAME="exp", **SETTINGS)
    place = tmp_path / ("mlruns" if store == "folder" else "mlflow.db")
    run, account = brought_back(place, tmp_path / "back")
    assert run.id == original.id
    assert (run.name, run.project, run.status) == (original.name, original.project, original.status)
    assert (run.tags, run.notes, run.group) == (original.tags, original.notes, original.group)
    for key in ("loss", "val/acc", "count"):
        same_points(original, run, key, time_unit=1e-3)
    same_points(original, run, "odd", time_unit=1e-3, skip=infinite if store == "database" else None)
    assert set(run.keys()) == set(original.keys())
    assert run.assigned == original.assigned
    wanted = {
        key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in flat_config(original).items()
    }
    assert flat_config(run) == wanted
    same_texts(original, run, "essay")
    same_images(original, run, "image")
    same_histograms(original, run, "histogram")
    same_tables(original, run, "table")
    same_bytes(original, run, "audio")
    same_file(original, run, "model.bin")
    assert [left.what for left in account.left] == ([] if store == "folder" else ["infinite values"])


TRACED = """
import sys, mlflow
mlflow.set_tracking_uri(sys.argv[1])
mlflow.set_experiment("exp")
with mlflow.start_run(run_name="traced"):
    mlflow.log_metric("loss", 1.0)
    for name in "abc":
        with mlflow.start_span(name):
            pass
mlflow.flush_trace_async_logging()
"""


@pytest.mark.parametrize("store", ["mlruns", "mlflow.db"])
def test_traces_are_counted_as_not_carried(store, tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db" if store == "mlflow.db" else (tmp_path / "mlruns").as_uri()
    env = {**os.environ, **SETTINGS}
    subprocess.run([sys.executable, "-c", TRACED, uri], env=env, cwd=tmp_path, check=True, capture_output=True, timeout=200)
    (account,) = fanfold.import_runs(tmp_path / store, dir=tmp_path / "back")
    assert [(left.what, left.count) for left in account.left] == [("traces", 3)]


def test_times_are_exact_to_the_millisecond_both_ways(tmp_path):
    run = fanfold.init("p", dir=tmp_path / "runs", id=RUN, system=False, quiet=True)
    for step in range(100):
        run.log({"loss": step}, step=step, time=1_700_000_000 + step * 0.037)
    run.finish()
    send(tmp_path, "mlflow", MLFLOW_TRACKING_URI=(tmp_path / "mlruns").as_uri(), MLFLOW_EXPERIMENT_NAME="exp", **SETTINGS)
    back, _ = brought_back(tmp_path / "mlruns", tmp_path / "back")
    there = [1_700_000_000_000 + 37 * step for step in range(100)]
    assert [round(time * 1000) for time in back.series("loss").times.tolist()] == there
    assert [round(time * 1000) for time in run_in(tmp_path / "runs").series("loss").times.tolist()] == there


def test_a_run_that_fanfold_sent_makes_no_twin(tmp_path):
    original = played(tmp_path, 3)
    send(tmp_path, "mlflow", MLFLOW_TRACKING_URI=(tmp_path / "mlruns").as_uri(), MLFLOW_EXPERIMENT_NAME="exp", **SETTINGS)
    (account,) = fanfold.import_runs(tmp_path / "mlruns", dir=tmp_path / "runs")
    assert account.outcome == "known"
    assert run_in(tmp_path / "runs").id == original.id


# Growing


def write_run(folder: Path, run_id: str = "a" * 32, **facts: object) -> Path:
    """Write a run as MLflow's file store does."""
    run = folder / "mlruns" / "1" / run_id
    for part in ("metrics", "params", "tags", "artifacts"):
        (run / part).mkdir(parents=True, exist_ok=True)
    (folder / "mlruns" / "1" / "meta.yaml").write_text("experiment_id: '1'\nname: exp\nlifecycle_stage: active\n")
    about = {"run_id": run_id, "run_name": "r", "status": 1, "start_time": 1_700_000_000_000, "end_time": None, **facts}
    (run / "meta.yaml").write_text(yaml.safe_dump(about))
    return run


def events(run: Path, position: object = None) -> list:
    (found,) = MLflowImporter().find(run)
    return list(MLflowImporter().read(found, position))


def numbers(found: list) -> dict[str, list[tuple[int, float]]]:
    rows: dict[str, list[tuple[int, float]]] = {}
    for event in found:
        for key, values in event.columns.items() if isinstance(event, Rows) else ():
            rows.setdefault(key, []).extend(zip(event.steps.tolist(), values.tolist(), strict=True))
    return rows


def mark(found: list) -> object:
    return [event.position for event in found if isinstance(event, Mark)][-1]


def test_only_what_was_added_is_read_again(tmp_path):
    run = write_run(tmp_path)
    file = run / "metrics" / "loss"
    file.write_text("1700000000001 0.5 0\n1700000000002 0.25 1\n")
    first = events(run)
    assert numbers(first) == {"loss": [(0, 0.5), (1, 0.25)]}
    with file.open("a") as out:
        out.write("1700000000003 0.125 2\n1700000000004 0.0")
    second = events(run, mark(first))
    assert numbers(second) == {"loss": [(2, 0.125)]}
    assert [event for event in second if isinstance(event, Facts)] == []
    with file.open("a") as out:
        out.write("625 3\n")
    (run / "params" / "late").write_text("7")
    third = events(run, mark(second))
    assert numbers(third) == {"loss": [(3, 0.0625)]}
    assert [event.config for event in third if isinstance(event, Facts)] == [{"late": 7}]
    assert [event for event in events(run, mark(third)) if not isinstance(event, End)] == []


def test_a_growing_run_is_followed_to_its_end(tmp_path):
    now = int(time.time()) * 1000
    run = write_run(tmp_path, start_time=now)
    file = run / "metrics" / "loss"
    file.write_text(f"{now} 0.5 0\n")
    stop, reports = threading.Event(), []
    work = Import([tmp_path / "mlruns"], dir=tmp_path / "back")
    follower = threading.Thread(target=work.follow, args=(stop, reports.append))
    follower.start()
    try:
        for i in range(1, 6):
            with file.open("a") as out:
                out.write(f"{now + i} {1 / (i + 1)} {i}\n")
            seen(lambda i=i: len(run_in(tmp_path / "back").series("loss")) == i + 1)
        second = write_run(tmp_path, "b" * 32, run_name="later")
        (second / "metrics" / "other").write_text("1700000000001 1.0 0\n")
        write_run(tmp_path, status=3, start_time=now, end_time=now + 5000)
        seen(lambda: named(tmp_path / "back", "r").status == "finished" and named(tmp_path / "back", "later").keys() == ["other"])
    finally:
        stop.set()
        follower.join()
    found = named(tmp_path / "back", "r")
    assert found.series("loss").steps.tolist() == list(range(6))
    assert found.duration == 5.0
    assert len(found.attempts) == 1
    assert len(list((found.path / "journal").glob("*.ffj"))) == 1  # however often it was looked at


def seen(condition) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            if condition():
                return
        except (ValueError, LookupError, fanfold.FanfoldError):
            pass
        assert time.monotonic() < deadline
        time.sleep(0.05)


# Formats and damage


def test_lines_of_two_three_and_five_fields_are_read(tmp_path):
    run = write_run(tmp_path)
    (run / "metrics" / "m").write_text(
        "1700000000001 0.5\n1700000000002 nan 1\n1700000000003 -inf 2 train 1a2b\nno number at all\n"
    )
    found = events(run)
    assert str(numbers(found)["m"]) == str([(0, 0.5), (1, math.nan), (2, -math.inf)])
    assert {(left.what, left.count) for left in found if isinstance(left, Left)} == {("points", 1), ("dataset of a point", 1)}


def test_old_stores_without_run_id_or_stage_are_read(tmp_path):
    run = write_run(tmp_path)
    (run / "meta.yaml").write_text(
        f"run_uuid: {'a' * 32}\nexperiment_id: 1\nname: ''\nstatus: 5\nstart_time: 1500000000000\nend_time: 1500000001000\n"
    )
    (run / "tags" / "mlflow.runName").write_text("from the tag")
    found = events(run)
    assert found[0] == Start(time_ns=1_500_000_000_000_000_000)
    assert found[1].name == "from the tag"
    assert [event for event in found if isinstance(event, End)] == [End(status="killed", time_ns=1_500_000_001_000_000_000)]


def test_deleted_experiments_are_found_and_archived(tmp_path):
    run = write_run(tmp_path)
    (tmp_path / "mlruns/.trash").mkdir()
    (run.parent / "meta.yaml").write_text("experiment_id: '1'\nname: exp\nlifecycle_stage: deleted\n")
    run.parent.rename(tmp_path / "mlruns/.trash/1")
    (account,) = fanfold.import_runs(tmp_path / "mlruns", dir=tmp_path / "back")
    assert account.outcome == "imported"
    (found,) = MLflowImporter().find(tmp_path / "mlruns/.trash/1")
    assert [event.archived for event in MLflowImporter().read(found) if isinstance(event, Facts)] == [True]


def test_system_metrics_have_no_steps(tmp_path):
    run = write_run(tmp_path)
    (run / "metrics" / "system").mkdir()
    (run / "metrics" / "system" / "cpu").write_text("1700000000001 50.0 3\n")
    (rows,) = [event for event in events(run) if isinstance(event, Rows)]
    assert (rows.system, rows.steps, rows.columns["system/cpu"].tolist()) == (True, None, [50.0])


def test_files_outside_of_the_store_are_never_read(tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    run = write_run(tmp_path, artifact_uri=(tmp_path / "elsewhere").as_uri())
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.txt").write_text("other")
    (run / "artifacts" / "link.txt").symlink_to(tmp_path / "secret.txt")
    (run / "metrics" / "link").symlink_to(tmp_path / "secret.txt")
    (run / "params" / "link").symlink_to(tmp_path / "secret.txt")
    found = events(run)
    assert not [event for event in found if isinstance(event, (Artifact, Rows, Values))]
    assert "secret" not in str(found)


def test_a_database_names_no_other_place_to_read(database_store, tmp_path):
    shutil.copy(database_store / "mlflow.db", tmp_path / "mlflow.db")
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute("UPDATE runs SET artifact_uri = ?", (outside.as_uri(),))
    (account, *_) = fanfold.import_runs(tmp_path / "mlflow.db", dir=tmp_path / "back")
    assert account.files == 0
    assert "the run's files" in [left.what for left in account.left]


def test_a_database_of_an_old_schema_is_read(tmp_path):
    with sqlite3.connect(tmp_path / "old.db") as database:
        database.executescript("""
            CREATE TABLE experiments (experiment_id INTEGER PRIMARY KEY, name TEXT, artifact_location TEXT);
            CREATE TABLE runs (run_uuid TEXT PRIMARY KEY, name TEXT, status TEXT, start_time BIGINT, end_time BIGINT, experiment_id INTEGER);
            CREATE TABLE metrics (key TEXT, value FLOAT, timestamp BIGINT, run_uuid TEXT);
            CREATE TABLE params (key TEXT, value TEXT, run_uuid TEXT);
            CREATE TABLE tags (key TEXT, value TEXT, run_uuid TEXT);
            INSERT INTO experiments VALUES (1, 'old', NULL);
            INSERT INTO runs VALUES ('r1', 'name', 'FINISHED', 1500000000000, 1500000001000, 1);
            INSERT INTO metrics VALUES ('loss', 0.5, 1500000000500, 'r1'), ('loss', 0.25, 1500000000600, 'r1');
            INSERT INTO params VALUES ('lr', '0.1', 'r1');
        """)
    run, _ = brought_back(tmp_path / "old.db", tmp_path / "back")
    assert (run.project, run.status, run.config, run.duration) == ("old", "finished", {"lr": 0.1}, 1.0)
    assert {point[2] for point in points(run, "loss", time_unit=1e-3)} == {1_500_000_000_500, 1_500_000_000_600}


def test_only_new_rows_of_a_database_are_read_again(tmp_path):
    with sqlite3.connect(tmp_path / "m.db") as database:
        database.executescript("""
            CREATE TABLE experiments (experiment_id INTEGER, name TEXT); CREATE TABLE params (key TEXT, value TEXT, run_uuid TEXT);
            CREATE TABLE runs (run_uuid TEXT, name TEXT, status TEXT, start_time BIGINT, end_time BIGINT, experiment_id INTEGER);
            CREATE TABLE metrics (key TEXT, value FLOAT, timestamp BIGINT, step BIGINT, is_nan BOOLEAN, run_uuid TEXT);
            CREATE TABLE tags (key TEXT, value TEXT, run_uuid TEXT); INSERT INTO experiments VALUES (1, 'e');
            INSERT INTO runs VALUES ('r1', 'n', 'RUNNING', 1500000000000, NULL, 1);
            INSERT INTO metrics VALUES ('loss', 0.5, 1500000000500, 0, 0, 'r1'), ('loss', 0, 1500000000600, 1, 1, 'r1');
        """)
    (found,) = MLflowImporter().find(tmp_path / "m.db")
    first = list(MLflowImporter().read(found))
    assert str(numbers(first)) == "{'loss': [(0, 0.5), (1, nan)]}"
    assert list(MLflowImporter().read(found, mark(first))) == []
    with sqlite3.connect(tmp_path / "m.db") as database:
        database.execute("INSERT INTO metrics VALUES ('loss', 1.7976931348623157e308, 1500000000700, 2, 0, 'r1')")
        database.execute("UPDATE runs SET status = 'FAILED', end_time = 1500000001000")
    second = list(MLflowImporter().read(found, mark(first)))
    assert numbers(second) == {"loss": [(2, math.inf)]}
    assert End(status="failed", time_ns=1_500_000_001_000_000_000) in second


def test_yaml_without_a_library_equals_the_library():
    rng = random.Random(1)
    alphabet = "abc xyz:#'\"\\-_{}[]&*!|>%@`,?~\n\t äü€😀 0123. "
    for _ in range(150):
        value = {name: _word(rng, alphabet) for name in ("name", "run_id", "x y", "status")}
        value["tags"] = {"a.b": _word(rng, alphabet), "c": "'"} if rng.random() < 0.5 else []
        text = yaml.safe_dump(value, default_flow_style=False, allow_unicode=rng.random() < 0.5)
        assert flat_yaml.read(text) == value, text


def _word(rng: random.Random, alphabet: str) -> object:
    if rng.random() < 0.3:
        return rng.choice([1, None, True, 3.5, -7, 10**20, "", "true", "null", "1", "1.5", "1e5", "~", "[]"])
    return "".join(rng.choice(alphabet) for _ in range(rng.choice([3, 10, 200])))


def test_damaged_stores_never_raise_and_keep_the_rest(tmp_path):
    rng = random.Random(2)
    run = write_run(tmp_path)
    for i in range(3):
        (run / "metrics" / f"m{i}").write_text("".join(f"170000000000{j} {j / 7} {j}\n" for j in range(9)))
    (run / "tags" / "mlflow.loggedArtifacts").write_text(json.dumps([{"path": "t.json", "type": "table"}]))
    (run / "artifacts" / "t.json").write_text('{"columns": ["a"], "data": [[1]]}')
    files = sorted(path for path in run.rglob("*") if path.is_file())
    contents = {path: path.read_bytes() for path in files}
    for _ in range(1000):
        broken = rng.choice(files)
        broken.write_bytes(damaged(contents[broken], rng))
        for found in MLflowImporter().find(run):
            whole = numbers(list(MLflowImporter().read(found)))
            untouched = [f"m{i}" for i in range(3) if broken != run / "metrics" / f"m{i}"]
            assert [len(whole[key]) for key in untouched] == [9] * len(untouched)
        broken.write_bytes(contents[broken])


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with a few changes: cut, changed, repeated, or anything."""
    out = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        where = rng.randrange(len(out) + 1)
        match rng.randrange(4):
            case 0:
                del out[where:]
            case 1:
                out[where : where + 1] = bytes([rng.randrange(256)])
            case 2:
                out[where:where] = rng.choice(
                    [b"\n", b"'", b'"', b": ", b"\x00", b"9" * 400, b"- ", b"!!python/object/apply:os.system [x]"]
                )
            case 3:
                out += out[:where]
    return bytes(out)


def test_damaged_databases_never_raise(database_store, tmp_path):
    rng, whole = random.Random(3), (database_store / "mlflow.db").read_bytes()
    path = tmp_path / "mlflow.db"
    for _ in range(100):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 40)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.3 else data)
        for found in MLflowImporter().find(path):
            assert all(
                isinstance(event, (Start, Facts, Rows, Values, Artifact, End, Left, Mark))
                for event in MLflowImporter().read(found)
            )
    assert os.listdir(tmp_path) == ["mlflow.db"], "nothing is written beside a database"


def test_views_and_virtual_tables_of_a_hostile_database_are_not_queried(tmp_path):
    with sqlite3.connect(tmp_path / "evil.db") as database:
        database.executescript("""
            CREATE TABLE experiments (experiment_id INTEGER, name TEXT); CREATE TABLE runs (run_uuid TEXT, experiment_id INTEGER);
            CREATE TABLE params (key TEXT, value TEXT, run_uuid TEXT); CREATE TABLE tags (key TEXT, value TEXT, run_uuid TEXT);
            INSERT INTO runs VALUES ('r', 1);
            CREATE VIEW metrics AS WITH RECURSIVE n(key) AS (SELECT 1 UNION ALL SELECT key + 1 FROM n)
                SELECT key, 1.0 AS value, 1 AS timestamp, 'r' AS run_uuid, 0 AS step FROM n;
        """)
    assert list(MLflowImporter().find(tmp_path / "evil.db")) == []


@pytest.mark.parametrize("content", [b"", b"\x00" * 100, b"SQLite format 3\x00", b"experiment_id: '1'"])
def test_other_files_and_folders_are_not_mlflow(content, tmp_path):
    (tmp_path / "file").write_bytes(content)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "meta.yaml").write_bytes(content.replace(b"experiment_id", b"other"))
    assert list(MLflowImporter().find(tmp_path / "file")) == []
    assert list(MLflowImporter().find(tmp_path / "folder")) == []
