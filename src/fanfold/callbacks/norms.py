"""NormsCallback: norms of gradients and weights, measured on the device and logged when the numbers arrive."""

from __future__ import annotations

from typing import Any

from ._common import CountedHistogram, check_every, current_run, norms_of, tensors_of, together
from .control import TrainerControl
from .events import TrainerCallback
from .state import TrainerState


class NormsCallback(TrainerCallback):
    """Log the norm of all gradients and all weights every `every` steps, on each rank, without waiting for the device.

    Gradients are measured after clipping, as the optimizer gets them. `per_parameter` adds the norm of each; `histograms` adds
    the distribution of each (from at most a million evenly spaced values).
    """

    def __init__(
        self,
        every: int = 10,
        *,
        gradients: bool = True,
        weights: bool = True,
        per_parameter: bool = False,
        histograms: bool = False,
        run: Any = None,
    ) -> None:
        self.every = check_every(every, self)
        self.gradients = gradients
        self.weights = weights
        self.per_parameter = per_parameter
        self.histograms = histograms
        self.run = run

    def on_pre_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        if self.gradients:
            self._log("gradient", model, state.global_step + 1)

    def on_optimizer_step(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        if self.weights:
            self._log("weight", model, state.global_step + 1)

    def _log(self, what: str, model: Any, step: int) -> None:
        if step % self.every:
            return
        run = current_run(self.run, self)
        names, tensors = tensors_of(model, gradients=what == "gradient")
        if run is None or not tensors:
            return
        norms = norms_of(tensors, 2.0)
        values: dict[str, Any] = {f"norm/{what}": together(norms).norm()}
        if self.per_parameter:
            values |= {f"norm/{what}/{name}": norm for name, norm in zip(names, norms, strict=True)}
        if self.histograms:
            values |= {f"histogram/{what}/{name}": CountedHistogram(each) for name, each in zip(names, tensors, strict=True)}
        run.log(values, step=step)
