"""Frames whose checksum is right and whose body is not what their kind promises: damage for every reader, and nothing else.

Every field of every kind is forged with every wrong type. Commands, dashboard, relay, forwarder, gateway and the tables of the
ClickHouse store answer as if those frames were not there.
"""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

import fanfold
from fanfold.cli.entry import run as command
from fanfold.clickhouse.batch import InsertJob, tables_of
from fanfold.clickhouse.decode import scan
from fanfold.clickhouse.profile import profile_of
from fanfold.errors import JournalError
from fanfold.fleet.forward_journal import Tail
from fanfold.fleet.intake import DirectoryIntake
from fanfold.fleet.wire import Piece
from fanfold.journal import Journal, Kind, bodies
from fanfold.journal import format as fmt
from fanfold.journal.directory import journal_files, read_header
from fanfold.relay.feed import Feed
from fanfold.server import app
from forged import DEEP, mutated

ID = "00f0e1d2c3b4a596"
SEED = fmt.seed_of(ID)
BLOB = "ab" * 32
for _ in range(200):
    DEEP = [DEEP]
OPS_FACTS = {"id": "p", "rank": 0, "node": "n", "pid": 1, "worker": 0, "sampling": 0.0, "every": 10, "window": 2, "observed": 2,
             "steps": 10, "now": 2, "started": 1, "seen_ns": 1, "overflow": 0, "capacity": 9}  # fmt: skip
OPS_ROW = {"op": "add", "overload": "", "scope": "function", "thread": "main", "label": "", "inputs": "", "all": False, "count": 3,
           "total_ns": 9, "self_ns": 9, "own_ns": 9, "max_ns": 4, "device_count": 0, "device_ns": 0, "hist": {2: 3}}  # fmt: skip
HEADER = {"format": [1, 0], "writer": "w", "run": "r1", "project": "llm", "name": "calm", "role": "main", "rank": 0, "world": 1,
          "local_rank": 0, "attempt": "a", "ordinal": 1, "node": "n", "boot": "b", "pid": 1, "process": "p", "launcher": "none",
          "spool": None, "journal": ID, "started": 10**18, "mono": 1, "follows": None, "dropped": 0}  # fmt: skip


def table(rows: Any) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(rows))


GOOD: dict[str, tuple[int, Any]] = {
    "values": (Kind.VALUES, {"s": 3, "t": 5, "q": None, "k": {"wandb": {"a": 1}}, "v": {
        "note": "hello", "img": {"type": "image", "blob": BLOB, "ext": "png", "size": 3, "width": 1}, "many": [{"type": "text", "text": "x"}]}}),
    "lost": (Kind.LOST, {"q": 1, "s": 3, "t": 5, "keys": ["aux"], "why": "full"}),
    "beat": (Kind.BEAT, [5, 6, 3, 0]),
    "info": (Kind.INFO, {"t": 5, "name": "calm", "group": "g", "tags": ["a"], "notes": "n", "config": {"lr": 0.1, "m": {"d": 3}},
                         "facts": {"packages": {"torch": "2"}, "python": {"version": "3.11"}, "git": {"commit": "abc"}, "node": {"name": "n"},
                                   "gpus": [{"name": "g"}], "torch": {"version": "2"}, "command": ["python", "x.py"]},
                         "summary": {"best": 1}, "fold": {"loss": "mean"}, "archived": False}),
    "alert": (Kind.EVENT, {"t": 5, "event": "alert", "title": "hot", "text": "it is", "level": "error", "s": 3}),
    "artifact": (Kind.EVENT, {"t": 5, "event": "artifact", "name": "model", "kind": "file", "metadata": {"a": 1}, "s": 3,
                              "files": [{"path": "m.bin", "blob": BLOB, "size": 3}]}),
    "metric": (Kind.EVENT, {"t": 5, "event": "metric", "key": "loss", "x": None, "summary": "max"}),
    "saved": (Kind.EVENT, {"t": 5, "event": "saved", "path": "/m.pt", "size": 9, "s": 3}),
    "ops": (Kind.EVENT, {"t": 5, "event": "ops", "id": "p", "facts": OPS_FACTS, "folded": [], "table": table([OPS_ROW])}),
    "usage": (Kind.EVENT, {"t": 5, "event": "usage", "key": "torch.x", "data": {"a": "b"}, "node": "n", "pid": 1}),
    "trace": (Kind.EVENT, {"t": 5, "event": "trace", "path": "ops/x.json", "steps": 3, "size": 9}),
    "console": (Kind.CONSOLE, {"t": 5, "stream": "stdout", "b": b"printed\n"}),
    "end": (Kind.END, {"t": 5, "status": "finished", "error": None, "exit_code": 0, "signal": None, "high": 3, "dropped": 0, "lost": 0,
                       "said": {"a": 1}}),
}  # fmt: skip
SHAPE = [7, 0, "d", ["loss"], ""]


def frame(kind: int, body: Any) -> bytes:
    return fmt.frame(kind, msgspec.msgpack.encode(body), SEED)


def fits(kind: int, body: Any) -> bool:
    try:
        bodies.decode(kind, msgspec.msgpack.encode(body))
    except JournalError:
        return False
    return True


def newer(header: Any) -> bool:
    try:
        bodies.decode(Kind.HEADER, msgspec.msgpack.encode(header))
    except bodies.NewerFormat:
        return True
    except JournalError:
        return False
    return False


def journal_of(folder: Path, forged: list[bytes], *, header: Any = HEADER) -> Path:
    """A run with a good frame of each kind and two rows; forged frames stand before and between them."""
    rows = [fmt.frame(Kind.ROW, struct.pack("<Iqid", 7, 10**18 + step, step, step / 2), SEED) for step in (0, 1)]
    good = [frame(*one) for one in GOOD.values()]
    file = folder / "llm" / "r1" / "journal" / f"0-{ID}.ffj"
    file.parent.mkdir(parents=True)
    head = fmt.frame(Kind.HEADER, msgspec.msgpack.encode(header), 0)
    file.write_bytes(b"".join([head, *forged, frame(Kind.SHAPE, SHAPE), rows[0], *forged, *good, rows[1]]))
    return file


def answers(root: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What everybody says of the run; anything but a normal answer fails the test."""
    said: dict[str, Any] = {}
    for name, *words in (
        ("ls", "ls", "--json"), ("ls text", "ls"), ("show", "show", "r1", "--json"), ("show text", "show", "r1"),
        ("export", "export", "r1", "--format", "jsonl"), ("usage", "usage", "r1", "--json"),
        ("query", "query", "SELECT * FROM runs", "--json"), ("alerts", "query", "SELECT * FROM alerts", "--json"), ("ops", "ops", "r1", "--json"),
    ):  # fmt: skip
        capsys.readouterr()
        code = command([*words, "--dir", str(root)])
        out = capsys.readouterr()
        assert code == 0, (words, out.err)
        said[name] = json.loads(out.out) if "--json" in words else "Traceback" not in out.err
    with TestClient(app(root), base_url="http://127.0.0.1:8642") as client:
        for path, query in (
            ("projects", {}), ("runs", {}), ("passing", {"filter": "loss > 0"}), ("run", {"id": "r1"}), ("alerts", {}), ("views", {}),
            ("console", {"id": "r1"}), ("media", {"ids": "r1", "key": "img"}), ("media", {"ids": "r1", "key": "note"}), ("profile", {"id": "r1"}),
        ):  # fmt: skip
            answer = client.get(f"/api/{path}", params={"project": "llm", **query})
            assert answer.status_code == 200, (path, answer.text)
            said[f"{path} {query}"] = answer.json()
        for path, body in (
            ("columns", {"project": "llm", "names": ["config:lr", "metric:loss"]}),
            ("series", {"project": "llm", "runs": ["r1"], "keys": ["loss"]}),
        ):
            answer = client.post(f"/api/{path}", json=body)
            assert answer.status_code == 200, (path, answer.text)
            said[path] = answer.content
    return said


def delivered(run: Path) -> list[Any]:
    """What a relay would send."""
    feed = Feed(run, name="wandb", fold={})
    points = [(item.point.step, item.point.time, dict(item.point.values), dict(item.point.kwargs)) for item in feed.poll()]
    assert not feed.behind()
    assert feed.last_word == "finished"
    events = [event[:-1] if isinstance(event, tuple) else msgspec.to_builtins(event) for event, _ in feed.events]
    return [points, feed.info, events]  # an alert ends with its place in the journal


def forwarded(file: Path, store: Path) -> None:
    """Send the journal as a forwarder does, and keep it as a gateway does; make rows of ClickHouse's tables of it."""
    tail, intake = Tail(file, read_header(file)), DirectoryIntake(store, power=False)
    tail.offset = 0
    while tail.look() and (read := tail.read()) is not None:
        piece = Piece("r1", file.stem, tail.offset, read.gap, read.data)
        tail.offset = intake.append("llm", piece)
        shapes: dict[int, Any] = {}
        scanned = scan(piece.data, piece.offset, tail.seed, shapes)
        assert scanned.end == len(piece.data)
        tables_of([InsertJob("llm", piece, 1, 2, 0, scanned, shapes, profile_of(1, 0, scanned.others))])
    (copy,) = journal_files(store / "llm" / "r1")
    assert copy.read_bytes() == file.read_bytes()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return journal_of(tmp_path_factory.mktemp("expected"), [])


MOVING = {"damaged", "path", "last", "now", "seen", "size", "bytes", "duration", "age", "started", "created", "dir"}


def differences(a: Any, b: Any, where: str = "") -> list[Any]:
    """Compare answers, apart from the count of damaged bytes and what depends on the moment or the place."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [one for name in sorted({*a, *b} - MOVING) for one in differences(a.get(name), b.get(name), f"{where}/{name}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [one for place, pair in enumerate(zip(a, b, strict=True)) for one in differences(*pair, f"{where}/{place}")]
    return [] if a == b or (a != a and b != b) else [(where, a, b)]


@pytest.mark.parametrize("what", list(GOOD))
def test_a_body_that_does_not_fit_its_kind_is_damage_for_every_reader(what, tmp_path, capsys, expected):
    kind, body = GOOD[what]
    forged = [frame(kind, one) for one in mutated(body) if not fits(kind, one)]
    assert len(forged) > 20
    file = journal_of(tmp_path / "forged", forged)
    journal = Journal(file)
    journal.refresh()
    assert journal.damaged == 2 * sum(map(len, forged))
    assert differences(answers(tmp_path / "forged", capsys), answers(expected.parents[3], capsys)) == []
    assert delivered(file.parents[1]) == delivered(expected.parents[1])
    forwarded(file, tmp_path / "store")
    assert differences(answers(tmp_path / "store", capsys), answers(expected.parents[3], capsys)) == []


@pytest.mark.parametrize("what", list(GOOD))
def test_a_body_that_fits_though_odd_is_answered_normally_by_every_reader(what, tmp_path, capsys):
    kind, body = GOOD[what]
    odd = [one for one in mutated(body) if fits(kind, one)]
    file = journal_of(tmp_path / "odd", [frame(kind, one) for one in odd])
    journal = Journal(file)
    journal.refresh()
    assert journal.damaged == 0
    answers(tmp_path / "odd", capsys)
    Feed(file.parents[1], name="wandb").poll()
    forwarded(file, tmp_path / "store")


def test_a_shape_that_does_not_fit_is_damage_and_its_rows_are_not_guessed(tmp_path, capsys, expected):
    forged = [frame(Kind.SHAPE, one) for one in mutated(SHAPE) if not fits(Kind.SHAPE, one)]
    forged += [frame(Kind.SHAPE, one) for one in ([7, 0, "dd", ["a", "a"], ""], [7, 0, "d" * (1 << 18), ["a"] * (1 << 18), ""])]
    file = journal_of(tmp_path, forged)
    journal = Journal(file)
    journal.refresh()
    assert journal.damaged == 2 * sum(map(len, forged))
    assert differences(answers(tmp_path, capsys), answers(expected.parents[3], capsys)) == []
    assert delivered(file.parents[1]) == delivered(expected.parents[1])


def test_a_header_that_does_not_fit_costs_facts_and_no_points(tmp_path, capsys):
    for number, one in enumerate(one for one in mutated(HEADER) if not fits(Kind.HEADER, one)):
        file = journal_of(tmp_path / str(number), [], header=one)
        journal = Journal(file)
        if newer(one):
            with pytest.raises(JournalError, match="Upgrade"):
                journal.refresh()
            continue
        journal.refresh()
        assert journal.header.salvaged
        assert journal.column("loss").values.tolist() == [0.0, 0.5]
    answers(tmp_path / "0", capsys)


def test_one_forged_run_hides_no_other(tmp_path, capsys):
    journal_of(tmp_path, [frame(Kind.INFO, {"config": 5}), frame(Kind.END, {"status": {}})])
    run = fanfold.init("llm", dir=tmp_path, id="other", system=False, quiet=True)
    run.log({"loss": 1.0}, step=0)
    run.finish()
    capsys.readouterr()
    assert command(["ls", "--json", "--dir", str(tmp_path)]) == 0
    assert {row["id"] for row in json.loads(capsys.readouterr().out)} == {"r1", "other"}


@pytest.mark.parametrize("of", ["row", "facts"])
def test_a_forged_operator_table_is_left_out(of, tmp_path, capsys):
    kind, event = GOOD["ops"]
    if of == "row":
        forged = [{**event, "id": "x", "table": table([one])} for one in mutated(OPS_ROW)]
    else:
        forged = [{**event, "id": "x", "facts": one} for one in mutated(OPS_FACTS)]
    for start in range(0, len(forged), 3):  # of one process, three tables are looked at
        some = [{**one, "id": f"x{start + place}"} for place, one in enumerate(forged[start : start + 3])]
        forged[start : start + 3] = some
    file = journal_of(tmp_path, [frame(kind, one) for one in forged])
    answers(tmp_path, capsys)
    forwarded(file, tmp_path / "store")


def test_unknown_kinds_events_and_fields_are_no_damage(tmp_path, capsys, expected):
    new = [frame(99, {"a": 1}), fmt.frame(100, b"\xc1", SEED), frame(Kind.EVENT, {"event": "new", "t": 1, "x": b"y"}),
           frame(Kind.LOST, {"q": 9, "s": 3, "t": 5, "keys": [], "why": "", "new": {"deep": DEEP}})]  # fmt: skip
    file = journal_of(tmp_path, new[:3])
    journal = Journal(file)
    journal.refresh()
    assert journal.damaged == 0
    assert differences(answers(tmp_path, capsys), answers(expected.parents[3], capsys)) == []
    assert fits(Kind.LOST, {"q": 9, "s": 3, "t": 5, "new": 1})


def test_names_of_any_type_that_a_user_gives_are_written_as_texts(tmp_path):
    run = fanfold.init(
        "llm", dir=tmp_path, id="r", config={"lr": 1}, tags=[1, 2.5], notes=5, group=7, name=3, system=False, quiet=True
    )
    run.log({"a": "text", "loss": 1.0}, step=2, log_kwargs={"wandb": "x", 1: {"b": b"c"}})
    (tmp_path / "file").write_text("x")
    run.artifact(tmp_path / "file", kind=5)
    run.alert(1, 2)
    run.finish()
    stored = fanfold.open("r", dir=tmp_path)
    assert stored.damaged == 0
    assert (stored.config, stored.tags, stored.notes, stored.group, stored.name) == ({"lr": 1}, ["1", "2.5"], "5", "7", "3")
    assert [one["kind"] for one in stored.artifacts] == ["5"]
