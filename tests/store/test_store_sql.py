"""SQL over runs and points: right answers, only what is asked for is read, and no way out of the tables."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest

import fanfold
from fanfold.errors import FanfoldError
from fanfold.store import sql
from store_data import Call, write_run


@pytest.fixture
def three(runs_dir):
    for place, lr in enumerate((0.1, 0.2, 0.3)):
        run = fanfold.init(
            "p", id=f"run{place}", name=f"n{place}", config={"lr": lr, "model": {"dim": 8}}, tags=("x", "y"), system=False
        )
        for step in range(10):
            run.log({"loss": lr * step, "acc": 1.0, "word": f"w{step}"}, step=step)
        run.alert("hot", "too hot", level="error")
        run.finish()
    return runs_dir


def rows(text, **where):
    return sql.query(text, **where).rows


def test_points_config_and_facts_can_be_joined(three):
    best = """SELECT r.name, c.number, max(p.value) FROM runs r JOIN config c ON c.run = r.id AND c.key = 'lr'
              JOIN points p ON p.run = r.id WHERE p.key = 'loss' AND r.status = 'finished' GROUP BY ALL ORDER BY 2"""
    assert rows(best) == [("n0", 0.1, 0.9), ("n1", 0.2, 1.8), ("n2", 0.3, pytest.approx(2.7))]
    assert rows("SELECT count(*), count(DISTINCT key), min(step), max(step) FROM points") == [(60, 2, 0, 9)]
    assert rows("SELECT run, text FROM texts WHERE key = 'word' AND step = 3 ORDER BY run") == [
        (f"run{i}", "w3") for i in range(3)
    ]
    assert rows("SELECT DISTINCT level, title, text FROM alerts") == [("error", "hot", "too hot")]
    assert rows("SELECT value, number FROM config WHERE key = 'model.dim' AND run = 'run1'") == [("8", 8.0)]
    assert rows("SELECT number FROM latest WHERE key = 'loss' ORDER BY 1")[0] == (0.9,)
    assert rows("SELECT tags, ranks, epoch(created) > 1e9 FROM runs LIMIT 1") == [(["x", "y"], 1, True)]
    assert rows("SELECT epoch(max(time) - min(time)) < 60 FROM points WHERE run = 'run0'") == [(True,)]


def test_a_slow_query_draws_no_progress_bar_into_its_answer(three):
    """The engine draws one on stdout after two seconds, also into a pipe, where Python has no script: in `python -c` and notebooks."""
    code = "from fanfold.cli import main; main(['query', \"SELECT current_setting('enable_progress_bar') AS draws\", '--json'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert json.loads(done.stdout) == [{"draws": False}]


def test_a_table_may_be_read_twice_in_one_query(three):
    text = (
        "WITH a AS (SELECT * FROM points WHERE key = 'loss') SELECT (SELECT count(*) FROM a), "
        "(SELECT round(sum(value), 6) FROM a WHERE step = 1), (SELECT count(*) FROM points WHERE key = 'acc')"
    )
    assert {tuple(rows(text)) for _ in range(20)} == {((30, 0.6, 30),)}  # the engine's threads read at once


def test_hidden_points_are_hidden_and_odd_numbers_stay(tmp_path):
    calls = [Call(0, 0, i, 1, {"a": 1.0}) for i in range(10)] + [
        Call(1, 0, i, 1, {"a": math.inf if i == 7 else 2.0}) for i in range(5, 8)
    ]
    write_run(tmp_path, calls)
    assert rows("SELECT step, value FROM points ORDER BY step", dir=tmp_path)[4:] == [(4, 1.0), (5, 2.0), (6, 2.0), (7, math.inf)]


# What follows SELECT count(*) FROM points, and the keys and runs that must be read for it; None: all.
REACH = [
    ("WHERE key = 'loss'", {"loss"}, None),
    ("p WHERE p.key IN ('loss', 'acc') AND 'run1' = p.run", {"loss", "acc"}, {"run1"}),
    ("WHERE key = 'loss' OR run = 'run1'", None, None),
    ("WHERE NOT key = 'loss'", None, None),
    ("WHERE key = 'loss' AND key = 'acc'", set(), None),
    ("WHERE upper(key) = 'LOSS'", None, None),
    ("JOIN points q ON q.step = points.step WHERE points.key = 'loss'", None, None),
    ("p(key) WHERE key = 'p'", None, None),
    ("ASOF JOIN (SELECT * FROM points WHERE key = 'acc') q ON points.time >= q.time WHERE points.key = 'loss'", None, None),
    ("WHERE key = 'loss' AND value < (SELECT max(acc) FROM (PIVOT points ON key IN ('acc') USING max(value)))", None, None),
    ("JOIN runs ON id = run WHERE runs.project = 'p' AND points.key = 'loss'", {"loss"}, None),
    ("WHERE key = 'loss' UNION ALL SELECT count(*) FROM points WHERE key = 'acc'", {"loss", "acc"}, None),
    ("WHERE key = 'loss' AND step IN (SELECT step FROM points WHERE key = 'acc')", {"loss", "acc"}, None),
]


def test_only_the_runs_and_keys_a_query_can_meet_are_read(three):
    """Each query is asked of real tables with everything in them, too: leaving points out must not change an answer."""
    import duckdb

    engine = duckdb.connect()
    engine.execute(
        "CREATE TABLE points (project TEXT, run TEXT, key TEXT, rank BIGINT, step BIGINT, time TIMESTAMP, value DOUBLE)"
    )
    engine.executemany("INSERT INTO points VALUES (?, ?, ?, ?, ?, ?, ?)", rows("SELECT * FROM points"))
    engine.execute("CREATE TABLE runs (project TEXT, id TEXT)")
    engine.executemany("INSERT INTO runs VALUES (?, ?)", rows("SELECT project, id FROM runs"))
    for where, keys, ids in REACH:
        text = f"SELECT count(*) FROM points {where}"
        found = sql.wanted(engine, text)["points"]
        assert (found.key, found.run) == (keys, ids), where
        assert sorted(rows(text)) == sorted(engine.execute(text).fetchall()), where
    engine.close()


OUTSIDE = [
    "SELECT * FROM read_csv('/etc/passwd')",
    "SELECT * FROM read_text('/etc/hostname')",
    "SELECT * FROM '/etc/passwd'",
    "SELECT * FROM glob('/*')",
    "COPY (SELECT 1) TO '{tmp}/out.csv'",
    "ATTACH '{tmp}/x.db'",
    "INSTALL httpfs",
    "SET enable_external_access = true",
    "SELECT 1; SELECT 2",
    "CREATE TABLE t AS SELECT 1",
    "DELETE FROM runs",
    "SELECT * FROM three",
    "SELECT getenv('HOME')",
    "",
]


def test_a_query_reaches_nothing_but_the_tables(three, tmp_path):
    for text in OUTSIDE:
        with pytest.raises(FanfoldError, match=r"Nothing was changed|Nothing was run"):
            sql.query(text.replace("{tmp}", str(tmp_path)))
    assert not (tmp_path / "out.csv").exists()
    assert not (tmp_path / "x.db").exists()


def test_the_command_prints_tables_json_and_plain_errors(three):
    def ask(*words):
        done = subprocess.run(
            [sys.executable, "-m", "fanfold", "query", *words], capture_output=True, text=True, env=dict(os.environ), timeout=60
        )
        return done.returncode, done.stdout, done.stderr

    code, out, said = ask("--json", "SELECT id, tags, created, 'NaN'::DOUBLE AS odd FROM runs ORDER BY id LIMIT 1")
    (row,) = json.loads(out)
    assert (code, row["id"], row["tags"], row["odd"]) == (0, "run0", ["x", "y"], "NaN")
    assert row["created"].endswith("+00:00")
    assert said == ""
    code, out, said = ask("SELECT run, count(*) AS n FROM points GROUP BY run ORDER BY run")
    assert (code, out.splitlines()[:2], said) == (0, ["run   n", "run0  20"], "3 rows\n")
    code, _, said = ask("SELECT idd FROM runs")
    assert code == 2
    assert "Referenced column" in said
    assert "fanfold query --tables" in said
    assert ask("SELECT * FROM runs WHERE id = 'none'")[0] == 1
    assert "points" in ask("--tables")[1]
