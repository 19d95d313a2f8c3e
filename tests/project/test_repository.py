"""What the hosting service reads of this repository: valid by its own schemas, and naming only what exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib
import yaml

from paths import ROOT

SCHEMAS = {
    ".github/workflows/*.yml": "github-workflows",
    ".github/dependabot.yml": "dependabot",
    ".github/ISSUE_TEMPLATE/[!c]*.yml": "github-issue-forms",
    ".github/ISSUE_TEMPLATE/config.yml": "github-issue-config",
    "CITATION.cff": "citation-file-format",
}


@pytest.mark.parametrize("pattern", SCHEMAS)
def test_files_of_the_hosting_service_are_valid(pattern):
    files = sorted(map(str, ROOT.glob(pattern)))
    assert files
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{SCHEMAS[pattern]}", *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_workflows_call_targets_and_scripts_that_exist():
    text = "\n".join(path.read_text() for path in ROOT.glob(".github/workflows/*.yml"))
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([\w-]+)", text)) <= targets
    assert all((ROOT / script).is_file() for script in re.findall(r"(\.ci/\w+)", text))


def test_the_version_is_the_same_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_conda_recipe_asks_for_what_the_package_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    recipe = yaml.safe_load((ROOT / "deploy" / "conda" / "recipe.yaml").read_text())
    asked = {re.sub(r"[\s;].*", "", one).replace(">=", " >=") for one in project["dependencies"]}
    assert set(recipe["requirements"]["run"]) - {"python >=${{ python_min }}"} == asked
    assert recipe["context"] == {"version": project["version"], "python_min": project["requires-python"].removeprefix(">=")}
    assert recipe["build"]["python"]["entry_points"] == [f"{name} = {place}" for name, place in project["scripts"].items()]


def test_the_supported_pythons_are_the_tested_ones():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [one.rpartition(" ")[2] for one in project["classifiers"] if one.startswith("Programming Language :: Python :: 3.")]
    (tested,) = re.findall(r"python: \[(.*)\]", Path(ROOT, ".github/workflows/tests.yml").read_text())
    assert [word.strip('" ') for word in tested.split(",")] == named
    assert project["requires-python"] == f">={named[0]}"
