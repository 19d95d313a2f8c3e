"""The order of keys when there is no room for all of them."""

from __future__ import annotations

from collections.abc import Iterable

# Keys of general interest.
_FIRST = ("loss", "acc", "reward", "perplexity", "f1", "grad_norm", "lr", "learning_rate")


def curve_order(keys: Iterable[str]) -> list[str]:
    """Sort keys for charts: those of general interest first, then in order of appearance."""

    def place(key: str) -> int:
        words = key.lower()
        return next((i for i, word in enumerate(_FIRST) if word in words), len(_FIRST))

    return sorted(keys, key=place)
