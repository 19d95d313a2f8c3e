"""The whole way past one machine, with real processes: training, forwarders, gateways, ClickHouse. Each of them dies; nothing does."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

import clickhouse_server
import fanfold
from clickhouse_tools import Fleet
from fanfold.cli import main
from fanfold.clickhouse.cells import UNIT, Roller, left, reached, roll
from fanfold.clickhouse.decode import run_number
from fanfold.clickhouse.names import GRACE_SECONDS
from fanfold.clickhouse.rebuild import DERIVED, rebuild
from fanfold.clickhouse.schema import HAS_STEP, POINT_CELL
from fanfold.fleet.wire import Conflict, Gone, Piece, Rejected
from fanfold.probes.worker_tables import pack_rows
from fanfold.store.query import LocalStore
from fleet_tools import Forwarder, Gateway, Line, bounds, frames_of, journals, pieces_of, train, trained, until, write_run
from paths import DOCS


def whole(fleet: Fleet, count: int, ranks: int = 2) -> bool:
    """Tell whether every point of the job is there."""
    try:
        run = fleet.store().run("llm", "job")
        return run.ranks == list(range(ranks)) and all(journal.count("loss") >= count for journal in run.journals)
    except (fanfold.RunNotFound, OSError):
        return False


def check(fleet: Fleet, nodes: list[Path], count: int) -> None:
    """Check the job point by point and byte by byte: all of it, once, in the points, the cells and the bytes."""
    run = fleet.store().run("llm", "job")
    for rank in range(len(nodes)):
        series = run.series("loss", rank=rank)
        assert series.steps.tolist() == list(range(count))
        assert series.values.tolist() == [1 / (step + 1) for step in range(count)]
        thin = fleet.store().series(run, "loss", rank=rank, buckets=50)
        assert (thin.total, int(thin.count.sum())) == (count, count)
    assert run.status == "finished"
    source = {name.rpartition("/")[2].removesuffix(".ffj"): data for node in nodes for name, data in journals(node).items()}
    for journal in run.journals:
        have = b"".join(data for _, data in run.bytes_of(journal.number, 0))
        assert have == source[journal.path.stem]


def test_two_nodes_a_gateway_and_the_page_of_a_third(tmp_path, nodes, ends, clickhouse):
    fleet = ends(Fleet(clickhouse))
    gateway = ends(Gateway(fleet.url, log=tmp_path / "gateway.log"))
    for node in nodes:
        ends(Forwarder(node, gateway.url))
    jobs = [train(node, rank, 300, "--image", pace=0.005) for rank, node in enumerate(nodes)]
    assert until(lambda: whole(fleet, 10))
    assert fleet.store().run("llm", "job").status == "running"
    trained(*jobs)
    assert until(lambda: whole(fleet, 300) and fleet.store().run("llm", "job").status == "finished")
    check(fleet, nodes, 300)
    run = fleet.store().run("llm", "job")
    assert until(lambda: all(not fleet.intake.missing("llm", "job", [p.entry["blob"]]) for p in run.media("text")))
    assert [run.blob(point.entry["blob"]) for point in run.media("text")] == [b"x" * 5000] * 2
    with urllib.request.urlopen(f"{gateway.url}/ui/api/runs?project=llm") as answer:
        listed = json.load(answer)
    assert [(one["id"], one["status"]) for one in listed["runs"]] == [("job", "finished")]
    body = json.dumps({"project": "llm", "runs": ["job"], "keys": ["loss"], "n": 100}).encode()
    request = urllib.request.Request(f"{gateway.url}/ui/api/series", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        assert len(answer.read()) > 1000
    assert gateway.terminate() == 0


def test_gateways_killed_in_the_middle_of_batches_lose_and_repeat_nothing(tmp_path, nodes, ends, clickhouse):
    fleet = ends(Fleet(clickhouse))
    gateway = ends(Gateway(fleet.url, log=tmp_path / "gateway.log"))
    for node in nodes:
        ends(Forwarder(node, gateway.url))
    jobs = [train(node, rank, 4000, pace=0.001) for rank, node in enumerate(nodes)]
    inserted = clickhouse.client()
    for _ in range(3):
        before = inserted.query("SELECT count() FROM pieces").result_rows[0][0]
        assert until(lambda before=before: inserted.query("SELECT count() FROM pieces").result_rows[0][0] > before)
        gateway.kill()  # bytes are written, what they say perhaps not, and the commit hardly
        gateway = ends(Gateway(fleet.url, port=gateway.port, log=tmp_path / "gateway.log"))
    trained(*jobs)
    assert until(lambda: whole(fleet, 4000) and fleet.store().run("llm", "job").status == "finished")
    check(fleet, nodes, 4000)


def test_a_forwarder_killed_goes_on_where_the_store_stands(tmp_path, nodes, ends, clickhouse):
    fleet = ends(Fleet(clickhouse))
    gateway = ends(Gateway(fleet.url, log=tmp_path / "gateway.log"))
    job = train(nodes[0], 0, 3000, pace=0.001, world=1)
    for _ in range(3):
        forwarder = ends(Forwarder(nodes[0], gateway.url))
        before = fleet.database.one("SELECT sum(end) AS n FROM commits")["n"]
        assert until(lambda before=before: fleet.database.one("SELECT sum(end) AS n FROM commits")["n"] > before)
        forwarder.kill()
    trained(job)
    ends(Forwarder(nodes[0], gateway.url))
    assert until(lambda: whole(fleet, 3000, 1) and fleet.store().run("llm", "job").status == "finished")
    check(fleet, nodes[:1], 3000)


def test_clickhouse_killed_and_back_loses_and_repeats_nothing(tmp_path, nodes, ends):
    server = clickhouse_server.Server(tmp_path / "ch").start()
    place = clickhouse_server.Database([server], "own")
    fleet = ends(Fleet(place))
    gateway = ends(Gateway(fleet.url, log=tmp_path / "gateway.log"))
    for node in nodes:
        ends(Forwarder(node, gateway.url))
    jobs = [train(node, rank, 3000, pace=0.001) for rank, node in enumerate(nodes)]
    for share in (500, 1500):
        assert until(lambda share=share: whole(fleet, share))
        server.kill()
        server.restart()
    trained(*jobs)
    assert until(lambda: whole(fleet, 3000) and fleet.store().run("llm", "job").status == "finished")
    check(fleet, nodes, 3000)
    server.stop()


def test_a_line_to_clickhouse_that_breaks_changes_nothing(tmp_path, nodes, ends):
    # A server of its own: it may abort of this, and is then away for a few seconds.
    server = clickhouse_server.Server(tmp_path / "ch").start()
    fleet = ends(Fleet(clickhouse_server.Database([server], "own")))
    line = ends(Line(server.http, cut=0.02, seed=3))
    through = fleet.url.replace(f":{server.http}/", f":{line.port}/")
    line.cut = 0.0
    gateway = ends(Gateway(through, log=tmp_path / "gateway.log"))
    line.cut = 0.02
    for node in nodes:
        ends(Forwarder(node, gateway.url))
    jobs = [train(node, rank, 1500, pace=0.001) for rank, node in enumerate(nodes)]
    trained(*jobs)
    assert until(lambda: line.cuts > 2 or whole(fleet, 1500))
    line.cut = 0.0
    assert until(lambda: whole(fleet, 1500) and fleet.store().run("llm", "job").status == "finished", 120)
    assert line.cuts
    check(fleet, nodes, 1500)
    server.stop()


def one_name_for_two(fleet, folder):
    """Claims of runs on different shards on one name: the first one counts on all of them."""
    id = next(id for id in (f"r{n}" for n in range(8)) if run_number("llm", id) % 3 != run_number("audio", id) % 3)
    (whole,) = pieces_of(write_run(folder, id=id, rows=20, project="audio"), run=id)
    fleet.intake.append("audio", whole)
    fleet.intake.move("llm", id, "base", "ann")
    late = {name: np.array([run_number(project, id)], np.uint64) for name, project in (("run", "audio"), ("name", "base"))}
    fleet.database.insert("moved", {**late, "project": ["base"], "id": [id], "who": ["bob"]})
    time.sleep(3 * GRACE_SECONDS)
    names = {(run.project, run.id) for run in fleet.store().runs()}
    assert {("base", id), ("audio", id)} <= names and ("llm", id) not in names
    assert len(fleet.store().run("base", id).series("loss")) == len(fleet.store().run("audio", id).series("loss")) == 20
    fleet.intake.move("base", id, "llm", "ann")


def test_three_shards_one_of_them_lost_and_back(tmp_path, nodes, ends):
    servers = clickhouse_server.cluster(tmp_path / "shards")
    for server in servers:
        server.start()
    place = clickhouse_server.Database(servers, "own")
    fleet = ends(Fleet(place, options="?cluster=fleet"))
    gateway = ends(Gateway(fleet.url, log=tmp_path / "gateway.log"))
    for node in nodes:
        ends(Forwarder(node, gateway.url))
    others = [write_run(tmp_path / "others", id=f"r{n}", rows=20) for n in range(8)]
    for number, file in enumerate(others):
        for piece in pieces_of(file, 5, run=f"r{number}"):
            fleet.intake.append("llm", piece)
    parts = [server.client("own").query("SELECT uniqExact(run) FROM points_local").result_rows[0][0] for server in servers]
    assert sum(parts) == 8
    assert sum(part > 0 for part in parts) >= 2  # runs are spread
    one_name_for_two(fleet, tmp_path / "audio")
    jobs = [train(node, rank, 2000, pace=0.001) for rank, node in enumerate(nodes)]
    assert until(lambda: whole(fleet, 200))
    servers[1].kill()
    servers[2].kill()
    trained(*jobs)
    servers[1].restart()
    servers[2].restart()
    assert until(lambda: whole(fleet, 2000) and fleet.store().run("llm", "job").status == "finished", 120)
    check(fleet, nodes, 2000)
    assert len(fleet.store().runs("llm")) == 9
    for server in servers:
        server.stop()


# What the tables hold after the worst


def test_a_batch_that_was_written_without_its_commit_counts_once(tmp_path, clickhouse, monkeypatch):
    file = write_run(tmp_path / "runs", rows=500)
    first, second = pieces_of(file, 300)
    fleet = Fleet(clickhouse)
    insert = fleet.database.insert

    def dies(table: str, *words, **options) -> None:
        if table == "commits":
            raise OSError("the gateway died here")
        insert(table, *words, **options)

    monkeypatch.setattr(fleet.database, "insert", dies)
    with pytest.raises(OSError):
        fleet.intake.append("llm", first)
    monkeypatch.setattr(fleet.database, "insert", insert)
    assert fleet.intake.offset("llm", "r1", file.stem) == 0
    both = Piece("r1", file.stem, 0, 0, first.data + second.data)
    assert fleet.intake.append("llm", both) == len(both.data)
    assert fleet.database.one("SELECT count() AS n FROM points WHERE series != 0")["n"] > 1000  # some are there twice
    store = fleet.store()
    run = store.run("llm", "r1")
    assert [journal.twice for journal in run.journals] == [True]
    assert run.series("loss").steps.tolist() == list(range(500))
    assert run.journals[0].count("loss") == 500
    assert store.series(run, "loss", buckets=10).total == 500
    assert len(run.texts("note")) == 1
    assert rebuild(fleet.database, "llm", "r1") == 1000
    stores = fleet.store()
    stores._runs.clear()
    again = stores.run("llm", "r1")
    assert [journal.twice for journal in again.journals] == [False]
    assert again.series("loss").steps.tolist() == list(range(500))
    assert fleet.database.one("SELECT sum(count) AS n FROM cells FINAL")["n"] == 1000
    fleet.close()


def test_pieces_out_of_place_are_answered_with_the_place_they_belong_to(tmp_path, clickhouse):
    file = write_run(tmp_path / "runs", rows=50)
    one, two, three = pieces_of(file, 10, 20)
    fleet = Fleet(clickhouse)
    with pytest.raises(Conflict) as early:
        fleet.intake.append("llm", two)
    assert early.value.offset == 0
    assert fleet.intake.append("llm", one) == two.offset
    with pytest.raises(Conflict) as late:
        fleet.intake.append("llm", one)
    assert late.value.offset == two.offset
    other = Fleet(clickhouse)  # another gateway knows nothing, and asks
    assert other.intake.append("llm", two) == three.offset
    with pytest.raises(Conflict) as behind:
        fleet.intake.append("llm", two)
    assert behind.value.offset == three.offset
    with pytest.raises(Rejected, match="not whole, sound frames"):
        fleet.intake.append("llm", Piece("r1", file.stem, three.offset, 0, three.data[:-1]))
    with pytest.raises(Rejected, match="about another journal"):
        fleet.intake.append("llm", Piece("r2", file.stem, 0, 0, one.data))
    outcomes = fleet.intake.append_all("llm", [three, Piece("r1", "nonsense", 0, 0, b"x"), three]).result(30)
    assert outcomes[0] == three.offset + len(three.data)
    assert isinstance(outcomes[1], Rejected)
    assert isinstance(outcomes[2], Conflict)
    for each in (fleet, other):
        each.close()


def test_a_deleted_run_stays_deleted(tmp_path, clickhouse):
    file = write_run(tmp_path / "runs", rows=50)
    one, two = pieces_of(file, 10)
    fleet = Fleet(clickhouse)
    fleet.intake.append("llm", one)
    fleet.intake.delete("llm", "r1", "me")
    for call in (lambda: fleet.intake.append("llm", two), lambda: fleet.intake.offset("llm", "r1", file.stem)):
        with pytest.raises(Gone):
            call()
    assert fleet.store().runs("llm") == []
    with pytest.raises(fanfold.RunNotFound):
        fleet.store().run("llm", "r1")
    assert fleet.database.one("SELECT count() AS n FROM points")["n"] == 0
    fleet.close()


def test_the_newest_profile_of_a_process_counts_and_each_row_of_it(tmp_path, clickhouse):
    run = fanfold.init("llm", dir=tmp_path, id="r1", system=False, quiet=True)
    for steps, observed in ((99, 1), (100, 2)):  # what a call stands for may fall: 99 of them, then 50
        facts = {"rank": 0, "node": "n", "steps": steps, "observed": observed, "every": 100, "window": 1, "sampling": 0.0}
        rows = [{"op": "aten::mul", "overload": "", "scope": scope, "thread": "main", "label": "", "inputs": "", "all": False, "count": 1,
                 "total_ns": 3000, "self_ns": 2000, "own_ns": 2000, "max_ns": 3000, "device_count": 0, "device_ns": 0, "hist": {}}
                for scope in ("forward", "backward")]  # fmt: skip
        run._recorder.event("ops", {"id": "one", "facts": facts, "table": pack_rows(rows)})
    run.finish()
    (file,) = (run.path / "journal").glob("*.ffj")
    fleet = Fleet(clickhouse)
    for piece in pieces_of(file, *range(1, len(frames_of(file)))):
        fleet.intake.append("llm", piece)
    page = (DOCS / "clickhouse.md").read_text()
    question = page.partition("time went to\n")[2].partition(";")[0]
    assert fleet.database.one(question) == {"op": b"aten::mul", "ms": 2 * 50 * 0.002, "calls": 100}
    assert sum(row["self_ns"] * row["scale"] for row in fleet.store().run("llm", "r1").ops()) == 2 * 50 * 2000
    fleet.close()


def test_a_blob_comes_in_pieces_and_is_checked(clickhouse, tmp_path):
    import hashlib

    fleet = Fleet(clickhouse)
    data = np.random.default_rng(0).bytes(300_000)
    name = hashlib.sha256(data).hexdigest()
    keep = lambda offset, part: fleet.intake.blob("llm", "r1", name, offset=offset, total=len(data), data=part)  # noqa: E731
    assert keep(0, data[:100_000]) == 100_000
    assert fleet.intake.missing("llm", "r1", [name]) == {name: 100_000}
    with pytest.raises(Conflict) as where:
        keep(50_000, data[50_000:60_000])
    assert where.value.offset == 100_000
    with pytest.raises(Rejected, match="does not match"):
        keep(100_000, data[100_000:-1] + b"?")
    assert fleet.intake.missing("llm", "r1", [name]) == {name: 0}
    assert keep(0, data) == len(data)
    assert fleet.intake.missing("llm", "r1", [name]) == {}
    fleet.close()


def test_tables_are_made_looked_at_and_asked_for(clickhouse, capsys):
    words = ["--store", clickhouse.url, "--json"]
    assert main(["ls", "--dir", clickhouse.url]) == 2
    assert "fanfold server db migrate" in capsys.readouterr().err
    assert main(["db", "migrate", *words]) == 0
    assert json.loads(capsys.readouterr().out)[0]["before"] == 0
    assert main(["db", "migrate", *words]) == 0
    done = json.loads(capsys.readouterr().out)[0]
    assert done["before"] == done["after"]
    assert clickhouse_server.PASSWORD not in json.dumps(done)
    assert main(["db", "status", *words]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == done["after"]
    assert main(["token", "create", "cluster", "--for", "llm", "--scope", "write", *words]) == 0
    word = json.loads(capsys.readouterr().out)["token"]
    held = clickhouse.client().query("SELECT token FROM tokens").result_rows
    assert word not in str(held)
    assert main(["token", "list", *words]) == 0
    (token,) = json.loads(capsys.readouterr().out)
    assert main(["token", "revoke", token["id"], *words]) == 0
    capsys.readouterr()
    assert main(["token", "list", *words]) == 0
    assert json.loads(capsys.readouterr().out) == []


# The rollups of version 1: extremes without their steps.
OLD_TABLE = """CREATE TABLE rollups (run UInt64, series UInt64, journal UInt64, cell Int64,
  low SimpleAggregateFunction(min, Float64), high SimpleAggregateFunction(max, Float64),
  first SimpleAggregateFunction(min, UInt256), last SimpleAggregateFunction(max, UInt256),
  since SimpleAggregateFunction(min, Int64), until SimpleAggregateFunction(max, Int64),
  total SimpleAggregateFunction(sum, Float64), count SimpleAggregateFunction(sum, UInt64),
  odd SimpleAggregateFunction(sum, UInt64)) ENGINE = AggregatingMergeTree() ORDER BY (run, series, journal, cell)"""
OLD_COLUMNS = "run, series, journal, cell, low, high, first, last, since, until, total, count, odd"


def as_of_version_1(client) -> None:
    """Make the rollups of an empty database as version 1 made them, and fed them."""
    fed = f"SELECT run, series, journal, {POINT_CELL} FROM points WHERE {HAS_STEP}"
    for statement in (OLD_TABLE, "DROP TABLE cells SYNC", "DROP TABLE rolled SYNC", "DROP TABLE requests SYNC",
                      f"CREATE MATERIALIZED VIEW rollups_feed TO rollups AS SELECT {OLD_COLUMNS} FROM ({fed})",
                      "ALTER TABLE meta DELETE WHERE version > 1 SETTINGS mutations_sync = 2"):  # fmt: skip
        client.command(statement)


def test_an_older_database_is_migrated_while_runs_arrive(tmp_path, clickhouse, capsys):
    file = write_run(tmp_path / "runs", rows=20_000)
    before, after = pieces_of(file, 12_345)
    fleet = Fleet(clickhouse)
    client = clickhouse.client()
    as_of_version_1(client)
    fleet.intake.append("llm", before)
    assert main(["db", "status", "--store", clickhouse.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["version"] == 1
    assert main(["ls", "--dir", clickhouse.url]) == 2
    assert "has tables of version 1, and this fanfold needs 4" in capsys.readouterr().err
    for was in (1, 4):  # migrating twice does no harm
        assert main(["db", "migrate", "--store", clickhouse.url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)[0] | {"address": ""} == {"address": "", "before": was, "after": 4}
    assert client.query(
        "SELECT count() FROM system.tables WHERE database = currentDatabase() AND name LIKE 'rollups%'"
    ).first_row == (0,)
    fleet.intake.append("llm", after)
    check_buckets(tmp_path / "runs", fleet, 20_000)
    fleet.close()


def check_buckets(runs: Path, fleet: Fleet, count: int) -> None:
    """Compare the buckets that the database makes with those that the run's directory has for the same steps."""
    local, store = LocalStore(runs), fleet.store()
    here, there = local.run("llm", "r1"), store.run("llm", "r1")
    for key in ("loss", "acc"):
        for buckets in (20, 330):
            thin = store.series(there, key, buckets=buckets)
            assert (thin.total, int(thin.count.sum())) == (count, count)
            for i in range(len(thin)):
                one = local.series(here, key, buckets=1, lo=thin.x[i], hi=thin.x_last[i])
                for name in ("x", "x_last", "x_min", "x_max", "first", "last", "min", "max", "count"):
                    assert getattr(thin, name)[i] == getattr(one, name)[0], (key, i, name)


def cells(fleet: Fleet) -> int:
    """Count the points in the cells, as readers see these."""
    return int(fleet.database.one("SELECT sum(count) AS n FROM cells FINAL")["n"])


def test_charts_are_the_same_before_during_and_after_cells_are_made(tmp_path, clickhouse):
    file = write_run(tmp_path / "runs", rows=60_000)
    fleet = Fleet(clickhouse)
    first, second, last = pieces_of(file, 34_000, 52_000)
    end = file.stat().st_size
    assert 2 * UNIT + 777 < last.offset < end
    at = (run_number("llm", "r1"), int(file.stem.partition("-")[2], 16))
    for piece in (first, second):
        fleet.intake.append("llm", piece)
    assert cells(fleet) == 0
    for upto in (0, UNIT, UNIT, 2 * UNIT, 2 * UNIT + 777):
        roll(fleet.database, {at: upto})
        made = cells(fleet)
        counted = fleet.database.one("SELECT count() AS n FROM points WHERE pos < {upto:UInt64}", upto=upto)["n"]
        assert made == counted, "each point is in one cell, and once"
    fleet.intake.append("llm", last)
    check_buckets(tmp_path / "runs", fleet, 60_000)
    fleet.intake.close()  # makes what is due
    assert cells(fleet) == 120_000
    assert reached(fleet.database, [at[0]], [at[1]]) == {at: end}
    check_buckets(tmp_path / "runs", fleet, 60_000)
    zoom, whole = (store.series(store.run("llm", "r1"), "loss", buckets=50, lo=100, hi=59_000) for store in
                   (fleet.store(), LocalStore(tmp_path / "runs")))  # fmt: skip
    assert (zoom.before, zoom.after, zoom.total) == (whole.before, whole.after, whole.total)


def test_gateways_that_make_the_same_cells_at_once_count_each_point_once(tmp_path, clickhouse):
    file = write_run(tmp_path / "runs", rows=60_000)
    fleet = Fleet(clickhouse)
    at = (run_number("llm", "r1"), int(file.stem.partition("-")[2], 16))
    (piece,) = pieces_of(file)
    fleet.intake.append("llm", piece)
    databases = [Fleet(clickhouse).database for _ in range(4)]
    makers = [threading.Thread(target=roll, args=(one, {at: part * UNIT})) for one in databases for part in (1, 2, 2)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert reached(fleet.database, [at[0]], [at[1]]) == {at: 2 * UNIT}
    assert cells(fleet) == fleet.database.one("SELECT count() AS n FROM points WHERE pos < {upto:UInt64}", upto=2 * UNIT)["n"]
    check_buckets(tmp_path / "runs", fleet, 60_000)
    fleet.close()


def test_cells_that_a_dead_gateway_left_are_made_by_the_next_one(tmp_path, clickhouse):
    file = write_run(tmp_path / "runs", rows=60_000)
    fleet = Fleet(clickhouse)
    before, _ = pieces_of(file, 52_000)
    fleet.intake.append("llm", before)  # this intake ends without making cells
    at = (run_number("llm", "r1"), int(file.stem.partition("-")[2], 16))
    assert left(fleet.database) == {at: 2 * UNIT}
    fleet.database.run("ALTER TABLE commits UPDATE seen = seen - 7200 WHERE 1 SETTINGS mutations_sync = 2")
    assert left(fleet.database) == {at: before.offset + len(before.data)}, "nothing arrived for long: the rest, too"
    other = Roller(Fleet(clickhouse).database, lambda run: False, gather=0.0)
    other.stored([((1, 1), 0, 0, False)])
    other.stored([((1, 1), 0, UNIT, False)])
    assert until(lambda: not left(fleet.database))
    other.close()
    assert cells(fleet) == fleet.database.one("SELECT count() AS n FROM points")["n"]
    fleet.close()


def test_old_rollups_whose_points_expired_keep_their_extremes(tmp_path, clickhouse):
    file = write_run(tmp_path / "runs", rows=20_000)
    fleet = Fleet(clickhouse)
    as_of_version_1(clickhouse.client())
    fleet.intake.append("llm", Piece("r1", file.stem, 0, 0, file.read_bytes()))
    clickhouse.client().command("TRUNCATE TABLE points")
    assert main(["db", "migrate", "--store", clickhouse.url, "--quiet"]) == 0
    thin = fleet.store().series(fleet.store().run("llm", "r1"), "loss", buckets=330)
    assert (thin.max[0], thin.min[-1], thin.total) == (1.0, 1 / 20_000, 20_000)
    assert thin.x_min is None and thin.x_max is None, "the steps are lost, and not made up"
    fleet.close()


def test_lost_tables_of_a_finished_run_are_rebuilt_at_once(tmp_path, clickhouse):
    write_run(tmp_path / "runs", rows=50)
    fleet = Fleet(clickhouse)
    fleet.ship(tmp_path / "runs")
    for table in DERIVED:
        clickhouse.client().command(f"TRUNCATE TABLE {table}")
    assert rebuild(fleet.database, "llm", "r1") == 100
    assert fleet.store().run("llm", "r1").series("loss").steps.tolist() == list(range(50))
    fleet.close()


def test_a_run_that_is_still_growing_is_not_rebuilt(tmp_path, clickhouse):
    run = fanfold.init("llm", id="r1", dir=tmp_path / "runs", system=False, quiet=True)
    run.log({"loss": 1.0}, step=0)
    fleet = Fleet(clickhouse)
    fleet.ship(tmp_path / "runs")
    with pytest.raises(fanfold.RunError, match="is still growing"):
        rebuild(fleet.database, "llm", "r1")
    clickhouse.client().command("TRUNCATE TABLE frames")
    with pytest.raises(fanfold.RunError, match="is still growing"):
        rebuild(fleet.database, "llm", "r1")
    run.finish()
    fleet.ship(tmp_path / "runs")
    assert rebuild(fleet.database, "llm", "r1") == 1
    fleet.close()


def test_rebuilding_all_runs_leaves_out_those_that_still_grow(tmp_path, clickhouse, capsys):
    write_run(tmp_path / "runs", rows=50)
    growing = fanfold.init("llm", id="r0", dir=tmp_path / "runs", system=False, quiet=True)
    growing.log({"loss": 1.0}, step=0)
    fleet = Fleet(clickhouse)
    fleet.ship(tmp_path / "runs")
    assert main(["server", "db", "rebuild", "--store", clickhouse.url, "--quiet"]) == 2
    said = capsys.readouterr().out
    assert "rebuilt 1 run, 100 points." in said
    assert "Still growing, so not rebuilt: r0." in said
    growing.finish()
    fleet.close()


def test_frames_of_a_journal_come_back_in_order(tmp_path, clickhouse):
    file = write_run(tmp_path / "runs", rows=40)
    fleet = Fleet(clickhouse)
    for piece in pieces_of(file, 7, 9, 30):
        fleet.intake.append("llm", piece)
    (journal,) = fleet.store().run("llm", "r1").journals
    data = file.read_bytes()
    assert [data[start:end] for start, end in bounds(journal.walk(0))] == frames_of(file)
    fleet.close()


def test_an_age_limit_is_set_changed_and_lifted(clickhouse, capsys):
    made = lambda: clickhouse.client().query("SHOW CREATE TABLE points").result_rows[0][0]  # noqa: E731
    for days, wanted in (
        ("?ttl_days=7", "toIntervalDay(7)"),
        ("?ttl_days=7", "toIntervalDay(7)"),
        ("?ttl_days=30", "toIntervalDay(30)"),
    ):
        assert main(["db", "migrate", "--store", clickhouse.url + days]) == 0
        assert wanted in made()
    assert main(["db", "migrate", "--store", clickhouse.url]) == 0
    assert "TTL" not in made()
    capsys.readouterr()


def test_a_server_that_is_not_there_is_told_in_one_line(capsys):
    assert main(["ls", "--dir", f"clickhouse://u:geheim@127.0.0.1:{clickhouse_server.free_port()}/db"]) == 2
    said = capsys.readouterr().err
    assert "geheim" not in said
    assert "Traceback" not in said


def test_a_reader_that_was_cut_off_in_the_middle_reads_all_of_it_later(tmp_path, clickhouse, monkeypatch):
    file = write_run(tmp_path / "runs", rows=50)
    one, two = pieces_of(file, 20)
    fleet = Fleet(clickhouse)
    store = fleet.store()
    fleet.intake.append("llm", one)
    assert store.run("llm", "r1").latest
    fleet.intake.append("llm", two)
    ask = store.database.ask

    def cut(sql: str, **words):
        if "FROM frames" in sql:
            raise OSError("the line is cut here")
        return ask(sql, **words)

    monkeypatch.setattr(store.database, "ask", cut)
    with pytest.raises(OSError):
        store.run("llm", "r1")
    monkeypatch.setattr(store.database, "ask", ask)
    run = store.run("llm", "r1")
    assert run.series("loss").steps.tolist() == list(range(50))
    assert (run.status, run.texts("note")[0].text) == ("finished", "a text")
    fleet.close()


def test_whoever_waits_is_told_when_a_write_fails_in_a_way_nobody_foresaw(tmp_path, clickhouse, monkeypatch):
    file = write_run(tmp_path / "runs", rows=5)
    fleet = Fleet(clickhouse)
    monkeypatch.setattr(fleet.database, "insert", lambda *_, **__: 1 / 0)
    with pytest.raises(OSError, match="division by zero"):
        fleet.intake.append("llm", pieces_of(file)[0])
    monkeypatch.undo()
    assert fleet.intake.append("llm", pieces_of(file)[0]) == file.stat().st_size
    fleet.close()
