"""SwanLab: one run per process, written by a thread that silently drops invalid values, so they are checked here first."""

from __future__ import annotations

import glob
import io
import math
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, ClassVar

from ._swanlab_store import points_of, records, step_set, written_config
from .base import Identity, Point, Refusal, Refused, clean, clean_config, on_main_process
from .destination import Destination, Item, kind_of
from .face import Tracker
from .tools import copied, mapped

MAX_STEP = 1 << 48  # SwanLab's own limit
LONGEST_KEY = 512
SETTLE_SECONDS = 30.0  # without any progress
_STATES = {"finished": "success", "failed": "crashed"}
_TYPES = {"video": "image", "figure": "image", "histogram": "echarts", "table": "echarts", "plotly": "html"}


class SwanLab(Destination):
    """Log to the SwanLab project `run_name`; other arguments go to `swanlab.init`."""

    name: ClassVar[str] = "swanlab"
    library_name: ClassVar[str] = "swanlab"
    main_process_only = False
    delivery: ClassVar[str] = "readable"
    delivery_online: ClassVar[str | None] = "at least once"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self._steps: dict[str, Any] = {}
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

    # Opening and closing

    def open(self, identity: Identity | None, remote: str | None = None) -> None:
        import swanlab

        arguments = dict(self.init_kwargs)
        if identity is not None:
            self.run_name = re.sub(r"[^0-9a-zA-Z_\-+.]", "_", self.run_name)[:100]  # init refuses other names
            own = {"name": identity.name[:512], "group": identity.group, "log_dir": str(identity.directory), "resume": "allow"}
            own["id"] = re.sub(r'[<>:"/\\|?*#%\x00-\x1f\x7f]', "_", identity.run_id)[:LONGEST_KEY]
            arguments = {"settings": _quiet(swanlab), **{key: value for key, value in own.items() if value}, **arguments}
        if remote is not None:
            arguments["id"] = remote
        theirs = arguments.pop("callbacks", None) or []
        arguments["callbacks"] = [*([theirs] if isinstance(theirs, swanlab.Callback) else theirs), _counter(swanlab, self)]
        self.run = self.given or swanlab.init(project=self.run_name, **arguments)
        if self.given is None:
            self.run.config["FRAMEWORK"] = "fanfold"
        if identity is not None:
            self._take_up()

    def _take_up(self) -> None:
        """Load what earlier starts of this run wrote: their steps, and their config, which each folder stores separately."""
        for key, step in points_of(self._stores()):
            self._seen(key).add(step)
        for store in self._stores():
            self.run.config.update(written_config(store.parent))

    @property
    def remote(self) -> str:
        return str(self.run.id)

    def close(self, status: str) -> None:
        state = _STATES.get(status, "aborted")
        self._end(state=state, error=None if state == "success" else f"the run was {status}")

    def finish(self) -> None:
        self._end()

    def _end(self, **words: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.run._is_main_thread = False  # noqa: SLF001 - or it restores a signal handler, which only the main thread can
        self.run.finish(**words)

    # Config and files

    def set_config(self, values: dict[str, Any]) -> None:
        self.run.config.update(mapped(clean_config(values), _spelled_out))

    def describe(self, *, name: str | None, tags: Sequence[str], notes: str | None, group: str | None) -> None:
        """Store tags and notes in the config: SwanLab accepts them only at init, and ours may come later."""
        del name, group  # set at init
        words = {"tags": list(tags), "notes": notes}
        if any(words.values()):
            self.run.config.update({f"fanfold.{key}": value for key, value in words.items() if value})

    def set_summary(self, values: Mapping[str, Any]) -> None:
        """Store the summary in the config: SwanLab has none."""
        self.run.config.update({"summary": mapped(clean_config(values), _spelled_out)})

    def artifact(self, path: Path, name: str) -> None:
        """Store a copy next to the run: SwanLab records a link, and the file must exist when it syncs."""
        home = Path(self.run.dir).parent / "artifacts"
        self.run.save(glob.escape(str(copied(path, home, name))), base_path=str(home), policy="now")

    # Points

    def write(self, points: Sequence[Point]) -> Sequence[Refusal]:
        self._batch = set()
        rows, refused = self.converted(points)
        for point, row in zip(points, rows, strict=True):
            if row:
                self._log(dict(row.values()), point.step, point.kwargs)
        return refused

    def _log(self, values: dict[str, Any], step: int | None, kwargs: Mapping[str, Any]) -> None:
        if kwargs:
            self.warn("kwargs", f"SwanLab's log() takes no {', '.join(kwargs)}; the values are logged without. Leave it out.")
        self.run.log(values, step=step)
        self._sent += len(values)
        if step is not None:
            for key in values:
                self._seen(key).add(step)

    def _seen(self, key: str) -> Any:
        return self._steps[key] if key in self._steps else self._steps.setdefault(key, step_set())

    def convert(self, key: str, value: Any, point: Point) -> tuple[str, Any]:
        """Return name and value as SwanLab accepts them, or refuse what it would drop with only a line in its own log."""
        name, step = key.strip(" \t\n\r./")[:LONGEST_KEY], point.step
        if not name or re.search(r"[\x00-\x1f\x7f]", name) or name.startswith("__swanlab__"):
            raise Refused("SwanLab takes no such key")
        if step is not None and not 0 <= step <= MAX_STEP:
            raise Refused(f"SwanLab takes steps from 0 to 2**48, and this is step {step}")
        if step is not None and ((name, step) in self._batch or step in self._seen(name)):
            raise Refused(f"SwanLab keeps the first value of a step, and there is one at step {step}")
        kind = _type_of(value)
        if self._kinds.setdefault(name, kind) != kind:
            raise Refused(f"SwanLab keeps one type per key, and this one is {self._kinds[name]}")
        made = super().convert(key, value, point)
        if step is not None:
            self._batch.add((name, step))
        return name, made

    def record(self, values: Mapping[str, Any], step: int | None, kwargs: Mapping[str, Any]) -> Sequence[Refusal]:
        """Record values at a step; SwanLab's own media objects are passed on unchanged."""
        native = {key: value for key, value in values.items() if _is_native(value)}
        found = {**clean({key: value for key, value in values.items() if key not in native}), **native}
        if step is not None and int(step) != step:
            return [Refusal(0, key, f"SwanLab takes whole steps, and this is step {step}") for key in found]
        return self.write([Point(found, None if step is None else int(step), None, kwargs)])

    def settle(self) -> None:
        """Wait until SwanLab's thread has written everything sent, then flush its file, which it does not do itself."""
        mark, deadline = self.arrived, time.monotonic() + SETTLE_SECONDS
        while self.given is None and self.arrived < self._sent and self.run.alive:
            if self.arrived != mark:
                mark, deadline = self.arrived, time.monotonic() + SETTLE_SECONDS
            if time.monotonic() > deadline:
                raise TimeoutError(f"SwanLab has written {self.arrived} of {self._sent} values and goes no further")
            time.sleep(0.02)
        self._flush()

    def _flush(self) -> None:
        store: Any = getattr(getattr(self.run, "_core", None), "_store", None)
        if hasattr(store, "ensure_flushed"):
            store.ensure_flushed()
        elif self.run.alive:
            self.warn(
                "flush",
                "This version of SwanLab cannot be told to flush; points are safe on its side when the run ends, and a kill of "
                "the relay before that may lose some there. They are kept in the journal.",
            )

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

    # Media become SwanLab's own objects

    def take_native(self, item: Item) -> Any:
        return item.value

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
        rows = [["" if cell is None else _cell(cell) for cell in row] for row in item.value.rows]
        return self.library.ECharts(self.library.echarts.Table().add(list(item.value.columns), rows))

    def take_histogram(self, item: Item) -> Any:
        """Return a bar chart: SwanLab has no histogram."""
        names = [f"{edge:.4g}" for edge in item.value.edges.tolist()][:-1]
        bars = self.library.echarts.Bar().add_xaxis(names).add_yaxis("count", item.value.counts.tolist())
        return self.library.ECharts(bars)


class SwanLabTracker(Tracker):
    """Log to the SwanLab project `run_name`; other arguments go to `swanlab.init`."""

    destination_class = SwanLab
    destination: SwanLab

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log a list of images under each key."""
        for key, images in values.items():
            self.log({key: [self.destination.library.Image(image) for image in images]}, step=step, **kwargs)


def _counter(swanlab: Any, destination: SwanLab) -> Any:
    """Return a callback that counts the values written by SwanLab's thread."""

    class Flushed(swanlab.Callback):  # type: ignore[misc]
        name = "fanfold"

        def on_scalar_flush(self, scalar_records: Sequence[Any], *args: Any, **kwargs: Any) -> None:
            del args, kwargs
            destination.arrived += sum(not item.key.startswith("__swanlab__") for item in scalar_records)

        on_media_flush = on_scalar_flush

    return Flushed()


def _quiet(swanlab: Any) -> Any:
    """Return settings without hardware probes and terminal capture: in a relay, neither describes the training process."""
    off = dict.fromkeys(("hardware", "runtime", "requirements", "conda", "git", "monitor"), False)
    return swanlab.Settings(
        interactive=False, probe=swanlab.Settings.Probe(**off), terminal=swanlab.Settings.Terminal(proxy_type="none")
    )


def _type_of(value: Any) -> str:
    """Return the type SwanLab assigns to a value; each key has one."""
    one = value[0] if isinstance(value, list) and value else value
    if isinstance(one, (bool, int, float)):
        return "number"
    kind = kind_of(one)
    return type(one).__name__.lower() if kind == "native" else _TYPES.get(kind, kind)


def _is_native(value: Any) -> bool:
    one = value[0] if isinstance(value, (list, tuple)) and value else value
    return type(one).__module__.split(".")[0] in ("swanlab", "pyecharts")


def _spelled_out(value: Any) -> Any:
    """Convert values SwanLab would change to text: it turns None into {}, and drops the sign of infinity."""
    return str(value) if value is None or (isinstance(value, float) and not math.isfinite(value)) else value


def _cell(cell: Any) -> Any:
    return cell if isinstance(cell, (bool, int, float, str)) else escape(str(cell))
