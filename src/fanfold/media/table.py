"""Tables with cells of any type, packed column by column so that numbers stay raw bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from fanfold.errors import clean_text
from fanfold.media import cells as cell_types
from fanfold.media import columns as column_types
from fanfold.media import dataframes
from fanfold.media.arrays import is_array
from fanfold.media.base import UNREADABLE, Encoded, Media, broken, refused
from fanfold.media.columns import Column

if TYPE_CHECKING:
    from fanfold.media.arrays import Array

UNREADABLE_TABLE: tuple[type[Exception], ...] = (*UNREADABLE, msgspec.MsgspecError)
VERSION = 1
MAX_COLUMNS = 16_384
CELL_BYTES = 32  # of memory for each byte of cells, at most, if they are no containers: of texts of one letter
CONTAINERS = bytes([*range(0x80, 0xA0), *range(0xDC, 0xE0)])  # the first byte of a list or dict in msgpack
CONTAINER_BYTES = 72  # of an empty one
NAMED = 256  # column names included in the frame; the blob has all


class _Column(msgspec.Struct):
    """A column on disk: numbers have `dtype` and `data`, anything else has `cells`."""

    name: str
    dtype: str | None = None
    data: bytearray | None = None  # writable, so that numpy can use it without a copy
    valid: bytearray | None = None
    zone: str | None = None
    cells: list[Any] | None = None


class _Content(msgspec.Struct):
    version: int
    rows: int
    columns: Annotated[list[_Column], msgspec.Meta(max_length=MAX_COLUMNS)]


class _RawColumn(msgspec.Struct):
    """A column whose cells are not decoded."""

    cells: msgspec.Raw = msgspec.Raw()


class _RawContent(msgspec.Struct):
    columns: Annotated[list[_RawColumn], msgspec.Meta(max_length=MAX_COLUMNS)]


class Table(Media):
    """A table: rows (`data=`) under `columns=`, a dict of columns, a list of dicts, or a DataFrame.

    Cells hold numbers, strings, bools, None, dates, bytes, arrays, lists, dicts and media. `add_data` appends a row; tables
    logged before keep the rows they had. A pandas, polars or Arrow frame is read later, in the encoding thread.

    Args:
        columns: The names of the columns, or the data itself.
        data: The rows.
        dataframe: A pandas, polars or Arrow frame.

    Raises:
        ValueError: A row does not fit the columns.

    Example:
        ```python
        import fanfold

        run = fanfold.init("evals")
        table = fanfold.Table(columns=["prompt", "answer", "score"])
        table.add_data("2 + 2", "4", 1.0)
        run.log({"answers": table})
        ```
    """

    kind: ClassVar[str] = "table"

    def __init__(self, columns: Any = None, data: Any = None, *, dataframe: Any = None) -> None:
        if isinstance(columns, Mapping) or dataframes.is_frame(columns):
            columns, data = None, columns if data is None and dataframe is None else _twice()
        if dataframe is not None:
            data = dataframe if data is None else _twice()
        self._frame: Any = None
        self._columns: list[Column] = []
        self._rows = 0
        self._shared = False  # whether another Table reads the same lists
        self._late: list[Media] = []  # collected when added, so that waiting() need not scan every cell
        self.columns: list[str] = []
        self._fill(None if columns is None else _names(columns), data)

    def _fill(self, names: list[str] | None, data: Any) -> None:
        if dataframes.is_frame(data):
            self.columns = _names(dataframes.names(data) if names is None else names)
            wide = len(dataframes.names(data))
            if len(self.columns) != wide:
                raise refused(ValueError, f"Table got {len(self.columns)} names for {wide} columns", "Name each")
            self._frame, self._rows = dataframes.snapshot(data), int(data.shape[0])
        elif isinstance(data, Mapping):
            self.columns = _names(data) if names is None else names
            self._take([column_types.column_of(values, str(name)) for name, values in data.items()])
        elif is_array(data):
            self.columns = names or []
            self._take([column_types.column_of(data[:, i], str(i)) for i in range(_wide(data))])
        else:
            self._fill_rows(names, [] if data is None else list(data))

    def _fill_rows(self, names: list[str] | None, rows: list[Any]) -> None:
        if rows and all(isinstance(row, Mapping) for row in rows):
            names = names or _names(dict.fromkeys(key for row in rows for key in row))
            rows = [[row.get(name) for name in names] for row in rows]
        self.columns = names or []
        widths = set(map(len, rows))
        if widths - {len(self.columns)}:
            raise refused(
                ValueError,
                f"Table got rows of {sorted(widths)} cells for {len(self.columns)} columns",
                "Give each row one cell a column",
            )
        columns = zip(*rows, strict=True) if rows else ([] for _ in self.columns)
        self._take([Column(cells=column_types.cleaned(cells)) for cells in columns])

    def _take(self, columns: list[Column]) -> None:
        lengths = {len(column) for column in columns}
        if len(columns) != len(self.columns) or len(lengths) > 1:
            raise refused(
                ValueError,
                f"Table got {len(columns)} columns of {sorted(lengths)[:8]} rows under {len(self.columns)} names",
                "Give each the same length, and a name",
            )
        self._columns, self._rows = columns, max(lengths, default=0)
        self._late = [part for column in columns for part in column.waiting()]

    def __len__(self) -> int:
        return self._rows

    def add_data(self, *row: Any) -> None:
        """Append one row, one argument per column.

        Args:
            row: The cells.

        Raises:
            ValueError: There are not as many cells as columns.
        """
        if len(row) != len(self.columns):
            raise refused(
                ValueError,
                f"add_data got {len(row)} cells for {len(self.columns)} columns",
                f"Give one for each of {self.columns}",
            )
        cells = [cell_types.clean(cell) for cell in row]
        for column, cell in zip(self._growing(), cells, strict=True):
            column.append(cell)
        self._rows += 1
        self._late += cell_types.pending_in(cells)

    def _growing(self) -> list[list[Any]]:
        """Return the columns as lists that only this table appends to."""
        if self._frame is not None or self._shared or any(column.cells is None for column in self._columns):
            self._columns = [Column(cells=column_types.listed(column)) for column in self._settled()]
            self._frame, self._shared = None, False
        return [column.cells for column in self._columns if column.cells is not None]

    def snapshot(self) -> Table:
        copy = type(self).__new__(type(self))
        # The lists are shared: this table only ever appends to them, and the copy knows how many rows are its own.
        copy.__dict__.update(self.__dict__, columns=list(self.columns), _columns=list(self._columns))
        copy.__dict__.update(_late=list(self._late), _shared=True)
        return copy

    def waiting(self) -> list[Media]:
        self._late = [part for part in self._late if part.pending is not None]
        return list(self._late)

    def _settled(self, *names: str) -> list[Column]:
        """Return columns as numbers or cells, limited to this table's own rows."""
        if self._frame is not None:
            self._columns, self._frame = dataframes.columns(self._frame), None
        chosen = [self._columns[self.columns.index(name)] for name in names] if names else self._columns
        return [column.first(self._rows) for column in chosen]

    def encode(self) -> Encoded:
        packed = [column_types.pack(clean_text(str(name)), column) for name, column in self._named()]
        data = msgspec.msgpack.encode({"version": VERSION, "rows": self._rows, "columns": packed})
        told = [clean_text(str(name)) for name in self.columns[:NAMED]]
        return Encoded(data, "table", {"rows": self._rows, "columns": told, "width": len(self.columns)})

    def restore(self, meta: Mapping[str, Any], data: bytes) -> None:
        try:
            self.columns, self._columns, self._rows = _read(data)
        except UNREADABLE_TABLE as error:
            raise broken("table", error) from error
        self._frame, self._shared, self._late = None, False, []

    @property
    def rows(self) -> list[list[Any]]:
        """The rows, as lists of Python values."""
        columns = [column_types.listed(column) for column in self._settled()]
        return [list(row) for row in zip(*columns, strict=True)]

    def column(self, name: str) -> Array | list[Any]:
        """Return one column: a numpy array if all cells are numbers, else a list.

        Args:
            name: The name of the column.

        Returns:
            Its cells.

        Raises:
            KeyError: There is no such column.
        """
        if name not in self.columns:
            raise KeyError(f"No column {name!r}. Nothing was read. Use one of {self.columns}.")
        column = column_types.narrowed(self._settled(name)[0])
        plain_numbers = column.values is not None and column.valid is None and column.zone is None
        return column.values if plain_numbers and column.values is not None else column_types.listed(column)

    def _named(self) -> list[tuple[str, Column]]:
        return list(zip(self.columns, self._settled(), strict=True))

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame.

        Returns:
            The table.

        Raises:
            MissingExtra: pandas is not installed.
        """
        return dataframes.to_pandas(self._named())

    def to_polars(self) -> Any:
        """Return a polars DataFrame.

        Returns:
            The table.

        Raises:
            MissingExtra: polars is not installed.
        """
        return dataframes.to_polars(self._named())

    def to_arrow(self) -> Any:
        """Return an Arrow table; media become their encoded bytes.

        Returns:
            The table.

        Raises:
            MissingExtra: pyarrow is not installed.
        """
        return dataframes.to_arrow(self._named())


def _twice() -> Any:
    raise refused(ValueError, "Table got its content twice", "Pass one of data=, dataframe= or a dict of columns")


def _names(columns: Any) -> list[str]:
    if isinstance(columns, str) or not isinstance(columns, (Sequence, Mapping)):
        columns = list(columns) if not isinstance(columns, str) else _bad_names(columns)
    names = [str(name) for name in columns]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice or len(names) > MAX_COLUMNS:
        what = f"column names more than once: {twice[:8]}" if twice else f"{len(names)} columns"
        raise refused(ValueError, f"Table got {what}", f"Give each its own name, at most {MAX_COLUMNS}")
    return names


def _bad_names(columns: str) -> Any:
    raise refused(TypeError, f"Table got columns={columns!r}", "Pass a list of names")


def _wide(data: Any) -> int:
    if len(data.shape) != 2:
        raise refused(ValueError, f"Table got an array of shape {tuple(data.shape)}", "Give two axes, (rows, columns)")
    return int(data.shape[1])


def memory_needed(data: bytes) -> int:
    """Return about how many bytes of memory a blob takes once decoded, at most; decoding nothing but the columns' frames."""
    try:
        content = msgspec.msgpack.decode(data, type=_RawContent)
    except msgspec.MsgspecError as error:
        raise broken("table", error) from error
    cells = [memoryview(column.cells).tobytes() for column in content.columns]
    containers = sum(len(part) - len(part.translate(None, CONTAINERS)) for part in cells)
    return len(data) + CELL_BYTES * sum(map(len, cells)) + CONTAINER_BYTES * containers


def _read(data: bytes) -> tuple[list[str], list[Column], int]:
    """Decode a blob, trusting nothing in it."""
    content = msgspec.msgpack.decode(data, type=_Content, ext_hook=cell_types.unpack)
    if content.version != VERSION:
        raise ValueError(f"it is of version {content.version}, and this fanfold reads {VERSION}")
    names = [column.name for column in content.columns]
    fits = 0 <= content.rows < 2**48 if names else content.rows == 0
    if len(names) > MAX_COLUMNS or len(set(names)) < len(names) or not fits:
        raise ValueError(f"{content.rows} rows under {len(names)} names are not a table")
    return names, [column_types.unpack(column, content.rows) for column in content.columns], content.rows
