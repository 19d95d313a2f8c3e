"""Print a script that completes commands, options and names of runs in your shell: bash, zsh or fish.

The script calls fanfold at each Tab, so you do not have to print it again after an upgrade.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterator, Sequence

from ..errors import SettingError, suggestion
from ..settings import find_directory, is_address, store_address
from ..store.query import LocalStore
from . import COMMANDS, GROUPS, HIDDEN, entry
from .text import clean, short

EXAMPLE = """examples:
  eval "$(fanfold completion bash)"         # in ~/.bashrc
  eval "$(fanfold completion zsh)"          # in ~/.zshrc, after compinit
  fanfold completion fish | source          # in ~/.config/fish/config.fish"""

SCRIPTS = {
    "bash": r"""_fanfold() {
  local line
  COMPREPLY=()
  while IFS= read -r line; do
    COMPREPLY+=("${line%%$'\t'*}")
  done < <(fanfold completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -o default -F _fanfold fanfold""",
    "zsh": r"""_fanfold() {
  local line
  local -a found
  while IFS= read -r line; do
    found+=("${${line%%$'\t'*}//:/\\:}:${line#*$'\t'}")
  done < <(fanfold completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)
  if (( $#found )); then _describe fanfold found; else _files; fi
}
compdef _fanfold fanfold""",
    "fish": r"""function __fanfold_words
  set -l words (commandline -opc)
  set -e words[1]
  set -l typed (commandline -ct)
  fanfold completion words -- $words "$typed" 2>/dev/null
end
complete -c fanfold -a '(__fanfold_words)'""",
}
# A completed word is run by the shell as it is: a name of a run that holds anything else is offered as the run's id.
PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,+@%/-]*")
RUNS = 500  # the newest


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", help=f"{', '.join(SCRIPTS)}; `words` is for the scripts themselves")
    parser.add_argument("words", metavar="WORD", nargs="*", help="with `words`: the words of the line so far, after --")


def run(args: argparse.Namespace) -> int:
    if args.shell == "words":
        for word, about in candidates(args.words or [""]):
            print(f"{word}\t{about}")
        return 0
    if args.shell not in SCRIPTS:
        raise SettingError(f"there is no completion for the shell {args.shell!r}.{suggestion(args.shell, SCRIPTS)}")
    print(SCRIPTS[args.shell])
    return 0


def candidates(line: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the words that may stand at the end of a line, where its last word is begun, each with a short description."""
    *before, typed = line
    for word, about in dict(_all(before, typed)).items():
        if word.startswith(typed):
            yield word, short(about, 70)


def _all(before: list[str], typed: str) -> Iterator[tuple[str, str]]:
    rest = list(before)
    name = entry.pop_command(rest)
    if name in GROUPS:
        name = f"{name} {entry.pop_command(rest)}".rstrip()
    if name in ("", *GROUPS):
        yield from entry.commands_of(name).items()
    elif (row := (COMMANDS | HIDDEN).get(name)) is not None:
        parser = entry.parser_of(name, importlib.import_module(f".{row[0]}", __package__))
        yield from _arguments(parser, before, typed)


def _arguments(parser: argparse.ArgumentParser, before: list[str], typed: str) -> Iterator[tuple[str, str]]:
    """Yield the options of a command, the choices of the option before, or what its words may be."""
    options = {word: action for action in parser._actions for word in action.option_strings}  # noqa: SLF001
    last = options.get(before[-1])
    if last is not None and last.nargs != 0:
        yield from _values(last, before)
    elif typed.startswith("-") and typed != "-":
        yield from ((word, (action.help or "").replace("%%", "%")) for word, action in options.items() if word.startswith("--"))
    else:
        for action in parser._actions:  # noqa: SLF001
            if not action.option_strings:
                yield from _values(action, before)


def _values(action: argparse.Action, before: list[str]) -> Iterator[tuple[str, str]]:
    if action.choices:
        yield from ((str(choice), "") for choice in action.choices)
    elif "--project" in action.option_strings:
        yield from ((name, "project") for name in _projects(before) if PLAIN.fullmatch(name))
    elif "RUN" in str(action.metavar) or action.metavar in ("A", "B"):
        yield from _runs(before)


def _store(before: list[str]) -> LocalStore | None:
    """Open the directory that the line names; a database or a gateway is not asked at each Tab."""
    given = before[before.index("--dir") + 1] if "--dir" in before[:-1] else None
    return None if is_address(store_address(given)) else LocalStore(find_directory(given))


def _projects(before: list[str]) -> list[str]:
    store = _store(before)
    return [] if store is None else [project.name for project in store.projects()]


def _runs(before: list[str]) -> Iterator[tuple[str, str]]:
    store = _store(before)
    if store is None:
        return
    project = before[before.index("--project") + 1] if "--project" in before[:-1] else None
    yield "-", "the newest run"
    taken = set()
    for found in store.listed(project)[:RUNS]:
        word = found.name if PLAIN.fullmatch(found.name) and found.name not in taken else found.id
        taken.add(word)
        if PLAIN.fullmatch(word):
            yield word, clean(f"{found.status} · {found.project}" + (f" · {found.name}" if word != found.name else ""))
