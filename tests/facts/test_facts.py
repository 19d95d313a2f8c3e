"""A run describes itself from real repositories, packages and processes, and no planted secret comes out."""

from __future__ import annotations

import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import textwrap
import time

import pytest

from fanfold.facts import collect
from fanfold.facts import git as code

SECRET = "hunter2Zq9secret"
TOKEN = "ghp_" + "0123456789abcdefghijABCDEFGHIJ456789"
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture(autouse=True)
def own_git_config(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))


def git(folder: pathlib.Path, *arguments: str) -> str:
    who = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def repository(folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir(parents=True)
    git(folder, "init", "-q")
    (folder / "train.py").write_text("lr = 1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "first")
    return folder


def described(folder: pathlib.Path) -> dict[str, object] | None:
    found = collect.gather(argv=["python", "train.py"], cwd=folder)["git"]
    assert found is None or isinstance(found, dict)
    return found


@needs_git
def test_clean_repository(tmp_path: pathlib.Path) -> None:
    root = repository(tmp_path / "code")
    git(root, "remote", "add", "upstream", "https://example.org/u.git")
    git(root, "remote", "add", "origin", "https://example.org/o.git")
    (root / "sub").mkdir()
    assert described(root / "sub") == {
        "commit": git(root, "rev-parse", "HEAD"), "branch": "main", "remote": "https://example.org/o.git",
        "dirty": False, "root": str(root),
    }  # fmt: skip
    assert code.patch(root) == (b"", False)


@needs_git
def test_changed_repository_and_its_patch_applies(tmp_path: pathlib.Path) -> None:
    root = repository(tmp_path / "code")
    (root / "train.py").write_text("lr = 2\n")
    (root / "staged.py").write_text("x = 'grün'\n", encoding="utf-8")
    (root / "latin.txt").write_bytes(b"caf\xe9\n")
    git(root, "add", "staged.py", "latin.txt")
    (root / "new file.py").write_text("y = 1\n")
    found = described(root)
    assert found is not None
    assert found["dirty"] is True
    text, cut = code.patch(root)
    assert not cut
    assert b"# untracked: new file.py\n" in text
    assert b"-lr = 1\n+lr = 2\n" in text
    assert "+x = 'grün'\n".encode() in text

    other = tmp_path / "other"
    git(tmp_path, "clone", "-q", str(root), str(other))
    (tmp_path / "p.patch").write_bytes(text)
    git(other, "apply", str(tmp_path / "p.patch"))
    assert (other / "train.py").read_text() == "lr = 2\n"
    assert (other / "latin.txt").read_bytes() == b"caf\xe9\n"


@needs_git
def test_untracked_data_does_not_make_it_dirty(tmp_path: pathlib.Path) -> None:
    root = repository(tmp_path / "code")
    (root / "notes.txt").write_text("x")
    found = described(root)
    assert found is not None
    assert found["dirty"] is False


@needs_git
def test_no_commit_yet(tmp_path: pathlib.Path) -> None:
    root = tmp_path / "code"
    root.mkdir()
    git(root, "init", "-q")
    (root / "a.py").write_text("a = 1\n")
    git(root, "add", ".")
    (root / "a.py").write_text("a = 2\n")
    assert described(root) == {"commit": None, "branch": "main", "remote": None, "dirty": True, "root": str(root)}
    text, cut = code.patch(root)
    assert b"+a = 2\n" in text
    assert not cut


@needs_git
def test_detached_head(tmp_path: pathlib.Path) -> None:
    root = repository(tmp_path / "code")
    git(root, "checkout", "-q", "--detach")
    found = described(root)
    assert found is not None
    assert (found["branch"], found["commit"]) == (None, git(root, "rev-parse", "HEAD"))


@needs_git
def test_worktree_in_a_path_with_spaces_and_other_letters(tmp_path: pathlib.Path) -> None:
    root = repository(tmp_path / "mein Prüf ordner ☃")
    tree = tmp_path / "zweiter baum ü"
    git(root, "worktree", "add", "-q", "-b", "side/b", str(tree))
    (tree / "train.py").write_text("lr = 3\n")
    found = described(tree)
    assert found is not None
    assert (found["branch"], found["dirty"], found["root"]) == ("side/b", True, str(tree))
    (tree / "größe.py").write_text("x = 1\n")
    git(tree, "add", ".")
    text = code.patch(tree)[0].decode()
    assert "+lr = 3" in text
    assert "diff --git a/größe.py b/größe.py" in text
    first = described(root)
    assert first is not None
    assert (first["dirty"], first["root"]) == (False, str(root))


@needs_git
def test_bare_repository_and_plain_folder_have_no_code(tmp_path: pathlib.Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    git(bare, "init", "-q", "--bare")
    for folder in (bare, tmp_path, tmp_path / "missing"):
        assert described(folder) is None
        assert code.patch(folder) == (b"", False)


@needs_git
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("tree", [False, True])
def test_without_git_the_files_tell_commit_and_branch(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, packed: bool, tree: bool
) -> None:
    root = repository(tmp_path / "code")
    git(root, "remote", "add", "origin", f"https://me:{SECRET}@example.org/o.git")
    if tree:
        git(root, "worktree", "add", "-q", "-b", "side", str(tmp_path / "tree"))
    if packed:
        git(root, "pack-refs", "--all")
    commit, where = git(root, "rev-parse", "HEAD"), tmp_path / "tree" if tree else root
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert described(where) == {
        "commit": commit, "branch": "side" if tree else "main", "remote": "https://me:***@example.org/o.git",
        "dirty": None, "root": str(where),
    }  # fmt: skip
    assert code.patch(where) == (b"", False)


@needs_git
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_another_users_repository_is_read_but_not_run(tmp_path: pathlib.Path) -> None:
    root = repository(tmp_path / "code")
    commit = git(root, "rev-parse", "HEAD")
    for path in [root, *root.rglob("*")]:
        os.chown(path, 12345, 12345)
    found = described(root)
    assert found is not None
    assert (found["commit"], found["branch"], found["dirty"]) == (commit, "main", None)
    assert code.patch(root) == (b"", False)


@needs_git
def test_repository_cannot_run_its_own_commands(tmp_path: pathlib.Path) -> None:
    root = repository(tmp_path / "code")
    mark = tmp_path / "ran"
    tool = tmp_path / "tool"
    tool.write_text(f"#!/bin/sh\ntouch {mark}\n")
    tool.chmod(0o755)
    for setting in ("core.fsmonitor", "diff.external", "core.pager", "diff.t.textconv", "diff.t.command"):
        git(root, "config", setting, str(tool))
    (root / ".git" / "info" / "attributes").write_text("*.py diff=t\n")
    (root / "train.py").write_text("lr = 2\n")
    found = described(root)
    assert found is not None
    assert found["dirty"] is True
    assert b"+lr = 2" in code.patch(root)[0]
    assert not mark.exists()


@needs_git
def test_a_folder_that_only_looks_like_a_repository_does_not_hide_the_one_around_it(tmp_path: pathlib.Path) -> None:
    root = repository(tmp_path / "code")
    (root / "sub" / ".git").mkdir(parents=True)
    (root / "sub" / ".git" / "HEAD").write_text("ref: refs/heads/other\n")
    (root / "new.py").write_text("x = 1\n")
    found = described(root / "sub")
    assert found is not None
    assert (found["root"], found["branch"], found["dirty"]) == (str(root), "main", True)


def test_git_is_not_started_where_there_is_no_repository(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool, mark = tmp_path / "bin" / "git", tmp_path / "started"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\ntouch {mark}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    assert described(tmp_path) is None
    assert not mark.exists()


@needs_git
def test_variables_of_a_git_hook_do_not_mislead(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, other = repository(tmp_path / "code"), repository(tmp_path / "other")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    found = described(root)
    assert found is not None
    assert found["root"] == str(root)


def test_git_that_hangs_is_ended_with_its_children(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool, pipe = tmp_path / "bin" / "git", tmp_path / "pipe"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n(echo up; exec sleep 300) > {pipe} &\nwait\n")
    tool.chmod(0o755)
    os.mkfifo(pipe)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(code, "GIT_SECONDS", 1.0)
    try:
        started = time.perf_counter()
        found = described(tmp_path)
        assert time.perf_counter() - started < 20  # the children would sleep for 300
        assert found is not None
        assert (found["branch"], found["dirty"]) == ("main", None)
        os.set_blocking(reader, True)
        assert os.read(reader, 1000).startswith(b"up\nup\n")  # several questions at once
        # The pipe ends when its last writer does. A kill takes effect when the kernel next runs the child, so wait for it.
        assert select.select([reader], [], [], 20)[0]
        assert os.read(reader, 10) == b""
    finally:
        os.close(reader)


@needs_git
@pytest.mark.parametrize("limit", [0, 1, 500, 5_000])
def test_patch_is_cut_at_the_limit_in_whole_lines(tmp_path: pathlib.Path, limit: int) -> None:
    root = repository(tmp_path / "code")
    (root / "train.py").write_text("".join(f"line{i} = 'hf_{i:030d}'\n" for i in range(1000)))
    text, cut = code.patch(root, limit=limit)
    assert cut
    assert len(text) <= limit
    assert b"hf_" not in text
    assert text == b"" or text.endswith(b"\n")


@needs_git
def test_patch_hides_secrets_in_code_settings_and_secret_files(tmp_path: pathlib.Path) -> None:
    root = repository(tmp_path / "code")
    (root / "train.py").write_text(f'api_key = "{SECRET}"\nlogin("{TOKEN}")\ntoken = args.token\n')
    (root / "config.yaml").write_text(f"url: https://me:{SECRET}@db\npassword: {SECRET}\nlr: 3\n")
    (root / "run.sh").write_text(f"export HF_TOKEN={SECRET}\npython train.py --api-key {SECRET}\n")
    (root / "nb.ipynb").write_text(json.dumps({"cells": [{"source": [f'secret = "{SECRET}"\n']}]}, indent=1))
    (root / ".env").write_text(f"ANYTHING {SECRET}\n")
    (root / "credentials.json").write_text(f'["{SECRET}"]\n')
    (root / "key.pem").write_text(f"{SECRET}\n")
    (root / "blob.bin").write_bytes(b"\0" + SECRET.encode() * 10)
    (root / "deploy").write_text(f"-----BEGIN OPENSSH PRIVATE KEY-----\n{SECRET}\n-----END OPENSSH PRIVATE KEY-----\n")
    git(root, "add", ".")
    (root / f"{TOKEN}.txt").write_text("x")
    text = code.patch(root)[0].decode()
    assert SECRET not in text
    assert TOKEN not in text
    for kept in ("+token = args.token", "+lr: 3", "https://me:***@db", "b/.env", "b/blob.bin", "# untracked: ***.txt"):
        assert kept in text, kept


@needs_git
def test_secrets_of_command_environment_and_remote_never_come_out(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = repository(tmp_path / "code")
    git(root, "remote", "add", "origin", f"https://me:{SECRET}@example.org/o.git")
    for name in ("FANFOLD_API_KEY", "TORCH_HUB_TOKEN", "HF_TOKEN", "SLURM_JWT", "MY_PRIVATE_THING"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("NCCL_NET", f"http://u:{SECRET}@proxy")
    monkeypatch.setenv("TORCH_HOME", TOKEN)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    argv = ["python", "train.py", "--api-key", SECRET, f"--password={SECRET}", f"DB_PASSWORD={SECRET}", TOKEN]
    found = collect.gather(argv=argv, cwd=root)
    text = json.dumps(found)
    assert SECRET not in text
    assert TOKEN not in text
    assert found["command"] == ["python", "train.py", "--api-key", "***", "--password=***", "DB_PASSWORD=***", "***"]
    environment = found["environment"]
    assert isinstance(environment, dict)
    assert environment["NCCL_DEBUG"] == "INFO"
    assert environment["FANFOLD_API_KEY"] == environment["TORCH_HOME"] == "***"
    assert not {"HF_TOKEN", "SLURM_JWT", "MY_PRIVATE_THING"} & environment.keys()


@pytest.mark.parametrize(
    ("argv", "script"),
    [
        (["python", "-u", "train.py", "-m", "x"], "train.py"),
        (["python", "-X", "dev", "-W", "error", "-m", "pkg.train", "--lr", "1"], "-m pkg.train"),
        (["python", "-mpkg.train"], "-m pkg.train"),
        (["python", "-c", "print(1)"], "-c"),
        (["python"], "interactive"),
        (["python", "-i"], "interactive"),
        ([], "interactive"),
    ],
)
def test_script(argv: list[str], script: str, tmp_path: pathlib.Path) -> None:
    assert collect.gather(argv=argv, cwd=tmp_path)["script"] == script


def test_the_launcher_is_the_one_the_ranks_come_from(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert collect.gather(argv=["python"], cwd=tmp_path)["launcher"] == "srun"


def test_packages_are_those_importlib_finds() -> None:
    from importlib.metadata import distributions

    found = collect.packages(sys.path)
    expected = {d.name.lower().replace("_", "-").replace(".", "-"): d.version for d in distributions()}
    assert found.keys() >= {"pytest", "hypothesis"}
    assert {name: found.get(name) for name in expected} == expected


def test_packages_from_every_kind_of_folder_name(tmp_path: pathlib.Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for name in ("torch-2.9.0+cu128.dist-info", "Foo_Bar-1.0-py3.11.egg-info", "ruamel.yaml-0.18.dist-info", "~ip-1.dist-info",
                 "old-name-2.0.dist-info", "develop.egg-info", "notes.txt"):  # fmt: skip
        (first / name).mkdir(parents=True)
    (first / "develop.egg-info" / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: develop\nVersion: 0.3\n")
    (second / "torch-1.0.dist-info").mkdir(parents=True)
    (second / "single-4.0.egg-info").write_text("Metadata-Version: 1.0\n")
    assert collect.packages([str(first), str(second), str(tmp_path / "missing.zip")]) == {
        "develop": "0.3", "foo-bar": "1.0", "old-name": "2.0", "ruamel-yaml": "0.18", "single": "4.0",
        "torch": "2.9.0+cu128",
    }  # fmt: skip


def test_node_python_user_and_zone_are_told(tmp_path: pathlib.Path) -> None:
    import psutil

    found = collect.gather(argv=["python"], cwd=tmp_path)
    node, python = found["node"], found["python"]
    assert isinstance(node, dict)
    assert isinstance(python, dict)
    assert node["hostname"] == os.uname().nodename
    assert node["cpu_count"] == os.cpu_count()
    assert node["memory_bytes"] == pytest.approx(psutil.virtual_memory().total, rel=0.05)
    assert node["cpu"]
    assert isinstance(node["container"], bool)
    assert python["executable"] == sys.executable
    assert python["version"] == "{}.{}.{}".format(*sys.version_info[:3])
    assert found["user"]
    assert found["time_zone"]
    assert json.loads(json.dumps(found)) == found


def run_python(code: str, *arguments: str, cwd: pathlib.Path) -> dict[str, object]:
    program = f"import json\nfrom fanfold.facts import collect\n{textwrap.dedent(code)}"
    script = cwd / "main program.py"
    script.write_text(program)
    source = str(pathlib.Path(collect.__file__).parents[2])
    variables = os.environ | {"PYTHONPATH": source}
    done = subprocess.run([sys.executable, str(script), *arguments], cwd=cwd, env=variables, check=True, capture_output=True)
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


def test_a_real_process_tells_its_command_and_imports_no_torch(tmp_path: pathlib.Path) -> None:
    answer = run_python(
        "import sys; f = collect.gather(); f['heavy'] = [m for m in ('torch', 'numpy', 'psutil') if m in sys.modules]; "
        "print(json.dumps(f))",
        "--token", SECRET, b"--name=\xff".decode(errors="surrogateescape"),
        cwd=tmp_path,
    )  # fmt: skip
    assert answer["heavy"] == []
    assert "torch" not in answer
    assert answer["command"] == [sys.executable, str(tmp_path / "main program.py"), "--token", "***", "--name=?"]
    assert answer["script"] == str(tmp_path / "main program.py")
    assert answer["cwd"] == str(tmp_path)


def test_torch_is_told_where_it_is_imported_and_cuda_stays_untouched(tmp_path: pathlib.Path) -> None:
    torch = pytest.importorskip("torch")  # the other Pythons, where this file runs too, are set up without it
    answer = run_python(
        "import torch; f = collect.gather(); f['touched'] = torch.cuda.is_initialized(); print(json.dumps(f))", cwd=tmp_path
    )
    told = answer["torch"]
    assert isinstance(told, dict)
    assert told["version"] == torch.__version__
    assert told["cuda"] == torch.version.cuda
    assert answer["touched"] is False


@needs_git
def test_the_repository_is_the_scripts_else_the_working_folders(tmp_path: pathlib.Path) -> None:
    code, elsewhere = repository(tmp_path / "code"), repository(tmp_path / "elsewhere")
    program = "import json, os; from fanfold.facts import collect; os.chdir({!r}); print(json.dumps(collect.gather()['git']))"
    source = {"PYTHONPATH": str(pathlib.Path(collect.__file__).parents[2])}
    (code / "go.py").write_text(program.format(str(elsewhere)))
    for arguments, root in ([str(code / "go.py")], code), (["-c", program.format(str(elsewhere))], elsewhere):
        out = subprocess.run([sys.executable, *arguments], env=os.environ | source, check=True, capture_output=True).stdout
        assert json.loads(out)["root"] == str(root)


def test_a_working_folder_that_is_gone_costs_only_its_own_facts(tmp_path: pathlib.Path) -> None:
    answer = run_python(
        "import os; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); print(json.dumps(collect.gather()))", cwd=tmp_path
    )
    assert "cwd" not in answer
    assert answer["git"] is None
    assert answer["node"]


@needs_git
def test_gathering_is_light_on_python(tmp_path: pathlib.Path) -> None:
    root = repository(tmp_path / "code")
    site = tmp_path / "site"
    for index in range(350):
        (site / f"package_{index}-1.{index}.dist-info").mkdir(parents=True)
    answer = run_python(
        f"""
        import sys, time
        sys.path.append({str(site)!r})
        collect.gpus = lambda: []  # the driver's own time is not ours
        spent = []
        for _ in range(5):
            wall, cpu = time.perf_counter(), time.thread_time()
            found = collect.gather(cwd={str(root)!r})
            spent.append((time.perf_counter() - wall, time.thread_time() - cpu))
        print(json.dumps({{"wall": min(w for w, _ in spent), "cpu": min(c for _, c in spent), "n": len(found["packages"])}}))
        """,
        cwd=tmp_path,
    )
    wall, cpu, number = answer["wall"], answer["cpu"], answer["n"]
    assert isinstance(wall, float)
    assert isinstance(cpu, float)
    assert isinstance(number, int)
    assert number >= 350
    assert cpu < 0.015
    assert wall < 0.06


def played(folder: pathlib.Path, script: pathlib.Path) -> dict[str, object]:
    """Run a script in a folder, and return the facts of its run with the texts of the files it kept."""
    import fanfold
    from fanfold.journal import blobs

    runs = folder.parent / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    env = {**os.environ, "FANFOLD_DIR": str(runs), "FANFOLD_QUIET": "1", "FANFOLD_SYSTEM": "0"}
    subprocess.run([sys.executable, str(script)], cwd=folder, env=env, check=True, timeout=60)
    run = fanfold.open("r", dir=runs)
    found = dict(run.facts)
    kept = found.get("code", {}).get("files", [])
    found["texts"] = {file["path"]: blobs.get(run.path, file["blob"]).decode() for file in kept}
    return found


TRAIN = "import fanfold; run = fanfold.init('p', id='r'); run.log({'x': 1}); run.finish()\n"


@needs_git
def test_an_untracked_script_makes_the_run_dirty_and_is_kept(tmp_path: pathlib.Path) -> None:
    root = repository(tmp_path / "code")
    (root / ".gitignore").write_text("ignored.py\nscratch/\n")
    git(root, "add", ".")
    git(root, "commit", "-qm", "second")
    (root / "lib").mkdir()
    (root / "scratch").mkdir()
    (root / "mine.py").write_text(TRAIN + f"api_key = '{SECRET}'\n")
    (root / "lib" / "model.py").write_text("layers = 3\n")
    (root / "ignored.py").write_text("no = 1\n")
    (root / "data.csv").write_text("1,2\n")
    (root / "huge.py").write_text("x = 1\n" * 100_000)
    (root / "binary.py").write_bytes(b"\0\1\2")
    (root / "link.py").symlink_to("/etc/passwd")
    (root / "secrets.env").write_text("A=1\n")
    found = played(root, root / "mine.py")
    assert found["git"]["dirty"] is True
    assert found["texts"] == {"mine.py": TRAIN + "api_key = '***'\n", "lib/model.py": "layers = 3\n"}
    assert found["code"]["left_out"] == 3
    shutil.move(root / "mine.py", root / "scratch" / "mine.py")  # an ignored script is the code that runs all the same
    for name in ("lib", "huge.py", "binary.py", "link.py"):
        shutil.rmtree(root / name) if name == "lib" else (root / name).unlink()
    found = played(root, root / "scratch" / "mine.py")
    assert (found["git"]["dirty"], list(found["texts"])) == (True, ["scratch/mine.py"])


@needs_git
def test_a_committed_script_is_clean_and_not_kept_again(tmp_path: pathlib.Path) -> None:
    root = repository(tmp_path / "code")
    (root / "train.py").write_text(TRAIN)
    git(root, "commit", "-qam", "second")
    found = played(root, root / "train.py")
    assert (found["git"]["dirty"], found["texts"]) == (False, {})


@needs_git
def test_a_repository_without_commits_is_dirty_and_its_script_kept(tmp_path: pathlib.Path) -> None:
    root = tmp_path / "code"
    root.mkdir()
    git(root, "init", "-q")
    found = described(root)
    assert found is not None
    assert (found["commit"], found["dirty"]) == (None, True)
    (root / "train.py").write_text(TRAIN)
    played_facts = played(root, root / "train.py")
    assert (played_facts["git"]["dirty"], list(played_facts["texts"])) == (True, ["train.py"])
    runs = root.parent / "runs"
    command = [sys.executable, "-m", "fanfold", "show", "r", "--dir", str(runs)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "nothing committed" in shown
    assert "kept train.py" in shown


def test_outside_a_repository_the_script_is_kept(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "other.py").write_text("x = 1\n")
    found = played(folder, folder / "train.py")
    assert found["git"] is None
    assert found["texts"] == {"train.py": TRAIN}


def test_a_script_that_ends_at_once_is_kept(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "train.py").write_text(short := "import fanfold; fanfold.init('p', id='r')\n")
    assert played(folder, folder / "train.py")["texts"] == {"train.py": short}
