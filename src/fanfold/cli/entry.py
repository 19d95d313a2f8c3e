"""From argv to an exit code: which command, its options, and what becomes of errors."""

from __future__ import annotations

import argparse
import codecs
import difflib
import importlib
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

from .. import __version__
from ..errors import FanfoldError, RunNotFound
from . import COMMANDS, GROUPS, HIDDEN
from .text import clean, look_alikes

NOTHING, FAILED, INTERRUPTED, PIPE = 1, 2, 130, 141
_WITH_VALUE = ("--dir", "--project")
_WORD = "\0"  # marks what is no option although it begins with a dash; no argument of a process can hold it


class Help(argparse.RawDescriptionHelpFormatter):
    """Keep the examples' lines as they are written, and the options' column narrow."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)


def run(argv: Sequence[str] | None = None) -> int:
    """Run the command line; errors become one message and an exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    _print_anything()
    try:
        code = _dispatch(words)
        sys.stdout.flush()
    except RunNotFound as error:
        return _say(error, NOTHING)
    except FanfoldError as error:
        return _say(error, FAILED)
    except BrokenPipeError:
        # The reader (`head`, a pager) has enough. Python would complain when it flushes at exit: give it another sink.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        return _say(_plain(error), FAILED)
    return code


def _print_anything() -> None:
    """Make every character printable: where the locale lacks one, a look-alike or an escape is printed instead of an error."""
    codecs.register_error("fanfold", look_alikes)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="fanfold")


def _dispatch(words: list[str]) -> int:
    place = _command_at(words)
    if place is None:
        return _top(words)
    name = words.pop(place)
    if name in GROUPS:
        inner = _command_at(words)
        if inner is None:
            return _group(name, words)
        name = f"{name} {words.pop(inner)}"
    known = COMMANDS | HIDDEN
    if name not in known:
        raise _unknown(name)
    module = importlib.import_module(f".{known[name][0]}", __package__)
    call: Callable[[argparse.Namespace], int] = module.run
    return call(_parsed(_parser(name, module), words))


def _parsed(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """Read options and words in any order. What begins with a dash is a word after `--`, and in -@rank=0: part of a run."""
    end = words.index("--") if "--" in words else len(words)
    marked = [_WORD + word if word.startswith("-@") or place > end else word for place, word in enumerate(words)]
    parser.register("type", None, lambda word: word.removeprefix(_WORD))
    return parser.parse_intermixed_args(marked)


def _command_at(words: Sequence[str]) -> int | None:
    """Find the command: the first word that is neither an option nor the value of one."""
    skip = False
    for place, word in enumerate(words):
        if skip:
            skip = False
        elif word in _WITH_VALUE:
            skip = True
        elif not word.startswith("-") or word == "-":
            return place
    return None


def _top(words: Sequence[str]) -> int:
    if "--version" in words or "-V" in words:
        print(f"fanfold {__version__}")
        return 0
    parser = argparse.ArgumentParser(
        "fanfold",
        usage="fanfold COMMAND [options]",
        formatter_class=Help,
        description="List, watch, export and clean up the runs that fanfold recorded.\n\ncommands:\n" + _listed(_overview()),
        epilog="`fanfold COMMAND --help` explains one command. Every command takes --dir, --project, --json and -q.\n"
        "RUN is an id, the beginning of one, a name, a run's directory, or - for the newest run.",
    )
    parser.add_argument("-V", "--version", action="store_true", help="print the version")
    parser.parse_known_args(words)
    parser.print_help()
    return 0 if not words else FAILED


def _overview() -> dict[str, str]:
    """Return the commands as `fanfold --help` lists them: a group is one row."""
    rows = {(words := name.split(" "))[0]: GROUPS.get(words[0], what) for name, (_, what) in COMMANDS.items()}
    return {name + (" …" if name in GROUPS else ""): what for name, what in rows.items()}


def _group(group: str, words: Sequence[str]) -> int:
    """Print what a group of commands has."""
    inner = {name.removeprefix(f"{group} "): what for name, (_, what) in COMMANDS.items() if name.startswith(f"{group} ")}
    parser = argparse.ArgumentParser(
        f"fanfold {group}",
        usage=f"fanfold {group} COMMAND [options]",
        formatter_class=Help,
        description=f"{GROUPS[group].capitalize()}.\n\ncommands:\n" + _listed(inner),
        epilog=f"`fanfold {group} COMMAND --help` explains one command.",
    )
    parser.parse_known_args(words)
    parser.print_help()
    return 0 if not words else FAILED


def _listed(commands: Mapping[str, str]) -> str:
    return "\n".join(f"  {name:<10} {what}" for name, what in commands.items())


def _parser(name: str, module: ModuleType) -> argparse.ArgumentParser:
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
    common.add_argument("--project", metavar="NAME", help="only this project")
    common.add_argument("--json", action="store_true", help='print JSON; non-finite numbers are "NaN", "Infinity", "-Infinity"')
    common.add_argument("-q", "--quiet", action="store_true", help="no progress bars and no notices")
    return parser


def _unknown(name: str) -> FanfoldError:
    group = f"{name.partition(' ')[0]} " if " " in name else ""
    listed = (
        [command for command in COMMANDS if command.startswith(group)] if group else [row.split(" ")[0] for row in _overview()]
    )
    close = difflib.get_close_matches(name, [*listed, *([] if group else HIDDEN)], 1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return FanfoldError(f"there is no command {name!r}. Nothing was done.{hint} Known: {', '.join(listed)}.")


def _plain(error: OSError) -> FanfoldError:
    if error.errno is None:  # a server's: it is not there, or cannot do it now
        return FanfoldError(f"{error}. The command stopped there. Try again; if that does not help, look at the server.")
    where = f"{error.filename}: " if error.filename else ""
    return FanfoldError(f"{where}{error.strerror or error}. The command stopped there. Check the path and its permissions.")


def _say(error: FanfoldError, code: int) -> int:
    if os.environ.get("FANFOLD_DEBUG") == "1":
        raise error
    print(f"fanfold: {clean(str(error), lines=True)}", file=sys.stderr)
    return code
