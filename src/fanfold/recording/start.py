"""Opening a run: options are checked, the run is found or created, its parts are built and started."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ..errors import RunError
from ..journal.directory import REQUESTS
from .delivery import chosen_trackers
from .join import join
from .options import RunOptions
from .parts import RunParts
from .probes import Probes
from .run import Run


def start(options: RunOptions, *, alone: bool = False) -> Run:
    """Open a run for this process and start its background threads and probes; `alone`: without the other ranks."""
    return _start(options, alone=alone)[0]


def start_around(command: Sequence[str], options: RunOptions) -> tuple[Run, RunParts]:
    """Open a run around a command, and start what records it."""
    return _start(options, command=command)


def _start(options: RunOptions, *, alone: bool = False, command: Sequence[str] | None = None) -> tuple[Run, RunParts]:
    probes, chosen = Probes.check(options), chosen_trackers(options)  # first: mistakes raise before anything is written
    member = join(options, alone=alone, command=command)
    try:
        parts = RunParts(member, options)
        run = Run(parts, options)
    except OSError as error:
        raise RunError(
            f"no journal can be written in {member.path}: {error.strerror or error}. The run was not started. "
            "Make the directory writable, or choose another with fanfold.init(dir=…) or FANFOLD_DIR."
        ) from error
    parts.ending.start(run)
    probes.start(parts)
    parts.ending.stoppers.insert(0, lambda _timeout: run.control.close() if _is_asked(run) else None)
    if member.me.main and not alone:
        parts.ending.keeper.glances.append(lambda: run.control.look() if _is_asked(run) else None)
    if options.stamp:
        from ..provenance import automatic

        parts.ending.stoppers.append(automatic.start(run))
    if options.goodput:
        from .spans import start_spans

        start_spans(parts)  # after the profile and stamps: its hooks are on top of theirs, and go first
    if chosen:
        parts.delivery.attach(chosen, options, parts.recorder)
    parts.delivery.forward(options)
    parts.delivery.notify(options, parts.recorder)
    if member.me.main and not options.quiet and not member.inside:
        again = f", attempt {member.ordinal}" if member.ordinal > 1 else ""
        forked = f", forked from {run.fork.run} at step {run.fork.step}" if run.fork is not None else ""
        print(f"fanfold: run {run.name} ({run.id}{again}{forked}) → {run.path}", file=sys.stderr)
    return run, parts


def _is_asked(run: Run) -> bool:
    """Return whether anybody has asked something of a run, or its program uses run.control; else it is not even imported."""
    return "_control" in vars(run) or (run.path / REQUESTS).exists()


def start_alone(options: RunOptions) -> tuple[Run, Any]:
    """Open a run for this process only, with one tracker and without probes; return it and the tracker's relay."""
    chosen = chosen_trackers(options)
    parts = RunParts(join(options, alone=True), options)
    run = Run(parts, options)
    parts.ending.start(run)
    parts.delivery.attach(chosen, options, parts.recorder)
    return run, parts.delivery.attached and parts.delivery.attached.relays[0]
