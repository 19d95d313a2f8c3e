"""TrainerControl: the five flags by which callbacks steer a loop. ExportableState: state that a checkpoint can store."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, TypeVar

T = TypeVar("T", bound="ExportableState")


class ExportableState:
    """An object whose state a checkpoint can store as plain JSON: its constructor arguments and its mutable state.

    `state()` returns `{"args": {…}, "attributes": {…}}`.
    """

    def state(self) -> dict[str, Any]:
        """Return constructor arguments and mutable state."""
        raise NotImplementedError(
            f"{type(self).__name__} has no state() of its own, so a checkpoint cannot keep it. "
            'Write one that returns {"args": {…}, "attributes": {…}}.'
        )

    @classmethod
    def from_state(cls: type[T], state: dict[str, Any]) -> T:  # noqa: PYI019 - Self was added in Python 3.11
        """Recreate the object from a stored state."""
        instance = cls(**state["args"])
        for name, value in state["attributes"].items():
            setattr(instance, name, value)
        return instance


@dataclass
class TrainerControl(ExportableState):
    """What the loop does next. Callbacks set the flags; the loop acts on them and resets them.

    `should_training_stop` stays set; `should_epoch_stop` lasts until the next epoch begins, the others until the next step begins
    or the action is done.
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
