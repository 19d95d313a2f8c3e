"""What a gateway stores: whole frames at the right offset, exactly once, whoever sends, whatever is sent, wherever it was killed."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import secrets
import sys
import threading
import time
import tracemalloc
import zlib
from pathlib import Path

import pytest

import fanfold
from fanfold.errors import SettingError
from fanfold.fleet.client import Backoff, Client, Unreachable
from fanfold.fleet.forward_journal import Tail
from fanfold.fleet.frames import walk, whole_end
from fanfold.fleet.intake import DirectoryIntake
from fanfold.fleet.limits import Budget, Busy, Rates
from fanfold.fleet.tokens import Tokens
from fanfold.fleet.wire import Conflict, Piece, Rejected, decode, encode
from fanfold.journal import Journal, Kind
from fanfold.journal import format as fmt
from fanfold.store.query import LocalStore
from fleet_tools import Line, bounds, frames_of, kept, pieces_of, write_run


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return write_run(tmp_path / "node")


@pytest.fixture
def intake(tmp_path: Path) -> DirectoryIntake:
    return DirectoryIntake(tmp_path / "store", power=False)


def test_pieces_at_their_offsets_make_the_same_file(journal, intake):
    first, second, third = pieces_of(journal, 3, 90)
    assert intake.offset("llm", "r1", journal.stem) == 0
    assert intake.append("llm", first) == len(first.data)
    for wrong in (first, third):  # sent again, and sent too early
        with pytest.raises(Conflict) as caught:
            intake.append("llm", wrong)
        assert caught.value.offset == len(first.data) == intake.offset("llm", "r1", journal.stem)
    intake.append("llm", second)
    intake.append("llm", third)
    copy = kept(intake.root, journal)
    assert copy.read_bytes() == journal.read_bytes()
    assert oct(copy.stat().st_mode)[-3:] == "600"
    assert {oct(folder.stat().st_mode)[-3:] for folder in copy.parents[:4]} == {"700"}
    assert fanfold.open("r1", dir=intake.root).series("loss").values.tolist() == [1 / (step + 1) for step in range(200)]


def test_bytes_that_are_no_whole_sound_frames_of_this_journal_are_refused(journal, intake, tmp_path):
    first, second = pieces_of(journal, 3)
    other = pieces_of(write_run(tmp_path / "other", id="r2"), 3, run="r2")
    flipped = bytearray(second.data)
    flipped[40] ^= 1
    intake.append("llm", first)
    bad = {
        "torn": second.data[:-1],
        "empty": b"",
        "flipped": bytes(flipped),
        "another journal's": other[1].data,
        "a second header": first.data,
        "noise": secrets.token_bytes(500),
        "sound, then noise": second.data + b"\xfa\xfd",
    }
    for name, data in bad.items():
        with pytest.raises(Rejected) as caught:
            intake.append("llm", Piece("r1", journal.stem, len(first.data), 0, data))
        assert caught.value.status == 422, name
    assert kept(intake.root, journal).read_bytes() == first.data


def test_a_header_must_be_about_the_journal_it_came_for(journal, intake):
    (whole,) = pieces_of(journal)
    rank, _, id = journal.stem.partition("-")
    for piece in (
        Piece("r9", journal.stem, 0, 0, whole.data),
        Piece("r1", f"5-{id}", 0, 0, whole.data),
        Piece("r1", f"{rank}-{'0' * 16}", 0, 0, whole.data),
    ):
        with pytest.raises(Rejected) as caught:
            intake.append("llm", piece)
        assert caught.value.status == 422
    newer = fmt.frame(Kind.HEADER, fmt.pack({"format": [99, 0], "journal": id, "run": "r1", "project": "llm", "rank": 0}), 0)
    with pytest.raises(Rejected, match="Upgrade the gateway"):
        intake.append("llm", Piece("r1", journal.stem, 0, 0, newer))
    assert list(intake.root.rglob("*.ffj")) == []


def test_a_run_belongs_to_the_project_it_is_sent_for(journal, intake):
    (whole,) = pieces_of(journal)
    intake.append("vision", whole)  # moved there since it began in llm
    (run,) = fanfold.runs(dir=intake.root)
    assert (run.project, run.id) == ("vision", "r1")
    assert [row.project for row in LocalStore(intake.root).runs()] == ["vision"]


@pytest.mark.parametrize("name", ["..", ".", "../../x", "/etc", "a/../../b", "a\\b", "...", "%2e%2e", "x" * 900, "ünï", "con\n"])
def test_no_name_leaves_the_store(name, intake, tmp_path):
    file = write_run(tmp_path / "node", 3, id=name, project=name)
    (piece,) = pieces_of(file, run=name)
    intake.append(name, piece)
    (found,) = (tmp_path / "store").rglob("*.ffj")
    assert found.relative_to(intake.root).parts[2:] == ("journal", file.name)
    assert not found.relative_to(intake.root).parts[0].startswith(".")
    assert {entry.name for entry in tmp_path.iterdir()} <= {"store", "node", "cache"}


@pytest.mark.parametrize(
    "journal_name",
    ["../0-0123456789abcdef", "0-0123456789ABCDEF", "0-012345678", "-1-0123456789abcdef", "00-0123456789abcdef", ""],
)
def test_only_names_of_journals_name_journals(journal_name, intake):
    with pytest.raises(Rejected):
        intake.append("llm", Piece("r1", journal_name, 0, 0, b"x"))
    with pytest.raises(Rejected):
        intake.offset("llm", "r1", journal_name)
    for project, run in (("", "r"), ("p", " "), ("p", "a\0b"), ("p" * 1001, "r")):
        with pytest.raises(Rejected):
            intake.offset(project, run, "0-0123456789abcdef")
    assert list(intake.root.iterdir()) == []


def test_a_link_in_the_place_of_a_journal_is_not_followed(journal, intake, tmp_path):
    first, second = pieces_of(journal, 3)
    outside = tmp_path / "outside"
    outside.write_bytes(first.data)
    place = kept(intake.root, journal)
    place.parent.mkdir(parents=True)
    place.symlink_to(outside)
    with pytest.raises(OSError, match="symbolic"):
        intake.append("llm", second)
    assert outside.read_bytes() == first.data


def test_a_write_torn_by_a_kill_is_written_over_wherever_it_was_cut(journal, intake):
    first, second, third = pieces_of(journal, 3, 120)
    place = kept(intake.root, journal)
    place.parent.mkdir(parents=True)
    generator = random.Random(4)
    for cut in [1, 2, 11, 12, 13, len(second.data) - 1, *generator.sample(range(len(second.data)), 25)]:
        place.write_bytes(first.data + second.data[:cut])
        fresh = DirectoryIntake(intake.root, power=False)  # a gateway that just started: it knows nothing
        have = fresh.offset("llm", "r1", journal.stem)
        assert len(first.data) <= have <= len(first.data) + cut
        rest = (second.data + third.data)[have - len(first.data) :]
        fresh.append("llm", Piece("r1", journal.stem, have, 0, rest))
        assert place.read_bytes() == journal.read_bytes()
    place.write_bytes(first.data + bytes(5000))  # a power cut leaves zeros
    assert DirectoryIntake(intake.root).offset("llm", "r1", journal.stem) == len(first.data)


def test_the_end_of_the_last_whole_frame_is_found_from_the_tail_of_a_long_file(tmp_path):
    file = write_run(tmp_path / "node", 30_000)
    journal = Journal(file)
    journal.refresh()
    data = file.read_bytes()
    assert len(data) > 1 << 20
    ends = {end for _, end in bounds(journal.walk(0))}
    large = fmt.frame(Kind.EVENT, fmt.pack({"event": "x", "text": "y" * (2 << 20)}), journal.seed)
    for tail, whole in ((b"", b""), (b"\xfa\xfd\x03", b""), (large[:-5], b""), (large, large)):
        file.write_bytes(data + tail)
        fd = os.open(file, os.O_RDONLY)
        assert whole_end(fd, file, len(data + tail), journal.seed) == len(data + whole)
        os.close(fd)
    assert walk(data, journal.seed, first=True).end == len(data)
    assert walk(data[: len(data) // 2], journal.seed, first=True).end in ends


@pytest.mark.parametrize("which", [0, 50], ids=["header", "row"])
def test_damage_at_the_source_keeps_its_place_and_nothing_damaged_is_stored(journal, intake, which):
    whole = journal.read_bytes()
    frames = frames_of(journal)
    start = sum(map(len, frames[:which]))
    journal.write_bytes(whole[: start + 20] + b"\x00\xfa\xfd!" + whole[start + 24 :])
    os.utime(journal, (0, 0))
    tail = Tail(journal, {})
    tail.offset = 0
    while tail.look() and (read := tail.read(1500)):
        if read.gap:  # a gateway was killed while it wrote this very piece
            kept(intake.root, journal).parent.mkdir(parents=True, exist_ok=True)
            with kept(intake.root, journal).open("ab") as file:
                file.write(b"torn" * 50)
        tail.offset = intake.append("llm", Piece("r1", journal.stem, tail.offset, read.gap, read.data))
    source, copy = Journal(journal), Journal(kept(intake.root, journal))
    source.refresh()
    copy.refresh()
    assert copy.verified == source.verified == len(whole)
    assert copy.damaged == source.damaged == len(frames[which])
    assert copy.column("loss").values.tolist() == source.column("loss").values.tolist()
    assert kept(intake.root, journal).read_bytes()[start : start + len(frames[which])] == bytes(len(frames[which]))


def test_a_frame_that_is_being_written_is_waited_for(journal):
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-7])
    tail = Tail(journal, {})
    tail.offset = 0
    read = tail.read()
    assert read is not None
    tail.offset = len(read.data)
    assert tail.read() is None
    assert tail.look()  # young: it is looked at again
    with journal.open("ab") as file:
        file.write(whole[-7:])
    read_on = tail.read()
    assert read_on is not None
    assert read.data + read_on.data == whole


def _add_events(root: Path, journal: str, sender: int, count: int) -> None:
    """Append frames of one's own, each as soon as the place for it is known."""
    intake, seed = DirectoryIntake(root, power=False), fmt.seed_of(journal.rpartition("-")[2])
    for number in range(count):
        data = fmt.frame(Kind.EVENT, fmt.pack({"event": "alert", "level": str(sender), "s": number, "text": "x" * 5000}), seed)
        offset = 0
        while True:
            try:
                intake.append("llm", Piece("r1", journal, offset, 0, data))
                break
            except Conflict as conflict:
                offset = conflict.offset
            except Rejected:  # at the very start a header is wanted: now we know that there is one
                offset = intake.offset("llm", "r1", journal)


def test_many_gateways_and_threads_at_one_journal_overwrite_nothing(journal, intake):
    (whole,) = pieces_of(journal)
    intake.append("llm", whole)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_add_events, args=(intake.root, journal.stem, n, 300)) for n in range(2)]
    threads = [threading.Thread(target=_add_events, args=(intake.root, journal.stem, n, 300)) for n in range(2, 5)]
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns in the middle of everything
    for one in [*processes, *threads]:
        one.start()
    for one in [*processes, *threads]:
        one.join()
    sys.setswitchinterval(usual)
    assert [one.exitcode for one in processes] == [0, 0]
    copy = Journal(kept(intake.root, journal))
    copy.refresh()
    assert (copy.damaged, copy.tail) == (0, 0)
    marks = [record.data for record in copy.records(Kind.EVENT) if record.data.event == "alert"]
    for sender in range(5):
        assert [mark.s for mark in marks if mark.level == str(sender)] == list(range(300))


def test_blobs_arrive_in_pieces_and_only_under_their_own_name(intake):
    data = secrets.token_bytes(100_000)
    name = hashlib.sha256(data).hexdigest()

    def send(offset: int, end: int, total: int = len(data), content: bytes = data) -> int:
        return intake.blob("llm", "r1", name, offset=offset, total=total, data=content[offset:end])

    assert intake.missing("llm", "r1", [name]) == {name: 0}
    assert send(0, 60_000) == 60_000
    assert intake.missing("llm", "r1", [name]) == {name: 60_000}
    with pytest.raises(Conflict) as caught:
        send(0, 10)
    assert caught.value.offset == 60_000
    assert send(60_000, 100_000) == 100_000
    assert intake.missing("llm", "r1", [name]) == {}
    assert send(0, 10) == 100_000  # it is here: nothing is to be sent
    folder = intake.root / "llm" / "r1" / "blobs"
    assert (folder / name[:2] / name).read_bytes() == data
    assert [file.name for file in folder.rglob("*") if file.is_file()] == [name]

    name = "ab" * 32
    with pytest.raises(Rejected) as refused:
        send(0, 100_000)
    assert refused.value.status == 422
    assert intake.missing("llm", "r1", [name]) == {name: 0}
    for bad in ("../x", "AB" * 32, "ab" * 31):
        with pytest.raises(Rejected):
            intake.missing("llm", "r1", [bad])
    with pytest.raises(Rejected):
        send(0, 10, total=5)
    with pytest.raises(Rejected, match="over this gateway's limit"):
        send(0, 10, total=1 << 45)


def test_a_body_never_unpacks_to_more_than_it_announces():
    piece = Piece("r", "0-0123456789abcdef", 0, 0, bytes(5_000_000))
    body, length = encode([piece])
    assert decode(body, length) == [piece]
    for announced in (length - 1, length + 1, 10, 0):
        with pytest.raises(Rejected):
            decode(body, announced)
    bomb = zlib.compress(bytes(300 << 20))
    tracemalloc.start()
    with pytest.raises(Rejected):
        decode(bomb, 1000)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    for bad in (b"", b"plain", body + b"x", body[:-4], zlib.compress(b"\xc1"), zlib.compress(fmt.pack([]))):
        with pytest.raises(Rejected):
            decode(bad, 1)


def test_a_budget_is_never_exceeded_but_by_one_that_is_alone():
    budget = Budget(100)
    with budget.reserve(60), pytest.raises(Busy) as caught, budget.reserve(60):
        pass
    assert (caught.value.status, budget.used) == (503, 0)
    with budget.reserve(500):
        assert budget.used == 500


def test_a_rate_lets_a_burst_pass_and_then_asks_for_patience():
    now = [0.0]
    rates = Rates(10.0, 100.0, lambda: now[0])
    rates.take("llm", 130)
    with pytest.raises(Busy) as caught:
        rates.check("llm", "project llm")
    assert caught.value.status == 429
    assert caught.value.seconds == pytest.approx(3.1)
    rates.check("vision", "project vision")
    now[0] = 3.2
    rates.check("llm", "project llm")
    now[0] = 1e6
    assert rates.left("llm") == 100.0


def test_pauses_grow_to_a_minute_and_never_undercut_what_the_gateway_asks():
    longest = Backoff(lambda _low, high: high)
    assert [longest.fail() for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]
    assert longest.fail(after=30) == 90
    assert len({Backoff().fail() for _ in range(50)}) > 40  # a thousand nodes do not come back at one moment


def test_on_a_line_that_breaks_less_is_sent_at_once():
    line = Line(9, cut=1.0)  # nobody is there, and everything breaks
    client = Client(line.url, timeout=5)
    rooms = [client.room]
    for _ in range(3):
        with pytest.raises(Unreachable):
            client.append("llm", [Piece("r", "0-0123456789abcdef", 0, 0, b"x")])
        rooms.append(client.room)
    line.close()
    assert rooms == [1 << 20, 1 << 19, 1 << 18, 1 << 17]


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://user:secret@host", "http://host?token=x"])
def test_an_address_with_a_secret_or_without_a_host_is_refused(url):
    with pytest.raises(SettingError) as caught:
        Client(url)
    assert "secret" not in str(caught.value)


def test_tokens_are_kept_as_hashes_in_a_private_file_and_end_at_once(tmp_path):
    path = tmp_path / "t" / ".tokens.json"
    tokens, elsewhere = Tokens(path), Tokens(path)
    token, word = tokens.create("cluster", projects=["llm"], scopes=["write"])
    _, brief = tokens.create("brief", projects=["*"], scopes=["read"], seconds=0.0)
    assert word not in path.read_text()
    assert oct(path.stat().st_mode)[-3:] == "600"
    found = elsewhere.find(word)
    assert found == token
    assert [found.allows(*what) for what in (("write", "llm"), ("read", "llm"), ("write", "vision"), ("write", "*"))] == [
        True,
        False,
        False,
        False,
    ]
    for wrong in ("", word[:-1], word + "x", f"ffk_{token.id}_", "Bearer", "ffk_00000000_x", brief):
        assert elsewhere.find(wrong) is None
    elsewhere.revoke(token.id)
    assert tokens.find(word) is None
    with pytest.raises(SettingError, match="no token"):
        tokens.revoke(token.id)
    with pytest.raises(SettingError, match="needs a scope"):
        tokens.create("x", projects=["llm"], scopes=[])
    path.chmod(0o644)
    with pytest.raises(SettingError, match="chmod 600"):
        Tokens(path).find(word)


def test_a_copy_without_a_lock_is_running_while_it_grows(intake, tmp_path, monkeypatch):
    file = write_run(tmp_path / "node", 5)
    frames = frames_of(file)[:-1]  # without its end
    intake.append("llm", Piece("r1", file.stem, 0, 0, b"".join(frames)))
    assert fanfold.open("r1", dir=intake.root).status == "running"
    later = time.time() + 61
    monkeypatch.setattr(time, "time", lambda: later)
    assert fanfold.open("r1", dir=intake.root).status in ("lost", "killed")
