"""SwanLab under the tracker contract, offline, read back with SwanLab's own store reader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml

from fanfold.testing import ALL, Seen
from warm_contract import WarmContract

STATES = {"RUN_STATE_FINISHED": "finished", "RUN_STATE_CRASHED": "failed", "RUN_STATE_ABORTED": "killed"}


def scalar(seen: Seen, record, folder: Path) -> None:
    seen.scalars.setdefault(record.key, []).append((record.step, record.value.number))


def media(seen: Seen, record, folder: Path) -> None:
    seen.media[record.key] = seen.media.get(record.key, 0) + 1
    for item in record.value.items:
        found = next(folder.rglob(item.filename))
        assert found.stat().st_size == item.size
        if found.suffix == ".txt":
            seen.texts.setdefault(record.key, []).append(found.read_text())


def save(seen: Seen, record, folder: Path) -> None:
    if "/artifacts/" in record.source_path:
        assert Path(record.source_path).read_bytes() == b"weights"
        seen.artifacts.append(record.name)


def finish(seen: Seen, record, folder: Path) -> None:
    from swanlab.proto.swanlab.run.v1.run_pb2 import RunState

    seen.status = STATES[RunState.Name(record.state)]


READERS = {"scalar": scalar, "media": media, "save": save, "finish": finish}


class TestSwanLab(WarmContract):
    name = "swanlab"
    holds = ALL - {"repeat", "tags", "metric", "alert"}

    def environment(self, folder: Path) -> dict[str, str]:
        return {"SWANLAB_MODE": "offline", "SWANLAB_SAVE_DIR": str(folder / "swan")}

    @staticmethod
    def read(folder: Path) -> Seen:
        from fanfold.trackers._swanlab_store import records

        seen, ids = Seen(artifacts=[], config={}), set()
        for file in sorted((folder / "runs").rglob("*.swanlab"), key=lambda path: path.stat().st_mtime_ns):
            for record in records(file):
                kind = record.WhichOneof("record_type")
                if kind == "start":
                    ids.add(record.start.id)
                elif kind in READERS:
                    READERS[kind](seen, getattr(record, kind), file.parent)
            for written in file.parent.rglob("config.yaml"):
                seen.config = {key: entry["value"] for key, entry in yaml.safe_load(written.read_text()).items()}
            seen.summary = seen.config.get("summary", seen.summary)
        seen.runs = len(ids)
        return seen

    def test_the_second_value_of_a_step_is_counted_as_refused(self, tmp_path: Path) -> None:
        seen = self.delivered(tmp_path, "for v in (1.0, 2.0, 3.0): run.log({'x': v, 'y': v}, step=4)")
        cursor = json.loads(next(tmp_path.rglob("relay/*.cursor")).read_text())
        assert (seen.scalars["x"], seen.scalars["y"]) == ([[4, 1.0]], [[4, 1.0]])
        assert cursor["refused"] == 4

    def test_each_start_has_the_whole_config_because_each_is_synced_alone(self, tmp_path: Path) -> None:
        self.delivered(tmp_path, "run.config.update({'lr': 0.1, 'none': None})\nrun.log({'x': 1.0}, step=0)")
        seen = self.delivered(tmp_path, "run.config.update({'lr': 0.2})\nrun.log({'x': 2.0}, step=1)")
        assert (seen.config["lr"], seen.config["none"]) == (0.2, "None")

    def test_steps_and_keys_swanlab_would_drop_are_refused_and_the_rest_arrives(self, tmp_path: Path) -> None:
        seen = self.delivered(tmp_path, """
            run.log({"x": 1.0}, step=-3)
            run.log({"x": 2.0, "__swanlab__.cpu": 1.0, "odd\\x01key": 1.0}, step=1)
            run.log({"x": "a text under a number's key"}, step=2)
            run.log({"x": 3.0}, step=3)
        """)  # fmt: skip
        assert seen.scalars["x"] == [[1, 2.0], [3, 3.0]]
        assert json.loads(next(tmp_path.rglob("relay/*.cursor")).read_text())["refused"] == 4

    def test_by_hand_it_takes_swanlabs_own_objects_and_images(self, tmp_path: Path) -> None:
        script = """
import numpy as np, swanlab
from fanfold.trackers._swanlab_store import records
from fanfold.trackers.swanlab import SwanLabTracker
tracker = SwanLabTracker("by-hand", log_dir="logs")
tracker.start()
tracker.log({"loss": 0.5, "note": swanlab.Text("hi")}, step=0)
tracker.log({"loss": 0.25, "note": swanlab.Text("again")}, step=0)
tracker.log({"loss": 0.125}, step=np.float64(1.0))
tracker.log({"lost": 0.5}, step=1.5)
tracker.log_images({"pictures": [np.zeros((4, 4, 3), np.uint8)] * 2}, step=1)
where = tracker.run.dir
tracker.finish()
found = [r for r in records(next(where.glob("*.swanlab"))) if r.WhichOneof("record_type") in ("scalar", "media")]
print(sorted((r.scalar.key, r.scalar.value.number) if r.WhichOneof("record_type") == "scalar"
             else (r.media.key, len(r.media.value.items)) for r in found))
"""
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=100,
            env={**os.environ, "HOME": str(tmp_path), **self.environment(tmp_path)},
        )  # fmt: skip
        assert done.stdout.splitlines()[-1] == "[('loss', 0.125), ('loss', 0.5), ('note', 1), ('pictures', 2)]", done.stderr
        for words in (
            "swanlab does not take 'loss'",
            "swanlab does not take 'note'",
            "swanlab does not take 'lost': SwanLab takes whole steps",
        ):
            assert words in done.stderr
