"""Refuse to build a wheel or sdist without the dashboard's page: it would install, and fail when it is first opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PAGE = ("index.html", "index.js", "index.css", "live.worker.js")


class BuiltPage(BuildHookInterface):  # type: ignore[misc,type-arg]
    """Check that the page was built. An editable install may go without: its owner builds it when needed."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's interface
        folder = Path(self.root) / "src" / "fanfold" / "server" / "static"
        missing = [name for name in PAGE if not (folder / name).is_file()]
        if missing and version != "editable":
            raise RuntimeError(
                f"the dashboard's page is not built ({', '.join(missing)} missing in {folder}). Nothing was packaged. "
                "Run `make web` first; it needs Node 20 or newer."
            )
