"""TensorBoard under the tracker contract, read back with its own EventAccumulator."""

import io
import wave
from pathlib import Path

import numpy as np

from fanfold.testing import ALL, Seen
from warm_contract import WarmContract


class TestTensorBoard(WarmContract):
    name = "tensorboard"
    holds = ALL - {"plotly", "tags", "status", "summary", "metric", "alert"}

    @staticmethod
    def stored(value):
        return float(np.float32(value))

    @staticmethod
    def read(folder: Path) -> Seen:
        import yaml
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        runs = [path for path in (folder / "runs").rglob("trackers/tensorboard/*") if path.is_dir()]
        reader = EventAccumulator(
            str(runs[0]),
            size_guidance=dict.fromkeys(("scalars", "images", "histograms", "tensors", "audio"), 0),
            purge_orphaned_data=False,
        ).Reload()
        tags = reader.Tags()
        texts = {
            tag.removesuffix("/text_summary"): [e.tensor_proto.string_val[0].decode() for e in reader.Tensors(tag)]
            for tag in tags["tensors"]
        }
        media = {tag: len(reader.Images(tag)) for tag in tags["images"]} | {
            tag: len(reader.Histograms(tag)) for tag in tags["histograms"]
        }
        media |= {tag: len(reader.Audio(tag)) for tag in tags["audio"]} | {tag: len(found) for tag, found in texts.items()}
        written = sorted(runs[0].rglob("hparams.yml"))
        config = yaml.safe_load(written[-1].read_text()) if written else None
        return Seen(
            scalars={tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in tags["scalars"]},
            texts=texts,
            config=config,
            media=media,
            artifacts=[tag for tag in texts if tag.startswith("artifact/")],
            runs=len(runs),
        )

    def test_the_numbers_of_a_point_are_one_event(self, tmp_path: Path) -> None:
        self.delivered(tmp_path, "for i in range(5): run.log({'a': i, 'b/c': -0.5 * i, 'note': 'text', 'd': i > 2}, step=2 * i)")
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

        events = [e for file in (tmp_path / "runs").rglob("events.out*") for e in LegacyEventFileLoader(str(file)).Load()]
        found = [(e.step, {v.tag: v.simple_value for v in e.summary.value if v.HasField("simple_value")}) for e in events]
        assert [one for one in found if one[1]] == [(2 * i, {"a": i, "b/c": -0.5 * i, "d": i > 2}) for i in range(5)]
        assert len({e.wall_time for e in events if len(e.summary.value) == 3}) == 5, "the time of each call"

    def test_sounds_arrive_sample_by_sample_with_all_channels(self, tmp_path: Path) -> None:
        self.delivered(tmp_path, """
            import numpy as np
            wave = np.sin(np.arange(800) / 9)
            run.log({"mono": fanfold.Audio(wave.astype(np.float32) / 2, sample_rate=8000),
                     "stereo": fanfold.Audio(np.stack([wave, -wave / 4], axis=1), sample_rate=16000),
                     "integers": fanfold.Audio(np.arange(-400, 400, dtype=np.int16), sample_rate=8000)}, step=3)
        """)  # fmt: skip
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        folder = next(path for path in (tmp_path / "runs").rglob("trackers/tensorboard/*") if path.is_dir())
        reader = EventAccumulator(str(folder), size_guidance={"audio": 0}).Reload()
        tone = np.sin(np.arange(800) / 9)
        wanted = {"mono": tone[:, None] / 2, "stereo": np.stack([tone, -tone / 4], axis=1)}
        for key, samples in {**wanted, "integers": np.arange(-400, 400)[:, None] / 32767}.items():
            (event,) = reader.Audio(key)
            got, rate = samples_of(event.encoded_audio_string)
            assert (event.step, event.sample_rate, event.length_frames, event.content_type) == (3, rate, 800, "audio/wav")
            assert got.shape == samples.shape
            assert np.abs(got - samples).max() < 1 / 32767


def samples_of(data: bytes) -> tuple[np.ndarray, int]:
    """Return the samples of a 16-bit WAV file as floats, one column for each channel, and its rate."""
    with wave.open(io.BytesIO(data), "rb") as file:
        assert file.getsampwidth() == 2
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, file.getnchannels())
        return samples / 32767, file.getframerate()
