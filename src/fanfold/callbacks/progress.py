"""Progress display during training: printed logs, or a bar over the steps (a widget in a notebook)."""

from __future__ import annotations

from typing import Any

from ..errors import needed
from .control import TrainerControl
from .events import TrainerCallback
from .state import TrainerState

_HIDDEN = ("total_flos",)


def _readable(logs: dict[str, Any], max_str_len: int | None = None) -> dict[str, Any]:
    """Return a copy that fits on a line: short floats, no long strings. The dict itself is shared by all callbacks."""
    shown = {}
    for key, value in logs.items():
        if isinstance(value, float):
            shown[key] = f"{value:.4g}"
        elif isinstance(value, str) and max_str_len is not None and len(value) > max_str_len:
            shown[key] = f"[text of {len(value)} characters, more than max_str_len={max_str_len}]"
        elif key not in _HIDDEN:
            shown[key] = value
    return {key: value for key, value in shown.items() if key not in _HIDDEN}


class PrinterCallback(TrainerCallback):
    """Print logged values, on the first process of each node."""

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if state.is_local_process_zero and logs is not None:
            print(_readable(logs))


class ProgressCallback(TrainerCallback):
    """Show a bar over the steps, one over an evaluation's batches, and the logged values; on the first process only."""

    def __init__(self, max_str_len: int = 100) -> None:
        self.max_str_len = max_str_len
        self.training_bar: Any = None
        self.prediction_bar: Any = None
        self.current_step = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.current_step = 0
        if state.is_world_process_zero:
            self.training_bar = _bar(total=state.max_steps)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.training_bar is not None:
            self.training_bar.update(state.global_step - self.current_step)
            self.current_step = state.global_step

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        total = _length(eval_dataloader)
        if state.is_world_process_zero and total is not None:
            if self.prediction_bar is None:
                self.prediction_bar = _bar(total=total, leave=self.training_bar is None)
            self.prediction_bar.update(1)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._close_prediction_bar()

    def on_predict(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:  # type: ignore[override]
        self._close_prediction_bar()

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if self.training_bar is not None and logs is not None:
            self.training_bar.write(str(_readable(logs, self.max_str_len)))

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._close_prediction_bar()
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None

    def _close_prediction_bar(self) -> None:
        if self.prediction_bar is not None:
            self.prediction_bar.close()
            self.prediction_bar = None


def _bar(**options: Any) -> Any:
    with needed("tqdm", "progress", "ProgressCallback"):
        from tqdm.auto import tqdm
    return tqdm(dynamic_ncols=True, **options)


def _length(loader: Any) -> int | None:
    """Return how many batches a loader has, or None if unknown, as for a stream."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
