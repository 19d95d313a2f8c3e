"""wandb under the tracker contract, offline, read back from its own transaction logs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fanfold.testing import ALL, Seen
from fanfold.trackers._wandb_log import WandbLog, logs_of, put
from fanfold.trackers.base import flat_config
from fanfold.trackers.wandb import EXIT_CODES, STEP, WandBTracker
from warm_contract import WarmContract

OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_CONSOLE": "off", "WANDB_DISABLE_GIT": "true"}
TYPES = {
    "image-file": "image",
    "histogram": "histogram",
    "table-file": "table",
    "audio-file": "audio",
    "video-file": "video",
    "html-file": "html",
    "plotly-file": "plotly",
    "images/separated": "images",
}


def places(folder: Path) -> dict[str, str]:
    return {f"WANDB_{name}_DIR": str(folder / "wb" / name.lower()) for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT")}


def history(log: WandbLog) -> list[dict]:
    rows = []
    for record in WandbLog(log.path).records():
        if record.WhichOneof("record_type") == "history":
            rows.append({})
            for item in record.history.item:
                put(rows[-1], item)
    return rows


def facts(logs: list[WandbLog]) -> tuple[dict, dict, list]:
    """Return summary, metric definitions and alerts."""
    summary, metrics, alerts = {}, {}, []
    for log in logs:
        for record in WandbLog(log.path).records():
            kind = record.WhichOneof("record_type")
            if kind == "summary":
                for item in record.summary.update:
                    put(summary, item)
            elif kind == "metric":
                rules = [name for name in ("min", "max", "mean", "last", "first", "none") if getattr(record.metric.summary, name)]
                found = {"x": record.metric.step_metric, "summary": rules[0] if rules else None}
                metrics[record.metric.glob_name or record.metric.name] = found
            elif kind == "alert":
                alerts.append(f"{record.alert.level} {record.alert.title}: {record.alert.text}")
    return summary, metrics, alerts


def description(logs: list[WandbLog]) -> tuple[dict, list, list, int | None]:
    config, tags, artifacts, code = {}, [], [], None
    for log in logs:
        for record in WandbLog(log.path).records():
            kind = record.WhichOneof("record_type")
            if kind in ("config", "run"):
                for item in (record.config if kind == "config" else record.run.config).update:
                    put(config, item)
            if kind == "run":
                tags = list(record.run.tags)
            elif kind == "artifact":
                artifacts.append(record.artifact.name)
            elif kind == "exit":
                code = record.exit.exit_code
    return config, tags, artifacts, code


class TestWandb(WarmContract):
    name = "wandb"
    holds = ALL

    def environment(self, folder: Path) -> dict[str, str]:
        return {**OFFLINE, **places(folder)}

    @staticmethod
    def read(folder: Path) -> Seen:
        logs = [WandbLog(path) for path in sorted((folder / "runs").rglob("*.wandb"))]
        seen = Seen(runs=len({log.path.name for log in logs}))
        for row in (row for log in logs for row in history(log)):
            for key, value in row.items():
                if key.startswith("_") or key == STEP:
                    continue
                if isinstance(value, dict):
                    assert TYPES[value["_type"]] == {"figure": "image", "many": "images"}.get(key, key)
                    seen.media[key] = seen.media.get(key, 0) + 1
                elif isinstance(value, str):
                    seen.texts.setdefault(key, []).append(value)
                else:
                    seen.scalars.setdefault(key, []).append((row[STEP], value))
        config, seen.tags, seen.artifacts, code = description(logs)
        seen.config = flat_config({key: value for key, value in config.items() if key != "_wandb"})
        seen.summary, seen.metrics, seen.alerts = facts(logs)
        seen.status = {number: name for name, number in EXIT_CODES.items()}.get(code)
        return seen

    def test_steps_that_only_grow_are_wandbs_own_steps_too(self, tmp_path):
        self.delivered(tmp_path, """
            for i in range(5):
                run.log({"x": float(i)}, step=i * 10)
                run.log({"y": float(i)}, step=i * 10)
        """)  # fmt: skip
        (log,) = (WandbLog(path) for path in (tmp_path / "runs").rglob("*.wandb"))
        rows = [(row["_step"], row[STEP], row["x"], row["y"]) for row in history(log)]
        assert rows == [(i * 10, i * 10, i, i) for i in range(5)]

    def test_rows_carry_the_time_of_the_call_and_not_of_the_delivery(self, tmp_path):
        body = "run.log({'x': 1.0}, step=1)\nprint(time.time())\nrun.finish(timeout=120)"
        done = self.play(tmp_path, body, **self.dying_relay(tmp_path, times=6))  # as often as it is started
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "dying" / "died").exists(), done.stderr
        for path in (tmp_path / "runs").rglob("*.wandb"):
            path.unlink()  # so that it is delivered again, seconds later
        assert self.sync(tmp_path).returncode == 0
        (log,) = (WandbLog(path) for path in (tmp_path / "runs").rglob("*.wandb"))
        (row,) = history(log)
        assert row["_timestamp"] <= float(done.stdout) < log.path.stat().st_mtime

    def test_the_sign_of_zero_is_in_wandbs_log(self, tmp_path):
        """As JSON writes it, `-0`: a reader that makes an integer of that, as wandb's Python API does, shows 0."""
        self.delivered(tmp_path, "run.log({'x': -0.0, 'y': 0.0}, step=0)")
        (log,) = (WandbLog(path) for path in (tmp_path / "runs").rglob("*.wandb"))
        rows = [record.history for record in log.records() if record.WhichOneof("record_type") == "history"]
        written = {item.nested_key[0]: item.value_json for item in rows[0].item}
        assert (written["x"], written["y"]) == ("-0", "0")

    def test_lists_of_images_are_one_value_of_their_key(self, tmp_path):
        self.delivered(tmp_path, """
            import numpy as np
            image = np.zeros((4, 4, 3), np.uint8)
            run.log({"many": [fanfold.Image(image), fanfold.Image(image)]}, step=0)
        """)  # fmt: skip
        (log,) = (WandbLog(path) for path in (tmp_path / "runs").rglob("*.wandb"))
        (row,) = history(log)
        assert (row["many"]["_type"], row["many"]["count"]) == ("images/separated", 2)
        assert log.refresh().keys["many"] == 1

    def test_keys_that_are_wandbs_own_are_refused_and_the_rest_of_the_call_arrives(self, tmp_path):
        seen = self.delivered(tmp_path, "run.log({'_step': 7, 'x': 1.0}, step=3)")
        assert seen.scalars == {"x": [[3, 1]]}
        cursor = next((tmp_path / "runs" / "contract" / "contract-1" / "relay").glob("*.cursor"))
        assert json.loads(cursor.read_text())["refused"] == 1

    def test_by_hand_values_steps_and_arguments_go_to_wandb_as_they_are(self, tmp_path):
        script = """
            from fanfold.trackers.wandb import WandBTracker
            tracker = WandBTracker("by-hand", dir=".")
            tracker.start()
            tracker.log({"a": 1.5, "nested": {"b": 2}}, step=4, commit=False)
            tracker.log({"c": 3}, step=4)
            tracker.log_table("rows", columns=["x"], data=[[1]], step=5)
            import numpy as np
            tracker.log_images({"pictures": [np.zeros((4, 4, 3), np.uint8)]}, step=6)
            tracker.finish()
        """
        done = self.script(tmp_path, script)
        assert done.returncode == 0, done.stderr
        (log,) = (WandbLog(path) for path in (tmp_path / "wandb").rglob("*.wandb"))
        first, second, third = history(log)
        assert (first["_step"], first["a"], first["nested"]["b"], first["c"]) == (4, 1.5, 2, 3)
        assert (second["rows"]["_type"], third["pictures"]["count"]) == ("table-file", 1)
        assert log.refresh().exit == 0


def test_a_log_is_read_on_while_it_grows_and_a_torn_end_waits(tmp_path):
    """The bytes of a real log, given out in three pieces, the first two of them torn inside a record."""
    script = (
        "import wandb\n"
        f"run = wandb.init(project='p', id='grown', dir={str(tmp_path)!r})\n"
        "for i in range(3000): run.log({'x': i, 'text': 'word ' * 5}, step=i)\n"
        "run.log({'long': 'y' * 100_000}, step=4000)\n"
        "run.finish()\nwandb.teardown()\n"
    )
    env = {**os.environ, **OFFLINE, **places(tmp_path), "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", script], env=env, check=True, timeout=120)
    (whole,) = logs_of(tmp_path / "wandb", "grown")
    data = whole.path.read_bytes()
    growing = WandbLog(tmp_path / "copy.wandb")
    assert growing.refresh().seen["history"] == 0
    seen = []
    for end in (70_001, 200_003, len(data)):
        growing.path.write_bytes(data[:end])
        seen.append(growing.refresh().seen["history"])
    assert 0 < seen[0] < seen[1] < seen[2] == whole.refresh().seen["history"] == 3001
    assert (growing.keys["x"], growing.keys["long"], growing.last_step, growing.exit) == (3000, 1, 4000, 0)


def test_without_a_key_it_says_what_to_do(monkeypatch, tmp_path):
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "wandb login" in WandBTracker.unusable()
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password 0123\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert WandBTracker.unusable() is None
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert "wandb login" in WandBTracker.unusable()


@pytest.mark.parametrize("settings", [{"WANDB_MODE": "offline"}, {"WANDB_API_KEY": "x" * 40}])
def test_with_a_key_or_offline_it_can_start(monkeypatch, tmp_path, settings):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert WandBTracker.unusable() is None
