"""Optimizers and learning-rate schedules by Transformers' names, in plain torch."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import SettingError

if TYPE_CHECKING:
    from .arguments import TrainingArguments

Schedule = Callable[..., float]  # (step, warm-up steps, all steps, **options) -> factor of the learning rate

# name -> torch class, and the options implied by the name
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adafactor": ("Adafactor", {}),
    "adagrad": ("Adagrad", {}),
    "adamw_torch": ("AdamW", {}),
    "adamw_torch_fused": ("AdamW", {"fused": True}),
    "rmsprop": ("RMSprop", {}),
    "sgd": ("SGD", {}),
}


def _rise(step: int, warmup: int) -> float:
    return step / max(1, warmup)


def _done(step: int, warmup: int, total: int) -> float:
    return min(1.0, (step - warmup) / max(1, total - warmup))


def _constant(_step: int, _warmup: int, _total: int) -> float:
    return 1.0


def _constant_with_warmup(step: int, warmup: int, _total: int) -> float:
    return min(1.0, _rise(step, warmup)) if warmup else 1.0


def _linear(step: int, warmup: int, total: int) -> float:
    return _rise(step, warmup) if step < warmup else max(0.0, (total - step) / max(1, total - warmup))


def _cosine(step: int, warmup: int, total: int, num_cycles: float = 0.5) -> float:
    if step < warmup:
        return _rise(step, warmup)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * _done(step, warmup, total))))


def _cosine_with_restarts(step: int, warmup: int, total: int, num_cycles: int = 1) -> float:
    if step < warmup:
        return _rise(step, warmup)
    done = _done(step, warmup, total)
    return 0.0 if done >= 1.0 else 0.5 * (1.0 + math.cos(math.pi * ((num_cycles * done) % 1.0)))


def _inverse_sqrt(step: int, warmup: int, _total: int, timescale: int | None = None) -> float:
    if step < warmup:
        return _rise(step, warmup)
    scale = timescale or warmup or 10_000
    return 1.0 / math.sqrt((step + scale - warmup) / scale)


SCHEDULES: dict[str, Schedule] = {
    "constant": _constant,
    "constant_with_warmup": _constant_with_warmup,
    "cosine": _cosine,
    "cosine_with_restarts": _cosine_with_restarts,
    "inverse_sqrt": _inverse_sqrt,
    "linear": _linear,
}


PLATEAU = "reduce_lr_on_plateau"  # steps with evaluations, not with the optimizer


def default_optimizer() -> str:
    """Return Transformers' default: the fused AdamW, from the torch version on in which it is reliable."""
    try:
        major, minor = importlib.metadata.version("torch").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return "adamw_torch"
    return "adamw_torch_fused" if (int(major), int(minor)) >= (2, 8) else "adamw_torch"


def make_scheduler(optimizer: Any, args: TrainingArguments, steps: int) -> Any:
    """Return the schedule that `args` specifies, over `steps` updates."""
    from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

    options = dict(args.lr_scheduler_kwargs or {})
    try:
        if args.lr_scheduler_type == PLATEAU:
            return ReduceLROnPlateau(optimizer, **options)
        shape, warmup = SCHEDULES[args.lr_scheduler_type], args.get_warmup_steps(steps)
        return LambdaLR(optimizer, lambda step: shape(step, warmup, steps, **options))
    except TypeError as error:
        raise SettingError(
            f"lr_scheduler_kwargs={options!r} does not fit lr_scheduler_type={args.lr_scheduler_type!r}: {error}. "
            "Nothing was trained. Correct or leave out lr_scheduler_kwargs."
        ) from error


def waits_for_evaluations(scheduler: Any) -> bool:
    """Return whether a schedule steps with each evaluation's metric."""
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    return isinstance(scheduler, ReduceLROnPlateau)


def make_optimizer(model: Any, args: TrainingArguments, given: tuple[Any, Mapping[str, Any]] | None = None) -> Any:
    """Return the optimizer that `args` specifies, or one of the class `given`; biases and norms are not decayed."""
    groups = _groups(model, args.weight_decay)
    if given is not None:
        cls, options = given
        return cls(groups, **options)
    import torch

    name, options = OPTIMIZERS[args.optim or default_optimizer()]
    known: dict[str, Any] = {"lr": args.learning_rate, **options, **(args.optim_args or {})}
    if name == "AdamW":
        known = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon, **known}
    return getattr(torch.optim, name)(groups, **known)


def _groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    free = _without_decay(model)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for name, parameter in trained if name not in free], "weight_decay": weight_decay},
        {"params": [parameter for name, parameter in trained if name in free], "weight_decay": 0.0},
    ]


def _without_decay(model: Any) -> set[str]:
    """Return the parameters that weight decay would only harm: biases, and those of normalisation layers."""
    names = {name for name, _ in model.named_parameters() if name.rpartition(".")[2] == "bias"}
    for path, module in model.named_modules():
        if "norm" in type(module).__name__.lower():
            names |= {f"{path}.{name}" if path else name for name, _ in module.named_parameters(recurse=False)}
    return names
