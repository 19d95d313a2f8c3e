"""What is due after a step: logging, evaluating, saving; done by the functions a loop was given, or by its body."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import SettingError, notices
from .telling import Teller


class Due(Teller):
    """The half of a loop that does what is due, or lets the body do it."""

    _evaluate: Callable[[], Mapping[str, Any]] | None
    _open: bool  # a batch is with the body
    _reported = 0

    def _close_batch(self) -> None:
        raise NotImplementedError  # Loop knows how

    def log(self, values: Mapping[str, Any], *, mean: bool = True) -> None:
        """Log values of the batch at hand. The run gets them each step; callbacks get their mean each `logging_steps`.

        With `mean=False`, for such as a learning rate, the latest value counts. Between steps it goes out at once.
        """
        if self._open:
            self._meter.add(values, mean=mean)
            return
        self._record(values)
        self._tell_log(values)

    @property
    def should_evaluate(self) -> bool:
        """Whether to evaluate now. Asking ends the step, so ask at the end of the body; then call evaluated(metrics)."""
        self._ask()
        return self.control.should_evaluate

    @property
    def should_save(self) -> bool:
        """Whether to save now. Asking ends the step, so ask at the end of the body; then call saved(folder)."""
        self._ask()
        return self.control.should_save

    def _ask(self) -> None:
        if self._open:
            self._close_batch()
            self._settle(answered=False)

    def evaluated(self, metrics: Mapping[str, Any]) -> None:
        """Report an evaluation; keys without the prefix `eval_` get it."""
        self._ask()
        self.report(prefixed(metrics))
        self._judge(metrics)

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Report an evaluation that has no say in which model is best, such as one after training."""
        self._reported += 1
        self._tell_evaluation(metrics)

    def _settle(self, *, answered: bool) -> None:
        """Evaluate and save what is due. `answered` says that the body had its chance to do it itself."""
        if self.control.should_evaluate and self._evaluate is not None:
            self._evaluate_now()
        if self.control.should_evaluate:
            if not answered:
                return  # a checkpoint comes after the evaluation
            self._say_undone("evaluation", "evaluate=… to Loop, or ask loop.should_evaluate")
            self.control.should_evaluate = False
        if self.control.should_save and self._save is not None:
            self._save_now()
        elif self.control.should_save and answered:
            self._say_undone("checkpoint", "save=… to Loop, or ask loop.should_save")
            self.control.should_save = False

    def _evaluate_now(self, *, judge: bool = True) -> None:
        before = self._reported
        metrics = self._evaluate() if self._evaluate is not None else None
        if metrics is None and self._reported == before:
            raise SettingError("evaluate() returned nothing. The evaluation is lost. Return a dict of metrics: {'loss': …}.")
        if self._reported == before:
            self.report(prefixed(metrics or {}))
        self.control.should_evaluate = False
        if metrics is not None and judge:
            self._judge(metrics)

    def _say_undone(self, what: str, how: str) -> None:
        notices.once(
            f"loop:{what}",
            f"{what} was due at step {self.state.global_step}, and nobody did it. Training goes on without. "
            f"Give {how} at the end of the loop's body.",
        )


def prefixed(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Name metrics as those of an evaluation."""
    return {key if key.startswith(("eval_", "eval/")) else f"eval_{key}": value for key, value in metrics.items()}
