"""What a sender costs a gateway over ClickHouse follows from the bytes of the whole request, however they are cut or forged."""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from clickhouse_tools import Fleet
from fanfold.clickhouse import decode, intake, profile
from fanfold.fleet.intake import GAP_FREE, GAP_RATIO
from fanfold.fleet.wire import Conflict, Piece, Rejected
from fanfold.journal import Journal, Kind
from fanfold.journal import format as fmt
from fanfold.server import samples
from fleet_tools import pieces_of, until, write_run


@pytest.fixture
def fleet(clickhouse: Any) -> Iterator[Fleet]:
    found = Fleet(clickhouse)
    yield found
    found.close()


def counted(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Count what the gateway asks of the database: the question, and how many rows came."""
    asked: list[tuple[str, int]] = []
    ask = fleet.database.ask

    def counting(sql: str, **parameters: Any) -> dict[str, Any]:
        found = ask(sql, **parameters)
        asked.append((sql, max(map(len, found.values()), default=0)))
        return found

    monkeypatch.setattr(fleet.database, "ask", counting)
    return asked


def forged(id: str, run: str, *bodies: bytes) -> Piece:
    """Make the first piece of a journal out of frames."""
    header = {"format": [1, 0], "journal": id, "run": run, "project": "llm", "rank": 0, "role": "main"}
    return Piece(run, f"0-{id}", 0, 0, fmt.frame(Kind.HEADER, fmt.pack(header), 0) + b"".join(bodies))


def shape(id: str, number: int, keys: list[str], kind: str = "?") -> bytes:
    return fmt.frame(Kind.SHAPE, msgspec.msgpack.encode([number, 0, kind * len(keys), keys, ""]), fmt.seed_of(id))


def row(id: str, number: int, values: bytes, step: int = 0) -> bytes:
    body = number.to_bytes(4, "little") + (10**18).to_bytes(8, "little") + step.to_bytes(4, "little") + values
    return fmt.frame(Kind.ROW, body, fmt.seed_of(id))


def names(count: int) -> list[str]:
    return [f"{number:016x}" for number in random.Random(1).sample(range(1 << 62), count)]


def test_a_request_of_many_pieces_asks_no_more_than_one_of_few(tmp_path, fleet, monkeypatch):
    (whole,) = pieces_of(write_run(tmp_path / "runs"))
    fleet.intake.append("llm", whole)
    asked = counted(fleet, monkeypatch)
    ahead = [Piece("r1", f"0-{id}", 1 << 40, 0, whole.data) for id in names(500)]  # nothing of theirs is here
    found = [fleet.intake.append_all("llm", some).result(60) for some in (ahead[:3], ahead)]
    assert all(isinstance(one, Conflict) and one.offset == 0 for results in found for one in results)
    few = len(asked) - len(asked) // 2
    assert len(asked) <= 2 * few and few <= 3, [sql for sql, _ in asked]


def test_shapes_are_read_only_for_a_piece_that_can_be_taken(fleet, monkeypatch):
    (id,) = names(1)
    first = forged(id, "r1", *(shape(id, number, [f"k{number}"], "d") for number in range(3000)))
    end = fleet.intake.append("llm", first)
    again = intake.ClickHouseIntake(fleet.database, gather=0.0)  # it knows nothing yet, as after a restart
    asked = counted(fleet, monkeypatch)
    value = np.float64(0.5).tobytes()
    for offset in (end + 7, end - 7, 0):
        (result,) = again.append_all("llm", [Piece("r1", f"0-{id}", offset, 0, row(id, 2999, value))]).result(60)
        assert isinstance(result, Conflict) and result.offset == end
    assert again.offset("llm", "r1", f"0-{id}") == end
    assert max(rows for _, rows in asked) <= 1
    assert again.append("llm", Piece("r1", f"0-{id}", end, 0, row(id, 2999, value))) > end
    again.close()
    assert fleet.store().run("llm", "r1").series("k2999").values.tolist() == [0.5]


def test_journals_that_were_forgotten_are_looked_up_again(tmp_path, fleet, monkeypatch):
    monkeypatch.setattr(intake, "REMEMBERED_BYTES", 1)
    files = [write_run(tmp_path / "runs", 100, id=run) for run in ("r1", "r2", "r3")]
    cut = [pieces_of(file, 20, 40, 60, run=run) for file, run in zip(files, ("r1", "r2", "r3"), strict=True)]
    for pieces in zip(*cut, strict=True):
        for piece in pieces:
            while True:
                try:
                    fleet.intake.append("llm", piece)
                    break
                except OSError:
                    continue  # pushed out of memory by another: a forwarder tries again, too
    for run in ("r1", "r2", "r3"):
        assert fleet.store().run("llm", run).series("loss").steps.tolist() == list(range(100))


def wide(id: str, run: str, keys: int, rows: int) -> Piece:
    """A point for every byte of a row: the most that bytes can make of themselves."""
    return forged(id, run, shape(id, 0, [str(key) for key in range(keys)]), *(row(id, 0, b"\1" * keys, i) for i in range(rows)))


def test_points_are_limited_in_a_request_and_the_rest_comes_in_the_next(fleet, monkeypatch):
    monkeypatch.setattr(intake, "MOST_POINTS", 50_000)
    ids = names(8)
    left = [wide(id, f"r{at}", 1000, 20) for at, id in enumerate(ids)]
    rounds = []
    while left:
        results = fleet.intake.append_all("llm", left).result(60)
        stored = [result for result in results if isinstance(result, int)]
        assert all(isinstance(result, int) or result.offset == 0 for result in results)
        rounds.append(len(stored))
        left = [piece for piece, result in zip(left, results, strict=True) if not isinstance(result, int)]
    assert rounds == [2, 2, 2, 2]
    assert fleet.database.one("SELECT count() AS n FROM points")["n"] == 8 * 20_000


def test_frames_are_limited_in_a_request_and_the_rest_comes_in_the_next(fleet, monkeypatch):
    monkeypatch.setattr(intake, "MOST_FRAMES", 1000)
    left = [forged(id, f"r{at}", *(shape(id, n, ["a"]) for n in range(400))) for at, id in enumerate(names(4))]
    results = fleet.intake.append_all("llm", left).result(60)
    assert [isinstance(result, int) for result in results] == [True, True, False, False]
    results = fleet.intake.append_all("llm", left[2:]).result(60)
    assert all(isinstance(result, int) for result in results)


def test_requests_that_wait_are_written_in_batches_of_bearable_size(fleet, monkeypatch):
    monkeypatch.setattr(intake, "MOST_BATCH_POINTS", 30_000)
    insert, sizes = fleet.database.insert, []

    def sized(table: str, columns: Any, **options: Any) -> None:
        if table == "points":
            sizes.append(len(columns["value"]))
        insert(table, columns, **options)

    monkeypatch.setattr(fleet.database, "insert", sized)
    fleet.intake.gather = 0.5  # so that all of them wait together
    waiting = [fleet.intake.append_all("llm", [wide(id, f"r{at}", 1000, 20)]) for at, id in enumerate(names(6))]
    assert all(isinstance(result, int) for one in waiting for result in one.result(60))
    assert sum(sizes) == 6 * 20_000 and max(sizes) <= 30_000 + 20_000


def test_requests_that_wait_are_looked_up_and_written_together(tmp_path, fleet, monkeypatch):
    files = [write_run(tmp_path / "runs", 20, id=f"r{number}") for number in range(12)]
    pieces = [(file, *pieces_of(file, 10, run=f"r{number}")) for number, file in enumerate(files)]
    asked, inserts = counted(fleet, monkeypatch), fleet.intake.inserts
    fleet.intake.gather = 1.0  # so that all of them wait together
    waiting = [fleet.intake.append_all("llm", [first]) for _, first, _ in pieces]
    assert all(result > 0 for one in waiting for result in one.result(60))
    # Moved and deleted runs, ends, shapes, whether another gateway was faster, and whether a run was moved to a new name.
    assert len(asked) <= 6, [sql for sql, _ in asked]
    assert fleet.intake.inserts - inserts <= 8  # one for each table
    for request in [fleet.intake.append_all("llm", [second]) for _, _, second in pieces]:
        request.result(60)
    for number in range(12):
        assert fleet.store().run("llm", f"r{number}").series("loss").steps.tolist() == list(range(20))


def test_the_same_bytes_twice_in_a_batch_are_stored_once(tmp_path, fleet):
    (whole,) = pieces_of(write_run(tmp_path / "runs", 50))
    fleet.intake.gather = 1.0  # so that both wait together
    first, second = fleet.intake.append_all("llm", [whole]), fleet.intake.append_all("llm", [whole])
    assert first.result(60) == [len(whole.data)]
    (again,) = second.result(60)
    assert isinstance(again, Conflict) and again.offset == 0  # sent again, it finds that all is there
    unnamed = Piece("r1", "nonsense", 0, 0, b"x")
    again, refused = fleet.intake.append_all("llm", [whole, unnamed]).result(60)
    assert isinstance(again, Conflict) and again.offset == len(whole.data)
    assert isinstance(refused, Rejected)
    assert again.__traceback__ is refused.__traceback__ is None, "an outcome holds all requests of its batch in memory"
    assert fleet.store().run("llm", "r1").series("loss").steps.tolist() == list(range(50))
    assert fleet.database.one("SELECT count() AS n FROM pieces")["n"] == 1


def test_a_batch_is_decoded_while_the_one_before_it_is_stored(tmp_path, fleet, monkeypatch):
    pieces = {run: pieces_of(write_run(tmp_path / "runs", 20, id=run), 10, run=run) for run in ("r1", "r2")}
    begun, free, decoded = threading.Event(), threading.Event(), threading.Event()
    insert, scan = fleet.database.insert, intake.scan

    def held(table: str, columns: Any, **options: Any) -> None:
        if table == "points":
            begun.set()
            assert free.wait(60)
        insert(table, columns, **options)

    monkeypatch.setattr(fleet.database, "insert", held)
    first = fleet.intake.append_all("llm", pieces["r1"][:1])
    assert begun.wait(60)
    monkeypatch.setattr(intake, "scan", lambda data, *more, **apart: (decoded.set(), scan(data, *more, **apart))[1])
    repeated, second = fleet.intake.append_all("llm", pieces["r1"][:1]), fleet.intake.append_all("llm", pieces["r2"][:1])
    assert decoded.wait(60) and not first.done() and not second.done()
    free.set()
    (again,) = repeated.result(60)
    assert isinstance(again, Conflict) and again.offset in (0, pieces["r1"][1].offset)  # by when it was looked at
    for one, run in ((first, "r1"), (second, "r2")):
        assert one.result(60) == [pieces[run][1].offset]
        assert fleet.intake.append_all("llm", pieces[run][1:]).result(60)[0] > pieces[run][1].offset
        assert fleet.store().run("llm", run).series("loss").steps.tolist() == list(range(20))
    assert fleet.database.one("SELECT count() AS n FROM pieces")["n"] == 4


def test_what_arrives_while_a_batch_is_stored_is_one_batch(tmp_path, fleet, monkeypatch):
    runs = [f"r{at}" for at in range(5)]
    pieces = {run: pieces_of(write_run(tmp_path / "runs", 20, id=run), run=run) for run in runs}
    free, stored, decoded = threading.Event(), [], []
    insert, scan = fleet.database.insert, intake.scan

    def held(table: str, columns: Any, **options: Any) -> None:
        if table == "pieces":
            stored.append(len(columns["run"]))
            assert free.wait(60)
        insert(table, columns, **options)

    def scanned(*given: Any, **named: Any) -> Any:
        decoded.append(given)
        return scan(*given, **named)

    monkeypatch.setattr(fleet.database, "insert", held)
    monkeypatch.setattr(intake, "scan", scanned)
    waiting = []
    for at, run in enumerate(runs, 1):  # each one arrives only when the one before it was decoded
        waiting.append(fleet.intake.append_all("llm", pieces[run]))
        assert until(lambda: len(decoded) == at)  # noqa: B023 - asked for at once
        assert until(lambda: bool(stored))
    free.set()
    assert [one.result(60) for one in waiting] == [[len(pieces[run][0].data)] for run in runs]
    assert stored == [1, 4]
    for run in runs:
        assert fleet.store().run("llm", run).series("loss").steps.tolist() == list(range(20))


def test_gaps_are_no_longer_than_what_was_sent_explains(tmp_path, fleet):
    file = write_run(tmp_path / "node")
    (whole,) = pieces_of(file)
    end = fleet.intake.append("llm", whole)
    frame = fmt.frame(200, b"x", fmt.seed_of(file.stem[2:]))
    refused = 0
    for _ in range(12):
        try:
            end = fleet.intake.append("llm", Piece("r1", file.stem, end, 64 << 20, frame))
        except Rejected as error:
            refused += 1
            assert "damaged bytes" in str(error)
    assert refused >= 8
    assert end <= GAP_RATIO * (1 << 20) + GAP_FREE


def ops_event(process: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    table = zlib.compress(msgspec.msgpack.encode(rows), 9)
    return {"event": "ops", "t": 1, "id": process, "table": table, "facts": {"id": process, "node": "n"}}


def ops_row(op: str, count: int) -> dict[str, Any]:
    return {"op": op, "scope": "op", "count": count, "total_ns": 1, "self_ns": 1, "max_ns": 1}


def test_of_many_operator_tables_in_a_piece_only_the_newest_are_unpacked(fleet, monkeypatch):
    unpacked = []
    table_of = profile.table_of
    monkeypatch.setattr(profile, "table_of", lambda event: unpacked.append(event["id"]) or table_of(event))
    (id,) = names(1)
    events = [ops_event(f"process {at % 20}", [ops_row("matmul", at + 1)]) for at in range(400)]
    fleet.intake.append("llm", forged(id, "r1", *(fmt.frame(Kind.EVENT, fmt.pack(event), fmt.seed_of(id)) for event in events)))
    assert len(unpacked) == profile.MOST_TABLES
    found = fleet.database.ask("SELECT process, observed FROM ops FINAL ORDER BY observed")
    assert found["observed"].tolist() == list(range(400 - profile.MOST_TABLES + 1, 401))


def test_a_small_event_that_unpacks_to_very_many_operators_makes_no_rows(fleet):
    (id,) = names(1)
    bomb, fine = ops_event("a", [ops_row("x", 1)] * 100_000), ops_event("b", [ops_row("x", 1)])
    frames = [fmt.frame(Kind.EVENT, fmt.pack(event), fmt.seed_of(id)) for event in (bomb, fine)]
    assert len(frames[0]) < 100_000
    fleet.intake.append("llm", forged(id, "r1", *frames))
    assert fleet.database.ask("SELECT process FROM ops FINAL")["process"].tolist() == [b"b"]


def test_large_shapes_and_long_keys_are_not_kept_in_memory(fleet):
    shapes = (decode._parsed.kept, decode._row_type.kept, decode._series.kept)
    for cache in (*shapes, decode.series_number.kept):
        cache.cache_clear()
    one, two = names(2)
    fleet.intake.append("llm", wide(one, "wide", 10_000, 1))
    assert [cache.cache_info().currsize for cache in shapes] == [0, 0, 0]
    before = decode.series_number.kept.cache_info().currsize
    fleet.intake.append("llm", forged(two, "long", shape(two, 0, ["k" * 20_000]), row(two, 0, b"\1")))
    assert decode.series_number.kept.cache_info().currsize == before
    assert fleet.store().run("llm", "long").series("k" * 20_000).values.tolist() == [True]


def test_a_pulled_journal_with_gaps_reads_as_it_was_sent(tmp_path, fleet):
    file = write_run(tmp_path / "node")
    first, second = pieces_of(file, 3)
    end = fleet.intake.append("llm", first)
    fleet.intake.append("llm", Piece("r1", file.stem, end, 1 << 20, second.data))
    (copy,) = (fleet.store().run("llm", "r1").pulled() / "journal").glob("*.ffj")
    journal = Journal(copy)
    journal.refresh()
    assert (journal.damaged, journal.count("loss")) == (1 << 20, 200)


def test_a_question_about_many_runs_asks_no_more_than_one_about_few(tmp_path, fleet, monkeypatch):
    fleet.ship(write_run(tmp_path / "runs").parents[3])
    store = fleet.store()
    asked: list[str] = []
    later = type(store.database).later
    monkeypatch.setattr(type(store.database), "later", lambda *given, **names: asked.append(given[1]) or later(*given, **names))
    ask = type(store.database).ask
    monkeypatch.setattr(type(store.database), "ask", lambda *given, **names: asked.append(given[1]) or ask(*given, **names))
    counts = []
    for runs in (["r1", "k0"], ["r1", *(f"k{number}" for number in range(500))]):
        asked.clear()
        assert samples.sample(store, samples.SampleQuery("llm", runs, "t")) == {"found": [], "tables": 0}
        counts.append(len(asked))
    assert 0 < counts[1] <= counts[0] + 5
