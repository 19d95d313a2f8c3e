"""Prove on a GPU that training with fanfold never waits for the device: torch itself raises at the first wait.

Trainer, NormsCallback with histograms, every step logged and every operator profiled, in float32 and under bf16 and fp16 autocast. Run on a
machine with CUDA: `python benchmarks/gpu_sync.py`. Exit code 1 when something waited.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fanfold
from fanfold.callbacks import NormsCallback, TrainerCallback

STEPS, WARM = 40, 5
PRECISIONS: dict[str, dict[str, bool]] = {"float32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": True}}


class Net(nn.Module):
    """A small transformer with a loss."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        guess = self.head(self.body(x)[:, 0])
        return {"loss": nn.functional.cross_entropy(guess.float(), labels)}


class Watch(TrainerCallback):
    """Let torch raise at every wait, from the first warm step to the last one's end: the data's way to the device counts, too."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= WARM:
            torch.cuda.set_sync_debug_mode("error")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step >= STEPS:  # what a training sums up at its end, it has to wait for
            torch.cuda.set_sync_debug_mode("default")


def train(precision: str, folder: Path) -> str:
    data = [{"x": torch.randn(32, 256), "labels": torch.tensor(n % 10)} for n in range(64)]
    run = fanfold.init("sync", dir=folder, quiet=True, system=False, ops={"every": 1})
    # Not fused, an optimizer makes the fp16 scaler itself wait for the device at each step.
    args = fanfold.TrainingArguments(
        output_dir=str(folder / precision), max_steps=STEPS, per_device_train_batch_size=16, logging_strategy="no", save_strategy="no",
        disable_tqdm=True, optim="adamw_torch_fused", **PRECISIONS[precision],
    )  # fmt: skip
    norms = NormsCallback(1, per_parameter=True, histograms=True)
    try:
        fanfold.Trainer(Net(), args, train_dataset=data, callbacks=[norms, Watch()], run=run).train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    run.finish()
    return told(fanfold.open(run.id, dir=folder), precision)


def told(run: Any, precision: str) -> str:
    """Say what arrived; every step's values have to."""
    counts = {key: len(run.series(key)) for key in ("train/loss", "train/grad_norm", "norm/gradient", "norm/weight")}
    if set(counts.values()) != {STEPS}:
        raise SystemExit(f"FAILED {precision}: of {STEPS} steps arrived {counts}")
    pairs = sum(row["device_count"] for row in run.ops())
    last = run.series("train/loss").values[-1]
    return f"{precision}: {STEPS} steps without a wait, all values there (last loss {last:.3f}), {pairs} device times"


def guard_bites() -> None:
    """A float() of a device tensor has to raise, or the proof proves nothing."""
    loss = torch.ones((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        float(loss)
    except RuntimeError:
        return
    finally:
        torch.cuda.set_sync_debug_mode("default")
    raise SystemExit("FAILED: torch did not notice a wait that was made on purpose")


def main() -> int:
    if not torch.cuda.is_available():
        print("No CUDA device is here: nothing was measured.")
        return 1
    guard_bites()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for precision in PRECISIONS:
            try:
                print(train(precision, Path(folder)), flush=True)
            except RuntimeError as error:
                failed += 1
                print(f"FAILED {precision}: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
