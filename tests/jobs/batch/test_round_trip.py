"""What comes in comes out: the columns of any table, read, run and written again."""

import csv
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy
import pandas
import polars
import polars.testing
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from batch_helpers import answered, echo
from fakes import FakeEngine, RunningWorker
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

import mlx_rq
from mlx_rq.jobs.batch import parquet_writer
from mlx_rq.jobs.batch.dataset import Dataset
from mlx_rq.jobs.batch.records import encode_record, record
from mlx_rq.jobs.batch.tables import TemplatedRows, iterate_rows, open_table
from mlx_rq.jobs.batch.templates import ChatTemplate, Template
from mlx_rq.jobs.batch.values import plain_text, utf8_or_base64

Worker = Callable[..., AbstractContextManager[RunningWorker]]

FEW = settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

INT64 = st.integers(-(2**63), 2**63 - 1)
UTC_INT64 = st.integers(-(2**62), 2**62)  # that many nanoseconds
TEXT = st.text(st.characters(codec="utf-8"), max_size=5)
FLOATS = st.floats(width=32, allow_nan=False)

Leaf = tuple[pa.DataType, st.SearchStrategy[Any]]

LEAVES: list[Leaf] = [
    (pa.null(), st.none()),
    (pa.bool_(), st.booleans()),
    *((pa.type_for_alias(f"int{bits}"), st.integers(-(2 ** (bits - 1)), 127)) for bits in (8, 64)),
    *((pa.type_for_alias(f"uint{bits}"), st.integers(0, 2**bits - 1)) for bits in (16, 64)),
    (pa.float16(), st.floats(width=16, allow_nan=False)),
    *((type, FLOATS) for type in (pa.float32(), pa.float64())),
    *((type, TEXT) for type in (pa.string(), pa.large_string(), pa.string_view())),
    *((type, st.binary(max_size=5)) for type in (pa.binary(), pa.large_binary())),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
    (pa.uuid(), st.binary(min_size=16, max_size=16)),
    (pa.date32(), st.integers(-(10**6), 10**7)),
    (pa.time32("ms"), st.integers(0, 86_399_999)),
    *((pa.time64(unit), st.integers(0, 86_399_999_999)) for unit in ("us", "ns")),
    *(
        (pa.timestamp(unit, zone), st.integers(-(10**11), 10**13))
        for unit in ("ms", "us", "ns")
        for zone in (None, "Europe/Berlin")
    ),
    (pa.timestamp("ns"), UTC_INT64),
    *((pa.duration(unit), st.integers(-(10**11), 10**13)) for unit in ("s", "us", "ns")),
    (pa.decimal128(9, 2), st.decimals(-9999999, 9999999, places=2)),
    (pa.decimal256(50, 0), st.decimals(-(10**15), 10**15, places=0)),
    (pa.dictionary(pa.int8(), pa.string()), TEXT),
]


def _nested(inner: st.SearchStrategy[Leaf]) -> st.SearchStrategy[Leaf]:
    def wrap(drawn: Leaf) -> Any:
        kind, values = drawn
        value = st.none() | values
        return st.sampled_from(
            [
                (pa.list_(kind), st.lists(value, max_size=3)),
                (pa.large_list(kind), st.lists(value, max_size=3)),
                (pa.list_(kind, 2), st.lists(value, min_size=2, max_size=2)),
                (pa.struct([("k", kind), ("n", pa.int8())]), st.fixed_dictionaries({"k": value})),
                (pa.map_(pa.string(), kind), st.lists(st.tuples(TEXT, value), max_size=2)),
            ]
        )

    # Dictionaries and extension types have no place inside of others in Parquet files.
    return inner.filter(lambda drawn: _nests(drawn[0])).flatmap(wrap)


def _nests(kind: pa.DataType) -> bool:
    return not (pa.types.is_dictionary(kind) or isinstance(kind, pa.BaseExtensionType))


@st.composite
def arrow_tables(draw: st.DrawFn, leaves: Sequence[Leaf] = tuple(LEAVES)) -> pa.Table:
    """Tables with columns of any type, with nulls."""
    kinds = st.recursive(st.sampled_from(leaves), _nested, max_leaves=2)
    count = draw(st.integers(1, 4))
    columns = {}
    for index in range(draw(st.integers(1, 3))):
        kind, values = draw(kinds)
        drawn = draw(st.lists(st.none() | values, min_size=count, max_size=count))
        if isinstance(kind, pa.BaseExtensionType):
            stored = pa.array(drawn, kind.storage_type)
            columns[f"c{index}"] = pa.ExtensionArray.from_storage(kind, stored)
        else:
            columns[f"c{index}"] = pa.array(drawn, kind)
    return pa.table(columns)


def run(source: Path, *targets: Path) -> TemplatedRows:
    """Answers every row of a file, and writes its dataset."""
    template = ChatTemplate(Template("x", "--prompt"), None, {})
    rows = TemplatedRows(open_table(source, source.name, source.suffix), source.name, template)
    records = source.with_name("answers.jsonl")
    records.write_bytes(b"".join(encode_record(record(answered(line, "Hi."))) for line in rows))
    for target in targets:
        Dataset(rows, records).write(target)
    return rows


@FEW
@given(table=arrow_tables())
def test_parquet_columns_come_out_of_parquet_as_they_went_in(
    table: pa.Table, tmp_path: Path
) -> None:
    source, target = tmp_path / "in.parquet", tmp_path / "out.parquet"
    try:
        pq.write_table(table, source)
    except pa.ArrowNotImplementedError:  # a few nestings of views, which no such file can hold
        reject()
    rows = run(source, target, tmp_path / "out.csv")
    stored, written = pq.read_table(source), pq.read_table(target)
    assert written.select(table.column_names).equals(stored)
    assert written.select(table.column_names).schema == stored.schema
    assert written["answer"].to_pylist() == ["Hi."] * len(table)
    assert [line.fault for line in rows] == [None] * len(table)


def test_parts_of_files_are_put_together_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_writer, "PART_ROWS", 3)
    table = pa.table({"n": pa.array(range(10), pa.int8()), "answer": pa.array(range(10))})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=4)
    run(tmp_path / "in.parquet", tmp_path / "out.parquet")
    written = pq.read_table(tmp_path / "out.parquet")
    assert written.select(["n", "answer"]).equals(table)


JSON_SCALARS = st.none() | st.booleans() | INT64 | FLOATS | TEXT
JSON_VALUES = st.recursive(
    JSON_SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.fixed_dictionaries({"k": inner, "n": inner}),
    max_leaves=4,
)


def unpacked(value: Any, was: Any) -> Any:
    """What a cell of a dataset says, JSON where the column's values have no type in common."""
    return json.loads(value) if isinstance(value, str) and value != was else value


@FEW
@given(values=st.lists(JSON_VALUES, min_size=1, max_size=3))
def test_json_rows_come_out_of_parquet_as_they_went_in(values: list[Any], tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    source.write_text("".join(json.dumps({"v": value}) + "\n" for value in values))
    run(source, target)
    cells = pq.read_table(target)["v"].to_pylist()
    assert [unpacked(cell, was) for cell, was in zip(cells, values, strict=True)] == values


@pytest.mark.parametrize(
    "values", [[0.5, 2**60 + 1], [[2**60 + 1], [0.5]], [2**64 - 1, -1], [{}, {}], [{"k": {}}, None]]
)
def test_what_has_no_exact_type_in_common_is_written_as_json(
    values: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_writer, "PART_ROWS", 1)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    source.write_text("".join(json.dumps({"v": value}) + "\n" for value in values))
    run(source, target)
    cells = pq.read_table(target)["v"].to_pylist()
    assert [None if cell is None else json.loads(cell) for cell in cells] == values


@FEW
@given(rows=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3))
def test_csv_rows_come_out_of_csv_and_parquet_as_they_went_in(
    rows: list[tuple[str, str]], tmp_path: Path
) -> None:
    source = tmp_path / "in.csv"
    with source.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("a", "b"), *rows])
    run(source, tmp_path / "out.csv", tmp_path / "out.parquet")
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as file:
        assert [(row["a"], row["b"]) for row in csv.DictReader(file)] == rows
    written = pq.read_table(tmp_path / "out.parquet")
    assert list(zip(written["a"].to_pylist(), written["b"].to_pylist(), strict=True)) == rows


def test_csv_holds_plain_text(tmp_path: Path) -> None:
    values = {
        "date": pa.array([19724], pa.date32()),
        "time": pa.array([1], pa.timestamp("ns")),
        "long": pa.array([1_000_000_001], pa.duration("ns")),
        "far": pa.array([10**7], pa.date32()),
        "price": pa.array(["1.10"]).cast(pa.decimal128(5, 2)),
        "text": pa.array([b"M\xc3\xbcller"]),
        "bytes": pa.array([b"\xff\x00"]),
        "nothing": pa.array([None], pa.date32()),
        "nan": pa.array([float("nan")]),
        "yes": pa.array([True]),
        "nested": pa.array([[{"on": None}]], pa.list_(pa.struct([("on", pa.date32())]))),
        "days": pa.array([[19724]], pa.list_(pa.date32())),
    }
    pq.write_table(pa.table(values), tmp_path / "in.parquet")
    run(tmp_path / "in.parquet", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as file:
        (row,) = csv.DictReader(file)
    assert {name: row[name] for name in values} == {
        "date": "2024-01-02",
        "time": "1970-01-01 00:00:00.000000001",
        "long": "0:00:01.000000001",
        "far": "29349-01-26",
        "price": "1.10",
        "text": "Müller",
        "bytes": "/wA=",
        "nothing": "",
        "nan": "nan",
        "yes": "true",
        "nested": '[{"on": null}]',
        "days": '["2024-01-02"]',
    }


FRAME = {
    "whole": [1, 2],
    "text": ["a", None],
    "when": pa.array([10**15, None], pa.timestamp("us")),
    "parts": [[1, 2], []],
    "price": pa.array(["1.10", None]).cast(pa.decimal128(5, 2)),
}


def test_frames_come_back_from_map_as_they_went_in(redis_url: str, running_worker: Worker) -> None:
    table = pa.table(FRAME)
    frames = (table, table.to_pandas(types_mapper=pandas.ArrowDtype), polars.from_arrow(table))
    with running_worker(FakeEngine(answer_with=echo)):
        rows = [[row for row, _ in mlx_rq.map(frame, "{whole}")] for frame in frames]
    assert pa.Table.from_pylist(rows[0], schema=table.schema).equals(table)
    assert pa.Table.from_pylist(rows[1], schema=table.schema).equals(table)
    polars.testing.assert_frame_equal(polars.DataFrame(rows[2], frames[2].schema), frames[2])


@FEW
@given(table=arrow_tables())
def test_any_table_in_memory_gives_its_rows(table: pa.Table) -> None:
    assert [list(row) for row in iterate_rows(table)] == [table.column_names] * len(table)


IN_FRAMES = [
    leaf
    for leaf in LEAVES
    if leaf[0]
    in (
        *(pa.bool_(), pa.int8(), pa.int64(), pa.uint64(), pa.float32(), pa.float64(), pa.string()),
        *(pa.large_string(), pa.binary(), pa.timestamp("us"), pa.duration("us")),
        pa.decimal128(9, 2),
    )
]
"""Of which both libraries have exact values in Python."""


@FEW
@given(table=arrow_tables(IN_FRAMES).filter(lambda table: "map<" not in str(table.schema)))
def test_any_frame_gives_its_rows(table: pa.Table) -> None:
    rows = list(iterate_rows(table))
    assert rows == table.to_pylist()
    assert list(iterate_rows(polars.from_arrow(table))) == rows
    assert list(iterate_rows(table.to_pandas(types_mapper=pandas.ArrowDtype))) == rows


def test_arrays_in_frames_are_told_as_lists() -> None:
    frame = pandas.DataFrame({"a": [numpy.array([1, 2]), {"b": numpy.array(["x"])}]})
    told = [plain_text(row["a"], utf8_or_base64) for row in iterate_rows(frame)]
    assert told == ["[1, 2]", '{"b": ["x"]}']


def test_numbers_of_numpy_are_told_as_numbers() -> None:
    cells = [numpy.bool_(True), [numpy.int64(1), numpy.float64(0.5), numpy.bool_(False)]]
    frame = pandas.DataFrame({"a": [*cells, numpy.datetime64("2024-01-02T03:04:05.000000001")]})
    told = [plain_text(row["a"], utf8_or_base64) for row in iterate_rows(frame)]
    assert told == ["true", "[1, 0.5, false]", "2024-01-02T03:04:05.000000001"]


def test_nanoseconds_of_polars_are_told_as_they_are() -> None:
    table = pa.table(
        {
            "n": [1, 2],
            "when": pa.array([10**18 + 1, None], pa.timestamp("ns")),
            "parts": pa.array([[1000], [1]], pa.list_(pa.duration("ns"))),
            "time": pa.array([1, 1000], pa.time64("ns")),
        }
    )
    rows = list(iterate_rows(polars.from_arrow(table)))
    assert rows == list(iterate_rows(table))
    assert [row["when"] for row in rows] == ["2001-09-09 01:46:40.000000001", None]


def test_numbers_of_pandas_are_told_as_they_are() -> None:
    frame = pandas.DataFrame(
        {"n": [1, None], "l": [[1], None], "c": pandas.Categorical(["x", "y"])}
    )
    assert list(iterate_rows(frame)) == [
        {"n": 1.0, "l": [1], "c": "x"},
        {"n": None, "l": None, "c": "y"},
    ]
