"""TrainerState: the progress of a training. Saved with every checkpoint, so it survives versions, kills and unusual metrics."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..atomic import replace_text
from .control import ExportableState


class _Rotating(list[Any]):
    """The states of several callbacks of one class: a new one replaces the oldest.

    Transformers' Trainer appends all of them again at each save; a plain list would grow with every checkpoint.
    """

    def append(self, state: Any) -> None:
        del self[:1]
        super().append(state)

    def __reduce__(self) -> Any:  # copying and unpickling would append one by one
        return type(self), (list(self),)


class _States(dict[str, Any]):
    """States by class name. A class that is new (added on a resume) is None until its first state is set."""

    def __missing__(self, name: str) -> None:
        return None


def exportable(thing: object) -> bool:
    """Return whether a checkpoint can store the state of `thing`; this includes Transformers' own callbacks."""
    return isinstance(thing, ExportableState) or any(base.__name__ == "ExportableState" for base in type(thing).__mro__)


def states_of(things: Iterable[Any]) -> _States:
    """Collect states by class name; several objects of one class form a list, in order."""
    found: dict[str, list[Any]] = {}
    for thing in things:
        if not exportable(thing):
            raise TypeError(
                f"the state of {type(thing)} cannot be kept in a checkpoint: it does not inherit from ExportableState. "
                "Nothing was saved. Inherit from it and write state()."
            )
        found.setdefault(type(thing).__name__, []).append(thing.state())
    return _States({name: states[0] if len(states) == 1 else _Rotating(states) for name, states in found.items()})


@dataclass
class TrainerState:
    """The progress of a training. A step is one update of the weights, however many batches it took.

    `epoch` is fractional during an epoch. `stateful_callbacks` accepts callbacks and holds their states, by class name.
    """

    epoch: float = 0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0
    log_history: Any = None
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, str | float | int | bool] | None = None
    stateful_callbacks: Any = None

    def __post_init__(self) -> None:
        self._unknown: dict[str, Any] = {}
        if self.log_history is None:
            self.log_history = []
        if isinstance(self.stateful_callbacks, dict):
            kept = self.stateful_callbacks.items()
            self.stateful_callbacks = _States({n: _Rotating(s) if isinstance(s, list) else s for n, s in kept})
        else:
            self.stateful_callbacks = states_of(self.stateful_callbacks or ())

    def save_to_json(self, json_path: str | os.PathLike[str]) -> None:
        """Write the state to a file, atomically."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        text = json.dumps(_plain({**self._unknown, **fields}), indent=2, sort_keys=True) + "\n"
        replace_text(Path(json_path), text)

    @classmethod
    def load_from_json(cls, json_path: str | os.PathLike[str]) -> TrainerState:
        """Read a state from a file. Fields of other versions are kept, and written again at the next save."""
        content = json.loads(Path(json_path).read_text(encoding="utf-8"))
        known = {field.name for field in dataclasses.fields(cls)}
        state = cls(**{name: value for name, value in content.items() if name in known})
        state._unknown = {name: value for name, value in content.items() if name not in known}
        return state

    def compute_steps(self, args: Any, max_steps: int) -> None:
        """Take the logging, eval and save steps from `args`; a number below 1 is a fraction of `max_steps`."""
        for name in ("logging_steps", "eval_steps", "save_steps"):
            steps = getattr(args, name)
            if steps is not None:
                setattr(self, name, math.ceil(max_steps * steps) if steps < 1 else steps)

    def init_training_references(self, trainer: Any, max_steps: int, num_train_epochs: int, trial: Any) -> None:
        """Set the fields a Trainer knows when training begins."""
        if trainer.hp_name is not None and trainer._trial is not None:  # noqa: SLF001 - Transformers passes it that way
            self.trial_name = trainer.hp_name(trainer._trial)  # noqa: SLF001 - as above
        self.trial_params = getattr(trial, "params", trial)  # an Optuna trial, or the dict of another search
        self.max_steps = max_steps
        self.num_train_epochs = num_train_epochs
        self.is_local_process_zero = trainer.is_local_process_zero()
        self.is_world_process_zero = trainer.is_world_process_zero()


def _plain(value: Any) -> Any:
    """Return a JSON-compatible value: numpy and torch numbers become numbers, arrays lists, anything else text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return str(value)
