"""Comet under the tracker contract, read back from the archives `comet upload` takes."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fanfold.testing import ALL, Seen
from fanfold.trackers.comet import CometMLTracker
from tracker_lives import three_lives
from warm_contract import WarmContract


class TestComet(WarmContract):
    name = "comet_ml"
    holds = ALL - {"metric"}

    def environment(self, folder: Path) -> dict[str, str]:
        return {"COMET_START_ONLINE": "0", "COMET_LOGGING_CONSOLE": "error"}

    @staticmethod
    def read(folder: Path) -> Seen:
        seen, keys, tags = Seen(config={}, artifacts=[], summary={}, alerts=[]), set(), set()
        for path in sorted((folder / "runs").rglob("trackers/comet_ml/*.zip"), key=lambda path: path.stat().st_mtime):
            with zipfile.ZipFile(path) as archive:
                about = json.loads(archive.read("experiment.json"))
                keys.add(about["offline_id"])
                tags |= set(about["tags"])
                for line in archive.read("messages.json").splitlines():
                    _take(seen, archive, json.loads(line))
        seen.runs, seen.tags = len(keys), sorted(tags)
        return seen

    def test_each_media_arrives_as_the_bytes_it_was(self, tmp_path: Path) -> None:
        body = """
            import numpy as np
            sound, picture = np.arange(-50, 50, dtype=np.int16), np.arange(192, dtype=np.uint8).reshape(8, 8, 3)
            run.log({"sound": fanfold.Audio(sound, sample_rate=8000), "many": [fanfold.Image(picture)] * 3}, step=1)
            open("sound", "wb").write(fanfold.Audio(sound, sample_rate=8000).encode().data)
            open("picture", "wb").write(fanfold.Image(picture).encode().data)
        """
        assert self.delivered(tmp_path, body).media == {"sound": 1, "many": 3}
        path = next((tmp_path / "runs").rglob("trackers/comet_ml/*.zip"))
        with zipfile.ZipFile(path) as archive:
            held = [archive.read(name) for name in archive.namelist()]
        assert held.count((tmp_path / "sound").read_bytes()) == 1
        assert held.count((tmp_path / "picture").read_bytes()) == 3

    def test_it_works_in_the_training_process_too(self, tmp_path: Path) -> None:
        done = self.play(
            tmp_path, "for i in range(500): run.log({'x': float(i)}, step=i)\nrun.finish(timeout=60)", relay="thread"
        )
        assert done.returncode == 0, done.stderr
        assert self._same(self.seen(tmp_path).scalars["x"], [(i, float(i)) for i in range(500)])

    def test_a_relay_killed_after_many_settles_loses_and_repeats_nothing(self, tmp_path: Path) -> None:
        """The archive Comet leaves then is empty; the messages it had written become one."""
        seen = three_lives(self, tmp_path, "x", first='tracker.describe(name="n", tags=["kept"], notes=None, group=None)')
        assert self._same(seen.scalars["x"], [(i, float(i)) for i in range(3000)])
        assert (seen.runs, seen.status, seen.tags) == (1, "finished", ["kept"])

    def test_what_is_archived_but_not_tidied_is_not_archived_again(self, tmp_path: Path) -> None:
        from fanfold.trackers import _comet_archives as archives

        key, folder = "k" * 32, tmp_path / "open"
        for _ in range(2):
            (folder / "tmpa").mkdir(parents=True)
            (folder / "tmpa" / "messages.json").write_text(
                '{"type":"metric_msg","payload":{"metric":{"metricName":"x"}}}\n{"type":"met'
            )
            archives.seal(folder, tmp_path, key, project="p", workspace=None)
        (folder / "tmpb").mkdir()
        (folder / "tmpb" / "messages.json").write_text('{"type":"metric_msg","payload":{"metric":{"metricName":"x"}}}\n')
        archives.seal(folder, tmp_path, key, project="p", workspace=None)
        assert [archives.key_of(message) for message in archives.messages(tmp_path, key)] == ["x"]

    def test_keys_longer_than_comet_allows_stay_two_keys(self, tmp_path: Path) -> None:
        body = "run.log({'k' * 150 + 'a': 1.0, 'k' * 150 + 'b': 2.0}, step=0)"
        assert sorted(points[0][1] for points in self.delivered(tmp_path, body).scalars.values()) == [1.0, 2.0]

    def test_a_second_experiment_in_the_process_does_not_cost_the_first_its_queue(self, tmp_path: Path) -> None:
        script = f"""
from pathlib import Path
from fanfold.trackers.base import Identity, Point
from fanfold.trackers.comet import CometMLTracker
trackers = [CometMLTracker("p"), CometMLTracker("p")]
for number, tracker in enumerate(trackers):
    tracker.destination.open(Identity(f"run-{{number}}", "n", "p", None, Path({str(tmp_path / "runs")!r}, "trackers", "comet_ml")))
    tracker.write([Point({{f"x{{number}}": float(i)}}, i) for i in range(3000)])
trackers[1].close("finished")
"""
        done = self.script(tmp_path, script)
        assert done.returncode == 0, done.stderr
        seen = self.seen(tmp_path)
        assert {key: len(points) for key, points in seen.scalars.items()} == {"x0": 3000, "x1": 3000}
        assert "another was open" in done.stderr

    def test_comet_switches_nothing_else_on(self, tmp_path: Path) -> None:
        body = """
            import sys
            run.log({"x": 1.0}, step=0)
            from pathlib import Path
            from fanfold.trackers.base import Identity
            from fanfold.trackers.comet import CometMLTracker
            out, err = sys.stdout, sys.stderr
            tracker = CometMLTracker("p")
            tracker.destination.open(Identity("other", "n", "p", None, Path("other").absolute()))
            assert (sys.stdout, sys.stderr) == (out, err)
            assert "codecarbon" not in sys.modules
            tracker.finish()
        """
        self.delivered(tmp_path, body)
        path = next((tmp_path / "runs").rglob("trackers/comet_ml/*.zip"))
        with zipfile.ZipFile(path) as archive:
            kinds = {json.loads(line)["type"] for line in archive.read("messages.json").splitlines()}
        assert kinds <= {"metric_msg", "parameter_msg", "log_other", "file_upload"}


def _take(seen: Seen, archive: zipfile.ZipFile, message: dict) -> None:
    payload = message["payload"]
    if message["type"] == "metric_msg" and payload["metric"]["metricName"] != "process duration":  # Comet's own, at the end
        metric = payload["metric"]
        seen.scalars.setdefault(metric["metricName"], []).append((metric["step"], float(metric["metricValue"])))
    elif message["type"] == "parameter_msg":
        found = payload.get("param") or payload["params"]
        seen.config[found["paramName"]] = found["paramValue"]
    elif message["type"] == "log_other" and payload["key"] == "fanfold_status":
        seen.status = payload["value"]
    elif message["type"] == "log_other":
        seen.summary[payload["key"]] = payload["value"]
    elif message["type"] == "file_upload":
        _take_file(seen, archive, payload)


def _take_file(seen: Seen, archive: zipfile.ZipFile, payload: dict) -> None:
    key = payload["metadata"].get("key")
    if "alert" in payload["metadata"]:
        seen.alerts.append(archive.read(payload["file_path"]).decode())
    elif payload["upload_type"] == "text-sample":
        seen.texts.setdefault(key, []).append(archive.read(payload["file_path"]).decode())
    elif key is None:
        seen.artifacts.append(payload["additional_params"]["fileName"])
    else:
        seen.media[key] = seen.media.get(key, 0) + 1


@pytest.mark.parametrize(
    ("environment", "usable"),
    [({}, False), ({"COMET_API_KEY": "k"}, True), ({"COMET_START_ONLINE": "0"}, True), ({"COMET_START_ONLINE": "1"}, False)],
)
def test_it_says_without_a_key_that_it_cannot_start(
    environment: dict, usable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("COMET_API_KEY", "COMET_START_ONLINE", "COMET_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (CometMLTracker.unusable() is None) == usable
    (tmp_path / ".comet.config").write_text("[comet]\napi_key = k\n")
    assert CometMLTracker.unusable() is None


def test_importing_the_adapter_does_not_import_comet() -> None:
    code = "import sys, fanfold.trackers.comet; print('comet_ml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
