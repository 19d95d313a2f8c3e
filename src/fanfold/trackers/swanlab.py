"""SwanLab: one run per process, written by a thread that silently drops invalid values, so they are checked here first."""

from __future__ import annotations

import glob
import io
import os
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..plain import plain
from ._swanlab_store import arrival_counter, points_of, quiet_settings, records, spelled_out, step_set, type_of, written_config
from .base import Identity, Point, Refusal, Refused
from .destination import Destination, Item
from .face import Tracker
from .tools import cell_of, copied, mapped

MAX_STEP = 1 << 48  # SwanLab's own limit
LONGEST_KEY = 512
_STATES = {"finished": "success", "failed": "crashed"}


class SwanLab(Destination):
    """Log to the SwanLab project `run_name`; other arguments go to `swanlab.init`."""

    name = "swanlab"
    own_media = frozenset({"Image"})
    main_process_only = False
    delivery = "readable"
    delivery_online = "at least once"
    accepts = frozenset()

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self._steps: defaultdict[str, Any] = defaultdict(step_set)  # that each key has
        self._kinds: dict[str, str] = {}
        self._batch: set[tuple[str, int]] = set()
        self._sent = 0
        self.arrived = 0  # values written by SwanLab's thread

    @classmethod
    def unusable(cls) -> str | None:
        if os.environ.get("SWANLAB_MODE") in ("offline", "local", "disabled") or os.environ.get("SWANLAB_API_KEY"):
            return None
        home = os.environ.get("SWANLAB_ROOT") or os.environ.get("SWANLAB_SAVE_DIR") or Path.home() / ".swanlab"
        known = any((Path(folder) / ".netrc").exists() for folder in (home, ".swanlab"))
        return None if known else "no API key: run `swanlab login`, or set SWANLAB_MODE=offline"

    def open(self, identity: Identity | None, remote: str | None = None) -> None:
        super().open(identity, remote)
        if identity is not None:  # load the steps and config of earlier starts: each folder stores them separately
            for key, step in points_of(self._stores()):
                self._steps[key].add(step)
            for store in self._stores():
                self.run.config.update(written_config(store.parent))

    def begin(self, identity: Identity | None, remote: str | None) -> Any:
        swanlab = self.library
        arguments = dict(self.init_kwargs)
        if identity is not None:
            self.run_name = re.sub(r"[^0-9a-zA-Z_\-+.]", "_", self.run_name)[:100]  # init refuses other names
            own = {"name": identity.name[:512], "group": identity.group, "log_dir": str(identity.directory), "resume": "allow"}
            own["id"] = re.sub(r'[<>:"/\\|?*#%\x00-\x1f\x7f]', "_", identity.run_id)[:LONGEST_KEY]
            arguments = {"settings": quiet_settings(swanlab), **{key: value for key, value in own.items() if value}, **arguments}
            arguments |= {"id": remote} if remote else {}
        theirs = arguments.pop("callbacks", None) or []
        arguments["callbacks"] = [*([theirs] if isinstance(theirs, swanlab.Callback) else theirs), arrival_counter(swanlab, self)]
        run = swanlab.init(project=self.run_name, **arguments)
        run.config["FRAMEWORK"] = "fanfold"
        return run

    def close(self, status: str) -> None:
        state = _STATES.get(status, "aborted")
        self.finish(state=state, error=None if state == "success" else f"the run was {status}")

    def finish(self, **words: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.run._is_main_thread = False  # noqa: SLF001 - or it restores a signal handler, which only the main thread can
        self.run.finish(**words)

    def set_config(self, values: dict[str, Any]) -> None:
        self.run.config.update(mapped(plain(values), spelled_out))

    def describe(self, *, name: str | None, tags: Sequence[str], notes: str | None, group: str | None) -> None:
        """Store tags and notes in the config: SwanLab accepts them only at init, and ours may come later."""
        words = {"tags": list(tags), "notes": notes}
        if any(words.values()):
            self.run.config.update({f"fanfold.{key}": value for key, value in words.items() if value})

    def set_summary(self, values: Mapping[str, Any]) -> None:
        """Store the summary in the config: SwanLab has none."""
        self.run.config.update({"summary": mapped(plain(values), spelled_out)})

    def artifact(self, path: Path, name: str) -> None:
        """Store a copy next to the run: SwanLab records a link, and the file must exist when it syncs."""
        home = Path(self.run.dir).parent / "artifacts"
        self.run.save(glob.escape(str(copied(path, home, name))), base_path=str(home), policy="now")

    def write(self, points: Sequence[Point]) -> Sequence[Refusal]:
        self._batch = set()
        rows, refused = self.converted(points)
        for point, row in zip(points, rows, strict=True):
            if row:
                self._log(dict(row.values()), point)
        return refused

    def _log(self, values: dict[str, Any], point: Point) -> None:
        self.arguments(point)  # warns: SwanLab's log() takes none
        step = None if point.step is None else int(point.step)
        self.run.log(values, step=step)
        self._sent += len(values)
        for key in values if step is not None else ():
            self._steps[key].add(step)

    def convert(self, key: str, value: Any, point: Point) -> tuple[str, Any]:
        """Return name and value as SwanLab accepts them, or refuse what it would drop with only a line in its own log."""
        name, step = key.strip(" \t\n\r./")[:LONGEST_KEY], point.step
        if not name or re.search(r"[\x00-\x1f\x7f]", name) or name.startswith("__swanlab__"):
            raise Refused("SwanLab takes no such key")
        if step is not None:
            if not (0 <= step <= MAX_STEP and step == int(step)):
                raise Refused(f"SwanLab takes whole steps from 0 to 2**48, and this is step {step}")
            if (name, step) in self._batch or int(step) in self._steps[name]:
                raise Refused(f"SwanLab keeps the first value of a step, and there is one at step {step}")
        kind = type_of(value)
        if self._kinds.setdefault(name, kind) != kind:
            raise Refused(f"SwanLab keeps one type per key, and this one is {self._kinds[name]}")
        made = super().convert(key, value, point)
        if step is not None:
            self._batch.add((name, step))
        return name, made

    def settle(self) -> None:
        """Wait until SwanLab's thread has written everything sent, then flush its file, which it does not do itself."""
        while self.given is None and self.arrived < self._sent and self.run.alive:  # as long as it makes progress
            mark = self.arrived
            self.wait_until(lambda mark=mark: self.arrived > mark or not self.run.alive, "written all values")  # type: ignore[misc]
        store = getattr(getattr(self.run, "_core", None), "_store", None)
        if store is not None:
            store.ensure_flushed()

    def counts(self) -> dict[str, int] | None:
        """Count points in the folders of this run. None online: SwanLab asks the server itself, and drops steps it has."""
        if getattr(self.run, "mode", "") == "online":
            return None
        return dict(Counter(key for key, _ in points_of(self._stores())))

    def _stores(self) -> Iterator[Path]:
        """Yield the stores of this run: each start has its own folder, with the run's id inside."""
        if getattr(self.run, "mode", "") not in ("offline", "local"):
            return
        for file in sorted(Path(self.run.dir).parent.glob("run-*/run-*.swanlab")):
            first = next(records(file), None)
            if first is not None and first.start.id == self.run.id:
                yield file

    def take_text(self, item: Item) -> Any:
        return self.library.Text(item.text)

    def take_image(self, item: Item) -> Any:
        return self.library.Image(item.value.pil(), caption=item.caption)

    def take_html(self, item: Item) -> Any:
        return self.library.Html(item.value.html, **({"caption": item.caption} if item.kind == "plotly" else {}))

    def take_audio(self, item: Item) -> Any:
        """Pass on the WAV unchanged: the usual way needs soundfile, and encodes it again."""
        data, ext = item.content
        if ext != "wav":
            raise Refused(f"SwanLab takes WAV sound, and this is {ext}")
        audio = self.library.Audio.__new__(self.library.Audio)
        audio.buffer, audio.sample_rate, audio.caption = io.BytesIO(data), item.value.sample_rate, item.caption
        return audio

    def take_video(self, item: Item) -> Any:
        data, ext = item.content
        if ext != "gif":
            raise Refused(f"SwanLab takes GIF videos, and this is {ext}")
        return self.library.Video(data, caption=item.caption)

    def take_table(self, item: Item) -> Any:
        rows = [[cell_of(cell) for cell in row] for row in item.value.rows]
        return self.library.ECharts(self.library.echarts.Table().add(list(item.value.columns), rows))

    def take_histogram(self, item: Item) -> Any:
        """Return a bar chart: SwanLab has no histogram."""
        names = [f"{edge:.4g}" for edge in item.value.edges.tolist()][:-1]
        bars = self.library.echarts.Bar().add_xaxis(names).add_yaxis("count", item.value.counts.tolist())
        return self.library.ECharts(bars)


class SwanLabTracker(Tracker):
    destination_class = SwanLab
