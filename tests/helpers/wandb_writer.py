"""Write an offline run with wandb: `python wandb_writer.py FOLDER [ROWS] [ID]`."""

import sys
import time
from pathlib import Path

import numpy as np
import wandb


def main(folder: str, rows: str = "5", run_id: str = "abc12345", pause: str = "0") -> None:
    run = wandb.init(
        project="proj", mode="offline", name="nice", group="g", tags=["a", "b"], notes="hey", id=run_id, resume="allow",
        config={"lr": 0.1, "deep": {"n": 3}}, dir=folder,
    )  # fmt: skip
    run.define_metric("epoch")
    run.define_metric("val/*", step_metric="epoch")
    run.define_metric("acc", summary="max")
    for i in range(int(rows)):
        run.log({"loss": 1 / (i + 1), "n": i, "flag": True, "deep": {"x": i * 2.0}, "val/acc": 0.5, "epoch": i // 2, "acc": -i,
                 "nan": float("nan"), "inf": float("-inf"), "txt": "hello"})  # fmt: skip
        run.log({"only": i / 3, "number": i})
        time.sleep(float(pause))
    picture = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    run.log({
        "pic": wandb.Image(picture, caption="c"), "pics": [wandb.Image(picture), wandb.Image(picture)],
        "h": wandb.Histogram(np_histogram=([1, 2], [0.0, 1.0, 3.0])),
        "tab": wandb.Table(columns=["a", "b"], data=[[1, "x"], [2, "y"]]), "html": wandb.Html("<b>hi</b>"),
    })  # fmt: skip
    run.summary["best"] = 3
    run.alert("title", "text")
    model = wandb.Artifact("model", "model", metadata={"k": 1})
    (Path(folder) / "m.bin").write_text("weights")
    model.add_file(str(Path(folder) / "m.bin"))
    run.log_artifact(model)
    print("printed line")
    run.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
