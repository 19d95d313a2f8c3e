"""Check this machine: where runs are stored, disk space, ranks, libraries, credentials (by name only) and GPUs.

The exit code is 1 when something would keep a run from being recorded. --deploy checks code that you want to ship instead.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from .. import __version__, process
from ..drawing.numbers import plural
from ..errors import FanfoldError, guard
from ..facts import collect
from ..journal import origin, spool
from ..settings import cache_directory, find_directory, is_address, read_file, resolve, store_address, unknown_variables
from ..stores import open_store
from . import deploy, output
from .text import clean, size

EXAMPLE = """examples:
  fanfold doctor
  torchrun --nproc-per-node 2 --no-python fanfold doctor --json     what each rank of a job sees
  fanfold doctor --deploy src/app --sources app-sources.zip         what breaks when only .pyc files are shipped"""

_SIGNS = {"ok": ("✓", "green"), "note": ("·", "dim"), "warning": ("!", "yellow"), "wrong": ("✗", "red")}
LOW_BYTES = 1_000_000_000
TRACKERS = ("aim", "azureml-mlflow", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flytekit", "mlflow", "neptune",
            "swanlab", "tensorboard", "tensorboardX", "trackio", "wandb")  # fmt: skip
FRAMEWORKS = ("torch", "accelerate", "transformers", "lightning", "pytorch-lightning", "keras", "jax", "ray", "deepspeed")
READERS = ("pyarrow", "pandas", "polars", "pillow")
# Where each service finds its key. Only whether it is set is shown, never the value.
CREDENTIALS = ("AIM_REPO", "CLEARML_API_ACCESS_KEY", "CLEARML_API_SECRET_KEY", "CLEARML_CONFIG_FILE", "COMET_API_KEY",
               "DAGSHUB_USER_TOKEN", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN",
               "MLFLOW_TRACKING_URI", "NEPTUNE_API_TOKEN", "SWANLAB_API_KEY", "WANDB_API_KEY")  # fmt: skip
FILES = {"~/.netrc": ("api.wandb.ai",), "~/clearml.conf": (), "~/.comet.config": (), "~/.cache/huggingface/token": (),
         "~/.databrickscfg": ()}  # fmt: skip


class Check(NamedTuple):
    """One finding. level: ok, note, warning (it works, but needs attention) or wrong (a run would not be recorded)."""

    name: str
    value: str
    level: str = "ok"
    hint: str = ""


def arguments(parser: argparse.ArgumentParser) -> None:
    deploy.arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.deploy is not None:
        return deploy.run(args)
    if args.sources is not None or args.timeout is not None:
        raise FanfoldError("--sources and --timeout go with --deploy. Nothing was checked. Add --deploy PATH.")
    found = [(title, list(check(args))) for title, check in CHECKS.items()]
    wrong = any(one.level == "wrong" for _, lines in found for one in lines)
    if args.json:
        facts = [{"section": title, **one._asdict(), "hint": one.hint or None} for title, lines in found for one in lines]
        output.print_json({"healthy": not wrong, "checks": facts})
    else:
        _print(found, quiet=args.quiet)
    return 1 if wrong else 0


def _print(found: list[tuple[str, list[Check]]], *, quiet: bool) -> None:
    from rich.text import Text

    console = output.console(soft_wrap=True)
    for title, lines in found:
        shown = [line for line in lines if not quiet or line.level in ("warning", "wrong")]
        if shown:
            console.print(Text(title, style="bold"))
        for line in shown:
            sign, colour = _SIGNS[line.level]
            console.print(Text.assemble((f"  {sign} ", colour), (f"{clean(line.name):<17} ", "dim"), clean(line.value)))
            if line.hint:
                console.print(Text(f"    {'':<18}{clean(line.hint)}", style=colour))


# The sections: each yields its lines. Nothing heavy is imported.


def machine(_args: argparse.Namespace) -> Iterator[Check]:
    yield Check("fanfold", __version__)
    yield Check("Python", f"{platform.python_version()} ({sys.executable})")
    yield Check("platform", platform.platform())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check("cores", f"{cores} usable of {os.cpu_count()}")
    clock = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    behind = time.time() < Path(__file__).stat().st_mtime - 86400
    hint = "It is behind the date of fanfold's own files: attempts may be sorted wrongly. Set it." if behind else ""
    yield Check("clock", clock, "warning" if behind else "ok", hint)


def places(args: argparse.Namespace) -> Iterator[Check]:
    try:
        if is_address(store_address(args.dir)):
            store = open_store(args.dir)
            yield Check("runs", f"{store.place}, {plural(sum(1 for _ in store.names(args.project)), 'run')}")
            yield from _writable("cache", cache_directory(), needed=False)
            return
        root = find_directory(args.dir)
        yield from _writable("runs", root, needed=True)
        read_file(root)
    except FanfoldError as error:
        yield Check("settings", str(error), "wrong")
        return
    except OSError as error:
        yield Check("runs", str(error), "wrong")
        return
    kind = spool.filesystem_of(_existing(root))
    yield Check("filesystem", f"{kind or 'unknown'}, {_spooling(kind)}")
    yield from _space("disk", root)
    yield from _writable("cache", cache_directory(), needed=False)


def _writable(name: str, folder: Path, *, needed: bool) -> Iterator[Check]:
    """Write a file and delete it again: permissions do not show a full disk, a quota or a read-only mount."""
    place = _existing(folder)
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".fanfold-doctor-") as file:
            file.write(b"fanfold")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        level = "wrong" if needed else "warning"
        hint = "Choose another place with FANFOLD_DIR." if needed else "Listing runs is slower without it. Set FANFOLD_CACHE_DIR."
        yield Check(name, f"{folder}: cannot be written ({error.strerror})", level, hint)
        return
    yield Check(name, f"{folder}" + ("" if folder.exists() else " (created by the first run)"))


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.parents) if place.exists())


def _spooling(kind: str) -> str:
    how = resolve("spool")
    if how == "never" or (how == "auto" and kind not in spool.NETWORK):
        return "journals are written in place"
    where = next(filter(origin.is_private, roots := origin.spool_roots()), roots[0])
    return f"journals are written to the spool in {where} first"


def _space(name: str, folder: Path) -> Iterator[Check]:
    free = shutil.disk_usage(_existing(folder)).free
    low = free < LOW_BYTES
    hint = "A full disk drops points (and counts them). Make room, or move the runs with FANFOLD_DIR." if low else ""
    yield Check(name, f"{size(free)} free", "warning" if low else "ok", hint)


def ranks(_args: argparse.Namespace) -> Iterator[Check]:
    try:
        me = process.detect()
        run_id = resolve("run_id")
    except FanfoldError as error:
        yield Check("rank", str(error), "wrong")
        return
    yield Check("launcher", me.launcher)
    yield Check("rank", f"{me.rank} of {me.world_size} (local rank {me.local_rank}) on node {me.node}")
    seen = [name for row in process.LAUNCHERS for name in (row.rank, row.world, row.local_rank, *row.job) if name in os.environ]
    yield Check("variables", ", ".join(dict.fromkeys(seen)) or "not started by a launcher", "note")
    yield Check("run id", "from FANFOLD_RUN_ID" if run_id else _key_source(me))
    unknown = unknown_variables()
    for name in sorted(name for name in os.environ if name.startswith("FANFOLD_")):
        hint = "No setting has this name; it has no effect." if name in unknown else ""
        yield Check(name, "set", "warning" if hint else "note", hint)


def _key_source(me: process.ProcessIdentity) -> str:
    """Return how the processes of this job would agree on one run."""
    if process.job_key(me):
        return f"from the job id of {me.launcher}"
    if me.world_size == 1:
        return "new for each process"
    if me.one_node:
        return "from the launcher process on this node"
    return "from the process group's store, else agreed on in the runs' directory; FANFOLD_RUN_ID sets it"


def libraries(_args: argparse.Namespace) -> Iterator[Check]:
    for name, packages in (("trackers", TRACKERS), ("frameworks", FRAMEWORKS), ("readers", READERS)):
        found = [f"{package} {version}" for package in packages if (version := _version(package))]
        yield Check(name, ", ".join(found) or "none installed", "ok" if found else "note")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def credentials(_args: argparse.Namespace) -> Iterator[Check]:
    """Yield which credentials are set, never their values."""
    names = [name for name in CREDENTIALS if os.environ.get(name)]
    yield Check("variables", ", ".join(names) or "none set", "note")
    files = [text for name, words in FILES.items() if (text := _file(name, words))]
    yield Check("files", ", ".join(files) or "none found", "note")


def _file(name: str, words: tuple[str, ...]) -> str | None:
    path = Path(name).expanduser()
    try:
        if not path.is_file():
            return None
        content = path.read_text(encoding="utf-8", errors="replace") if words else ""
    except OSError:
        return f"{name} (cannot be read)"
    found = [word for word in words if word in content]
    return f"{name} ({', '.join(found)})" if found else (name if not words else None)


def gpus(_args: argparse.Namespace) -> Iterator[Check]:
    found: list[dict[str, Any]] = []
    with guard("ask NVML for GPUs"):
        found = collect.gpus()
    if not found:
        yield Check("GPUs", "none seen by NVML", "note")
        return
    yield Check("driver", found[0]["driver"])
    for gpu in found:
        yield Check(f"GPU {gpu['index']}", f"{gpu['name']}, {size(gpu['memory_bytes'])}")


CHECKS: dict[str, Callable[[argparse.Namespace], Iterator[Check]]] = {
    "machine": machine,
    "places": places,
    "ranks": ranks,
    "libraries": libraries,
    "credentials": credentials,
    "GPUs": gpus,
}
