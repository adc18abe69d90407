"""Reads rows, mappings of column names to values, from files and from Python's tables.

Files: CSV and TSV (values are texts), JSON lines, Parquet (`parquet.py`). All are read piece by
piece, and may be read again.
"""

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_rq.jobs.batch.compression import open_input, to_utf8
from mlx_rq.jobs.batch.formats import (
    DELIMITERS,
    JSON_LINES,
    check_beginning,
    check_delimiter,
    unknown_ending,
)
from mlx_rq.jobs.batch.lines import Line, bad_line, good_line, is_id, parse_object, read_lines
from mlx_rq.jobs.batch.parquet import ParquetTable, needs_pyarrow, python_rows, python_values
from mlx_rq.jobs.batch.rows import Row, check_names
from mlx_rq.jobs.batch.templates import ChatTemplate, cell_text
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.surrogates import writable
from mlx_rq.jobs.openai.validation import short

_FIELD_BYTES = 32 * 1024 * 1024
ROW_URL = "/v1/chat/completions"

_NANOSECONDS = re.compile(r"'ns'|\bTime\b")
"""In the names of polars' types that count them; a `Time` always does."""


def open_table(path: Path, name: str, suffix: str, delimiter: str | None = None) -> "Table":
    """Opens a file of rows by its suffix; raises RequestError where it is not one that is known.

    `delimiter` is what parts the values of a CSV file, where it is not what its suffix says.
    """
    if suffix not in (*DELIMITERS, *JSON_LINES, ".parquet"):
        raise unknown_ending(name, suffix)
    check_beginning(path, name, suffix)
    if suffix == ".parquet":
        return ParquetTable(path, name)
    if suffix in JSON_LINES:
        return JsonTable(path, name)
    usual = DELIMITERS[suffix]
    if delimiter is None:
        check_delimiter(path, name, usual)
    return CsvTable(path, name, delimiter or usual)


class CsvTable:
    """The rows of a CSV file with a header."""

    unit = "row"

    def __init__(self, path: Path, name: str, delimiter: str) -> None:
        self._path, self._name, self._delimiter = path, name, delimiter
        self.columns: list[str] = next(self._records(), [])
        if not self.columns:
            raise RequestError(f"{name} holds no header and no rows.", code="empty_file")
        check_names(self.columns, f"{name}: the header")

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
        with (
            open_input(self._path, self._name) as raw,
            io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file,
        ):
            # Strict: a quote that is never closed would swallow the rest of the file.
            reader = csv.reader(file, delimiter=self._delimiter, strict=True)
            try:
                yield from filter(None, reader)
            except (csv.Error, UnicodeDecodeError) as error:
                cure = ""
                if isinstance(error, UnicodeDecodeError):
                    cure = f" Where it is of Windows: {to_utf8('WINDOWS-1252', self._name)}"
                raise RequestError(
                    f"{self._name}, after line {reader.line_num}: {error}. "
                    f"CSV files are read as UTF-8, with double quotes around values.{cure}",
                    code="invalid_row",
                ) from None


@dataclass
class JsonTable:
    """The rows of a file with one JSON object a line."""

    path: Path
    name: str
    unit = "line"
    columns = None

    def __iter__(self) -> Iterator[Row]:
        for number, raw in read_lines(self.path, self.name, open_input):
            try:
                yield _json_row(number, raw)
            except RequestError as error:
                yield Row(number, {}, error, raw)


def _json_row(number: int, raw: bytes) -> Row:
    """Reads a row; where it holds what no file can, that is its fault, and `?` stands there."""
    values = parse_object(raw)
    _check_values(raw)
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


def _check_values(raw: bytes) -> None:
    """Raises RequestError where an object of the row has a key twice, or a number is endless."""
    try:
        json.loads(raw, object_pairs_hook=_check_pairs, parse_float=_check_number)
    except RequestError:
        raise
    except (ValueError, RecursionError):
        pass  # numbers and depths that were read another way


def _check_pairs(pairs: list[tuple[str, Any]]) -> None:
    check_names((name for name, _ in pairs), "The row", code="invalid_row")


def _check_number(text: str) -> None:
    if math.isinf(float(text)):
        raise RequestError(
            f"The number {short(text)} is larger than any that is read; write it as a text.",
            code="invalid_row",
        )


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
        custom_id = cell_text(value, self.id_column)
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
    generators, Hugging Face datasets) is iterated. Raises RequestError where columns share a name.
    """
    if hasattr(rows, "iter_rows"):  # polars
        return _polars_rows(rows)
    if hasattr(rows, "to_pylist") and hasattr(rows, "to_batches"):  # pyarrow
        check_names(rows.schema.names, "'rows': the schema")
        return (row for batch in rows.to_batches() for row in python_rows(batch))
    if hasattr(rows, "iterrows"):  # pandas
        check_names(rows.columns, "'rows': the header")
        return _pandas_rows(rows)
    if isinstance(rows, Mapping) or not isinstance(rows, Iterable):
        raise TypeError(
            f"rows: expected an iterable of mappings or a table, but got a {type(rows).__name__}"
        )
    return _mappings(rows)


def _mappings(rows: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise TypeError(f"rows: expected mappings, but row {number} is a {type(row).__name__}")
        yield row


def _polars_rows(frame: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the rows of a polars frame, which would cut nanoseconds off."""
    fine = {name for name, kind in frame.schema.items() if _NANOSECONDS.search(str(kind))}
    if not fine:
        yield from frame.iter_rows(named=True)
        return
    needs_pyarrow("pyarrow", "A polars frame with nanoseconds")
    columns = [
        python_values(frame[name].to_arrow()) if name in fine else frame[name].to_list()
        for name in frame.columns
    ]
    for values in zip(*columns, strict=True):
        yield dict(zip(frame.columns, values, strict=True))


def _pandas_rows(frame: Any) -> Iterator[dict[Any, Any]]:
    """Yields the rows of a pandas frame; NaN, NA and NaT alike are None."""
    columns = [_pandas_values(frame[name]) for name in frame.columns]
    for values in zip(*columns, strict=True):
        yield dict(zip(frame.columns, values, strict=True))


def _pandas_values(series: Any) -> list[Any]:
    if not hasattr(series.dtype, "pyarrow_dtype"):
        values: list[Any] = series.astype(object).where(series.notna(), None).tolist()
        return values
    # pandas' own way makes floats of integers in lists that have nulls.
    values = python_values(needs_pyarrow("pyarrow").array(series))
    missing = series.isna()
    return [None if null else value for value, null in zip(values, missing, strict=True)]
