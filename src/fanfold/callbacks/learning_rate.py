"""Changing the learning rate of a running training, so that its schedule continues from the new value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..recording.control import Control

NAME = "lr"
# What schedulers of torch keep of the rates they started with, in themselves or in the optimizer's groups.
_BASES = ("base_lrs", "max_lrs", "_last_lr")
_OF_GROUP = ("initial_lr", "max_lr", "min_lr", "swa_lr")


def make_adjustable(control: Control, optimizer: Any, scheduler: Any, low: float | None, high: float | None) -> list[str]:
    """Register the learning rates of a torch optimizer as knobs; return their names.

    `lr` is the rate of the first group, and the other groups keep their proportions. With several groups, `lr/0`, `lr/1`, … are
    their own.
    """
    groups = getattr(optimizer, "param_groups", None)
    if not groups or not all(isinstance(_rate(group), float) for group in groups):
        return []
    rates = _LearningRates(optimizer, scheduler)
    names = {NAME: range(len(groups))}
    if len(groups) > 1:
        names |= {f"{NAME}/{place}": range(place, place + 1) for place in range(len(groups))}
    for name, places in names.items():
        first = places[0]
        control.knob(
            name, rates.get(first), low, high, current=lambda first=first: rates.get(first),  # type: ignore[misc]
            change=lambda value, places=places: rates.set(places, value),  # type: ignore[misc]
        )  # fmt: skip
    return list(names)


class _LearningRates:
    def __init__(self, optimizer: Any, scheduler: Any) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler

    def get(self, place: int) -> float:
        return float(_rate(self.optimizer.param_groups[place]))

    def set(self, places: range, value: float) -> None:
        """Set the rate of the first of some groups; the others change by the same factor, and so do their schedules."""
        now = self.get(places[0])
        factor = value / now if now else None
        groups = self.optimizer.param_groups
        others = [group["lr"] for place, group in enumerate(groups) if place not in places]
        rates = [self.get(place) * factor if factor is not None else value for place in places]
        for place, rate in zip(places, rates, strict=True):
            group = groups[place]
            self._put(group, rate, shared=any(group["lr"] is other for other in others))
            for name in _OF_GROUP:
                if name in group:
                    group[name] = float(group[name]) * factor if factor is not None else value
            for schedule in _schedules(self.scheduler):
                for name in _BASES:
                    kept = getattr(schedule, name, None)
                    if isinstance(kept, list) and place < len(kept):
                        kept[place] = float(kept[place]) * factor if factor is not None else value

    def _put(self, group: dict[str, Any], value: float, *, shared: bool) -> None:
        """Change a rate: a tensor in place, because compiled steps and CUDA graphs read it there, unless others share it."""
        if hasattr(group["lr"], "fill_"):
            group["lr"] = group["lr"].clone() if shared else group["lr"]
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def _rate(group: Any) -> Any:
    rate = group.get("lr") if isinstance(group, dict) else None
    return float(rate) if rate is not None else None


def _schedules(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler and those inside it: wrappers (Accelerate's), sequences and chains of schedulers."""
    if scheduler is None:
        return
    yield scheduler
    inner = getattr(scheduler, "scheduler", None)
    if inner is not None:
        yield from _schedules(inner)
    for one in getattr(scheduler, "_schedulers", None) or ():
        yield from _schedules(one)
