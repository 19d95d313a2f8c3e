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
from fanfold.cli import entry as cli
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


@pytest.mark.filterwarnings("ignore:invalid escape sequence")
def test_a_source_is_known_by_its_code_where_the_pyc_holds_only_a_time(tmp_path):
    """A timestamp .pyc says neither the hash of its source nor how far it was optimised; here all sources are of one length."""
    shipped = tmp_path / "shipped"
    text = 'class C:\n    def f(self, x):\n        """Words."""\n        assert x, "\\d"\n        return lambda: x * 2\n'
    names = [f"{kind}{level}" for kind in ("right", "other") for level in range(3)]
    plant(shipped, {f"{name}.py": text for name in names})
    sources.pack(shipped, shipped.rglob("*.py"), tmp_path / "sources.zip")
    for name in names:
        file = shipped / f"{name}.py"
        file.write_text(text if name.startswith("right") else text.replace("2", "3"))
        mode = py_compile.PycInvalidationMode.TIMESTAMP
        py_compile.compile(str(file), f"{file}c", f"built/{name}.py", optimize=int(name[-1]), invalidation_mode=mode)
        file.unlink()
    code = f"""
        import importlib, inspect, warnings, fanfold.sources
        warnings.simplefilter("error")
        fanfold.sources.install("../sources.zip")
        for name in {names}:
            module = importlib.import_module(name)
            try:
                print(name, inspect.getsource(module.C.f).split()[-1], module.C().f(1)())
            except OSError:
                print(name, "refused")
    """
    assert python(code, shipped).splitlines() == [
        *(f"right{level} 2 2" for level in range(3)),
        *(f"other{level} refused" for level in range(3)),
    ]


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


@pytest.mark.parametrize("call", ["'s.zip'", "Path(__file__).with_name('s.zip')"])
def test_a_package_that_installs_its_own_zip_is_tried_with_it(call, tmp_path):
    start = f"from pathlib import Path\n\nimport fanfold.sources\n\nfanfold.sources.install({call})\n"
    user = "import inspect\n\n\ndef f(): ...\n\n\nTEXT = inspect.getsource(f)\n"
    plant(tmp_path, {"pkg/__init__.py": start, "pkg/user.py": user})
    code, text = doctor("--deploy", str(tmp_path / "pkg"), "--json")
    told = json.loads(text)  # there is no zip yet, so no module can be imported at all
    assert (code, told["healthy"], told["imported"], set(told["not_importable"])) == (1, False, 0, {"pkg", "pkg.user"})
    archive = tmp_path / "s.zip" if call == "'s.zip'" else tmp_path / "pkg" / "s.zip"
    code, text = doctor("--deploy", str(tmp_path / "pkg"), "--sources", str(archive), "--json")
    told = json.loads(text)
    assert (code, told["healthy"], told["imported"], told["not_importable"]) == (0, True, 2, {})


def test_links_to_nothing_and_leftovers_do_not_stop_the_doctor(tmp_path):
    plant(tmp_path, {"a.py": "import b\n", "b.py": "X = 1\n", "b.pyc": "old"})
    (tmp_path / ".#a.py").symlink_to("someone@somewhere.1234")  # an editor's lock
    (tmp_path / "gone.py").symlink_to("nowhere.py")
    code, text = doctor("--deploy", str(tmp_path), "--json")
    told = json.loads(text)
    assert [(one["file"], one["what"], one["breaks_import"]) for one in told["findings"]] == [
        ("gone.py", "is a broken link", True)
    ]
    assert (code, told["compiled"], told["imported"], told["not_importable"]) == (1, 2, 2, {})
    assert (tmp_path / "b.pyc").read_text() == "old"


def test_a_module_that_hangs_takes_no_time_from_the_others(tmp_path):
    """The package hangs, and so would all that is in it; a thread that never ends is no hang."""
    plant(
        tmp_path,
        {
            "hangs/__init__.py": "import threading\n\nthreading.Event().wait()\n",
            "hangs/inside.py": "",
            "stays.py": "import threading\n\nthreading.Thread(target=threading.Event().wait).start()\n",
            "user.py": "import inspect\n\n\ndef f(): ...\n\n\nTEXT = inspect.getsource(f)\n",
        },
    )
    code, text = doctor("--deploy", str(tmp_path), "--timeout", "4", "--json")
    told = json.loads(text)
    assert [(one["file"], one["breaks_import"], one["repaired"]) for one in told["findings"]] == [("user.py", True, True)]
    assert set(told["too_slow"]) == {"hangs", "hangs.inside"}
    assert "--timeout" in told["too_slow"]["hangs"]
    assert (code, told["imported"], told["not_importable"]) == (1, 1, {})


def test_doctor_refuses_what_holds_no_code_and_options_that_mean_nothing(tmp_path, capsys):
    plant(tmp_path, {"code/a.py": "", "empty/words.txt": ""})
    code, empty, missing = (str(tmp_path / name) for name in ("code", "empty", "missing"))
    for words, said in {
        ("--deploy", empty): "contains no .py file",
        ("--deploy", missing): "is not a folder",
        ("--deploy", ""): "'' is not a folder",  # a variable that is not set
        ("--deploy", code, "--sources", ""): "Name the zip to write",
        ("--deploy", code, "--timeout", "-5"): "Pass more than 0",
        ("--deploy", code, "--timeout", "0"): "Pass more than 0",
        ("--deploy", code, "--timeout", "nan"): "Pass more than 0",
        ("--sources", "s.zip"): "go with --deploy",
        ("--timeout", "3"): "go with --deploy",
    }.items():
        assert cli.run(["doctor", *words]) == 2
        assert said in capsys.readouterr().err
