"""Writes rows as Parquet, every column with a type that holds all its values exactly.

Columns that come from a Parquet file are copied as they are stored there. The types of the others
are found by a first reading; rows are in memory a part at a time.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from mlx_rq.jobs.batch.parquet import ParquetTable, needs_pyarrow
from mlx_rq.jobs.batch.values import json_of, utf8_or_base64

PART_ROWS = 10_000
"""Rows in memory at once, and in a row group of Parquet."""

_EXACT_IN_DOUBLE = 2**53

Cells = dict[str, Any]


class ParquetWriter:
    """Writes rows, in one file or one after the other in several.

    `rows` are read once here; `known` are names of types of Arrow's. `stored` is the file whose
    columns are kept.
    """

    def __init__(
        self,
        rows: Iterable[Cells],
        columns: Sequence[str],
        known: Mapping[str, str],
        stored: ParquetTable | None,
    ) -> None:
        pa = needs_pyarrow("pyarrow")
        kept = [] if stored is None else list(stored.schema)
        self._kept = [field.name for field in kept]
        self._stored = None if stored is None else _Stored(stored.batches())
        others = [name for name in columns if name not in self._kept]
        types = _Types(others, known)
        for part in _parts(iter(rows)):
            types.see(part)
        self._made = pa.schema(types.fields())
        self._json = types.json_columns
        fields = {field.name: field for field in [*kept, *self._made]}
        metadata = None if stored is None else stored.schema.metadata
        self._schema = pa.schema([fields[name] for name in columns], metadata)

    def write(self, rows: Iterator[Cells], path: Path) -> None:
        """Writes a file of the next rows."""
        parquet = needs_pyarrow("pyarrow.parquet")
        with parquet.ParquetWriter(path, self._schema) as writer:
            for part in _parts(rows):
                writer.write_table(self._table(part))

    def _table(self, part: Sequence[Cells]) -> Any:
        pa = needs_pyarrow("pyarrow")
        for row in part:
            row.update({name: _json(row[name]) for name in self._json})
        made = pa.Table.from_pylist(part, schema=self._made)
        columns = dict(zip(made.schema.names, made.columns, strict=True))
        if self._stored is not None:
            stored = self._stored.take(len(part))
            columns |= {name: stored[name] for name in self._kept}
        return pa.table([columns[name] for name in self._schema.names], schema=self._schema)


class _Stored:
    """The rows of a file as they are stored, taken from its beginning on."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._left: list[Any] = []

    def take(self, count: int) -> Any:
        """Gives the next rows; fewer only where there are no more."""
        while sum(batch.num_rows for batch in self._left) < count:
            self._left.append(next(self._batches))
        table = needs_pyarrow("pyarrow").Table.from_batches(self._left)
        self._left = table.slice(count).to_batches()
        return table.slice(0, count)


class _Types:
    """The types of columns, as far as their values have been seen.

    A column whose values have no type in common that holds them exactly, as 1 and "a", or 0.5 and
    2**60 + 1, holds their JSON.
    """

    def __init__(self, columns: Sequence[str], known: Mapping[str, str]) -> None:
        self._pa = needs_pyarrow("pyarrow")
        self._types = {name: self._pa.type_for_alias(known.get(name, "null")) for name in columns}
        self._wide: set[str] = set()  # with integers that a double does not hold
        self.json_columns: set[str] = set()

    def see(self, part: Sequence[Cells]) -> None:
        """Takes the values of some rows into account."""
        for name in self._types.keys() - self.json_columns:
            values = [row[name] for row in part]
            try:
                self._types[name] = self._joined(self._types[name], self._pa.array(values).type)
            except (self._pa.ArrowException, OverflowError):
                self.json_columns.add(name)
            if name not in self._wide and any(map(_is_wide, values)):
                self._wide.add(name)

    def _joined(self, one: Any, other: Any) -> Any:
        pa = self._pa
        if pa.null() not in (one, other) and ("uint64" in str(one)) != ("uint64" in str(other)):
            raise pa.ArrowInvalid("no type of integers holds both")
        both = [pa.schema([("", one)]), pa.schema([("", other)])]
        return pa.unify_schemas(both, promote_options="permissive").field(0).type

    def fields(self) -> list[tuple[str, Any]]:
        """Gives the fields of the columns."""
        for name, type in self._types.items():
            inexact = name in self._wide and "double" in str(type)
            if inexact or "struct<>" in str(type):  # of which Parquet has no column
                self.json_columns.add(name)
            if name in self.json_columns or type == self._pa.null():
                self._types[name] = self._pa.string()
        return list(self._types.items())


def _is_wide(value: Any) -> bool:
    """Tells whether there is an integer in a value that a double does not hold."""
    match value:
        case int():
            return abs(value) > _EXACT_IN_DOUBLE
        case dict():
            return any(map(_is_wide, value.values()))
        case list():
            return any(map(_is_wide, value))
        case _:
            return False


def _parts(rows: Iterator[Cells]) -> Iterator[list[Cells]]:
    while part := list(islice(rows, PART_ROWS)):
        yield part


def _json(value: Any) -> str | None:
    return None if value is None else json_of(value, utf8_or_base64)
