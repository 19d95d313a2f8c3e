"""A real ClickHouse for tests and benchmarks: downloaded once, then one process per server, which tests may kill and restart.

It is the shared library of an npm package, whose clickhouse-local can listen. It has the whole engine with HTTP and native
protocol, except replication, Keeper, ON CLUSTER and the query log.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VERSION = "26.7.3-stable.1"  # pinned: the version tagged `latest` cannot listen
PACKAGE = f"@chdb/lib-linux-x64-gnu@{VERSION}"
SHA256 = "c0d32b129e988f2b9a9a31c9141aecf5e1e2453f9a079efc4d36ab8e3f92b2ad"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fanfold-tests"
LIBRARY = CACHE / f"clickhouse-{VERSION}" / "libchdb.so"
USER, PASSWORD = "fleet", "secret"
LISTEN = "SYSTEM START LISTEN HTTP; SYSTEM START LISTEN TCP; SELECT sleepEachRow(1) FROM system.numbers SETTINGS max_block_size=1 FORMAT Null"

# The session that keeps the listeners open is `default` without a password. Nobody else may log in as `default`, so it only accepts ::1.
USERS = f"""<clickhouse>
  <profiles><default/></profiles><quotas><default/></quotas>
  <users>
    <default><password/><networks><ip>::1</ip></networks><profile>default</profile><quota>default</quota></default>
    <{USER}>
      <password>{PASSWORD}</password><networks><ip>127.0.0.1</ip></networks><profile>default</profile><quota>default</quota>
      <access_management>1</access_management>
    </{USER}>
  </users>
</clickhouse>"""
CONFIG = """<clickhouse>
  <user_directories><users_xml><path>{users}</path></users_xml></user_directories>
  <logger><level>error</level><console>1</console></logger>
  {more}
</clickhouse>"""
SHARD = (
    "<shard><replica><host>127.0.0.1</host><port>{port}</port>"
    f"<user>{USER}</user><password>{PASSWORD}</password></replica></shard>"
)


def fetch() -> Path:
    """Return the library. The first call on a machine downloads it (170 MB) while others wait."""
    if LIBRARY.exists():
        return LIBRARY
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    with (LIBRARY.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not LIBRARY.exists():
            with tempfile.TemporaryDirectory(dir=LIBRARY.parent) as aside:
                _download(Path(aside)).rename(LIBRARY)
    return LIBRARY


def _download(aside: Path) -> Path:
    subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=aside, check=True, stdout=subprocess.DEVNULL)
    (packed,) = aside.glob("*.tgz")
    digest = hashlib.sha256(packed.read_bytes()).hexdigest()
    if digest != SHA256:
        raise RuntimeError(f"{PACKAGE} is not what it was ({digest}). No ClickHouse to test with. Look at what changed.")
    with tarfile.open(packed) as archive:
        member = archive.extractfile("package/libchdb.so")
        assert member is not None
        with (aside / "libchdb.so").open("wb") as out:
            shutil.copyfileobj(member, out, 1 << 20)
    return aside / "libchdb.so"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One ClickHouse over one folder, on the same ports each time it starts.

    It is restarted when it exits, as a supervisor would do: 26.7 aborts on an uncaught exception when a connection breaks
    at a bad moment.
    """

    def __init__(self, folder: Path, *, config: str = "", http: int = 0, tcp: int = 0) -> None:
        self.folder = folder
        self.http, self.tcp = http or free_port(), tcp or free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self._lock = threading.RLock()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "users.xml").write_text(USERS)
        (folder / "config.xml").write_text(CONFIG.format(users=folder / "users.xml", more=config))

    @property
    def url(self) -> str:
        return f"clickhouse://{USER}:{PASSWORD}@127.0.0.1:{self.http}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> Server:
        words = [str(fetch()), str(self.folder), str(self.http), str(self.tcp)]
        with self._lock:
            with (self.folder / "server.log").open("ab") as log:
                self.process = subprocess.Popen(
                    [sys.executable, __file__, *words], stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
                )
            self._wait()
            threading.Thread(target=self._look_after, args=[self.process], daemon=True).start()
        return self

    def _look_after(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        with self._lock:
            if self.process is process:
                self.restart()

    def _wait(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process is not None and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.http}/ping", timeout=2):
                    return
            except OSError:
                time.sleep(0.02)
        self.kill()
        raise AssertionError("ClickHouse did not start:\n" + (self.folder / "server.log").read_text()[-3000:])

    def kill(self, how: int = signal.SIGKILL) -> None:
        """Kill the server, as in a crash."""
        with self._lock:
            process, self.process = self.process, None
        if process is not None:
            process.send_signal(how)
            process.wait(60)
            assert process.stdin is not None
            process.stdin.close()

    def stop(self) -> None:
        """Ask the server to shut down."""
        self.kill(signal.SIGTERM)

    def restart(self) -> Server:
        """Kill the server and start it again over the same folder."""
        self.kill()
        return self.start()

    def client(self, database: str = "default", **settings: Any) -> Any:
        """Return a clickhouse-connect client."""
        import clickhouse_connect

        return clickhouse_connect.get_client(
            host="127.0.0.1", port=self.http, username=USER, password=PASSWORD, database=database,
            autogenerate_session_id=False, settings=settings,
        )  # fmt: skip


class Database:
    """A test's own database on a shared server."""

    def __init__(self, servers: Sequence[Server], name: str) -> None:
        self.servers, self.name = servers, name
        for server in servers:
            server.client().command(f"CREATE DATABASE {name}")

    @property
    def server(self) -> Server:
        return self.servers[0]

    @property
    def url(self) -> str:
        return f"{self.server.url}/{self.name}"

    def client(self, shard: int = 0) -> Any:
        return self.servers[shard].client(self.name)

    def drop(self) -> None:
        for server in self.servers:
            server.client().command(f"DROP DATABASE IF EXISTS {self.name} SYNC")


def cluster(folder: Path, count: int = 3, name: str = "fleet") -> list[Server]:
    """Return servers configured as the shards of one cluster, not yet started."""
    ports = [free_port() for _ in range(count)]
    known = "".join(SHARD.format(port=port) for port in ports)
    config = f"<remote_servers><{name}>{known}</{name}></remote_servers>"
    return [Server(folder / f"shard{at}", config=config, tcp=port) for at, port in enumerate(ports)]


# The server process


def _serve(library: str, folder: str, http: str, tcp: str) -> None:
    _end_with_parent()
    words = ["clickhouse", f"--config-file={folder}/config.xml", f"--path={folder}/data"]
    words += [f"--http_port={http}", f"--tcp_port={tcp}", "--listen_host=127.0.0.1"]
    words += ["--output-format=TabSeparated", f"--query={LISTEN}"]  # also sets the default for HTTP, which clients rely on
    engine = ctypes.CDLL(library)
    engine.chdb_query_cmdline.restype = ctypes.c_void_p
    engine.chdb_result_error.restype = ctypes.c_char_p
    engine.chdb_result_error.argtypes = [ctypes.c_void_p]
    answer = engine.chdb_query_cmdline(len(words), (ctypes.c_char_p * len(words))(*(word.encode() for word in words)))
    print("stopped:", engine.chdb_result_error(answer) if answer else "no answer", file=sys.stderr)


def _end_with_parent() -> None:
    """Exit when the parent process is gone, even after kill -9: the other end of stdin is then closed."""
    line = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def watch() -> None:
        os.read(line, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    if sys.argv[1:] == ["fetch"]:
        print(fetch())
    else:
        _serve(*sys.argv[1:])
