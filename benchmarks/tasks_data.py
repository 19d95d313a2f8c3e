"""What the tasks of docs/tasks.md need, logged through each tool's own API: python benchmarks/tasks_data.py TOOL FOLDER

Six runs over two learning rates and three seeds, whose lowest loss is at a known step; four ranks of one job, of which one is slow; a run that fails;
and in two of the runs images with boxes, sound, a moving picture, a table, texts, figures, distributions and printed lines.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from boards import PROJECT

STEPS = 10_000
BEST = 1234  # the step of the lowest loss, a point out of line
SLOW = 2  # the rank whose steps take longest
MEDIA = (0, 10, 20)
COLUMNS = ["id", "prompt", "answer", "reward"]
RUNS = [(f"lr{lr:g}-seed{seed}", {"lr": lr, "seed": seed, "batch": 32}) for lr in (0.1, 0.01) for seed in (0, 1, 2)]
SAMPLED = [RUNS[0][0], RUNS[3][0]]  # the runs that log more than numbers
RANKS = [f"rank{rank}" for rank in range(4)]
REASON = "the loss is not a number"
SYSTEM = find_spec("pkg_resources") is not None  # Aim's log of packages and environment needs it: setuptools before 82


def curve(config: dict[str, Any]) -> np.ndarray:
    """Return the losses of a run, with one point far below all others."""
    noise = np.random.default_rng([int(config["lr"] * 1000), config["seed"]])
    values = (1 + config["lr"] * 5) * np.exp(-np.arange(STEPS) / 400) + 0.1 + noise.normal(scale=0.01, size=STEPS)
    values[BEST] = -1 - config["lr"] - config["seed"] / 100
    return values


def times(rank: int) -> np.ndarray:
    return np.random.default_rng(rank).normal(0.9 if rank == SLOW else 0.3, 0.02, 200)


def picture(step: int) -> np.ndarray:
    """Return an image with a bright square, as height, width and colours."""
    found = np.full((64, 64, 3), 40, dtype=np.uint8)
    found[16:40, 8 + step : 32 + step] = (220, 120, 60)
    return found


def sound() -> np.ndarray:
    return (np.sin(np.arange(8000) * 0.2) * 0.5).astype(np.float32)


def movie() -> bytes:
    from PIL import Image

    frames, out = [Image.fromarray(picture(step)) for step in range(0, 24, 4)], io.BytesIO()
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:], duration=150, loop=0)
    return out.getvalue()


def weights(name: str, step: int) -> np.ndarray:
    wide = 10.0 if name == SAMPLED[0] else 1.0
    return np.random.default_rng(step).normal(0, wide, 1000)


def rows(name: str, step: int) -> list[list[Any]]:
    word = "quick" if name == SAMPLED[0] else "slow"
    return [[row, f"question {row}", f"the {word} answer {row} of step {step}", row / 100] for row in range(120)]


def plot() -> Any:
    import plotly.graph_objects as go

    return go.Figure(go.Scatter(x=[1, 2, 3], y=[2, 3, 1]), layout={"title": {"text": "counts"}})


def plot_page() -> str:
    """Return the figure as a page that needs nothing from the network."""
    return str(plot().to_html(include_plotlyjs=True))


def all_runs() -> Iterator[tuple[str, dict[str, Any], list[tuple[str, np.ndarray]]]]:
    """Yield the name of each run of numbers, its config, and what it logs."""
    for name, config in RUNS:
        losses = curve(config)
        yield name, config, [("train/loss", losses), ("val/acc", 1 - np.clip(losses, 0, 1))]


# One function per tool. A run that fails is a process of its own, which ends with an exception.


def tensorboard(dir: Path) -> None:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    for name, config, series in all_runs():
        writer = SummaryWriter(str(dir / name), max_queue=10_000)
        of = {key: sorted({one[key] for _, one in RUNS}) for key in config}  # without it the columns of config have no filter
        for summary in hparams(config, dict.fromkeys(["train/loss", "val/acc"], 0), of):  # add_hparams would begin a second file
            writer._get_file_writer().add_summary(summary)
        for key, values in series:
            for step, value in enumerate(values.tolist()):
                writer.add_scalar(key, value, step)
        for step in MEDIA if name in SAMPLED else ():
            box = np.array([[8 + step, 16, 32 + step, 40]])
            writer.add_image_with_boxes("seen", picture(step), box, step, dataformats="HWC", labels=["car"])
            writer.add_audio("sound", sound(), step, sample_rate=8000)
            writer.add_histogram("weights", weights(name, step), step)
            body = "\n".join("|".join(map(str, row)) for row in [COLUMNS, ["---"] * 4, *rows(name, step)])
            writer.add_text("samples", body, step)
            gif = Summary.Image(height=64, width=64, colorspace=3, encoded_image_string=movie())
            writer._get_file_writer().add_summary(Summary(value=[Summary.Value(tag="movie", image=gif)]), step)
        writer.close()
    for rank, name in enumerate(RANKS):
        writer = SummaryWriter(str(dir / "job" / name))
        for step, value in enumerate(times(rank).tolist()):
            writer.add_scalar("time/step", value, step)
        writer.close()


def mlflow_uri(dir: Path) -> str:
    return f"sqlite:///{dir}/mlflow.db"


def mlflow(dir: Path) -> None:
    import mlflow as library
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    library.set_tracking_uri(mlflow_uri(dir))
    client = MlflowClient()
    library.set_experiment(experiment_id=client.create_experiment(PROJECT, artifact_location=(dir / "artifacts").as_uri()))
    (dir / "experiment").write_text(library.get_experiment_by_name(PROJECT).experiment_id)

    def numbers(id: str, key: str, values: np.ndarray) -> None:
        points = [Metric(key, value, 1_790_000_000_000 + step * 1000, step) for step, value in enumerate(values.tolist())]
        for start in range(0, len(points), 1000):
            client.log_batch(id, metrics=points[start : start + 1000])

    for name, config, series in all_runs():
        with library.start_run(run_name=name, log_system_metrics=False) as run:
            library.log_params(config)
            for key, values in series:
                numbers(run.info.run_id, key, values)
            for step in MEDIA if name in SAMPLED else ():
                library.log_image(picture(step), key="seen", step=step)
                library.log_text("\n".join(row[2] for row in rows(name, step)), f"texts/{step}.txt")
            if name in SAMPLED:
                _mlflow_files(library, name)
            print("printed by", name)
    with library.start_run(run_name="job"):
        for rank, name in enumerate(RANKS):
            with library.start_run(run_name=name, nested=True) as run:
                library.log_param("rank", rank)
                numbers(run.info.run_id, "time/step", times(rank))


def _mlflow_files(library: Any, name: str) -> None:
    from scipy.io import wavfile

    out = io.BytesIO()
    wavfile.write(out, 8000, sound())
    library.log_table(dict(zip(COLUMNS, zip(*rows(name, 0), strict=True), strict=True)), "samples.json")
    library.log_text(plot_page(), "plot.html")  # log_figure writes a page that loads its script from the network
    for file, body in (("movie.gif", movie()), ("sound.wav", out.getvalue())):
        (Path.cwd() / file).write_bytes(body)
        library.log_artifact(file)
        os.unlink(file)


def aim(dir: Path) -> None:
    from aim import Audio, Distribution, Figure, Image, Run, Text

    for name, config, series in all_runs():
        run = Run(repo=str(dir), experiment=PROJECT, system_tracking_interval=None, log_system_params=SYSTEM)
        run.name, run["hparams"] = name, config
        for key, values in series:
            for step, value in enumerate(values.tolist()):
                run.track(value, name=key, step=step)
        for step in MEDIA if name in SAMPLED else ():
            run.track(Image(picture(step), caption="a car"), name="seen", step=step)
            run.track(Audio(sound(), rate=8000), name="sound", step=step)
            run.track(Distribution(weights(name, step)), name="weights", step=step)
            run.track([Text(row[2]) for row in rows(name, step)[:20]], name="samples", step=step)
            run.track(Figure(plot()), name="plot", step=step)
        print("printed by", name)
        run.close()
    run = Run(repo=str(dir), experiment=PROJECT, system_tracking_interval=None, capture_terminal_logs=False)
    run.name = "job"
    for rank in range(len(RANKS)):
        for step, value in enumerate(times(rank).tolist()):
            run.track(value, name="time/step", step=step, context={"rank": rank})
    run.close()


def trackio(dir: Path) -> None:
    import trackio as library
    from trackio.sqlite_storage import SQLiteStorage

    (dir / "movie.gif").write_bytes(movie())
    for name, config, series in all_runs():
        run = library.init(PROJECT, name=name, group=f"lr{config['lr']:g}", config=config, embed=False)
        for step in MEDIA if name in SAMPLED else ():
            seen = {
                "seen": library.Image(picture(step), caption="a car"),
                "sound": library.Audio(sound(), sample_rate=8000, format="wav"),
                "movie": library.Video(dir / "movie.gif"),
                "weights": library.Histogram(weights(name, step)),
                "samples": library.Table(columns=COLUMNS, data=rows(name, step)),
                "note": library.Markdown(f"# step {step}\nthe answers of {name}"),
                "trace": library.Trace(
                    [{"role": "user", "content": "question 1"}, {"role": "assistant", "content": rows(name, step)[1][2]}]
                ),
            }
            library.log(seen, step=step)
        if name in SAMPLED:
            library.log({"plot": library.Html(plot_page())}, step=MEDIA[-1])
        print("printed by", name)
        library.finish()
        keys = [key for key, _ in series]
        points = [dict(zip(keys, point, strict=True)) for point in zip(*(values.tolist() for _, values in series), strict=True)]
        SQLiteStorage.bulk_log(PROJECT, name, points, steps=list(range(STEPS)), run_id=run.id, config=config)
    for rank, name in enumerate(RANKS):
        library.init(PROJECT, name=name, group="job", config={"rank": rank}, embed=False)
        for step, value in enumerate(times(rank).tolist()):
            library.log({"time/step": value}, step=step)
        library.finish()


def failing(tool: str, dir: Path) -> None:
    """Start a run, log and print a little, and end with an exception, as a script would."""
    if tool == "Aim":
        from aim import Run

        run = Run(repo=str(dir), experiment=PROJECT, system_tracking_interval=None, log_system_params=SYSTEM)
        run.name = "failed"
        run.track(1.0, name="train/loss", step=0)
    elif tool == "MLflow":
        import mlflow as library

        library.set_tracking_uri(mlflow_uri(dir))
        library.set_experiment(PROJECT)
        with library.start_run(run_name="failed"):
            library.log_metric("train/loss", 1.0, step=0)
            fail()
    elif tool == "Trackio":
        import trackio as library

        library.init(PROJECT, name="failed", embed=False)
        library.log({"train/loss": 1.0}, step=0)
    else:
        from torch.utils.tensorboard import SummaryWriter

        SummaryWriter(str(dir / "failed")).add_scalar("train/loss", 1.0, 0)
    fail()


def fail() -> None:
    print("printed before it failed")
    raise ValueError(REASON)


WRITERS: dict[str, Callable[[Path], None]] = {"TensorBoard": tensorboard, "MLflow": mlflow, "Aim": aim, "Trackio": trackio}


if __name__ == "__main__":
    tool, folder, *more = sys.argv[1:]
    if more:
        failing(tool, Path(folder))
    WRITERS[tool](Path(folder))
    subprocess.run([sys.executable, __file__, tool, folder, "fail"], check=False, timeout=120)
