"""The resource limits of this process's container or job, which are lower than what the node has."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path


class Cgroup:
    """Usage and limits of this process's container or job, read from cgroup v2 and v1 files."""

    def __init__(self, *, table: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> None:
        self._table = table
        self._mount = mount

    def memory(self) -> tuple[float, float]:
        """Return bytes used, without the file cache the kernel can drop, and the tightest limit (or infinity)."""
        limit, folder = self._tightest("memory", memory_limit)
        used = read(folder / "memory.current") or read(folder / "memory.usage_in_bytes")
        if not used:
            return 0.0, math.inf
        stat = read_table(folder / "memory.stat")
        cache = stat.get("total_inactive_file", stat.get("inactive_file", 0.0))
        return max(float(used) - cache, 0.0), limit

    def cpu(self) -> tuple[float, float]:
        """Return CPU seconds used so far and the tightest quota in cores (or infinity)."""
        cores, folder = self._tightest("cpu", cpu_limit)
        microseconds = read_table(folder / "cpu.stat").get("usage_usec")
        if microseconds is not None:
            return microseconds / 1e6, cores
        beside = self._mount.joinpath("cpuacct", *folder.relative_to(self._mount).parts[1:])
        nanoseconds = read(folder / "cpuacct.usage") or read(beside / "cpuacct.usage")
        return (float(nanoseconds) / 1e9, cores) if nanoseconds else (0.0, math.inf)

    def _tightest(self, controller: str, limit_of: Callable[[Path], float]) -> tuple[float, Path]:
        """Return the lowest limit of this cgroup and its parents, and the folder that sets it: outer limits apply, too."""
        limit, where = math.inf, self._mount
        for folder in self.folders(controller):
            if (here := limit_of(folder)) < limit:
                limit, where = here, folder
        return limit, where

    def folders(self, controller: str) -> list[Path]:
        """Return the cgroup folders of this process for `controller`, innermost first; some may not exist."""
        found: list[Path] = []
        for line in read(self._table).splitlines():
            _, names, path = line.split(":", 2)
            if names and controller not in names.split(","):
                continue
            root = self._root(names, controller)
            # Inside a container the path can be the node's view ("/../x"); then only the mounted root is ours.
            parts = [] if ".." in path.split("/") else path.strip("/").split("/")
            found += [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
        return found

    def _root(self, names: str, controller: str) -> Path:
        if not names:
            return self._mount / "unified" if (self._mount / "unified").is_dir() else self._mount
        return self._mount / controller if (self._mount / controller).is_dir() else self._mount / names


def memory_limit(folder: Path) -> float:
    """Return a cgroup's memory limit in bytes; infinity if there is none."""
    text = read(folder / "memory.max") or read(folder / "memory.limit_in_bytes")
    return float(text) if text.isdigit() else math.inf


def cpu_limit(folder: Path) -> float:
    """Return a cgroup's CPU quota in cores; infinity if there is none ("max", or -1)."""
    words = read(folder / "cpu.max").split()
    quota, period = words or (read(folder / "cpu.cfs_quota_us"), read(folder / "cpu.cfs_period_us"))
    return float(quota) / float(period) if quota.isdigit() else math.inf


def read(path: Path) -> str:
    """Return the content of a small file; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def read_table(path: Path) -> dict[str, float]:
    """Read a file of lines `name number`."""
    pairs = (line.split() for line in read(path).splitlines())
    return {pair[0]: float(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
