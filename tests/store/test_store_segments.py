"""Segments: a cache that may be damaged, killed half-way, made twice at once or deleted, and never changes an answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import fanfold
from fanfold.errors import notices
from fanfold.store import catalogue, merge, segments
from fanfold.store.query import LocalStore
from segment_tools import cache, files, made, merge_all, read, small
from store_data import Call, write_run

__all__ = ["cache", "small"]  # fixtures


def test_merging_leaves_the_journal_and_is_done_once(tmp_path, small, cache):
    folder = made(tmp_path)
    (journal,) = (folder / "journal").glob("*.ffj")
    bytes_before, before = journal.read_bytes(), read(tmp_path)
    done = merge_all(folder)
    assert len(done) > 3
    assert sum(one.points for one in done) == 1200
    assert merge_all(folder) == []
    assert journal.read_bytes() == bytes_before
    assert read(tmp_path) == before
    assert [path.name[0] for path in files(cache)].count(".") == 0


def test_float32_values_of_ten_keys_take_less_than_five_bytes_a_point(tmp_path, monkeypatch):
    monkeypatch.setattr(segments, "WORTH_BYTES", 256)
    values = np.random.default_rng(1).normal(size=3000).astype(np.float32).tolist()
    waits = np.random.default_rng(2).integers(10**6, 10**8, 3000).tolist()
    folder = write_run(tmp_path, [Call(0, 0, i, waits[i], {f"k{j}": values[i - j] for j in range(10)}) for i in range(3000)])
    (done,) = merge_all(folder)
    assert done.points == 30000
    assert done.written / done.points < 5.0


@pytest.mark.parametrize("harm", ["byte", "short", "empty", "footer", "other"])
def test_a_damaged_segment_is_said_once_and_the_journal_read_instead(tmp_path, small, cache, caplog, harm):
    folder = made(tmp_path)
    before = read(tmp_path)
    merge_all(folder)
    victim = files(cache)[1]
    data = bytearray(victim.read_bytes())
    if harm == "byte":
        data[100] ^= 1
    elif harm == "footer":
        data[-40] ^= 1
    victim.write_bytes({"short": data[:-7], "empty": b"", "other": files(cache)[2].read_bytes()}.get(harm, data))
    assert read(tmp_path) == before
    said = [record.message for record in caplog.records if "segment" in record.message]
    assert len(said) == 1
    assert "Nothing is lost: the journal is read instead" in said[0]
    assert merge_all(folder)
    notices.counts.clear()
    caplog.clear()
    assert read(tmp_path) == before
    assert caplog.records == []


def test_a_segment_of_other_content_under_the_same_id_is_not_used(tmp_path, small, cache):
    folder = made(tmp_path)
    merge_all(folder)
    (journal,) = (folder / "journal").glob("*.ffj")
    whole = journal.read_bytes()
    journal.unlink()
    journal.write_bytes(whole[:6000])  # restored from an old copy, say
    steps = read(tmp_path)["a"][0]
    assert steps == list(range(len(steps)))
    assert len(steps) < 400


MERGE = """
import sys
from pathlib import Path
from fanfold.store import merge, segments
merge.RANGE_BYTES, segments.WORTH_BYTES = 4096, 256
for one in merge.merge(Path(sys.argv[1])):
    print(one.points, flush=True)
    if len(sys.argv) > 2: sys.stdin.readline()
"""


def test_a_merge_killed_in_the_middle_leaves_nothing_wrong_behind(tmp_path, small, cache):
    folder = made(tmp_path)
    before = read(tmp_path)
    (journal,) = (folder / "journal").glob("*.ffj")
    child = subprocess.Popen(
        [sys.executable, "-c", MERGE, journal, "wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    child.stdout.readline()
    child.kill()
    child.communicate()
    assert child.returncode == -signal.SIGKILL
    assert len(files(cache)) == 1
    aside = files(cache)[0].with_name(".4096-8192.ffs.99999")  # as a kill in the middle of a file leaves it
    aside.write_bytes(b"FFSEG half")
    assert read(tmp_path) == before
    assert merge_all(folder)
    assert aside.exists()  # its merger may be at work
    os.utime(aside, (1, 1))
    merge_all(folder)
    assert not aside.exists()
    assert read(tmp_path) == before


def test_two_mergers_at_once_make_the_same_files(tmp_path, small, cache):
    folder = made(tmp_path)
    before = read(tmp_path)
    (journal,) = (folder / "journal").glob("*.ffj")
    children = [subprocess.Popen([sys.executable, "-c", MERGE, journal], stdout=subprocess.DEVNULL) for _ in range(3)]
    assert [child.wait(60) for child in children] == [0, 0, 0]
    there = [tuple(map(int, path.stem.split("-"))) for path in files(cache)]
    assert [start for start, _ in there] == [0, *(end for _, end in there[:-1])]
    assert read(tmp_path) == before


WRITE = """
import sys, fanfold
run = fanfold.init("p", id="live", system=False)
for step in range(4000):
    run.log({"a": step * 0.5, "b": step}, step=step)
    if step % 500 == 0:
        print(step, flush=True)
        sys.stdin.readline()
run.finish()
"""


def test_a_live_run_is_merged_and_read_while_it_is_written(runs_dir, small, cache):
    child = subprocess.Popen([sys.executable, "-c", WRITE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    store, lengths = LocalStore(runs_dir), []
    for _ in range(8):
        written = int(child.stdout.readline())
        run = store.run("p", "live")
        merged = [one for journal in run.journals for one in merge.merge(journal.path)]
        assert merged or written == 0
        series = store.run("p", "live").series("a")
        assert series.values.tolist() == [step * 0.5 for step in range(written + 1)]
        lengths.append(len(series))
        child.stdin.write("\n")
        child.stdin.flush()
    assert child.wait(60) == 0
    assert lengths == [step + 1 for step in range(0, 4000, 500)]
    run = store.run("p", "live")
    live = segments.chain_of(run.journals[0]).end
    assert list(merge.merge(run.journals[0].path))  # the rest, now that it is over
    run = LocalStore(runs_dir).run("p", "live")
    assert run.series("b").values.tolist() == list(range(4000))
    end = segments.chain_of(run.journals[0]).end
    assert run.journals[0].verified - segments.WORTH_BYTES < end
    assert 0 < live < end


def test_a_full_cache_disk_is_said_and_harms_nothing(tmp_path, small, cache, caplog):
    folder = made(tmp_path)
    before = read(tmp_path)
    cache.mkdir(exist_ok=True)
    (cache / "segments").write_text("no folder")
    assert merge_all(folder) == []
    assert "Reading stays right" in caplog.text
    assert read(tmp_path) == before


def test_what_was_derived_goes_with_a_deleted_run(runs_dir, small, cache):
    run = fanfold.init("p", id="r", system=False)
    for step in range(400):
        run.log({"a": step * 0.1}, step=step)
    run.finish()
    fanfold.runs()
    assert merge_all(run.path)
    assert files(cache)
    done = subprocess.run([sys.executable, "-m", "fanfold", "rm", "--yes", "r"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert files(cache) == []


def test_the_command_merges_and_follow_ends_with_its_parent(runs_dir):
    run = fanfold.init("p", id="r", system=False)
    values = {f"key{i}": i * 0.5 for i in range(300)}
    for step in range(600):
        run.log(values, step=step)
    run.finish()
    before = fanfold.open("r").series("key7").values.tolist()
    child = merge.start(runs_dir, quiet=False)
    until = time.monotonic() + 60
    while not list(Path(os.environ["FANFOLD_CACHE_DIR"]).glob("segments/*/*.ffs")) and time.monotonic() < until:
        time.sleep(0.05)
    _, said = child.communicate(timeout=60)  # closes its stdin
    assert child.returncode == 0
    assert b"180,000 points" in said
    stored = fanfold.open("r")
    assert stored.series("key7").values.tolist() == before
    assert segments.chain_of(stored.journals[0]).end > 0
    assert catalogue.reindex(runs_dir) == (1, 0)
