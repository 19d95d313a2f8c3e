"""Goodput: where a run's time went, from its journals; each part is compared with the job's own clock."""

import io
import json
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

import fanfold
from clickhouse_tools import Fleet
from fanfold.cli import main
from fanfold.journal import Kind, Writer
from fanfold.journal import format as fmt
from fanfold.store.goodput import KINDS, PARTS, goodput
from paths import HELPERS
from span_tools import spans_of

GAP = 1.5
KILLS = (18, 27, 0)  # attempts 2 and 3 go on from the checkpoints at 10 and 20


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Run the job in three attempts; return its folder and what each part should be, in seconds, by the job's own clock."""
    folder = tmp_path_factory.mktemp("planned")
    clock = folder / "clock.jsonl"
    lives = []
    for kill_at in KILLS:
        if lives:
            time.sleep(GAP)
        before = len(clock.read_text().splitlines()) if clock.exists() else 0
        launched = time.time_ns()
        subprocess.run([sys.executable, HELPERS / "goodput_job.py", folder, clock, str(kill_at)], timeout=120, check=not kill_at)
        lives.append((launched, [json.loads(line) for line in clock.read_text().splitlines()[before:]]))
    return folder, _expected(lives)


def _expected(lives):
    """Add up what the job wrote down. Time between two of its entries is the loop's own, and belongs to the steps."""
    expected = dict.fromkeys(PARTS, 0.0)
    for number, (launched, entries) in enumerate(lives):
        later = [entry["step"] for _, more in lives[number + 1 :] for entry in more if entry["step"]]
        redone = min(later, default=1 << 30)
        if number:
            expected["restart"] += launched - lives[number - 1][1][-1]["end"]
        first = next(place for place, entry in enumerate(entries) if entry["kind"] == "data")
        expected["startup"] += entries[first]["begin"] - launched
        now, step = entries[first]["begin"], 0
        for entry in entries[first:]:
            step = entry["step"] or step
            work = "repeated" if step >= redone else "productive"
            expected[work] += entry["begin"] - now
            expected[work if entry["kind"] == "step" else entry["kind"]] += entry["end"] - entry["begin"]
            now = entry["end"]
    return {part: ns / 1e9 for part, ns in expected.items()}


def test_each_part_is_what_the_job_planned(planned):
    folder, expected = planned
    found = goodput(fanfold.open("planned", dir=folder))
    seconds = {part: ns / 1e9 for part, ns in found.ns.items()}
    wall = found.wall_ns / 1e9
    off = {part: (seconds[part], expected[part]) for part in PARTS if abs(seconds[part] - expected[part]) > 0.02 * wall}
    assert off == {}
    close = {part: seconds[part] / expected[part] for part in ("productive", "checkpoint", "evaluation", "data", "restart")}
    assert all(0.95 < ratio < 1.05 for ratio in close.values()), close
    assert (found.attempts, found.steps, found.ranks) == (3, 40, 1)


def test_the_parts_add_up_to_the_wall_time_exactly(planned):
    run = fanfold.open("planned", dir=planned[0])
    found = goodput(run)
    assert sum(found.ns.values()) == found.wall_ns
    first, last = run.attempts[0].mains[0], run.attempts[-1]
    assert found.wall_ns == last.seen - first.header.born
    assert min(found.ns.values()) >= 0


def test_the_command_prints_the_parts_of_a_run_and_of_a_project(planned, capsys):
    folder = str(planned[0])
    assert main(["goodput", "planned", "--dir", folder]) == 0
    text = capsys.readouterr().out
    assert "3 attempts" in text and "saving checkpoints" in text and "█" in text
    assert main(["goodput", "planned", "--dir", folder, "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert sum(one["seconds"].values()) == pytest.approx(one["wall_seconds"], abs=1e-6)
    assert sum(one["shares"].values()) == pytest.approx(1.0)
    assert one["unmeasured"] == [] and one["steps"] == 40
    assert main(["goodput", "--project", "p", "--by", "node,user,week", "--dir", folder, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert sum(row["rank_hours"] for row in rows) * 3600 == pytest.approx(one["wall_seconds"])
    assert set(rows[0]) >= {"node", "user", "week", "goodput", "shares"} and rows[0]["runs"] == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [(["--by", "hour", "--project", "p"], "--by hour is not known"), ([], "needs a run, or --project")],
)
def test_the_command_refuses_what_it_does_not_know(tmp_path, capsys, words, says):
    assert main(["goodput", *words, "--dir", str(tmp_path)]) == 2
    assert says in capsys.readouterr().err


# What is timed without the user's help


class Slow:
    """An object that takes its time to be pickled, and writes down how much."""

    def __init__(self, seconds):
        self.seconds, self.took = seconds, 0.0

    def __getstate__(self):
        began = time.perf_counter()
        time.sleep(self.seconds)
        self.took += time.perf_counter() - began
        return {}


def test_waits_for_a_dataloader_and_saves_are_timed(tmp_path):
    import torch
    from torch.utils.data import DataLoader, Dataset, dataloader

    class Data(Dataset):
        took = 0.0

        def __len__(self):
            return 20

        def __getitem__(self, index):
            began = time.perf_counter()
            time.sleep(0.6 if index == 7 else 0.02)
            Data.took += time.perf_counter() - began
            return torch.zeros(1)

    before = dataloader._BaseDataLoaderIter.__next__, torch.serialization._open_zipfile_writer
    slow = Slow(0.6)
    run = fanfold.init("p", dir=tmp_path, quiet=True, system=False)
    for step, _ in enumerate(DataLoader(Data())):
        run.log({"loss": 1.0}, step=step)
    torch.save({"model": slow}, tmp_path / "model.pt")
    buffer = io.BytesIO()
    torch.save({"model": Slow(0.3)}, buffer)  # a message, not a checkpoint
    run.finish()
    found = spans_of(run)
    assert found["data"] == pytest.approx(Data.took, rel=0.05, abs=0.03)
    assert found["checkpoint"] == pytest.approx(slow.took, rel=0.05, abs=0.03)
    assert (dataloader._BaseDataLoaderIter.__next__, torch.serialization._open_zipfile_writer) == before
    events = [event for event in fanfold.open(run.path)._events("span") if event["kind"] == "data"]
    assert len(events) <= 3 and sum(event["n"] for event in events) == 21  # the last one finds the end


def test_compilation_counts_as_start_up(tmp_path):
    import torch

    run = fanfold.init("p", dir=tmp_path, quiet=True, system=False)
    for _ in range(30):  # torch._dynamo is hooked when it is imported, by a thread that looks every second
        torch.compile(lambda x: x + 1, backend="eager", dynamic=False)(torch.zeros(3))
        torch._dynamo.reset()
        time.sleep(0.1)
    run.finish()
    assert spans_of(run).get("compile", 0.0) > 0


def test_a_span_of_ones_own_is_timed(tmp_path):
    run = fanfold.init("p", dir=tmp_path, quiet=True, system=False)
    began = time.perf_counter()
    with run.span("evaluation"):
        time.sleep(0.55)
        with run.span("data"):  # a part of it
            time.sleep(0.05)
    took = time.perf_counter() - began
    run.finish()
    assert spans_of(run) == {"evaluation": pytest.approx(took, rel=0.05)}


def test_another_thread_does_not_hold_training_up(tmp_path):
    run = fanfold.init("p", dir=tmp_path, quiet=True, system=False)

    def save():
        with run.span("checkpoint"):
            time.sleep(0.6)

    thread = threading.Thread(target=save)
    thread.start()
    with run.span("data"):
        time.sleep(0.1)
    thread.join()
    run.finish()
    assert set(spans_of(run)) == {"data"}


def test_an_unknown_kind_warns_once_and_training_goes_on(tmp_path, caplog):
    done = []
    with fanfold.init("p", dir=tmp_path, quiet=True, system=False) as run:
        for _ in range(3):
            with run.span("coffee"):
                done.append(1)
    assert done == [1, 1, 1]
    assert len([record for record in caplog.records if "coffee" in record.getMessage()]) == 1
    with (
        pytest.raises(ValueError, match="Known: checkpoint"),
        fanfold.init("p", dir=tmp_path, quiet=True, system=False, strict=True) as run,
    ):
        run.span("coffee")


def test_turned_off_it_hooks_and_writes_nothing(tmp_path):
    import torch
    from torch.utils.data import DataLoader, dataloader

    before = dataloader._BaseDataLoaderIter.__next__, torch.serialization._open_zipfile_writer
    run = fanfold.init("p", dir=tmp_path, quiet=True, system=False, goodput=False)
    assert (dataloader._BaseDataLoaderIter.__next__, torch.serialization._open_zipfile_writer) == before
    list(DataLoader(range(4)))
    torch.save({"model": Slow(0.01)}, tmp_path / "model.pt")
    with run.span("evaluation"):
        pass
    run.finish()
    assert spans_of(run) == {}


def test_nothing_is_written_when_nothing_happens(tmp_path):
    with fanfold.init("p", dir=tmp_path, quiet=True, system=False) as run:
        for step in range(100):
            run.log({"loss": 1.0}, step=step)
    (journal,) = fanfold.open(run.path).journals
    assert not list(journal.records(Kind.EVENT))


# Reading


START = 1_790_000_000_000_000_000
SECOND = 1_000_000_000


def write(root, id, lives, *, project="p"):
    """Write a run. lives: for each attempt, by rank: start, points (step, seconds), spans (kind, since, until, seconds), end."""
    for number, ranks in enumerate(lives):
        for rank, (start, points, spans, end) in ranks.items():
            began = START + round(start * SECOND)
            header = {
                "format": [fmt.MAJOR, fmt.MINOR], "rank": rank, "role": "main", "attempt": f"a{number}", "run": id, "project": project,
                "ordinal": number + 1, "mono": number, "node": f"n{rank}", "local_rank": 0, "world": len(ranks),
            }  # fmt: skip
            with pytest.MonkeyPatch.context() as clock:
                clock.setattr(time, "time_ns", lambda began=began: began)
                writer = Writer(root / project / id / "journal", header)
            for step, seconds in points:
                writer.row({"loss": 1.0}, "d", time_ns=START + round(seconds * SECOND), step=step)
            for kind, since, until, spent in spans:
                times = {"since": START + round(since * SECOND), "t": START + round(until * SECOND)}
                writer.append((Kind.EVENT, {"event": "span", "kind": kind, "ns": round(spent * SECOND), "n": 1, **times}))
            writer.close({"status": "finished" if end > 0 else "killed", "t": START + round(abs(end) * SECOND)})
    return root / project / id


def parts_of(folder):
    found = goodput(fanfold.open(folder))
    assert sum(found.ns.values()) == found.wall_ns
    return {part: round(ns / 1e9, 6) for part, ns in found.ns.items() if ns}


def test_ranks_are_averaged_and_those_that_log_nothing_step_with_the_others(tmp_path):
    points = [(step, 10 + step) for step in range(1, 11)]  # a step each second, after ten of start-up
    lives = [{0: (0, points, [("data", 12, 20, 4.0)], 22), 1: (0, [], [("ranks", 12, 20, 2.0)], 22)}]
    folder = write(tmp_path, "r", lives)
    found = parts_of(folder)
    assert found == {
        "productive": pytest.approx(7.0, abs=0.6),
        "startup": pytest.approx(10, abs=0.6),
        "data": 2.0,
        "ranks": 1.0,
        "idle": 2.0,
    }
    assert goodput(fanfold.open(folder)).unmeasured == ["checkpoint", "evaluation"]


def test_a_long_pause_that_nothing_explains_is_unknown(tmp_path):
    points = [(step, step + (60 if step > 5 else 0)) for step in range(1, 11)]
    assert parts_of(write(tmp_path, "r", [{0: (0, points, [], 70)}])) == {"productive": 10.0, "unknown": 60.0}


def test_an_attempt_that_never_came_to_a_step_is_start_up(tmp_path):
    folder = write(tmp_path, "r", [{0: (0, [], [], -30)}])
    assert parts_of(folder) == {"unknown": 30.0}  # a run without a single metric: nothing is known
    folder = write(tmp_path, "s", [{0: (0, [(1, 2), (2, 3), (3, 4)], [], -4)}])
    assert parts_of(folder) == {"productive": 3.0, "startup": 1.0}


odd = some.floats(-5, 50, allow_nan=False)
spans = some.lists(some.tuples(some.sampled_from([*KINDS, "new"]), odd, odd, some.floats(0, 60)), max_size=6)
points = some.lists(some.tuples(some.integers(-3, 30), odd), max_size=12)
lives = some.lists(
    some.dictionaries(some.integers(0, 2), some.tuples(odd, points, spans, odd), min_size=1), min_size=1, max_size=3
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(lives)
def test_whatever_a_journal_holds_the_parts_add_up(tmp_path_factory, lives):
    folder = write(tmp_path_factory.mktemp("any"), "r", lives)
    found = goodput(fanfold.open(folder))
    assert sum(found.ns.values()) == found.wall_ns
    assert min(found.ns.values()) >= 0


def test_clickhouse_answers_the_same(planned, clickhouse):
    fleet = Fleet(clickhouse)
    try:
        fleet.ship(planned[0])
        assert goodput(fleet.store().run("p", "planned")).ns == goodput(fanfold.open("planned", dir=planned[0])).ns
        assert main(["goodput", "--project", "p", "--by", "node", "--dir", fleet.url]) == 0
    finally:
        fleet.close()
