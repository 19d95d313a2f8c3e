"""Azure Machine Learning under the tracker contract. Its offline Run keeps nothing, so what it prints is checked."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from warm_contract import WarmContract


def printed(text: str) -> list[tuple[str, str]]:
    """Take the metrics out of what an offline Run printed."""
    return re.findall(r"^Attempted to log \w+ metric (.*):\n(.*)$", text, re.MULTILINE)


class TestAzureML(WarmContract):
    name = "azure_ml"
    reads = False
    holds = frozenset()

    def log(self, folder: Path) -> str:
        return next(folder.rglob("relay/azure_ml.log")).read_text()

    def test_every_number_is_handed_over_in_order(self, tmp_path: Path) -> None:
        self.delivered(tmp_path, "for i in range(200): run.log({'loss': 1 / (i + 1), 'n': i}, step=i)")
        wanted = [pair for i in range(200) for pair in (("loss", str(1 / (i + 1))), ("n", str(i)))]
        assert printed(self.log(tmp_path)) == wanted

    def test_numbers_texts_media_files_config_and_status_are_handed_over(self, tmp_path: Path) -> None:
        (tmp_path / "model.bin").write_bytes(b"weights")
        self.delivered(tmp_path, f"""
            import numpy as np
            run.config.update({{"lr": 0.1, "long": "x" * 7000, "nested": {{"a": None}}}})
            run.log({{"nan": float("nan"), "note": "hello", "image": fanfold.Image(np.zeros((4, 4, 3), np.uint8)),
                     "table": fanfold.Table(columns=["a"], data=[[1], [2]]), "odd": fanfold.Table(columns=["a"], data=[[None]]),
                     "audio": fanfold.Audio(np.zeros(80, np.int16), sample_rate=8000)}}, step=7)
            run.artifact({str(tmp_path / "model.bin")!r}, name="model")
        """)  # fmt: skip
        log = self.log(tmp_path)
        found = dict(printed(log))
        assert (found["nan"], found["note"], found["table"]) == ("nan", "hello", "{'a': [1, 2]}")
        assert found["image"].endswith("7.png")
        for words in ("track file logged/audio/7.wav", "track file logged/odd/7.json", "track file artifacts/model at "):
            assert words in log
        assert re.search(r"set tags \{'config.lr': '0.1', 'config.long': '\"?x{999,1000}', 'config.nested/a': 'null'\}", log)
        assert "add tag fanfold.status with value finished" in log

    def test_it_says_once_that_nothing_is_kept_outside_a_job(self, tmp_path: Path) -> None:
        self.delivered(tmp_path, "run.log({'x': 1.0}, step=0)")
        assert self.log(tmp_path).count("keeps nothing. The journal has everything") == 1

    def test_by_hand_it_logs_to_the_run_it_is_given(self, tmp_path: Path) -> None:
        script = """
from azureml.core.run import Run
from fanfold.trackers.azureml import AzureMLTracker
mine = Run.get_context()
tracker = AzureMLTracker("by-hand", azureml_run=mine)
tracker.start()
assert tracker.tracker is mine
tracker.log({"loss": 0.5}, step=3, description="how bad it is")
tracker.finish()
"""
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=100,
            env={**os.environ, "HOME": str(tmp_path)},
        )  # fmt: skip
        assert printed(done.stdout) == [("loss", "0.5")], done.stderr
