"""TensorBoard under the tracker contract, read back with its own EventAccumulator."""

from pathlib import Path

import numpy as np

from fanfold.testing import ALL, Seen, TrackerContract


class TestTensorBoard(TrackerContract):
    name = "tensorboard"
    holds = ALL - {"plotly", "tags", "status"}

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
