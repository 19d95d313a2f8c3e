"""Refuse to build a wheel or sdist without the dashboard's page: it would install, and fail when it is first opened.

A wheel also gets the native part of the operator probe, prebuilt, where there is a compiler to build it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# The second number of glibc's version, and of libstdc++'s 3.4: what each manylinux_2_N promises (PEP 600, auditwheel's table).
MANYLINUX = {17: 19, 24: 22, 27: 24, 28: 24, 31: 28, 34: 29, 35: 30, 39: 33}
PAGE = ("index.html", "index.js", "core.css", "live.worker.js")


class BuiltPage(BuildHookInterface):  # type: ignore[misc,type-arg]
    """Check that the page was built. An editable install may go without: its owner builds it when needed."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(self.root) / "src" / "fanfold" / "server" / "static"
        missing = [name for name in PAGE if not (folder / name).is_file()]
        if missing and version != "editable":
            raise RuntimeError(
                f"the dashboard's page is not built ({', '.join(missing)} missing in {folder}). Nothing was packaged. "
                "Run `make web` first; it needs Node 20 or newer."
            )
        if self.target_name == "wheel":
            self.add_native(build_data)

    def add_native(self, build_data: dict[str, Any]) -> None:
        """Build the operator probe's library into the wheel; without a compiler the wheel has only its sources."""
        script = Path(self.root) / "src" / "fanfold" / "probes" / "native" / "build.py"
        spec = importlib.util.spec_from_file_location("fanfold_native_build", script)
        if not script.is_file() or spec is None or spec.loader is None or not sys.platform.startswith("linux"):
            return
        if os.environ.get("FANFOLD_PURE") == "1":  # one wheel for every platform, such as conda's noarch package
            return
        native = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(native)
        try:
            library = native.build()
        except native.BuildError as error:
            print(
                f"The wheel goes without the prebuilt operator probe: {error}. It is built where it is first used.",
                file=sys.stderr,
            )
            return
        build_data.setdefault("artifacts", []).append(str(library.relative_to(self.root)))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(library)}"


def platform_tag(library: Path) -> str:
    """Name the oldest systems whose C and C++ libraries have all that the library asks for."""
    here = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    names = library.read_bytes()
    libc, stdcxx = (
        max(map(int, re.findall(pattern, names)), default=0) for pattern in (rb"GLIBC_2\.(\d+)", rb"GLIBCXX_3\.4\.(\d+)")
    )
    fits = [minor for minor, newest in MANYLINUX.items() if libc <= minor and stdcxx <= newest]
    return here.replace("linux", f"manylinux_2_{min(fits)}", 1) if libc and fits else here
