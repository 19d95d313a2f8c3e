"""Code shipped as .pyc alone: `fanfold doctor --deploy` finds what breaks, and the source loader repairs it, in real processes."""

from __future__ import annotations

import compileall
import json
import py_compile
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from fanfold import sources
from fanfold.cli.scan import scan
from fanfold.errors import FanfoldError

MODEL = """
import inspect

import beside
import torch
from torch.jit import script as compiled


@compiled
def double(x):
    return x * 2


class Net(torch.nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x * beside.FACTOR
        return x


def late():
    return inspect.getsource(Net)
"""
FILES = {
    "app/__init__.py": "",
    "app/model.py": MODEL,
    "app/main.py": "from .model import Net\n",
    "app/__main__.py": "raise SystemExit('a program, not a module')\n",
    "app/bad.py": "def f(:\n",
    "app/never.py": "import nothing_of_that_name\n",
    "app/killer.py": "import os\n\nos._exit(3)\n",
    "app/own.py": "from pathlib import Path\n\nTEXT = Path(__file__).read_text()\n",
    "app/starter.py": "import runpy\n\n\ndef go():\n    runpy.run_path('main.py')\n",
    "app/data/words.txt": "word\n",
    "app/reader.py": "from pathlib import Path\n\nWORDS = (Path(__file__).parent / 'data' / 'words.txt').read_text()\n",
    "beside.py": "FACTOR: int = 3\n",
}


def plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def doctor(*words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "fanfold", "doctor", *words], capture_output=True, text=True, timeout=240, check=False
    )
    return done.returncode, done.stdout + done.stderr


def python(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        cwd=folder, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def only_pyc(root: Path) -> None:
    """Turn a tree into what a deployment without sources ships."""
    assert compileall.compile_dir(root, quiet=1, legacy=True)
    for file in root.rglob("*.py"):
        file.unlink()


def test_doctor_names_every_place_that_breaks_and_says_what_repairs_it(tmp_path):
    plant(tmp_path, FILES)
    code, text = doctor("--deploy", str(tmp_path / "app"), "--json")
    told = json.loads(text)
    found = {(one["file"], one["line"]): (one["use"], one["repaired"], one["breaks_import"]) for one in told["findings"]}
    assert found == {
        ("app/bad.py", 1): ("compile", False, True),
        ("app/model.py", 9): ("torch.jit.script", True, True),
        ("app/model.py", 22): ("inspect.getsource", True, False),
        ("app/own.py", 3): ("Path(__file__).read_text", False, True),
        ("app/starter.py", 5): ("'main.py'", False, False),
    }
    assert (code, told["healthy"], told["compiled"], told["elsewhere"]) == (1, False, 9, [])
    assert "OSError" in next(one["what"] for one in told["findings"] if one["line"] == 9)
    assert told["imported"] == 3  # app, app.reader (its data came along) and app.starter
    assert set(told["not_importable"]) == {"app.never", "app.killer"}  # from their sources neither: no fault of the .pyc
    assert "exit code 3" in told["not_importable"]["app.killer"]
    assert not list(tmp_path.rglob("*.pyc")), "the tree itself is not touched"


def test_a_tree_whose_needs_the_zip_meets_is_healthy_with_it(tmp_path):
    plant(tmp_path, {name: text for name, text in FILES.items() if Path(name).stem in ("__init__", "model", "main", "beside")})
    code, text = doctor("--deploy", str(tmp_path / "app"), "--sources", str(tmp_path / "sources.zip"))
    assert code == 0, text
    assert "✗ app/model.py:9  torch.jit.script" in text
    assert "the source loader repairs it" in text
    assert "fanfold.sources.install(" in text
    assert zipfile.ZipFile(tmp_path / "sources.zip").namelist() == ["app/__init__.py", "app/main.py", "app/model.py"]
    plant(tmp_path, {"plain/tool.py": "def add(a, b):\n    return a + b\n"})
    assert doctor("--deploy", str(tmp_path / "plain"))[0] == 0


@pytest.mark.parametrize("part", ["app/inner", "app/inner/part.py"])
def test_a_part_of_a_package_is_tried_from_pyc_too(part, tmp_path):
    inner = "import inspect\n\nfrom ..words import word\n\nTEXT = inspect.getsource(word)\n"
    words = "def word():\n    return 1\n"
    plant(tmp_path, {"app/__init__.py": "", "app/words.py": words, "app/bad.py": "def f(:\n", "app/inner/__init__.py": "",
                     "app/inner/part.py": inner})  # fmt: skip
    code, text = doctor("--deploy", str(tmp_path / part), "--json")
    told = json.loads(text)
    assert [(one["file"], one["line"], one["use"], one["repaired"], one["breaks_import"]) for one in told["findings"]] == [
        ("app/inner/part.py", 5, "inspect.getsource", True, True)
    ]
    assert (code, told["elsewhere"], told["not_importable"]) == (1, [], {})
    assert told["compiled"] == (1 if part.endswith(".py") else 2)  # the others go along, and are not looked at


def test_torch_jit_script_works_on_pyc_only_code_with_the_source_loader(tmp_path):
    shipped = tmp_path / "shipped"
    plant(shipped, {name: text for name, text in FILES.items() if Path(name).stem in ("__init__", "model", "beside")})
    sources.pack(shipped, shipped.rglob("*.py"), tmp_path / "sources.zip")
    only_pyc(shipped)
    without = """
        try:
            import app.model
        except OSError as error:
            print(str(error)[:16])
    """
    assert python(without, shipped) == "Can't get source"
    code = """
        import fanfold.sources
        fanfold.sources.install("../sources.zip")
        import torch, app.model
        print(app.model.__file__.endswith(".pyc"), app.model.double(torch.ones(2)).tolist())
        print(torch.jit.script(app.model.Net())(torch.ones(2)).tolist())
        print(app.model.late().splitlines()[0])
        fanfold.sources.install("../sources.zip")
        import sys
        print(sum(type(finder).__module__ == "fanfold.sources" for finder in sys.meta_path))
    """
    assert python(code, shipped).splitlines() == ["True [2.0, 2.0]", "[3.0, 3.0]", "class Net(torch.nn.Module):", "1"]


def test_modules_loaded_before_and_the_program_itself_get_their_sources_too(tmp_path):
    shipped = tmp_path / "shipped"
    program = """
        import inspect
        import early
        import fanfold.sources

        def here():
            return 1

        fanfold.sources.install("../sources.zip")
        print(inspect.getsource(early.f).split()[1], inspect.getsource(here).split()[1])
    """
    plant(shipped, {"early.py": "def f():\n    return 1\n", "program.py": textwrap.dedent(program)})
    sources.pack(shipped, shipped.rglob("*.py"), tmp_path / "sources.zip")
    only_pyc(shipped)
    done = subprocess.run([sys.executable, "program.pyc"], cwd=shipped, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["f():", "here():"], done.stderr


@pytest.mark.parametrize("mode", list(py_compile.PycInvalidationMode))
def test_a_source_of_another_version_is_refused_and_said(mode, tmp_path):
    shipped = tmp_path / "shipped"
    plant(shipped, {"part.py": "def f():\n    return 1\n"})
    py_compile.compile(str(shipped / "part.py"), str(shipped / "part.pyc"), invalidation_mode=mode)
    plant(shipped, {"part.py": "# a new first line\ndef f():\n    return 1\n"})
    sources.pack(shipped, shipped.rglob("*.py"), tmp_path / "sources.zip")
    (shipped / "part.py").unlink()
    code = """
        import inspect, logging, sys, fanfold.sources
        logging.basicConfig(stream=sys.stdout, format="%(message)s")
        fanfold.sources.install("../sources.zip")
        import part
        try:
            inspect.getsource(part.f)
        except OSError:
            print("no source")
    """
    said, end = python(code, shipped).splitlines()
    assert "part.py in" in said
    assert "is not what" in said
    assert end == "no source"


def test_a_file_that_is_no_zip_is_refused_with_the_command_that_makes_one(tmp_path):
    (tmp_path / "sources.zip").write_text("hello")
    before = list(sys.meta_path)
    with pytest.raises(FanfoldError, match="fanfold doctor --deploy PATH --sources FILE"):
        sources.install(tmp_path / "sources.zip")
    assert sys.meta_path == before


def test_the_scan_follows_names_and_leaves_others_of_the_same_name_alone(tmp_path):
    text = """
        import torch as t
        from inspect import getsource as text_of
        from elsewhere import script
        import mine.inspect

        @t.jit.script
        def a(): ...

        @script
        def b(): ...

        text_of(a), mine.inspect.getsource(a), t.jit.trace(a), open(__file__)
    """
    (tmp_path / "m.py").write_text(textwrap.dedent(text).lstrip())
    found = [(one.line, one.use) for one in scan(tmp_path / "m.py", "m.py", frozenset())]
    assert sorted(found) == [(6, "torch.jit.script"), (12, "inspect.getsource"), (12, "open(__file__)")]


def test_doctor_refuses_what_holds_no_code_and_stops_at_its_timeout(tmp_path):
    assert doctor("--deploy", str(tmp_path))[0] == 2
    assert doctor("--deploy", str(tmp_path / "missing"))[0] == 2
    assert doctor("--deploy", "")[0] == 2  # a variable that is not set
    plant(tmp_path, {"slow.py": "import threading\n\nthreading.Event().wait()\n"})
    code, text = doctor("--deploy", str(tmp_path), "--timeout", "2", "--json")
    assert "--timeout" in json.loads(text)["not_importable"]["slow"]
    assert code == 0
