"""SwanLab: one run per process, written by a thread of its own that swallows what it cannot take; so it is checked here first."""

from __future__ import annotations

import contextlib
import glob
import io
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, ClassVar

from ..errors import notices
from .base import Adapter, Identity, Point, Refusal, Refused, clean, clean_config, on_main_process, prepared
from .tools import copied, mapped

MAX_STEP = 1 << 48  # SwanLab's own limit
LONGEST_KEY = 512
SETTLE_SECONDS = 30.0  # without any progress
_STATES = {"finished": "success", "failed": "crashed"}


class SwanLabTracker(Adapter):
    """Log to the SwanLab project `run_name`; other arguments go to `swanlab.init`."""

    name: ClassVar[str] = "swanlab"
    main_process_only = False
    delivery: ClassVar[str] = "readable"
    delivery_online: ClassVar[str | None] = "at least once"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self._identity: Identity | None = None
        self._steps: dict[str, Any] = {}
        self._kinds: dict[str, str] = {}
        self._sent = 0
        self._arrived = 0

    @classmethod
    def unusable(cls) -> str | None:
        if os.environ.get("SWANLAB_MODE") in ("offline", "local", "disabled") or os.environ.get("SWANLAB_API_KEY"):
            return None
        home = os.environ.get("SWANLAB_ROOT") or os.environ.get("SWANLAB_SAVE_DIR") or Path.home() / ".swanlab"
        known = any((Path(folder) / ".netrc").exists() for folder in (home, ".swanlab"))
        return None if known else "no API key: run `swanlab login`, or set SWANLAB_MODE=offline"

    def adopt(self, identity: Identity) -> None:
        self._identity = identity
        self.run_name = re.sub(r"[^0-9a-zA-Z_\-+.]", "_", self.run_name)[:100]  # other names are refused at init
        own = {"name": identity.name[:512], "group": identity.group, "log_dir": str(identity.directory), "resume": "allow"}
        own["id"] = re.sub(r'[<>:"/\\|?*#%\x00-\x1f\x7f]', "_", identity.run_id)[:LONGEST_KEY]
        self.init_kwargs = {key: value for key, value in own.items() if value} | self.init_kwargs

    @on_main_process
    def start(self) -> None:
        import swanlab

        kwargs = dict(self.init_kwargs)
        if self._identity is not None and "settings" not in kwargs:
            kwargs["settings"] = _quiet(swanlab)
        theirs = kwargs.pop("callbacks", None) or []
        kwargs["callbacks"] = [*([theirs] if isinstance(theirs, swanlab.Callback) else theirs), _counter(swanlab, self)]
        self.run = swanlab.init(project=self.run_name, **kwargs)
        self.run.config["FRAMEWORK"] = "fanfold"
        if self._identity is not None:
            self._take_up()

    def _take_up(self) -> None:
        """Know what earlier starts of this run wrote: their steps, and their config, which each folder has of its own."""
        for key, step in self._stored():
            self._seen(key).add(step)
        for store in self._stores():
            self.run.config.update(_written_config(store.parent))

    @property
    def tracker(self) -> Any:
        return self.run

    @property
    def remote(self) -> str:
        return str(self.run.id)

    def resume(self, remote: str) -> None:
        self.init_kwargs["id"] = remote

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.run.config.update(mapped(clean_config(values), _config))

    def describe(self, *, name: str | None, tags: Sequence[str], notes: str | None, group: str | None) -> None:
        """Keep tags and notes in the config: SwanLab takes them at init only, and ours may come later."""
        del name, group  # given at init
        words = {"tags": list(tags), "notes": notes}
        if any(words.values()):
            self.run.config.update({f"fanfold.{key}": value for key, value in words.items() if value})

    def set_summary(self, values: Mapping[str, Any]) -> None:
        """Keep the summary in the config: SwanLab has none."""
        self.run.config.update({"summary": mapped(clean_config(values), _config)})

    def write(self, points: Sequence[Point]) -> Sequence[Refusal]:
        fresh: set[tuple[str, int]] = set()
        ready, refused = prepared(points, lambda point, key, value: self._checked(key, value, point.step, fresh))
        for point, named in zip(points, ready, strict=True):
            if named:
                self._log(dict(named.values()), point.step, point.kwargs)
        return refused

    def _log(self, values: dict[str, Any], step: int | None, kwargs: Mapping[str, Any]) -> None:
        if kwargs:
            notices.once(
                "swanlab:kwargs", f"SwanLab's log() takes no {', '.join(kwargs)}; the values are logged without. Leave it out."
            )
        self.run.log(values, step=step)
        self._sent += len(values)
        if step is not None:
            for key in values:
                self._seen(key).add(step)

    def _seen(self, key: str) -> Any:
        if key not in self._steps:
            self._steps[key] = _step_set()
        return self._steps[key]

    def _checked(self, key: str, value: Any, step: int | None, fresh: set[tuple[str, int]]) -> tuple[str, Any]:
        """Return name and value as SwanLab takes them, or refuse what it would drop with a line in its own log only."""
        name = key.strip(" \t\n\r./")[:LONGEST_KEY]
        if not name or re.search(r"[\x00-\x1f\x7f]", name) or name.startswith("__swanlab__"):
            raise Refused("SwanLab takes no such key")
        if step is not None and not 0 <= step <= MAX_STEP:
            raise Refused(f"SwanLab takes steps from 0 to 2**48, and this is step {step}")
        if step is not None and ((name, step) in fresh or step in self._seen(name)):
            raise Refused(f"SwanLab keeps the first value of a step, and there is one at step {step}")
        kind = _kind(value)
        if self._kinds.setdefault(name, kind) != kind:
            raise Refused(f"SwanLab keeps one type per key, and this one is {self._kinds[name]}")
        made = self._made(value)
        if step is not None:
            fresh.add((name, step))
        return name, made

    def _made(self, value: Any) -> Any:
        import swanlab

        if isinstance(value, list):
            return [self._made(item) for item in value]
        if isinstance(value, str):
            return swanlab.Text(value)
        make: Callable[[Any, Any], Any] = _MEDIA[value.kind] if hasattr(value, "kind") else _same
        return make(swanlab, value)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values under a step; SwanLab's own media objects go to it as they are."""
        native = {key: value for key, value in values.items() if _is_native(value)}
        plain = clean({key: value for key, value in values.items() if key not in native})
        values = {**plain, **native}
        if step is None or int(step) == step:
            self.warn_refused(self.write([Point(values, None if step is None else int(step), None, kwargs)]))
        else:
            self.warn_refused([Refusal(0, key, f"SwanLab takes whole steps, and this is step {step}") for key in values])

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log a list of images under each key."""
        import swanlab

        for key, images in values.items():
            self.log({key: [swanlab.Image(image) for image in images]}, step=step, **kwargs)

    def settle(self) -> None:
        """Wait for SwanLab's thread to write what was sent, then flush its file, which it does not do by itself."""
        mark, deadline = self._arrived, time.monotonic() + SETTLE_SECONDS
        while self._arrived < self._sent and self.run.alive:
            if self._arrived != mark:
                mark, deadline = self._arrived, time.monotonic() + SETTLE_SECONDS
            if time.monotonic() > deadline:
                raise TimeoutError(f"SwanLab has written {self._arrived} of {self._sent} values and goes no further")
            time.sleep(0.02)
        self._flush()

    def _flush(self) -> None:
        store: Any = getattr(getattr(self.run, "_core", None), "_store", None)
        if hasattr(store, "ensure_flushed"):
            store.ensure_flushed()
        elif self.run.alive:
            notices.once(
                "swanlab:flush",
                "This version of SwanLab cannot be told to flush; points are safe on its side when the run ends, and a kill of "
                "the relay before that may lose some there. They are kept in the journal.",
            )

    def counts(self) -> dict[str, int] | None:
        """Count what the folders of this run hold. None online: SwanLab asks the server itself, and drops steps it has."""
        if getattr(self.run, "mode", "") == "online":
            return None
        found: dict[str, int] = {}
        for key, _ in self._stored():
            found[key] = found.get(key, 0) + 1
        return found

    def _stored(self) -> Iterator[tuple[str, int]]:
        """Give key and step of each point on disk."""
        for file in self._stores():
            for record in records(file):
                kind = record.WhichOneof("record_type")
                if kind in ("scalar", "media"):
                    point = getattr(record, kind)
                    yield point.key, point.step

    def _stores(self) -> Iterator[Path]:
        """Find the stores of this run: each start has a folder of its own, with the run's id inside."""
        if getattr(self.run, "mode", "") not in ("offline", "local"):
            return
        for file in sorted(Path(self.run.dir).parent.glob("run-*/run-*.swanlab")):
            first = next(records(file), None)
            if first is not None and first.start.id == self.run.id:
                yield file

    def artifact(self, path: Path, name: str) -> None:
        """Keep a copy beside the run: SwanLab notes a link, and the file must be there when it syncs."""
        home = Path(self.run.dir).parent / "artifacts"
        self.run.save(glob.escape(str(copied(path, home, name))), base_path=str(home), policy="now")

    @on_main_process
    def finish(self) -> None:
        self._end()

    def close(self, status: str) -> None:
        state = _STATES.get(status, "aborted")
        self._end(state=state, error=None if state == "success" else f"the run was {status}")

    def _end(self, **words: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            self.run._is_main_thread = False  # noqa: SLF001 - or it puts a signal handler back, which only the main thread can
        self.run.finish(**words)


def records(file: Path) -> Iterator[Any]:
    """Read a SwanLab store up to its torn end, with SwanLab's reader; nothing where this version has none."""
    try:
        from swanlab.proto.swanlab.record.v1.record_pb2 import Record
        from swanlab.sdk.internal.core_python.store import DataStoreReader
    except ImportError:
        return
    reader = DataStoreReader()
    try:
        reader.open(file)
    except AssertionError:  # killed before its header was flushed
        return
    with contextlib.closing(reader):
        for data in reader:
            yield Record.FromString(data)


def _written_config(folder: Path) -> dict[str, Any]:
    import yaml

    file = folder / "files" / "config.yaml"
    found = yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else None
    return {key: entry["value"] for key, entry in (found or {}).items()}


def _counter(swanlab: Any, tracker: SwanLabTracker) -> Any:
    """Make the callback that tells how many values SwanLab's thread has written."""

    class Counter(swanlab.Callback):  # type: ignore[misc]
        name = "fanfold"

        def on_scalar_flush(self, scalar_records: Sequence[Any], *args: Any, **kwargs: Any) -> None:
            del args, kwargs
            tracker._arrived += sum(not item.key.startswith("__swanlab__") for item in scalar_records)  # noqa: SLF001 - its own

        on_media_flush = on_scalar_flush

    return Counter()


def _quiet(swanlab: Any) -> Any:
    """In a relay, ask no GPU tools and capture no terminal: neither is the training's."""
    off = dict.fromkeys(("hardware", "runtime", "requirements", "conda", "git", "monitor"), False)
    return swanlab.Settings(
        interactive=False, probe=swanlab.Settings.Probe(**off), terminal=swanlab.Settings.Terminal(proxy_type="none")
    )


def _step_set() -> Any:
    """Return a set for very many steps: SwanLab's own compressed one where it has it."""
    try:
        from pyroaring import BitMap64
    except ImportError:
        return set()
    return BitMap64()


def _kind(value: Any) -> str:
    value = value[0] if isinstance(value, list) and value else value
    if isinstance(value, (bool, int, float)):
        return "number"
    native = type(value).__name__.lower() if _is_native(value) else ""
    kind = "text" if isinstance(value, str) else native or value.kind
    return {"video": "image", "histogram": "echarts", "table": "echarts"}.get(kind, str(kind))


def _is_native(value: Any) -> bool:
    one = value[0] if isinstance(value, (list, tuple)) and value else value
    return type(one).__module__.split(".")[0] in ("swanlab", "pyecharts")


def _config(value: Any) -> Any:
    """Spell out what SwanLab changes: it makes {} of None, and drops the sign of infinity."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value


def _same(_swanlab: Any, value: Any) -> Any:
    return value


def _audio(swanlab: Any, value: Any) -> Any:
    """Hand over the WAV as it is: the usual way needs soundfile, and encodes once more."""
    encoded = value.encode()
    if encoded.ext != "wav":
        raise Refused(f"SwanLab takes WAV sound, and this is {encoded.ext}")
    audio = swanlab.Audio.__new__(swanlab.Audio)
    audio.buffer, audio.sample_rate, audio.caption = io.BytesIO(bytes(encoded.data)), value.sample_rate, value.caption
    return audio


def _video(swanlab: Any, value: Any) -> Any:
    encoded = value.encode()
    if encoded.ext != "gif":
        raise Refused(f"SwanLab takes GIF videos, and this is {encoded.ext}")
    return swanlab.Video(bytes(encoded.data), caption=value.caption)


def _figure(swanlab: Any, value: Any) -> Any:
    if not value.png:
        return swanlab.Html(value.html, caption=value.caption)
    from ..media import Image

    return swanlab.Image(Image(value.png).pil(), caption=value.caption)


def _table(swanlab: Any, value: Any) -> Any:
    rows = [["" if cell is None else _cell(cell) for cell in row] for row in value.rows]
    return swanlab.ECharts(swanlab.echarts.Table().add(list(value.columns), rows))


def _cell(cell: Any) -> Any:
    return cell if isinstance(cell, (bool, int, float, str)) else escape(str(cell))


def _histogram(swanlab: Any, value: Any) -> Any:
    """Draw a bar chart: SwanLab has no histogram."""
    names = [f"{edge:.4g}" for edge in value.edges.tolist()][:-1]
    return swanlab.ECharts(swanlab.echarts.Bar().add_xaxis(names).add_yaxis("count", value.counts.tolist()))


_MEDIA = {
    "image": lambda swanlab, value: swanlab.Image(value.pil(), caption=value.caption),
    "audio": _audio,
    "video": _video,
    "figure": _figure,
    "table": _table,
    "histogram": _histogram,
    "html": lambda swanlab, value: swanlab.Html(value.html),
    "text": lambda swanlab, value: swanlab.Text(value.text),
}
