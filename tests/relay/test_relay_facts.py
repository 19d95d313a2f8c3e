"""Summary, metric definitions and alerts on their way to a tracker: through the same cursor as points, over restarts."""

import json
import logging
from pathlib import Path

import pytest

import fanfold
import relay_trackers
from fanfold.relay import serve
from fanfold.trackers import Destination, register_tracker_class


class Book(Destination):
    """Keep every call as a line of a file."""

    name = "book"

    def __init__(self, run_name: str, path: str) -> None:
        super().__init__(run_name)
        self.path = Path(path)

    def note(self, *words) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(words) + "\n")

    def begin(self, identity, remote):
        self.note("start")
        return self.path

    def add(self, key, value, point) -> None:
        self.note("point", key, point.step)

    def set_summary(self, values) -> None:
        self.note("summary", dict(values))

    def define_metric(self, key, *, x, summary) -> None:
        self.note("metric", key, x, summary)

    def alert(self, alert) -> None:
        if (self.path.parent / "down").exists():
            raise ConnectionError("it is down")
        self.note("alert", alert.title, alert.level, alert.step, alert.id)

    def close(self, status) -> None:
        self.note("close", status)


@pytest.fixture
def book(tmp_path):
    register_tracker_class(Book)
    yield tmp_path / "book"
    fanfold.trackers.LOGGER_TYPE_TO_CLASS.pop("book", None)


def delivered(run: Path, book: Path) -> list[list]:
    """Deliver what is left and return the calls this made."""
    before = len(book.read_text().splitlines()) if book.exists() else 0
    serve(run, "book", {"path": str(book)}, {}, follow=False).release()  # else it is kept until the process ends
    return [json.loads(line) for line in book.read_text().splitlines()[before:]]


def attempt(tmp_path: Path, step: int, body) -> Path:
    run = fanfold.init("p", id="r", dir=tmp_path / "runs", system=False, quiet=True)
    run.log({"x": 1.0}, step=step)
    body(run)
    run.finish()
    return run.path


def test_each_is_delivered_once_and_a_second_attempt_brings_what_is_new(tmp_path, book):
    def first(run):
        run.summary["best"] = 1
        run.define_metric("val/*", x="epoch", summary="min")
        run.alert("one", level="info")

    def second(run):
        run.summary["best"] = 2
        run.alert("two", level="error")

    run = attempt(tmp_path, 3, first)
    calls = delivered(run, book)
    id_of_one = next(call[4] for call in calls if call[0] == "alert")
    assert calls == [
        ["start"], ["summary", {"best": 1}], ["metric", "val/*", "epoch", "min"], ["alert", "one", "info", 3, id_of_one],
        ["point", "x", 3], ["close", "finished"],
    ]  # fmt: skip
    assert delivered(run, book) == []
    attempt(tmp_path, 4, second)
    calls = delivered(run, book)
    assert [call for call in calls if call[0] in ("summary", "metric")] == [["summary", {"best": 2}]]
    assert [call[1] for call in calls if call[0] == "alert"] == ["two"]
    assert delivered(run, book) == []


def test_an_alert_that_could_not_be_delivered_comes_later_and_under_the_same_id(tmp_path, book, monkeypatch):
    monkeypatch.setattr("fanfold.relay.worker.RETRY_SECONDS", (0.01, 0.02))
    run = attempt(tmp_path, 0, lambda run: run.alert("late"))
    (tmp_path / "down").touch()
    cursor = serve(run, "book", {"path": str(book)}, {}, follow=False)
    cursor.release()
    assert "it is down" in cursor.error
    (tmp_path / "down").unlink()
    assert [call[1] for call in delivered(run, book) if call[0] == "alert"] == ["late"]
    assert delivered(run, book) == []


def test_a_tracker_without_them_goes_on_and_one_line_for_each_says_so(tmp_path, caplog):
    tracker = relay_trackers.Lines("mine", path=str(tmp_path / "lines"))
    with caplog.at_level(logging.WARNING, "fanfold"):
        run = fanfold.init("p", dir=tmp_path / "runs", trackers=[tracker], system=False, quiet=True)
        for i in range(3):
            run.summary["best"] = i
            run.define_metric(f"val/{i}", summary="min")
            run.alert(f"alert {i}")
            run.log({"x": i}, step=i)
        run.finish()
    events = [json.loads(line)["event"] for line in (tmp_path / "lines").read_text().splitlines()]
    assert events == ["start", "log", "log", "log", "finish"]
    for what in ("a run summary", "definitions of metrics", "alerts"):
        assert caplog.text.count(f"lines has no place for {what}") == 1
