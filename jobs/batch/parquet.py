"""Reads Parquet files as rows. pyarrow is needed (the extra `datasets`).

What Python has no exact value for (nanoseconds, dates after the year 9999) is given as text.
"""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from mlx_rq.jobs.batch.rows import Row, check_names
from mlx_rq.jobs.openai.errors import RequestError

_BATCH_ROWS = 1000


def needs_pyarrow(module: str, what: str = "Parquet") -> Any:
    """Imports a module of pyarrow; raises RequestError with the remedy where it is missing."""
    try:
        return import_module(module)
    except ModuleNotFoundError:
        raise RequestError(
            f"{what} needs pyarrow: pip install 'mlx-rq[datasets]'", code="missing_package"
        ) from None


class ParquetTable:
    """The rows of a Parquet file. `schema` is Arrow's."""

    unit = "row"

    def __init__(self, path: Path, name: str) -> None:
        parquet = needs_pyarrow("pyarrow.parquet")
        self._name = name
        try:
            self._file = parquet.ParquetFile(path)
            self.schema = self._file.schema_arrow
        except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
            raise RequestError(
                f"{name} is not a Parquet file: {error}", code="invalid_value"
            ) from None
        self.columns: list[str] = self.schema.names
        check_names(self.columns, f"{name}: the schema")

    def __iter__(self) -> Iterator[Row]:
        number = 0
        try:
            for batch in self.batches():
                for values in python_rows(batch):
                    number += 1
                    yield Row(number, values)
        except (OSError, ValueError) as error:  # as text that is not UTF-8, or a broken page
            raise RequestError(
                f"{self._name}, after row {number}: {error}", code="invalid_row"
            ) from None

    def batches(self) -> Iterator[Any]:
        """Yields the rows as they are stored, some at a time."""
        yield from self._file.iter_batches(batch_size=_BATCH_ROWS)


def python_rows(batch: Any) -> Iterator[dict[str, Any]]:
    """Yields the rows of an Arrow batch, the same whether or not pandas is installed."""
    columns = [python_values(column) for column in batch.columns]
    named = dict(zip(batch.schema.names, columns, strict=True))
    for index in range(batch.num_rows):
        yield {name: values[index] for name, values in named.items()}


def python_values(column: Any) -> list[Any]:
    if "[ns" not in str(column.type):
        try:
            values: list[Any] = column.to_pylist()
            return values
        except UnicodeDecodeError:
            raise
        except (OverflowError, ValueError):
            pass  # one by one
    return [_python_value(scalar) for scalar in column]


def _python_value(scalar: Any) -> Any:
    pa = needs_pyarrow("pyarrow")
    kind = scalar.type
    if not scalar.is_valid:
        return None
    if pa.types.is_dictionary(kind):
        return _python_value(scalar.value)
    if pa.types.is_struct(kind):
        return {name: _python_value(value) for name, value in scalar.items()}
    if pa.types.is_map(kind):
        return [tuple(_python_value(pair).values()) for pair in scalar.values]
    if isinstance(scalar, pa.ListScalar):  # of whichever kind of list
        return [_python_value(item) for item in scalar.values]
    if pa.types.is_temporal(kind) and getattr(kind, "unit", None) == "ns":
        return _of_nanoseconds(scalar)
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        raise
    except (OverflowError, ValueError):
        return scalar.cast(pa.string()).as_py()


def _of_nanoseconds(scalar: Any) -> Any:
    """Gives a time as Python's where that is exact; otherwise as text with all nine digits."""
    pa = needs_pyarrow("pyarrow")
    kind = scalar.type
    microseconds, rest = divmod(scalar.value, 1000)
    if pa.types.is_timestamp(kind):
        coarse = pa.timestamp("us", kind.tz)
    else:
        coarse = pa.duration("us") if pa.types.is_duration(kind) else pa.time64("us")
    if not rest:
        return pa.scalar(microseconds, coarse).as_py()
    if not pa.types.is_duration(kind):
        return scalar.cast(pa.string()).as_py()
    whole = str(pa.scalar(microseconds, coarse).as_py())
    return f"{whole if '.' in whole else whole + '.000000'}{rest:03}"
