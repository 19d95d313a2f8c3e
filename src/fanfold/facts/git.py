"""The repository a run's code comes from: commit, branch, remote, and the patch of uncommitted changes.

git runs as a subprocess with a short timeout and without prompts, pager or hooks; if it cannot run, its files are read.
"""

from __future__ import annotations

import itertools
import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from .mask import MASKED, is_secret, mask, mask_text

GIT_SECONDS = 5.0
PATCH_LIMIT = 2_000_000
UNTRACKED_NAMES = 1_000
SOURCE_SIZE, SOURCE_FILES, SOURCE_BYTES = 200_000, 200, 2_000_000


def head_of(file: Path, size: int = 4096) -> str:
    try:
        with file.open("rb") as stream:
            return stream.read(size).decode("utf-8", "replace")
    except OSError:
        return ""


Facts = dict[str, object] | None


def describe(folders: Sequence[str], script: str | None = None) -> Callable[[], Facts]:
    """Start to describe the first repository among these folders; return a function that waits for its commit and the rest."""
    waits = (_repository(folder, script) for folder in folders)
    first = next(waits, lambda: None)
    return lambda: next((found for wait in itertools.chain([first], waits) if (found := wait())), None)


def _repository(folder: str, script: str | None) -> Callable[[], Facts]:
    """Describe the work tree around `folder`: commit, branch, remote, dirty, root; None outside one.

    `dirty` means that the commit is not the code that runs: tracked files have changed, source files (or the script) are not
    tracked, or there is no commit yet. It is None if git is not installed, is too slow or refuses to open another user's
    repository; the rest is then read from its files. `commit` is None before the first commit, `branch` on a detached HEAD.
    """
    found = _root_of(folder)
    if found is None:
        return lambda: None  # without starting git, which takes milliseconds even for this answer
    answers = ask_git(str(found), _TOP, _STATUS, _URLS, *_about_sources(str(found), script))

    def read() -> Facts:
        top, status, urls, *files = answers()
        root = _line(top)
        if root and Path(root) != found.resolve():  # a folder named .git that git does not take for one
            _, status, urls, *files = ask_git(root, _TOP, _STATUS, _URLS, *_about_sources(root, script))()
        if not root or status is None:
            return _by_hand(folder)
        return _read(root, status, urls, _unknown_sources(script, root, files))

    return read


def _read(root: str, status: bytes, urls: bytes | None, untracked: list[str]) -> dict[str, object]:
    lines = os.fsdecode(status).splitlines()
    head = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# branch.") and line.count(" ") > 1)
    commit, branch = head.get("branch.oid", "(initial)"), head.get("branch.head", "(detached)")
    return _described(
        root,
        commit=None if commit == "(initial)" else commit,
        branch=None if branch == "(detached)" else branch,
        remote=_remote(os.fsdecode(urls or b"")),
        dirty=commit == "(initial)" or any(not line.startswith("#") for line in lines) or bool(untracked),
    )


_TOP = ("rev-parse", "--show-toplevel")
_STATUS = ("status", "--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules=untracked")
_URLS = ("config", "--get-regexp", r"^remote\..*\.url$")


def _described(root: str, *, commit: str | None, branch: str | None, remote: str, dirty: bool | None) -> dict[str, object]:
    facts = {"commit": commit, "branch": branch, "remote": remote or None, "dirty": dirty, "root": root}
    return {name: mask(value) for name, value in facts.items()}


def _remote(urls: str) -> str:
    """Return the URL of origin, else of the first remote, from lines of `remote.NAME.url URL`."""
    remotes = dict(line.split(" ", 1) for line in urls.splitlines() if " " in line)
    return remotes.get("remote.origin.url") or next(iter(remotes.values()), "")


def _root_of(folder: str) -> Path | None:
    """Return the closest folder that contains a repository, as far as its files show."""
    start = Path(folder).absolute()
    return next((at for at in (start, *start.parents) if head_of(at / ".git") or (at / ".git" / "HEAD").is_file()), None)


def _by_hand(folder: str) -> dict[str, object] | None:
    """Read commit and branch from the repository's files, for containers without git or with another user's checkout."""
    root = _root_of(folder)
    if root is None:
        return None
    link = head_of(root / ".git")  # a file in worktrees and submodules, otherwise a folder
    folder_of_head = root / link[8:].strip() if link.startswith("gitdir: ") else root / ".git"
    shared = folder_of_head / (head_of(folder_of_head / "commondir").strip() or ".")
    head = head_of(folder_of_head / "HEAD").strip()
    if not head:
        return None
    name = head[5:] if head.startswith("ref: ") else ""
    commit = _reference(shared, name) if name else head
    config = head_of(shared / "config", 65_536)
    urls = re.findall(r'^\[remote "([^"]+)"\][^\[]*?^\s*url\s*=\s*(\S+)', config, re.MULTILINE)
    remote = _remote("\n".join(f"remote.{remote}.url {url}" for remote, url in urls))
    return _described(str(root), commit=commit, branch=name.removeprefix("refs/heads/") or None, remote=remote, dirty=None)


def _reference(shared: Path, name: str) -> str | None:
    packed = re.search(rf"^([0-9a-f]+) {re.escape(name)}$", head_of(shared / "packed-refs", 4_000_000), re.MULTILINE)
    return head_of(shared / name).strip() or (packed[1] if packed else None)


_CODE = (".py", ".pyi", ".pyx", ".ipynb", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".rs", ".go", ".js", ".jsx",
         ".ts", ".tsx", ".java", ".kt", ".scala", ".swift", ".rb", ".lua", ".jl", ".svelte")  # fmt: skip
_PRIVATE = (
    r"(?:^|/)(?:\.env(?:\.[^/]*)?|[^/]*\.(?:env|pem|p12|pfx|key|keystore|kdbx|tfvars)|id_(?:rsa|dsa|ecdsa|ed25519)"
    r"|\.?netrc|\.npmrc|\.pypirc|\.git-credentials|\.htpasswd|kubeconfig|[^/]*service[-_]account[^/]*\.json)$"
)


def patch(root: str | os.PathLike[str], limit: int = PATCH_LIMIT) -> tuple[bytes, bool]:
    """Return the uncommitted changes under `root`, masked, and whether they were cut to `limit` bytes.

    First come the names of untracked files, as comments, then the patch of tracked files against HEAD, which `git apply`
    accepts. Binary files are given by their hashes only, because a secret in compressed bytes could not be masked. Files whose
    name suggests secrets (`.env`, `*.pem`…) are listed without their content. Empty if git cannot run.
    """
    folder = os.fspath(root)
    listed, diff = ask_git(folder, _UNTRACKED, (*_DIFF, "HEAD", "--"), limit=limit + 1)()
    if diff is None and (empty := _line(run_git(folder, "hash-object", "-t", "tree", os.devnull))):
        diff = run_git(folder, *_DIFF, empty, "--", limit=limit + 1)  # no commit yet: everything is new
    notes, raw = _untracked(listed), diff or b""
    cut = len(raw) > limit
    # Cut to whole lines before masking: half a token would not be recognised.
    text = _whole_lines(raw, limit).decode("utf-8", "surrogateescape")
    masked = "".join([notes, *map(_mask_file, _by_file(text))]).encode("utf-8", "surrogateescape")
    return _whole_lines(masked, limit), cut or len(masked) > limit


_DIFF = ("diff", "--no-color", "--no-ext-diff", "--no-textconv", "--full-index", "--src-prefix=a/", "--dst-prefix=b/",
         "--submodule=short", "--ignore-submodules=untracked")  # fmt: skip


def sources(root: str | None, script: str | None) -> tuple[list[tuple[str, bytes]], int]:
    """Return the source files that are in no commit, masked, by their path below `root`, and how many were left out.

    The script comes first, and is the only file outside a repository; then untracked files with a source-code extension that
    are not ignored. Each file is limited to SOURCE_SIZE, all together to SOURCE_FILES and SOURCE_BYTES. Never data.
    """
    if root:
        names = _unknown_sources(script, root, ask_git(root, *_about_sources(root, script))())
    else:
        names = [os.path.abspath(script)] if script else []  # noqa: PTH100 - a str
    kept: list[tuple[str, bytes]] = []
    for name in names:
        text = _source(Path(root or "/") / name)
        if text is not None and len(kept) < SOURCE_FILES and sum(len(one) for _, one in kept) + len(text) <= SOURCE_BYTES:
            kept.append((mask_text(name if root else Path(name).name), text))
    return kept, len(names) - len(kept)


def _about_sources(root: str, script: str | None) -> list[tuple[str, ...]]:
    """Return what to ask git about source files that it does not track."""
    endings = [f"*{ending}" for ending in _CODE if ending != ".ipynb"]  # notebooks contain their outputs, which are data
    own = _inside(script, root)
    return [
        ("ls-files", "--others", "--exclude-standard", "-z", "--", *endings),
        *([("ls-files", "-z", "--", f":(literal){own}")] if own else []),
    ]


def _unknown_sources(script: str | None, root: str, answers: Sequence[bytes | None]) -> list[str]:
    """Return the source files that git does not track: the script first, even if ignored, then those not ignored."""
    found = [name for name in os.fsdecode(answers[0] or b"").split("\0") if name]
    own = _inside(script, root)
    if own and answers[1] == b"":  # only an explicit answer counts: if git fails, the script is assumed to be tracked
        found = [own, *(name for name in found if name != own)]
    return found


def _inside(script: str | None, root: str) -> str | None:
    """Return the path of the script below `root`; None if it is elsewhere."""
    inside = script is not None and Path(script).resolve().is_relative_to(Path(root).resolve())
    return str(Path(script).resolve().relative_to(Path(root).resolve())) if script is not None and inside else None


def _source(file: Path) -> bytes | None:
    """Return a source file, masked; None if it is too long, not a plain text file, or its name suggests secrets."""
    if re.search(_PRIVATE, str(file)) or file.is_symlink() or not file.is_file():
        return None
    try:
        with file.open("rb") as stream:
            data = stream.read(SOURCE_SIZE + 1)
    except OSError:
        return None
    if len(data) > SOURCE_SIZE or b"\0" in data:
        return None
    return mask_text(data.decode("utf-8", "surrogateescape"), code=True).encode("utf-8", "surrogateescape")


def _whole_lines(data: bytes, limit: int) -> bytes:
    return data if len(data) <= limit else data[: data.rfind(b"\n", 0, limit) + 1]


_UNTRACKED = ("ls-files", "--others", "--exclude-standard", "--directory", "--no-empty-directory", "-z")


def _untracked(listed: bytes | None) -> str:
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
    if re.search(_PRIVATE, first) or (is_secret(name.partition(".")[0]) and not name.endswith(_CODE)):
        header, hunk, _ = section.partition("\n@@")
        return f"{header}\n# content {MASKED}: this file's name says that it holds secrets\n" if hunk else section
    return mask_text(section, code=name.endswith(_CODE))


def _line(output: bytes | None) -> str:
    return os.fsdecode(output or b"").removesuffix("\n")


def run_git(folder: str, *arguments: str, limit: int = PATCH_LIMIT) -> bytes | None:
    """Run git without locks, prompts, pagers, hooks, monitors or network; return None if it fails or is too slow."""
    return ask_git(folder, arguments, limit=limit)()[0]


def ask_git(folder: str, *questions: Sequence[str], limit: int = PATCH_LIMIT) -> Callable[[], list[bytes | None]]:
    """Start git as `run_git` does, once for each question and all at the same time; return what waits for the answers."""
    settings = ("core.fsmonitor=false", "core.quotepath=false", "core.hooksPath=/dev/null", "core.untrackedCache=false",
                "log.showSignature=false")  # a repository's settings name the program that checks signatures  # fmt: skip
    options = [word for setting in settings for word in ("-c", setting)]
    drop = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_EXTERNAL_DIFF", "GIT_DIFF_OPTS"}
    environment = {name: value for name, value in list(os.environ.items()) if name not in drop}
    environment |= {
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ALLOW_PROTOCOL": "none",  # otherwise a partial clone would fetch missing objects
        "GIT_NO_LAZY_FETCH": "1",
        "LC_ALL": "C",
    }
    begun = [_begin(["git", "--no-pager", "-C", folder, *options, *arguments], environment) for arguments in questions]
    deadline = time.monotonic() + GIT_SECONDS
    return lambda: [_answer(process, deadline, limit) for process in begun]


def read_from(command: Sequence[str]) -> bytes | None:
    """Run a command for at most GIT_SECONDS and return its output; None if it failed."""
    return _answer(_begin(command), time.monotonic() + GIT_SECONDS, PATCH_LIMIT)


def _begin(command: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes] | None:
    try:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that its children can be killed with it
        )
    except OSError:  # not installed, or the folder is gone
        return None


def _answer(process: subprocess.Popen[bytes] | None, deadline: float, limit: int) -> bytes | None:
    """Return up to `limit` bytes of a command's output; None if it failed."""
    if process is None:
        return None
    with process:
        output, whole = _drain(process, deadline, limit)
        if not whole:
            _end(process)
        failed = process.wait() != 0 if whole else len(output) < limit
    return None if failed else output


def _drain(process: subprocess.Popen[bytes], deadline: float, limit: int) -> tuple[bytes, bool]:
    """Read until the end, the limit or the deadline; return the output and whether the end was reached."""
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
