"""The Trainer's data: the samples of each rank, in an order determined by seed and epoch, from any position.

The order is that of Transformers' Trainer with the same seed. It is not drawn from the global random state, and no batch is
fetched early, so a resumed training sees exactly the batches and random numbers that an uninterrupted one sees.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import SettingError

if TYPE_CHECKING:
    from .arguments import TrainingArguments

LABELS = ("label", "label_ids", "labels")


class Batches:
    """The batches of one rank, as lists of indices. Every rank takes its part of the same global batch."""

    def __init__(self, count: int, size: int, *, rank: int = 0, world: int = 1, seed: int | None = None, drop_last: bool = False):
        self.count, self.size, self.rank, self.world, self.seed = count, size, rank, world, seed
        self.drop_last = drop_last
        self.epoch = self.start = 0

    def __len__(self) -> int:
        whole, rest = divmod(self.count, self.size * self.world)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        return self._from(self.start, self._order())  # `start` is read now, not when the first batch is requested

    def _from(self, start: int, order: Sequence[int]) -> Iterator[list[int]]:
        for at in range(start, len(self)):
            first, end = self._cut(at)
            yield [order[index % self.count] for index in range(first, end)]

    def _order(self) -> Sequence[int]:
        if self.seed is None:
            return range(self.count)
        import torch

        generator = torch.Generator().manual_seed(self.seed + self.epoch)  # as in Accelerate's seedable sampler
        order: list[int] = torch.randperm(self.count, generator=generator).tolist()
        return order

    def _cut(self, at: int) -> tuple[int, int]:
        """Return this rank's part of a global batch. A short one is split evenly, and padded to one sample per rank."""
        first = at * self.size * self.world
        total = max(self.world, min(self.size * self.world, self.count - first))
        each, more = divmod(total, self.world)
        begin = first + self.rank * each + min(self.rank, more)
        return begin, begin + each + (self.rank < more)

    def weight(self, at: int) -> float:
        """Return the weight of this rank's mean loss in the mean over all ranks; 1 unless parts differ in size."""
        first, end = self._cut(at)
        total = max(self.world, min(self.size * self.world, self.count - at * self.size * self.world))
        return (end - first) * self.world / total


class RankShare:
    """The contiguous part of a dataset that one rank evaluates; all ranks' parts in order form the whole."""

    def __init__(self, dataset: Any, rank: int, world: int) -> None:
        count = len(dataset)
        self.dataset, self.first, self.end = dataset, count * rank // world, count * (rank + 1) // world

    def __len__(self) -> int:
        return self.end - self.first

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.first + index]


def train_loader(dataset: Any, args: TrainingArguments, collate: Callable[[list[Any]], Any], *, rank: int, world: int) -> Any:
    """Return the loader of a rank's training batches."""
    from torch.utils.data import DataLoader, IterableDataset

    common = _common(args, collate)
    if isinstance(dataset, IterableDataset):
        if world > 1:
            from accelerate.data_loader import IterableDatasetShard

            dataset = IterableDatasetShard(dataset, args.train_batch_size, args.dataloader_drop_last, world, rank)
        return DataLoader(dataset, batch_size=args.train_batch_size, drop_last=args.dataloader_drop_last, **common)
    seed = args.seed if args.data_seed is None else args.data_seed
    batches = Batches(len(dataset), args.train_batch_size, rank=rank, world=world, drop_last=args.dataloader_drop_last,
                      seed=seed if args.train_sampling_strategy == "random" else None)  # fmt: skip
    if len(batches) == 0:
        raise SettingError(
            f"the training dataset of {len(dataset)} samples gives no batch. Nothing was trained. "
            "Give more samples, a smaller per_device_train_batch_size, or dataloader_drop_last=False."
        )
    # Each pass draws one number, the workers' seed, from the global random state, as in Transformers.
    if args.dataloader_num_workers:
        common["worker_init_fn"] = functools.partial(_seed_worker, rank * args.dataloader_num_workers)
    return DataLoader(dataset, batch_sampler=batches, **common)


def _seed_worker(offset: int, _worker: int) -> None:
    """Seed every random generator of a loader's worker, with a number that differs between ranks."""
    import torch

    from .trainer_state import seed_everything

    seed_everything(torch.initial_seed() % 2**32 + offset)


def eval_loader(dataset: Any, args: TrainingArguments, collate: Callable[[list[Any]], Any], *, rank: int, world: int) -> Any:
    """Return the loader of a rank's part of an evaluation."""
    from torch.utils.data import DataLoader, IterableDataset

    common = _common(args, collate)
    if isinstance(dataset, IterableDataset):

        class Every(IterableDataset):  # type: ignore[misc]  # its base is torch's, imported only here
            def __iter__(self) -> Iterator[Any]:
                return itertools.islice(iter(dataset), rank, None, world)

        return DataLoader(Every(), batch_size=args.eval_batch_size, **common)
    return DataLoader(RankShare(dataset, rank, world), batch_size=args.eval_batch_size, **common)


def _common(args: TrainingArguments, collate: Callable[[list[Any]], Any]) -> dict[str, Any]:
    workers = args.dataloader_num_workers
    options: dict[str, Any] = {"collate_fn": collate, "num_workers": workers}
    options["pin_memory"] = args.dataloader_pin_memory and args.device.type == "cuda"
    if workers:
        options |= {"persistent_workers": args.dataloader_persistent_workers, "prefetch_factor": args.dataloader_prefetch_factor}
    return options


def set_epoch(loader: Any, epoch: int) -> None:
    """Set the epoch of a loader, or of any part of it that supports it."""
    batches = getattr(loader, "batch_sampler", None)
    if isinstance(batches, Batches):
        batches.epoch = epoch
        return
    parts: list[Any] = [loader, getattr(loader, "sampler", None), batches, getattr(loader, "dataset", None)]
    for part in parts:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def from_place(loader: Any, done: int) -> Iterable[Any]:
    """Iterate over a loader starting at batch `done`; ours jumps there directly, others advance batch by batch."""
    batches = getattr(loader, "batch_sampler", None)
    if not isinstance(batches, Batches):
        return itertools.islice(iter(loader), done, None)
    batches.start = done
    rest: Iterator[Any] = iter(loader)
    batches.start = 0
    return rest


def collator(given: Any, processing_class: Any, model: Any, args: TrainingArguments) -> Callable[[list[Any]], Any]:
    """Return the function that builds a batch from samples; columns the model does not accept are left out."""
    if given is None and hasattr(processing_class, "pad"):
        given = functools.partial(processing_class.pad, return_tensors="pt")
    make = given or collate
    wanted = _wanted(model, args) if args.remove_unused_columns else None

    def made(items: list[Any]) -> Any:
        if wanted is not None and items and isinstance(items[0], Mapping):
            items = [_only(item, wanted) for item in items]
        return make(items)

    return made


def _wanted(model: Any, args: TrainingArguments) -> set[str] | None:
    """Return the columns the model's forward accepts, or None if it accepts any."""
    parameters = inspect.signature(model.forward).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return {*parameters, *(args.label_names or ()), *LABELS}


def _only(item: Mapping[str, Any], wanted: set[str]) -> dict[str, Any]:
    kept = {key: value for key, value in item.items() if key in wanted}
    if not kept:
        raise SettingError(
            f"the model's forward takes none of the columns {', '.join(item)}. The batch was not used. Name the columns as "
            "forward names its arguments, or pass remove_unused_columns=False and a data_collator."
        )
    return kept


def collate(items: list[Any]) -> Any:
    """Build a batch: mappings become a dict of tensors, with `label` renamed to `labels`; all else uses torch's default."""
    from torch.utils.data import default_collate

    if not isinstance(items[0], Mapping):
        return default_collate(items)
    keys = [key for key, value in items[0].items() if value is not None and not isinstance(value, (str, bytes))]
    return {"labels" if key in LABELS else key: _stack([item[key] for item in items]) for key in keys}


def _stack(values: list[Any]) -> Any:
    import torch

    if isinstance(values[0], torch.Tensor):
        return torch.stack(values)
    if hasattr(values[0], "__array__"):
        import numpy as np

        return torch.as_tensor(np.stack(values))
    return torch.tensor(values)
