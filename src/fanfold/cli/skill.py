"""Install what a coding agent needs to know about fanfold: a SKILL.md that names the commands, their JSON and their exit codes.

It is written below the current directory, or with --global below your home directory. For an agent that is not named here, use
what `fanfold skill show` prints.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..atomic import replace_text
from ..errors import SettingError
from . import choose, output

EXAMPLE = """examples:
  fanfold skill install --claude
  fanfold skill install --codex --cursor --global
  fanfold skill show"""

FILE = Path(__file__).with_name("SKILL.md")
# agent: the folder in which it looks for skills, below a project or the home directory
AGENTS = {
    "agents": ".agents/skills",
    "claude": ".claude/skills",
    "codex": ".codex/skills",
    "cursor": ".cursor/skills",
    "opencode": ".opencode/skills",
}
ACTIONS = ("install", "show")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", metavar="install|show", help="write the file for an agent, or print it")
    for name, folder in AGENTS.items():
        parser.add_argument(
            f"--{name}", action="store_true", help=f"install to {folder}/fanfold" + " (default)" * (name == "agents")
        )
    parser.add_argument("--global", action="store_true", dest="everywhere", help="for all projects: below your home directory")


def run(args: argparse.Namespace) -> int:
    choose.check_known("skill", args.action, ACTIONS, undone="done")
    text = FILE.read_text("utf-8")
    if args.action == "show":
        output.print_json({"text": text}) if args.json else print(text, end="")
        return 0
    chosen = [name for name in AGENTS if getattr(args, name)] or ["agents"]
    base = Path.home() if args.everywhere else Path.cwd()
    done = [_install(base / AGENTS[name] / "fanfold" / FILE.name, text) for name in chosen]
    if args.json:
        output.print_json([{"agent": name, "path": str(path)} for name, path in zip(chosen, done, strict=True)])
    else:
        for path in done:
            print(path)
    return 0


def _install(path: Path, text: str) -> Path:
    """Write the file, also over an earlier version of it, but never through a link or over another file."""
    if (
        path.is_symlink()
        or path.parent.is_symlink()
        or (path.exists() and "name: fanfold" not in path.read_text("utf-8", "replace"))
    ):
        raise SettingError(f"{path} is a link, or a file that fanfold did not write. Nothing was installed. Remove it first.")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text)
    return path
