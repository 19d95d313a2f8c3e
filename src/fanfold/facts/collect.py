"""Facts about a run: command, code, packages, node and devices, collected once in the background and masked.

It runs in a thread of the training process, so it imports nothing heavy and waits in system calls rather than in Python.
A fact that cannot be read is left out instead of failing the rest.
"""

from __future__ import annotations

import getpass
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from .. import process
from ..errors import guard
from . import git
from .git import head_of, read_from
from .mask import mask, mask_argv

T = TypeVar("T")
FOLDER_NAMES = 20_000  # site-packages has hundreds; a folder of training images beside the script may have millions

_VARIABLES = frozenset(
    "CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING CUDA_DEVICE_MAX_CONNECTIONS HIP_VISIBLE_DEVICES "
    "ROCR_VISIBLE_DEVICES NVIDIA_VISIBLE_DEVICES OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS PYTHONHASHSEED "
    "WORLD_SIZE RANK LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK MASTER_ADDR MASTER_PORT XLA_FLAGS "
    "TOKENIZERS_PARALLELISM OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE PMI_RANK PMI_SIZE "
    "SLURM_JOB_ID SLURM_JOB_NAME SLURM_JOB_PARTITION SLURM_JOB_NODELIST SLURM_JOB_NUM_NODES SLURM_STEP_ID SLURM_NTASKS "
    "SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_CPUS_PER_TASK SLURM_GPUS_ON_NODE SLURM_ARRAY_JOB_ID "
    "SLURM_ARRAY_TASK_ID SLURM_RESTART_COUNT SLURM_CLUSTER_NAME".split()
)
_PREFIXES = ("NCCL_", "PYTORCH_", "TORCH_", "TORCHELASTIC_", "CUBLAS_", "CUDNN_", "JAX_", "ACCELERATE_", "FANFOLD_")


def gather(*, argv: Sequence[str] | None = None, cwd: str | os.PathLike[str] | None = None) -> dict[str, object]:
    """Return facts about this process as plain data without secrets; a fact that cannot be read is absent.

    `argv` is the command line including the interpreter, `cwd` the folder whose repository is described. Without `cwd` it is
    the repository of the script, else of the working directory. The patch is not included: see `git.patch`.
    """
    words = list(sys.orig_argv if argv is None else argv)
    begun = _read({"git": lambda: git.describe(_code_folders(words, cwd), entry_script(argv) if cwd is None else None)})
    facts = _read(
        {
            "command": lambda: mask_argv(words),
            "script": lambda: mask(_script(words)),
            "cwd": lambda: mask(os.fspath(cwd or Path.cwd())),
            "python": _python,
            "packages": lambda: packages(sys.path),
            "node": _node,
            "gpus": gpus,
            "torch": _torch,
            "launcher": lambda: process.detect().launcher,
            "environment": lambda: _environment(_variables()),
            "user": lambda: mask(_user()),
            "time_zone": _time_zone,
            **begun,  # last: git works meanwhile
        }
    )
    if facts.get("torch") is None:
        facts.pop("torch", None)
    return facts


def environment() -> dict[str, object]:
    """Return the facts that are stored in a model file: repository, packages, node and devices."""
    return _read(
        {
            "git": _git,
            "command": lambda: mask_argv(list(sys.orig_argv)),
            "python": _python,
            "packages": lambda: packages(sys.path),
            "node": _node,
            "gpus": gpus,
        }
    )


def _git() -> object:
    return git.describe(_code_folders(sys.orig_argv, None), entry_script())()


def _read(readers: Mapping[str, Callable[[], T]]) -> dict[str, T]:
    facts: dict[str, T] = {}
    for name, read in readers.items():
        with guard(f"read the {name} of this process"):
            facts[name] = read()
    return facts


def _script(argv: Sequence[str]) -> str:
    """Return the entry point: a path, `-m module`, `-c`, the notebook's path (or `notebook`), or `interactive`."""
    if _in_notebook():
        main = vars(sys.modules["__main__"])
        return str(main.get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME") or "notebook")
    words = iter(argv[1:])
    for word in words:
        if word in {"-X", "-W", "--check-hash-based-pycs"}:
            next(words, None)
        elif word == "-c":
            return "-c"
        elif word.startswith("-m"):
            return f"-m {word[2:] or next(words, '')}"
        elif not word.startswith("-") or word == "-":
            return word
    return "interactive"


def entry_script(argv: Sequence[str] | None = None) -> str | None:
    """Return the file this process runs, also if started with `-m`; None for a notebook, a prompt or an installed program.

    With `argv`, return the script in that command line.
    """
    if argv is not None:
        scripts = (word for word in argv if word.endswith((".py", ".sh")) and Path(word).is_file())
        return next((word for word in scripts if not Path(word).resolve().is_relative_to(sys.prefix)), None)
    file = getattr(sys.modules.get("__main__"), "__file__", None) or next(iter(sys.argv), None)  # Python removes it at the end
    if not isinstance(file, str) or _in_notebook() or not Path(file).is_file():
        return None
    return None if Path(file).resolve().is_relative_to(sys.prefix) else file


def _in_notebook() -> bool:
    """Return whether a kernel runs this code; libraries import ipykernel in plain programs, too."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def _python() -> dict[str, object]:
    version = ".".join(map(str, sys.version_info[:3]))
    return {"version": version, "implementation": sys.implementation.name, "executable": mask(sys.executable)}


def _variables() -> dict[str, str]:
    # Name by name: another thread may set or remove a variable at any moment, which breaks a plain copy.
    return {name: os.environ.get(name, "") for name in list(os.environ)}


def _environment(environment: Mapping[str, str]) -> object:
    """Return the variables that affect how training runs; all others may be private and are not read."""
    wanted = {k: v for k, v in sorted(environment.items()) if k in _VARIABLES or k.startswith(_PREFIXES)}
    wanted.pop("FANFOLD_NOTIFY", None)  # addresses of chat services are secrets as a whole
    return mask(wanted)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user id without an entry in /etc/passwd
        return str(os.getuid())


def _time_zone() -> str:
    """Return the time zone's name, such as `Europe/Berlin`, else its offset."""
    _, _, zone = os.path.realpath("/etc/localtime").partition("zoneinfo/")
    return os.environ.get("TZ", "").lstrip(":") or zone or time.strftime("UTC%z")


_PACKAGE = re.compile(r"([^-~][^-]*(?:-[^-\d][^-]*)*)-([^-]+?)(?:-py\d[^/]*)?\.(?:dist|egg)-info")


def packages(path: Sequence[str]) -> dict[str, str]:
    """Return installed packages and versions from folder names only: milliseconds, where importlib.metadata takes 100."""
    found: dict[str, str] = {}
    for folder in dict.fromkeys(path):
        for entry in _info_folders(folder):
            name, version = _package(folder, entry)
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    return dict(sorted(found.items()))


def _info_folders(folder: str) -> Iterator[str]:
    try:
        with os.scandir(folder or ".") as entries:
            names = [entry.name for entry in itertools.islice(entries, FOLDER_NAMES)]
    except OSError:  # a zip, or a missing folder
        return iter(())
    return (name for name in names if name.endswith((".dist-info", ".egg-info")) and not name.startswith("~"))


def _package(folder: str, entry: str) -> tuple[str, str]:
    name, dash, version = entry.removesuffix(".dist-info").partition("-")
    if name and dash and "-" not in version and entry.endswith(".dist-info"):  # as in all wheels
        return name, version
    if match := _PACKAGE.fullmatch(entry):
        return match[1], match[2]
    return entry.rpartition(".")[0], _egg_version(Path(folder) / entry)


def _egg_version(egg: Path) -> str:
    """Return the version of a `setup.py develop` install, whose folder name does not include it."""
    info = head_of(egg / "PKG-INFO") or head_of(egg)
    match = re.search(r"^Version: *(.+)$", info, re.MULTILINE)
    return match[1].strip() if match else ""


def _node() -> dict[str, object]:
    system = os.uname()
    usable = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return {
        "hostname": system.nodename,
        "os": _os_name() or system.sysname,
        "kernel": f"{system.sysname} {system.release}",
        "machine": system.machine,
        "cpu": _cpu_model() or system.machine,
        "cpu_count": os.cpu_count(),
        "cpu_usable": usable,
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "container": _in_container(),
    }


def _os_name() -> str:
    match = re.search(r'^PRETTY_NAME="?([^"\n]+)', head_of(Path("/etc/os-release")), re.MULTILINE)
    return match[1] if match else ""


def _cpu_model() -> str:
    if sys.platform == "darwin":
        return (read_from(["sysctl", "-n", "machdep.cpu.brand_string"]) or b"").decode().strip()
    # Only the head: on a node with hundreds of cores the whole file is long, and slow to generate.
    match = re.search(r"^(?:model name|Model|cpu model)\s*: *(.+)$", head_of(Path("/proc/cpuinfo")), re.MULTILINE)
    return match[1].strip() if match else ""


def _in_container() -> bool:
    marks = ("/.dockerenv", "/run/.containerenv")
    names = ("KUBERNETES_SERVICE_HOST", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "container")
    if any(map(os.path.exists, marks)) or any(name in os.environ for name in names):
        return True
    return re.search(r"docker|kubepods|containerd|lxc", head_of(Path("/proc/1/cgroup"))) is not None


def gpus() -> list[dict[str, Any]]:
    """Return the GPUs that NVML sees."""
    if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg"))):
        return []  # no driver: importing the library would take 20 ms and find nothing
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        driver = _plain(pynvml.nvmlSystemGetDriverVersion())
        return [_gpu(pynvml, index, driver) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, index: int, driver: str) -> dict[str, Any]:
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    return {
        "index": index,
        "name": _plain(nvml.nvmlDeviceGetName(device)),
        "memory_bytes": int(nvml.nvmlDeviceGetMemoryInfo(device).total),
        "driver": driver,
        "uuid": _plain(nvml.nvmlDeviceGetUUID(device)),
    }


def _plain(text: str | bytes) -> str:
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else text  # older libraries return bytes


def _torch() -> dict[str, object] | None:
    """Describe torch if the user has imported it; reads attributes only, so that CUDA is not touched."""
    torch = sys.modules.get("torch")
    version = getattr(torch, "version", None)
    if version is None:  # absent, or being imported by another thread
        return None
    names = {"version": "__version__", "cuda": "cuda", "hip": "hip", "git": "git_version", "debug": "debug"}
    facts = {name: getattr(version, attribute, None) for name, attribute in names.items()}
    return {name: value if isinstance(value, bool) or value is None else str(value) for name, value in facts.items()}


def _code_folders(argv: Sequence[str], cwd: str | os.PathLike[str] | None) -> list[str]:
    if cwd is not None:
        return [os.fspath(cwd)]
    folders = []
    script = Path(_script(argv))
    # A console script is in the environment's bin folder, which says nothing about whose code it runs.
    if script.is_file() and not script.resolve().is_relative_to(sys.prefix):
        folders.append(str(script.resolve().parent))
    with guard("find the working folder"):
        folders.append(str(Path.cwd()))
    return list(dict.fromkeys(folders))
