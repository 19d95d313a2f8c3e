"""What `fanfold doctor` looks at: one short function per section, each yielding lines. Nothing heavy is imported."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from .. import __version__, process
from ..errors import FanfoldError, guard
from ..journal import origin, spool
from ..settings import cache_directory, find_directory, is_address, read_file, resolve, store_address, unknown_variables
from ..stores import open_store
from .text import size

LOW_BYTES = 1_000_000_000
TRACKERS = ("aim", "azureml-mlflow", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flytekit", "mlflow", "neptune",
            "swanlab", "tensorboard", "tensorboardX", "trackio", "wandb")  # fmt: skip
FRAMEWORKS = ("torch", "accelerate", "transformers", "lightning", "pytorch-lightning", "keras", "jax", "ray", "deepspeed")
READERS = ("pyarrow", "pandas", "polars", "pillow")
# Where each service finds its key. Only whether it is set is ever shown.
CREDENTIALS = ("AIM_REPO", "CLEARML_API_ACCESS_KEY", "CLEARML_API_SECRET_KEY", "CLEARML_CONFIG_FILE", "COMET_API_KEY",
               "DAGSHUB_USER_TOKEN", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN",
               "MLFLOW_TRACKING_URI", "NEPTUNE_API_TOKEN", "SWANLAB_API_KEY", "WANDB_API_KEY")  # fmt: skip
FILES = {"~/.netrc": ("api.wandb.ai",), "~/clearml.conf": (), "~/.comet.config": (), "~/.cache/huggingface/token": (),
         "~/.databrickscfg": ()}  # fmt: skip


class Line(NamedTuple):
    """One finding. level: ok, note, warning (works, but look at it) or wrong (a run would not be recorded)."""

    name: str
    value: str
    level: str = "ok"
    hint: str = ""


def machine(_args: argparse.Namespace) -> Iterator[Line]:
    yield Line("fanfold", __version__)
    yield Line("Python", f"{platform.python_version()} ({sys.executable})")
    yield Line("platform", platform.platform())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Line("cores", f"{cores} usable of {os.cpu_count()}")
    yield _clock()


def _clock() -> Line:
    """Compare the clock with what cannot be younger than now: this very installation."""
    now, built = time.time(), Path(__file__).stat().st_mtime
    text = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now))
    if now < built - 86400:
        return Line(
            "clock", text, "warning", "It is behind the date of fanfold's own files: attempts may be sorted wrongly. Set it."
        )
    return Line("clock", text)


def places(args: argparse.Namespace) -> Iterator[Line]:
    try:
        if is_address(store_address(args.dir)):
            store = open_store(args.dir)
            yield Line("runs", f"{store.place}, {sum(1 for _ in store.names(args.project))} runs")
            yield from _writable("cache", cache_directory(), needed=False)
            return
        root = find_directory(args.dir)
        yield from _writable("runs", root, needed=True)
        read_file(root)
    except FanfoldError as error:
        yield Line("settings", str(error), "wrong")
        return
    except OSError as error:
        yield Line("runs", str(error), "wrong")
        return
    kind = spool.filesystem_of(_existing(root))
    yield Line("filesystem", f"{kind or 'unknown'}, {_spooling(kind)}")
    yield from _space("disk", root)
    yield from _writable("cache", cache_directory(), needed=False)


def _writable(name: str, folder: Path, *, needed: bool) -> Iterator[Line]:
    """Really write a file, and delete it again: permissions alone do not tell (full, read-only, quota)."""
    place = _existing(folder)
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".fanfold-doctor-") as file:
            file.write(b"fanfold")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        level = "wrong" if needed else "warning"
        hint = "Choose another place with FANFOLD_DIR." if needed else "Listing runs is slower without it. Set FANFOLD_CACHE_DIR."
        yield Line(name, f"{folder}: cannot be written ({error.strerror})", level, hint)
        return
    yield Line(name, f"{folder}" + ("" if folder.exists() else " (made by the first run)"))


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.parents) if place.exists())


def _spooling(kind: str) -> str:
    how = resolve("spool")
    if how == "never" or (how == "auto" and kind not in spool.NETWORK):
        return "journals are written in place"
    where = next(filter(origin.is_private, roots := origin.spool_roots()), roots[0])
    return f"journals go through the spool in {where}"


def _space(name: str, folder: Path) -> Iterator[Line]:
    free = shutil.disk_usage(_existing(folder)).free
    low = free < LOW_BYTES
    hint = "A full disk drops points (and counts them). Make room, or move the runs with FANFOLD_DIR." if low else ""
    yield Line(name, f"{size(free)} free", "warning" if low else "ok", hint)


def ranks(_args: argparse.Namespace) -> Iterator[Line]:
    try:
        me = process.detect()
        run_id = resolve("run_id")
    except FanfoldError as error:
        yield Line("rank", str(error), "wrong")
        return
    yield Line("launcher", me.launcher)
    yield Line("rank", f"{me.rank} of {me.world_size} (local rank {me.local_rank}) on node {me.node}")
    seen = [name for row in process.LAUNCHERS for name in (row.rank, row.world, row.local_rank, *row.job) if name in os.environ]
    yield Line("variables", ", ".join(dict.fromkeys(seen)) or "not started by a launcher", "note")
    if run_id:
        yield Line("run id", "from FANFOLD_RUN_ID")
    else:
        yield Line("run id", _key_source(me))
    unknown = unknown_variables()
    for name in sorted(name for name in os.environ if name.startswith("FANFOLD_")):
        known = name not in unknown
        yield Line(name, "set", "note" if known else "warning", "" if known else "No setting has this name; it does nothing.")


def _key_source(me: process.Identity) -> str:
    """Say how the processes of this job would agree on one run."""
    if process.job_key(me):
        return f"from the job id of {me.launcher}"
    if me.world_size == 1:
        return "new for each process"
    if me.one_node:
        return "from the launcher process on this node"
    return "from the process group's store, else a meeting in the runs' directory; FANFOLD_RUN_ID makes it certain"


def libraries(_args: argparse.Namespace) -> Iterator[Line]:
    for name, packages in (("trackers", TRACKERS), ("frameworks", FRAMEWORKS), ("readers", READERS)):
        found = [f"{package} {version}" for package in packages if (version := _version(package))]
        yield Line(name, ", ".join(found) or "none installed", "ok" if found else "note")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def credentials(_args: argparse.Namespace, env: Mapping[str, str] | None = None) -> Iterator[Line]:
    """Say which keys are there. Values are never read into a line."""
    env = os.environ if env is None else env
    names = [name for name in CREDENTIALS if env.get(name)]
    yield Line("variables", ", ".join(names) or "none set", "note")
    files = [text for name, words in FILES.items() if (text := _file(name, words))]
    yield Line("files", ", ".join(files) or "none found", "note")


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


def gpus(_args: argparse.Namespace) -> Iterator[Line]:
    found: list[Line] = []
    with guard("ask NVML for GPUs"):
        found = _nvidia()
    yield from found or [Line("GPUs", "none seen by NVML", "note")]


def _nvidia() -> list[Line]:
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        lines = [Line("driver", _text(pynvml.nvmlSystemGetDriverVersion()))]
        for index in range(pynvml.nvmlDeviceGetCount()):
            device = pynvml.nvmlDeviceGetHandleByIndex(index)
            total = pynvml.nvmlDeviceGetMemoryInfo(device).total
            lines.append(Line(f"GPU {index}", f"{_text(pynvml.nvmlDeviceGetName(device))}, {size(total)}"))
        return lines
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


ALL: dict[str, Callable[[argparse.Namespace], Iterator[Line]]] = {
    "machine": machine,
    "places": places,
    "ranks": ranks,
    "libraries": libraries,
    "credentials": credentials,
    "GPUs": gpus,
}
