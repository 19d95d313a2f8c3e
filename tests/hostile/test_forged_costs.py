"""Whatever a sender forges costs no more than a multiple of what was sent: bytes checked, memory, and room on the disk."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fanfold.fleet import frames
from fanfold.fleet.intake import GAP_FREE, GAP_RATIO, DirectoryIntake
from fanfold.fleet.wire import MAX_PIECES, Piece, Rejected, decode, encode
from fanfold.journal import Journal, Kind, checksums, walker
from fanfold.journal import format as fmt
from fanfold.journal.writer import Sheet, Writer
from fleet_tools import kept, pieces_of, write_run

ID = "00f0e1d2c3b4a596"
SEED = fmt.seed_of(ID)
HEADER = {"format": [1, 0], "journal": ID, "run": "r1", "project": "llm", "rank": 0, "role": "main"}
GOOD = fmt.frame(Kind.VALUES, fmt.pack({"s": 1, "t": 2, "v": {"a": "found"}}), SEED)
# Every four bytes begin a frame of 320 kB that is not sound.
DENSE = b"\xfa\xfd\x04\x00" * (1 << 16)


class Counted:
    """zlib's crc32, counting the bytes it is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = self.calls = 0
        for module in (walker, checksums, fmt):
            monkeypatch.setattr(module, "crc32", self)

    def __call__(self, data: Any, start: int = 0) -> int:
        self.bytes += len(data)
        self.calls += 1
        return zlib.crc32(data, start)


def journal_of(folder: Path, *parts: bytes) -> Path:
    sheet = Sheet(folder / f"0-{ID}.ffj", HEADER)
    sheet.write(b"".join(parts))
    sheet.close(ended=True)
    return sheet.path


def heads(count: int, length: int) -> bytes:
    """Heads of frames, each of which reaches over all that follow, with sound frames of no length between."""
    small = fmt.frame(200, b"", SEED)
    return b"".join(fmt.HEAD.pack(fmt.MAGIC, 4, 0, length - 24 * place, 0) + small for place in range(count))


@pytest.mark.parametrize(
    "forged",
    [DENSE * 4, heads(20_000, 20_000 * 24), b"\xfa\xfd\x04\x00\x00\x00\x10\x00" * (1 << 17)],
    ids=["every four bytes", "sound frames between", "every eight bytes"],
)
def test_a_forged_journal_is_read_in_linear_work(tmp_path, monkeypatch, forged):
    path = journal_of(tmp_path, forged, GOOD, forged, GOOD)
    count = Counted(monkeypatch)
    journal = Journal(path)
    journal.refresh()
    assert [record.data.v for record in journal.records(Kind.VALUES)] == [{"a": "found"}] * 2
    assert count.bytes < 64 * path.stat().st_size  # up to 64 bytes for both ends of a frame, of which every four bytes begin one
    assert count.calls < 4 * path.stat().st_size


def test_a_forged_tail_is_not_searched_again_with_every_byte_that_comes(tmp_path, monkeypatch):
    path = journal_of(tmp_path, DENSE * 4)
    journal = Journal(path)
    journal.refresh()
    count = Counted(monkeypatch)
    for _ in range(50):
        with path.open("ab") as file:
            file.write(b"\0" * 10)
        journal.refresh()
    assert count.calls < 50 * 10
    with path.open("ab") as file:
        file.write(GOOD + bytes(len(DENSE)))
    journal.refresh()
    assert len(list(journal.records(Kind.VALUES))) == 1


def test_sums_of_blocks_find_the_same_frames_as_checking_each():
    random.seed(4)
    good = [
        fmt.frame(random.randrange(2, 255), random.randbytes(random.choice([0, 1, 63, 64, 65, 5000])), SEED) for _ in range(40)
    ]
    noise = [random.choice([DENSE[: random.randrange(400)], random.randbytes(random.randrange(300)), b"\xfa\xfd"]) for _ in good]
    data = b"".join(part for pair in zip(noise, good, strict=True) for part in pair)
    view = memoryview(data)
    exact = [
        at for at in range(len(data)) if data.startswith(fmt.MAGIC_BYTES, at) and walker.sound_end(view, at, len(data), SEED)
    ]
    blocks, found, at = checksums.Blocks(view, len(data), SEED), [], 0
    while (at := blocks.next(at)) >= 0:
        found.append(at)
        at += 1
    assert found == exact
    assert len(found) >= 40


def rows_of(count: int, keys: int) -> list[bytes]:
    body = struct.Struct(f"<Iqi{keys}d")
    return [fmt.frame(Kind.ROW, body.pack(7, step * 1000, step, *[step / 3] * keys), SEED) for step in range(count)]


@pytest.mark.parametrize("keys", [1, 10, 333])
def test_rows_checked_together_are_the_rows_that_are_valid_one_by_one(keys):
    """One changed bit anywhere (head, sum, shape, values), two equal changes, two rows' sums swapped, a row of another shape."""
    rows = rows_of(6000, keys)
    data, stride, rng = bytearray(b"".join(rows)), len(rows[0]), random.Random(keys)

    def valid() -> list[tuple[int, int]]:
        return [(span.at, span.end) for span in walker.all_spans(bytes(data), SEED)]

    def expected(*bad: int) -> list[tuple[int, int]]:
        edges = [-1, *bad, len(rows)]
        ranges = [((one + 1) * stride, two * stride) for one, two in pairwise(edges)]
        return [(at, end) for at, end in ranges if at < end]

    assert valid() == expected()
    for _ in range(30):
        row, bit = rng.randrange(2500, 6000), rng.randrange(stride * 8)
        data[row * stride + bit // 8] ^= 1 << bit % 8
        assert valid() == expected(row)
        other = 2500 + (row - 1500) % 3500
        data[other * stride + bit // 8] ^= 1 << bit % 8
        assert valid() == expected(*sorted({row, other}))
        for one in (row, other):
            data[one * stride + bit // 8] ^= 1 << bit % 8
    sums = slice(3000 * stride + 8, 3000 * stride + 12), slice(4000 * stride + 8, 4000 * stride + 12)
    data[sums[0]], data[sums[1]] = data[sums[1]], data[sums[0]]
    assert valid() == expected(3000, 4000)
    data[sums[0]], data[sums[1]] = data[sums[1]], data[sums[0]]
    body = bytearray(rows[5000][fmt.HEAD_SIZE :])
    body[0] = 8
    data[5000 * stride : 5001 * stride] = fmt.frame(Kind.ROW, bytes(body), SEED)
    assert valid() == [(0, 5000 * stride), (5000 * stride, 5001 * stride), (5001 * stride, len(data))]


def test_rows_that_are_all_but_valid_are_checked_a_few_times_at_most(monkeypatch):
    """Every third thousand of rows has one that is not valid: a block that fails is read once more, and the next one is small."""
    rows = rows_of(30_000, 4)
    for place in range(2900, len(rows), 3000):
        rows[place] = rows[place][:-1] + b"\1"
    data, count = b"".join(rows), Counted(monkeypatch)
    assert sum(span.number for span in walker.all_spans(data, SEED)) == len(rows) - 10
    assert count.bytes < 4 * len(data)


def test_the_end_of_a_forged_file_is_found_in_linear_work(tmp_path, monkeypatch):
    for tail in (DENSE * 40, GOOD + DENSE * 40):
        path = journal_of(tmp_path, GOOD, tail)
        size = path.stat().st_size
        count = Counted(monkeypatch)
        fd = os.open(path, os.O_RDONLY)
        assert frames.whole_end(fd, path, size, SEED) == size - len(DENSE * 40)
        os.close(fd)
        assert count.bytes < 100 * size
        path.unlink()


# Gaps


def test_gaps_take_no_more_room_than_what_was_sent(tmp_path):
    intake = DirectoryIntake(tmp_path / "store", power=False)
    file = write_run(tmp_path / "node")
    (whole,) = pieces_of(file)
    end = intake.append("llm", whole)
    frame = fmt.frame(200, b"x", fmt.seed_of(file.stem[2:]))
    refused = 0
    for _ in range(300):
        try:
            end = intake.append("llm", Piece("r1", file.stem, end, 64 << 20, frame))
        except Rejected:
            refused += 1
    assert refused > 290
    assert kept(intake.root, file).stat().st_size <= GAP_RATIO * (1 << 20) + GAP_FREE


def test_the_damage_of_a_long_frame_is_still_left_out(tmp_path):
    intake = DirectoryIntake(tmp_path / "store", power=False)
    file = write_run(tmp_path / "node")
    first, second = pieces_of(file, 3)
    end = intake.append("llm", first)
    damaged = Piece("r1", file.stem, end, 15 << 20, second.data)
    assert intake.append("llm", damaged) == end + (15 << 20) + len(second.data)
    copy = Journal(kept(intake.root, file))
    copy.refresh()
    assert copy.damaged == 15 << 20


# Memory: what a request takes, in a process of its own

MEASURED = """
import resource, sys
from pathlib import Path
from fanfold.fleet.intake import DirectoryIntake
from fanfold.fleet.wire import Rejected, decode
from fanfold import runs
body, root, length = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2]), int(sys.argv[3])
intake = DirectoryIntake(root, power=False)
runs("llm", dir=root)
import numpy
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    for outcome in intake.append_all("llm", decode(body, length)).result():
        print(type(outcome).__name__)
    del body
    print([run.id for run in runs("llm", dir=root)])
except Rejected as error:
    print("refused", error.status)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def grown(tmp_path: Path, raw: bytes, level: int = 9) -> tuple[list[str], int, int]:
    """What a gateway and its list of runs say to a body, how much memory that took (MB), and how much was sent."""
    body = tmp_path / "body"
    body.write_bytes(zlib.compress(raw, level))
    ran = subprocess.run(
        [sys.executable, "-c", MEASURED, str(body), str(tmp_path / "store"), str(len(raw))], capture_output=True, text=True,
        env={**os.environ, "FANFOLD_CACHE_DIR": str(tmp_path / "cache")}, timeout=300, check=True,
    )  # fmt: skip
    *said, last = ran.stdout.splitlines()
    return said, int(last) >> 10, body.stat().st_size


def shape_frame(keys: int, id: int = 0) -> bytes:
    packed = msgspec.msgpack.encode([id, 0, "?" * keys, ["a"] * keys, ""])
    return fmt.frame(Kind.SHAPE, packed, SEED)


def request_of(*bodies: bytes) -> bytes:
    head = fmt.frame(Kind.HEADER, fmt.pack(HEADER), 0)
    return msgspec.msgpack.encode([Piece("r1", f"0-{ID}", 0, 0, head + b"".join(bodies))])


def test_a_request_that_unpacks_to_a_thousand_times_its_size_is_refused(tmp_path):
    said, memory, sent = grown(tmp_path, request_of(shape_frame(20_000_000)))
    assert (said, sent < 100_000) == (["refused 413"], True)
    assert memory < 8


def test_a_shape_of_millions_of_keys_is_damage_and_takes_little_memory(tmp_path):
    said, memory, _ = grown(tmp_path, request_of(shape_frame(20_000_000)), level=0)
    assert said == ["int", "['r1']"]
    assert memory < 4 * 60


def test_empty_pieces_are_counted_before_they_are_made(tmp_path):
    many = 10_000_000
    raw = b"\xdd" + many.to_bytes(4, "big") + msgspec.msgpack.encode(Piece("", "", 0, 0, b"")) * many
    assert grown(tmp_path, raw)[:1] == (["refused 413"],)
    said, memory, _ = grown(tmp_path, raw, level=0)
    assert said == ["refused 400"]
    assert memory < 3 * 60
    body, length = encode([Piece("r", "0-" + ID, 0, 0, b"")] * MAX_PIECES)
    assert len(decode(body, length)) == MAX_PIECES


def test_what_compresses_too_well_is_sent_as_it_is_and_arrives(tmp_path):
    text = fmt.frame(Kind.VALUES, fmt.pack({"s": 0, "t": 0, "v": {"a": " " * (10 << 20)}}), SEED)
    piece = Piece("r1", f"0-{ID}", 0, 0, fmt.frame(Kind.HEADER, fmt.pack(HEADER), 0) + text)
    body, length = encode([piece])
    assert len(body) > length // 64
    assert decode(body, length) == [piece]


# Calls of very many keys


def test_a_call_of_more_keys_than_a_shape_may_have_is_written_as_several_rows(tmp_path):
    writer = Writer(tmp_path, HEADER)
    path = writer.sheet.path
    values = {f"k{place}": float(place) for place in range(fmt.MAX_KEYS + 5)}
    assert writer.row(values, "d" * len(values), time_ns=1, step=2)
    assert writer.row(values, "d" * len(values), time_ns=2, step=3)
    writer.close({"t": 0, "status": "finished"})
    journal = Journal(path)
    journal.refresh()
    assert (journal.damaged, writer.dropped, len(journal.rows)) == (0, 0, 2)
    assert {key: value for key, (_, _, value) in journal.latest().items()} == values
    assert journal.column("k131074").steps.tolist() == [2, 3]


RULES, KEYS, RANKS = 8000, 4000, 600
READ = """
import sys
from fanfold.store import StoredRun
row = StoredRun(sys.argv[1]).refresh().row()
print(len(row["summary"]), len(row["rules"]))
"""


@pytest.mark.parametrize("kind", ["rules", "ranks", "shapes"])
def test_what_a_run_holds_is_not_multiplied_with_what_else_it_holds(tmp_path, kind):
    """Patterns of define_metric times keys, journals times keys, shapes times shapes: each would take minutes."""
    folder = tmp_path / "runs" / "llm" / "r1"
    keys = [f"k{number}" for number in range(KEYS if kind != "shapes" else 1)]

    def journal(rank: int, *frames: Any) -> None:
        id = f"{rank + 1:016x}"
        header = {**HEADER, "journal": id, "rank": rank, "started": 1, "attempt": "a"}
        seed = fmt.seed_of(id)
        path = folder / "journal" / f"{rank}-{id}.ffj"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(fmt.frame(Kind.HEADER, fmt.pack(header), 0) + b"".join(frame(seed) for frame in frames))

    def rule(pattern: str) -> Any:
        return lambda seed: fmt.frame(Kind.EVENT, fmt.pack({"t": 1, "event": "metric", "key": pattern, "summary": "min"}), seed)

    def rows(number: int) -> Any:
        shape = fmt.Shape(number, 0, "d" * len(keys), tuple(keys))
        body = fmt.struct.pack(shape.codes, number, 1, number, *[1.0] * len(keys))
        return lambda seed: fmt.frame(Kind.SHAPE, shape.body(), seed) + fmt.frame(Kind.ROW, body, seed)

    patterns = [rule(f"*q{number}*z") for number in range(RULES if kind == "rules" else 0)]
    count = 40_000 if kind == "shapes" else 1
    journal(0, *(rows(number + 1) for number in range(count)), *patterns, rule("k*"))
    for rank in range(1, RANKS if kind == "ranks" else 1):
        journal(rank, lambda seed: fmt.frame(Kind.BEAT, fmt.pack({"t": 1}), seed))
    command = [sys.executable, "-c", READ, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{len(keys)} {len(keys)}\n"


def test_a_row_too_short_for_its_flags_gives_no_step(tmp_path):
    from fanfold.journal.directory import last_step

    body = struct.pack("<Iq", 1, 2)
    path = journal_of(tmp_path, fmt.frame(Kind.ROW, body, SEED), fmt.frame(Kind.ROW, body + b"\1\0\0", SEED))
    assert last_step(path) is None
