"""Reads rows, mappings of column names to values, from files and from Python's tables.

Files: CSV and TSV (values are texts), JSON lines, Parquet (with the extra `datasets`). All are read
piece by piece, and may be read again.
"""

import csv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from mlx_rq.jobs.batch.lines import Line, bad_line, good_line, is_id, parse_object, read_lines
from mlx_rq.jobs.batch.templates import ChatTemplate
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.surrogates import writable

_FIELD_BYTES = 32 * 1024 * 1024
_PARQUET_BATCH = 1000
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_JSON_LINES = (".jsonl", ".ndjson")
ROW_URL = "/v1/chat/completions"


class Row(NamedTuple):
    """A row with its number (from 1; of JSON lines: the line's), or what is wrong with it."""

    number: int
    values: Mapping[str, Any]
    fault: RequestError | None = None
    raw: bytes = b""


def open_table(path: Path, name: str, suffix: str) -> "Table":
    """Opens a file of rows by its suffix; raises RequestError where it is not one that is known."""
    if suffix in _DELIMITERS:
        return CsvTable(path, name, _DELIMITERS[suffix])
    if suffix in _JSON_LINES:
        return JsonTable(path)
    if suffix == ".parquet":
        return ParquetTable(path, name)
    known = ", ".join((*_DELIMITERS, *_JSON_LINES, ".parquet"))
    raise RequestError(
        f"{name}: rows are read from files that end in {known}.", code="invalid_value"
    )


class CsvTable:
    """The rows of a CSV file with a header."""

    unit = "row"

    def __init__(self, path: Path, name: str, delimiter: str) -> None:
        self._path, self._name, self._delimiter = path, name, delimiter
        self.columns: list[str] = next(self._records(), [])
        if repeated := {name for name in self.columns if self.columns.count(name) > 1}:
            raise RequestError(
                f"{name}: the header repeats {', '.join(map(repr, sorted(repeated)))}.",
                code="invalid_value",
            )

    def __iter__(self) -> Iterator[Row]:
        records = self._records()
        next(records, None)
        for number, values in enumerate(records, 1):
            fault = None
            if len(values) != len(self.columns):
                fault = RequestError(
                    f"The row has {len(values)} values; the header names {len(self.columns)} "
                    "columns.",
                    code="invalid_row",
                )
            yield Row(number, dict(zip(self.columns, values, strict=False)), fault)

    def _records(self) -> Iterator[list[str]]:
        csv.field_size_limit(_FIELD_BYTES)
        with self._path.open(encoding="utf-8-sig", newline="") as file:
            # Strict: a quote that is never closed would swallow the rest of the file.
            reader = csv.reader(file, delimiter=self._delimiter, strict=True)
            try:
                yield from filter(None, reader)
            except (csv.Error, UnicodeDecodeError) as error:
                raise RequestError(
                    f"{self._name}, after line {reader.line_num}: {error}. "
                    "CSV files are read as UTF-8, with double quotes around values.",
                    code="invalid_row",
                ) from None


@dataclass
class JsonTable:
    """The rows of a file with one JSON object a line."""

    path: Path
    unit = "line"
    columns = None

    def __iter__(self) -> Iterator[Row]:
        for number, raw in read_lines(self.path):
            try:
                yield _json_row(number, raw)
            except RequestError as error:
                yield Row(number, {}, error, raw)


def _json_row(number: int, raw: bytes) -> Row:
    """Reads a row; where it holds what no file can, that is its fault, and `?` stands there."""
    values = parse_object(raw)
    if b"\\ud" not in raw.lower():
        return Row(number, values, raw=raw)
    written = writable(values)
    if written is values:
        return Row(number, values, raw=raw)
    fault = RequestError(
        'The row holds half of a surrogate pair (as in "\\ud800"), which is no text.',
        code="invalid_row",
    )
    return Row(number, written, fault, raw)


class ParquetTable:
    """The rows of a Parquet file."""

    unit = "row"

    def __init__(self, path: Path, name: str) -> None:
        self._name = name
        self._file, self.columns = _open_parquet(path, name)

    def __iter__(self) -> Iterator[Row]:
        number = 0
        try:
            for batch in self._file.iter_batches(batch_size=_PARQUET_BATCH):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(number, values)
        except (OSError, ValueError) as error:  # as text that is not UTF-8, or a broken page
            raise RequestError(
                f"{self._name}, after row {number}: {error}", code="invalid_row"
            ) from None


def _open_parquet(path: Path, name: str) -> tuple[Any, list[str]]:
    """Opens a file and reads the names of its columns."""
    parquet = needs_pyarrow("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(path)
        return file, file.schema_arrow.names
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise RequestError(f"{name} is not a Parquet file: {error}", code="invalid_value") from None


def needs_pyarrow(module: str) -> Any:
    """Imports a module of pyarrow; raises RequestError with the remedy where it is missing."""
    try:
        return import_module(module)
    except ModuleNotFoundError:
        raise RequestError(
            "Parquet needs pyarrow: pip install 'mlx-rq[datasets]'", code="missing_package"
        ) from None


Table = CsvTable | JsonTable | ParquetTable
"""A file of rows. `columns` are those that every row has; None where each brings its own."""


@dataclass(frozen=True)
class TemplatedRows:
    """The requests that a template makes of a file's rows.

    A row is called by the value of its `id_column`; without one, by its number.
    """

    table: Table
    name: str
    template: ChatTemplate
    id_column: str | None = None

    def __post_init__(self) -> None:
        if self.table.columns is None:
            return
        self.template.check(self.table.columns, self.name)
        if self.id_column is not None and self.id_column not in self.table.columns:
            raise self._no_id(f"which {self.name} does not have")

    @property
    def unit(self) -> str:
        return self.table.unit

    def __iter__(self) -> Iterator[Line]:
        for row in self.table:
            try:
                if row.fault is not None:
                    raise row.fault
                body = self.template.body(row.values)
                yield good_line(row.number, self._custom_id(row), ROW_URL, body, row.values)
            except RequestError as error:
                raw = row.raw or repr(row.values).encode(errors="replace")
                yield bad_line(row.number, error, raw, row=row.values)

    def _custom_id(self, row: Row) -> str:
        if self.id_column is None:
            return f"row-{row.number}"
        value = row.values.get(self.id_column)
        custom_id = "" if value is None else str(value)
        if not is_id(custom_id):
            raise self._no_id("which holds no text here")
        return custom_id

    def _no_id(self, fault: str) -> RequestError:
        return RequestError(
            f"'--id-column' names {self.id_column!r}, {fault}.",
            code="missing_column",
            param=self.id_column,
        )


def iterate_rows(rows: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the rows of whatever holds rows, as mappings, without importing its library.

    Polars frames, pyarrow tables and pandas frames have their own ways; all else (lists,
    generators, Hugging Face datasets) is iterated.
    """
    if hasattr(rows, "iter_rows"):  # polars
        return iter(rows.iter_rows(named=True))
    if hasattr(rows, "to_pylist") and hasattr(rows, "to_batches"):  # pyarrow
        return (row for batch in rows.to_batches() for row in batch.to_pylist())
    if hasattr(rows, "iterrows"):  # pandas
        nulled = rows.astype(object).where(rows.notna(), None)  # NaN, NA and NaT alike
        return iter(nulled.to_dict(orient="records"))
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        raise TypeError(
            f"rows: expected an iterable of mappings or a table, but got a {type(rows).__name__}"
        )
    return iter(rows)
