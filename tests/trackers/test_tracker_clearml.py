"""ClearML under the tracker contract, read back from the offline session it would import."""

import json
import zipfile
from pathlib import Path

import pytest

from fanfold.testing import ALL, Seen
from fanfold.trackers.clearml import ClearMLTracker, key_of, place_of
from tracker_lives import three_lives
from warm_contract import WarmContract


class TestClearML(WarmContract):
    name = "clearml"
    holds = ALL - {"metric", "alert"}

    def environment(self, folder: Path) -> dict[str, str]:
        return {"CLEARML_OFFLINE_MODE": "1"}

    @staticmethod
    def read(folder: Path) -> Seen:
        found = sorted((folder / "runs").rglob("trackers/clearml/offline/*.zip"))
        with zipfile.ZipFile(found[0]) as archive:
            seen = _about(json.loads(archive.read("task.json")))
            for line in archive.read("metrics.jsonl").splitlines():
                for event in json.loads(line):
                    _take(seen, archive, event)
        seen.runs = len([path for path in found[0].parent.iterdir() if path.is_dir()])
        return seen

    def test_tags_name_notes_and_config_are_as_they_were_given(self, tmp_path: Path) -> None:
        body = """
            run.tags = ["a", "b"]
            run.config.update({"name": "größer", "nested": {"list": [1, None]}, "long": "x" * 7000})
            run.log({"x": 1.0}, step=0)
        """
        assert self.delivered(tmp_path, body).tags == ["a", "b"]
        task = json.loads(next((tmp_path / "runs").rglob("task.json")).read_text())
        assert json.loads(task["configuration"]["config"]["value"])["name"] == "größer"
        assert json.loads(task["configuration"]["config"]["value"])["long"] == "x" * 7000
        assert (task["name"], task["project_name"]) == ("contract run", "contract")

    def test_media_of_two_attempts_are_all_there_as_the_bytes_they_were(self, tmp_path: Path) -> None:
        body = """
            import numpy as np
            pictures = [fanfold.Image(np.full((8, 8, 3), {} + i, np.uint8)) for i in range(7)]
            for i, picture in enumerate(pictures[:6]):
                run.log({{"one": picture}}, step={} + i)
            run.log({{"many": pictures}}, step={})
        """
        for attempt in (0, 100):
            seen = self.delivered(tmp_path, body.format(attempt, attempt, attempt))
        assert seen.media == {"one": 12, "many": 14}
        with zipfile.ZipFile(next((tmp_path / "runs").rglob("trackers/clearml/offline/*.zip"))) as archive:
            pictures = {archive.read(name) for name in archive.namelist() if name.endswith(".png")}
        assert len(pictures) == 14

    def test_it_works_in_the_training_process_too(self, tmp_path: Path) -> None:
        done = self.play(
            tmp_path, "for i in range(500): run.log({'x': float(i)}, step=i)\nrun.finish(timeout=60)", relay="thread"
        )
        assert done.returncode == 0, done.stderr
        assert self._same(self.seen(tmp_path).scalars["x"], [(i, float(i)) for i in range(500)])

    def test_each_run_of_a_process_has_a_session_of_its_own(self, tmp_path: Path) -> None:
        done = self.script(tmp_path, """
import fanfold
def run(name):
    return fanfold.init("p", id=name, dir="runs", system=False, quiet=True, trackers=["clearml"], relay="thread")
first = run("first")
first.log({"x": 1.0}, step=0)
first.finish(timeout=60)
second, third = run("second"), run("third")
second.log({"x": 2.0}, step=0)
third.log({"x": 3.0}, step=0)
second.finish(timeout=60)
third.finish(timeout=60)
""")  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = {}
        for path in (tmp_path / "runs").rglob("*.zip"):
            with zipfile.ZipFile(path) as archive:
                events = [event for line in archive.read("metrics.jsonl").splitlines() for event in json.loads(line)]
            found[path.relative_to(tmp_path / "runs").parts[1]] = [event["value"] for event in events]
        assert found == {"first": [1.0], "second": [2.0], "third": [3.0]}, done.stderr

    def test_files_keep_their_names(self, tmp_path: Path) -> None:
        self.delivered(tmp_path, """
            run.log({"x": 1.0}, step=0)
            open("weights.bin", "wb").write(b"weights")
            run.artifact("weights.bin", name="best/weights.bin")
        """)  # fmt: skip
        (file,) = (path for path in tmp_path.rglob("weights.bin") if path.parent != tmp_path)
        assert file.read_bytes() == b"weights"
        task = json.loads(next((tmp_path / "runs").rglob("task.json")).read_text())
        (artifact,) = task["execution"]["artifacts"]
        assert (artifact["key"], artifact["uri"].rpartition("/")[2]) == ("best/weights.bin", "weights.bin")

    def test_a_relay_killed_after_many_settles_loses_and_repeats_nothing(self, tmp_path: Path) -> None:
        torn = """[path.open("a").write('[{"torn') for path in Path("runs").rglob("metrics.jsonl")]"""
        seen = three_lives(self, tmp_path, "val/x", before=torn)
        assert self._same(seen.scalars["val/x"], [(i, float(i)) for i in range(3000)])
        assert (seen.runs, seen.status) == (1, "finished")

    def test_training_keeps_its_random_numbers_signals_and_hooks(self, tmp_path: Path) -> None:
        script = """
import random, signal, sys
from pathlib import Path
import numpy, torch
from fanfold.trackers.base import Identity
from fanfold.trackers.clearml import ClearMLTracker

def state():
    return random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

import clearml
before, hooks = state(), (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), sys.excepthook, sys.stdout)
tracker = ClearMLTracker("p")
tracker.destination.open(Identity("r", "n", "p", None, Path("here").absolute()))
after = (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), sys.excepthook, sys.stdout)
assert state()[1:] == before[1:], "numpy or torch"
assert after == hooks
tracker.finish()
print("well")
"""
        done = self.script(tmp_path, script)
        assert "well" in done.stdout, done.stderr

    def test_by_hand_keys_become_the_titles_and_series_accelerate_makes(self, tmp_path: Path) -> None:
        script = """
import numpy as np
import torch
from fanfold.trackers.clearml import ClearMLTracker
tracker = ClearMLTracker("by-hand", auto_connect_frameworks=False, auto_connect_streams=False, auto_resource_monitoring=False)
before = np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
tracker.start()
assert (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
tracker.log({"eval_loss": 1.0, "test_acc": 2.0, "train_loss": 3.0, "lr": 4.0}, step=7)
tracker.log({"best": 5.0})
tracker.log_images({"eval_picture": np.zeros((4, 4, 3), np.uint8)}, step=7)
tracker.log_table("test_table", columns=["a"], data=[[1]], step=7)
tracker.finish()
"""
        done = self.script(tmp_path, script, CLEARML_CACHE_DIR=str(tmp_path / "cache"))
        assert done.returncode == 0, done.stderr
        lines = next((tmp_path / "cache").rglob("metrics.jsonl")).read_text().splitlines()
        got = {(e["metric"], e["variant"], e["iter"], e.get("value")) for line in lines for e in json.loads(line)}
        assert got == {
            ("loss", "eval", 7, 1.0),
            ("acc", "test", 7, 2.0),
            ("loss", "train", 7, 3.0),
            ("lr", "train", 7, 4.0),
            ("Summary", "best", -(2**31), 5.0),
            ("picture", "eval", 7, None),
            ("table", "test", 7, None),
        }

    def test_a_task_that_is_open_already_is_used_and_left_open(self, tmp_path: Path) -> None:
        script = """
from clearml import Task
task = Task.init(project_name="p", task_name="t", auto_connect_frameworks=False)
from fanfold.trackers.clearml import ClearMLTracker
tracker = ClearMLTracker("other")
tracker.start()
assert tracker.tracker is task
tracker.finish()
assert Task.current_task() is task
task.close()
print("well")
"""
        (tmp_path / "clearml.conf").write_text("sdk { development { report_use_subprocess: false } }")
        where = {"CLEARML_CACHE_DIR": str(tmp_path / "cache"), "CLEARML_CONFIG_FILE": str(tmp_path / "clearml.conf")}
        assert "well" in self.script(tmp_path, script, **where).stdout


def _about(task: dict) -> Seen:
    parameters = task["hyperparams"]
    return Seen(
        config={name: found["value"] for name, found in parameters.get("config", {}).items()},
        artifacts=[found["key"] for found in task.get("execution", {}).get("artifacts") or []],
        tags=sorted(task.get("tags") or []),
        summary={
            name.removeprefix("summary."): found["value"]
            for name, found in parameters["properties"].items()
            if name.startswith("summary.")
        },
        status=parameters["properties"]["fanfold_status"]["value"],
    )


def _take(seen: Seen, archive: zipfile.ZipFile, event: dict) -> None:
    title, series = event["metric"], event["variant"].partition(" [")[0]
    if title == "Summary":  # a single value
        seen.summary[series] = event["value"]
        return
    key = title if title == series else f"{series}/{title}"
    if event["type"] == "training_stats_scalar":
        seen.scalars.setdefault(key, []).append((event["iter"], event["value"]))
    elif event["type"] == "training_debug_image" and event["key"].endswith(".txt"):
        seen.texts.setdefault(key, []).append(archive.read(f"data/{event['key']}").decode())
    else:
        seen.media[key] = seen.media.get(key, 0) + 1


@pytest.mark.parametrize("key", ["loss", "val/loss", "a/b/c", "a/a", "eval_loss", "/x", "x/", "a/a/a", "k [2/3]/x", "k [2/3]"])
def test_every_key_comes_back_from_its_title_and_series(key: str) -> None:
    assert key_of(*place_of(key)) == key


@pytest.mark.parametrize(
    ("environment", "usable"),
    [({}, False), ({"CLEARML_OFFLINE_MODE": "1"}, True), ({"CLEARML_API_ACCESS_KEY": "k"}, True)],
)
def test_it_says_without_credentials_that_it_cannot_start(
    environment: dict, usable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CLEARML_OFFLINE_MODE", "CLEARML_API_ACCESS_KEY", "CLEARML_AUTH_TOKEN", "CLEARML_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (ClearMLTracker.unusable() is None) == usable
    (tmp_path / "clearml.conf").write_text("api {}\n")
    assert ClearMLTracker.unusable() is None
