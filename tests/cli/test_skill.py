"""What is shipped for coding agents: every command of the skill is run; llms.txt names every page."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fanfold.cli import main, skill
from paths import DOCS, ROOT

TRAIN = """
import sys, fanfold
run = fanfold.init("demo")
for step in range(10):
    run.log({"loss": float(sys.argv[2]) / (1 + step)}, step=step)
"""

STEERED = """
import time, fanfold
run = fanfold.init("demo", name="steered")
lr = run.knob("lr", 0.1)
for step in range(100_000):
    run.log({"loss": lr.value}, step=step)
    time.sleep(0.01)
    if run.control.should_stop:
        break
"""


def commands() -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", skill.FILE.read_text(), re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def test_every_command_of_the_skill_works_in_its_order(runs_dir, tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "steered.py").write_text(STEERED)
    (tmp_path / "bin").mkdir()
    for name, words in (("fanfold", "-m fanfold"), ("python", "")):
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert len(commands()) >= 15
    for line in commands():
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        assert done.stdout or "--json" not in line


@pytest.mark.parametrize("agent", sorted(skill.AGENTS))
def test_the_skill_is_installed_where_an_agent_looks(tmp_path, monkeypatch, capsys, agent):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / skill.AGENTS[agent] / "fanfold" / "SKILL.md"
    for _ in range(2):  # again, over the earlier one
        assert main(["skill", "install", f"--{agent}"]) == 0
        assert capsys.readouterr().out.strip() == str(path)
    assert path.read_text() == skill.FILE.read_text()


def test_the_skill_replaces_nothing_of_others(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / ".claude" / "skills" / "fanfold" / "SKILL.md"
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    assert main(["skill", "install", "--claude"]) == 2
    path.unlink()
    (tmp_path / "elsewhere").write_text("kept")
    path.symlink_to(tmp_path / "elsewhere")
    assert main(["skill", "install", "--claude"]) == 2
    assert (tmp_path / "elsewhere").read_text() == "kept"
    assert "Nothing was installed" in capsys.readouterr().err


def test_the_skill_begins_with_what_agents_need_to_find_it():
    head = skill.FILE.read_text().split("---")[1]
    assert re.search(r"^name: fanfold$", head, re.MULTILINE)
    assert re.search(r"^description: .{40,}$", head, re.MULTILINE)


def test_llms_txt_names_every_page_and_none_that_is_gone():
    text = (DOCS / "llms.txt").read_text()
    named = set(re.findall(r"\]\(([^)]+)\)", text))
    pages = {page.name for page in DOCS.glob("*.md")} | {"trackers/index.md"}
    pages |= {page.relative_to(DOCS).as_posix() for folder in ("tutorials", "reference") for page in (DOCS / folder).glob("*.md")}
    assert named == pages


def test_the_files_an_agents_guide_names_exist():
    text = (ROOT / "AGENTS.md").read_text()
    for name in re.findall(r"`((?:docs|src|tests|web)[\w/.-]*|[A-Z]+\.md)`", text):
        assert Path(ROOT / name).exists(), name
