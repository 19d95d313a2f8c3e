"""Which keys come first where not all fit."""

from __future__ import annotations

from collections.abc import Iterable

# What people look at first.
_FIRST = ("loss", "acc", "reward", "perplexity", "f1", "grad_norm", "lr", "learning_rate")


def curve_order(keys: Iterable[str]) -> list[str]:
    """Sort keys for drawing: what people look at first, then in order of appearance."""

    def place(key: str) -> int:
        words = key.lower()
        return next((i for i, word in enumerate(_FIRST) if word in words), len(_FIRST))

    return sorted(keys, key=place)
