"""The dashboard's server: what it answers, whom it answers, and what it refuses."""

from __future__ import annotations

import contextlib
import csv
import http.client
import io
import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pyarrow.parquet
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

import fanfold
from abuse_tools import SAMPLES
from answers import LOCAL, decode, series
from fanfold.errors import SettingError
from fanfold.server import app, data, endpoints, export, wire
from fanfold.server.endpoints import ALL
from fanfold.store import StoredRun, catalogue
from fanfold.store.query import LocalStore
from paths import DATA


def make(folder: Path, name: str = "one", *, project: str = "llm", points: int = 50, **options) -> StoredRun:
    run = fanfold.init(project, dir=folder, name=name, system=False, quiet=True, **options)
    for step in range(points):
        run.log({"loss": 1 / (step + 1), "acc": step / 100}, step=step)
    run.finish()
    return fanfold.open(run.path)


def client(folder: Path, base: str = LOCAL, **options) -> TestClient:
    return TestClient(app(folder, **options), base_url=base)


# The wire


def fixture_answer() -> bytes:
    """What the page's own tests decode, too: both sides must agree on these bytes."""
    x = np.array([0.0, 1.0, 2.5, 1e15])
    first = ({"run": "é<img>", "total": 4, "raw": True}, {"x": x, "y": np.array([1, np.nan, np.inf, -np.inf], np.float32)})
    second = ({"run": "b", "total": 0, "raw": True}, {"x": x, "ranks": np.array([3, 0, 7], np.int32), "none": np.empty(0)})
    return wire.encode({"axis": "step"}, [first, second])


def test_encoder_makes_the_bytes_the_page_is_tested_with():
    assert fixture_answer() == (DATA / "columns.bin").read_bytes()


def test_columns_stand_on_multiples_of_eight_and_equal_ones_are_sent_once():
    data = fixture_answer()
    length = struct.unpack_from("<II", data)[1]
    assert length % 8 == 0
    raw = json.loads(data[8 : 8 + length])["items"]
    offsets = [column[1] for item in raw for column in item["columns"].values()]
    assert all(offset % 8 == 0 for offset in offsets)
    assert raw[0]["columns"]["x"] == raw[1]["columns"]["x"]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1e300, 1.0], "float64"),
        ([1e6, 1e6 + 0.01], "float64"),
        ([1e-40, 2e-40], "float64"),
        ([0.0, 16_777_217.0], "float64"),
        ([123_456_789.0, 123_456_789.0], "float64"),
        ([0.0, 16_777_215.0], "float32"),
        ([0.1, 0.9], "float32"),
        ([np.nan], "float32"),
    ],
)
def test_numbers_are_halved_only_where_nothing_is_lost(values, kind):
    column = np.array(values)
    assert [one.dtype.name for one in wire.small(column, column, column)] == [kind] * 3


def test_columns_drawn_together_are_halved_together():
    low, high, steady = np.array([0.1, 0.2]), np.array([0.8, 0.9]), np.array([0.5, 0.5 + 1e-9])
    assert {one.dtype.name for one in wire.small(low, high, steady)} == {"float32"}
    assert {one.dtype.name for one in wire.small(low, np.array([0.9, 1e300]), steady)} == {"float64"}
    assert {one.dtype.name for one in wire.small(np.array([np.nan, 0.1]), np.array([np.inf, 0.2]), steady)} == {"float32"}


# Answers


def test_projects_and_runs_say_what_there_is(tmp_path):
    make(tmp_path, "old", project="before")
    make(tmp_path, "new", config={"model": {"dim": 8}}, tags=["x"])
    http = client(tmp_path)
    assert [one["name"] for one in http.get("/api/projects").json()["projects"]] == ["llm", "before"]
    answer = http.get("/api/runs", params={"project": "llm"}).json()
    assert [run["name"] for run in answer["runs"]] == ["new"]
    assert answer["keys"] == ["loss", "acc"]
    assert "config:model.dim" in answer["columns"]
    assert http.get("/api/runs", params={"project": "llm", "filter": "model.dim>9"}).json()["runs"] == []
    assert http.get("/api/passing", params={"project": "llm", "filter": "model.dim>7"}).json() == {
        "ids": [answer["runs"][0]["id"]]
    }
    wrong = http.get("/api/passing", params={"project": "llm", "filter": "lr<<"})
    assert wrong.status_code == 400 and "error" in wrong.json()


def test_series_keep_every_extreme_and_reach_the_raw_points_on_zoom(tmp_path):
    values = np.random.default_rng(3).normal(size=5000)
    run = fanfold.init("llm", dir=tmp_path, system=False, quiet=True)
    for step, value in enumerate(values):
        run.log({"v": float(value)}, step=step)
    run.finish()
    http = client(tmp_path)
    (thin,) = series(http, runs=[run.id], keys=["v"], n=100)
    assert not thin["raw"] and thin["total"] == 5000
    assert thin["columns"]["lo"].min() == np.float32(values.min()) and thin["columns"]["hi"].max() == np.float32(values.max())
    (raw,) = series(http, runs=[run.id], keys=["v"], n=100, lo=1000, hi=1050)
    assert raw["raw"] and raw["total"] == 51
    x = raw["columns"]["x"]
    assert (x[0], x[-1]) == (999, 1051)  # the neighbours, so that the line reaches the edge
    assert np.array_equal(raw["columns"]["y"], values[999:1052].astype(np.float32))


def test_up_to_four_points_per_bucket_are_sent_as_they_are(tmp_path):
    values = np.random.default_rng(4).normal(size=401)
    run = fanfold.init("llm", dir=tmp_path, system=False, quiet=True)
    for step, value in enumerate(values):
        run.log({"v": float(value)}, step=step)
    run.finish()
    http = client(tmp_path)
    (whole,) = series(http, runs=[run.id], keys=["v"], n=100, hi=399)
    assert whole["raw"] and whole["total"] == 400
    assert np.array_equal(whole["columns"]["y"], values.astype(np.float32))  # with the neighbour after the range
    (thin,) = series(http, runs=[run.id], keys=["v"], n=100)
    assert not thin["raw"] and (thin["total"], len(thin["columns"]["x"])) == (401, 100)
    # Up to three points per bucket, these are also fewer bytes.
    sizes = [len(http.post("/api/series", json={"project": "llm", "runs": [run.id], "keys": ["v"], "n": 100, "hi": hi}).content)
             for hi in (299, 400)]  # fmt: skip
    assert sizes[0] < sizes[1]


def test_what_is_no_number_a_restart_or_alone_is_told(tmp_path):
    run = fanfold.init("llm", dir=tmp_path, id="r", system=False, quiet=True)
    for step, value in enumerate([1.0, float("nan"), float("inf"), 2.0]):
        run.log({"v": value}, step=step)
    run.log({"one": 5.0}, step=9)
    run.finish()
    again = fanfold.init("llm", dir=tmp_path, id="r", resume="must", system=False, quiet=True)
    again.log({"v": 3.0}, step=3)
    again.finish()
    http = client(tmp_path)
    v, one = series(http, runs=["r"], keys=["v", "one"])
    assert v["marks"] == [[1.0, "nan"], [2.0, "inf"]] and v["restarts"] == [3.0]
    assert one["columns"]["y"].tolist() == [5.0]
    assert series(http, runs=["r", "gone"], keys=["v", "nothing"]) and len(series(http, runs=["gone"], keys=["v"])) == 0


def test_ranks_fold_with_the_lowest_and_highest_named(tmp_path):
    code = "import fanfold, sys, os\nr = int(os.environ['FANFOLD_RANK'])\nrun = fanfold.init('llm', id='r', system=False, quiet=True)\nrun.log({'t': [5., 1., 9.][r]}, step=0)\nrun.finish()"
    for rank in range(3):
        env = {**os.environ, "FANFOLD_DIR": str(tmp_path), "FANFOLD_RANK": str(rank), "FANFOLD_WORLD_SIZE": "3"}
        subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60)
    (found,) = series(client(tmp_path), runs=["r"], keys=["t"], fold="mean")
    columns = found["columns"]
    assert (columns["y"][0], columns["low"][0], columns["high"][0]) == (5, 1, 9)
    assert (columns["lowRank"][0], columns["highRank"][0]) == (1, 2)


def test_what_a_chart_shows_comes_as_parquet(tmp_path, monkeypatch):
    ids = [make(tmp_path, name, points=1000).id for name in ("one", "two")]
    asked = {"project": "llm", "runs": [*ids, "gone"], "keys": ["loss"], "n": 100}
    with client(tmp_path) as http:
        table = pyarrow.parquet.read_table(io.BytesIO(http.post("/api/parquet", json=asked).content))
        none = pyarrow.parquet.read_table(io.BytesIO(http.post("/api/parquet", json={**asked, "runs": []}).content))
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        without = http.post("/api/parquet", json=asked)
    rows = table.to_pylist()
    assert table.schema.metadata == none.schema.metadata == {b"axis": b"step", b"thinned": b"no"}
    assert none.schema == table.schema and none.num_rows == 0
    same = {"key": "loss", "points": 1}
    assert rows == [
        {"run": id, "name": name, "x": float(step), **dict.fromkeys(("value", "lowest", "highest"), 1 / (step + 1)), **same}
        for id, name in zip(ids, ("one", "two"), strict=True)
        for step in range(1000)
    ]
    assert without.status_code == 400 and "pip install" in without.json()["error"] and "CSV works" in without.json()["error"]


def test_a_chart_as_csv_has_every_point(tmp_path):
    id = make(tmp_path, '=cmd|"x"', points=1000).id
    with client(tmp_path) as http:
        answer = http.post("/api/csv", json={"project": "llm", "runs": [id], "keys": ["loss"], "n": 100})
        near = http.post("/api/csv", json={"project": "llm", "runs": [id], "keys": ["loss"], "n": 2, "lo": 10, "hi": 14})
    head, *rows = csv.reader(answer.text.splitlines())
    assert head == ["run", "step", "loss", "lowest", "highest", "points", "id"]
    assert rows == [['\'=cmd|"x"', str(step), *[repr(1 / (step + 1))] * 3, "1", id] for step in range(1000)]
    assert [row[1] for row in csv.reader(near.text.splitlines())][1:] == ["10", "11", "12", "13", "14"]


def test_an_export_of_too_many_points_says_that_it_is_thinned_and_pairs_x_and_value(tmp_path, monkeypatch):
    id = make(tmp_path, points=1000).id
    monkeypatch.setattr(export, "MOST_POINTS", 999)
    monkeypatch.setattr(export, "MOST_BUCKETS", 100)
    asked = {"project": "llm", "runs": [id], "keys": ["loss"]}
    with client(tmp_path) as http:
        table = pyarrow.parquet.read_table(io.BytesIO(http.post("/api/parquet", json=asked).content))
        lines = list(csv.DictReader(http.post("/api/csv", json=asked).text.splitlines()))
    assert table.schema.metadata[b"thinned"] == b"yes"
    found = [(float(row["step"]), float(row["loss"]), int(row["points"])) for row in lines]
    assert found == [(row["x"], row["value"], row["points"]) for row in table.to_pylist()]
    assert len(found) == 100 and sum(points for *_, points in found) == 1000
    assert all(value == 1 / (x + 1) for x, value, _ in found)


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("n", [7, 100, 330])
def test_every_point_that_a_bucket_sends_was_logged(tmp_path, n, log):
    values = np.random.default_rng(n).normal(size=5000)
    run = fanfold.init("llm", dir=tmp_path, system=False, quiet=True)
    for step, value in enumerate(values):
        run.log({"v": float(value)}, step=step * 3)
    run.finish()
    (found,) = series(client(tmp_path), runs=[run.id], keys=["v"], n=n, log=log)
    c = found["columns"]
    for x, y in ((c["x"], c["first"]), (c["xLast"], c["y"]), (c["x"] + c["loAt"], c["lo"]), (c["x"] + c["hiAt"], c["hi"])):
        assert (values[(x / 3).astype(int)].astype(np.float32) == y).all()
    assert (c["x"][1:] > c["xLast"][:-1]).all() and len(c["x"]) <= n
    if log:  # the beginning has most of the buckets, and step 0 has no place on the axis
        assert c["x"][0] == 3 and (c["x"] < 1500).sum() > (c["x"] >= 1500).sum()


def test_the_axis_that_define_metric_chose_is_the_default(tmp_path):
    run = fanfold.init("llm", dir=tmp_path, system=False, quiet=True)
    run.define_metric("val/*", x="epoch")
    run.define_metric("lost", x="nothing")
    for step in range(20):
        run.log({"epoch": step / 10, "val/acc": step * 1.0, "loss": 1.0, "lost": 2.0}, step=step)
    run.finish()
    with client(tmp_path) as http:
        found = series(http, runs=[run.id], keys=["val/acc", "loss", "lost"], x="auto")
        assert [one["axis"] for one in found] == ["epoch", "step", "step"]
        assert found[0]["columns"]["x"].tolist() == [step / 10 for step in range(20)]
        (stepped,) = series(http, runs=[run.id], keys=["val/acc"], x="step")
        assert stepped["axis"] == "step"


def test_a_run_list_is_sent_in_blocks_and_only_those_that_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "RUNS_IN_BLOCK", 3)
    for place in range(7):
        make(tmp_path, f"run{place}", points=1)
    with client(tmp_path) as http:

        def asked(**how):
            return http.get("/api/runs", params={"project": "llm", **how}).json()

        def names(answer):
            return [run["name"] for run in answer["runs"]]

        whole = asked()
        assert names(whole) == [f"run{place}" for place in reversed(range(7))]
        assert (whole["total"], whole["size"], len(whole["blocks"]), whole["fresh"]) == (7, 3, 3, [0, 1, 2])
        first = asked(count=2)
        assert (names(first), first["total"], first["blocks"]) == (["run6", "run5"], 7, [])
        assert first["keys"] == whole["keys"] == ["loss", "acc"]
        known = ",".join(whole["blocks"])
        assert (asked(known=known)["runs"], asked(known=known)["fresh"]) == ([], [])
        make(tmp_path, "run7", points=1)
        later = asked(known=known)
        assert (names(later), later["fresh"], later["total"]) == (["run7", "run6"], [2], 8)
        fanfold.open(whole["runs"][-1]["id"], dir=tmp_path).tags = ["old"]
        edited = asked(known=",".join(later["blocks"]))
        assert (names(edited), edited["fresh"]) == (["run2", "run1", "run0"], [0])
        assert edited["runs"][-1]["tags"] == ["old"]
        assert names(asked(known="nonsense,,")) == names(asked())


def test_a_run_that_was_stopped_by_hand_is_not_counted_as_failed(tmp_path):
    for name, error in (("by-hand", KeyboardInterrupt), ("broken", ValueError)):
        with contextlib.suppress(error), fanfold.init("llm", dir=tmp_path, name=name, system=False, quiet=True) as run:
            run.log({"loss": 1.0}, step=0)
            raise error
    with client(tmp_path) as http:
        listed = http.get("/api/runs", params={"project": "llm"}).json()["runs"]
        assert {run["name"]: run["failed"] for run in listed} == {"by-hand": False, "broken": True}
        assert [alert["name"] for alert in http.get("/api/alerts", params={"project": "llm"}).json()] == ["broken"]


def test_listing_projects_reads_no_run_that_the_catalogue_knows(tmp_path):
    make(tmp_path, "one")
    make(tmp_path, "two", project="other")
    (tmp_path / "empty" / "run" / "journal").mkdir(parents=True)
    LocalStore(tmp_path).runs()
    store = LocalStore(tmp_path)
    assert [(one["name"], one["runs"]) for one in store.projects()] == [("other", 1), ("llm", 1)]
    assert (store._shelf.rows, store._shelf.opened) == ({}, {})


def test_a_run_that_ended_long_ago_is_read_once_until_somebody_edits_it(tmp_path, monkeypatch):
    run = make(tmp_path)
    monkeypatch.setattr(catalogue, "SETTLED_SECONDS", -1.0)
    read: list[Path] = []
    refresh = StoredRun.refresh
    monkeypatch.setattr(StoredRun, "refresh", lambda self: (read.append(self.path), refresh(self))[1])
    with client(tmp_path, write=True) as http:
        http.get("/api/runs", params={"project": "llm"})
        series(http, runs=[run.id], keys=["loss"])
        read.clear()
        assert series(http, runs=[run.id], keys=["acc"])[0]["total"] == 50
        assert read == []
        http.post("/api/edit", json={"project": "llm", "ids": [run.id], "name": "other"})
        assert http.get("/api/run", params={"project": "llm", "id": run.id}).json()["name"] == "other"
        assert read != []


def test_columns_of_the_table_tell_missing_from_nan(tmp_path):
    a = make(tmp_path, "a", config={"lr": 0.1, "kind": "x", "clip": "none"})
    run = fanfold.init("llm", dir=tmp_path, name="b", config={"clip": float("inf")}, system=False, quiet=True)
    run.log({"loss": float("nan")}, step=0)
    run.finish()
    names = ["metric:loss", "config:lr", "config:kind", "config:clip"]
    answer = client(tmp_path).post("/api/columns", json={"project": "llm", "names": names})
    head, (loss, lr, kind, clip) = decode(answer.content)
    assert head["runs"] == [run.id, a.id]
    assert np.isnan(loss["columns"]["values"][0]) and loss["missing"] == []
    assert lr["missing"] == [0] and lr["columns"]["values"][1] == 0.1
    assert kind["texts"] == [None, "x"]
    assert clip["texts"] == ["inf", "none"]


def test_a_run_its_alerts_console_tables_and_texts(tmp_path):
    run = fanfold.init("llm", dir=tmp_path, system=False, quiet=True, config={"a": float("inf")})
    run.log({"t": fanfold.Table(["n", "s"], [[1, "x"], [2.5, "<b>"]]), "say": "hello", "loss": 1.0}, step=3)
    run.alert("too hot", "rank 3", level="error")
    run.finish(status="failed")
    http = client(tmp_path)
    one = http.get("/api/run", params={"project": "llm", "id": run.id}).json()
    assert one["config"] == {"a": "Infinity"} and one["status"] == "failed"
    assert set(one["keys"]["media"]) == {"t"} and one["keys"]["text"] == ["say"]
    assert [alert["title"] for alert in http.get("/api/alerts", params={"project": "llm"}).json()] == ["run failed", "too hot"]
    assert http.get("/api/table", params={"project": "llm", "id": run.id, "key": "t"}).json() == {
        "columns": ["n", "s"], "rows": [[1.0, "x"], [2.5, "<b>"]], "numbers": [0, 1], "media": [], "found": 2, "total": 2}  # fmt: skip
    (found,) = http.get("/api/media", params={"project": "llm", "ids": [run.id], "key": "say"}).json()
    assert found["points"][0]["entry"] == {"text": "hello"}
    assert http.get("/api/console", params={"project": "llm", "id": run.id}).json() == {"chunks": [], "more": False}
    assert http.get("/api/profile", params={"project": "llm", "id": run.id}).json() == {"steps": [], "ops": []}


@pytest.mark.parametrize("asked", [{"project": "llm"}, {}, {"project": "llm", "id": "nothing"}, {"project": "none", "id": "x"}])
def test_what_is_not_there_is_said(tmp_path, asked):
    make(tmp_path)
    answer = client(tmp_path).get("/api/run", params=asked)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"project": 1}', b'{"project": "llm", "runs": [], "keys": [], "more": 1}'])
def test_a_request_that_cannot_be_understood_is_refused(tmp_path, body):
    make(tmp_path)
    assert client(tmp_path).post("/api/series", content=body).status_code == 400


def test_more_series_than_a_page_can_show_are_refused(tmp_path):
    make(tmp_path)
    answer = client(tmp_path).post("/api/series", json={"project": "llm", "runs": ["x"] * 1000, "keys": ["y"] * 1000})
    assert answer.status_code == 400 and "fewer" in answer.json()["error"]


def test_openapi_names_every_endpoint(tmp_path):
    make(tmp_path)
    document = client(tmp_path).get("/api/openapi.json").json()
    assert set(document["paths"]) == {f"/{one.path}" for one in ALL}
    assert document["paths"]["/api/series"]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith(
        "SeriesQuery"
    )
    schemas = document["components"]["schemas"]
    assert {"SeriesQuery", "Runs", "Run", "Listed", "Alert", "Console", "Table"} <= set(schemas)
    assert "created" in schemas["Listed"]["required"]


def test_answers_have_the_form_that_openapi_says(tmp_path):
    run = fanfold.init("llm", dir=tmp_path, id="all", system=False, quiet=True, config={"lr": 0.1}, tags=["one"])
    run.log({"loss": 1.0, "said": "hello", "rows": fanfold.Table(columns=["a"], data=[[1], [2]])}, step=0)
    run.alert("odd", "very")
    run.finish()
    fanfold.init("llm", dir=tmp_path, id="gone", system=False, quiet=True).finish()
    ask = client(tmp_path, write=True)
    given = {"project": "llm", "id": "all", "ids": ["all"], "key": "rows", "filter": "loss>0", "n": 0}
    bodies = {
        "api/edit": {"project": "llm", "ids": ["all"], "notes": "why"},
        "api/sample": {"project": "llm", "runs": ["all"], "key": "rows"},
        "api/importance": {"project": "llm", "metric": "metric:loss"},
        "api/move": {"project": "llm", "ids": ["gone"], "to": "old"},
        "api/view": {"project": "llm", "name": "mine", "fragment": "p=llm"},
        "api/tell": {"project": "llm", "id": "all", "action": "stop"},
        "api/examples": {"project": "first look"},
        "api/keep": {"project": "llm", "fragment": "s=0.5"},
        "api/rule": {"project": "llm", "rule": "loss is nan"},
        "api/delete": {"project": "llm", "ids": ["all"]},
    }
    headers = {"origin": LOCAL}
    for one in ALL:
        if one.binary:
            continue
        sent = ask.get(f"/{one.path}", params=given) if one.body is None else ask.post(f"/{one.path}", json=bodies[one.path], headers=headers)  # fmt: skip
        assert sent.status_code == 200, (one.path, sent.text)
        msgspec.convert(sent.json(), one.answer)
        assert sent.json() or one.path == "api/views"


# Whom it answers


def test_a_name_that_is_not_ours_is_refused(tmp_path):
    make(tmp_path)
    assert client(tmp_path, "http://evil.example").get("/api/projects").status_code == 400
    for name in ("http://localhost:1", "http://127.0.0.1", "http://[::1]:9"):
        assert client(tmp_path, name).get("/api/projects").status_code == 200
    assert client(tmp_path, "http://lab.example", hosts=["lab.example"]).get("/api/projects").status_code == 200


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"origin": LOCAL}, 200),
        ({"origin": "http://localhost:3000"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 200),
    ],
)
def test_requests_of_other_pages_are_refused(tmp_path, headers, code):
    make(tmp_path)
    assert client(tmp_path).get("/api/projects", headers=headers).status_code == code


def test_beyond_this_machine_a_token_is_needed(tmp_path):
    make(tmp_path)
    http = client(tmp_path, "http://node7:8642", hosts=None, token="sesame")
    assert http.get("/api/projects").status_code == 401
    assert http.get("/api/projects", headers={"authorization": "Bearer wrong"}).status_code == 401
    assert http.get("/api/projects", headers={"authorization": "Bearer sesame"}).status_code == 200
    moved = http.get("/?token=sesame&a=1", follow_redirects=False)
    assert moved.status_code == 303 and moved.headers["location"] == "./?a=1"
    assert "HttpOnly" in moved.headers["set-cookie"] and "SameSite=Lax" in moved.headers["set-cookie"]
    assert http.get("/api/projects").status_code == 200  # the cookie, from now on
    with pytest.raises(SettingError, match="token"):
        app(tmp_path, hosts=None)


def test_every_answer_carries_the_policy(tmp_path):
    make(tmp_path)
    http = client(tmp_path)
    for path in ("/", "/index.js", "/api/projects", "/nothing"):
        policy = http.get(path).headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert http.get(path).headers["x-content-type-options"] == "nosniff"
    embedded = client(tmp_path, embed=True).get("/").headers["content-security-policy"]
    assert "frame-ancestors 'self' http://localhost:*" in embedded


# Media


def test_media_come_in_ranges_and_cannot_act(tmp_path):
    run = fanfold.init("llm", dir=tmp_path, system=False, quiet=True)
    run.log(
        {"tone": fanfold.Audio(np.zeros(800, np.float32), sample_rate=8000), "page": fanfold.Html("<script>alert(1)</script>hi")},
        step=0,
    )
    run.finish()
    http = client(tmp_path)
    entry = fanfold.open(run.path).media("tone")[0].entry
    asked = {"project": "llm", "run": run.id, "blob": entry["blob"], "ext": "wav"}
    part = http.get("/media", params=asked, headers={"range": "bytes=0-3"})
    assert (part.status_code, part.content, part.headers["content-type"]) == (206, b"RIFF", "audio/wav")
    assert part.headers["content-security-policy"].startswith("sandbox;")
    html = http.get("/media", params={**asked, "ext": "html"})
    assert html.headers["content-type"] == "application/octet-stream" and "attachment" in html.headers["content-disposition"]
    page = http.get("/html", params={"project": "llm", "run": run.id, "key": "page"})
    assert "<script>" in page.text and page.headers["content-security-policy"].startswith("sandbox; default-src 'none'")
    assert http.get("/html", params={"project": "llm", "run": run.id, "key": "tone"}).status_code == 404


def test_no_name_leads_out_of_the_runs(tmp_path):
    runs = tmp_path / "runs"
    run = make(runs)
    secret = make(tmp_path / "elsewhere", "secret")
    (runs / "llm" / "link").symlink_to(secret.path)
    (run.path / "blobs").mkdir(exist_ok=True)
    start = next(two for two in ("aa", "bb", "cc") if not (run.path / "blobs" / two).exists())
    name = start * 32
    (tmp_path / "outside" / start).mkdir(parents=True)
    (tmp_path / "outside" / start / name).write_text("secret")
    (run.path / "blobs" / start).symlink_to(tmp_path / "outside" / start)
    http = client(runs)
    for project, id in (
        ("../elsewhere/llm", secret.id),
        ("..", "elsewhere"),
        ("llm", "../../elsewhere/llm/" + secret.id),
        ("llm", "link"),
    ):
        assert http.get("/api/run", params={"project": project, "id": id}).status_code == 404, (project, id)
    for blob in ("../../../etc/passwd", "/etc/passwd", name, "de" * 32, ""):
        answer = http.get("/media", params={"project": "llm", "run": run.id, "blob": blob})
        assert answer.status_code in (400, 404) and "secret" not in answer.text
    for path in ("/../app.py", "/%2e%2e/app.py", "/..%2fapp.py", "//etc/passwd"):
        assert "fanfold" not in http.get(path).text


# Changes


def test_without_leave_nothing_is_changed(tmp_path):
    run = make(tmp_path)
    http = client(tmp_path)
    assert http.get("/api/projects").json()["write"] is False
    for path, body in (("edit", {"name": "x"}), ("delete", {})):
        assert http.post(f"/api/{path}", json={"project": "llm", "ids": [run.id], **body}).status_code == 400
    assert http.post("/api/view", json={"project": "llm", "name": "v", "fragment": "x"}).status_code == 400
    assert fanfold.open(run.path).name == "one"


def test_edits_are_frames_that_count_most_and_change_nothing_else(tmp_path):
    run = fanfold.init("llm", dir=tmp_path, id="r", name="first", system=False, quiet=True)
    run.log({"loss": 1.0}, step=0)
    run.finish(status="failed")
    before = {file.name: file.read_bytes() for file in (run.path / "journal").iterdir()}
    http = client(tmp_path, write=True)
    facts = {"name": "<img src=x>", "tags": ["a", "b"], "notes": "why", "archived": True}
    assert http.post("/api/edit", json={"project": "llm", "ids": ["r"], **facts}).json() == {"changed": 1}
    again = fanfold.init("llm", dir=tmp_path, id="r", resume="must", name="second", system=False, quiet=True)
    again.log({"loss": 2.0}, step=1)
    again.finish()
    stored = fanfold.open("r", dir=tmp_path)
    assert (stored.name, stored.tags, stored.notes) == ("<img src=x>", ["a", "b"], "why")
    assert (stored.status, len(stored.attempts), stored.ranks) == ("finished", 2, [0])
    assert stored.series("loss").values.tolist() == [1.0, 2.0]
    assert all((run.path / "journal" / name).read_bytes() == data for name, data in before.items())
    (row,) = http.get("/api/runs", params={"project": "llm"}).json()["runs"]
    assert row["archived"] and row["name"] == "<img src=x>"
    assert http.post("/api/edit", json={"project": "llm", "ids": ["r"], "name": " "}).status_code == 400
    assert http.post("/api/edit", json={"project": "llm", "ids": ["r", "gone"], "name": "z"}).status_code == 404


def test_an_edit_after_a_restart_leaves_the_status_alone(tmp_path):
    for status in ("failed", "finished"):
        run = fanfold.init("llm", dir=tmp_path, id="r", system=False, quiet=True)
        run.log({"loss": 1.0}, step=0)
        run.finish(status=status)
    http = client(tmp_path, write=True)
    http.post("/api/edit", json={"project": "llm", "ids": ["r"], "tags": ["late"]})
    stored = fanfold.open("r", dir=tmp_path)
    assert (stored.status, len(stored.attempts), stored.tags) == ("finished", 2, ["late"])


def test_delete_spares_what_is_still_written(tmp_path):
    done = make(tmp_path, "done")
    run = fanfold.init("llm", dir=tmp_path, name="busy", system=False, quiet=True)
    run.log({"loss": 1.0}, step=0)
    http = client(tmp_path, write=True)
    refused = http.post("/api/delete", json={"project": "llm", "ids": [done.id, run.id]})
    assert refused.status_code == 400 and done.path.exists()
    assert http.post("/api/delete", json={"project": "llm", "ids": [done.id]}).json() == {"deleted": 1}
    assert not done.path.exists() and run.path.exists()
    run.finish()


def test_views_are_kept_with_the_project(tmp_path):
    make(tmp_path)
    http = client(tmp_path, write=True)
    http.post("/api/view", json={"project": "llm", "name": "t", "fragment": "log=1"})
    http.post("/api/view", json={"project": "llm", "name": "other", "fragment": "s=1"})
    assert http.post("/api/view", json={"project": "llm", "name": "other", "fragment": None}).json() == {"t": "log=1"}
    assert client(tmp_path).get("/api/views", params={"project": "llm"}).json() == {"t": "log=1"}
    assert [run.name for run in fanfold.runs("llm", dir=tmp_path)] == ["one"]


def test_rules_of_a_project_are_added_and_removed_and_mistakes_are_shown(tmp_path):
    make(tmp_path)
    run = fanfold.init("llm", dir=tmp_path, system=False, quiet=True, alerts=["acc < 0.1"])
    run.finish()
    http = client(tmp_path, write=True)
    added = http.post("/api/rule", json={"project": "llm", "rule": "loss > 2 for 3"}).json()
    assert list(added["rules"]) == ["loss > 2 for 3"] and added["programs"] == {"acc < 0.1": 1}
    wrong = http.post("/api/rule", json={"project": "llm", "rule": "loss > much"})
    assert wrong.status_code == 400 and "mistake at column 8" in wrong.json()["error"]
    assert client(tmp_path).post("/api/rule", json={"project": "llm", "rule": "loss is nan"}).status_code == 400  # read-only
    http.post("/api/rule", json={"project": "llm", "rule": "loss > 2 for 3", "remove": True})
    assert client(tmp_path).get("/api/rules", params={"project": "llm"}).json()["rules"] == {}
    assert http.get("/api/views", params={"project": "llm"}).json() == {}


# Places


def test_it_works_inside_another_app_and_under_a_path(tmp_path):
    run = make(tmp_path)
    outer = Starlette(routes=[Mount("/tools/runs", app(tmp_path))])
    http = TestClient(outer, base_url=LOCAL)
    page = http.get("/tools/runs/")
    assert page.status_code == 200 and 'src="./index.js"' in page.text and 'href="/' not in page.text
    assert http.get("/tools/runs/api/run", params={"project": "llm", "id": run.id}).json()["name"] == "one"
    assert http.get("/tools/runs/live.worker.js").status_code == 200


def test_the_command_serves_and_tells_of_news_at_once(tmp_path):
    run = fanfold.init("llm", dir=tmp_path, system=False, quiet=True)
    run.log({"loss": 1.0}, step=0)
    command = [sys.executable, "-m", "fanfold", "ui", "--dir", str(tmp_path), "--port", "0", "--json", "--no-token"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = json.loads(server.stdout.readline())["address"]
        port = int(address.rsplit(":", 1)[1].strip("/"))
        connection = http.client.HTTPConnection("localhost", port, timeout=20)
        connection.request("GET", "/api/live")
        stream = connection.getresponse()
        assert stream.headers["content-type"].startswith("text/event-stream")
        _until(stream, b"event: hello")
        run.log({"loss": 0.5}, step=1)
        logged = time.monotonic()
        assert json.loads(_until(stream, b'data: {"runs"')[6:]) == {"runs": [["llm", run.id]]}
        assert time.monotonic() - logged < 10  # half a second on a quiet machine
        connection.close()
    finally:
        server.terminate()
        assert server.wait(20) in (0, -15)
        run.finish()


@pytest.mark.parametrize("words", [("ui", "--no-token", "--dir"), ("server", "start", "--store")], ids=["ui", "gateway"])
def test_servers_merge_long_journals_by_themselves(tmp_path, words):
    import psutil

    run = fanfold.init("llm", dir=tmp_path / "runs", id="long", system=False, quiet=True)
    values = {f"key{i}": i * 0.5 for i in range(300)}
    for step in range(600):  # above a megabyte
        run.log(values, step=step)
    run.finish()
    command = [sys.executable, "-m", "fanfold", *words, str(tmp_path / "runs"), "--port", "0", "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        address = json.loads(server.stdout.readline())["address"]
        until = time.monotonic() + 60
        while not list(Path(os.environ["FANFOLD_CACHE_DIR"]).glob("segments/*/*.ffs")):
            assert time.monotonic() < until
            time.sleep(0.1)
        mergers = psutil.Process(server.pid).children()
        connection = http.client.HTTPConnection(address.strip("/").removeprefix("http://"), timeout=20)
        asked = json.dumps({"project": "llm", "runs": ["long"], "keys": ["key7"], "n": 50})
        base = "" if words[0] == "ui" else "/ui"
        origin = {"content-type": "application/json", "origin": address.rstrip("/")}
        connection.request("POST", f"{base}/api/series", asked, origin)
        (item,) = decode(connection.getresponse().read())[1]
        connection.close()
        assert item["total"] == 600
    finally:
        server.terminate()
        server.communicate(timeout=20)
    assert len(mergers) == 1
    assert psutil.wait_procs(mergers, timeout=20)[1] == []  # it ends with the server


def _until(stream, beginning: bytes) -> bytes:
    while line := stream.readline():
        if line.startswith(beginning):
            return line
    raise AssertionError(f"the stream ended before {beginning!r}")


def test_a_port_that_is_taken_is_said(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "fanfold", "ui", "--dir", str(tmp_path), "--port", port],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2 and "cannot listen" in done.stderr


def test_the_abuse_suite_knows_a_good_value_for_every_field_of_a_request():
    """It runs seldom, and would end at the first field it does not know."""
    schemas = endpoints.openapi()["components"]["schemas"]
    bodies = [one["requestBody"]["content"]["application/json"]["schema"]["$ref"] for methods in endpoints.openapi()["paths"].values()
              for one in methods.values() if "requestBody" in one]  # fmt: skip
    fields = {name for reference in bodies for name in schemas[reference.rpartition("/")[2]]["properties"]}
    assert bodies and fields <= set(SAMPLES)
