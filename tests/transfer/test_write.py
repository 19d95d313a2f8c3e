"""Events become a run: with their times, attempts and ranks, once however often they are imported."""

import numpy as np
import pytest

import fanfold
from fanfold.transfer import events, importing
from fanfold.transfer.find import Sighting
from fanfold.transfer.importers import importers
from fanfold.transfer.importing import Import

SECOND = 1_000_000_000
T0 = 1_700_000_000 * SECOND


class Scripted:
    """An importer whose runs are lists of events; a position is how many were read."""

    kind = "scripted"
    title = "Scripted"

    def __init__(self, runs):
        self.runs = runs

    def find(self, path):
        for name in self.runs:
            yield events.Found(kind="scripted", id=name, paths=(path,), project="p", name=name)

    def read(self, found, position=None):
        script = self.runs[found.id]
        yield from script[position or 0 :]
        yield events.Mark(position=len(script))


def rows(steps, rank=0, times=True, **columns):
    steps = np.array(steps)
    when = T0 + steps * SECOND if times else None
    return events.Rows(steps=steps, times=when, columns={k: np.array(v) for k, v in columns.items()}, rank=rank)


@pytest.fixture
def bring(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    file = source / "f"
    file.write_text("0")

    def bring(runs, **options):
        file.write_text(str(sum(len(script) for script in runs.values())))
        work = Import([source], dir=tmp_path / "runs", **options)
        work.search.chosen = [Scripted(runs)]
        return work.once()

    return bring


def opened(tmp_path, account):
    return fanfold.open(account.run, dir=tmp_path / "runs")


def test_points_keep_their_times_types_and_ranks(bring, tmp_path):
    loss = np.array([0.1, np.nan, np.inf])
    small = np.array([0.1, 0.2, 0.3], np.float32)
    script = [
        events.Start(time_ns=T0),
        rows([0, 1, 2], loss=loss, small=small, count=[1, 2**60, 3], flag=[True, False, True]),
        rows([0, 1], rank=3, loss=[5.0, 6.0]),
        events.Rows(steps=None, times=np.array([T0]), columns={"cpu": np.array([7.0])}, system=True),
        events.End(status="finished", time_ns=T0 + 9 * SECOND),
    ]
    (account,) = bring({"a": script})
    run = opened(tmp_path, account)
    assert (account.outcome, account.points, account.left) == ("imported", 15, [])
    np.testing.assert_array_equal(run.series("loss").values, loss)
    np.testing.assert_array_equal(run.series("small").values, small.astype(np.float64))
    assert run.series("count").values.tolist() == [1, 2**60, 3] and run.series("count").values.dtype == np.int64
    assert run.series("flag").values.tolist() == [True, False, True]
    assert run.series("loss").times.tolist() == [T0 / SECOND + step for step in range(3)]
    assert run.series("loss", rank=3).values.tolist() == [5.0, 6.0]
    assert run.series("system/cpu").values.tolist() == [7.0] and run.keys("system") == ["system/cpu"]
    assert (run.status, run.duration, run.damaged, run.ranks) == ("finished", 9.0, 0, [0, 3])


def test_importing_again_adds_only_what_is_new(bring, tmp_path):
    script = [events.Start(time_ns=T0), events.Facts(config={"a": 1}), rows([0, 1], loss=[1.0, 2.0])]
    (first,) = bring({"a": script})
    before = sorted((tmp_path / "runs").rglob("*.ffj"))
    assert bring({"a": script})[0].outcome == "unchanged"
    assert sorted((tmp_path / "runs").rglob("*.ffj")) == before
    script += [events.Facts(config={"b": 2}), rows([2], loss=[3.0]), events.End(status="failed", time_ns=T0 + 5 * SECOND)]
    (second,) = bring({"a": script})
    run = opened(tmp_path, first)
    assert (second.outcome, second.points, second.run) == ("updated", 1, first.run)
    assert run.series("loss").values.tolist() == [1.0, 2.0, 3.0]
    assert run.config == {"a": 1, "b": 2}
    assert (run.status, len(run.attempts)) == ("failed", 1)


def test_points_after_the_end_mean_that_the_run_goes_on(bring, tmp_path):
    script = [events.Start(time_ns=T0), rows([0], loss=[1.0]), events.End(status="finished", time_ns=T0)]
    bring({"a": script})
    script += [events.Facts(notes="later")]
    (account,) = bring({"a": script})
    assert opened(tmp_path, account).status == "finished"  # a fact that was added does not bring it back to life
    script += [rows([1], loss=[2.0])]
    bring({"a": script})
    run = opened(tmp_path, account)  # at rest again: the end of its source is no longer true
    assert (run.status, run.attempts[-1].ends()[-1]["time"]) == ("finished", T0 + SECOND)
    script += [events.End(status="finished", time_ns=T0 + 2 * SECOND)]
    bring({"a": script})
    run = opened(tmp_path, account)
    assert (run.status, run.notes, run.series("loss").values.tolist()) == ("finished", "later", [1.0, 2.0])


def test_a_later_attempt_hides_what_it_logged_again(bring, tmp_path):
    script = [
        events.Start(time_ns=T0, attempt="1"),
        rows([0, 1, 2], loss=[0.0, 1.0, 2.0]),
        events.End(status="killed", time_ns=T0 + 3 * SECOND),
        events.Start(time_ns=T0 + 10 * SECOND, attempt="2"),
        rows([1, 2], loss=[10.0, 20.0]),
        events.End(status="finished", time_ns=T0 + 20 * SECOND),
    ]
    (account,) = bring({"a": script})
    run = opened(tmp_path, account)
    assert run.series("loss").values.tolist() == [0.0, 10.0, 20.0]
    assert run.series("loss", raw=True).values.tolist() == [0.0, 1.0, 2.0, 10.0, 20.0]
    assert [attempt.verdict()["status"] for attempt in run.attempts] == ["killed", "finished"]


def test_values_without_times_are_spread_over_the_run(bring, tmp_path):
    script = [
        events.Start(time_ns=T0),
        rows([0, 50, 100], times=False, loss=[1.0, 2.0, 3.0]),
        events.Values(step=50, time_ns=None, values={"note": "half"}),
        events.End(status="finished", time_ns=T0 + 1000 * SECOND),
    ]
    (account,) = bring({"a": script})
    run = opened(tmp_path, account)
    assert (run.series("loss").times - T0 / SECOND).tolist() == [0, 500, 1000]
    assert run.texts("note")[0].time - T0 / SECOND == 500


def test_an_import_that_was_killed_is_continued_exactly(bring, tmp_path, monkeypatch):
    script = [events.Start(time_ns=T0), rows([0], loss=[1.0])]
    (account,) = bring({"a": script})
    script += [rows([1], loss=[2.0]), rows([2], loss=[3.0], rank=1)]

    class Killed(BaseException):
        pass

    def kill(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("fanfold.transfer.write.msgspec.msgpack.encode", kill)  # the journals are written, the record is not
        with pytest.raises(Killed):
            bring({"a": script})
    bring({"a": script})
    run = opened(tmp_path, account)
    assert run.series("loss", rank=0).values.tolist() == [1.0, 2.0]
    assert run.series("loss", rank=1).values.tolist() == [3.0]
    assert run.damaged == 0


def test_everything_else_is_carried(bring, tmp_path):
    picture = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    (tmp_path / "model.bin").write_bytes(b"weights")
    (tmp_path / "link").symlink_to(tmp_path / "model.bin")
    script = [
        events.Start(time_ns=T0),
        events.Facts(name="nice", group="g", tags=["x"], notes="n", config={"lr": 0.1, "api_key": "sk-1234567890abcdef"}),
        events.Facts(summary={"best": 3.0}, facts={"command": ["train.py"]}),
        events.Definition(key="acc", options={"x": "epoch", "summary": "max"}),
        rows([0, 1], acc=[2.0, 1.0], epoch=[0, 1]),
        events.Values(
            step=1, time_ns=T0, values={"note": "hello", "pic": fanfold.Image(picture), "two": [fanfold.Text("a")] * 2}
        ),
        events.Artifact(name="model", files=[("m.bin", tmp_path / "model.bin"), ("l", tmp_path / "link")], metadata={"k": 1}),
        events.Console(text="epoch 1\n", time_ns=T0),
        events.Alert(title="hot", text="very", level="warn", step=1, time_ns=T0),
        events.Left(what="graph", why="not shown", count=2, example="g"),
    ]
    (account,) = bring({"a": script}, tags=["imported"])
    run = opened(tmp_path, account)
    assert (run.name, run.group, run.tags, run.notes) == ("nice", "g", ["x", "imported"], "n")
    assert run.config == {"lr": 0.1, "api_key": "***"}
    assert run.summary["best"] == 3.0 and run.summary["acc"] == 2.0
    assert run.facts["command"] == ["train.py"] and run.facts["imported"]["from"] == "scripted"
    assert run.texts("note")[0].text == "hello"
    np.testing.assert_array_equal(run.media("pic")[0].load().array(), picture)
    (artifact,) = run.artifacts
    assert artifact["name"] == "model" and run.blob(artifact["files"][0]["blob"]) == b"weights"
    assert len(artifact["files"]) == 1
    assert run.console() == b"epoch 1\n"
    assert (run.alerts[0]["title"], run.alerts[0]["level"]) == ("hot", "warning")
    assert (account.points, account.texts, account.media, account.files, account.alerts) == (4, 1, 3, 1, 1)
    assert [(left.what, left.count) for left in account.left] == [("file", 1), ("graph", 2)]


def test_an_importer_that_raises_loses_only_the_rest(bring, tmp_path):
    class Raising(Scripted):
        def read(self, found, position=None):
            yield rows([0], loss=[1.0])
            raise ValueError("torn")

    work = Import([tmp_path / "source"], dir=tmp_path / "runs")
    work.search.chosen = [Raising({"a": []})]
    (account,) = work.once()
    assert opened(tmp_path, account).series("loss").values.tolist() == [1.0]
    assert "torn" in account.left[0].why


def test_a_dry_run_counts_and_writes_nothing(bring, tmp_path):
    (account,) = bring({"a": [rows([0, 1], loss=[1.0, 2.0])]}, dry_run=True)
    assert (account.outcome, account.points) == ("would be imported", 2)
    assert not (tmp_path / "runs").exists()


def test_a_run_that_fanfold_sent_there_has_no_twin(tmp_path):
    run = fanfold.init("p", dir=tmp_path / "runs", quiet=True, system=False, id="mine")
    run.log({"loss": 1.0})
    run.finish()

    class Returned(Scripted):
        def find(self, path):
            yield events.Found(kind="scripted", id="far", paths=(path,), project="q", fanfold_id="mine")

    (tmp_path / "source").mkdir()
    for folder, outcome in (("runs", "known"), ("other", "imported")):
        work = Import([tmp_path / "source"], dir=tmp_path / folder)
        work.search.chosen = [Returned({"far": [rows([0], loss=[1.0])]})]
        (account,) = work.once()
        assert (account.outcome, account.run) == (outcome, "mine")
        assert [one.id for one in fanfold.runs(dir=tmp_path / folder)] == ["mine"]


def test_names_choose_runs_and_a_project_can_be_given(bring, tmp_path):
    script = [rows([0], loss=[1.0])]
    (account,) = bring({"resnet-1": script, "vit-1": script}, name="res*", project="vision/x")
    assert (account.name, account.project) == ("resnet-1", "vision/x")
    assert [run.project for run in fanfold.runs(dir=tmp_path / "runs")] == ["vision/x"]


def test_two_imports_of_one_run_do_not_mix(bring, tmp_path):
    (account,) = bring({"a": [rows([0], loss=[1.0])]})
    found = events.Found(kind="scripted", id="a", paths=(tmp_path / "source",), project="p")
    one = Sighting(Scripted({"a": []}), found, "s")
    work = Import([tmp_path / "source"], dir=tmp_path / "runs")
    import subprocess
    import sys

    code = f"""
import fcntl, sys, time
file = open({str(tmp_path / "runs" / "p" / account.run / "import.lock")!r}, "r+")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "locked\n"
    assert work._import(one, live=False).outcome == "busy"
    holder.communicate("")
    assert importing.run_id_of(found) == account.run


def test_another_package_adds_an_importer_and_a_broken_one_costs_only_itself(tmp_path, monkeypatch, caplog):
    """Found by the entry points of installed packages, as pip would leave them."""
    packages, source = tmp_path / "packages", tmp_path / "source"
    (packages / "mine-1.0.dist-info").mkdir(parents=True)
    (packages / "mine-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (packages / "mine-1.0.dist-info" / "entry_points.txt").write_text(
        "[fanfold.importers]\nbroken = mine_importer:Missing\nmine = mine_importer:Mine\n"
    )
    (packages / "mine_importer.py").write_text("""
import numpy as np
from fanfold.transfer.events import Found, Rows

class Mine:
    kind, title = "mine", "Mine"

    def find(self, path):
        if path.suffix == ".mine":
            yield Found(kind="mine", id=path.name, paths=(path,), project="p", name=path.stem)

    def read(self, found, position=None):
        yield Rows(steps=np.arange(3), times=np.arange(3) + 1_700_000_000 * 10**9, columns={"loss": np.array([3.0, 2.0, 1.0])})
""")
    source.mkdir()
    (source / "a.mine").write_text("")
    monkeypatch.syspath_prepend(packages)
    importers.cache_clear()
    try:
        (account,) = fanfold.import_runs(source, dir=tmp_path / "runs")
        assert (account.kind, account.name, account.points) == ("mine", "a", 3)
        assert opened(tmp_path, account).series("loss").values.tolist() == [3.0, 2.0, 1.0]
        assert "the importer 'broken' (mine_importer:Missing) cannot be loaded" in caplog.text
    finally:
        importers.cache_clear()
