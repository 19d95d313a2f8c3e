"""Starting the probes of a run (facts, console, system metrics, energy, operators, the black box). Each stops with the run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import clean_text, guard
from ..journal import Kind, Writer, blobs
from ..plain import plain
from ..settings import resolve
from ..threads import Background
from .options import RunOptions
from .parts import RunParts

if TYPE_CHECKING:
    from ..probes.gpu_health import Fault

FACTS_SECONDS = 2.0
WATCHED = ("torchrun", "accelerate", "srun")  # launchers whose jobs have a black box unless it is turned off


class Probes(NamedTuple):
    """The probes that the options of a run ask for, checked before anything is written; None: not this one."""

    options: RunOptions
    energy: Mapping[str, Any] | None  # CodeCarbon's arguments
    ops: Any
    blackbox: Any

    @classmethod
    def check(cls, options: RunOptions) -> Probes:
        return cls(options, _energy_arguments(options), _ops_options(options), _blackbox_options(options))

    def start(self, parts: RunParts) -> None:
        """Start them all, in this process."""
        _start_facts(parts)
        inside = parts.member.inside  # then `fanfold exec` records console and system metrics
        if self.options.console and not inside:
            _start_console(parts)
        if self.blackbox is not None or (self.options.blackbox is None and parts.member.me.launcher in WATCHED):
            with guard("start the black box", strict=self.options.strict):
                _start_blackbox(parts, self.blackbox)
        if self.options.system and parts.member.me.local_main:
            _start_system(parts, self.options.file)
        if self.energy is not None and parts.member.me.local_main:
            _start_energy(parts, self.energy)
        if self.ops is not None:
            with guard("profile operators", strict=self.options.strict):  # importing torch may fail
                _start_ops(parts, self.ops)


def _start_facts(parts: RunParts) -> None:
    gatherer = Background(lambda: _gather(parts), "facts", lambda: None)
    gatherer.start()
    parts.ending.stoppers.append(lambda timeout: gatherer.join(min(timeout, FACTS_SECONDS)))
    parts.ending.keeper.chores.append(_import_media)


def _start_console(parts: RunParts) -> None:
    from .console import ConsoleCapture

    console = ConsoleCapture(parts.member.path, parts.member.worker_header("console"))
    console.start()
    parts.ending.stoppers.insert(0, console.stop)


def _start_system(parts: RunParts, file: Mapping[str, Any]) -> None:
    from ..probes.system import SystemProbe

    def report(fault: Fault, gpus: int) -> None:
        """Write an alert about a GPU, with the rank that uses it: ranks of a node use its GPUs in order."""
        rank = me.rank + fault.gpu if gpus == (me.local_world_size or 1) and fault.gpu >= 0 else None
        title, text, level = gpu_alert(fault, me.node, rank)
        parts.recorder.event("alert", {"title": title, "text": text, "level": level, "s": int(parts.recorder.high)})

    me = parts.member.me
    whole_node = resolve("gpus", file=file) == "all"
    probe = SystemProbe(
        lambda values: write_row(parts.writer, values, None, "system"),
        disk_path=str(parts.member.path),
        children=parts.member.command is not None,
        whole_node=whole_node,
        report=report,
    )
    probe.start()
    parts.ending.stoppers.append(lambda timeout: probe.stop(min(timeout, 0.5)))


def gpu_alert(fault: Fault, node: str, rank: int | None) -> tuple[str, str, str]:
    """Return the title, text and level of an alert about a GPU."""
    gpu = f"GPU {fault.gpu}" if fault.gpu >= 0 else "A GPU"
    place = f"{gpu} on {node}" + ("" if rank is None else f", rank {rank}")
    return f"{place}: {fault.kind}", f"{place}: {fault.text}.", fault.level


def _start_energy(parts: RunParts, arguments: Mapping[str, Any]) -> None:
    from ..probes.energy import STOP_SECONDS, EnergyProbe

    def write(values: Mapping[str, float]) -> None:
        # Written at the run's current step, so that trackers plot it beside the loss.
        write_row(parts.writer, values, max(parts.recorder.high, 0), "energy")

    log = parts.member.path / "probes" / f"energy-{parts.member.me.rank}.log"
    probe = EnergyProbe(write, arguments=arguments, log=log)
    probe.start()
    parts.ending.stoppers.append(lambda timeout: probe.stop(min(timeout, STOP_SECONDS)))


def write_row(writer: Writer, values: Mapping[str, float], step: int | None, origin: str) -> None:
    """Write the numbers of a probe."""
    writer.row(values, "d" * len(values), time_ns=time.time_ns(), step=step, origin=origin)


def _energy_arguments(options: RunOptions) -> dict[str, Any] | None:
    """Return CodeCarbon's arguments if energy is measured: by its own option, or because it is named among the trackers."""
    if not options.energy and not options.trackers:
        return None
    from ..probes import energy

    if not (options.energy or energy.named(options.trackers)):
        return None
    arguments = dict(options.tracker_kwargs.get(energy.NAME, {}))
    energy.check(arguments)
    return arguments


def _ops_options(options: RunOptions) -> Any:
    if not options.ops and options.ops != {}:  # an empty dict means the default options
        return None
    from ..probes import ops

    return ops.check(options.ops)


def _blackbox_options(options: RunOptions) -> Any:
    if not options.blackbox and options.blackbox != {}:
        return None
    from ..blackbox import box

    return box.check(options.blackbox)


def _start_blackbox(parts: RunParts, options: Any) -> None:
    from ..blackbox.box import BlackBox, BlackBoxOptions

    def write(facts: Mapping[str, Any]) -> bool:
        return parts.writer.append((Kind.EVENT, {"t": time.time_ns(), **facts}))

    member = parts.member
    me, options = member.me, options or BlackBoxOptions()
    black_box = BlackBox(
        options, member.path, member.header, lambda: int(parts.recorder.high), write, first=me.local_main,
        processes=me.local_world_size or 1,
    )  # fmt: skip
    black_box.start()
    parts.ending.stoppers.insert(0, black_box.stop)


def _start_ops(parts: RunParts, options: Any) -> None:
    from ..probes import ops
    from ..provenance import automatic

    def write(facts: Mapping[str, Any]) -> bool:
        kept = parts.writer.append((Kind.EVENT, {"t": time.time_ns(), **facts}))
        if facts["event"] == "ops":  # the native library stamps files saved by C++: each snapshot updates its step
            with guard("bring the stamp of exported files up to date"):
                automatic.refresh()
        return kept

    member, ending = parts.member, parts.ending
    local = member.spool is None  # the table is written many times a second: never over a network filesystem
    probe = ops.start(options, write, path=member.path, rank=member.me.rank, node=member.me.node, local=local)
    if probe is not None:
        ending.keeper.chores.append(probe.tick)
        ending.stoppers.insert(0, probe.stop)


def _import_media() -> None:
    """Import what a first image will need: a signal handler that logs must not meet a half-imported module.

    Not at the very start, where it would compete with the program's own imports and first calls.
    """
    from .. import media  # noqa: F401


def _gather(parts: RunParts) -> None:
    """Collect facts about the run off the training thread: git, packages, hardware."""
    from ..facts import collect

    with guard("gather facts about this process"):
        found = collect.gather(argv=parts.member.command)
        if parts.member.me.main:
            with guard("keep the code of this run"):
                _keep_code(parts.member.path, found, collect.entry_script(parts.member.command))
        parts.recorder.info({"facts": plain(found)})


def _keep_code(path: Path, facts: dict[str, Any], script: str | None) -> None:
    """Save code that is not in the commit: the patch of tracked files, and untracked source files."""
    from ..facts.git import patch as patch_of
    from ..facts.git import sources

    git = facts.get("git") or {}
    if git and not git.get("dirty"):
        return
    if git:
        patch, cut = patch_of(git["root"])
        git["patch"] = {"blob": blobs.put(path, patch), "size": len(patch), "cut": cut}
    kept, more = sources(git.get("root"), script)
    if kept or more:
        files = [{"path": clean_text(name), "blob": blobs.put(path, text), "size": len(text)} for name, text in kept]
        facts["code"] = {"files": files, "left_out": more}
