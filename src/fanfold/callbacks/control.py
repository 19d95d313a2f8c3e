"""TrainerControl: the five switches by which callbacks steer a loop. ExportableState: what a checkpoint can keep."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, TypeVar

T = TypeVar("T", bound="ExportableState")


class ExportableState:
    """Let a checkpoint keep the state of an object, as plain JSON: the arguments it is made with, and what it has become.

    `state()` returns `{"args": {…}, "attributes": {…}}`.
    """

    def state(self) -> dict[str, Any]:
        """Return what is to be kept."""
        raise NotImplementedError(
            f"{type(self).__name__} has no state() of its own, so a checkpoint cannot keep it. "
            'Write one that returns {"args": {…}, "attributes": {…}}.'
        )

    @classmethod
    def from_state(cls: type[T], state: dict[str, Any]) -> T:  # noqa: PYI019 - Self came with Python 3.11
        """Make the object anew from what was kept."""
        instance = cls(**state["args"])
        for name, value in state["attributes"].items():
            setattr(instance, name, value)
        return instance


@dataclass
class TrainerControl(ExportableState):
    """What the loop shall do next. Callbacks set these; the loop acts on them and sets them back.

    `should_training_stop` stays once set; `should_epoch_stop` lasts until the next epoch begins, the others until the
    next step begins or the thing is done.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def _new_training(self) -> None:
        self.should_training_stop = False

    def _new_epoch(self) -> None:
        self.should_epoch_stop = False

    def _new_step(self) -> None:
        self.should_save = self.should_evaluate = self.should_log = False

    def state(self) -> dict[str, Any]:
        return {"args": asdict(self), "attributes": {}}
