"""Completion in real shells: commands, options, choices and names of runs; what a shell would run is never offered."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fanfold
from fanfold.cli import completion, main


@pytest.fixture(autouse=True)
def runs(runs_dir: Path) -> None:
    for name in ("base-1", "base-2", "$(touch pwned)", "lr=0.1; ls", "-rf"):
        fanfold.init("vision", id=f"id{abs(hash(name))}", name=name, quiet=True, system=False).finish()


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TERM": "dumb"}


def bash(line: str) -> list[str]:
    words = " ".join(f"'{word}'" for word in line.split(" "))
    script = f'eval "$(fanfold completion bash)"; COMP_WORDS=({words}); COMP_CWORD={line.count(" ")}; _fanfold; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", script], env=environment(), capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


def fish(line: str) -> list[str]:
    script = f"fanfold completion fish | source; complete -C '{line}'"
    done = subprocess.run(["fish", "-c", script], env=environment(), capture_output=True, text=True, timeout=60, check=True)
    return [row.partition("\t")[0] for row in done.stdout.splitlines()]


@pytest.mark.parametrize("complete", [bash, fish])
def test_a_shell_completes_commands_options_choices_and_runs(complete):
    assert complete("fanfold sho") == ["show"]
    assert complete("fanfold server to") == ["token"]
    assert complete("fanfold ls --fil") == ["--filter"]
    assert complete("fanfold ls --project vi") == ["vision"]
    assert sorted(complete("fanfold show base")) == ["base-1", "base-2"]


def test_zsh_completes_the_line(tmp_path):
    """In a real terminal: type, press Tab, press Enter, and see what zsh ran."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(environment(), ZDOTDIR=str(tmp_path), PS1="ready> ")
        os.chdir(tmp_path)
        os.execvp("zsh", ["zsh", "-f", "-i"])
    seen = ""

    def until(text: str, times: int = 1) -> None:
        nonlocal seen
        end = time.monotonic() + 100
        while seen.count(text) < times:
            assert select.select([terminal], [], [], max(0.1, end - time.monotonic()))[0], seen
            seen += os.read(terminal, 4096).decode(errors="replace")

    try:
        os.write(
            terminal,
            b'unsetopt zle_bracketed_paste; autoload -U compinit; compinit -D; eval "$(fanfold completion zsh)"; echo so"me"\n',
        )
        until("some\r\n")
        seen = ""
        os.write(terminal, b"fanfold compl\t")
        until("completion")
        os.write(terminal, b" --he\t")
        until("--help")
        os.write(terminal, b"\n")
        until("usage: fanfold completion")
    finally:
        os.close(terminal)
        os.waitpid(child, 0)


def test_a_name_that_a_shell_would_run_is_offered_as_an_id():
    offered = bash("fanfold show ")
    assert {"base-1", "base-2"} < set(offered)
    assert len(offered) == 6  # with the newest, `-`
    assert not {word for word in offered if set(word) & set("$(;= ") or word.startswith("-r")}


def test_every_command_answers(capsys):
    from fanfold.cli import COMMANDS

    for name in COMMANDS:
        words = [word for word, _ in completion.candidates([*name.split(), "--"])]
        assert "--dir" in words, name


def test_an_unknown_shell_names_the_known_ones(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert "bash" in capsys.readouterr().err
