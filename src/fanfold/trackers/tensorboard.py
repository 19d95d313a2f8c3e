"""TensorBoard: event files below a logging directory. Scalars are float32 on disk; everything else arrives as it was."""

from __future__ import annotations

import glob
import io
import os
import time
import wave
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

from ..journal.directory import encode_name
from .base import Adapter, Identity, Point, clean_config, flat_config, on_main_process
from .tools import markdown


class TensorBoardTracker(Adapter):
    """Write event files to `logging_dir/run_name`; other arguments go to SummaryWriter."""

    name: ClassVar[str] = "tensorboard"
    requires_logging_directory: ClassVar[bool] = True
    delivery: ClassVar[str] = "readable"
    counts_each: ClassVar[bool] = True
    layouts: ClassVar[tuple[str, ...]] = ("fanfold", "accelerate")

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.logging_dir = os.path.join(logging_dir, run_name)  # noqa: PTH118 - a text, as users of the attribute expect
        self.init_kwargs = kwargs
        self._inside = False
        self._given = (self.logging_dir, kwargs.get("filename_suffix", ""))
        self._files = "events.out.tfevents.*"  # of this run

    def adopt(self, identity: Identity) -> None:
        folder, suffix = self._given  # a start that failed is tried again, and adopts again
        self._inside = Path(folder).parent == identity.directory
        if self._inside:
            self.logging_dir = str(identity.directory / encode_name(identity.name))
        elif identity.layout == "accelerate":  # the runs of a project share its folder; the names of files tell them apart
            self.init_kwargs["filename_suffix"] = f"{suffix}.{encode_name(identity.run_id)}"
            self._files = f"events.out.tfevents.*{glob.escape(self.init_kwargs['filename_suffix'])}"
        else:  # a folder that runs share: each gets its own, or their points would mix
            self.logging_dir = str(Path(folder) / encode_name(f"{identity.name}-{identity.run_id}"))

    @on_main_process
    def start(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            from tensorboardX import SummaryWriter
        self.writer = SummaryWriter(self.logging_dir, **self.init_kwargs)

    @property
    def tracker(self) -> Any:
        return self.writer

    @property
    def remote(self) -> str:
        return self.logging_dir

    def resume(self, remote: str) -> None:
        """Continue in the same folder. One inside the run's directory moves with it; storage elsewhere is the user's to name."""
        parent = self.logging_dir.rpartition("/")[0]
        if self._inside:
            self.logging_dir = f"{parent}/{Path(remote).name}"
        elif "://" not in remote or remote.rpartition("/")[0] == parent:
            self.logging_dir = remote

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration as hyperparameters, and whole as `hparams.yml`."""
        import yaml

        flat = {
            key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in flat_config(values).items()
        }
        self.writer.add_hparams(flat, metric_dict={})
        self.writer.flush()
        folder = Path(self.writer.log_dir if hasattr(self.writer, "log_dir") else self.writer.logdir) / str(time.time())
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hparams.yml").write_text(yaml.safe_dump(clean_config(values)), encoding="utf-8")

    def add(self, key: str, value: Any, point: Point) -> None:
        for item in value if isinstance(value, list) else [value]:
            self._put(key, item, point)

    def _put(self, key: str, value: Any, point: Point) -> None:
        common = {"global_step": point.step, "walltime": point.time}
        if isinstance(value, str):
            self.writer.add_text(key, value, **common)
        elif isinstance(value, (bool, int, float)):
            self.writer.add_scalar(key, value, **common, **point.kwargs)
        else:
            _MEDIA[value.kind](self.writer, key, value, common)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        super().log(values, step, **kwargs)
        self.writer.flush()

    @on_main_process
    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Add a batch of images under each key; arguments go to `add_images`."""
        for key, value in values.items():
            self.writer.add_images(key, value, global_step=step, **kwargs)

    def settle(self) -> None:
        self.writer.flush()

    def counts(self) -> dict[str, int]:
        """Count what the event files hold, by key."""
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

    @on_main_process
    def finish(self) -> None:
        self.writer.close()


def _image(writer: Any, key: str, value: Any, common: dict[str, Any]) -> None:
    writer.add_image(key, value.array(), dataformats="HWC", **common)


def _histogram(writer: Any, key: str, value: Any, common: dict[str, Any]) -> None:
    import numpy as np

    edges, counts = np.asarray(value.edges, float), np.asarray(value.counts, float)
    middles = (edges[:-1] + edges[1:]) / 2
    total, squares = float((middles * counts).sum()), float((middles**2 * counts).sum())
    low, high = (float(edges[0]), float(edges[-1])) if len(edges) else (0.0, 0.0)
    writer.add_histogram_raw(key, low, high, int(counts.sum()), total, squares, edges[1:].tolist(), counts.tolist(), **common)


def _audio(writer: Any, key: str, value: Any, common: dict[str, Any]) -> None:
    """Keep the sound file as it is, with all its channels: `add_audio` takes one channel, as floats, and rounds it again."""
    if type(writer).__module__.startswith("tensorboardX"):
        from tensorboardX.proto.summary_pb2 import Summary
    else:
        from tensorboard.compat.proto.summary_pb2 import Summary
    encoded = value.encode()
    data = bytes(encoded.data)
    channels, frames = _wav_size(data) if encoded.ext == "wav" else (0, 0)
    sound = Summary.Audio(
        sample_rate=float(value.sample_rate or 0), num_channels=channels, length_frames=frames, encoded_audio_string=data,
        content_type=f"audio/{'mpeg' if encoded.ext == 'mp3' else encoded.ext}",
    )  # fmt: skip
    summary = Summary(value=[Summary.Value(tag=key, audio=sound)])
    writer._get_file_writer().add_summary(summary, common["global_step"], common["walltime"])  # noqa: SLF001 - as add_audio does


def _wav_size(data: bytes) -> tuple[int, int]:
    try:
        with wave.open(io.BytesIO(data), "rb") as file:
            return file.getnchannels(), file.getnframes()
    except (wave.Error, EOFError):  # a kind of WAV the standard library does not read; players may
        return 0, 0


def _as_text(writer: Any, key: str, value: Any, common: dict[str, Any]) -> None:
    text = value.text if value.kind == "text" else value.html
    writer.add_text(key, text, **common)


def _table(writer: Any, key: str, value: Any, common: dict[str, Any]) -> None:
    writer.add_text(key, markdown(value, most=1000), **common)


def _figure(writer: Any, key: str, value: Any, common: dict[str, Any]) -> None:
    if value.png:
        from ..media import Image

        _image(writer, key, Image(value.png), common)
    else:
        writer.add_text(key, f"```json\n{value.json}\n```", **common)


def _video(writer: Any, key: str, value: Any, common: dict[str, Any]) -> None:
    from ..media import Image

    for frame in list(value.frames())[:1]:  # event files have no video; the first picture stands for it
        _image(writer, key, Image(frame), common)


_MEDIA = {
    "image": _image,
    "histogram": _histogram,
    "audio": _audio,
    "video": _video,
    "text": _as_text,
    "html": _as_text,
    "table": _table,
    "figure": _figure,
}
