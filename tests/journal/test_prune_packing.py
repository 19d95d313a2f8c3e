"""`fanfold prune` packs what is finished and settled everywhere, and every reader goes on as before."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fanfold
from fanfold.cli import main
from fanfold.fleet.forward_journal import Tail
from fanfold.fleet.forward_note import Note
from fanfold.fleet.intake import DirectoryIntake
from fanfold.fleet.wire import Conflict, Piece
from fanfold.journal import format as fmt
from fanfold.journal import packed, packing
from fanfold.journal.bodies import as_dict
from fanfold.journal.directory import journal_files, read_header
from fanfold.journal.format import Kind
from fanfold.journal.writer import Writer
from fanfold.store import catalogue
from fleet_tools import Gateway, write_run

TRAIN = """
import sys, fanfold, numpy as np
run = fanfold.init("toy", id="r", name="first", config={"lr": 0.1}, tags=["a"], system=False, console=True)
noise = np.random.default_rng(0).standard_normal((2000, 3)).tolist()
print("hello from training", flush=True)
print("and from its errors", file=sys.stderr, flush=True)
for step, (a, b, c) in enumerate(noise):
    run.log({"loss": a, "acc": float(np.float32(b)), "n": step}, step=step)
    if step % 100 == 0:
        run.log({"val": c, "note": f"at {step}"}, step=step)
run.log({"picture": fanfold.Image(np.zeros((4, 4, 3), np.uint8))}, step=5)
run.alert("look", "here")
if sys.argv[1] == "kill":
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
run.finish()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of a real process, with everything a journal holds: one that finished, one that was killed."""
    folder = tmp_path_factory.mktemp("trained")
    for how in ("finish", "kill"):
        env = {**os.environ, "FANFOLD_DIR": str(folder / how), "FANFOLD_QUIET": "1"}
        done = subprocess.run([sys.executable, "-c", TRAIN, how], env=env, timeout=60, capture_output=True, check=False)
        assert done.returncode == (0 if how == "finish" else -signal.SIGKILL), done.stderr
    return folder


@pytest.fixture
def root(trained: Path, runs_dir: Path) -> Path:
    """A directory with the finished run, and with `raw`, a copy of it that stays as it is."""
    shutil.copytree(trained / "finish", runs_dir, symlinks=True)
    shutil.copytree(trained / "finish", runs_dir.with_name("raw"), symlinks=True)
    return runs_dir


def told(*words: str, code: int = 0) -> Any:
    """Run the command line here; return what it says in JSON, of several lines a list."""
    kept = io.BytesIO()
    with contextlib.redirect_stdout(io.TextIOWrapper(kept, write_through=True)) as out:
        assert main([*words, "--json"]) == code
        out.flush()
        text = kept.getvalue().decode()
    try:
        return json.loads(text)
    except ValueError:
        return [json.loads(line) for line in text.splitlines()]


def unpacked() -> list[Path]:
    return list((catalogue.cache_directory() / "unpacked").glob("*"))


def everything(run: Any) -> dict[str, Any]:
    """Return what a run says, as plain values."""
    keys = run.keys()
    return {
        "keys": [run.keys(kind) for kind in ("number", "text", "media", "system")],
        "series": {key: [column.tolist() for column in (s.steps, s.times, s.values)] for key in keys for s in [run.series(key)]},
        "fold": run.series("loss", fold="mean").max.tolist(),
        "latest": run.latest,
        "summary": run.summary,
        "texts": run.texts("note"),
        "media": [(point.step, point.entry, type(point.load())) for point in run.media("picture")],
        "console": run.console(),
        "alerts": run.alerts,
        "facts": (run.id, run.name, run.config, run.tags, run.status, run.started, run.seen, run.damaged, run.verdict),
        "table": str(run.to_arrow().to_pydict()),  # NaN equals nothing, not even itself
    }


def test_a_packed_run_is_read_as_before(root):
    raw = root.with_name("raw")
    expected = everything(fanfold.open("r", dir=raw))
    before = {path.stem: path.read_bytes() for path in journal_files(root / "toy" / "r")}
    would = told("prune", "--dry-run")
    assert would["estimated"] is True
    assert sorted(path.suffix for path in journal_files(root / "toy" / "r")) == [".ffj"] * len(before)

    done = told("prune")
    (one,) = done["packed"]
    (main_file,) = (path for path in journal_files(root / "toy" / "r") if path.suffix == ".ffz")
    assert (one["path"], one["raw"]) == (str(main_file), len(before[main_file.stem]))
    assert one["packed"] == main_file.stat().st_size
    assert done["bytes"] == one["bytes"] == one["raw"] - one["packed"] > 0.3 * one["raw"]
    assert would["bytes"] == pytest.approx(done["bytes"], rel=0.05)
    assert not main_file.with_suffix(".ffj").exists()

    listed = told("ls")
    assert unpacked() == []  # listing needs none of it
    assert [row | {"path": ""} for row in listed] == [row | {"path": ""} for row in told("ls", "--dir", str(raw))]
    assert everything(fanfold.open("r")) == expected
    assert packed.readable(main_file).read_bytes() == before[main_file.stem]
    for words in (["tail", "r"], ["show", "r"], ["export", "r", "--format", "jsonl", "--long"]):
        here, there = told(*words), told(*words, "--dir", str(raw))
        if words[0] == "show":
            there["now"] = here["now"]
        assert json.dumps(here).replace(str(root), "") == json.dumps(there).replace(str(raw), "")
    again = told("prune")
    assert (again["packed"], again["kept"]["is packed already"]) == ([], 1)

    elsewhere = root.with_name("copied")  # copied to another machine: another folder, an empty cache
    shutil.copytree(root, elsewhere)
    shutil.rmtree(catalogue.cache_directory())
    assert everything(fanfold.open("r", dir=elsewhere)) == expected
    assert main(["rm", "r", "--yes", "--dir", str(elsewhere), "--quiet"]) == 0


def test_what_derives_from_a_journal_outlives_its_packing(root, monkeypatch):
    """Rows, statistics, index and segments are about the journal's own bytes, which stay the same."""
    from fanfold.journal import index
    from fanfold.store import merge, segments

    monkeypatch.setattr(index, "WORTH_BYTES", 1 << 12)
    monkeypatch.setattr(segments, "WORTH_BYTES", 1 << 12)
    folder = root / "toy" / "r"
    sign, touched = catalogue.signature(folder), catalogue.touched(folder)
    assert sum(len(list(merge.merge(path))) for path in journal_files(folder)) >= 1
    values = fanfold.open("r").series("loss").values
    told("prune")
    assert (catalogue.signature(folder), catalogue.touched(folder)) == (sign, touched)
    assert [list(merge.merge(path)) for path in journal_files(folder)] == [
        [] for _ in journal_files(folder)
    ]  # nothing left to do
    run = fanfold.open("r")
    (journal,) = (one for one in run.journals if one.path.suffix == ".ffz")
    assert segments.chain_of(journal).end == journal.verified
    assert run.series("loss").values.tolist() == values.tolist()


def test_a_killed_run_is_packed_and_stays_killed(trained, runs_dir):
    shutil.copytree(trained / "kill", runs_dir)
    assert len(list(runs_dir.rglob("*.alive"))) == 1
    assert fanfold.open("r").status == "killed"
    assert len(told("prune")["packed"]) == 1
    run = fanfold.open("r")
    assert (run.status, len(run.series("loss"))) == ("killed", 2000)
    assert list(runs_dir.rglob("*.alive")) == []  # its lock went along


def test_an_open_run_goes_on_when_it_is_packed_beneath(root):
    run = fanfold.open("r")
    seen = run.seen
    told("prune")
    assert (run.seen, run.status, len(run.series("loss"))) == (seen, "finished", 2000)
    assert len(run.refresh().series("loss")) == 2000
    assert {journal.path.suffix for journal in run.journals} >= {".ffz"}


def test_a_packed_run_goes_on_as_the_next_attempt(root):
    told("prune")
    run = fanfold.init("toy", id="r", resume="must", system=False)
    run.log({"loss": 7.0})
    run.finish()
    stored = fanfold.open("r")
    assert [len(stored.attempts), stored.name] == [2, "first"]
    assert stored.series("loss").steps.tolist() == list(range(2001))
    assert stored.series("loss").values[-1] == 7.0


def test_a_packed_run_is_delivered_to_a_tracker(root):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    told("prune")
    done = subprocess.run([sys.executable, "-m", "fanfold", "sync", "r", "--to", "tensorboard"],
                          env={**os.environ, "FANFOLD_DIR": str(root)}, capture_output=True, text=True, timeout=100, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder,) = (path for path in (root / "toy" / "r" / "trackers" / "tensorboard").iterdir() if path.is_dir())
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    raw = fanfold.open("r", dir=root.with_name("raw")).series("loss")
    assert [event.step for event in reader.Scalars("loss")] == raw.steps.tolist()
    assert [event.value for event in reader.Scalars("loss")] == raw.values.astype(np.float32).tolist()
    # What is not settled everywhere is not packed; this is, and is packed already.
    assert told("prune")["kept"] == {"is packed already": 1, "is too small to gain by packing": 2}


def test_a_packed_run_is_forwarded_and_may_be_packed_where_it_arrives(root, tmp_path):
    store = tmp_path / "store"
    told("prune")
    gateway = Gateway(store)
    try:
        for _ in range(2):
            assert main(["forward", "--once", "--dir", str(root), "--to", gateway.url, "--quiet"]) == 0
            raw = {path.name: path.read_bytes() for path in journal_files(root.with_name("raw") / "toy" / "r")}
            assert {f"{p.stem}.ffj": packed.readable(p).read_bytes() for p in journal_files(store / "toy" / "r")} == raw
            told("prune", "--dir", str(store))  # and again, asked by a forwarder that knows nothing of the first time
            assert {path.suffix for path in journal_files(store / "toy" / "r")} == {".ffz", ".ffj"}
            shutil.rmtree(root / "toy" / "r" / "forward")
    finally:
        gateway.close()
    assert everything(fanfold.open("r", dir=store))["texts"] == fanfold.open("r").texts("note")


def test_a_journal_packed_at_a_gateway_grows_when_more_comes(tmp_path):
    file = write_run(tmp_path / "node", 3000)
    intake, data = DirectoryIntake(tmp_path / "store", power=False), file.read_bytes()
    assert intake.append("llm", Piece("r1", file.stem, 0, 0, data)) == len(data)
    kept = tmp_path / "store" / "llm" / "r1" / "journal" / file.name
    assert packing.pack(kept)
    assert intake.offset("llm", "r1", file.stem) == len(data)
    with pytest.raises(Conflict) as conflict:
        intake.append("llm", Piece("r1", file.stem, 0, 0, data))
    assert conflict.value.offset == len(data)
    assert not kept.exists()
    more = fmt.frame(Kind.INFO, fmt.pack({"t": 1, "notes": "late"}), fmt.seed_of(file.stem.partition("-")[2]))
    assert intake.append("llm", Piece("r1", file.stem, len(data), 0, more)) == len(data + more)
    assert kept.read_bytes() == data + more
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


def test_a_forwarder_is_not_taken_in_by_packing(tmp_path):
    file = write_run(tmp_path, 3000)
    tail, data = Tail(file, read_header(file)), file.read_bytes()
    tail.offset = 0
    assert tail.look()
    first = tail.read(1 << 14)
    tail.offset = len(first.data)
    assert packing.pack(file)
    assert not tail.is_over()
    while tail.look():
        read = tail.read(1 << 14)
        first = first._replace(data=first.data + read.data)
        tail.offset += len(read.data)
    assert first.data == data
    assert tail.is_over()
    note = Note(file.parent.parent, "http://gateway")
    note.over[file.stem] = len(data)
    assert note.is_over(packed.present(file))


def test_what_may_grow_or_is_awaited_is_not_packed(runs_dir, tmp_path):
    """Live, of a live run, not confirmed by a tracker, not at its gateway, young: each has its reason."""
    reasons = {
        "live": "is still being written",
        "beside": "belongs to a run that is still running",
        "undelivered": "is not delivered to lines yet (fanfold sync)",
        "unforwarded": "is not at http://gateway yet (fanfold server forward)",
        "ended": "is still being written",
    }
    open_ones = []
    for id, reason in reasons.items():
        file = write_run(runs_dir, 3000, id=id, project=id)
        header = as_dict(read_header(file))
        if id in ("live", "beside"):
            file.unlink() if id == "live" else None
            writer = Writer(file.parent, header)
            for step in range(3000 if id == "live" else 1):
                writer.row({"x": 1.0, "y": float(step)}, "dd", time_ns=step, step=step)
            open_ones.append(writer)
        elif id == "undelivered":
            (file.parent.parent / "relay").mkdir()
            (file.parent.parent / "relay" / "lines.cursor").write_text(json.dumps({"settled": {file.stem: [10, []]}}))
        elif id == "unforwarded":
            note = Note(file.parent.parent, "http://gateway")
            note.offsets[file.stem] = 10
            note.save()
        elif id == "ended":  # its process still runs exit handlers
            ended = Writer(file.parent, header)
            for step in range(3000):
                ended.row({"x": 1.0, "y": float(step)}, "dd", time_ns=step, step=step)
            ended.append((Kind.END, {"t": 0, "status": "finished"}))
            file.unlink()
            open_ones.append(ended)
        done = told("prune", "--project", id)
        assert done["packed"] == [], id
        assert reason in done["kept"], (id, done["kept"])
    for writer in open_ones:
        writer.close({"t": 0, "status": "finished"})
    assert told("prune", "--older-than", "1h")["packed"] == []
    assert {Path(one["path"]).parts[-4] for one in told("prune")["packed"]} == {"live", "beside", "ended"}


def test_an_ended_journal_of_another_node_waits_a_minute(runs_dir, monkeypatch):
    file = write_run(runs_dir, 3000)
    header = as_dict(read_header(file))
    file.unlink()
    writer = Writer(file.parent, {**header, "boot": "another", "node": "far"})
    for step in range(3000):
        writer.row({"x": 1.0, "y": float(step)}, "dd", time_ns=step, step=step)
    writer.close({"t": 0, "status": "finished"})
    assert told("prune")["kept"] == {"ended a moment ago, perhaps on another node": 1}
    (file,) = journal_files(file.parent.parent)
    os.utime(file, (time.time() - 100, time.time() - 100))
    assert told("prune")["packed"] == []  # its date says nothing: a copy has one, too
    later = time.time() + 61
    monkeypatch.setattr(time, "time", lambda: later)
    assert len(told("prune")["packed"]) == 1


def test_what_a_killed_prune_left_is_removed(root):
    folder = root / "toy" / "r" / "journal"
    half = folder / f".{journal_files(root / 'toy' / 'r')[0].stem}.ffz.999999999-0123abcd"
    half.write_bytes(b"half")
    assert told("prune", "--dry-run")["deleted"] == []  # young: its process may be on another node
    os.utime(half, (time.time() - 100, time.time() - 100))
    assert [one["why"] for one in told("prune")["deleted"]] == ["half a packed journal of a process that is gone"]
    assert not half.exists()


def test_prune_says_what_it_freed(root, capsys):
    assert main(["prune", "--dry-run"]) == 0
    assert "would pack 1 journal: " in (said := capsys.readouterr()).out
    assert "freed (an estimate, from a sample of each)." in said.out
    assert main(["prune"]) == 0
    assert "packed 1 journal: " in capsys.readouterr().out
