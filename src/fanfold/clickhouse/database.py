"""Connection to ClickHouse: columns in, columns out, and one error class for "not now"."""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ..errors import FanfoldError, missing_extra
from .address import ClickHouseAddress

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Column = NDArray[Any] | Sequence[Any]

# Server errors that a retry does not fix: the statement itself is wrong or not permitted.
_FINAL = frozenset({36, 43, 46, 47, 53, 60, 62, 81, 192, 193, 194, 497, 516})
_WRITING = {
    "async_insert": 0,
    "max_insert_block_size": 100_000_000,  # one insert is one block, stored completely or not at all, under one token
    "min_insert_block_size_rows": 0,
    "min_insert_block_size_bytes": 0,
    "max_insert_threads": 1,
    "insert_deduplicate": 1,
    "deduplicate_blocks_in_dependent_materialized_views": 1,
    "distributed_foreground_insert": 1,
}
_READING = {
    "distributed_product_mode": "local",  # all tables are sharded by run, so rows that belong together are on one server
    "max_execution_time": 60,  # seconds; after that nobody waits for the answer
    "prefer_column_name_to_alias": 1,
    "output_format_arrow_string_as_string": 0,
    "output_format_arrow_compression_method": "none",
}


class DatabaseUnavailable(OSError):
    """Raised when the database cannot be reached, or cannot do this now. Retry later."""


class Numbers:
    """A list of whole numbers as a parameter: the client takes it as text, and does not format each of thousands by itself."""

    def __init__(self, values: list[int]) -> None:
        self._text = str(values)

    def __str__(self) -> str:
        return self._text


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


class Database:
    """One database on one server. Threads may share it."""

    def __init__(self, address: ClickHouseAddress, *, timeout: float = 30.0) -> None:
        self.address = address
        self.timeout = timeout
        self._client: Any = None
        self._threads: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    def ask(self, sql: str, **parameters: Any) -> dict[str, NDArray[Any]]:
        """Run a query and return its columns by name, texts as bytes. `{name:Type}` is a placeholder for a parameter."""
        with self._told():
            given = {name: Numbers(value) if _are_numbers(value) else value for name, value in parameters.items()}
            table = self._connected().query_arrow(sql, parameters=given or None, settings=_READING, use_strings=False)
            return {name: table.column(name).to_numpy() for name in table.column_names}

    def later(self, sql: str, **parameters: Any) -> Future[dict[str, NDArray[Any]]]:
        """Run a query concurrently with others."""
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(4, "fanfold-clickhouse-ask")
        return self._threads.submit(self.ask, sql, **parameters)

    def one(self, sql: str, **parameters: Any) -> dict[str, Any]:
        """Return the only row of a query."""
        return {name: column[0] for name, column in self.ask(sql, **parameters).items() if len(column)}

    def run(self, sql: str, **parameters: Any) -> None:
        """Run a statement that returns nothing."""
        with self._told():
            self._connected().command(sql, parameters=parameters or None)

    def insert(self, table: str, columns: Mapping[str, Column], *, token: str = "") -> None:
        """Insert columns as one block. One with a token that was used before is not stored again; one without always is."""
        import pyarrow as pa

        with self._told():
            settings = {**_WRITING, "insert_deduplication_token": token or secrets.token_hex(16)}
            arrow = pa.table({name: _arrow(pa, column) for name, column in columns.items()})
            self._connected().insert_arrow(table, arrow, settings=settings)

    def _told(self) -> contextlib.AbstractContextManager[None]:
        self._connected()  # raises if the library is missing
        return _errors()

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)
        if client is not None:
            client.close()

    def _connected(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = self._connect()
            return self._client

    def _connect(self) -> Any:
        try:
            import clickhouse_connect
            import pyarrow  # noqa: F401 - columns are transferred as Arrow
        except ImportError as error:
            raise missing_extra("clickhouse-connect", "clickhouse", "The ClickHouse store") from error
        logging.getLogger("clickhouse_connect").addHandler(logging.NullHandler())  # we report errors ourselves, once
        at = self.address
        more: dict[str, Any] = {"ca_cert": at.ca} if at.ca else {}
        with _errors():
            return clickhouse_connect.get_client(
            host=at.host, port=at.port, username=at.user, password=at.password, secure=at.secure, database=at.database,
            autogenerate_session_id=False, send_receive_timeout=self.timeout, connect_timeout=10, query_retries=0,
            compress=False, client_name="fanfold", **more,
        )  # fmt: skip


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    """Convert the library's errors to ours: Unavailable if a retry may help, FanfoldError otherwise."""
    from clickhouse_connect.driver.exceptions import Error
    from urllib3.exceptions import HTTPError

    try:
        yield
    except Error as error:
        if getattr(error, "code", None) in _FINAL:
            raise FanfoldError(f"ClickHouse refuses: {_short(error)}") from error
        raise DatabaseUnavailable(_short(error)) from error
    except HTTPError as error:
        raise DatabaseUnavailable(_short(error)) from error


_REFUSED = re.compile(r"\[Errno -?\d+\] ([^\"')\]]+)")


def _short(error: Exception) -> str:
    """Return the library's long error message as one line."""
    text = " ".join(str(error).split())
    host = re.search(r"host='([^']+)', port=(\d+)", text)
    why = _REFUSED.search(text)
    if host and why:
        return f"ClickHouse at {host[1]}:{host[2]} cannot be reached: {why[1]}"
    return text[:500]


def _arrow(pa: Any, column: Any) -> Any:
    if isinstance(column, list) and column and isinstance(column[0], (bytes, str)):
        texts = [one.encode("utf-8", "surrogatepass") if isinstance(one, str) else one for one in column]
        return pa.array(texts, pa.large_binary())
    return pa.array(column)
