"""Rules for what a key comes down to in the end (last, min, max, mean, …), and for what it is drawn over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import SettingError

RULES = ("last", "min", "max", "mean", "sum", "count", "first", "none")


@dataclass(frozen=True)
class Metric:
    """What define_metric said of the keys that match a pattern (`val/*`)."""

    key: str
    x: str | None = None
    summary: str | None = None

    @classmethod
    def check(cls, key: str, x: str | None, summary: str | None) -> Metric:
        if summary is not None and summary not in RULES:
            raise SettingError(
                f"define_metric({key!r}, summary={summary!r}) is not a rule. Nothing was changed. Known: {', '.join(RULES)}."
            )
        return cls(key, x, summary)

    def as_dict(self) -> dict[str, Any]:
        return {"x": self.x, "summary": self.summary}
