"""ThroughputCallback: samples, tokens and floating-point operations per second, and the share of the device's peak (MFU)."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from typing import Any

from ._common import check_every, current_run
from .control import TrainerControl
from .events import TrainerCallback
from .state import TrainerState

# Dense 16-bit operations per second, from the vendors' data sheets; the first name found in the device's name counts.
PEAKS = {
    "GB300": 2500e12,
    "B300": 2250e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "B100": 1750e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "A40": 150e12,
    "A30": 165e12,
    "V100": 125e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165.2e12,
    "MI355X": 2517e12,
    "MI350X": 2307e12,
    "MI325X": 1307e12,
    "MI300X": 1307e12,
    "MI300A": 981e12,
    "MI250X": 383e12,
}
# Every other device does twice as many operations in 8 bits as in 16.
WITHOUT_FP8 = frozenset({"A100", "A800", "A10G", "A10", "A40", "A30", "V100", "MI250X"})


class ThroughputCallback(TrainerCallback):
    """Log this rank's training speed every `every` steps, without evaluation and saving. Folded by sum, it is the job's.

    Values that are not given are taken from the loop: samples from the batch size, tokens from `state.num_input_tokens_seen`,
    operations from `flops_per_step`, or six per parameter and token. `peak_flops` is looked up for known devices; pass
    dtype="fp8" if the matrix products are done in 8 bits.
    """

    def __init__(
        self,
        every: int = 10,
        *,
        samples_per_step: float | None = None,
        tokens_per_step: float | None = None,
        flops_per_step: float | None = None,
        peak_flops: float | None = None,
        dtype: str = "bf16",
        run: Any = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.every = check_every(every, self)
        self.samples_per_step = samples_per_step
        self.tokens_per_step = tokens_per_step
        self.flops_per_step = flops_per_step
        self.peak_flops = peak_flops
        if dtype not in ("bf16", "fp16", "fp8"):
            raise ValueError(f"ThroughputCallback(dtype={dtype!r}) is not known. Nothing was started. Known: bf16, fp16, fp8.")
        self.dtype = dtype
        self.run = run
        self._clock = clock
        self._restart(0)

    def _restart(self, tokens: float) -> None:
        self._seconds, self._steps, self._tokens = 0.0, 0, tokens

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any) -> None:
        self._parameters = sum(p.numel() for p in model.parameters()) if hasattr(model, "parameters") else 0
        self._mark: float | None = None
        self._restart(state.num_input_tokens_seen)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._mark is None:
            self._mark = self._clock()

    def _skip(self) -> None:
        """Exclude the time since the last step: it was not spent on training."""
        self._mark = self._clock()

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._skip()

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._skip()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        now = self._clock()
        self._seconds += now - (self._mark if self._mark is not None else now)
        self._steps += 1
        self._mark = now
        if state.global_step % self.every == 0 and self._seconds > 0:
            run = current_run(self.run, self)
            if run is not None:
                run.log(self._figures(args, state), step=state.global_step)
            self._restart(state.num_input_tokens_seen)

    def _figures(self, args: Any, state: TrainerState) -> dict[str, float]:
        steps, seconds = self._steps, self._seconds
        figures = {"throughput/steps_per_second": steps / seconds}
        samples = self.samples_per_step or _samples(args, state)
        tokens = self.tokens_per_step * steps if self.tokens_per_step else state.num_input_tokens_seen - self._tokens
        flops = self.flops_per_step * steps if self.flops_per_step else 6.0 * self._parameters * tokens
        if samples:
            figures["throughput/samples_per_second"] = samples * steps / seconds
        if tokens:
            figures["throughput/tokens_per_second"] = tokens / seconds
        if flops:
            figures["throughput/tflops"] = flops / seconds / 1e12
            peak = self.peak_flops or _peak(self.dtype)
            if peak:
                figures["throughput/mfu"] = flops / seconds / peak
        return figures


def _samples(args: Any, state: TrainerState) -> float:
    """Return how many samples a step of this rank takes, as far as the arguments tell."""
    batch = (
        getattr(args, "train_batch_size", None) or getattr(args, "per_device_train_batch_size", None) or state.train_batch_size
    )
    return (batch or 0) * (getattr(args, "gradient_accumulation_steps", None) or 1)


def _peak(dtype: str) -> float | None:
    """Return the peak of the device in use; None without one, or for one that is not in the table or lacks the type."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return peak_of(torch.cuda.get_device_name(), dtype)


def peak_of(device: str, dtype: str = "bf16") -> float | None:
    """Return the dense operations per second of a device, by its name; None if it is not known."""
    known = next((name for name in PEAKS if re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", device)), None)
    if known is None or (dtype == "fp8" and known in WITHOUT_FP8):
        return None
    return PEAKS[known] * (2.0 if dtype == "fp8" else 1.0)
