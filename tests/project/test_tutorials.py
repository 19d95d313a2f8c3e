"""Tutorials run as a reader runs them: files are saved, commands typed, other Python pasted into an interpreter of its own, in page order."""

from __future__ import annotations

import re
import sys

import pytest

from paths import DOCS

sys.path.insert(0, str(DOCS / "tools"))
import stories

STORIES = sorted(page for page in (DOCS / "tutorials").glob("*.md") if page.name != "index.md")
EXPECTED = {
    "first-run.md": r"finished 0\.1 199 0\.0\d",
    "compare-seeds.md": r"lr 0\.003: .* over 5 seeds\nlr 0\.03: .* over 5 seeds",
    "multi-gpu.md": r"\[0, 1\] .*\nslowest at the end: 1 \d+\.\d ms",
    "notebook-to-cluster.md": r"attempt 1 .*killed.*\n\s*attempt 2 .*finished",
    "debug-a-nan.md": r"The gradient of 0.weight.* is not finite at step 13 on rank 0(.|\n)*first NaN at step 13",
    "evaluate-a-language-model.md": r"expected \d+: \d+ with width 4, \d+ with width 64",
}


@pytest.mark.parametrize("page", STORIES, ids=lambda page: page.stem)
def test_a_tutorial_runs_and_prints_what_it_promises(page, tmp_path):
    assert re.search(EXPECTED[page.name], stories.play(page, tmp_path))
