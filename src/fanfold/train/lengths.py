"""The length of a training and its steps, computed by Loop and Trainer from arguments and loader."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import SettingError
from .arguments import LoopArguments


def updates_of(args: LoopArguments, length: int | None) -> tuple[int | None, float]:
    """Return the steps of an epoch of `length` batches, and of the whole training; None and infinity if unknown."""
    updates = max(1, math.ceil(length / args.gradient_accumulation_steps)) if length is not None else None
    if args.max_steps > 0:
        return updates, args.max_steps
    return updates, math.inf if updates is None else math.ceil(args.num_train_epochs * updates)


def how_long(epochs: float | None, max_steps: int | None) -> dict[str, Any]:
    """Return the arguments for the duration; one of the two must be given."""
    if epochs is None and max_steps is None:
        raise SettingError("Loop does not know how long to train. Nothing was started. Give epochs=… or max_steps=….")
    return {} if epochs is None else {"num_train_epochs": epochs}


def when_to_save(save: Any, save_steps: float | None, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return when to save; a loop without save() and save_steps does not save itself."""
    if save_steps is not None:
        return {"save_steps": save_steps}
    return {} if save is not None or "save_strategy" in arguments else {"save_strategy": "no"}


def length_of(loader: Any) -> int | None:
    """Return how many batches a loader has, or None if unknown, as for a stream."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def in_steps(source: Iterator[Any], each: int) -> Iterator[tuple[Any, bool, int]]:
    """Yield each batch of a stream without a length, whether it is the last of its step, and the step's number of batches.

    The batches of a step are fetched together: only then is it known whether the stream ends within the step.
    """
    while batches := list(itertools.islice(source, each)):
        for at, batch in enumerate(batches):
            yield batch, at == len(batches) - 1, len(batches)
