"""Evaluation and prediction: a pass over data without gradients, with the results gathered from all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple


class EvalPrediction:
    """The argument of compute_metrics: `predictions` and `label_ids`, as numpy arrays or tuples of them."""

    def __init__(self, predictions: Any, label_ids: Any) -> None:
        self.predictions, self.label_ids = predictions, label_ids

    def __iter__(self) -> Iterator[Any]:
        return iter((self.predictions, self.label_ids))

    def __getitem__(self, index: int) -> Any:
        return (self.predictions, self.label_ids)[index]


class PredictionOutput(NamedTuple):
    """The result of predict()."""

    predictions: Any
    label_ids: Any
    metrics: dict[str, Any]


class TrainOutput(NamedTuple):
    """The result of train()."""

    global_step: int
    training_loss: float
    metrics: dict[str, Any]


class Gathered:
    """The losses, predictions and labels of a pass, collected batch by batch, and finally gathered from all ranks."""

    def __init__(self) -> None:
        self.loss: Any = None
        self.samples = self.batches = self.with_loss = 0
        self.predictions: list[Any] = []
        self.labels: list[Any] = []
        self.began = time.perf_counter()

    def add(self, loss: Any, predictions: Any, labels: Any, count: int) -> None:
        """Add one batch. The loss stays on its device."""
        if loss is not None:
            self.loss = loss.detach() * count if self.loss is None else self.loss + loss.detach() * count
            self.with_loss += count
        if predictions is not None:
            self.predictions.append(_to_host(predictions))
        if labels is not None:
            self.labels.append(_to_host(labels))
        self.samples += count
        self.batches += 1

    def over_ranks(self, accelerator: Any) -> None:
        """Gather the ranks' parts, in the order of the dataset."""
        if accelerator.num_processes == 1:
            return
        from accelerate.utils import gather_object

        loss = float(self.loss) if self.loss is not None else None
        mine = (loss, self.samples, self.batches, self.with_loss, self.predictions, self.labels)
        losses, samples, batches, with_loss, predictions, labels = zip(*gather_object([mine]), strict=True)
        known = [part for part in losses if part is not None]
        self.loss = sum(known) if known else None
        self.samples, self.batches, self.with_loss = sum(samples), max(batches), sum(with_loss)
        self.predictions = [batch for part in predictions for batch in part]
        self.labels = [batch for part in labels for batch in part]

    def metrics(self, prefix: str, compute: Callable[[EvalPrediction], Mapping[str, Any]] | None) -> dict[str, Any]:
        """Return the metrics of the pass, each under the prefix."""
        found: dict[str, Any] = {}
        if compute is not None and self.predictions and self.labels:
            found = {key: _plain(value) for key, value in compute(EvalPrediction(self.all_predictions, self.all_labels)).items()}
        if self.loss is not None:
            found["loss"] = float(self.loss) / self.with_loss
        return {key if key.startswith(f"{prefix}_") else f"{prefix}_{key}": value for key, value in found.items()} | self.speed(
            prefix
        )

    def speed(self, prefix: str) -> dict[str, float]:
        seconds = max(time.perf_counter() - self.began, 1e-9)
        return {
            f"{prefix}_runtime": seconds,
            f"{prefix}_samples_per_second": self.samples / seconds,
            f"{prefix}_steps_per_second": self.batches / seconds,
        }

    @property
    def all_predictions(self) -> Any:
        return _joined(self.predictions)

    @property
    def all_labels(self) -> Any:
        return _joined(self.labels)


def count_of(batch: Any) -> int:
    """Return how many samples a batch holds: the length of the first tensor in it."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    while isinstance(batch, (list, tuple)) and batch:
        batch = batch[0]
    return int(batch.shape[0]) if getattr(batch, "shape", ()) else 1


def _to_host(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_to_host(part) for part in value)
    if isinstance(value, Mapping):
        return {key: _to_host(part) for key, part in value.items()}
    if not hasattr(value, "detach"):
        return value
    value = value.detach()
    if value.is_floating_point() and value.dtype.itemsize < 4:
        value = value.float()  # numpy has no bfloat16
    return value.cpu().numpy()


def _joined(parts: list[Any]) -> Any:
    """Join batches along their first axis; shorter rows are padded with -100, which losses ignore."""
    import numpy as np

    if not parts:
        return None
    if isinstance(parts[0], tuple):
        return tuple(_joined([part[at] for part in parts]) for at in range(len(parts[0])))
    if isinstance(parts[0], dict):
        return {key: _joined([part[key] for part in parts]) for key in parts[0]}
    arrays = [np.atleast_1d(part) for part in parts]
    if arrays[0].ndim < 2 or len({array.shape[1] for array in arrays}) == 1:
        return np.concatenate(arrays)
    width = max(array.shape[1] for array in arrays)
    return np.concatenate([_filled(array, width) for array in arrays])


def _filled(array: Any, width: int) -> Any:
    import numpy as np

    missing = [(0, 0), (0, width - array.shape[1]), *[(0, 0)] * (array.ndim - 2)]
    return np.pad(array, missing, constant_values=-100)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else value
