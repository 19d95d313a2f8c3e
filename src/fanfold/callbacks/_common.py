"""Shared helpers of the measuring callbacks: the run to log to, and access to a model's tensors without waiting for a device."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from ..errors import SettingError, notices
from ..media import Histogram
from ..media.histogram import Summary

SAMPLE = 1 << 20  # values of a tensor used for a histogram: counting needs extra memory on the device
BINS = 64


def current_run(given: Any, who: object) -> Any:
    """Return the given run, or the current one; warn once if there is none."""
    from ..recording import api

    run = given if given is not None else api.run
    if run is None:
        name = type(who).__name__
        notices.once(
            f"callback:no run:{name}",
            f"{name} has no run to log to, so what it measures is not recorded. Call fanfold.init(project=…) before training.",
        )
    return run


def check_every(every: int, who: object) -> int:
    """Return an interval in steps, or raise."""
    if not isinstance(every, int) or every < 1:
        raise SettingError(
            f"{type(who).__name__}(every={every!r}) is not a number of steps. The callback was not created. Pass 1 or more."
        )
    return every


def tensors_of(model: Any, *, gradients: bool) -> tuple[list[str], list[Any]]:
    """Return names and tensors of a model's parameters or gradients; of sharded ones, this rank's part."""
    if not hasattr(model, "named_parameters"):
        notices.once(
            "callback:no parameters",
            f"a model of type {type(model).__name__} has no named_parameters(), so its parameters cannot be measured. "
            "Norms and non-finite values are looked for in PyTorch models.",
        )
        return [], []
    found: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        tensor = parameter.grad if gradients else parameter.detach()
        if tensor is not None:
            tensor = tensor._values() if tensor.is_sparse else tensor  # noqa: SLF001 - values() requires coalesce()
            tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            if tensor.numel():
                found[name.removeprefix("module.").replace("_orig_mod.", "")] = tensor
    return list(found), list(found.values())


def norms_of(tensors: Sequence[Any], order: float) -> list[Any]:
    """Return the norm of each tensor, still on its device and in float32, with as few kernels as torch can."""
    import torch

    with torch.no_grad():
        if hasattr(torch, "_foreach_norm"):
            with contextlib.suppress(TypeError):  # older versions take no dtype
                return list(torch._foreach_norm(list(tensors), order, dtype=torch.float32))  # noqa: SLF001 - as clip_grad_norm_
        return [torch.linalg.vector_norm(tensor, order, dtype=torch.float32) for tensor in tensors]


def together(norms: Sequence[Any]) -> Any:
    """Stack numbers from one or several devices on the first one's device."""
    import torch

    device = norms[0].device
    return torch.stack([norm.to(device, non_blocking=True) for norm in norms])


class CountedHistogram(Histogram):
    """A histogram counted on the device: only a few hundred bytes are copied, not the tensor."""

    def __init__(self, tensor: Any) -> None:
        self.bins = BINS
        self._hold(_count(tensor))

    @property
    def summary(self) -> Summary:
        low, top, mean, std, nan, plus, minus, *counts = (float(number) for number in self._host())
        size = sum(counts)
        if not size:
            low, top = 0.0, 1.0
        width = (top - low if top > low else max(1.0, abs(low))) / BINS
        edges = [low + width * at for at in range(BINS + 1)]
        known = {"min": low, "max": top, "mean": mean, "std": std} if size else {}
        return Summary([int(n) for n in counts], edges, int(size), **known, nan=int(nan), pos_inf=int(plus), neg_inf=int(minus))


def _count(tensor: Any) -> Any:
    """Count a tensor's values on its device: extremes, moments, non-finite values and bins, in one vector."""
    import torch

    with torch.no_grad():
        values = tensor.detach().reshape(-1)
        values = values[:: max(1, -(-values.numel() // SAMPLE))].float()
        finite = torch.isfinite(values)
        low = torch.where(finite, values, torch.inf).amin()
        top = torch.where(finite, values, -torch.inf).amax()
        size = finite.sum().clamp_min(1)
        kept = torch.where(finite, values, 0)
        mean = kept.sum() / size
        std = (torch.where(finite, values - mean, 0).square().sum() / size).sqrt()
        place = ((kept - low) / ((top - low).clamp_min(1e-38) / BINS)).nan_to_num(0).clamp(0, BINS - 1).long()
        counts = torch.zeros(BINS, dtype=torch.int64, device=values.device).scatter_add_(0, place, finite.long())
        odd = torch.stack([values.isnan().sum(), values.isposinf().sum(), values.isneginf().sum()])
        return torch.cat([torch.stack([low, top, mean, std]), odd.float(), counts.float()])
