"""The bytes of a frame: what is in them, what they refuse, and that both ways of packing a row agree."""

from __future__ import annotations

import struct
from pathlib import Path
from zlib import crc32

import pytest

from fanfold.errors import JournalError
from fanfold.journal import format as fmt
from fanfold.journal.directory import decode_name, encode_name, last_step, read_header
from fanfold.journal.format import Kind, Layout, Shape
from fanfold.journal.writer import Packer, Writer

ID = "00f0e1d2c3b4a596"


def test_a_frame_is_magic_kind_flags_length_crc_and_body():
    seed = fmt.seed_of(ID)
    made = fmt.frame(Kind.ROW, b"body", seed, flags=8)
    expected_crc = crc32(b"\x03\x08\x04\x00\x00\x00" + b"body", seed)
    assert made == b"\xfa\xfd\x03\x08\x04\x00\x00\x00" + expected_crc.to_bytes(4, "little") + b"body"


def test_the_checksum_starts_from_the_journals_id():
    assert fmt.seed_of(ID) == crc32(bytes.fromhex("96a5b4c3d2e1f000"))
    assert fmt.frame(Kind.ROW, b"body", fmt.seed_of(ID))[:8] == fmt.frame(Kind.ROW, b"body", 0)[:8]
    assert fmt.frame(Kind.ROW, b"body", fmt.seed_of(ID)) != fmt.frame(Kind.ROW, b"body", 0)


def test_the_checksum_covers_kind_flags_and_length():
    sums = {fmt.frame(kind, body, 7, flags)[8:12] for kind in (3, 4) for flags in (0, 1) for body in (b"", b"\0")}
    assert len(sums) == 8


def test_the_magic_never_stands_in_text():
    assert not any(fmt.MAGIC_BYTES in chr(code).encode() for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    with pytest.raises(UnicodeDecodeError):
        fmt.MAGIC_BYTES.decode()


def test_a_body_over_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr(fmt, "MAX_BODY", 10)
    with pytest.raises(JournalError, match="11 bytes is over the limit of 10"):
        fmt.frame(Kind.VALUES, b"x" * 11, 0)


@pytest.mark.parametrize(
    ("layout", "codes", "size"),
    [
        (0, "<Iqid?q", 33),
        (Layout.STEP_WIDE, "<Iqqd?q", 37),
        (Layout.STEP_NONE, "<Iqd?q", 29),
        (Layout.PENDING, "<IqiIHd?q", 39),
        (Layout.LATE, "<IqiId?q", 37),
        (Layout.LATE | Layout.STEP_WIDE, "<IqqId?q", 41),
    ],
)
def test_a_layout_says_what_stands_before_the_values(layout, codes, size):
    shape = Shape(1, layout, "d?q", ("a", "b", "c"))
    assert (shape.codes, shape.size) == (codes, size)


def test_a_shape_comes_back_from_its_frame():
    shape = Shape((1 << 32) - 1, Layout.STEP_WIDE, "dq?", ("", "ключ", "a" * 100_000), "system")
    assert Shape.parse(shape.body()) == shape


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        fmt.pack({"id": 1}),
        fmt.pack([1, 0, "d", ["a"]]),
        fmt.pack([1, 0, "dd", ["a"], ""]),
        fmt.pack([1, 0, "x", ["a"], ""]),
        fmt.pack([1, 0, "d", [1], ""]),
        fmt.pack([-1, 0, "d", ["a"], ""]),
        fmt.pack([1 << 32, 0, "d", ["a"], ""]),
        fmt.pack([1, 64, "d", ["a"], ""]),
        b"\x91" * 5000,
    ],
)
def test_a_forged_shape_is_refused(body):
    with pytest.raises(JournalError):
        Shape.parse(body)


@pytest.mark.parametrize("journal_id", ["", "00F0E1D2C3B4A596", "00f0e1d2c3b4a59", "../../etc/passwd", "00f0e1d2c3b4a59g"])
def test_what_is_no_journal_id_is_refused(journal_id):
    with pytest.raises(JournalError, match="is not a journal id"):
        fmt.check_id(journal_id)


def test_the_fast_packer_writes_the_same_bytes_as_frame():
    shape, seed = Shape(3, 0, "dq?", ("a", "b", "c")), fmt.seed_of(ID)
    packer = Packer(shape, seed)
    body = packer.pack(packer.id, 123456789, -5, 0.1, 1 << 62, True)
    assert body == struct.pack("<Iqidq?", 3, 123456789, -5, 0.1, 1 << 62, True)
    assert packer.head + crc32(body, packer.crc).to_bytes(4, "little") + body == fmt.frame(Kind.ROW, body, seed)


def open_writer(folder: Path, **header: object) -> Writer:
    return Writer(folder, {"format": [fmt.MAJOR, fmt.MINOR], "rank": 0, "role": "main", "attempt": "a", **header})


def test_the_header_alone_can_be_read_as_soon_as_it_is_there(tmp_path):
    writer = open_writer(tmp_path, run="r")
    path = writer.sheet.path
    header = read_header(path)
    assert (header.run, header.journal, header.follows) == ("r", path.stem[2:], None)
    assert read_header(tmp_path / "0-0000000000000000.ffj") is None
    writer.close(None)


def test_the_last_step_is_found_behind_a_long_tail_without_steps(tmp_path):
    writer = open_writer(tmp_path)
    writer.row({"a": 1.0}, "d", time_ns=0, step=41)
    writer.row({"a": 1.0}, "d", time_ns=0, step=1 << 40)
    assert last_step(writer.sheet.path) == 1 << 40
    writer.append((Kind.INFO, {"filler": "x" * (1 << 20)}))
    assert last_step(writer.sheet.path) == 1 << 40
    writer.append((Kind.VALUES, {"s": 1 << 41, "t": 0, "v": {"text": "x"}}))
    assert last_step(writer.sheet.path) == 1 << 41
    writer.close(None)


def test_a_journal_without_steps_has_no_last_step(tmp_path):
    writer = open_writer(tmp_path)
    writer.row({"a": 1.0}, "d", time_ns=0, step=None, origin="system")
    assert last_step(writer.sheet.path) is None
    writer.close(None)


@pytest.mark.parametrize("name", [".", "..", "../../x", "a/b", "", ".hidden", "x" * 5000, "é" * 300, "a\ud800b", "NUL\0", "日本"])
def test_no_name_leaves_its_folder(name):
    component = encode_name(name)
    assert component
    assert "/" not in component
    assert "\0" not in component
    assert not component.startswith(".")
    assert len(component.encode()) <= 255


@pytest.mark.parametrize("name", ["plain", "with space", "50%", "日本", ".hidden", "a/b", "loss@2=x+y"])
def test_a_short_name_comes_back(name):
    assert decode_name(encode_name(name)) == name
