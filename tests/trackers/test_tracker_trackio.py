"""Trackio under the tracker contract, read back through its own storage class."""

import json
import os
import sqlite3
import textwrap
from datetime import datetime
from pathlib import Path

from fanfold.testing import ALL, Seen
from fanfold.trackers.base import flat_config
from fanfold.trackers.trackio import TrackioTracker
from warm_contract import WarmContract

META = ("step", "timestamp", "run", "run_id", "project")


class TestTrackio(WarmContract):
    name = "trackio"
    holds = ALL - {"metric"}

    def environment(self, folder: Path) -> dict[str, str]:
        return {"TRACKIO_DIR": str(folder / "trackio"), "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}

    @staticmethod
    def read(folder: Path) -> Seen:
        from trackio.sqlite_storage import SQLiteStorage

        runs = SQLiteStorage.get_run_records("contract")
        (run_id,) = {run["id"] for run in runs}
        name = runs[0]["name"]
        seen = Seen(runs=len(runs))
        for row in SQLiteStorage.get_logs("contract", name, run_id=run_id):
            for key, value in row.items():
                if key in META:
                    continue
                if isinstance(value, dict) and value["_type"] == "trackio.markdown":
                    seen.texts.setdefault(key, []).append(value["_value"])
                elif isinstance(value, dict):
                    assert value["_type"].removeprefix("trackio.") == {"figure": "image", "plotly": "html", "many": "table"}.get(
                        key, key
                    )
                    seen.media[key] = seen.media.get(key, 0) + 1
                elif isinstance(value, str):
                    seen.texts.setdefault(key, []).append(value)
                else:
                    seen.scalars.setdefault(key, []).append((row["step"], value))
        config = SQLiteStorage.get_run_config("contract", name, run_id=run_id) or {}
        seen.config = flat_config({key: value for key, value in config.items() if not key.startswith("_")})
        seen.summary = config.get("summary")
        seen.alerts = [f"{found['title']}: {found['text']}" for found in SQLiteStorage.get_alerts("contract", run_id=run_id)]
        seen.tags, seen.status = config.get("tags"), config.get("status")
        seen.artifacts = [found["name"] for found in SQLiteStorage.list_artifacts("contract")]
        return seen

    def database(self, folder: Path, query: str) -> list:
        with sqlite3.connect(folder / "trackio" / "contract.db") as found:
            return list(found.execute(query))

    def test_rows_carry_the_time_of_the_call_and_our_id(self, tmp_path):
        done = self.play(tmp_path, "run.log({'x': 1.0}, step=1)\nprint(time.time())\nrun.finish(timeout=120)")
        assert done.returncode == 0, done.stderr
        ((moment, run_id, name),) = self.database(tmp_path, "SELECT timestamp, run_id, run_name FROM metrics")
        assert 0 <= float(done.stdout) - datetime.fromisoformat(moment).timestamp() < 5
        assert (run_id, name) == ("contract-1", "contract run")

    def test_a_run_stays_in_the_folder_where_it_began(self, tmp_path):
        for step, more in ((1, {}), (2, {"TRACKIO_DIR": str(tmp_path / "elsewhere")})):
            done = self.play(tmp_path, f"run.log({{'x': 1.0}}, step={step})\nrun.finish(timeout=120)\n", **more)
            assert done.returncode == 0, done.stderr
        assert self.seen(tmp_path).scalars == {"x": [[1, 1.0], [2, 1.0]]}
        assert not list(tmp_path.glob("elsewhere/*.db"))

    def test_keys_that_trackio_needs_itself_arrive_as_it_spells_them(self, tmp_path):
        seen = self.delivered(tmp_path, "run.log({'step': 7.0, 'time': 2, '__x': 3}, step=1)")
        assert seen.scalars == {"__step": [[1, 7.0]], "__time": [[1, 2]], "____x": [[1, 3]]}

    def test_a_config_that_changes_is_replaced_and_adds_no_rows(self, tmp_path):
        seen = self.delivered(tmp_path, """
            run.config.update({"lr": 0.1, "huge": 2**70, "_mine": 1})
            run.tags = ["a", "b"]
            run.log({"x": 1.0}, step=0)
            run.config.update({"lr": 0.2})
        """)  # fmt: skip
        assert seen.config == {"lr": 0.2, "huge": str(2**70), "config_mine": 1, "tags": ["a", "b"], "status": "finished"}
        assert self.database(tmp_path, "SELECT COUNT(*) FROM metrics") == [(1,)]

    def test_media_after_a_second_start_leave_the_config_as_it_is(self, tmp_path):
        picture = "import numpy as np\nrun.log({'image': fanfold.Image(np.zeros((4, 4, 3), np.uint8))}, step=1)"
        self.delivered(tmp_path, "run.config.update({'lr': 0.1})\nrun.log({'x': 1.0}, step=0)")
        seen = self.delivered(tmp_path, picture)
        assert seen.media == {"image": 1}
        assert (seen.config["lr"], seen.status) == (0.1, "finished")

    def test_lists_of_images_are_one_value_of_their_key(self, tmp_path):
        self.delivered(tmp_path, """
            import numpy as np
            image = np.zeros((4, 4, 3), np.uint8)
            run.log({"many": [fanfold.Image(image), fanfold.Image(image)]}, step=0)
        """)  # fmt: skip
        ((row,),) = self.database(tmp_path, "SELECT metrics FROM metrics")
        found = json.loads(row)
        cells = [cell["many"] for cell in found["many"]["_value"]]
        assert [cell["_type"] for cell in cells] == ["trackio.image", "trackio.image"]
        assert all((tmp_path / "trackio" / "media" / cell["file_path"]).is_file() for cell in cells)

    def test_by_hand_tensors_and_huge_integers_are_not_skipped(self, tmp_path):
        script = """
            import torch
            from fanfold.trackers.trackio import TrackioTracker
            tracker = TrackioTracker("by-hand", name="one", auto_log_cpu=False)
            tracker.start()
            tracker.store_init_configuration({"big": 2**70, "tensor": torch.ones(2)})
            tracker.log({"loss": torch.tensor(0.5), "huge": 2**70, "plain": 1}, step=3)
            tracker.finish()
            from trackio.sqlite_storage import SQLiteStorage
            (row,) = SQLiteStorage.get_logs("by-hand", "one")
            config = SQLiteStorage.get_run_config("by-hand", "one")
            assert (row["loss"], row["huge"], row["plain"], row["step"]) == (0.5, float(2**70), 1, 3), row
            assert (config["big"], config["tensor"]) == (str(2**70), [1.0, 1.0]), config
        """
        done = self.script(tmp_path, script)
        assert done.returncode == 0, done.stderr

    def test_in_a_thread_it_leaves_a_run_of_the_users_own_open(self, tmp_path):
        script = f"""
            import fanfold, trackio
            mine = trackio.init("mine", name="mine", auto_log_cpu=False)
            run = fanfold.init("contract", dir={str(tmp_path / "runs")!r}, trackers=["trackio"], relay="thread", system=False)
            run.log({{"x": 1.0}}, step=0)
            trackio.log({{"y": 2.0}})
            run.finish(timeout=60)
            trackio.finish()
            from trackio.sqlite_storage import SQLiteStorage
            assert [row["y"] for row in SQLiteStorage.get_logs("mine", "mine")] == [2.0]
            (other,) = SQLiteStorage.get_run_records("contract")
            assert [row["x"] for row in SQLiteStorage.get_logs("contract", other["name"])] == [1.0]
        """
        done = self.script(tmp_path, script)
        assert done.returncode == 0, done.stderr

    def test_a_server_gets_rows_media_config_and_files(self, tmp_path):
        client = """
            import sys, time
            import numpy as np
            from pathlib import Path
            from fanfold import Image
            from fanfold.trackers.base import Identity, Point
            from fanfold.trackers.trackio import TrackioTracker
            tracker = TrackioTracker("contract", server_url=sys.argv[1])
            tracker.destination.open(Identity("id-1", "one", "contract", None, Path()))
            tracker.store_init_configuration({"lr": 0.1})
            picture = Image(np.zeros((4, 4, 3), np.uint8))
            tracker.write([*(Point({"x": float(i)}, i, time.time()) for i in range(20)), Point({"image": picture}, 20)])
            tracker.settle()
            Path("weights.bin").write_bytes(b"weights")
            tracker.artifact(Path("weights.bin"), "weights")
            tracker.close("failed")
        """
        (tmp_path / "client.py").write_text(textwrap.dedent(client))
        server = """
            import os, subprocess, sys, trackio
            shown = trackio.show(open_browser=False, block_thread=False)
            address = next(part for part in shown if isinstance(part, str) and "write_token" in part)
            env = {**os.environ, "TRACKIO_DIR": os.environ["TRACKIO_DIR"] + "-client"}
            done = subprocess.run([sys.executable, "client.py", address], env=env, timeout=100)
            sys.stdout.flush()
            os._exit(done.returncode)
        """
        done = self.script(tmp_path, server)
        assert done.returncode == 0, done.stderr
        seen = self.seen(tmp_path)
        assert self._same(seen.scalars["x"], [(i, float(i)) for i in range(20)])
        assert (seen.media, seen.artifacts, seen.status, seen.config["lr"]) == ({"image": 1}, ["weights"], "failed", 0.1)


def test_a_server_without_a_token_is_said(monkeypatch, tmp_path):
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WRITE_TOKEN", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    assert TrackioTracker.unusable() is None
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:7860")
    assert "TRACKIO_WRITE_TOKEN" in TrackioTracker.unusable()
    monkeypatch.setitem(os.environ, "TRACKIO_WRITE_TOKEN", "secret")
    assert TrackioTracker.unusable() is None
