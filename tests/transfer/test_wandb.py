"""Logs of wandb come back value by value, without wandb: written by wandb itself, by fanfold's tracker, torn and damaged."""

import json
import os
import random
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

import fanfold
from fanfold.cli import main
from fanfold.transfer.importing import import_runs
from fanfold.transfer.wandb import WandbImporter, _inside, _Log
from paths import DATA, HELPERS


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a folder in which wandb wrote one run, twice: it was resumed."""
    folder = tmp_path_factory.mktemp("wandb")
    write(folder, "5")
    write(folder, "3")
    return folder / "wandb"


def write(folder, *arguments, check=True):
    env = {**os.environ, "WANDB_SILENT": "true", "HOME": str(folder), "WANDB_DATA_DIR": str(folder / "data")}
    command = [sys.executable, str(HELPERS / "wandb_writer.py"), str(folder), *arguments]
    return subprocess.run(command, env=env, check=check, capture_output=True, timeout=240)


def bring(source, tmp_path):
    accounts = import_runs(source, dir=tmp_path / "store")
    return [fanfold.open(one.run, dir=tmp_path / "store") for one in accounts], accounts


def test_everything_wandb_logged_is_there(written, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DATA_DIR", str(written.parent / "data"))
    (run,), (account,) = bring(written, tmp_path)
    assert (run.name, run.project, run.group, run.tags, run.notes) == ("nice", "proj", "g", ["a", "b"], "hey")
    assert run.config == {"lr": 0.1, "deep": {"n": 3}}
    assert len(run.attempts) == 2 and run.status == "finished"
    assert run.series("n", raw=True).values.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert run.series("n").values.dtype == np.int64
    losses = [1 / (i + 1) for i in (*range(5), *range(3))]
    assert run.series("loss", raw=True).values.tolist() == losses
    assert run.series("deep/x", raw=True).values.tolist() == [2.0 * i for i in (*range(5), *range(3))]
    assert run.series("only", raw=True).values.tolist() == [i / 3 for i in (*range(5), *range(3))]
    assert run.series("flag").values.all()
    assert np.isnan(run.series("nan").values).all() and (run.series("inf").values == -np.inf).all()
    assert run.texts("txt")[0].text == "hello"
    assert run.metric("val/acc").get("x") == "epoch" and run.summary["acc"] == 0
    assert run.summary["best"] == 3 and "_runtime" not in run.summary
    picture = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    np.testing.assert_array_equal(run.media("pic")[0].load().array(), picture)
    assert run.media("pic")[0].load().caption == "c" and len(run.media("pics")) == 4
    assert run.media("h")[0].load().edges.tolist() == [0.0, 1.0, 3.0]
    table = run.table("tab")
    assert (table.columns, [list(row) for row in table.rows]) == (["a", "b"], [[1, "x"], [2, "y"]])
    assert "<b>hi</b>" in run.media("html")[0].load().html
    assert run.alerts[0]["title"] == "title"
    assert {artifact["name"] for artifact in run.artifacts} == {"model"}
    assert run.blob(run.artifacts[0]["files"][0]["blob"]) == b"weights"
    assert b"printed line" in run.console()
    assert account.left == []


def test_logs_of_an_older_wandb(tmp_path):
    """Written by wandb 0.22 with the same calls; its staging folder is gone."""
    (run,), (account,) = bring(DATA / "wandb-0.22", tmp_path)
    assert (run.name, run.tags, run.status, len(run.attempts)) == ("nice", ["a", "b"], "finished", 2)
    assert run.config == {"lr": 0.1, "deep": {"n": 3}}
    assert run.series("loss", raw=True).values.tolist() == [1 / (i + 1) for i in (*range(5), *range(3))]
    assert run.series("deep/x", raw=True).values.tolist() == [2.0 * i for i in (*range(5), *range(3))]
    assert (run.summary["best"], run.summary["acc"], run.metric("val/acc").get("x")) == (3, 0, "epoch")
    assert sorted(run.keys("media")) == ["h", "html", "pic", "pics", "tab"]
    assert b"printed line" in run.console() and run.alerts[0]["title"] == "title"
    assert [(left.what, left.count) for left in account.left] == [("artifact file", 2)]


def test_the_reader_needs_no_wandb(written, tmp_path):
    code = f"""
import sys
sys.modules["wandb"] = None
import fanfold
print(fanfold.import_runs({str(written)!r}, dir={str(tmp_path)!r})[0].points)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) > 50


def test_importing_again_is_no_change(written, tmp_path):
    first = bring(written, tmp_path)[1][0]
    assert (first.outcome, bring(written, tmp_path)[1][0].outcome) == ("imported", "unchanged")


def test_a_folder_of_one_start_can_be_named(written, tmp_path):
    folder = min(written.glob("offline-run-*"))
    (run,), _ = bring(folder, tmp_path)
    assert run.series("n").values.tolist() == [0, 1, 2, 3, 4]


def test_a_torn_log_gives_what_is_whole_and_later_the_rest(written, tmp_path):
    log = next(min(written.glob("offline-run-*")).glob("*.wandb"))
    whole = log.read_bytes()
    copy = tmp_path / "wandb" / log.parent.name / log.name
    copy.parent.mkdir(parents=True)
    for cut in (9, 400, len(whole) // 2, len(whole) - 3):
        copy.write_bytes(whole[:cut])
        import_runs(tmp_path / "wandb", dir=tmp_path / "store")
    copy.write_bytes(whole)
    (run,), (_account,) = bring(tmp_path / "wandb", tmp_path)
    assert run.series("n").values.tolist() == [0, 1, 2, 3, 4]
    assert run.series("only").values.tolist() == [i / 3 for i in range(5)]
    assert run.status == "finished"


def test_sync_to_wandb_and_back(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    rng = np.random.default_rng(3)
    run = fanfold.init("p", dir=tmp_path / "mine", quiet=True, system=False, config={"lr": 0.1, "deep": {"n": 3}}, tags=["t"])
    columns = {"loss": rng.normal(size=60), "acc": rng.random(60), "count": rng.integers(0, 2**62, 60)}
    columns["loss"][:3] = np.nan, np.inf, -np.inf
    for step in [*range(50), *range(40, 50)]:
        run.log({key: column[step].item() for key, column in columns.items()}, step=step * 3)
    run.log({"note": "text", "pic": fanfold.Image((rng.random((4, 4, 3)) * 255).astype(np.uint8))}, step=200)
    run.log({"hist": fanfold.Histogram(np_histogram=([1, 2], [0.0, 1.0, 2.0]))}, step=200)
    run.define_metric("acc", summary="max")
    run.summary["best"] = 7.5
    run.alert("hot", "very")
    run.finish()
    folder = tmp_path / "out"
    assert (
        main(["sync", run.id, "--dir", str(tmp_path / "mine"), "--to", "wandb", "--kwargs", json.dumps({"dir": str(folder)})])
        == 0
    )
    assert import_runs(folder, dir=tmp_path / "mine")[0].outcome == "known"
    (account,) = import_runs(folder, dir=tmp_path / "store")
    mine, back = fanfold.open(run.id, dir=tmp_path / "mine"), fanfold.open(run.id, dir=tmp_path / "store")
    assert account.outcome == "imported"
    for key in columns:
        np.testing.assert_array_equal(back.series(key, raw=True).values, mine.series(key, raw=True).values)
        np.testing.assert_array_equal(back.series(key, raw=True).steps, mine.series(key, raw=True).steps)
        np.testing.assert_allclose(back.series(key).times, mine.series(key).times, atol=1e-5, rtol=0)
    assert sorted(back.keys()) == sorted(mine.keys())  # wandb writes the items of a row in any order
    assert (back.config, back.tags, back.name, back.status) == (mine.config, mine.tags, mine.name, "finished")
    assert back.texts("note")[0].text == "text"
    np.testing.assert_array_equal(back.media("pic")[0].load().array(), mine.media("pic")[0].load().array())
    assert back.media("hist")[0].load().edges.tolist() == [0.0, 1.0, 2.0]
    assert back.summary["best"] == 7.5 and back.summary["acc"] == mine.summary["acc"]
    assert back.alerts[0]["title"] == "hot"


@pytest.mark.parametrize("seed", range(4))
def test_fuzzed_logs_never_stop_an_import(written, tmp_path, seed):
    chance = random.Random(seed)
    log = next(min(written.glob("offline-run-*")).glob("*.wandb"))
    whole = log.read_bytes()
    for number in range(250):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 12)):
            at = chance.randrange(7, len(data))
            kind = chance.randrange(3)
            if kind == 0:
                data[at] = chance.randrange(256)
            elif kind == 1:
                data[at:at] = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 40)))
            else:
                del data[at : at + chance.randrange(1, 100)]
        if number % 2:
            data = resealed(bytes(whole), chance)
        folder = tmp_path / "logs" / str(number) / log.parent.name
        folder.mkdir(parents=True)
        (folder / f"run-{number}.wandb").write_bytes(data)
        for found in WandbImporter().find(folder):
            assert all(event is not None for event in WandbImporter().read(found))  # damage is never an exception
    accounts = import_runs(tmp_path / "logs", dir=tmp_path / "store")
    assert {one.outcome for one in accounts} <= {"imported", "skipped"}
    assert all(run.damaged == 0 for run in fanfold.runs(dir=tmp_path / "store"))


def resealed(data: bytes, chance: random.Random) -> bytes:
    """Change bytes inside records and give them valid checksums, as a hostile writer would."""
    made, at = bytearray(data), 7
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if chance.random() < 0.3 and length:
            made[at + 7 + chance.randrange(length)] = chance.randrange(256)
        body = bytes(made[at + 7 : at + 7 + length])
        struct.pack_into("<I", made, at, zlib.crc32(body, zlib.crc32(bytes([kind]))))
        at += 7 + length
    return bytes(made)


def test_a_log_cannot_fetch_other_files_of_this_machine(written, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    log = next(min(written.glob("offline-run-*")).glob("*.wandb"))
    reader = _Log(log, "x", None, None, ours=False)
    assert reader._local(str(secret)) is None
    assert _inside(log.parent, "../../secret.txt") is None
    (log.parent / "files" / "link").symlink_to(secret)
    assert _inside(log.parent / "files", "link") is None
    Path(log.parent / "files" / "link").unlink()


SUMMARY = """
import sys, wandb
run = wandb.init(project="proj", mode="offline", dir=sys.argv[1])
run.summary["early"] = 1
run.summary["loss"] = 100.0
run.summary["nested"] = {"a": 1, "b": 2}
for i in range(5):
    run.log({"loss": float(i), "nested": {"a": i}})
run.summary["late"] = "words"
run.log({"acc": 0.5})
run.summary["acc"] = 0.75
run.finish()
"""


def test_the_summary_is_what_the_user_set_and_logged_over_by_nothing(tmp_path):
    env = {**os.environ, "WANDB_SILENT": "true", "HOME": str(tmp_path), "WANDB_DATA_DIR": str(tmp_path / "data")}
    subprocess.run([sys.executable, "-c", SUMMARY, str(tmp_path)], env=env, check=True, capture_output=True)
    log = next(tmp_path.rglob("*.wandb"))
    whole = log.read_bytes()
    for size in (*range(200, len(whole), 41), len(whole)):  # while it grows, too: wandb writes a row's summary before the row
        log.write_bytes(whole[:size])
        import_runs(tmp_path / "wandb", dir=tmp_path / "store")
    (run,) = fanfold.runs(dir=tmp_path / "store")
    assert run.assigned == {"early": 1, "nested/b": 2, "late": "words", "acc": 0.75}
