"""A model's inputs and outputs: batches of any shape in; loss, predictions and labels out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import SettingError


def call(model: Any, inputs: Any, *, without_labels: Sequence[str] | None = None) -> Any:
    """Call a model with a batch: by name for a dict, by position for a tuple; optionally without its labels."""
    if isinstance(inputs, Mapping):
        return model(**{key: value for key, value in inputs.items() if key not in (without_labels or ())})
    if isinstance(inputs, (list, tuple)):
        return model(*(inputs[:-1] if without_labels is not None and len(inputs) > 1 else inputs))
    return model(inputs)


def labels_of(inputs: Any, names: Sequence[str]) -> Any:
    """Return the labels of a batch: those named, or the last item of a tuple; None if there are none."""
    if isinstance(inputs, Mapping):
        found = tuple(inputs[name] for name in names if inputs.get(name) is not None)
        return None if not found else found[0] if len(found) == 1 else found
    if isinstance(inputs, (list, tuple)) and len(inputs) > 1:
        return inputs[-1]
    return None


def loss_of(outputs: Any, *, must: bool = False) -> Any:
    """Return the loss among a model's outputs; if there is none, return None, or raise with `must`."""
    loss = None
    if isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    elif isinstance(outputs, (list, tuple)) and not hasattr(outputs, "loss"):
        loss = outputs[0] if outputs else None
    else:
        loss = getattr(outputs, "loss", outputs)
    if getattr(loss, "shape", None) == () or (loss is not None and getattr(loss, "numel", lambda: 0)() == 1):
        return loss.reshape(())  # type: ignore[union-attr]  # it has a shape
    if must:
        raise SettingError(
            f"the model returned {_kind(outputs)}, and no loss in it: a single number, alone, first in a tuple, or named loss. "
            "Nothing was learned. Return one (pass labels, for a model of Transformers), give compute_loss_func, or override "
            "compute_loss."
        )
    return None


def predictions_of(outputs: Any, ignore: Sequence[str] | None, *, has_loss: bool) -> Any:
    """Return a model's predictions: its outputs without the loss; a single one is not wrapped."""
    if isinstance(outputs, Mapping):
        found = tuple(value for key, value in outputs.items() if key not in ("loss", *(ignore or ())))
    elif isinstance(outputs, (list, tuple)):
        found = tuple(outputs[1:] if has_loss else outputs)
    else:
        found = () if has_loss else (outputs,)
    return None if not found else found[0] if len(found) == 1 else found


def _kind(outputs: Any) -> str:
    if isinstance(outputs, Mapping):
        return f"{type(outputs).__name__} of {', '.join(map(str, outputs)) or 'nothing'}"
    shape = getattr(outputs, "shape", None)
    return f"a {type(outputs).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else "")
