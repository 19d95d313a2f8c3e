"""A whole project leaves as a bundle of Parquet, JSON and files, and comes back as it was; runs move between projects."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import fanfold
from fanfold.cli import main
from fanfold.relay import Cursor
from fanfold.store.query import LocalStore
from transfer_tools import imported, numbers, random_run, survives_damage


def rich_run(root: Path) -> None:
    """A run of two attempts and two ranks with everything in it."""
    for attempt in (1, 2):
        run = fanfold.init("my project", dir=root, id="rich", name="näme", config={"lr": 0.1, "nan": float("nan")}, tags=["x"],
                           notes="why", group="g", resume="allow", system=False, console=False, quiet=True)  # fmt: skip
        for step in range(5):
            run.log({"loss": 1 / (step + attempt), "count": step, "ok": step % 2 == 0, "big": 2**60 + step}, step=step + attempt)
        run.log({"note": "hello"}, step=7)
        run.log({"images": [fanfold.Image(np.full((2, 2, 3), n, np.uint8), caption=str(n)) for n in range(3)]}, step=7)
        run.log({"table": fanfold.Table(["a", "b"], [[1, "x"], [2.5, None]]), "hist": fanfold.Histogram([1.0, 2.0])}, step=8)
        run.alert("title", "text", level="error")
        run.artifact(__file__, "script", kind="code", why="because")
        run.define_metric("loss", summary="min")
        run.summary["own"] = 3
        run.finish()


def content(run: Any) -> dict[str, Any]:
    """Return everything a reader sees of a run."""
    media = [
        (point.key, point.step, point.rank, point.kind, {k: v for k, v in point.entry.items() if k != "size"})
        for key in run.keys("media") for point in run.media(key)
    ]  # fmt: skip
    keys = run.keys()
    raw = {key: run.series(key, raw=True) for key in keys}
    return {
        "facts": (run.id, run.project, run.name, run.group, run.notes, run.tags, repr(run.config), run.status, run.summary),
        "points": {key: (one.steps.tolist(), one.times.tolist(), one.values.tolist(), one.values.dtype) for key, one in raw.items()},
        "texts": {key: run.texts(key) for key in run.keys("text")},
        "media": media,
        "alerts": [(one["t"], one["s"], one["level"], one["title"], one["text"]) for one in run.alerts],
        "artifacts": [(one["name"], one["kind"], one["metadata"], one["s"], one["t"], one["files"]) for one in run.artifacts
                      if one["name"] != "code"],
        "attempts": [(attempt.started, attempt.verdict()["status"], attempt.verdict()["time"]) for attempt in run.attempts],
        "times": (run.started, run.duration),
    }  # fmt: skip


def test_a_project_comes_back_exactly(tmp_path):
    root, bundle = tmp_path / "runs", tmp_path / "bundle"
    rich_run(root)
    random_run(root, 3, project="my project", id="other")
    random_run(root, 4, project="elsewhere", id="not in it")
    assert main(["export", "--project", "my project", "-o", str(bundle), "--dir", str(root)]) == 0
    runs, accounts = imported(bundle, into=tmp_path / "back")
    assert sorted(run.id for run in runs) == ["other", "rich"]
    assert [account.left for account in accounts] == [[], []]
    for run in runs:
        there, here = content(fanfold.open(run.id, dir=root)), content(run)
        for part, found in here.items():
            assert repr(found) == repr(there[part]), part  # NaN equals itself as a text
        for key in run.keys("media"):
            assert [point.load() is not None for point in run.media(key)]
    assert {account.outcome for account in imported(bundle, into=tmp_path / "back")[1]} == {"unchanged"}
    assert {account.outcome for account in imported(bundle, into=root)[1]} == {"known"}


def test_the_tables_have_the_documented_columns(tmp_path):
    rich_run(tmp_path / "runs")
    assert main(["export", "rich", "--whole", "-o", str(tmp_path / "bundle"), "--dir", str(tmp_path / "runs")]) == 0
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    folder = tmp_path / "bundle" / "runs" / "my project" / "rich"
    for file in folder.glob("*.parquet"):
        row = next(line for line in page.splitlines() if line.startswith(f"| `{file.name}`"))
        columns = row.split("|")[2].replace("`", "").replace(" ", "").split(",")
        assert pq.read_schema(file).names == columns
    points = pq.read_table(folder / "points.parquet").to_pylist()
    big = [row for row in points if row["key"] == "big"]
    assert [row["integer"] for row in big] == [2**60 + step for step in range(5)] * 2
    facts = json.loads((folder / "run.json").read_text())
    assert all(f"`{name}`" in page for name in facts)


def test_a_bundle_is_never_written_over_something(tmp_path, capsys):
    random_run(tmp_path / "runs", 1, id="a")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    assert main(["export", "--project", "p", "-o", str(tmp_path / "out"), "--dir", str(tmp_path / "runs")]) == 2
    assert "not empty" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]
    assert main(["export", "--dir", str(tmp_path / "runs")]) == 2
    assert "Name runs, or a whole project" in capsys.readouterr().err


def test_a_hostile_bundle_reads_nothing_outside_of_it(tmp_path):
    rich_run(tmp_path / "runs")
    bundle, secret = tmp_path / "bundle", tmp_path / "secret"
    secret.write_text("secret")
    assert main(["export", "rich", "--whole", "-o", str(bundle), "--dir", str(tmp_path / "runs")]) == 0
    path = bundle / "runs" / "my project" / "rich" / "run.json"
    facts = json.loads(path.read_text())
    for place in ("../secret", str(secret), "files/link"):
        facts["artifacts"][0]["files"].append({"path": "x", "file": place, "size": 6})
    (bundle / "files" / "link").symlink_to(secret)
    path.write_text(json.dumps(facts))
    (run,), (account,) = imported(bundle, into=tmp_path / "back")
    assert sum(left.count for left in account.left if left.what == "file") == 3
    assert not [file for one in run.artifacts for file in one["files"] if file["path"] == "x"]


def test_damage_never_raises(tmp_path):
    random_run(tmp_path / "runs", 1, id="a")
    assert main(["export", "a", "--whole", "-o", str(tmp_path / "bundle"), "--dir", str(tmp_path / "runs")]) == 0
    found, told = survives_damage("fanfold", tmp_path / "bundle", tmp_path / "damaged")
    assert found > 0.5
    assert told > 0.1


# mv and cp


def test_a_moved_run_is_in_its_new_project_for_every_reader(tmp_path, capsys):
    random_run(tmp_path, 1, id="a")
    before = numbers(fanfold.open("a", dir=tmp_path))
    assert [project["name"] for project in LocalStore(tmp_path).projects()] == ["p"]
    assert main(["mv", "a", "--project", "Ünusual / name", "--dir", str(tmp_path)]) == 0
    store = LocalStore(tmp_path)
    (row,) = store.runs()
    assert (row.project, row.id, row.status) == ("Ünusual / name", "a", "finished")
    assert numbers(store.run(row.project, row.id)) == before
    assert [project["name"] for project in store.projects() if project["runs"]] == ["Ünusual / name"]
    capsys.readouterr()
    assert main(["ls", "--json", "--dir", str(tmp_path)]) == 0
    assert [one["project"] for one in json.loads(capsys.readouterr().out)] == ["Ünusual / name"]
    assert fanfold.init("Ünusual / name", id="a", resume="must", dir=tmp_path, system=False, quiet=True).attempt == 2
    fanfold.finish()


def test_a_run_moved_by_hand_belongs_to_the_folder_it_is_in(tmp_path):
    random_run(tmp_path, 1, id="a")
    (tmp_path / "q").mkdir()
    (tmp_path / "p" / "a").rename(tmp_path / "q" / "a")
    store = LocalStore(tmp_path)
    (row,) = store.runs()
    assert (row.project, store.run(row.project, row.id).project) == ("q", "q")


def test_a_long_project_name_is_still_whole(tmp_path):
    name = "-".join(["long"] * 100)
    random_run(tmp_path, 1, id="a", project=name)
    assert [row.project for row in LocalStore(tmp_path).runs()] == [name]


def test_a_copy_is_a_run_of_its_own_that_is_delivered_nowhere(tmp_path):
    random_run(tmp_path, 1, id="a")
    assert main(["sync", "a", "--to", "tensorboard", "--dir", str(tmp_path)]) == 0
    assert main(["cp", "a", "--project", "q", "--dir", str(tmp_path)]) == 0
    copy, original = LocalStore(tmp_path).run("q", "a"), LocalStore(tmp_path).run("p", "a")
    assert (copy.project, numbers(copy)) == ("q", numbers(original))
    assert copy.media("picture")[0].load().pil().size == (5, 4)
    assert not (copy.path / "relay").exists()
    assert (original.path / "relay").exists()


def test_reports_are_not_sent_by_a_copy_nor_moved_while_they_are_sent(tmp_path, capsys):
    random_run(tmp_path, 1, id="a")
    reports = tmp_path / "p" / "a" / "reports"
    random_run(reports, 1, id="sent")
    cursor = Cursor.load(reports / "p" / "sent" / "relay" / "tensorboard.cursor")
    cursor.acquire()
    assert main(["cp", "a", "--project", "q", "--dir", str(tmp_path)]) == 0
    copied = {path.name for path in (tmp_path / "q" / "a" / "reports" / "p" / "sent").iterdir()}
    assert "journal" in copied and "relay" not in copied
    assert main(["mv", "p/a", "--project", "r", "--dir", str(tmp_path)]) == 2
    assert "is still being delivered (tensorboard)" in capsys.readouterr().err
    cursor.release()
    assert main(["mv", "p/a", "--project", "r", "--dir", str(tmp_path)]) == 0


def test_what_cannot_be_moved_stays(tmp_path, capsys):
    random_run(tmp_path, 1, id="a")
    random_run(tmp_path, 1, id="a", project="q")
    running = fanfold.init("p", id="b", dir=tmp_path, system=False, quiet=True)
    folder = str(tmp_path / "p" / "a")
    for words, why in (
        ([folder, "--project", "q"], "has another run a already"), (["b", "--project", "q"], "is still being written"),
        ([folder], "needs the project"), ([str(tmp_path / "p" / "b"), folder, "--project", "r"], "is still being written"),
        ([folder, str(tmp_path / "q" / "a"), "--project", "r"], "several of the runs have the id a"),
        ([folder, "--project", " "], "needs a name"), ([folder, "--project", "é" * 1000], "cannot be the name of a folder"),
    ):  # fmt: skip
        assert main(["mv", *words, "--dir", str(tmp_path)]) == 2
        assert why in capsys.readouterr().err
    running.finish()
    assert (tmp_path / "p" / "a").is_dir()
    assert not (tmp_path / "r").exists()
    assert main(["cp", "a", "--project", "q", "--dir", "clickhouse://localhost/x"]) == 2
    assert "directory of runs" in capsys.readouterr().err


def test_a_second_move_completes_an_interrupted_one(tmp_path, capsys):
    for name in ("a", "b"):
        random_run(tmp_path, 1, id=name)
    move = ["mv", "a", "b", "--project", "q", "--dir", str(tmp_path)]
    assert main(["mv", "a", "--project", "q", "--dir", str(tmp_path)]) == 0  # how far the first one came
    assert (main(move), main([*move, "--json"])) == (0, 0)
    assert "moved 1 run to q; 1 there already" in (said := capsys.readouterr()).err
    assert {one["path"] for one in json.loads(said.out)} == {str(tmp_path / "q" / name) for name in ("a", "b")}
    assert [(row.project, row.status) for row in LocalStore(tmp_path).runs()] == [("q", "finished")] * 2
    assert main(["cp", "a", "--project", "q", "--dir", str(tmp_path)]) == 2
    assert "is in project q already" in capsys.readouterr().err


def test_what_a_killed_process_left_in_its_spool_goes_with_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("FANFOLD_SPOOL_DIR", str(tmp_path / "spool"))
    root = tmp_path / "runs"
    for name, command in (("moved", "mv"), ("copied", "cp"), ("deleted", "rm")):
        killed = f"""
            import fanfold, os, pathlib, time
            run = fanfold.init("p", id={name!r}, dir={str(root)!r}, system=False, quiet=True)
            run.log({{"loss": 0}}, step=0)
            while not any(file.stat().st_size for file in (run.path / "journal").glob("*.ffj")):
                time.sleep(0.01)
            for step in range(1, 1000):
                run.log({{"loss": step}}, step=step)
            os.kill(os.getpid(), 9)
        """
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(killed)],
            timeout=60,
            check=False,
            env={**os.environ, "FANFOLD_SPOOL": "always"},
        )
        words = ["--yes"] if command == "rm" else ["--project", "q"]
        assert main([command, name, *words, "--dir", str(root)]) == 0
    random_run(root, 1, id="next")  # a new run copies what is left in spools
    found = {f"{row.project}/{row.id}" for row in LocalStore(root).runs()}
    assert found == {"q/moved", "p/copied", "q/copied", "p/next"}
    for name in ("q/moved", "q/copied"):
        assert len(fanfold.open(name, dir=root).series("loss")) == 1000


def test_prune_leaves_a_copy_alone_that_is_being_made(tmp_path, monkeypatch, capsys):
    random_run(tmp_path, 1, id="a")
    whole = shutil.copytree

    def pruned(*given, **options):
        done = whole(*given, **options)
        assert main(["prune", "--dir", str(tmp_path)]) == 0
        return done

    monkeypatch.setattr(shutil, "copytree", pruned)
    assert main(["cp", "a", "--project", "q", "--dir", str(tmp_path)]) == 0
    assert numbers(fanfold.open("q/a", dir=tmp_path)) == numbers(fanfold.open("p/a", dir=tmp_path))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = tmp_path / "q" / f".copying-{gone.pid}-0123456789ab"
    whole(tmp_path / "p" / "a", left)
    now = time.time
    for later in (0, 4000):  # a process on another node may still write a young one
        monkeypatch.setattr(time, "time", lambda later=later: now() + later)
        assert main(["prune", "--dir", str(tmp_path)]) == 0
        assert left.exists() == (later == 0)
    assert "half a copy" in capsys.readouterr().err


def test_a_link_leads_no_run_out_of_the_directory(tmp_path, capsys):
    random_run(tmp_path / "runs", 1, id="a")
    (tmp_path / "outside").mkdir()
    (tmp_path / "runs" / "q").symlink_to(tmp_path / "outside")
    assert main(["mv", "a", "--project", "q", "--dir", str(tmp_path / "runs")]) == 2
    assert "is a link" in capsys.readouterr().err
    assert list((tmp_path / "outside").iterdir()) == []
    shutil.rmtree(tmp_path / "outside")


@pytest.mark.parametrize("project", ["..", ".", ".hidden", "a/b"])
def test_a_project_name_never_leaves_the_directory(tmp_path, project):
    random_run(tmp_path / "runs", 1, id="a")
    assert main(["mv", "a", "--project", project, "--dir", str(tmp_path / "runs")]) == 0
    assert {path.name for path in tmp_path.iterdir()} <= {"runs", "cache", "config"}
    assert [row.project for row in LocalStore(tmp_path / "runs").runs()] == [project]
