"""What the callbacks of XGBoost and LightGBM share."""

from __future__ import annotations

from typing import Any


def scores(key: str, value: Any) -> dict[str, float]:
    """Return a metric by its key; of a cross-validation, the mean and its standard deviation."""
    mean, *spread = value if isinstance(value, (tuple, list)) else (value,)
    return {key: float(mean), **{f"{key}/std": float(one) for one in spread}}


def number(text: Any) -> Any:
    """Return a parameter that is written as a text as the number it is."""
    for kind in (int, float):
        try:
            return kind(text)
        except (TypeError, ValueError):
            continue
    return text
