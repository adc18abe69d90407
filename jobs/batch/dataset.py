"""Writes a dataset: the input's columns, the answers, errors and token counts, a row for each line.

The records lie in the order of the input, so the two are read side by side: nothing is looked up,
and nothing can be misaligned. Parquet needs pyarrow (the extra `datasets`), CSV does not.
"""

import csv
import io
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from mlx_rq.files import put_in_place, removed_on_error, temporary
from mlx_rq.jobs.batch.compression import open_output, split_ending
from mlx_rq.jobs.batch.lines import Source, input_changed
from mlx_rq.jobs.batch.parquet import ParquetTable
from mlx_rq.jobs.batch.parquet_writer import ParquetWriter
from mlx_rq.jobs.batch.records import code_of, read_stored
from mlx_rq.jobs.batch.tables import TemplatedRows
from mlx_rq.jobs.batch.values import plain_text, utf8_or_base64
from mlx_rq.jobs.openai.answers import finish_reason_of, text_of, usage_of, value_of
from mlx_rq.jobs.openai.errors import JobFailed
from mlx_rq.jobs.openai.surrogates import writable

SHARD_ROWS = 100_000
"""Rows in a file of a dataset folder."""

_BESIDE: Mapping[str, str | None] = {
    "error": "string",
    "finish_reason": "string",
    "prompt_tokens": "int64",
    "completion_tokens": "int64",
}
_TYPES = {"integer": "int64", "number": "double", "string": "string", "boolean": "bool"}
_DATASET_CARD = """\
---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/train-*.parquet
---

Generated with `mlx-rq batch`.
"""


@dataclass(frozen=True)
class Dataset:
    """What there is to write. `schema` is the JSON schema of structured answers, if any.

    An answer whose schema is an object with properties gets a column for each; any other answer
    gets the column `answer`. A name that the input or the columns beside the answers have already
    is prefixed with `answer_`, as often as it takes.
    """

    source: Source
    records: Path
    schema: Mapping[str, Any] | None = None

    def write(self, target: Path) -> None:
        """Writes a .parquet or .csv file, or a folder that `datasets.load_dataset` reads.

        A .csv may be compressed. What was there before stays whole until the new is.
        """
        table = _Table(self)
        suffix, ending = split_ending(target)
        if not suffix:
            _write_folder(table, target)
            return
        fresh = temporary(target)
        with removed_on_error(fresh):
            if suffix == ".csv":
                _write_csv(table, fresh, ending)
            else:
                table.parquet().write(iter(table), fresh)
        put_in_place(fresh, target)


class _Table:
    """The rows of a dataset, cell by cell; may be read again."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._inputs = list(dict.fromkeys(name for line in dataset.source for name in line.row))
        schema = dataset.schema or {}
        properties = schema.get("properties")
        self._properties = properties if isinstance(properties, Mapping) and properties else None
        answers: Mapping[str, Any] = self._properties or {"answer": schema}
        self._beside = _distinct(_BESIDE, self._inputs)
        self._answers = _distinct(answers, [*self._inputs, *self._beside.values()])
        self.columns = [*self._inputs, *self._answers.values(), *self._beside.values()]
        known = {self._beside[name]: type for name, type in _BESIDE.items()}
        known |= {self._answers[name]: _type_name(answer) for name, answer in answers.items()}
        if dataset.schema is None:
            known[self._answers["answer"]] = "string"
        self._known_types = {column: type for column, type in known.items() if type}

    def count(self) -> int:
        """Counts the rows."""
        return sum(1 for _ in self._dataset.source)

    def parquet(self) -> ParquetWriter:
        """Gives what writes the rows as Parquet: columns that come from Parquet as they are."""
        source = self._dataset.source
        stored = source.table if isinstance(source, TemplatedRows) else None
        if not isinstance(stored, ParquetTable):
            stored = None
        return ParquetWriter(self, self.columns, self._known_types, stored)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with self._dataset.records.open("rb") as records:
            for line in self._dataset.source:
                raw = records.readline()
                if not raw or read_stored(raw).fingerprint != line.fingerprint:
                    raise input_changed(self._dataset.source)
                cells = {name: line.row.get(name) for name in self._inputs}
                answer, beside = self._read(json.loads(raw))
                cells |= {column: answer.get(name) for name, column in self._answers.items()}
                cells |= {column: beside.get(name) for name, column in self._beside.items()}
                yield cells

    def _read(self, record: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Gives what a record says as an answer and beside it, by name; what is missing is null."""
        if (code := code_of(record)) is not None:
            error = record["error"] or record["response"]["body"]["error"]
            return {}, {"error": f"{code}: {error['message']}"}
        response = record["response"]["body"]
        usage = usage_of(response)
        beside = {
            "finish_reason": finish_reason_of(response),
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.completion,
        }
        if self._dataset.schema is None:
            return {"answer": text_of(response)}, beside
        try:
            value = writable(value_of(response, self._dataset.schema))
        except JobFailed as failure:
            error = failure.error
            return {}, {**beside, "error": f"{error['code']}: {error['message']}"}
        if self._properties is None:
            return {"answer": value}, beside
        if not isinstance(value, Mapping):
            return {}, {**beside, "error": "invalid_answer: The answer is not a JSON object."}
        return value, beside


def _distinct(names: Iterable[str], taken: Collection[str]) -> dict[str, str]:
    """Gives each name a column that is not taken: of its own name, where that is possible."""
    columns: dict[str, str] = {name: writable(name) for name in names}
    used = {*taken, *columns.values()}
    for name, column in columns.items():
        if column not in taken:
            continue
        while column in used:
            column = f"answer_{column}"
        used.add(column)
        columns[name] = column
    return columns


def _type_name(schema: Any) -> str | None:
    """Names the column type of a JSON schema, where that is plain to see."""
    options = schema.get("anyOf", [schema]) if isinstance(schema, Mapping) else []
    kinds = [kind for option in options for kind in _kinds(option) if kind != "null"]
    return _TYPES.get(kinds[0]) if len(kinds) == 1 else None


def _kinds(schema: Any) -> list[Any]:
    kind = schema.get("type", "anything") if isinstance(schema, Mapping) else "anything"
    return kind if isinstance(kind, list) else [kind]


def _write_csv(table: _Table, path: Path, ending: str) -> None:
    with (
        open_output(path, ending) as raw,
        io.TextIOWrapper(raw, encoding="utf-8", newline="") as file,
    ):
        writer = csv.DictWriter(file, table.columns)
        writer.writeheader()
        for row in table:
            writer.writerow({name: plain_text(row[name], utf8_or_base64) for name in row})


def _write_folder(table: _Table, folder: Path) -> None:
    """Writes Parquet files of a bounded size and the card that says how they are read."""
    writer = table.parquet()
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    shards = math.ceil(table.count() / SHARD_ROWS)
    paths = [data / f"train-{shard:05}-of-{shards:05}.parquet" for shard in range(shards)]
    rows = iter(table)
    with removed_on_error(*map(temporary, paths)):
        for path in paths:
            writer.write(islice(rows, SHARD_ROWS), temporary(path))
    for path in paths:
        put_in_place(temporary(path), path)
    for other in set(data.glob("train-*.parquet")).difference(paths):
        other.unlink()
    card = folder / "README.md"
    if not card.exists():
        card.write_text(_DATASET_CARD)
