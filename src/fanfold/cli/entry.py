"""From argv to an exit code: finds the command, parses its options, and turns errors into one message."""

from __future__ import annotations

import argparse
import codecs
import importlib
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

from .. import __version__
from ..errors import FanfoldError, MetricNotFound, RunNotFound, SettingError, suggestion
from . import COMMANDS, GROUPS, HIDDEN, SECTIONS
from .text import clean, look_alikes

NOTHING, FAILED, INTERRUPTED, PIPE = 1, 2, 130, 141
_WITH_VALUE = ("--dir", "--project")
_WORD = "\0"  # marks a word that starts with a dash but is not an option; no argument of a process can contain it


class Help(argparse.RawDescriptionHelpFormatter):
    """Keep the line breaks of examples, and the column of options narrow."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line; errors become one message and an exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    _print_anything()
    try:
        code = _dispatch(words)
        if sys.stdout is not None:  # it was closed before we started
            sys.stdout.flush()
    except (RunNotFound, MetricNotFound) as error:
        return _fail(error, NOTHING)
    except FanfoldError as error:
        return _fail(error, FAILED)
    except BrokenPipeError:
        # The reader (`head`, a pager) has closed the pipe. Python would fail when it flushes at exit: give it another sink.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        return _fail(_plain(error), FAILED)
    return code


def _print_anything() -> None:
    """Print any character: one that the locale lacks becomes a look-alike or an escape instead of an error."""
    codecs.register_error("fanfold", look_alikes)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="fanfold")


def _dispatch(words: list[str]) -> int:
    name = pop_command(words)
    if name in GROUPS:
        name = f"{name} {pop_command(words)}".rstrip()
    if name in ("", *GROUPS):
        return _overview(name, words)
    if name == "version":
        return _overview("", ["--version"])
    known = COMMANDS | HIDDEN
    if name not in known:
        group = name.rpartition(" ")[0]
        names = [f"{group} {one}".lstrip() for one in commands_of(group)]
        raise FanfoldError(f"there is no command {name!r}. Nothing was done.{suggestion(name, names)}")
    module = importlib.import_module(f".{known[name][0]}", __package__)
    needs = getattr(module, "NEEDS_DASHES", "")
    if needs and not {"--", "-h", "--help"} & set(words):
        raise SettingError(needs)
    call: Callable[[argparse.Namespace], int] = module.run
    return call(_parsed(parser_of(name, module), words))


def _parsed(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """Parse options and words in any order.

    A leading dash makes no option after `--`, in -@rank=0 (a part of a run), and in `--sort -loss`.
    """
    end = words.index("--") if "--" in words else len(words)
    before = ["", *words]
    marked = [
        _WORD + word if word.startswith("-@") or place > end or before[place] == "--sort" else word
        for place, word in enumerate(words)
    ]
    parser.register("type", None, lambda word: word.removeprefix(_WORD))
    return parser.parse_intermixed_args(marked)


def pop_command(words: list[str]) -> str:
    """Remove and return the first word that is neither an option nor the value of one, or "" if there is none."""
    skip = False
    for place, word in enumerate(words):
        if skip:
            skip = False
        elif word in _WITH_VALUE:
            skip = True
        elif not word.startswith("-") or word == "-":
            return words.pop(place)
    return ""


def _overview(group: str, words: Sequence[str]) -> int:
    """Print the commands, all of them or those of one group."""
    if not group and {"-V", "--version"} & set(words):
        print(f"fanfold {__version__}")
        return 0
    name = f"fanfold {group}".rstrip()
    about = GROUPS[group].capitalize() if group else "List, watch, compare and manage the runs that fanfold recorded"
    sections = {"commands": COMMANDS} if group else SECTIONS
    rows = "\n\n".join(f"{heading}:\n{_rows(commands_of(group, section))}" for heading, section in sections.items())
    parser = argparse.ArgumentParser(
        name,
        usage=f"{name} COMMAND [options]",
        formatter_class=Help,
        description=f"{about}.\n\n{rows}",
        epilog=f"`{name} COMMAND --help` explains one command. Every command takes --dir, --project, --json and -q.\n"
        "RUN is an id, the beginning of one, a name, a run's directory, or - for the newest run.",
    )
    parser.add_argument("-V", "--version", action="store_true", help="print the version")
    parser.parse_known_args(words)
    parser.print_help()
    return 0 if not words else FAILED


def commands_of(group: str, section: Mapping[str, tuple[str, str]] = COMMANDS) -> dict[str, str]:
    """Return the commands of a group with their help; without a group, all commands, each group as one row."""
    if group:
        return {name.partition(" ")[2]: what for name, (_, what) in section.items() if name.startswith(f"{group} ")}
    return {(first := name.split(" ")[0]): GROUPS.get(first, what) for name, (_, what) in section.items()}


def _rows(commands: Mapping[str, str]) -> str:
    return "\n".join(f"  {command + ' …' * (command in GROUPS):<10} {what}" for command, what in commands.items())


def parser_of(name: str, module: ModuleType) -> argparse.ArgumentParser:
    description = (module.__doc__ or "").strip()
    parser = argparse.ArgumentParser(
        f"fanfold {name}", formatter_class=Help, description=description, epilog=getattr(module, "EXAMPLE", None)
    )
    module.arguments(parser)
    common = parser.add_argument_group("common options")
    common.add_argument(
        "--dir",
        metavar="DIR",
        help="where runs are stored (default: FANFOLD_DIR, else the nearest .fanfold in this or a parent directory)",
    )
    common.add_argument("--project", metavar="NAME", help=getattr(module, "PROJECT", "only this project"))
    common.add_argument("--json", action="store_true", help='print JSON; non-finite numbers are "NaN", "Infinity", "-Infinity"')
    common.add_argument("-q", "--quiet", action="store_true", help="no progress bars and no notices")
    return parser


def _plain(error: OSError) -> FanfoldError:
    if error.errno is None:  # from a server that is unreachable or overloaded
        return FanfoldError(f"{error}. The command stopped there. Try again; if it fails again, check the server.")
    where = f"{error.filename}: " if error.filename else ""
    return FanfoldError(f"{where}{error.strerror or error}. The command stopped there. Check the path and its permissions.")


def _fail(error: FanfoldError, code: int) -> int:
    if os.environ.get("FANFOLD_DEBUG") == "1":
        raise error
    print(f"fanfold: {clean(str(error), lines=True)}", file=sys.stderr)
    return code
