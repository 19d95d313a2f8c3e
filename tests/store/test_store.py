"""Reading: many runs, the catalogue, opening by name, data frames, several ranks."""

import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fanfold
from fanfold.errors import FanfoldError, RunError, RunNotFound


def make(runs_dir, project="p", **options):
    run = fanfold.init(project, dir=runs_dir, quiet=True, system=False, **options)
    run.log({"loss": 1.0, "n": 1}, step=0)
    run.log({"loss": 0.5}, step=1)
    run.finish()
    return run


def test_runs_are_listed_newest_first_and_by_project(runs_dir):
    ids = [make(runs_dir, project=project).id for project in ("a", "b", "a")]
    assert [run.id for run in fanfold.runs(dir=runs_dir)] == ids[::-1]
    assert [run.id for run in fanfold.runs("a", dir=runs_dir)] == [ids[2], ids[0]]
    assert fanfold.runs("none", dir=runs_dir) == []
    assert fanfold.runs(dir=Path(runs_dir) / "nowhere") == []


def test_the_catalogue_can_be_deleted_or_damaged_at_any_time(runs_dir):
    run = make(runs_dir, config={"lr": 0.1})
    rows = [(r.id, r.config, r.summary, r.status) for r in fanfold.runs(dir=runs_dir)]
    cache = Path(os.environ["FANFOLD_CACHE_DIR"])
    assert list(cache.glob("catalogue*.db"))
    for damage in (
        lambda: shutil.rmtree(cache),
        lambda: [f.write_bytes(b"no database at all" * 99) for f in cache.glob("catalogue*")],
    ):
        damage()
        assert (
            [(r.id, r.config, r.summary, r.status) for r in fanfold.runs(dir=runs_dir)]
            == rows
            == [(run.id, {"lr": 0.1}, {"loss": 0.5, "n": 1}, "finished")]
        )


def test_the_catalogue_answers_without_opening_journals(runs_dir, monkeypatch):
    make(runs_dir)
    fanfold.runs(dir=runs_dir)
    monkeypatch.setattr("fanfold.store.run.open_indexed", lambda *_: pytest.fail("a journal was opened"))
    run = fanfold.runs(dir=runs_dir)[0]
    assert (run.status, run.name, run.summary["loss"], run.ranks) == ("finished", run.name, 0.5, [0])


def test_a_row_is_renewed_when_the_run_goes_on(runs_dir):
    run = fanfold.init("p", id="x", dir=runs_dir, quiet=True, system=False)
    run.log({"a": 1})
    assert fanfold.runs(dir=runs_dir)[0].summary == {"a": 1}
    run.log({"a": 2})
    assert fanfold.runs(dir=runs_dir)[0].summary == {"a": 2}
    run.finish()
    assert fanfold.runs(dir=runs_dir)[0].status == "finished"


def test_a_run_opens_by_id_prefix_name_path_or_dash(runs_dir):
    first, second = make(runs_dir, id="aaa-1", name="red"), make(runs_dir, id="aab-2", name="blue")
    for word in ("aaa-1", "aaa", "red", str(first.path), first.path):
        assert fanfold.open(word, dir=runs_dir).id == "aaa-1"
    assert fanfold.open("-", dir=runs_dir).id == second.id
    with pytest.raises(RunError, match=r"names 2 runs: .*aab-2.*aaa-1"):
        fanfold.open("aa", dir=runs_dir)
    with pytest.raises(RunNotFound, match=r"no run 'zzz'.*fanfold ls"):
        fanfold.open("zzz", dir=runs_dir)


def test_a_folder_of_the_same_name_does_not_hide_a_run(runs_dir, tmp_path, monkeypatch):
    stored, elsewhere = make(runs_dir, id="mine", name="brave-fox-1"), make(tmp_path / "elsewhere", id="other")
    monkeypatch.chdir(tmp_path)
    for folder in ("mine", "brave-fox-1", "min"):
        shutil.copytree(elsewhere.path, tmp_path / folder)
    assert [fanfold.open(word, dir=runs_dir).path for word in ("mine", "brave-fox-1")] == [stored.path] * 2
    assert fanfold.open("./mine", dir=runs_dir).id == fanfold.open(Path("mine"), dir=runs_dir).id == "other"
    assert fanfold.open("min", dir=runs_dir).id == "other"  # not the whole id of a run: the folder counts
    monkeypatch.chdir(tmp_path / "mine" / "journal")
    assert fanfold.open("..", dir=runs_dir).id == "other"


def test_an_unknown_key_names_the_ones_there_are(runs_dir):
    run = make(runs_dir)
    stored = fanfold.open(run.path)
    with pytest.raises(FanfoldError, match=r"no numbers under 'los'.*loss"):
        stored.series("los")
    with pytest.raises(
        FanfoldError, match=r"^rank 7 of run .* has no numbers under 'loss'\. Nothing was read\. Ranks that have it: 0\.$"
    ):
        stored.series("loss", rank=7)
    with pytest.raises(FanfoldError, match="number, text, media, system"):
        stored.keys("everything")


def test_data_frames_have_a_row_per_step(runs_dir):
    stored = fanfold.open(make(runs_dir).path)
    pandas, polars, arrow = stored.to_pandas(), stored.to_polars(), stored.to_arrow()
    assert pandas["step"].tolist() == [0, 1]
    assert pandas["loss"].tolist() == polars["loss"].to_list() == arrow["loss"].to_pylist() == [1.0, 0.5]
    assert pandas["n"].iloc[0] == 1
    assert np.isnan(pandas["n"].iloc[1])
    assert stored.to_pandas(["n"])["n"].dtype == np.int64


RANKED = """
import os, fanfold
rank = int(os.environ["FANFOLD_RANK"])
run = fanfold.init("p", id="ranked", quiet=True, system=False)
for step in range(50):
    run.log({"loss": rank * 100.0 + step, "tokens": 10}, step=step)
    if rank == 1: run.log({"only_one": 1.0}, step=step)
run.finish()
"""


@pytest.fixture
def ranked(runs_dir):
    env = {**os.environ, "FANFOLD_DIR": str(runs_dir), "FANFOLD_WORLD_SIZE": "4"}
    children = [subprocess.Popen([sys.executable, "-c", RANKED], env={**env, "FANFOLD_RANK": str(rank)}) for rank in range(4)]
    assert [child.wait(60) for child in children] == [0] * 4
    return fanfold.open("ranked", dir=runs_dir)


def test_ranks_are_read_one_by_one_or_folded(ranked):
    assert ranked.ranks == [0, 1, 2, 3]
    assert ranked.series("loss").values.tolist() == [float(step) for step in range(50)]
    assert ranked.series("loss", rank=2).values[0] == 200.0
    assert ranked.series("only_one").values.tolist() == [1.0] * 50
    mean = ranked.series("loss", fold="mean")
    assert mean.values.tolist() == [150.0 + step for step in range(50)]
    assert (set(mean.min_rank), set(mean.max_rank), set(mean.count)) == ({0}, {3}, {4})
    assert ranked.series("tokens", fold="sum").values.tolist() == [40.0] * 50
    assert ranked.to_pandas(["loss"], fold="max")["loss"].tolist() == [300.0 + step for step in range(50)]
    assert ranked.status == "finished"


def test_folders_of_two_nodes_copied_together_make_the_run_whole(ranked, tmp_path):
    """Nodes without a shared filesystem hold their ranks' journals under one run id."""
    halves = [tmp_path / "node0" / "p" / "ranked" / "journal", tmp_path / "node1" / "p" / "ranked" / "journal"]
    for half, ranks in zip(halves, ("01", "23"), strict=True):
        half.mkdir(parents=True)
        for file in (ranked.path / "journal").glob("*.ffj"):
            if file.name[0] in ranks:
                shutil.copy(file, half)
    assert fanfold.open("ranked", dir=tmp_path / "node0").ranks == [0, 1]
    shutil.copytree(tmp_path / "node1", tmp_path / "node0", dirs_exist_ok=True)
    whole = fanfold.open("ranked", dir=tmp_path / "node0")
    assert whole.series("loss", fold="mean").values.tolist() == [150.0 + step for step in range(50)]
    assert whole.status == "finished"


def test_one_failed_rank_fails_the_run_and_is_named(runs_dir):
    code = RANKED.replace("run.finish()", "\nif rank == 2: raise ValueError('rank two is ill')\nrun.finish()")
    env = {**os.environ, "FANFOLD_DIR": str(runs_dir), "FANFOLD_WORLD_SIZE": "3"}
    children = [
        subprocess.Popen([sys.executable, "-c", code], env={**env, "FANFOLD_RANK": str(r)}, stderr=subprocess.DEVNULL)
        for r in range(3)
    ]
    assert [child.wait(60) for child in children] == [0, 0, 1]
    stored = fanfold.open("ranked", dir=runs_dir)
    assert (stored.status, stored.verdict["rank"]) == ("failed", 2)
    assert "rank two is ill" in stored.error


def test_a_second_process_may_read_the_catalogue_at_the_same_time(runs_dir):
    make(runs_dir)
    with sqlite3.connect(
        next(Path(os.environ["FANFOLD_CACHE_DIR"]).glob("catalogue*.db")) if fanfold.runs(dir=runs_dir) else ""
    ) as other:
        other.execute("BEGIN IMMEDIATE")
        shutil.rmtree(Path(runs_dir) / "p" / fanfold.runs(dir=runs_dir)[0].id / "blobs", ignore_errors=True)
        other.rollback()
    assert len(fanfold.runs(dir=runs_dir)) == 1
