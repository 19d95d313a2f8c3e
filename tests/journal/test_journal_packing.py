"""Packed journals: every byte comes back, whatever it was; a kill leaves a readable run; damage and forgery are told, not obeyed."""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
import tracemalloc
import zlib
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fanfold
from fanfold import errors
from fanfold.errors import JournalError
from fanfold.journal import Journal, blocks, packed, packing
from fanfold.journal import format as fmt
from fanfold.journal.directory import journal_files, last_step, read_header
from fanfold.journal.format import Kind, Layout, Shape
from paths import GOLDEN
from store_data import Call, write_run

ID = "00f0e1d2c3b4a596"
SEED = fmt.seed_of(ID)
START = 1_790_000_000_000_000_000


# The bytes, as docs/journal.md describes them, read without numpy and without our own code


def plain_unpack(data: bytes) -> bytes:
    """Read a packed file by the book."""
    magic, version, journal, size, digest, table, count, table_crc = struct.unpack_from("<6sHQQ32sQII", data)
    assert (magic, version, crc32(data[:72])) == (b"FFPACK", 1, int.from_bytes(data[72:76], "little"))
    assert crc32(data[table:]) == table_crc
    assert len(data) == table + 12 * count
    at, raw = 76, b""
    for length, stored, crc in struct.iter_unpack("<III", data[table:]):
        assert crc32(data[at : at + stored]) == crc
        raw += plain_block(zlib.decompress(data[at : at + stored]), crc32(journal.to_bytes(8, "little")))
        at += stored
        assert length <= 1 << 20
    assert len(raw) == size
    assert hashlib.sha256(raw).digest() == digest
    return raw


def plain_block(data: bytes, seed: int) -> bytes:
    count, layouts = struct.unpack_from("<II", data)
    pieces, at, heads = list(struct.iter_unpack("<II", data[8 : 8 + 8 * count])), 8 + 8 * count, []
    for _ in range(layouts):
        head, shape, rows, spans = struct.unpack_from("<8s4sII", data, at)
        heads.append((head, shape, rows, list(struct.iter_unpack("<III", data[at + 20 : at + 20 + 12 * spans]))))
        at += 20 + 12 * spans
    plain = sum(length for kind, length in pieces if kind == 0)
    stretches, at = [data[at : at + plain]], at + plain
    for head, shape, rows, spans in heads:
        width = int.from_bytes(head[4:], "little") - 4
        stretches.append(b"".join(plain_rows(data[at : at + rows * width], head, shape, rows, spans, seed)))
        at += rows * width
    assert at == len(data)
    places, raw = [0] * len(stretches), b""
    for kind, length in pieces:
        size = length if kind == 0 else length * (12 + int.from_bytes(heads[kind - 1][0][4:], "little"))
        raw += stretches[kind][places[kind] : places[kind] + size]
        places[kind] += size
    return raw


def plain_rows(planes: bytes, head: bytes, shape: bytes, rows: int, spans: list[tuple[int, int, int]], seed: int):
    last = {}
    for row in range(rows):
        frame = bytearray(16) + planes[row::rows]
        for offset, width, count in spans:
            for place in range(offset, offset + width * count, width):
                number = int.from_bytes(frame[place : place + width], "little") + last.get(place, 0)
                last[place] = number % (1 << 8 * width)
                frame[place : place + width] = last[place].to_bytes(width, "little")
        body = shape + bytes(frame[16:])
        yield head + crc32(body, crc32(head[2:], seed)).to_bytes(4, "little") + body


def written(monkeypatch: pytest.MonkeyPatch, folder: Path, data: bytes) -> Path:
    """Pack bytes, however little it gains."""
    monkeypatch.setattr(packing, "GAIN", 100.0)
    path = folder / f"3-{ID}.ffj"
    path.write_bytes(data)
    made = packing.pack(path)
    assert made is not None
    assert not path.exists()
    return made.path


def test_the_golden_packed_file_gives_back_the_golden_journal(tmp_path, monkeypatch):
    golden, raw = (GOLDEN / f"3-{ID}.ffz").read_bytes(), (GOLDEN / f"3-{ID}.ffj").read_bytes()
    assert plain_unpack(golden) == raw
    assert packed.unpacked(GOLDEN / f"3-{ID}.ffz", tmp_path).read_bytes() == raw
    # Compressors differ in the bytes they choose; what is compressed must not.
    now = written(monkeypatch, tmp_path, raw).read_bytes()
    assert [now[:64], _inflated(now)] == [golden[:64], _inflated(golden)]


def _inflated(data: bytes) -> bytes:
    return zlib.decompressobj().decompress(data[76:])


def test_a_file_of_many_blocks_is_read_by_the_book(tmp_path):
    noise = np.random.default_rng(1).standard_normal((30_000, 5))
    steps = ({"a": a, "b": float(np.float32(b)), "n": n} for n, (a, b, *_) in enumerate(noise.tolist()))
    folder = write_run(tmp_path, [Call(0, 0, n, int(1e7 + 1e5 * noise[n, 2]), row) for n, row in enumerate(steps)])
    (path,) = journal_files(folder)
    raw, before = path.read_bytes(), path.stat()
    made = packing.pack(path)
    assert made is not None
    assert (made.raw, made.stored) == (len(raw), made.path.stat().st_size)
    assert made.stored < 0.55 * made.raw
    assert (made.path.stat().st_mtime_ns, made.path.stat().st_mode) == (before.st_mtime_ns, before.st_mode)
    assert plain_unpack(made.path.read_bytes()) == raw
    assert journal_files(folder) == [made.path]
    with packed.opened(made.path) as file:
        for at in (0, 5, 999_999, 1_048_570, len(raw) - 7):
            assert file.seek(at) == at
            assert file.read(100_000) == raw[at : at + 100_000]
    assert read_header(made.path).run == "r"
    assert last_step(made.path) == 29_999
    assert not (tmp_path / "cache" / "unpacked").exists()  # neither needs the whole journal


# Any bytes at all


@st.composite
def journals(draw: st.DrawFn) -> bytes:
    """Make a journal of every layout, in any order, with texts and frames between, damaged here and there, and torn."""
    shapes = draw(st.lists(_shapes(), min_size=1, max_size=4))
    frames = [fmt.frame(Kind.HEADER, fmt.pack({"format": [1, 0]}), 0)]
    for number, shape in enumerate(shapes):
        shapes[number] = Shape(number, shape.layout, shape.types, shape.keys)
        frames.append(fmt.frame(Kind.SHAPE, shapes[number].body(), SEED))
    for _ in range(draw(st.integers(1, 12))):
        shape, count = draw(st.sampled_from(shapes)), draw(st.integers(1, 30))
        first = draw(st.binary(min_size=shape.size, max_size=shape.size))
        for row in range(count):
            body = struct.pack("<Iq", shape.id, START + row * 1000) + bytes((byte + row) % 256 for byte in first[12:])
            frames.append(fmt.frame(Kind.ROW, body, SEED, shape.layout))
        if draw(st.booleans()):
            frames.append(fmt.frame(Kind.VALUES, draw(st.binary(max_size=900)), SEED))
    return _damaged(draw, b"".join(frames))


def _shapes() -> st.SearchStrategy[Shape]:
    steps = st.sampled_from([0, Layout.STEP_WIDE, Layout.STEP_NONE])
    calls = st.sampled_from([0, Layout.PENDING, Layout.LATE])
    types = st.text("dq?", max_size=8)
    return st.builds(lambda step, call, types: Shape(0, int(step | call), types, tuple(types)), steps, calls, types)


def _damaged(draw: st.DrawFn, data: bytes) -> bytes:
    spoiled = bytearray(data)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(spoiled) - 1))
        spoiled[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(spoiled[: len(spoiled) - draw(st.integers(0, 40))])


def round_trip(data: bytes) -> bytes:
    packer, at, raw = blocks.BlockPacker(data, ID), 0, b""
    while at < len(data):
        end, stored = packer.block(at)
        assert at < end <= at + blocks.BLOCK
        raw += blocks.unpack(stored, end - at, SEED)
        assert raw[at:end] == plain_block(zlib.decompress(stored), SEED)
        at = end
    return raw


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=journals(), edge=st.sampled_from([(256, 128), (1024, 256), (1 << 20, 1 << 16)]))
def test_any_journal_comes_back_byte_for_byte(data, edge):
    with pytest.MonkeyPatch.context() as patch:  # small blocks: their edges fall everywhere
        patch.setattr(blocks, "BLOCK", edge[0])
        patch.setattr(blocks, "LONGEST_ROW", edge[1])
        assert round_trip(data) == data


@pytest.mark.parametrize(
    "data",
    [
        b"\xfa",
        b"\xfa\xfd\x03\x00" * 3000,
        bytes(3 << 20),
        np.random.default_rng(2).bytes(3 << 20),
        fmt.frame(Kind.CONSOLE, bytes(5 << 20), SEED) + fmt.frame(Kind.ROW, bytes(30), SEED) * 3000,
        b"".join(fmt.frame(Kind.ROW, struct.pack("<Iq", n, n), SEED, n % 16) for n in range(8000)),
    ],
)
def test_what_is_hardly_a_journal_comes_back_too(data):
    assert round_trip(data) == data


@settings(max_examples=300, deadline=None)
@given(changes=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=4), cut=st.integers(0, 50))
def test_a_forged_block_is_refused_and_never_read_past_its_length(changes, cut):
    data = (GOLDEN / f"3-{ID}.ffj").read_bytes()
    content = bytearray(zlib.decompress(blocks.BlockPacker(data, ID).block(0)[1]))
    for at, value in changes:
        content[at % (80 if at % 2 else len(content))] = value
    stored = zlib.compress(bytes(content[: len(content) - cut]))
    try:
        assert len(blocks.unpack(stored, len(data), SEED)) == len(data)
    except JournalError as error:
        assert "packed block" in str(error)


def test_a_few_bytes_cannot_promise_gigabytes(tmp_path):
    bomb = zlib.compress(bytes(1 << 26), 9)
    tracemalloc.start()
    with pytest.raises(JournalError, match="longer than it says"):
        blocks.unpack(bomb, 1 << 20, SEED)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20
    path = tmp_path / f"3-{ID}.ffz"
    for table in ([(1 << 30, 10, 0)], [(10, 1 << 30, 0)], [(0, 10, 0)], [(100, 10, 0)], [(50, 10, 0)] * 2):
        entries = b"".join(struct.pack("<III", *entry) for entry in table)
        head = struct.pack("<6sHQQ32sQII", b"FFPACK", 1, 1, 1 << 50, bytes(32), 86, len(table), crc32(entries))
        path.write_bytes(head + crc32(head).to_bytes(4, "little") + bytes(10) + entries)
        with pytest.raises(JournalError, match="cannot be unpacked"):
            packed.unpacked(path, tmp_path)


# Damage


@pytest.fixture
def two_ranks(tmp_path) -> Path:
    """A run of two ranks, both packed; rank 0 in three blocks."""
    calls = [Call(0, 0, n, 1000, {"loss": math.sin(n), "k": float(n)}) for n in range(60_000)]
    folder = write_run(tmp_path, [*calls, *(Call(0, 1, n, 1000, {"loss": float(n)}) for n in range(5000))])
    assert all(packing.pack(path) for path in journal_files(folder))
    return folder


def spoil(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


def test_a_damaged_block_costs_what_was_logged_in_it_and_says_so(two_ranks, caplog):
    path = journal_files(two_ranks)[0]
    with packed.open_packed(path) as file:
        hit = file.entries[1]
    spoil(path, hit.at + 1000)
    run = fanfold.open(two_ranks)
    steps = run.series("loss").steps
    assert steps[0] == 0
    assert steps[-1] == 59_999
    assert 0.9 * hit.length < (60_000 - len(steps)) * 44 < 1.1 * hit.length
    assert run.damaged == pytest.approx(hit.length, abs=100)
    assert len(run.series("loss", rank=1)) == 5000
    (said,) = [record.message for record in caplog.records]
    assert f"{path} is damaged at byte {hit.at}" in said
    assert f"bytes {hit.start} to {hit.start + hit.length} of that journal is lost; the rest is read" in said
    assert "Restore the file from a copy" in said
    spoil(path, hit.at + 1000)  # restored
    assert len(fanfold.open(two_ranks).series("loss")) == 60_000


@pytest.mark.parametrize(
    ("at", "why"),
    [(3, "its first bytes are damaged"), (60, "its first bytes are damaged"), (-3, "the table of its blocks is damaged")],
)
def test_a_damaged_head_costs_one_journal_and_says_so(two_ranks, caplog, at, why):
    path = journal_files(two_ranks)[0]
    spoil(path, at)
    run = fanfold.open(two_ranks)
    assert run.ranks == [1]
    assert len(run.series("loss", rank=1)) == 5000
    (said,) = [record.message for record in caplog.records]
    assert said.startswith(
        f"fanfold: {path} cannot be unpacked: {why}. What that process logged is not shown; other journals of the run are"
    )
    assert said.endswith("Restore the file from a copy.")


@pytest.fixture
def unpackings(monkeypatch) -> list[int]:
    """The lengths of the blocks that were unpacked, in order."""
    found: list[int] = []
    real = blocks.unpack

    def unpack(stored: bytes, length: int, seed: int) -> bytes:
        found.append(length)
        return real(stored, length, seed)

    monkeypatch.setattr(blocks, "unpack", unpack)
    return found


def give_other_digest(path: Path) -> None:
    """Let a packed journal promise content that it does not hold, with every checksum right."""
    data = bytearray(path.read_bytes())
    data[24] ^= 0xFF
    data[packed.HEAD_SIZE - 4 : packed.HEAD_SIZE] = crc32(data[: packed.HEAD_SIZE - 4]).to_bytes(4, "little")
    path.write_bytes(data)


@pytest.mark.parametrize("fault", ["other content", "a damaged block"])
def test_what_is_wrong_with_a_packed_journal_is_found_out_once(two_ranks, unpackings, fault, tmp_path, caplog):
    path = journal_files(two_ranks)[0]
    if fault == "other content":
        give_other_digest(path)
    else:
        with packed.open_packed(path) as file:
            spoil(path, file.entries[1].at + 1000)
    time.sleep(packed.SETTLED_NS / 1e9 + 0.1)
    ranks = fanfold.open(two_ranks).ranks
    first = len(unpackings)
    assert first >= 2
    for _ in range(3):
        assert fanfold.open(two_ranks).ranks == ranks
        shutil.rmtree(tmp_path / "cache" / "index", ignore_errors=True)
    assert len(unpackings) == first
    assert len({record.message for record in caplog.records}) == 1
    copy = path.with_suffix(".copy")  # the verdict is about this very file: the same bytes elsewhere are judged again
    shutil.copyfile(path, copy)
    copy.replace(path)
    fanfold.open(two_ranks)
    assert len(unpackings) > first


def test_a_file_that_claims_to_be_another_journal_does_not_spoil_that_one(two_ranks, tmp_path):
    path = journal_files(two_ranks)[0]
    forged = tmp_path / "forged" / path.name
    forged.parent.mkdir()
    with packed.open_packed(path) as file:
        entry = file.entries[0]
    shutil.copyfile(path, forged)
    spoil(forged, entry.at + 10)
    time.sleep(packed.SETTLED_NS / 1e9 + 0.1)
    assert packed.readable(forged).suffix == ".damaged"
    assert packed.readable(path).suffix == ".ffj"
    assert len(fanfold.open(two_ranks).series("loss")) == 60_000


def test_a_newer_packed_format_asks_for_an_upgrade(two_ranks):
    path = journal_files(two_ranks)[0]
    data = bytearray(path.read_bytes())
    data[6] = 9
    path.write_bytes(data)
    with pytest.raises(JournalError, match=r"of packed format 9, and this fanfold reads up to 1\..*Upgrade fanfold"):
        fanfold.open(two_ranks)


# The cache


def test_what_was_unpacked_is_kept_until_others_need_the_room(tmp_path, monkeypatch):
    folder = write_run(tmp_path, [Call(0, rank, n, 10, {"x": float(n)}) for rank in range(3) for n in range(3000)])
    raw = {path.stem: path.read_bytes() for path in journal_files(folder)}
    assert all(packing.pack(path) for path in journal_files(folder))
    cache, files = tmp_path / "cache" / "unpacked", journal_files(folder)
    monkeypatch.setattr(packed, "CACHE_BYTES", 2 * len(raw[files[0].stem]) + 10_000)
    made = [packed.readable(path) for path in files[:2]]
    for when, path in enumerate(made):
        os.utime(path, (when, path.stat().st_mtime))
    inode = made[0].stat().st_ino
    assert packed.readable(files[0]) == made[0]
    assert made[0].stat().st_ino == inode  # made once
    journal = Journal(files[1])
    journal.refresh()
    os.utime(made[1], (1, 1))
    third = packed.readable(files[2])
    assert sorted(cache.iterdir()) == sorted([made[0], third])  # the one not used for longest is gone
    journal.refresh()
    assert journal.column("x").values.tolist() == [float(n) for n in range(3000)]  # and stays whole where it is open
    assert [packed.readable(path).read_bytes() for path in files] == list(raw.values())
    shutil.rmtree(cache)
    assert len(fanfold.open(folder).series("x", rank=2)) == 3000


def test_no_room_to_unpack_is_told_and_nothing_is_lost(two_ranks, tmp_path, monkeypatch, caplog):
    (tmp_path / "full").write_text("a file, where a folder is wanted")
    monkeypatch.setenv("FANFOLD_CACHE_DIR", str(tmp_path / "full"))
    with pytest.raises(JournalError, match=r"cannot be unpacked to .* nothing is lost. Make room there, or name another"):
        packed.readable(journal_files(two_ranks)[0])
    assert fanfold.open(two_ranks).ranks == []
    assert len(caplog.records) == 2
    errors.notices.counts.clear()
    monkeypatch.setenv("FANFOLD_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert fanfold.open(two_ranks).ranks == [0, 1]


# Being killed, and being disturbed

KILL = """
import os, signal, sys
from pathlib import Path
from fanfold.journal import packing
path, stage, count = Path(sys.argv[1]), int(sys.argv[2]), 0
def hook(event, args):
    global count
    if event in ("open", "os.rename", "os.remove", "os.chmod", "os.utime", "os.chown") and str(path.parent) in str(args[0]):
        count += 1
        if count == stage:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(hook)
assert packing.pack(path)
"""


def test_a_kill_at_any_moment_leaves_the_whole_run(tmp_path):
    folder = write_run(tmp_path, [Call(0, 0, n, 10, {"x": float(n)}) for n in range(5000)])
    (path,) = journal_files(folder)
    raw, kept, seen = path.read_bytes(), path.stat(), []
    for stage in range(1, 30):
        done = subprocess.run([sys.executable, "-c", KILL, str(path), str(stage)], check=False, timeout=60)
        seen.append(frozenset("aside" if file.name.startswith(".") else file.suffix for file in (folder / "journal").iterdir()))
        (there,) = journal_files(folder)
        assert there.suffix == (".ffj" if ".ffj" in seen[-1] else ".ffz")
        assert packed.readable(there).read_bytes() == raw
        assert len(fanfold.open(folder).series("x")) == 5000
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
        for left in (folder / "journal").glob(".*"):
            left.unlink()
        (folder / "journal" / path.with_suffix(".ffz").name).unlink(missing_ok=True)
        path.write_bytes(raw)
        os.utime(path, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    assert done.returncode == 0
    assert set(seen) == {frozenset({".ffj"}), frozenset({".ffj", "aside"}), frozenset({".ffj", ".ffz"}), frozenset({".ffz"})}
    assert len(seen) >= 7


def test_a_journal_that_grows_while_it_is_packed_stays(tmp_path):
    folder = write_run(tmp_path, [Call(0, 0, n, 10, {"x": float(n)}) for n in range(5000)])
    (path,) = journal_files(folder)
    steps = packing.packing(path)
    next(steps)
    more = fmt.frame(Kind.INFO, fmt.pack({"t": 1, "notes": "late"}), fmt.seed_of(path.stem.partition("-")[2]))
    with path.open("ab") as file:
        file.write(more)
    assert list(steps)[-1] > 0
    assert [file.name for file in (folder / "journal").iterdir()] == [path.name]
    assert packing.pack(path) is not None
    assert fanfold.open(folder).notes == "late"


def test_what_does_not_unpack_to_the_same_bytes_never_takes_the_journals_place(tmp_path, caplog):
    folder = write_run(tmp_path, [Call(0, 0, n, 10, {"x": float(n)}) for n in range(90_000)])
    (path,) = journal_files(folder)
    raw, steps = path.read_bytes(), packing.packing(path)
    while next(steps) < len(raw):
        pass
    next(steps)  # it is written, and its first block found to be right
    (aside,) = (folder / "journal").glob(".*")
    spoil(aside, int(0.9 * aside.stat().st_size))  # a disk that lies
    with pytest.raises(JournalError, match=r"does not unpack to the same bytes\. The journal stays as it is; nothing is lost"):
        list(steps)
    assert [file.name for file in (folder / "journal").iterdir()] == [path.name]
    assert path.read_bytes() == raw
    assert caplog.records == []  # nothing was lost, and nothing says so


def test_what_hardly_gets_smaller_stays(tmp_path):
    path = tmp_path / f"0-{ID}.ffj"
    for size in (1 << 18, 10 << 20):  # all of it, and a sample of it
        path.write_bytes(np.random.default_rng(3).bytes(size))
        assert packing.pack(path) is None
        assert packing.estimate(path) > 0.9 * size
    assert [file.name for file in tmp_path.glob("*0-*")] == [path.name]


def test_a_packed_journal_put_back_can_grow_again(tmp_path):
    folder = write_run(tmp_path, [Call(0, 0, n, 10, {"x": float(n)}) for n in range(5000)])
    (path,) = journal_files(folder)
    raw, before = path.read_bytes(), path.stat().st_mtime_ns
    made = packing.pack(path)
    assert packing.restore(made.path) == path
    assert (path.read_bytes(), path.stat().st_mtime_ns) == (raw, before)
    assert [file.name for file in (folder / "journal").iterdir()] == [path.name]


if __name__ == "__main__" and not (GOLDEN / f"3-{ID}.ffz").exists():
    with pytest.MonkeyPatch.context() as patch:
        folder = GOLDEN / "new"
        folder.mkdir()
        written(patch, folder, (GOLDEN / f"3-{ID}.ffj").read_bytes()).rename(GOLDEN / f"3-{ID}.ffz")
        folder.rmdir()


# Packs that would take far more room than they are long


def bomb(first: bytes, count: int) -> bytes:
    """A sound packed file, its hash included: a journal's bytes and then so many blocks of zeros."""
    contents = [first] + [bytes(1 << 20)] * count
    stored = {raw: zlib.compress(struct.pack("<IIII", 1, 0, 0, len(raw)) + raw, 9) for raw in set(contents)}
    table = b"".join(struct.pack("<III", len(raw), len(stored[raw]), crc32(stored[raw])) for raw in contents)
    body, digest = b"".join(stored[raw] for raw in contents), hashlib.sha256(b"".join(contents)).digest()
    size, place = sum(map(len, contents)), 76 + len(body)
    head = struct.pack("<6sHQQ32sQII", b"FFPACK", 1, int(ID, 16), size, digest, place, len(contents), crc32(table))
    return head + crc32(head).to_bytes(4, "little") + body + table


def test_a_pack_beyond_the_ratio_unpacks_nothing_and_hides_no_other_run(tmp_path, two_ranks):
    cache, root = tmp_path / "cache", two_ranks.parent.parent
    evil = root / "evil" / "bomb" / "journal"
    evil.mkdir(parents=True)
    (evil / f"0-{ID}.ffz").write_bytes(bomb(b"x", 100))
    command = [sys.executable, "-m", "fanfold", "ls", "--json", "--dir", str(root)]
    environment = {**os.environ, "FANFOLD_CACHE_DIR": str(cache)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment)
    assert f'"{two_ranks.name}"' in done.stdout
    assert "at most 64 times its size are allowed" in done.stderr
    room = sum(path.stat().st_size for path in (cache / "unpacked").iterdir())
    assert room < 64 * sum(path.stat().st_size for path in root.rglob("*.ffz") if "evil" not in path.parts)


def test_a_journal_that_packs_too_well_is_packed_less_and_stays_readable(tmp_path):
    folder = write_run(tmp_path, [Call(0, 0, n, 1000, {f"k{i}": 0.0 for i in range(40)}) for n in range(30_000)])
    (path,) = journal_files(folder)
    raw = path.read_bytes()
    done = packing.pack(path)
    assert done is not None
    assert 8 < done.raw / done.stored <= blocks.MOST_RATIO
    assert packed.unpacked(done.path, tmp_path).read_bytes() == raw
    assert plain_unpack(done.path.read_bytes()) == raw
