"""Neptune's legacy client under the tracker contract, offline, read back with its own disk queue and collector."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

from fanfold.testing import ALL, Seen
from warm_contract import WarmContract


def queued(folder: Path):
    """Read a folder of operations as `neptune sync` does; from a copy, because the queue writes how far it has read."""
    from neptune.core.components.queue.disk_queue import DiskQueue
    from neptune.internal.operation import Operation

    copy = Path(tempfile.mkdtemp()) / "copy"
    shutil.copytree(folder, copy)
    queue = DiskQueue(copy, lambda item: item.to_dict(), Operation.from_dict, threading.RLock())
    while (element := queue.get()) is not None:
        yield element.obj
    queue.close()
    shutil.rmtree(copy.parent)


def floats(seen: Seen, path: str, operation, folder: Path) -> None:
    seen.scalars.setdefault(path, []).extend((value.step, value.value) for value in operation.values)


def strings(seen: Seen, path: str, operation, folder: Path) -> None:
    seen.texts.setdefault(path, []).extend(value.value for value in operation.values)


def images(seen: Seen, path: str, operation, folder: Path) -> None:
    assert base64.b64decode(operation.values[0].value.data).startswith(b"\x89PNG")
    seen.media[path] = seen.media.get(path, 0) + 1


def file(seen: Seen, path: str, operation, folder: Path) -> None:
    if operation.tmp_file_name:
        data = (folder / "upload_path" / operation.tmp_file_name).read_bytes()
        assert data
        key = path.rsplit("/", 1)[0]
        if key.endswith("_long"):
            seen.texts.setdefault(key.removesuffix("_long"), []).append(data.decode())
        seen.media[key] = seen.media.get(key, 0) + 1
    else:
        assert Path(operation.file_path).read_bytes() == b"weights"
        seen.artifacts.append(path)


def tags(seen: Seen, path: str, operation, folder: Path) -> None:
    if path == "sys/tags":
        seen.tags = sorted({*(seen.tags or []), *operation.values})


def assigned(seen: Seen, path: str, operation, folder: Path) -> None:
    if path == "fanfold/status":
        seen.status = operation.value
    elif path.startswith("summary/"):
        seen.summary = {**(seen.summary or {}), path.removeprefix("summary/"): operation.value}
    elif path.startswith("parameters/"):
        seen.config[path.removeprefix("parameters/")] = operation.value


READERS = {
    "LogFloats": floats, "LogStrings": strings, "LogImages": images, "UploadFile": file, "AddStrings": tags,
    "AssignString": assigned, "AssignInt": assigned, "AssignFloat": assigned, "AssignBool": assigned,
}  # fmt: skip


def offline(folder: Path):
    """Find the offline runs below a folder, as `neptune sync` finds them."""
    from neptune.cli.collect import collect_offline_containers

    place = next((folder / "runs").rglob("trackers/neptune"))
    return list(collect_offline_containers(path=place))


class TestNeptune(WarmContract):
    name = "neptune"
    holds = ALL - {"nan", "inf", "metric", "alert"}

    def environment(self, folder: Path) -> dict[str, str]:
        return {"NEPTUNE_MODE": "offline"}

    @staticmethod
    def read(folder: Path) -> Seen:
        found = offline(folder)
        seen = Seen(artifacts=[], config={}, runs=len(found))
        places = [directory.path for container in found for directory in container.execution_dirs]
        for place in sorted(places, key=lambda path: json.loads((path / "metadata.json").read_text())["createdAt"]):
            for operation in queued(place):
                read = READERS.get(type(operation).__name__)
                if read is not None:
                    read(seen, "/".join(operation.path), operation, place)
        return seen

    def test_what_is_no_number_for_neptune_is_beside_it_with_its_step(self, tmp_path: Path) -> None:
        seen = self.delivered(tmp_path, """
            for step, value in enumerate([1.0, float("nan"), 2.0, -float("inf")]):
                run.log({"x": value}, step=step)
        """)  # fmt: skip
        assert seen.scalars["x"] == [[0, 1.0], [2, 2.0]]
        assert seen.texts["x_nonfinite"] == ["nan", "-inf"]

    def test_keys_that_are_folder_and_field_at_once_or_of_two_types_all_arrive(self, tmp_path: Path) -> None:
        seen = self.delivered(tmp_path, """
            run.log({"loss": 1.0, "loss/mean": 2.0, "a/b": 3.0, "a": 4.0, "sys/tags": 5.0}, step=0)
            run.log({"loss": "a text"}, step=1)
            run.log({"note": "n" * 3000}, step=1)
        """)  # fmt: skip
        assert {key: points[0][1] for key, points in seen.scalars.items()} == {
            "loss": 1.0, "loss.mean": 2.0, "a/b": 3.0, "a_number": 4.0, "logged/sys/tags": 5.0,
        }  # fmt: skip
        assert seen.texts["loss_text"] == ["a text"]
        assert seen.media["note_long"] == 1

    def test_a_killed_relay_repeats_neither_odd_numbers_nor_renamed_keys_nor_media(self, tmp_path: Path) -> None:
        body = """
            import numpy as np
            for i in range(20):
                run.log({"x": float("nan") if i % 3 else float(i), "x/y": float(i), "h": fanfold.Html(f"<p>{i}"),
                         "i": [fanfold.Image(np.full((4, 4, 3), i, np.uint8))] * 2}, step=i)
            run.finish(timeout=120)
        """
        done = self.play(tmp_path, textwrap.dedent(body), **self.dying_relay(tmp_path))
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "dying" / "died").exists(), done.stderr
        done = self.sync(tmp_path)
        assert done.returncode == 0, done.stderr
        seen = self.seen(tmp_path)
        assert seen.scalars["x"] == [[i, float(i)] for i in range(0, 20, 3)]
        assert seen.texts["x_nonfinite"] == ["nan"] * 13
        assert seen.scalars["x.y"] == [[i, float(i)] for i in range(20)]
        assert (seen.media["h"], seen.media["i"]) == (20, 40)

    def test_a_list_of_images_cut_by_a_kill_is_completed_and_not_repeated(self, tmp_path: Path) -> None:
        body = """
            import os
            import numpy as np
            from fanfold.trackers.neptune import Neptune
            append = Neptune._append
            def dying(self, path, value, point, **words):
                append(self, path, value, point, **words)
                if words.get("description") == "2 of 3" and point.step == 1:
                    self.settle()
                    os._exit(9)
            Neptune._append = dying
            for i in range(3):
                run.log({"i": [fanfold.Image(np.full((4, 4, 3), 10 * i + n, np.uint8)) for n in range(3)]}, step=i)
            run.finish(timeout=120)
        """
        self.play(tmp_path, textwrap.dedent(body), relay="thread")
        done = self.sync(tmp_path)
        assert done.returncode == 0, done.stderr
        assert self.seen(tmp_path).media["i"] == 9

    def test_a_second_attempt_keeps_folders_and_fields_apart_too(self, tmp_path: Path) -> None:
        self.delivered(tmp_path, "run.log({'loss': 1.0, 'a/b': 2.0}, step=0)")
        seen = self.delivered(tmp_path, "run.log({'loss/mean': 3.0, 'a': 4.0, 'loss': 5.0}, step=1)")
        assert {key: [value for _, value in points] for key, points in seen.scalars.items()} == {
            "loss": [1.0, 5.0], "a/b": [2.0], "loss.mean": [3.0], "a_number": [4.0],
        }  # fmt: skip
        assert seen.runs == 1

    def test_by_hand_it_takes_neptunes_own_files_and_its_arguments(self, tmp_path: Path) -> None:
        script = """
import PIL.Image
from neptune.types import File
from fanfold.trackers._neptune_offline import operations
from fanfold.trackers.neptune import NeptuneTracker
from pathlib import Path
tracker = NeptuneTracker("by-hand", git_ref=False, source_files=[], capture_stdout=False, capture_stderr=False)
tracker.start()
tracker.log({"loss": 0.5, "file": File.as_image(PIL.Image.new("L", (4, 4)))}, step=3)
tracker.finish()
print([(op["type"], op["path"][-1]) for op in operations(Path(".neptune"))
       if op["type"].startswith("Log") and op["path"][0] != "monitoring"])
print([op["value"] for op in operations(Path(".neptune")) if op["path"] == ["sys", "name"]])
"""
        done = subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=100,
            env={**os.environ, "HOME": str(tmp_path), **self.environment(tmp_path)},
        )  # fmt: skip
        assert done.stdout.splitlines()[-2:] == ["[('LogFloats', 'loss'), ('LogImages', 'file')]", "['by-hand']"], done.stderr
