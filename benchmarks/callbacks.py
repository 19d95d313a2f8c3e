"""What the callback handler costs a training step, beside Transformers' handler in the same run.

`make bench` runs it; `python benchmarks/callbacks.py --quick` is a check of a second. A full run writes its block of
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from transformers import trainer_callback as theirs

from fanfold import callbacks as ours
from report import Sheet, cpu, ratio, us, version, write_page

PAGE = Path(__file__).resolve().parents[1] / "docs" / "benchmarks.md"
MARKS = ("<!-- callbacks: written by `make bench`, do not edit by hand -->", "<!-- callbacks: end -->")
STEP = ("on_step_begin", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end")
KINDS = {
    "10 callbacks that override nothing": [],
    "10 callbacks with an on_step_end that does nothing": ["on_step_end"],
    "10 callbacks with all four events, each doing nothing": list(STEP),
}
ARGS = SimpleNamespace(logging_strategy="no", logging_first_step=False, eval_strategy="no", save_strategy="no")
HEAD = ["", "fanfold", "Transformers", "to fanfold"]
NOTE = (
    "One step without accumulation: on_step_begin, on_pre_optimizer_step, on_optimizer_step, on_step_end, DefaultFlowCallback "
    "included. CPU time; blocks of steps of both handlers in turn, median of the blocks."
)


def handler(module: Any, events: list[str]) -> Any:
    """Make a handler with ten callbacks of ten classes."""

    def hear(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pass

    made = [type(f"Callback{n}", (module.TrainerCallback,), dict.fromkeys(events, hear)) for n in range(10)]
    return module.CallbackHandler([module.DefaultFlowCallback, *made], None, None, None, None)


def block(module: Any, told: Any, steps: int) -> float:
    """Return the microseconds of CPU a step's events take: other processes do not count."""
    state, control = module.TrainerState(max_steps=10**9), module.TrainerControl()
    begin, before, after, end = (getattr(told, event) for event in STEP)
    start = time.thread_time()
    for _ in range(steps):
        begin(ARGS, state, control)
        before(ARGS, state, control)
        after(ARGS, state, control)
        end(ARGS, state, control)
    return (time.thread_time() - start) / steps * 1e6


def measure(events: list[str], *, blocks: int, steps: int) -> list[float]:
    pairs = [(module, handler(module, events)) for module in (ours, theirs)]
    times: list[list[float]] = [[], []]
    for _ in range(blocks):
        for at, (module, told) in enumerate(pairs):
            times[at].append(block(module, told, steps))
    return [statistics.median(some) for some in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer blocks: a check, not a measurement")
    parser.add_argument("--page", type=Path, help="write the block into this page (a full run: docs/benchmarks.md)")
    options = parser.parse_args()
    rows = []
    for title, events in KINDS.items():
        mine, other = measure(events, blocks=5 if options.quick else 60, steps=500)
        rows.append([title, us(mine), us(other), ratio(other, mine)])
    sheet = Sheet("The callbacks of one step", HEAD, rows, NOTE)
    sheet.print(Console(width=None if sys.stdout.isatty() else 150))
    facts = [f"{cpu()}; Python {sys.version.split()[0]}; {time.strftime('%Y-%m-%d')}", f"transformers {version('transformers')}"]
    if page := options.page or (None if options.quick else PAGE):
        write_page(page, facts, [sheet], marks=MARKS)


if __name__ == "__main__":
    main()
