"""Reading a journal whatever happened to it: torn, damaged, forged, growing. Nothing raises and no value is invented."""

from __future__ import annotations

import os
import random
import struct
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from damage import damaged, points, read, renewed
from fanfold.errors import JournalError
from fanfold.journal import Journal, Kind, Writer, index
from fanfold.journal import format as fmt
from fanfold.journal.bodies import End, as_dict
from fanfold.journal.format import HEAD, HEAD_SIZE, MAGIC_BYTES, Layout
from fanfold.journal.writer import Sheet

HEADER = {"format": [fmt.MAJOR, fmt.MINOR], "rank": 0, "role": "main", "attempt": "a", "run": "r"}


def small_journal(folder: Path) -> Path:
    """Two shapes taking turns, a text, an event and an end: every frame of it is different."""
    out = Writer(folder, HEADER)
    for step in range(4):
        out.row({"a": step + 0.5, "b": step * 7}, "dq", time_ns=1000 + step, step=step)
        out.row({"a": step + 0.25}, "d", time_ns=2000 + step, step=step + 100)
        out.append((Kind.VALUES, {"s": step, "t": 3000 + step, "v": {"text": f"word {step}"}}))
    out.close({"status": "finished", "t": 9})
    (path,) = folder.glob("*.ffj")
    return path


def frames_of(data: bytes) -> list[tuple[int, int, int]]:
    """Walk sound bytes by their lengths alone: (start, end, kind) of each frame."""
    at, found = 0, []
    while at < len(data):
        _, kind, _, length, _ = HEAD.unpack_from(data, at)
        found.append((at, at + HEAD_SIZE + length, kind))
        at += HEAD_SIZE + length
    return found


def shape_of(data: bytes, start: int) -> int:
    return int.from_bytes(data[start + HEAD_SIZE : start + HEAD_SIZE + 4], "little")


# Torn tails


def test_a_journal_cut_anywhere_reads_up_to_the_last_whole_frame(tmp_path):
    path = small_journal(tmp_path)
    data, whole = path.read_bytes(), points(read(path))
    ends = [0, *(end for _, end, _ in frames_of(data))]
    for cut in range(len(data)):
        journal = read(renewed(path, data[:cut]))
        verified = max(end for end in ends if end <= cut)
        assert (journal.verified, journal.tail, journal.damaged) == (verified, cut - verified, 0)
        assert points(journal) <= whole


@pytest.mark.parametrize("piece", [1, 2, 7, 33])
def test_reading_goes_on_when_a_torn_file_grows(tmp_path, piece):
    path = small_journal(tmp_path)
    data, whole = path.read_bytes(), points(read(path))
    path.unlink()
    path.touch()
    journal = Journal(path)
    seen: Counter[tuple[Any, ...]] = Counter()
    with path.open("ab", buffering=0) as file:
        for start in range(0, len(data), piece):
            file.write(data[start : start + piece])
            journal.refresh()
            now = points(journal)
            assert seen <= now
            seen = now
    assert seen == whole
    assert (journal.tail, journal.damaged) == (0, 0)


def test_a_torn_frame_is_passed_once_sound_frames_follow_it(tmp_path):
    path = small_journal(tmp_path)
    data = path.read_bytes()
    start, end, _ = frames_of(data)[-1]
    journal = read(renewed(path, data[: start + 5]))
    assert (journal.tail, journal.damaged) == (5, 0)
    with path.open("ab") as file:
        file.write(data[start:end])
    assert journal.refresh()
    assert (journal.tail, journal.damaged) == (0, 5)
    assert [record.data.status for record in journal.records(Kind.END)] == ["finished"]


def test_a_file_that_became_shorter_is_said_and_not_guessed(tmp_path):
    path = small_journal(tmp_path)
    journal = read(path)
    renewed(path, path.read_bytes()[:-30])
    with pytest.raises(JournalError, match="became shorter"):
        journal.refresh()


def test_an_empty_file_is_a_journal_with_nothing_yet(tmp_path):
    path = tmp_path / "0-00f0e1d2c3b4a596.ffj"
    path.touch()
    journal = read(path)
    assert (journal.begun, journal.keys(), journal.tail) == (False, [], 0)


def test_zeros_after_a_power_cut_are_a_tail(tmp_path):
    path = small_journal(tmp_path)
    data, whole = path.read_bytes(), points(read(path))
    journal = read(renewed(path, data + bytes(5000)))
    assert points(journal) == whole
    assert (journal.tail, journal.damaged) == (5000, 0)


# Damage


@pytest.mark.parametrize("flip", [0xFF, 0x01, 0x80])
def test_a_flipped_byte_costs_the_frame_it_hits_and_no_more(tmp_path, flip):
    path = small_journal(tmp_path)
    data = path.read_bytes()
    frames = frames_of(data)
    whole = points(read(path))
    for start, end, kind in frames:
        lost = [(start, end)]
        if kind == Kind.SHAPE:  # its rows cannot be named any more
            shape_id = fmt.Shape.parse(data[start + HEAD_SIZE : end]).id
            lost += [(s, e) for s, e, k in frames if k == Kind.ROW and shape_of(data, s) == shape_id]
        expected = points(without(path, data, lost))
        bytes_lost = sum(e - s for s, e in lost)
        for offset in range(start, end):
            broken = bytearray(data)
            broken[offset] ^= flip
            journal = read(renewed(path, bytes(broken)))
            assert points(journal) == expected, offset
            assert journal.damaged + journal.tail == bytes_lost, offset
    assert sum(expected.values()) < sum(whole.values())


def without(path: Path, data: bytes, gone: list[tuple[int, int]]) -> Journal:
    kept = b"".join(data[s:e] for s, e, _ in frames_of(data) if (s, e) not in gone)
    return read(renewed(path, kept))


def test_a_damaged_header_costs_facts_but_not_points(tmp_path):
    path = small_journal(tmp_path)
    data = bytearray(path.read_bytes())
    whole = points(read(path))
    data[20] ^= 1
    journal = read(renewed(path, bytes(data)))
    assert points(journal) == whole
    assert (journal.header.rank, journal.header.salvaged) == (0, True)


def test_a_header_counts_only_where_a_journal_begins(tmp_path):
    foreign = frames_of(data := small_journal(tmp_path / "foreign").read_bytes())[0]
    stray = data[foreign[0] : foreign[1]]
    path = small_journal(tmp_path / "ours")
    data, whole = bytearray(path.read_bytes()), points(read(path))
    (_, end, _) = frames_of(data)[0]
    journal = read(renewed(path, bytes(data[:end]) + stray + bytes(data[end:])))
    assert (points(journal), journal.damaged, journal.header.journal) == (whole, len(stray), journal.id)
    data[20] ^= 1
    journal = read(renewed(path, bytes(data[:end]) + stray + bytes(data[end:])))
    assert (points(journal), journal.header.salvaged) == (whole, True)


def test_garbage_in_the_middle_is_skipped_and_counted(tmp_path):
    path = small_journal(tmp_path)
    data, whole = path.read_bytes(), points(read(path))
    noise = random.Random(1).randbytes(3000) + fmt.MAGIC_BYTES * 50 + HEAD.pack(fmt.MAGIC, 4, 0, 1 << 20, 0)
    for start, _, _ in frames_of(data)[1:]:
        journal = read(renewed(path, data[:start] + noise + data[start:]))
        assert points(journal) == whole
        assert journal.damaged == len(noise)


def test_damage_that_ends_in_the_magic_does_not_raise(tmp_path):
    path = small_journal(tmp_path)
    data, whole = path.read_bytes(), points(read(path))
    for tail in (b"\0" + fmt.MAGIC_BYTES, b"\0" + fmt.MAGIC_BYTES + b"\x03", fmt.MAGIC_BYTES):
        journal = read(renewed(path, data + tail))
        assert points(journal) == whole
        assert journal.tail == len(tail)


@pytest.mark.parametrize("damage", [b"\xfa\xfe", b"\0\0"])
def test_frames_of_a_foreign_journal_are_never_taken_for_ours(tmp_path, damage):
    foreign = small_journal(tmp_path / "foreign").read_bytes()
    out = Writer(tmp_path / "ours", HEADER)
    out.append((Kind.VALUES, {"s": 0, "t": 0, "v": {"dump": foreign.decode("latin-1")}}))
    out.append((Kind.CONSOLE, {"t": 0, "n": "stdout", "b": foreign}))
    out.row({"mine": 1.0}, "d", time_ns=0, step=0)
    out.close(None)
    (path,) = (tmp_path / "ours").glob("*.ffj")
    data = path.read_bytes()
    assert foreign in data
    broken = bytearray(data)
    for start, _, kind in frames_of(data):
        if kind in (Kind.VALUES, Kind.CONSOLE):
            broken[start : start + 2] = damage
    journal = read(renewed(path, bytes(broken)))
    assert points(journal) == Counter({("mine", 0, 0, 1.0): 1})
    assert journal.damaged == sum(e - s for s, e, k in frames_of(data) if k in (Kind.VALUES, Kind.CONSOLE))


def test_a_journal_under_another_journals_name_gives_nothing(tmp_path):
    path = small_journal(tmp_path)
    wrong = path.with_name("0-00f0e1d2c3b4a596.ffj")
    path.rename(wrong)
    journal = read(wrong)
    assert points(journal) == Counter()
    assert journal.by_key == {}


# Forged files


def forged(folder: Path, *frames: tuple[int, bytes]) -> Path:
    """A journal whose checksums are right and whose bodies are not what their kinds promise."""
    sheet = Sheet(folder / "0-00f0e1d2c3b4a596.ffj", {**HEADER, "journal": "00f0e1d2c3b4a596"})
    for kind, body in frames:
        sheet.write(fmt.frame(kind, body, sheet.seed))
    sheet.close(ended=True)
    return sheet.path


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind != Kind.HEADER])
@pytest.mark.parametrize("body", [b"", b"\xc1", b"\xff" * 40, fmt.pack(1), fmt.pack([[], {}]), b"\x91" * 3000])
def test_a_sound_frame_of_nonsense_is_passed_over(tmp_path, kind, body):
    good = fmt.Shape(7, 0, "d", ("a",))
    row = struct.pack("<Iqid", 7, 1, 2, 3.0)
    journal = read(forged(tmp_path, (Kind.SHAPE, good.body()), (kind, body), (Kind.ROW, row)))
    assert journal.column("a").values.tolist() == [3.0]
    assert journal.damaged == len(body) + HEAD_SIZE
    assert [record.kind for record in journal.records(*Kind)] == [Kind.HEADER, Kind.SHAPE]


def test_unknown_kinds_are_skipped(tmp_path):
    journal = read(forged(tmp_path, (200, b"from the future"), (Kind.END, fmt.pack({"status": "finished"}))))
    assert [record.data for record in journal.records(Kind.END)] == [End("finished")]
    assert (journal.damaged, journal.tail) == (0, 0)


@pytest.mark.parametrize("version", [[2, 0], [99]])
def test_a_higher_major_version_is_refused_with_what_to_do(tmp_path, version):
    sheet = Sheet(tmp_path / "0-00f0e1d2c3b4a596.ffj", {**HEADER, "format": version, "journal": "00f0e1d2c3b4a596"})
    sheet.close(ended=True)
    with pytest.raises(JournalError, match="pip install -U fanfold"):
        read(sheet.path)


@pytest.mark.parametrize("version", [None, [], "1", ["x"]])
def test_a_header_without_a_version_is_damage_and_costs_no_points(tmp_path, version):
    sheet = Sheet(tmp_path / "0-00f0e1d2c3b4a596.ffj", {**HEADER, "format": version, "journal": "00f0e1d2c3b4a596"})
    sheet.write(fmt.frame(Kind.SHAPE, fmt.Shape(7, 0, "d", ("a",)).body(), sheet.seed))
    sheet.write(fmt.frame(Kind.ROW, struct.pack("<Iqid", 7, 1, 2, 3.0), sheet.seed))
    sheet.close(ended=True)
    journal = read(sheet.path)
    assert (journal.latest(), journal.header.salvaged, journal.header.rank) == ({"a": (2, 1, 3.0)}, True, 0)
    assert journal.damaged == sheet.path.read_bytes().index(fmt.MAGIC_BYTES, 1)


def test_an_id_names_one_shape_for_ever(tmp_path):
    first, again, other = (fmt.Shape(7, 0, "d", (key,)).body() for key in ("a", "a", "b"))
    row = struct.pack("<Iqid", 7, 1, 2, 3.0)
    frames = [(Kind.SHAPE, first), (Kind.ROW, row), (Kind.SHAPE, again), (Kind.ROW, row), (Kind.SHAPE, other), (Kind.ROW, row)]
    journal = read(forged(tmp_path, *frames))
    assert journal.column("a").values.tolist() == [3.0, 3.0, 3.0]
    assert journal.keys() == ["a"]
    assert journal.latest() == {"a": (2, 1, 3.0)}
    assert journal.damaged == len(other) + HEAD_SIZE


def test_a_file_of_nothing_but_long_frame_heads_is_given_up_soon(tmp_path, monkeypatch):
    path = forged(tmp_path)
    head = HEAD.pack(fmt.MAGIC, Kind.VALUES, 0, 1 << 20, 0)
    work = []
    monkeypatch.setattr("fanfold.journal.reader.crc32", lambda data, seed: work.append(len(data)) or 1)
    with path.open("ab") as file:
        file.write(head * 200_000)
    journal = Journal(path)
    journal.refresh()
    assert sum(work) < 5 * path.stat().st_size + fmt.MAX_BODY + (1 << 20)


# Growing


def test_a_live_journal_is_read_without_a_gap_while_threads_write_it(tmp_path):
    out = Writer(tmp_path, HEADER)
    journal = Journal(out.sheet.path)
    total = 20_000

    def write() -> None:
        for step in range(total):
            if step % 100 == 0:  # longer than a page: a reader may meet it half written
                out.append((Kind.VALUES, {"s": step, "t": 0, "v": {"text": "x" * 20_000}}))
            out.row({"a": float(step)}, "d", time_ns=step, step=step)

    thread = threading.Thread(target=write)
    thread.start()
    seen, looks = 0, 0
    while seen < total:
        journal.refresh()
        column = journal.column("a")
        assert np.array_equal(column.values, np.arange(len(column.values)))
        assert len(column.values) >= seen
        seen, looks = len(column.values), looks + 1
        assert journal.damaged == 0
    thread.join()
    out.close(None)
    journal.refresh()
    assert (journal.tail, journal.damaged, len(list(journal.records(Kind.VALUES)))) == (0, 0, total // 100)
    assert looks > 1


def test_since_gives_only_what_was_added(tmp_path):
    out = Writer(tmp_path, HEADER)
    for step in range(200):
        out.row({"a": float(step)}, "d", time_ns=step, step=step)
    journal = read(out.sheet.path)
    mark = journal.verified
    for step in range(200, 300):
        out.row({"a": float(step)}, "d", time_ns=step, step=step)
    journal.refresh()
    assert journal.column("a", since=mark).steps.tolist() == list(range(200, 300))
    assert journal.column("a").steps.tolist() == list(range(300))
    assert journal.count("a") == 300
    out.close(None)


# Hypothesis: whatever is written comes back, whatever is broken invents nothing

FINITE_AND_NOT = st.floats(allow_nan=True, allow_infinity=True, allow_subnormal=True)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
VALUE = {"d": FINITE_AND_NOT, "q": INT64, "?": st.booleans()}
KEY = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[tuple[str, ...], str, int]:
    keys = tuple(draw(st.lists(KEY, min_size=1, max_size=4, unique=True)))
    types = "".join(draw(st.sampled_from("dq?")) for _ in keys)
    return keys, types, draw(st.sampled_from([0, 0, 0, Layout.PENDING, Layout.LATE]))


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """A list of rows and records, in which a few shapes come again and again."""
    known = draw(st.lists(shapes(), min_size=1, max_size=3))
    history: list[tuple[Any, ...]] = []
    for _ in range(draw(st.integers(0, 12))):
        if draw(st.integers(0, 4)) == 0:
            history.append(
                (Kind.VALUES, {"s": draw(INT64), "t": draw(INT64), "v": {draw(KEY): draw(st.text("a\0é"))}, "q": None, "k": None})
            )
            continue
        keys, types, layout = draw(st.sampled_from(known))
        for _ in range(draw(st.integers(1, 5))):
            step = draw(st.one_of(st.integers(-5, 5), INT64, st.none()))
            history.append((keys, types, layout, step, draw(INT64), [draw(VALUE[code]) for code in types]))
    return history


def write_history(folder: Path, history: list[tuple[Any, ...]]) -> Path:
    out = Writer(folder, HEADER)
    for item in history:
        if isinstance(item[0], Kind):
            out.append(item)
            continue
        keys, types, layout, step, time_ns, values = item
        call = (1, 2) if layout & Layout.PENDING else (1,) if layout & Layout.LATE else ()
        out.row(dict(zip(keys, values, strict=True)), types, time_ns=time_ns, step=step, layout=layout, call=call)
    out.close(None)
    (path,) = folder.glob("*.ffj")
    return path


def bits(value: Any) -> Any:
    """A float by its bits, so that NaN equals itself and -0.0 does not equal 0.0."""
    return struct.pack("<d", value) if isinstance(value, float) else (type(value), value)


def written_points(history: list[tuple[Any, ...]]) -> Counter[Any]:
    return Counter(
        (key, -(1 << 63) if step is None else step, time_ns / 1e9, bits(value))
        for keys, _, _, step, time_ns, values in (item for item in history if not isinstance(item[0], Kind))
        for key, value in zip(keys, values, strict=True)
    )


def walked_points(journal: Journal) -> Counter[Any]:
    """The same, frame by frame, as a relay reads them."""
    rows = list(journal.walk_rows(0))
    return Counter(
        (key, -(1 << 63) if row.step is None else row.step, row.time / 1e9, bits(value))
        for row in rows
        for key, value in row.values.items()
    )


def read_points(journal: Journal) -> Counter[Any]:
    """Every value as stored, shape by shape: gathering a key over shapes of different types would make floats of integers."""
    found: Counter[Any] = Counter()
    for key, places in journal.by_key.items():
        for rows, place in places:
            part = journal._gather(rows, place, rows.runs) if rows.runs else ()
            found.update(
                (key, step, time, bits(value)) for step, time, value in zip(*(column.tolist() for column in part), strict=True)
            )
    assert found <= walked_points(journal)  # a frame moved before its shape is named by the one and not by the other
    return found


@settings(max_examples=150, deadline=None)
@given(histories())
def test_what_is_written_comes_back_exactly(history):
    with tempfile.TemporaryDirectory() as folder:
        journal = read(write_history(Path(folder), history))
        assert read_points(journal) == written_points(history)
        records = [(record.kind, as_dict(record.data)) for record in journal.records(*range(4, 256))]
        assert records == [item for item in history if isinstance(item[0], Kind)]
        assert (journal.damaged, journal.tail) == (0, 0)


DAMAGE = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "duplicate", "zero", "remove", "swap"]),
        st.floats(0, 1, exclude_max=True),
        st.floats(0, 1, exclude_max=True),
        st.integers(1, 255),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=300, deadline=None)
@given(histories(), DAMAGE)
def test_damage_never_raises_and_never_invents_a_value(history, breaks):
    with tempfile.TemporaryDirectory() as folder:
        path = write_history(Path(folder), history)
        data = path.read_bytes()
        for how, start, length, byte in breaks:
            data = damaged(data, how, start, length, byte)
        journal = read(renewed(path, data))
        written, found = written_points(history), read_points(journal)
        assert set(found) <= set(written)
        records = {repr((int(item[0]), item[1])) for item in history if isinstance(item[0], Kind)}
        assert {repr((record.kind, as_dict(record.data))) for record in journal.records(*range(4, 256))} <= records
        assert journal.verified + journal.tail == len(data)
        journal.latest()


# The index


def large_journal(folder: Path, monkeypatch: pytest.MonkeyPatch, *, kept: int = 0) -> Path:
    monkeypatch.setattr(index, "WORTH_BYTES", 1000)
    monkeypatch.setattr(index, "KEPT", kept)
    monkeypatch.setattr(index, "_kept", {})
    out = Writer(folder / "journal", HEADER)
    for step in range(500):
        out.row({"a": step / 3, "b": step}, "dq", time_ns=step, step=step)
        if step % 50 == 0:
            out.row({"a": -1.0}, "d", time_ns=step, step=step)
            out.append((Kind.INFO, {"at": step}))
    path = out.sheet.path
    out.close({"status": "finished"})
    return path


def index_file(cache: Path, path: Path) -> Path:
    return cache / "index" / f"{path.stem[2:]}.idx"


def everything(journal: Journal) -> Any:
    return points(journal), journal.header, journal.frames, journal.verified, journal.damaged, journal.latest(), journal.keys()


def test_a_journal_reads_the_same_with_and_without_its_index(tmp_path, monkeypatch):
    path, cache = large_journal(tmp_path, monkeypatch), tmp_path / "cache"
    cold = everything(read(path))
    assert everything(index.open_indexed(path, cache)) == cold
    assert index_file(cache, path).exists()
    walked = []
    monkeypatch.setattr("fanfold.journal.walker.spans", lambda *_, **__: walked.append(1))
    assert everything(index.open_indexed(path, cache)) == cold
    assert walked == []


def test_an_index_is_continued_when_the_journal_grew(tmp_path, monkeypatch):
    path, cache = large_journal(tmp_path, monkeypatch), tmp_path / "cache"
    data = path.read_bytes()
    whole = everything(read(path))
    renewed(path, data[: len(data) * 2 // 3])
    half = everything(index.open_indexed(path, cache))
    renewed(path, data)
    grown = index.open_indexed(path, cache)
    assert half != whole
    assert everything(grown) == whole


def test_an_index_broken_anywhere_is_ignored(tmp_path, monkeypatch):
    path, cache = large_journal(tmp_path, monkeypatch), tmp_path / "cache"
    cold = everything(index.open_indexed(path, cache))
    good = index_file(cache, path).read_bytes()
    for offset in range(0, len(good), 1 + len(good) // 150):
        broken = bytearray(good)
        broken[offset] ^= 0x11
        index_file(cache, path).write_bytes(bytes(broken))
        assert everything(index.open_indexed(path, cache)) == cold, offset
    for cut in (0, 1, 3, 4, 5, len(good) // 2, len(good) - 1):
        index_file(cache, path).write_bytes(good[:cut])
        assert everything(index.open_indexed(path, cache)) == cold, cut


def test_an_index_of_other_content_is_ignored(tmp_path, monkeypatch):
    path, cache = large_journal(tmp_path, monkeypatch), tmp_path / "cache"
    index.open_indexed(path, cache)
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    renewed(path, bytes(data))
    cold = everything(read(path))
    assert everything(index.open_indexed(path, cache)) == cold


def test_an_index_that_promises_more_than_the_file_has_is_ignored(tmp_path, monkeypatch):
    path, cache = large_journal(tmp_path, monkeypatch), tmp_path / "cache"
    index.open_indexed(path, cache)
    renewed(path, path.read_bytes()[:-100])
    cold = everything(read(path))
    assert everything(index.open_indexed(path, cache)) == cold


def test_a_cache_that_cannot_be_written_changes_nothing(tmp_path, monkeypatch):
    path = large_journal(tmp_path, monkeypatch)
    (tmp_path / "cache").write_text("a file, not a folder")
    assert everything(index.open_indexed(path, tmp_path / "cache")) == everything(read(path))


# Journals kept open


def test_a_large_journal_read_lately_is_not_opened_again_and_reads_on(tmp_path, monkeypatch):
    path, cache = large_journal(tmp_path, monkeypatch, kept=2), tmp_path / "cache"
    data = path.read_bytes()
    whole = everything(read(path))
    cut = data.index(MAGIC_BYTES, len(data) // 2)
    renewed(path, data[:cut])
    first = index.open_indexed(path, cache)
    with path.open("ab") as file:
        file.write(data[cut:])
    again = index.open_indexed(path, cache)
    assert again is first
    assert everything(again) == whole


def test_a_kept_journal_is_dropped_when_its_file_was_replaced_or_deleted(tmp_path, monkeypatch):
    path, cache = large_journal(tmp_path, monkeypatch, kept=2), tmp_path / "cache"
    first = index.open_indexed(path, cache)
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(1, 1))
    changed = index.open_indexed(path, cache)
    assert changed is not first
    assert everything(changed) == everything(read(path))
    renewed(path, bytes(data))
    assert index.open_indexed(path, cache) is not changed
    path.unlink()
    assert index._open(path) is None
    assert index._kept == {}


def test_only_so_many_journals_are_kept_open(tmp_path, monkeypatch):
    paths = [large_journal(tmp_path / str(n), monkeypatch, kept=2) for n in range(3)]
    for path in (*paths, paths[1]):
        index.open_indexed(path, tmp_path / "cache")
    assert [path for _, path in index._kept] == [paths[2], paths[1]]


def test_threads_that_share_a_growing_journal_count_every_row_once(tmp_path, monkeypatch):
    path, cache = large_journal(tmp_path, monkeypatch, kept=2), tmp_path / "cache"
    data = path.read_bytes()
    whole = everything(read(path))
    renewed(path, data[: len(data) // 3])
    index.open_indexed(path, cache)
    with path.open("ab") as file:
        file.write(data[len(data) // 3 :])
    go = threading.Barrier(8)

    def look() -> None:
        go.wait()
        index.open_indexed(path, cache)

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert everything(index.open_indexed(path, cache)) == whole
