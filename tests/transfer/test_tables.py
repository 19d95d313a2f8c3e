"""Tables: what `fanfold export` wrote comes back exactly; step and time columns of others are known; damage is reported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import fanfold
from fanfold.cli import main
from transfer_tools import imported, numbers, random_run, survives_damage


@pytest.fixture
def written(tmp_path) -> Path:
    for seed in (1, 2):
        random_run(tmp_path / "runs", seed, id=f"run-{seed}")
    return tmp_path / "runs"


@pytest.mark.parametrize("long", [False, True], ids=["wide", "long"])
@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_our_own_exports_come_back_exactly(written, tmp_path, kind, long):
    file = tmp_path / f"both.{kind}"
    assert main(["export", "run-1", "run-2", "-o", str(file), "--dir", str(written), *(["--long"] if long else [])]) == 0
    runs, accounts = imported(file, into=tmp_path / "back")
    assert [account.left for account in accounts] == [[], []]
    assert sorted(run.name for run in runs) == ["run-1", "run-2"]
    for run in runs:
        original = fanfold.open(run.name, dir=written)
        assert numbers(run) == numbers(original)
        if (kind, long) != ("parquet", True):  # it has one type for all values
            assert [one.values.dtype for one in map(run.series, run.keys())] == [
                one.values.dtype for one in map(original.series, run.keys())
            ]
        if long:
            times = run.series("loss").times.tolist()
            assert times == pytest.approx(original.series("loss").times.tolist(), rel=0, abs=2e-6)


def test_importing_again_adds_only_new_rows(tmp_path):
    file = tmp_path / "table.csv"
    file.write_text("step,loss\n0,1.0\n1,0.5\n")
    imported(file, into=tmp_path / "back")
    file.write_text("step,loss\n0,1.0\n1,0.5\n2,0.25\n")
    (run,), (account,) = imported(file, into=tmp_path / "back")
    assert numbers(run) == {"loss": [(0, 1.0), (1, 0.5), (2, 0.25)]}
    assert (account.outcome, account.points) == ("updated", 1)


SEMICOLONS = """step;date;loss;note
0;2023-11-14T22:13:20.5Z;1.5;hi
10;2023-11-14T22:13:21.5Z;;there
20;2023-11-14T22:13:22.5+00:00;nan;
"""
LINES = """{"_step": 0, "_timestamp": 1700000000.5, "loss": 1.5, "note": "hi"}
{"_step": 10, "_timestamp": 1700000001.5, "note": "there"}
{"_step": 20, "_timestamp": 1700000002.5, "loss": "NaN"}
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "global_step,timestamp,loss,note\n0,1700000000.5,1.5,hi\n10,1700000001.5,,there\n20,1700000002.5,nan,\n"),
        ("a.tsv", "Step\tWall time\tloss\tnote\n0\t1700000000500\t1.5\thi\n10\t1700000001500\t\tthere\n20\t1700000002500\tnan\t\n"),
        ("a.csv", SEMICOLONS),
        ("a.jsonl", LINES),
    ],
    ids=["csv", "tsv", "semicolons", "jsonl"],
)  # fmt: skip
def test_steps_times_numbers_and_texts_of_others(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    (run,), (account,) = imported(tmp_path / name, into=tmp_path / "back")
    assert numbers(run) == {"loss": [(0, 1.5), (20, "nan")]}
    assert run.series("loss").times.tolist() == pytest.approx([1700000000.5, 1700000002.5], rel=0, abs=1e-6)
    assert [(point.step, point.text) for point in run.texts("note")] == [(0, "hi"), (10, "there")]
    assert account.left == []


def test_a_table_without_steps_counts_its_rows_and_time_may_be_a_metric(tmp_path):
    (tmp_path / "a.csv").write_text("time,loss\n0.25,3\n0.5,2\n")
    (run,), _ = imported(tmp_path / "a.csv", into=tmp_path / "back")
    assert numbers(run) == {"time": [(0, 0.25), (1, 0.5)], "loss": [(0, 3), (1, 2)]}


def test_steps_that_are_not_whole_keep_their_value_as_an_axis(tmp_path):
    (tmp_path / "a.csv").write_text("step,loss\n0.5,3\n1.25,2\n")
    (run,), _ = imported(tmp_path / "a.csv", into=tmp_path / "back")
    assert numbers(run) == {"step": [(0, 0.5), (1, 1.25)], "loss": [(0, 3), (1, 2)]}


def test_tables_are_imported_only_if_they_are_named(tmp_path):
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "a.csv").write_text("step,loss\n0,1.0\n")
    assert imported(tmp_path / "some", into=tmp_path / "back") == ([], [])
    assert len(imported(tmp_path / "some", into=tmp_path / "back", kind="table")[0]) == 1


def test_what_is_not_carried_is_reported(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"step": 1, "loss": 2.0}\nnot json\n[1]\n{"step": "x", "loss": 1}\n{"step": 2, "loss": 3')
    (run,), (account,) = imported(tmp_path / "a.jsonl", into=tmp_path / "back")
    assert numbers(run) == {"loss": [(1, 2.0)]}
    assert sum(left.count for left in account.left) == 4
    assert {left.what for left in account.left} == {"line", "row"}


def test_a_file_that_is_no_table_gives_an_account(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing else")
    runs, (account,) = imported(tmp_path / "a.parquet", into=tmp_path / "back")
    assert runs == []
    assert [left.why for left in account.left] == ["it has no columns, or cannot be read"]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_damage_never_raises(written, tmp_path, kind):
    for form in ([], ["--long"]):
        file = tmp_path / f"{'long' if form else 'wide'}.{kind}"
        assert main(["export", "run-1", "-o", str(file), "--dir", str(written), *form]) == 0
        found, told = survives_damage("table", file, tmp_path / "damaged")
        assert found > 0.7
        assert told > 0.05
        assert not Path("x").exists()


def test_a_file_replaced_by_another_run_becomes_a_new_attempt(tmp_path):
    file = tmp_path / "metrics.csv"
    file.write_text("step,loss\n0,1.0\n1,0.5\n")
    imported(file, into=tmp_path / "back")
    file.write_text("step,loss\n0,2.0\n1,1.5\n2,1.25\n")
    imported(file, into=tmp_path / "back")
    file.write_text("step,loss\n0,2.0\n1,1.5\n2,1.25\n3,1.0\n")
    (run,), (account,) = imported(file, into=tmp_path / "back")
    assert numbers(run) == {"loss": [(0, 2.0), (1, 1.5), (2, 1.25), (3, 1.0)]}
    assert len(run.series("loss", raw=True)) == 6
    assert (len(run.attempts), account.points) == (2, 1)


def test_a_line_that_is_still_being_written_is_read_when_it_is_whole(tmp_path, runs_dir):
    file = tmp_path / "run.csv"
    file.write_text("step,loss\n0,1.0\n1,12")
    (account,) = fanfold.import_runs(file)
    assert (account.points, [left["what"] for left in plain_left(account)]) == (1, ["line"])
    file.write_text("step,loss\n0,1.0\n1,1234.5\n")
    fanfold.import_runs(file)
    assert fanfold.open(account.run).series("loss").values.tolist() == [1.0, 1234.5]


def plain_left(account) -> list[dict]:
    return [one if isinstance(one, dict) else {"what": one.what} for one in account.left]


def test_a_table_at_rest_is_a_finished_run_with_its_last_line(tmp_path, runs_dir):
    file = tmp_path / "old.csv"
    file.write_text("step,loss\n0,1.0\n1,2.5")
    os.utime(file, (1_700_000_000, 1_700_000_000))
    (account,) = fanfold.import_runs(file)
    run = fanfold.open(account.run)
    assert (run.status, run.series("loss").values.tolist()) == ("finished", [1.0, 2.5])
