"""What the Table, Sweep and Media pages ask: statistics as columns, moves, tags of many runs, importance, rows of logged tables."""

from __future__ import annotations

import datetime
import json
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pandas
import pytest
from starlette.testclient import TestClient

import fanfold
import fanfold as wandb
from answers import LOCAL, decode
from fanfold.media import decode as decode_medium
from fanfold.media.table import memory_needed
from fanfold.server import app
from fanfold.store.query import LocalStore
from fanfold.store.several import SeveralStores

ORIGIN = {"origin": LOCAL}
PICTURE = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)


def client(folder: Path, **options) -> TestClient:
    return TestClient(app(folder, **options), base_url=LOCAL)


def recorded(folder: Path, id: str, losses: list[float], project: str = "llm", **options) -> None:
    run = fanfold.init(project, dir=folder, id=id, name=id, system=False, quiet=True, **options)
    for step, loss in enumerate(losses):
        run.log({"loss": loss, "word": "x"}, step=10 * step)
    run.finish()


def column(http: TestClient, name: str, **query) -> dict[str, object]:
    answer = http.post("/api/columns", json={"project": "llm", "names": [name], **query})
    assert answer.status_code == 200, answer.text
    head, (item,) = decode(answer.content)
    values = [None if i in item["missing"] else value for i, value in enumerate(item["columns"]["values"].tolist())]
    return dict(zip(head["runs"], values, strict=True))


# Statistics


def test_statistics_of_a_metric_are_columns(tmp_path):
    recorded(tmp_path, "dips", [5.0, 1.0, math.nan, 1.0, 3.0])
    recorded(tmp_path, "falls", [4.0, 2.0])
    recorded(tmp_path, "empty", [])
    http = client(tmp_path)
    expected = {
        "min": (1.0, 2.0), "max": (5.0, 4.0), "mean": (2.5, 3.0), "first": (5.0, 4.0), "last": (3.0, 2.0), "count": (5, 2),
        "min_step": (10, 10), "max_step": (0, 0),
    }  # fmt: skip
    for name, (dips, falls) in expected.items():
        assert column(http, f"{name}:loss") == {"dips": dips, "falls": falls, "empty": None}, name
    assert column(http, "min:word") == {"dips": None, "falls": None, "empty": None}
    assert column(http, "min:loss", runs=["falls", "nobody"]) == {"falls": 2.0}


def test_statistics_stored_by_an_older_version_get_their_steps(tmp_path, monkeypatch):
    from fanfold.store.points import Points

    recorded(tmp_path, "r", [5.0, 1.0, 3.0])
    whole = Points.statistics
    with monkeypatch.context() as older:
        older.setattr(
            Points, "statistics", lambda points: {name: v for name, v in whole(points).items() if not name.endswith("_step")}
        )
        assert column(client(tmp_path), "min:loss") == {"r": 1.0}
    assert column(client(tmp_path), "min_step:loss") == {"r": 10}


def test_the_page_learns_which_metrics_should_be_low_or_high(tmp_path):
    run = fanfold.init("llm", dir=tmp_path, system=False, quiet=True)
    run.define_metric("odd", summary="max")
    run.log({"odd": 1.0, "loss": 2.0}, step=0)
    run.finish()
    assert client(tmp_path).get("/api/runs", params={"project": "llm"}).json()["goals"] == {"odd": "max"}


# Changes of many runs


def test_tags_are_added_to_and_removed_from_many_runs_at_once(tmp_path):
    recorded(tmp_path, "a", [1.0], tags=["old", "kept"])
    recorded(tmp_path, "b", [1.0])
    http = client(tmp_path, write=True)
    body = {"project": "llm", "ids": ["a", "b"], "add_tags": ["new"], "remove_tags": ["old"]}
    assert http.post("/api/edit", json=body, headers=ORIGIN).json() == {"changed": 2}
    assert {run.id: run.tags for run in fanfold.runs("llm", dir=tmp_path)} == {"a": ["kept", "new"], "b": ["new"]}
    assert http.post("/api/edit", json=body, headers=ORIGIN).json() == {"changed": 0}  # nothing is left to change
    assert http.post("/api/edit", json={**body, "add_tags": [" "]}, headers=ORIGIN).status_code == 400


def test_runs_are_moved_all_or_none_and_only_with_write_access(tmp_path):
    for id in ("a", "b"):
        recorded(tmp_path, id, [1.0])
    recorded(tmp_path, "b", [2.0], project="old")
    body = {"project": "llm", "ids": ["a", "b"], "to": "old"}
    assert client(tmp_path).post("/api/move", json=body, headers=ORIGIN).status_code == 400
    http = client(tmp_path, write=True)
    refused = http.post("/api/move", json=body, headers=ORIGIN)
    assert refused.status_code == 400 and "has another run b already" in refused.json()["error"]
    for to in ("", "  "):
        assert http.post("/api/move", json={**body, "to": to}, headers=ORIGIN).status_code == 400
    assert {run.id for run in fanfold.runs("llm", dir=tmp_path)} == {"a", "b"}
    assert http.post("/api/move", json={**body, "ids": ["a", "a"]}, headers=ORIGIN).status_code == 200  # named twice
    assert {run.id for run in fanfold.runs("old", dir=tmp_path)} == {"a", "b"}


def test_a_run_of_several_directories_is_moved_in_its_own(tmp_path):
    for name in ("one", "two"):
        recorded(tmp_path / name, name, [1.0])
    store = SeveralStores([LocalStore(tmp_path / name) for name in ("one", "two")])
    http = TestClient(app(store=store, write=True), base_url=LOCAL)
    assert http.post("/api/move", json={"project": "llm", "ids": ["one", "two"], "to": "x"}, headers=ORIGIN).json() == {
        "moved": 2
    }
    assert (tmp_path / "two" / "x" / "two").is_dir() and (tmp_path / "one" / "x" / "one").is_dir()


# Importance


def test_importance_is_asked_for_by_metric_and_runs(tmp_path):
    for i in range(24):
        recorded(tmp_path, f"r{i:02d}", [9.0, float(i % 8), 5.0], config={"lr": float(i % 8), "other": (i * 7) % 24})
    http = client(tmp_path)
    found = http.post("/api/importance", json={"project": "llm", "metric": "min:loss"}).json()
    assert found["metric"] == "min:loss" and found["runs"] == 24
    assert found["fields"][0]["name"] == "config:lr" and found["fields"][0]["correlation"] == pytest.approx(
        _spearman([i % 8 for i in range(24)], [min(i % 8, 5) for i in range(24)]), abs=1e-6
    )
    few = http.post("/api/importance", json={"project": "llm", "metric": "min:loss", "runs": ["r01", "r02"]}).json()
    assert (few["runs"], few["score"], few["fields"]) == (2, None, [])
    assert http.post("/api/importance", json={"project": "llm", "metric": "nothing"}).json()["runs"] == 0
    assert http.post("/api/importance", json={"project": "llm", "metric": "x", "runs": ["r"] * 30_000}).status_code == 400


def _spearman(a: list[float], b: list[float]) -> float:
    return float(pandas.Series(a).corr(pandas.Series(b), method="spearman"))


# Logged tables


def samples(folder: Path, id: str = "r", count: int = 30, steps: tuple[int, ...] = (0, 5)) -> None:
    run = fanfold.init("llm", dir=folder, id=id, name=id, system=False, quiet=True)
    for step in steps:
        rows = [[f"q{i}", f"{id} says {i} at {step}", i / 10, i % 2 == 0, fanfold.Image(PICTURE), fanfold.Audio(np.zeros(80, np.float32), sample_rate=8000)]
                for i in range(count)]  # fmt: skip
        if step:
            rows.reverse()
        run.log({"samples": fanfold.Table(["prompt", "answer", "reward", "even", "picture", "sound"], rows)}, step=step)
    run.finish()


def rows(http: TestClient, **query) -> dict:
    answer = http.get("/api/table", params={"project": "llm", "id": "r", "key": "samples", **query})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_rows_are_searched_filtered_sorted_and_paged(tmp_path):
    samples(tmp_path)
    http = client(tmp_path)
    found = rows(http, search="SAYS 2", count=3)
    assert (found["found"], found["total"], len(found["rows"])) == (11, 30, 3)  # 2 and 20 to 29
    assert found["numbers"] == [2, 20, 21]
    assert [row[0] for row in rows(http, sort="-reward", count=2)["rows"]] == ["q29", "q28"]
    assert [row[0] for row in rows(http, sort="-reward", start=28, count=5)["rows"]] == ["q1", "q0"]
    where = json.dumps([["reward", ">=", "1"], ["reward", "<", "1.3"], ["even", "=", "true"]])
    assert [row[0] for row in rows(http, where=where)["rows"]] == ["q10", "q12"]
    assert rows(http, where=json.dumps([["answer", "~", "Says 7"]]))["numbers"] == [7]
    assert rows(http, where=json.dumps([["prompt", "!=", "q3"]]))["found"] == 29
    assert rows(http, search="nothing like it")["rows"] == []


@pytest.mark.parametrize(
    "query",
    [
        {"sort": "nobody"},
        {"where": "no json"},
        {"where": '[["nobody", "=", "1"]]'},
        {"where": '[["reward", "<", "x"]]'},
        {"where": '[["reward", "like", "1"]]'},
        {"where": '[["reward"]]'},
        {"n": 7},
        {"key": "other"},
    ],
)
def test_questions_to_a_table_that_make_no_sense_are_refused(tmp_path, query):
    samples(tmp_path, count=2)
    answer = client(tmp_path).get("/api/table", params={"project": "llm", "id": "r", "key": "samples", **query})
    assert answer.status_code in (400, 404) and answer.json()["error"]


@pytest.mark.parametrize(
    "cell",
    [[], {}, [[]], {"a": None}, "", "a", "ab", "é", "Ā", "😀", None, 1.5, 300, 2**70, b"x", [1], ["a", []], datetime.date(2026, 1, 2),
     np.zeros(1), fanfold.Text("x")],
    ids=lambda cell: type(cell).__name__,
)  # fmt: skip
def test_the_memory_of_a_decoded_table_is_known_before(cell):
    rows = 20_000
    data = fanfold.Table({"odd": [cell] * (rows - 1) + ["one that is no number"]}).encode().data
    tracemalloc.start()
    held = decode_medium("table", {}, bytes(data)).column("odd")
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(held) == rows
    assert taken <= memory_needed(data) <= 200 * len(data)


def test_a_table_that_would_fill_the_memory_is_not_decoded(tmp_path, monkeypatch):
    run = fanfold.init("llm", dir=tmp_path, id="r", system=False, quiet=True)
    run.log({"samples": fanfold.Table({"a": [[]] * 50_000}), "numbers": fanfold.Table({"a": np.zeros(200_000)})}, step=3)
    run.finish()
    monkeypatch.setattr("fanfold.server.samples.MOST_MEMORY", 2_000_000)
    http = client(tmp_path)
    answer = http.get("/api/table", params={"project": "llm", "id": "r", "key": "samples"})
    assert answer.status_code == 400
    assert "too large to be shown here" in answer.json()["error"]
    assert "fanfold.open('r').table('samples', step=3)" in answer.json()["error"]
    assert (
        http.get("/cell", params={"project": "llm", "run": "r", "key": "samples", "n": 0, "row": 0, "column": 0}).status_code
        != 200
    )
    numbers = http.get("/api/table", params={"project": "llm", "id": "r", "key": "numbers"})
    assert numbers.json()["total"] == 200_000
    sample = http.post("/api/sample", json={"project": "llm", "runs": ["r"], "key": "samples", "row": 0})
    assert sample.status_code == 400 and "too large" in sample.json()["error"]


def test_media_in_cells_are_served_as_what_they_are(tmp_path):
    samples(tmp_path, count=3)
    http = client(tmp_path)
    assert [one[:3] for one in rows(http)["media"]][:2] == [[0, 4, "image"], [0, 5, "audio"]]
    where = {"project": "llm", "run": "r", "key": "samples", "n": 0, "row": 1}
    picture = http.get("/cell", params={**where, "column": 4})
    assert picture.headers["content-type"] == "image/png" and picture.content.startswith(b"\x89PNG")
    assert "sandbox" in picture.headers["content-security-policy"]
    assert (fanfold.Image(picture.content).array() == PICTURE).all()
    assert http.get("/cell", params={**where, "column": 5}).headers["content-type"] == "audio/wav"
    for odd in ({"column": 0}, {"column": 9}, {"column": 4, "row": 99}, {"column": "x"}, {"column": 4, "n": 5}):
        assert http.get("/cell", params={**where, **odd}).status_code == 404


def test_html_in_a_cell_is_only_offered_as_a_file(tmp_path):
    run = fanfold.init("llm", dir=tmp_path, id="r", system=False, quiet=True)
    run.log({"samples": fanfold.Table(["page"], [[fanfold.Html("<script>alert(1)</script>")]])}, step=0)
    run.finish()
    answer = client(tmp_path).get("/cell", params={"project": "llm", "run": "r", "key": "samples", "n": 0, "row": 0, "column": 0})
    assert answer.headers["content-type"] == "application/octet-stream"
    assert (
        answer.headers["content-disposition"].startswith("attachment")
        and "script-src" not in answer.headers["content-security-policy"]
    )


def test_the_same_row_is_found_at_other_steps_and_in_other_runs(tmp_path):
    samples(tmp_path, "r")
    samples(tmp_path, "s", count=4)
    http = client(tmp_path)
    asked = {"project": "llm", "runs": ["r", "s", "nobody"], "key": "samples", "row": 2}
    found = http.post("/api/sample", json={**asked, "column": "prompt", "value": "q2"}).json()["found"]
    assert [(one["run"], one["step"], one["row"], one["cells"][1]) for one in found] == [
        ("r", 0, 2, "r says 2 at 0"), ("s", 0, 2, "s says 2 at 0"), ("r", 5, 27, "r says 2 at 5"), ("s", 5, 1, "s says 2 at 5"),
    ]  # fmt: skip
    assert found[0]["media"][0][:2] == [4, "image"]
    by_number = http.post("/api/sample", json=asked).json()
    assert [one["cells"][0] for one in by_number["found"]] == ["q2", "q2", "q27", "q1"] and by_number["tables"] == 4
    assert http.post("/api/sample", json={**asked, "column": "prompt", "value": "q29"}).json()["found"][0]["run"] == "r"


def test_tables_of_evaluation_harnesses_are_samples(tmp_path, monkeypatch):
    """As lm-evaluation-harness and TRL log them: `wandb.log` with a table of a data frame, under a key of their own."""
    monkeypatch.chdir(tmp_path)
    frame = pandas.DataFrame({"id": [0, 1], "data": ["2+2=", "3+3="], "labels": ["4", "6"], "filtered_predictions": ["4", "7"]})
    completions = {"step": ["3", "3"], "prompt": ["Hi", "Yo"], "completion": ["Hello", "Hey"], "accuracy_reward": [1.0, 0.0]}
    run = wandb.init(project="llm", dir=str(tmp_path))
    wandb.log({"gsm8k_eval_results": wandb.Table(dataframe=frame)})
    wandb.log({"completions": wandb.Table(dataframe=pandas.DataFrame(completions))})
    run.finish()
    (stored,) = fanfold.runs("llm", dir=run.path.parents[1])
    http = client(Path(stored.path).parents[1])
    asked = {"project": "llm", "id": stored.id}
    answer = http.get("/api/table", params={**asked, "key": "gsm8k_eval_results", "where": '[["labels", "=", "6"]]'}).json()
    assert answer["columns"] == list(frame.columns) and answer["rows"] == [[1, "3+3=", "6", "7"]]
    answer = http.get("/api/table", params={**asked, "key": "completions", "sort": "accuracy_reward"}).json()
    assert [row[2] for row in answer["rows"]] == ["Hey", "Hello"]


# Plotly


def test_figures_are_drawn_by_the_installed_script_in_a_frame_that_reaches_nothing(tmp_path):
    import plotly

    http = client(tmp_path)
    script = http.get("/plotly.js")
    installed = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
    assert script.content == installed.read_bytes() and script.headers["content-type"].startswith("text/javascript")
    policy = http.get("/plot").headers["content-security-policy"]
    assert "sandbox allow-scripts;" in policy and "default-src 'none'" in policy and "connect-src" not in policy
    assert "allow-same-origin" not in policy


def test_without_plotly_the_page_is_told_what_to_install(tmp_path, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "plotly" else real(name, *rest))
    answer = client(tmp_path).get("/plotly.js")
    assert answer.status_code == 404 and "pip install plotly" in answer.text
