"""What deploy/ and docs/operations.md tell machines and people to do, done: health checks, the image's wheel, backup, restore."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fanfold
from clickhouse_server import Server
from deployment_tools import CHART, DEPLOY, PAGE, ROOT, compose, containers, rendered, run
from fanfold.cli import main
from fanfold.clickhouse import rebuild
from fleet_tools import Gateway, Process, kept, write_run


@pytest.fixture
def ends() -> Iterator[Callable[[Process], Process]]:
    """End what a test starts, also when it fails."""
    started: list[Process] = []
    yield lambda process: started.append(process) or process  # type: ignore[func-returns-value]
    for process in started:
        process.close()


def python_of(words: list[str], port: int) -> list[str]:
    """Make a container's Python one-liner ask this machine."""
    code = re.sub(r"//[\w.-]+:8643/", f"//127.0.0.1:{port}/", words[-1])
    assert str(port) in code
    return [sys.executable, "-c", code]


def dockerfile_check() -> list[str]:
    (line,) = re.findall(r"HEALTHCHECK.*\\\n\s+CMD (\[.*\])", (DEPLOY / "Dockerfile").read_text())
    return list(json.loads(line))


def test_health_checks_tell_a_running_gateway_from_a_stopped_one(tmp_path: Path, ends: Callable) -> None:
    (helm_test,) = containers(rendered("as it comes"), "ready")
    checks = {"image": dockerfile_check(), "helm test": helm_test["command"]}
    gateway = ends(Gateway(tmp_path / "store"))
    lines = {name: python_of(words, gateway.port) for name, words in checks.items()}
    assert {name: run(*line).returncode for name, line in lines.items()} == dict.fromkeys(checks, 0)
    gateway.terminate()
    assert {name: run(*line).returncode for name, line in lines.items()} == dict.fromkeys(checks, 1)


def test_health_checks_speak_tls_where_the_gateway_does(tmp_path: Path, ends: Callable) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=runs.example.org"
    subprocess.run([*command.split(), "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    (helm_test,) = containers(rendered("everything"), "ready")
    gateway = ends(Gateway(tmp_path / "store", "--tls-cert", str(cert), "--tls-key", str(key)))
    for words in (compose("compose.yaml", "compose.tls.yaml")["gateway"]["healthcheck"]["test"], helm_test["command"]):
        done = run(*python_of(words, gateway.port))
        assert done.returncode == 0, done.stderr


def test_the_image_is_built_from_what_its_ignore_file_lets_in(tmp_path: Path) -> None:
    let_in = re.findall(r"^!(\S+)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    source = tmp_path / "source"
    source.mkdir()
    for name in let_in:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copy(ROOT / name, source / name)
    # No PATH: the slim image has no compiler either.
    bare = {**os.environ, "PATH": "", "CXX": ""}
    done = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=source, env=bare)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("fanfold-*.whl")
    assert {"fanfold/cli/serve.py", "fanfold/server/static/index.html"} <= set(zipfile.ZipFile(wheel).namelist())
    assert "constraints.txt" in let_in


# Backup and restore, as the page tells


def statements(first: str) -> list[str]:
    """Return the SQL of the page's block that begins with a word."""
    (block,) = [block for block in re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL) if block.startswith(first)]
    return [line.rstrip(";") for line in block.strip().splitlines()]


def forget_notes(node: Path) -> None:
    """Run the page's command that makes forwarders ask again."""
    (command,) = re.findall(r"`find /var/lib/fanfold/runs (-path '\S+' -delete)`", PAGE.read_text())
    assert list(node.rglob("forward/*.json")), "there are notes to forget"
    subprocess.run(f"find {node} {command}", shell=True, check=True)
    assert not list(node.rglob("forward/*.json"))


def ship(node: Path, url: str) -> None:
    assert main(["forward", "--once", "--dir", str(node), "--to", url, "--quiet"]) == 0


def test_a_directory_store_that_was_restored_gets_the_rest_from_its_nodes(tmp_path: Path, ends: Callable) -> None:
    node, store, backup = tmp_path / "node", tmp_path / "store", tmp_path / "backup"
    early = write_run(node, 20, id="early")
    gateway = ends(Gateway(store))
    ship(node, gateway.url)
    shutil.copytree(store, backup)
    late = write_run(node, 30, id="late")
    ship(node, gateway.url)
    gateway.terminate()
    shutil.rmtree(store)
    shutil.copytree(backup, store)

    again = ends(Gateway(store, port=gateway.port))  # notes are of an address
    ship(node, again.url)
    assert not kept(store, late, "late").exists(), "its node noted that it was shipped"
    forget_notes(node)
    ship(node, again.url)
    for file, id in ((early, "early"), (late, "late")):
        assert kept(store, file, id).read_bytes() == file.read_bytes()


@pytest.fixture(scope="module")
def clickhouse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real ClickHouse with the configuration that compose and the chart give it."""
    folder = tmp_path_factory.mktemp("clickhouse")
    (folder / "backups").mkdir()
    parts = []
    for name in ("clickhouse.xml", "backups.xml"):
        (inner,) = re.findall(r"<clickhouse>(.*)</clickhouse>", (CHART / "files" / name).read_text(), re.DOTALL)
        parts.append(re.sub(r"<logger>.*</logger>", "", inner).replace("/backups/", f"{folder}/backups/"))
    server = Server(folder / "server", config="".join(parts)).start()
    yield server
    server.kill()


def test_clickhouse_is_restored_from_a_backup_and_the_rest_from_its_nodes(
    tmp_path: Path, clickhouse: Server, ends: Callable
) -> None:
    node, store = tmp_path / "node", f"{clickhouse.url}/fanfold"
    admin = clickhouse.client()
    assert main(["db", "migrate", "--store", store, "--quiet"]) == 0
    gateway = ends(Gateway(tmp_path / "unused", "--store", store))

    def shipped(id: str, rows: int) -> None:
        write_run(node, rows, id=id)
        ship(node, gateway.url)

    first, second = statements("BACKUP")
    shipped("before", 20)
    admin.command(first)
    shipped("amid", 700)  # its bytes are in the backup, and the commit that vouches for them is not
    admin.command(second)
    shipped("after", 30)
    gateway.terminate()
    admin.command("DROP DATABASE fanfold SYNC")
    for statement in statements("RESTORE"):
        admin.command(statement)

    forget_notes(node)
    again = ends(Gateway(tmp_path / "unused", "--store", store, port=gateway.port))
    ship(node, again.url)
    assert_same(node, store)

    for table in rebuild.DERIVED:
        clickhouse.client("fanfold").command(f"TRUNCATE TABLE {table}")
    assert main(["db", "rebuild", "--store", store, "--quiet"]) == 0
    assert_same(node, store)


def assert_same(node: Path, store: str) -> None:
    for id in ("before", "amid", "after"):
        here, there = fanfold.open(id, dir=node), fanfold.open(id, dir=store)
        assert there.status == "finished"
        for key in ("loss", "acc"):
            assert there.series(key).values.tolist() == here.series(key).values.tolist()
        assert there.summary == here.summary
