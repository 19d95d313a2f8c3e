"""TensorBoard: event files in a logging directory. Scalars are float32 on disk; everything else is stored unchanged."""

from __future__ import annotations

import contextlib
import glob
import io
import json
import os
import time
import wave
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..atomic import replace_text
from ..journal.directory import encode_name
from ..media import Image
from ..plain import plain
from .base import Identity, Point, Refusal, flat_config, on_main_process
from .destination import Destination, Item
from .face import Tracker
from .tools import markdown

_PLAIN = (bool, int, float, str)


class TensorBoard(Destination):
    """Write event files to `logging_dir/run_name`; other arguments go to SummaryWriter."""

    name = "tensorboard"
    own_name = "writer"
    ends_with = "close"
    requires_logging_directory = True
    delivery = "readable"
    counts_each = settles_each_call = True
    layouts = ("fanfold", "accelerate")

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self._given = self.logging_dir = os.path.join(logging_dir, run_name)  # noqa: PTH118 - a str, as users expect
        self._files = "events.out.tfevents.*"  # of this run

    def open(self, identity: Identity | None, remote: str | None = None) -> None:
        if identity is not None:
            self.logging_dir = self._folder(identity, remote)
        super().open(identity, remote)

    def _folder(self, identity: Identity, remote: str | None) -> str:
        """Return the run's own folder, or the points of several runs would mix; a run is continued in the same folder."""
        given = Path(self._given)
        if given.parent == identity.directory:  # inside the run's directory, it moves with it
            return str(identity.directory / (Path(remote).name if remote else encode_name(identity.name)))
        own = identity.layout == "fanfold"
        folder = str(given / encode_name(f"{identity.name}-{identity.run_id}")) if own else self._given
        # Remote storage is chosen by the user, not by a file.
        local = remote is not None and ("://" not in remote or remote.rpartition("/")[0] == folder.rpartition("/")[0])
        return str(remote) if local else folder

    def begin(self, identity: Identity | None, remote: str | None) -> Any:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            from tensorboardX import SummaryWriter
        arguments = dict(self.init_kwargs)
        if identity is not None and identity.layout == "accelerate" and Path(self._given).parent != identity.directory:
            # A project's runs share its folder; the names of the files tell them apart.
            arguments["filename_suffix"] = f"{arguments.get('filename_suffix', '')}.{encode_name(identity.run_id)}"
            self._files = f"events.out.tfevents.*{glob.escape(arguments['filename_suffix'])}"
        writer = SummaryWriter(self.logging_dir, **arguments)
        if identity is not None and identity.layout == "fanfold" and "://" not in self.logging_dir:
            self._leave_mark(identity)
        return writer

    def _leave_mark(self, identity: Identity) -> None:
        """Name our run in its folder, so that importing the folder recognises it."""
        with contextlib.suppress(OSError):  # the folder is written to all the same
            replace_text(Path(self.logging_dir) / "fanfold.json", json.dumps({"run": identity.run_id}))

    @property
    def remote(self) -> str:
        return self.logging_dir

    def set_config(self, values: dict[str, Any]) -> None:
        """Store the config as hyperparameters, and in full as `hparams.yml`."""
        import yaml

        flat = flat_config(values).items()
        self.run.add_hparams({key: value if isinstance(value, _PLAIN) else str(value) for key, value in flat}, metric_dict={})
        self.run.flush()
        folder = Path(self.run.log_dir if hasattr(self.run, "log_dir") else self.run.logdir) / str(time.time())
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hparams.yml").write_text(yaml.safe_dump(plain(values)), encoding="utf-8")

    def settle(self) -> None:
        self.run.flush()

    def counts(self) -> dict[str, int]:
        """Count points in the event files, by key."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        kinds = {
            "scalars": EventAccumulator.Scalars, "images": EventAccumulator.Images, "histograms": EventAccumulator.Histograms,
            "audio": EventAccumulator.Audio, "tensors": EventAccumulator.Tensors,
        }  # fmt: skip
        found: Counter[str] = Counter()
        for path in Path(self.logging_dir).glob(self._files):
            reader = EventAccumulator(str(path), size_guidance=dict.fromkeys(kinds, 0), purge_orphaned_data=False).Reload()
            for kind, events in kinds.items():
                found.update({tag.removesuffix("/text_summary"): len(events(reader, tag)) for tag in reader.Tags()[kind]})
        return dict(found)

    def artifact(self, path: Path, name: str) -> None:
        self.run.add_text(f"artifact/{name}", f"`{path}` ({path.stat().st_size} bytes)")

    def write(self, points: Sequence[Point]) -> Sequence[Refusal]:
        """Write all numbers of a point as one event: an event costs about the same with one value and with ten.

        In the user's process, libraries that follow `add_scalar` see one call for each number.
        """
        alone = self.identity is not None and not self.identity.live
        if alone and type(self.run).__module__.startswith("torch.") and not any(point.kwargs for point in points):
            return self.write_rows(points, self._add_row)
        return super().write(points)

    def _add_row(self, numbers: dict[str, float], point: Point) -> None:
        self._add_summary([{"tag": key, "simple_value": float(value)} for key, value in numbers.items()], point)

    def number(self, key: str, value: float, point: Point) -> None:
        self.run.add_scalar(key, value, global_step=point.step, walltime=point.time, **point.kwargs)

    def _add(self, method: str, item: Item, *values: Any, **options: Any) -> None:
        getattr(self.run, method)(item.key, *values, global_step=item.step, walltime=item.point.time, **options)

    def take_text(self, item: Item) -> None:
        self._add("add_text", item, item.text)

    def take_html(self, item: Item) -> None:
        self._add("add_text", item, item.value.html)

    def take_table(self, item: Item) -> None:
        self._add("add_text", item, markdown(item.value, most=1000))

    def take_plotly(self, item: Item) -> None:
        self._add("add_text", item, f"```json\n{item.value.json}\n```")

    def take_image(self, item: Item) -> None:
        self._add("add_image", item, item.value.array(), dataformats="HWC")

    def take_video(self, item: Item) -> None:
        for frame in list(item.value.frames())[:1]:  # event files have no video; use the first frame
            self.take_image(item._replace(value=Image(frame)))

    def take_histogram(self, item: Item) -> None:
        edges, counts = item.value.edges.astype(float), item.value.counts.astype(float)
        middles = (edges[:-1] + edges[1:]) / 2
        sums = float((middles * counts).sum()), float((middles**2 * counts).sum())
        ends = (float(edges[0]), float(edges[-1])) if len(edges) else (0.0, 0.0)
        self._add("add_histogram_raw", item, *ends, int(counts.sum()), *sums, edges[1:].tolist(), counts.tolist())

    def take_audio(self, item: Item) -> None:
        """Store the sound file unchanged, with all channels: `add_audio` takes one channel, as floats, and rounds it again."""
        data, ext = item.content
        channels, frames = _wav_size(data) if ext == "wav" else (0, 0)
        sound = {
            "sample_rate": float(item.value.sample_rate or 0), "num_channels": channels, "length_frames": frames,
            "encoded_audio_string": data, "content_type": f"audio/{'mpeg' if ext == 'mp3' else ext}",
        }  # fmt: skip
        self._add_summary([{"tag": item.key, "audio": sound}], item.point)

    def _add_summary(self, values: list[dict[str, Any]], point: Point) -> None:
        if type(self.run).__module__.startswith("tensorboardX"):
            from tensorboardX.proto.summary_pb2 import Summary
        else:
            from tensorboard.compat.proto.summary_pb2 import Summary
        summary = Summary(value=values)
        self.run._get_file_writer().add_summary(summary, point.step, point.time)  # noqa: SLF001 - as add_scalar does


class TensorBoardTracker(Tracker):
    destination_class = TensorBoard

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add a batch of images under each key; arguments go to `add_images`."""
        for key, value in values.items():
            self.destination.run.add_images(key, value, global_step=step, **kwargs)


def _wav_size(data: bytes) -> tuple[int, int]:
    try:
        with wave.open(io.BytesIO(data), "rb") as file:
            return file.getnchannels(), file.getnframes()
    except (wave.Error, EOFError):  # a kind of WAV the standard library cannot read; players may
        return 0, 0
