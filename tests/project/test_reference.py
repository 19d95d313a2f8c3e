"""The reference: every public name is on a page with a complete docstring whose example runs; generated pages are current; the site builds."""

from __future__ import annotations

import builtins
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import fanfold
from fanfold import errors
from paths import DOCS, ROOT, SRC

SOURCE = SRC / "fanfold"
PAGES = {path.name: path.read_text() for path in (DOCS / "reference").glob("*.md")}
# Documented as attributes: the current run, its config and its summary.
ATTRIBUTES = ("config", "run", "summary")
# Called by fanfold itself, to store media and read them back.
INTERNAL = ("encode", "restore", "snapshot", "waiting")


def public() -> Iterator[tuple[str, Any]]:
    """Yield every public function and class, and every method of the classes that has arguments or an answer of its own."""
    for name in sorted([*fanfold.__all__, "open"]):
        if name in (*ATTRIBUTES, "__version__"):
            continue
        thing = getattr(fanfold, name)
        yield name, thing
        if inspect.isclass(thing):
            methods = inspect.getmembers(thing, inspect.isfunction)
            yield from ((f"{name}.{method}", found) for method, found in methods if own(thing, method))


def own(kind: type, method: str) -> bool:
    return method in vars(kind) and not method.startswith("_") and method not in INTERNAL and bool(vars(kind)[method].__doc__)


PUBLIC = dict(public())


def parameters(thing: Any) -> list[str]:
    if inspect.isclass(thing) and issubclass(thing, (Exception, fanfold.Run, fanfold.StoredRun)):
        return []  # users do not construct them
    return [name for name in inspect.signature(thing).parameters if name != "self"]


@pytest.mark.parametrize("name", sorted([*fanfold.__all__, "open"]))
def test_every_public_name_is_on_a_page_of_the_reference(name):
    home = f"fanfold.recording.api.{name}" if name in ATTRIBUTES else f"fanfold.{name}"
    pattern = "`fanfold.__version__`" if name == "__version__" else f"^::: {re.escape(home)}$"
    assert [page for page, text in PAGES.items() if re.search(pattern, text, re.MULTILINE)]


def test_every_callback_is_on_a_page_of_the_reference():
    names = set(fanfold.callbacks.__all__) - {"logger"}
    assert [name for name in sorted(names) if f'"fanfold.callbacks.{name}"' not in PAGES["callbacks.md"]] == []


@pytest.mark.parametrize("name", PUBLIC)
def test_a_docstring_names_every_parameter_and_the_result(name):
    thing = PUBLIC[name]
    doc = inspect.cleandoc(thing.__doc__ or "")
    section = doc.partition("Args:\n")[2]
    listed = re.findall(r"^    (\w+): ", section.partition("\n\n")[0], re.MULTILINE)
    assert listed == parameters(thing)
    answer = None if inspect.isclass(thing) else inspect.signature(thing).return_annotation
    assert ("Returns:\n" in doc) == (answer not in (None, "None")), "a Returns section, unless it returns None"
    if "." not in name and name != "JournalError":
        assert "Example:\n    ```python\n" in doc


def test_every_exception_that_a_docstring_names_exists():
    known = {**vars(builtins), **vars(errors), "CallbackError": fanfold.callbacks.CallbackError}
    for name, thing in PUBLIC.items():
        section = inspect.cleandoc(thing.__doc__ or "").partition("Raises:\n")[2].partition("\n\n")[0]
        for error in re.findall(r"^    (\w+): ", section, re.MULTILINE):
            assert issubclass(known[error], Exception), (name, error)


RUNNER = """
import json, os, sys, tempfile
import fanfold
failed = {}
for name, code in json.load(sys.stdin).items():
    os.chdir(tempfile.mkdtemp(dir="."))
    os.environ["FANFOLD_DIR"] = os.path.abspath(".fanfold")
    try:
        exec(compile(code, name, "exec"), {"__name__": "__main__"})
    except Exception as error:
        failed[name] = repr(error)
    fanfold.finish()
    os.chdir("..")
print("failed:", json.dumps(failed))
"""


def test_every_example_runs(tmp_path):
    docs = {name: inspect.cleandoc(thing.__doc__ or "") for name, thing in PUBLIC.items()}
    api = (SOURCE / "recording" / "api.py").read_text()
    docs |= {
        f"attribute {number}": text
        for number, text in enumerate(re.findall(r'^"""(The \w+.*?)^"""', api, re.DOTALL | re.MULTILINE))
    }
    found = {name: re.search(r"Example:\n    ```python\n(.*?)    ```", text, re.DOTALL) for name, text in docs.items()}
    examples = {name: inspect.cleandoc("\n" + match[1]) for name, match in found.items() if match}
    assert len(examples) > 45
    env = {**os.environ, "FANFOLD_SYSTEM": "0", "FANFOLD_QUIET": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        cwd=tmp_path,
        env=env,
        input=json.dumps(examples),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout.rpartition("failed: ")[2].strip() == "{}", done.stdout[-2000:] + done.stderr[-3000:]


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "tools" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["reference/cli.md", "reference/json.md", "settings.md", "errors.md"])
def test_generated_pages_are_current(page):
    wanted = {path.relative_to(DOCS).as_posix(): text for path, text in generator().pages().items()}
    assert (DOCS / page).read_text() == wanted[page], "run `make docs`"


def test_the_warnings_of_the_index_are_in_the_code():
    """A quoted warning is found in the sources, part by part: `…` stands for what differs each time."""
    quoted = re.findall(r"^### `(.+)`$", (DOCS / "errors.md").read_text(), re.MULTILINE)
    assert len(quoted) > 15
    code = re.sub(r'"\s*\n\s*f?"', "", "".join(path.read_text() for path in SOURCE.rglob("*.py")))
    parts = {quote: [part.strip(" .,:") for part in quote.split("…")] for quote in quoted}
    assert {quote: part for quote, all_ in parts.items() for part in all_ if part and part not in code} == {}


def test_the_site_builds_without_a_warning_and_asks_no_other_server(tmp_path):
    """Links and anchors resolve, every page is in the navigation, every name of the reference is found."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 80
    asks = r'<(?:script|img|iframe|source)[^>]+src="(?:https?:)?//|<link[^>]+rel="(?:stylesheet|preconnect)"[^>]+href="(?:https?:)?//'
    counts = 'data-md-component="source"'  # the theme would ask the code host how many stars the project has
    assert [page for page in pages if re.search(asks, text := page.read_text()) or counts in text] == []
