"""TensorBoard: event files in a logging directory. Scalars are float32 on disk; everything else is stored unchanged."""

from __future__ import annotations

import glob
import io
import os
import time
import wave
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ..journal.directory import encode_name
from ..media import Image
from .base import Identity, Point, Refusal, clean_config, flat_config, on_main_process
from .destination import Destination, Item
from .face import Tracker
from .tools import markdown


class TensorBoard(Destination):
    """Write event files to `logging_dir/run_name`; other arguments go to SummaryWriter."""

    name: ClassVar[str] = "tensorboard"
    requires_logging_directory: ClassVar[bool] = True
    delivery: ClassVar[str] = "readable"
    counts_each: ClassVar[bool] = True
    layouts: ClassVar[tuple[str, ...]] = ("fanfold", "accelerate")

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self._given = os.path.join(logging_dir, run_name)  # noqa: PTH118 - a str, as users of the attribute expect
        self.logging_dir = self._given
        self._files = "events.out.tfevents.*"  # of this run

    def open(self, identity: Identity | None, remote: str | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            from tensorboardX import SummaryWriter
        arguments = dict(self.init_kwargs)
        if identity is not None:
            self._place(identity, arguments)
        if remote is not None:
            self._continue(remote, inside=identity is not None and Path(self._given).parent == identity.directory)
        self.writer = self.given or SummaryWriter(self.logging_dir, **arguments)

    def _place(self, identity: Identity, arguments: dict[str, Any]) -> None:
        """Set folder and file names: each run has its own, or their points would mix."""
        if Path(self._given).parent == identity.directory:
            self.logging_dir = str(identity.directory / encode_name(identity.name))
        elif identity.layout == "accelerate":  # a project's runs share its folder; file names tell them apart
            arguments["filename_suffix"] = f"{arguments.get('filename_suffix', '')}.{encode_name(identity.run_id)}"
            self._files = f"events.out.tfevents.*{glob.escape(arguments['filename_suffix'])}"
        elif identity.layout == "transformers":  # a folder only for this training
            self.logging_dir = self._given
        else:
            self.logging_dir = str(Path(self._given) / encode_name(f"{identity.name}-{identity.run_id}"))

    def _continue(self, remote: str, *, inside: bool) -> None:
        """Continue in the same folder. One inside the run's directory moves with it; remote storage is chosen by the user."""
        parent = self.logging_dir.rpartition("/")[0]
        if inside:
            self.logging_dir = f"{parent}/{Path(remote).name}"
        elif "://" not in remote or remote.rpartition("/")[0] == parent:
            self.logging_dir = remote

    @property
    def tracker(self) -> Any:
        return self.writer

    @property
    def remote(self) -> str:
        return self.logging_dir

    def set_config(self, values: dict[str, Any]) -> None:
        """Store the config as hyperparameters, and in full as `hparams.yml`."""
        import yaml

        flat = {
            key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in flat_config(values).items()
        }
        self.writer.add_hparams(flat, metric_dict={})
        self.writer.flush()
        folder = Path(self.writer.log_dir if hasattr(self.writer, "log_dir") else self.writer.logdir) / str(time.time())
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hparams.yml").write_text(yaml.safe_dump(clean_config(values)), encoding="utf-8")

    def record(self, values: Mapping[str, Any], step: int | None, kwargs: Mapping[str, Any]) -> Sequence[Refusal]:
        refused = super().record(values, step, kwargs)
        self.writer.flush()
        return refused

    def settle(self) -> None:
        self.writer.flush()

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
        self.writer.add_text(f"artifact/{name}", f"`{path}` ({path.stat().st_size} bytes)")

    def finish(self) -> None:
        self.writer.close()

    # Values

    def number(self, key: str, value: float, point: Point) -> None:
        self.writer.add_scalar(key, value, global_step=point.step, walltime=point.time, **point.kwargs)

    def _add_text(self, item: Item, text: str) -> None:
        self.writer.add_text(item.key, text, global_step=item.step, walltime=item.point.time)

    def take_text(self, item: Item) -> None:
        self._add_text(item, item.text)

    def take_html(self, item: Item) -> None:
        self._add_text(item, item.value.html)

    def take_table(self, item: Item) -> None:
        self._add_text(item, markdown(item.value, most=1000))

    def take_plotly(self, item: Item) -> None:
        self._add_text(item, f"```json\n{item.value.json}\n```")

    def take_image(self, item: Item) -> None:
        at = {"global_step": item.step, "walltime": item.point.time}
        self.writer.add_image(item.key, item.value.array(), dataformats="HWC", **at)

    def take_video(self, item: Item) -> None:
        for frame in list(item.value.frames())[:1]:  # event files have no video; use the first frame
            self.take_image(item._replace(value=Image(frame)))

    def take_histogram(self, item: Item) -> None:
        import numpy as np

        edges, counts = np.asarray(item.value.edges, float), np.asarray(item.value.counts, float)
        middles = (edges[:-1] + edges[1:]) / 2
        sums = float((middles * counts).sum()), float((middles**2 * counts).sum())
        ends = (float(edges[0]), float(edges[-1])) if len(edges) else (0.0, 0.0)
        at = {"global_step": item.step, "walltime": item.point.time}
        self.writer.add_histogram_raw(item.key, *ends, int(counts.sum()), *sums, edges[1:].tolist(), counts.tolist(), **at)

    def take_audio(self, item: Item) -> None:
        """Store the sound file unchanged, with all channels: `add_audio` takes one channel, as floats, and rounds it again."""
        if type(self.writer).__module__.startswith("tensorboardX"):
            from tensorboardX.proto.summary_pb2 import Summary
        else:
            from tensorboard.compat.proto.summary_pb2 import Summary
        data, ext = item.content
        channels, frames = _wav_size(data) if ext == "wav" else (0, 0)
        sound = Summary.Audio(
            sample_rate=float(item.value.sample_rate or 0), num_channels=channels, length_frames=frames,
            encoded_audio_string=data, content_type=f"audio/{'mpeg' if ext == 'mp3' else ext}",
        )  # fmt: skip
        summary = Summary(value=[Summary.Value(tag=item.key, audio=sound)])
        self.writer._get_file_writer().add_summary(summary, item.step, item.point.time)  # noqa: SLF001 - as add_audio does


class TensorBoardTracker(Tracker):
    """Write event files to `logging_dir/run_name`; other arguments go to SummaryWriter."""

    destination_class = TensorBoard
    destination: TensorBoard

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add a batch of images under each key; arguments go to `add_images`."""
        for key, value in values.items():
            self.destination.writer.add_images(key, value, global_step=step, **kwargs)


def _wav_size(data: bytes) -> tuple[int, int]:
    try:
        with wave.open(io.BytesIO(data), "rb") as file:
            return file.getnchannels(), file.getnframes()
    except (wave.Error, EOFError):  # a kind of WAV the standard library cannot read; players may
        return 0, 0
