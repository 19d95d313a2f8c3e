"""Forwarders and gateways as real processes over real sockets: killed, cut off, slow; and every byte there once."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

import fanfold
import fault_table
from fanfold.cli import main
from fanfold.fleet.client import Client, Unreachable
from fanfold.fleet.tokens import FILE_NAME, Tokens
from fanfold.journal import blobs
from fleet_tools import Forwarder, Gateway, Line, arrived, journals, train, trained, until, write_run


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def check_job(store: Path, count: int, ranks: int = 2, status: str = "finished") -> None:
    run = fanfold.open("job", dir=store)
    assert (run.project, run.status, run.ranks, run.damaged) == ("llm", status, list(range(ranks)), 0)
    for rank in range(ranks):
        series = run.series("loss", rank=rank)
        assert series.steps.tolist() == list(range(count))
        assert series.values.tolist() == [1 / (step + 1) for step in range(count)]
    assert run.series("rank", fold="mean").values.tolist() == [sum(range(ranks)) / ranks] * count


def test_two_nodes_without_a_shared_filesystem_make_one_run(nodes, store, ends):
    gateway = ends(Gateway(store))
    forwarders = [ends(Forwarder(node, gateway.url)) for node in nodes]
    jobs = [train(node, rank, 300, "--image", pace=0.005) for rank, node in enumerate(nodes)]
    assert until(lambda: len(journals(store)) == 2)
    assert fanfold.open("job", dir=store).status == "running"  # bytes come, though no lock is held where they arrive
    trained(*jobs)
    assert until(lambda: arrived(store, *nodes))
    check_job(store, 300)
    points = fanfold.open("job", dir=store).media("text")
    assert [point.rank for point in points] == [0, 1]
    assert all(blobs.get(store / "llm" / "job", point.entry["blob"]) == b"x" * 5000 for point in points)
    assert [one.terminate() for one in forwarders] == [0, 0]
    assert gateway.terminate() == 0


def test_a_second_forwarder_started_by_init_leaves_quietly(nodes, store, ends):
    """Training keeps the forwarder's stdin open, and a thread there waits for its end."""
    gateway = ends(Gateway(store))
    ends(Forwarder(nodes[0], gateway.url))
    trained(train(nodes[0], 0, 10))
    assert until(lambda: arrived(store, nodes[0]))
    words = [sys.executable, "-m", "fanfold", "forward", "--dir", str(nodes[0]), "--to", gateway.url, "--started"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as second:
        assert (second.wait(60), second.stdout.read()) == (0, b"")


def count_job(what: str, store: Path, kills: int, count: int, ranks: int = 2) -> None:
    """Enter the job's points into the fault table."""
    run = fanfold.open("job", dir=store)
    steps = [run.series("loss", rank=rank).steps.tolist() for rank in range(ranks)]
    lost, doubled = sum(count - len(set(one)) for one in steps), sum(len(one) - len(set(one)) for one in steps)
    fault_table.record(what, times=kills, points=count * ranks, lost=lost, doubled=doubled)


def kill_gateways(nodes, store, ends, kills, count):
    gateway = ends(Gateway(store))
    for node in nodes:
        ends(Forwarder(node, gateway.url))
    jobs = [train(node, rank, count, pace=0.0005) for rank, node in enumerate(nodes)]
    for _ in range(kills):
        size = sum(map(len, journals(store).values()))
        assert until(lambda size=size: sum(map(len, journals(store).values())) > size)
        gateway.kill()
        gateway = ends(Gateway(store, port=gateway.port))
    trained(*jobs)
    assert until(lambda: arrived(store, *nodes))
    count_job("a gateway killed by `kill -9` in the middle of batches", store, kills, count)
    check_job(store, count)


def test_a_gateway_killed_in_the_middle_of_batches_loses_and_repeats_nothing(nodes, store, ends):
    kill_gateways(nodes, store, ends, 3, 4000)


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_gateway_killed_ten_times_loses_and_repeats_nothing(nodes, store, ends):
    kill_gateways(nodes, store, ends, 10, 30_000)


def test_a_forwarder_killed_and_started_again_goes_on_where_the_gateway_stands(nodes, store, ends):
    kill_forwarders(nodes, store, ends, 3, 3000)


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_a_forwarder_killed_ten_times_loses_and_repeats_nothing(nodes, store, ends):
    kill_forwarders(nodes, store, ends, 10, 30_000)


def kill_forwarders(nodes, store, ends, kills, count):
    gateway = ends(Gateway(store))
    node = nodes[0]
    job = train(node, 0, count, pace=0.0005, world=1)
    for turn in range(kills):
        forwarder = ends(Forwarder(node, gateway.url))
        size = sum(map(len, journals(store).values()))
        assert until(lambda size=size: sum(map(len, journals(store).values())) > size)
        forwarder.kill()
        if turn == 1:  # the note only saves questions
            for note in node.rglob("forward/*.json"):
                note.write_text("{ damaged")
    trained(job)
    ends(Forwarder(node, gateway.url))
    assert until(lambda: arrived(store, node))
    count_job("a forwarder killed by `kill -9` in the middle of a run", store, kills, count, 1)
    check_job(store, count, ranks=1)


def test_a_line_that_cuts_connections_at_random_bytes_changes_nothing(nodes, store, ends):
    gateway = ends(Gateway(store))
    line = ends(Line(gateway.port, cut=0.06))
    jobs = [train(node, rank, 3000, "--image") for rank, node in enumerate(nodes)]
    trained(*jobs)
    for node in nodes:
        ends(Forwarder(node, line.url))
    assert until(lambda: arrived(store, *nodes), 120)
    assert line.cuts > 2
    check_job(store, 3000)
    names = {file.name for node in nodes for file in (node / "llm" / "job" / "blobs").rglob("*") if file.is_file()}
    assert names
    for name in names:
        assert hashlib.sha256(blobs.path_of(store / "llm" / "job", name).read_bytes()).hexdigest() == name


def test_a_run_whose_process_was_killed_is_followed_to_its_last_byte(nodes, store, ends, monkeypatch):
    node = nodes[0]
    job = train(node, 0, 500, "--image", "--hang", world=1)
    assert job.stdout is not None
    assert job.stdout.readline() == b"logged\n"
    gateway = ends(Gateway(store))
    forwarder = ends(Forwarder(node, gateway.url, "--idle", "0.2"))
    assert until(lambda: arrived(store, node))
    (point,) = fanfold.open("job", dir=store).media("text")
    assert blobs.get(store / "llm" / "job", point.entry["blob"]) == b"x" * 5000  # a file is there before the frame that names it
    job.send_signal(signal.SIGKILL)
    job.wait(10)
    job.stdout.close()
    assert forwarder.wait() == 0  # it leaves by itself: the process is gone, and all is there
    assert arrived(store, node)
    run = fanfold.open("job", dir=store)
    assert run.series("loss").steps.tolist() == list(range(500))
    later = time.time() + 61
    monkeypatch.setattr(time, "time", lambda: later)
    assert fanfold.open("job", dir=store).status in ("lost", "killed")


def test_a_run_that_says_nothing_for_a_while_is_still_followed(nodes, store, ends):
    node = nodes[0]
    run = fanfold.init("llm", dir=node, id="job", system=False, quiet=True)
    run.log({"x": 1.0}, step=0)
    run.flush()
    hour_ago = time.time() - 3600
    os.utime(run.path / "journal", (hour_ago, hour_ago))
    gateway = ends(Gateway(store))
    forwarder = ends(Forwarder(node, gateway.url, "--idle", "0.2"))
    assert until(lambda: arrived(store, node))
    assert not until(lambda: forwarder.popen.poll() is not None, 1.0)
    run.log({"x": 2.0}, step=1)
    assert until(lambda: fanfold.open("job", dir=store).series("x").values.tolist() == [1.0, 2.0])
    run.finish()
    assert forwarder.wait() == 0
    assert arrived(store, node)


def test_a_slow_gateway_does_not_fill_the_forwarder_s_memory(nodes, store, ends):
    node = nodes[0]
    run = fanfold.init("llm", dir=node, id="job", system=False, quiet=True)
    for step in range(1500):  # 30 MB, of which half travels
        run.log({"text": os.urandom(10_000).hex()}, step=step)
    run.finish()
    gateway = ends(Gateway(store))
    line = ends(Line(gateway.port, bytes_per_second=2e6))
    forwarder = ends(Forwarder(node, line.url))
    process = psutil.Process(forwarder.popen.pid)
    assert until(lambda: line.passed > 200_000)
    first = process.memory_info().rss
    highest = 0

    def watched() -> bool:
        nonlocal highest
        highest = max(highest, process.memory_info().rss)
        return line.passed > 4_000_000

    assert until(watched)
    line.rate = None
    assert until(lambda: watched() and arrived(store, node))
    assert highest - first < 12 << 20  # a few batches, of the 30 that were waiting


def test_what_is_pruned_is_at_the_gateway_and_nothing_else_is_pruned(nodes, store, ends, monkeypatch):
    monkeypatch.setattr("fanfold.fleet.forwarder.ONCE_TRIES", 2)
    node, unfinished = nodes
    trained(train(node, 0, 50, "--image", world=1))
    (kept_file,) = (node / "llm" / "job" / "journal").glob("*.ffj")
    (node / "llm" / "job" / "trackers").mkdir()
    source = journals(node)
    assert main(["forward", "--once", "--prune", "--dir", str(node), "--to", "http://127.0.0.1:9", "--quiet"]) == 1
    assert journals(node) == source
    gateway = ends(Gateway(store))
    assert main(["forward", "--once", "--prune", "--dir", str(node), "--to", gateway.url]) == 0
    assert journals(store) == source
    assert not kept_file.exists()
    assert [entry.name for entry in (node / "llm" / "job").iterdir()] == ["trackers"]
    assert len([file for file in (store / "llm" / "job" / "blobs").rglob("*") if file.is_file()]) >= 1

    lost, run = store / "llm" / "again" / "journal", fanfold.init("llm", dir=node, id="again", system=False, quiet=True)
    run.log({"x": 1.0}, step=0)
    run.finish()
    assert main(["forward", "--once", "--dir", str(node), "--to", gateway.url]) == 0
    for file in lost.iterdir():
        file.unlink()  # the gateway's disk is lost, after we noted that all is there
    source = journals(node)
    assert main(["forward", "--once", "--prune", "--dir", str(node), "--to", gateway.url]) == 0
    assert len(source) == 1
    assert source.items() <= journals(store).items()

    job = train(unfinished, 1, 50, "--hang", world=2)
    assert job.stdout is not None
    job.stdout.readline()
    job.kill()
    job.wait(10)
    job.stdout.close()
    assert main(["forward", "--once", "--prune", "--dir", str(unfinished), "--to", gateway.url]) == 0
    assert len(journals(unfinished)) == 1  # it may be resumed


def test_a_large_file_comes_in_slices_and_once_however_many_nodes_have_it(tmp_path, nodes, store, ends):
    content = os.urandom(9 << 20)
    (tmp_path / "model.bin").write_bytes(content)
    for node in nodes:
        run = fanfold.init("llm", dir=node, id="job", system=False, quiet=True)
        run.artifact(tmp_path / "model.bin")
        run.finish()
    gateway = ends(Gateway(store))
    for node in nodes:
        assert main(["forward", "--once", "--dir", str(node), "--to", gateway.url, "--quiet"]) == 0
    name = hashlib.sha256(content).hexdigest()
    assert blobs.path_of(store / "llm" / "job", name).read_bytes() == content
    with urllib.request.urlopen(f"{gateway.url}/metrics") as answer:
        (line,) = [line for line in answer.read().decode().splitlines() if 'kind="blob"' in line]
    sizes = {file.name: file.stat().st_size for file in (store / "llm" / "job" / "blobs").rglob("*") if file.is_file()}
    assert float(line.rpartition(" ")[2]) == sum(sizes.values())


def test_init_starts_a_forwarder_that_delivers_and_leaves(nodes, store, ends):
    node = nodes[0]
    gateway = ends(Gateway(store, "--tokens", str(store / FILE_NAME)))
    _, word = Tokens(store / FILE_NAME).create("x", projects=["llm"], scopes=["write"])
    settings = {"FANFOLD_SERVER": gateway.url, "FANFOLD_SERVER_TOKEN": word}
    first, second = train(node, 0, 100, **settings), train(node, 1, 100, "--forget", **settings)
    trained(first, second)
    assert until(lambda: arrived(store, node), 10)
    check_job(store, 100)
    logs = list((node / ".forward").glob("*.log"))
    assert len(logs) == 1
    assert word not in logs[0].read_text()


def test_finish_waits_for_the_gateway_and_says_when_it_waits_in_vain(nodes, store, ends):
    code = (
        "import fanfold, sys\n"
        "from fanfold.fleet import launch\n"
        "launch.FINISH_SECONDS = float(sys.argv[1])\n"
        "run = fanfold.init('llm', id=sys.argv[2], system=False, quiet=True)\n"
        "run.log({'x': 1.0}, step=0); run.finish()\n"
        "print(run.path)\n"
    )

    def finish(url: str, seconds: str, id: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "FANFOLD_DIR": str(nodes[0]), "FANFOLD_SERVER": url}
        return subprocess.run(
            [sys.executable, "-c", code, seconds, id], env=env, capture_output=True, text=True, timeout=60, check=True
        )

    gateway = ends(Gateway(store))
    done = finish(gateway.url, "30", "good")
    assert done.stderr == ""
    assert journals(store) == journals(nodes[0])
    done = finish("http://127.0.0.1:9", "0.5", "vain")
    assert "fanfold server forward --once --to http://127.0.0.1:9" in done.stderr
    for one in psutil.process_iter(["cmdline"]):  # the one that waits in vain would do so for ever
        if str(nodes[0]) in (one.info["cmdline"] or []):
            one.terminate()


def test_a_second_forwarder_of_a_directory_leaves(nodes, store, ends, capsys):
    gateway = ends(Gateway(store))
    trained(train(nodes[0], 0, 5, world=1))
    ends(Forwarder(nodes[0], gateway.url))
    assert until(lambda: arrived(store, nodes[0]))
    assert main(["forward", "--dir", str(nodes[0]), "--to", gateway.url]) == 2
    assert "another forwarder" in capsys.readouterr().err


def test_a_moved_run_and_a_copy_arrive_in_their_projects(tmp_path, store, ends):
    gateway, node = ends(Gateway(store)), tmp_path / "node"
    write_run(node)
    projects = lambda: sorted((run.project, len(run.series("loss"))) for run in fanfold.runs(dir=store))  # noqa: E731
    forward = lambda: main(["forward", "--once", "--to", gateway.url, "--dir", str(node)])  # noqa: E731
    assert forward() == 0
    assert projects() == [("llm", 200)]
    assert main(["cp", "r1", "--project", "copies", "--dir", str(node)]) == 0
    assert main(["mv", str(node / "llm" / "r1"), "--project", "vision", "--dir", str(node)]) == 0
    for _ in range(2):  # the second time, nothing is left to send
        assert forward() == 0
        assert projects() == [("copies", 200), ("llm", 200), ("vision", 200)]
    assert gateway.terminate() == 0


def test_a_run_moved_while_it_is_sent_arrives_whole_in_its_new_project(tmp_path, store, ends, monkeypatch, capsys):
    gateway, node = ends(Gateway(store)), tmp_path / "node"
    with fanfold.init("llm", dir=node, id="r1", system=False, quiet=True) as run:
        for step in range(20):
            run.log({"loss": step, "page": fanfold.Html(os.urandom(6_000).hex())}, step=step)
    missing = Client.missing

    def moving(self, *given):
        answer = missing(self, *given)
        if run.path.exists():  # the files that the gateway lacks are sent next
            assert main(["mv", "r1", "--project", "vision", "--dir", str(node), "-q"]) == 0
        return answer

    monkeypatch.setattr(Client, "missing", moving)
    assert main(["forward", "--once", "--to", gateway.url, "--dir", str(node)]) == 0
    assert "could not be forwarded" not in capsys.readouterr().err
    there = fanfold.open("vision/r1", dir=store)
    assert (there.status, len(there.series("loss"))) == ("finished", 20)
    names = [{path.name for path in (root / "vision" / "r1" / "blobs").rglob("*") if path.is_file()} for root in (node, store)]
    assert names[0] == names[1] != set()


def test_a_wrong_token_stops_one_project_and_not_the_others(nodes, store, ends):
    node = nodes[0]
    for project in ("llm", "vision"):
        run = fanfold.init(project, dir=node, id=project, system=False, quiet=True)
        run.log({"x": 1.0}, step=0)
        run.finish()
    tokens = Tokens(store / FILE_NAME)
    _, word = tokens.create("x", projects=["vision"], scopes=["write"])
    gateway = ends(Gateway(store))
    forwarder = ends(Forwarder(node, gateway.url, FANFOLD_SERVER_TOKEN=word))
    assert until(lambda: len(journals(store)) == 1)
    assert next(iter(journals(store))).startswith("vision/")
    assert until(lambda: "may not" in forwarder.log.read_text())
    assert word not in forwarder.log.read_text()


def test_bytes_travel_encrypted_to_a_gateway_whose_certificate_is_trusted(tmp_path, nodes, store, ends, monkeypatch):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run([*command.split(), "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    trained(train(nodes[0], 0, 20, world=1))
    gateway = ends(Gateway(store, "--tls-cert", str(cert), "--tls-key", str(key)))
    assert gateway.url.startswith("https://")
    with pytest.raises(fanfold.errors.FanfoldError, match="certificate verify failed"):
        Client(gateway.url).offset("llm", "job", "0-0123456789abcdef")
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    assert main(["forward", "--once", "--dir", str(nodes[0]), "--to", gateway.url, "--quiet"]) == 0
    assert arrived(store, nodes[0])


def test_a_line_reset_while_it_is_opened_is_an_outage_like_any_other(monkeypatch):
    def reset(*_address: object, **_options: object) -> socket.socket:
        raise ConnectionResetError(104, "Connection reset by peer")  # a gateway is killed with callers in its queue

    monkeypatch.setattr(socket, "create_connection", reset)
    with pytest.raises(Unreachable, match="cannot be reached"):
        Client("http://127.0.0.1:1").requests("llm", ["r1"], [])
