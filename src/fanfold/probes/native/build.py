"""Build of the native library with any available C++ compiler. Standard library only: the packaging hook loads this file, too.

`python -m fanfold.probes.native.build` builds it next to its sources, as `make native` does.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = ("native.cpp", "device.h", "calls.h", "rows.h", "table.h", "clock.h")
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden")
LIMIT_SECONDS = 120.0
SEAL = b"fanfold-sha256:"


class BuildError(Exception):
    """The library could not be built; the message says why."""


def digest(*names: str, extra: str = "") -> str:
    """Return a digest of a build's inputs, which names it, so that a stale build is never loaded."""
    parts = [*(HERE.joinpath(name).read_bytes() for name in names), extra.encode(), platform.machine().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def library_name() -> str:
    return f"libfanfold_ops-{digest(*SOURCES)}.so"


def beside() -> Path:
    """Return the path of the library in a wheel, or after `make native`."""
    return HERE / library_name()


def seal(path: Path) -> None:
    """Append a built file's digest to it: the loader ignores trailing bytes, and they stay with the file when it is copied."""
    content = path.read_bytes()
    with path.open("ab") as file:
        file.write(SEAL + hashlib.sha256(content).digest())


def check(path: Path) -> None:
    """Raise BuildError unless a file is intact: loading a damaged library can kill the process."""
    content = path.read_bytes()
    end = len(content) - len(SEAL) - hashlib.sha256().digest_size
    if end <= 0 or content[end:] != SEAL + hashlib.sha256(content[:end]).digest():
        raise BuildError(f"{path} is damaged, or is another file than the one that was built")


def intact(path: Path) -> bool:
    """Return whether a library exists and is intact."""
    try:
        check(path)
    except (OSError, BuildError):
        return False
    return True


def compiler() -> str | None:
    """Find a C++ compiler: CXX, else the usual names."""
    return next(
        (found for name in (os.environ.get("CXX"), "g++", "c++", "clang++") if name and (found := shutil.which(name))), None
    )


def compile_to(target: Path, sources: Iterable[str], flags: Sequence[str]) -> Path:
    """Compile into `target` atomically: several processes may do so at once."""
    command = compiler()
    if command is None:
        raise BuildError("no C++ compiler was found (g++, c++, clang++, or CXX)")
    aside = target.with_name(f".{target.name}.{os.urandom(8).hex()}")  # not the pid: two containers may share one
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        subprocess.run([command, *flags, "-o", str(aside), *(str(HERE / name) for name in sources), "-ldl"],
                       check=True, capture_output=True, text=True, timeout=LIMIT_SECONDS)  # fmt: skip
        seal(aside)
        aside.replace(target)
    except subprocess.CalledProcessError as error:
        line = next((line for line in error.stderr.splitlines() if "error" in line), error.stderr[-200:])
        raise BuildError(f"{Path(command).name} failed: {line.strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{Path(command).name} did not end within {LIMIT_SECONDS:g} s") from error
    except OSError as error:
        raise BuildError(f"{target.parent} cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()
    return target


def build(folder: Path = HERE) -> Path:
    """Build the library in `folder`, unless it exists and is intact."""
    target = folder / library_name()
    if intact(target):
        return target
    for old in folder.glob("libfanfold_ops-*.so") if folder == HERE else ():  # not in a cache, which may hold several versions
        with contextlib.suppress(OSError):
            old.unlink()
    try:
        return compile_to(target, ["native.cpp"], (*FLAGS, "-mtls-dialect=gnu2"))  # thread-local state is a fifth cheaper on x86
    except BuildError:  # a compiler or processor without support for it
        return compile_to(target, ["native.cpp"], FLAGS)


def main() -> int:
    """Build the library next to its sources and print its path."""
    if not sys.platform.startswith("linux"):
        print("The native operator probe is for Linux; elsewhere torch.profiler windows serve. Nothing was built.")
        return 0
    try:
        print(build())
    except BuildError as error:
        print(f"The native operator probe was not built: {error}. Profiles will use torch.profiler windows.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
