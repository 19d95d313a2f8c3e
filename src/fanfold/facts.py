"""What a run knows of itself: command, code, packages, node and devices, read once beside training and masked.

It runs in a thread of the training process, so it imports nothing heavy, waits in system calls rather than in Python,
and a part that cannot be read is left out instead of failing the rest.
"""

from __future__ import annotations

import getpass
import itertools
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import guard
from .mask import MASKED, is_secret, mask, mask_argv, mask_text

GIT_SECONDS = 5.0
PATCH_LIMIT = 2_000_000
UNTRACKED_NAMES = 1_000
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
# The innermost launcher wins: accelerate starts torchrun's agent, which may itself run under srun or inside Ray.
_LAUNCHERS = (
    ("accelerate", ("ACCELERATE_MIXED_PRECISION",)),
    ("torchrun", ("TORCHELASTIC_RUN_ID",)),
    ("ray", ("RAY_JOB_ID", "RAY_RAYLET_PID")),
    ("mpirun", ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")),
    ("srun", ("SLURM_STEP_ID",)),
    ("mpirun", ("PMI_RANK",)),
)


def gather(*, argv: Sequence[str] | None = None, cwd: str | os.PathLike[str] | None = None) -> dict[str, object]:
    """Gather what this process knows of itself as plain data, free of secrets; a part that cannot be read is absent.

    `argv` is the command line with its interpreter, `cwd` the folder whose repository counts. Without `cwd` it is the
    repository of the script, else the one of the working folder. The patch is not in here: see `patch`.
    """
    words = list(sys.orig_argv if argv is None else argv)
    readers: dict[str, Callable[[], object]] = {
        "command": lambda: mask_argv(words),
        "script": lambda: mask(_script(words)),
        "cwd": lambda: mask(os.fspath(cwd or Path.cwd())),
        "git": lambda: _git(_code_folders(words, cwd)),
        "python": _python,
        "packages": lambda: packages(sys.path),
        "node": _node,
        "gpus": _gpus,
        "torch": _torch,
        "launcher": lambda: _launcher(_variables()),
        "environment": lambda: _environment(_variables()),
        "user": lambda: mask(_user()),
        "time_zone": _time_zone,
    }
    facts: dict[str, object] = {}
    for name, read in readers.items():
        with guard(f"read the {name} of this process"):
            facts[name] = read()
    if facts.get("torch") is None:
        facts.pop("torch", None)
    return facts


def _script(argv: Sequence[str]) -> str:
    """Name the entry: a path, `-m module`, `-c`, the notebook's path (or `notebook`), or `interactive`."""
    if "ipykernel" in sys.modules:
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


def _python() -> dict[str, object]:
    version = ".".join(map(str, sys.version_info[:3]))
    return {"version": version, "implementation": sys.implementation.name, "executable": mask(sys.executable)}


def _variables() -> dict[str, str]:
    # Name by name: training may set or remove one in this moment, which breaks a plain copy.
    return {name: os.environ.get(name, "") for name in list(os.environ)}


def _launcher(environment: Mapping[str, str]) -> str:
    return next((name for name, variables in _LAUNCHERS if any(v in environment for v in variables)), "plain")


def _environment(environment: Mapping[str, str]) -> object:
    """Keep the variables that change how training runs; anything else may be private and is not looked at."""
    return mask({k: v for k, v in sorted(environment.items()) if k in _VARIABLES or k.startswith(_PREFIXES)})


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user id without an entry in /etc/passwd
        return str(os.getuid())


def _time_zone() -> str:
    """Name the zone as in `Europe/Berlin`, else by its offset."""
    _, _, zone = os.path.realpath("/etc/localtime").partition("zoneinfo/")
    return os.environ.get("TZ", "").lstrip(":") or zone or time.strftime("UTC%z")


_PACKAGE = re.compile(r"([^-~][^-]*(?:-[^-\d][^-]*)*)-([^-]+?)(?:-py\d[^/]*)?\.(?:dist|egg)-info")


def packages(path: Sequence[str]) -> dict[str, str]:
    """Read installed packages and versions from folder names alone, milliseconds where importlib.metadata takes 100."""
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
    except OSError:  # a zip, or a folder that is not there
        return iter(())
    return (name for name in names if name.endswith((".dist-info", ".egg-info")) and not name.startswith("~"))


def _package(folder: str, entry: str) -> tuple[str, str]:
    if match := _PACKAGE.fullmatch(entry):
        return match[1], match[2]
    return entry.rpartition(".")[0], _egg_version(Path(folder) / entry)


def _egg_version(egg: Path) -> str:
    """Read the version of a `setup.py develop` install, whose folder name does not tell it."""
    info = _head(egg / "PKG-INFO") or _head(egg)
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


def _head(file: Path, size: int = 4096) -> str:
    try:
        with file.open("rb") as stream:
            return stream.read(size).decode("utf-8", "replace")
    except OSError:
        return ""


def _os_name() -> str:
    match = re.search(r'^PRETTY_NAME="?([^"\n]+)', _head(Path("/etc/os-release")), re.MULTILINE)
    return match[1] if match else ""


def _cpu_model() -> str:
    if sys.platform == "darwin":
        return (_read_from(["sysctl", "-n", "machdep.cpu.brand_string"]) or b"").decode().strip()
    # The head tells: the whole file is long, and slow to make, on a node of hundreds of cores.
    match = re.search(r"^(?:model name|Model|cpu model)\s*: *(.+)$", _head(Path("/proc/cpuinfo")), re.MULTILINE)
    return match[1].strip() if match else ""


def _in_container() -> bool:
    marks = ("/.dockerenv", "/run/.containerenv")
    names = ("KUBERNETES_SERVICE_HOST", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "container")
    if any(map(os.path.exists, marks)) or any(name in os.environ for name in names):
        return True
    return re.search(r"docker|kubepods|containerd|lxc", _head(Path("/proc/1/cgroup"))) is not None


def _gpus() -> list[dict[str, object]]:
    if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg"))):
        return []  # no driver: the library would cost 20 ms to import and find nothing
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


def _gpu(nvml: Any, index: int, driver: str) -> dict[str, object]:
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    return {
        "index": index,
        "name": _plain(nvml.nvmlDeviceGetName(device)),
        "memory_bytes": int(nvml.nvmlDeviceGetMemoryInfo(device).total),
        "driver": driver,
        "uuid": _plain(nvml.nvmlDeviceGetUUID(device)),
    }


def _plain(text: str | bytes) -> str:
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else text  # older libraries answer in bytes


def _torch() -> dict[str, object] | None:
    """Describe torch where the user has imported it: attributes only, so that CUDA is not touched."""
    torch = sys.modules.get("torch")
    version = getattr(torch, "version", None)
    if version is None:  # absent, or being imported right now by another thread
        return None
    names = {"version": "__version__", "cuda": "cuda", "hip": "hip", "git": "git_version", "debug": "debug"}
    facts = {name: getattr(version, attribute, None) for name, attribute in names.items()}
    return {name: value if isinstance(value, bool) or value is None else str(value) for name, value in facts.items()}


def _code_folders(argv: Sequence[str], cwd: str | os.PathLike[str] | None) -> list[str]:
    if cwd is not None:
        return [os.fspath(cwd)]
    folders = []
    script = Path(_script(argv))
    # A console script lies in the environment's bin folder, and says nothing about whose code it runs.
    if script.is_file() and not script.resolve().is_relative_to(sys.prefix):
        folders.append(str(script.resolve().parent))
    with guard("find the working folder"):
        folders.append(str(Path.cwd()))
    return list(dict.fromkeys(folders))


def _git(folders: Sequence[str]) -> dict[str, object] | None:
    return next((found for found in map(_repository, folders) if found), None)


def _repository(folder: str) -> dict[str, object] | None:
    """Describe the work tree around `folder`: commit, branch, remote, dirty (tracked files), root; None outside one.

    `commit` is None before the first one, `branch` is None on a detached head, and `dirty` is None where git is not
    installed, is too slow or will not open another user's repository: the rest is then read from its files.
    """
    root = _line(_run_git(folder, "rev-parse", "--show-toplevel"))
    if not root:
        return _by_hand(folder)
    status = _run_git(root, "status", "--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules=untracked")
    if status is None:
        return _by_hand(root)
    lines = os.fsdecode(status).splitlines()
    head = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# branch.") and line.count(" ") > 1)
    commit, branch = head.get("branch.oid", "(initial)"), head.get("branch.head", "(detached)")
    return _described(
        root,
        commit=None if commit == "(initial)" else commit,
        branch=None if branch == "(detached)" else branch,
        remote=_remote(os.fsdecode(_run_git(root, "config", "--get-regexp", r"^remote\..*\.url$") or b"")),
        dirty=any(not line.startswith("#") for line in lines),
    )


def _described(root: str, *, commit: str | None, branch: str | None, remote: str, dirty: bool | None) -> dict[str, object]:
    facts = {"commit": commit, "branch": branch, "remote": remote or None, "dirty": dirty, "root": root}
    return {name: mask(value) for name, value in facts.items()}


def _remote(urls: str) -> str:
    """Choose origin, else the first, from lines of `remote.NAME.url URL`."""
    remotes = dict(line.split(" ", 1) for line in urls.splitlines() if " " in line)
    return remotes.get("remote.origin.url") or next(iter(remotes.values()), "")


def _by_hand(folder: str) -> dict[str, object] | None:
    """Read commit and branch from the repository's files, for containers that lack git or mount another's checkout."""
    start = Path(folder).absolute()
    root = next((at for at in (start, *start.parents) if _head(at / ".git") or (at / ".git" / "HEAD").is_file()), None)
    if root is None:
        return None
    link = _head(root / ".git")  # a file in worktrees and submodules, a folder elsewhere
    folder_of_head = root / link[8:].strip() if link.startswith("gitdir: ") else root / ".git"
    shared = folder_of_head / (_head(folder_of_head / "commondir").strip() or ".")
    head = _head(folder_of_head / "HEAD").strip()
    if not head:
        return None
    name = head[5:] if head.startswith("ref: ") else ""
    commit = _reference(shared, name) if name else head
    config = _head(shared / "config", 65_536)
    urls = re.findall(r'^\[remote "([^"]+)"\][^\[]*?^\s*url\s*=\s*(\S+)', config, re.MULTILINE)
    remote = _remote("\n".join(f"remote.{remote}.url {url}" for remote, url in urls))
    return _described(str(root), commit=commit, branch=name.removeprefix("refs/heads/") or None, remote=remote, dirty=None)


def _reference(shared: Path, name: str) -> str | None:
    packed = re.search(rf"^([0-9a-f]+) {re.escape(name)}$", _head(shared / "packed-refs", 4_000_000), re.MULTILINE)
    return _head(shared / name).strip() or (packed[1] if packed else None)


_CODE = (".py", ".pyi", ".pyx", ".ipynb", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".rs", ".go", ".js", ".jsx",
         ".ts", ".tsx", ".java", ".kt", ".scala", ".swift", ".rb", ".lua", ".jl", ".svelte")  # fmt: skip
_PRIVATE = re.compile(
    r"(?:^|/)(?:\.env(?:\.[^/]*)?|[^/]*\.(?:env|pem|p12|pfx|key|keystore|kdbx|tfvars)|id_(?:rsa|dsa|ecdsa|ed25519)"
    r"|\.?netrc|\.npmrc|\.pypirc|\.git-credentials|\.htpasswd|kubeconfig|[^/]*service[-_]account[^/]*\.json)$"
)


def patch(root: str | os.PathLike[str], limit: int = PATCH_LIMIT) -> tuple[bytes, bool]:
    """Return the uncommitted changes under `root`, masked, and whether they were cut to `limit` bytes.

    First the names of untracked files, as comments, then the patch of tracked files against HEAD, which `git apply`
    takes. Binary files are named by their hashes only: a secret in packed bytes could not be masked. Files whose name
    says that they hold secrets (`.env`, `*.pem`…) are named without their content. Empty where git cannot tell.
    """
    folder = os.fspath(root)
    notes = _untracked(folder)
    base = _line(_run_git(folder, "rev-parse", "--verify", "--quiet", "HEAD^{commit}"))
    base = base or _line(_run_git(folder, "hash-object", "-t", "tree", os.devnull))  # no commit yet: all is new
    diff = _run_git(folder, *_DIFF, base, "--", limit=limit + 1) if base else None
    raw = diff or b""
    cut = len(raw) > limit
    # Whole lines only, before masking: half a token has no shape to be known by.
    text = _whole_lines(raw, limit).decode("utf-8", "surrogateescape")
    masked = "".join([notes, *map(_mask_file, _by_file(text))]).encode("utf-8", "surrogateescape")
    return _whole_lines(masked, limit), cut or len(masked) > limit


_DIFF = ("diff", "--no-color", "--no-ext-diff", "--no-textconv", "--full-index", "--src-prefix=a/", "--dst-prefix=b/",
         "--submodule=short", "--ignore-submodules=untracked")  # fmt: skip


def _whole_lines(data: bytes, limit: int) -> bytes:
    return data if len(data) <= limit else data[: data.rfind(b"\n", 0, limit) + 1]


def _untracked(folder: str) -> str:
    listed = _run_git(folder, "ls-files", "--others", "--exclude-standard", "--directory", "--no-empty-directory", "-z")
    names = [repr(name)[1:-1] for name in (listed or b"").decode("utf-8", "surrogateescape").split("\0") if name]
    lines = [f"# untracked: {mask_text(name)}\n" for name in names[:UNTRACKED_NAMES]]
    if len(names) > UNTRACKED_NAMES:
        lines.append(f"# untracked: and {len(names) - UNTRACKED_NAMES} more\n")
    return "".join(lines)


def _by_file(text: str) -> list[str]:
    return re.split(r"^(?=diff --git )", text, flags=re.MULTILINE)


def _mask_file(section: str) -> str:
    first = section[: section.find("\n")].rstrip('" ')
    name = first.rpartition("/")[2]
    if _PRIVATE.search(first) or (is_secret(name.partition(".")[0]) and not name.endswith(_CODE)):
        header, hunk, _ = section.partition("\n@@")
        return f"{header}\n# content {MASKED}: this file's name says that it holds secrets\n" if hunk else section
    return mask_text(section, code=name.endswith(_CODE))


def _line(output: bytes | None) -> str:
    return os.fsdecode(output or b"").removesuffix("\n")


def _run_git(folder: str, *arguments: str, limit: int = PATCH_LIMIT) -> bytes | None:
    """Run git quietly: no locks, prompts, pagers, hooks, monitors or network; None where it fails or is too slow."""
    settings = ("core.fsmonitor=false", "core.quotepath=false", "core.hooksPath=/dev/null", "core.untrackedCache=false")
    options = [word for setting in settings for word in ("-c", setting)]
    drop = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_EXTERNAL_DIFF", "GIT_DIFF_OPTS"}
    environment = {name: value for name, value in _variables().items() if name not in drop}
    environment |= {
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ALLOW_PROTOCOL": "none",  # a partial clone would fetch what it lacks
        "GIT_NO_LAZY_FETCH": "1",
        "LC_ALL": "C",
    }
    return _read_from(["git", "--no-pager", "-C", folder, *options, *arguments], environment, limit)


def _read_from(command: Sequence[str], environment: Mapping[str, str] | None = None, limit: int = PATCH_LIMIT) -> bytes | None:
    """Run a command for at most GIT_SECONDS and return up to `limit` bytes of its output; None where it failed."""
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that its children can be ended with it
        )
    except OSError:  # not installed, or the folder is gone
        return None
    with process:
        output, whole = _drain(process, time.monotonic() + GIT_SECONDS, limit)
        if not whole:
            _end(process)
        failed = process.wait() != 0 if whole else len(output) < limit
    return None if failed else output


def _drain(process: subprocess.Popen[bytes], deadline: float, limit: int) -> tuple[bytes, bool]:
    """Read until the end, the limit or the deadline; say whether the end came."""
    stream = process.stdout
    parts: list[bytes] = []
    with selectors.DefaultSelector() as selector:
        if stream is None:
            return b"", True
        selector.register(stream, selectors.EVENT_READ)
        room = limit
        while room > 0 and selector.select(max(0.0, deadline - time.monotonic())):
            part = os.read(stream.fileno(), min(room, 1 << 20))
            if not part:
                return b"".join(parts), True
            parts.append(part)
            room -= len(part)
    return b"".join(parts), False


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
