"""Counters of a gateway, in Prometheus format. No label value comes from a client, so the number of series is bounded."""

from __future__ import annotations

import threading
from collections import defaultdict

_HELP = {
    "requests_total": ("counter", "Requests answered, by route and status."),
    "bytes_total": ("counter", "Bytes stored, by kind (journal, blob)."),
    "received_bytes_total": ("counter", "Bytes of bodies received, as they came over the wire."),
    "pieces_total": ("counter", "Pieces of journals, by outcome (stored, conflict, refused)."),
    "store_seconds_total": ("counter", "Time spent storing."),
    "body_bytes": ("gauge", "Bytes of bodies in hand."),
    "up_seconds": ("gauge", "How long this gateway has been running."),
}


class Metrics:
    """Named numbers with labels."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
        self._lock = threading.Lock()

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        with self._lock:
            self._values[name, tuple(labels.items())] += amount

    def text(self, **gauges: float) -> str:
        """Return all counters in Prometheus' text format, plus the current gauges."""
        with self._lock:
            values = dict(self._values)
        values.update({(name, ()): value for name, value in gauges.items()})
        lines = []
        for name, (kind, meaning) in _HELP.items():
            full = f"fanfold_gateway_{name}"
            lines += [f"# HELP {full} {meaning}", f"# TYPE {full} {kind}"]
            for (_, labels), value in sorted(item for item in values.items() if item[0][0] == name):
                shown = ",".join(f'{label}="{word}"' for label, word in labels)
                lines.append(f"{full}{{{shown}}} {value:.15g}" if shown else f"{full} {value:.15g}")
        return "\n".join(lines) + "\n"
