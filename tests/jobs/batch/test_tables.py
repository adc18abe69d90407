"""Rows from files and from tables in memory."""

import gzip
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pandas
import polars
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mlx_rq import RequestError
from mlx_rq.jobs.batch.lines import Line
from mlx_rq.jobs.batch.tables import TemplatedRows, iterate_rows, open_table
from mlx_rq.jobs.batch.templates import ChatTemplate, Template


def rows_of(path: Path) -> list[dict[str, Any]]:
    table = open_table(path, path.name, path.suffix)
    return [dict(row.values) for row in table]


def templated(path: Path, prompt: str, id_column: str | None = None) -> list[Line]:
    template = ChatTemplate(Template(prompt, "--prompt"), None, {})
    return list(
        TemplatedRows(open_table(path, path.name, path.suffix), path.name, template, id_column)
    )


class TestCsv:
    def test_quotes_newlines_and_a_byte_order_mark(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.csv"
        path.write_bytes(b'\xef\xbb\xbfname,note\r\n"a ""b""","one\ntwo"\r\n\r\nc,\r\n')
        assert rows_of(path) == [
            {"name": 'a "b"', "note": "one\ntwo"},
            {"name": "c", "note": ""},
        ]

    def test_tabs(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.tsv"
        path.write_text("a\tb\n1,5\t2\n")
        assert rows_of(path) == [{"a": "1,5", "b": "2"}]

    def test_a_ragged_row_is_an_error_of_that_row(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.csv"
        path.write_text("a,b\n1,2\n1\n1,2,3\n4,5\n")
        lines = templated(path, "{a} {b}")
        faults = [line.fault and line.fault.code for line in lines]
        assert faults == [None, "invalid_row", "invalid_row", None]
        assert "1 values; the header names 2" in str(lines[1].fault)

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b'a,b\n1,"2\n3,4\n', "rows.csv, after line 3"),
            (b"a,b\n1,\xe9\n", "UTF-8"),
            (b"a,b,a\n1,2,3\n", "repeats 'a'"),
            (b"", "holds no header"),
            (b"a;b\n1;2\n", "add: --delimiter ';'"),
            (b"a\tb\n1\t2\n", r"add: --delimiter \$'\\t'"),
            ("a,b\n1,2\n".encode("utf-16"), "is UTF-16, .* iconv -f UTF-16 -t UTF-8"),
            ("a,b\n1,2\n".encode("utf-16-le"), "is UTF-16LE, .* iconv -f UTF-16LE -t UTF-8"),
            ("a,b\n1,2\n".encode("utf-16-be"), "is UTF-16BE, .* iconv -f UTF-16BE -t UTF-8"),
            ("a,b\n1,é\n".encode("cp1252"), "iconv -f WINDOWS-1252 -t UTF-8"),
            ("a,b\n1,2\n".encode("utf-32"), "is UTF-32, .* iconv -f UTF-32 -t UTF-8"),
            (b'"a";"b"\n"1";"2"\n', "add: --delimiter ';'"),
            (b"sep=;\r\na;b\r\n1;2\r\n", r"'sep=;', .*\(tail -n \+2\), and add: --delimiter ';'"),
            (b"PAR1xxxx", "holds Parquet. Let its name end in .parquet"),
            (b"PK\x03\x04xxxx", "is a workbook, or another archive"),
            (b"\xfd7zXZxx", "is compressed with xz, which is not read. Unpack it"),
            (gzip.compress(b"a,b\n1,2\n", mtime=0)[:-9], "is damaged"),
            (pa.compress(b"a,b\n1,2\n", "zstd", asbytes=True)[:-3], "is damaged"),
        ],
    )
    def test_a_file_that_cannot_be_read_right_is_refused(
        self, tmp_path: Path, content: bytes, words: str
    ) -> None:
        path = tmp_path / "rows.csv"
        path.write_bytes(content)
        with pytest.raises(RequestError, match=words):
            rows_of(path)

    def test_what_converts_a_compressed_file_unpacks_it(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.csv.gz"
        path.write_bytes(gzip.compress("a,b\n1,2\n".encode("utf-16")))
        cure = f"gzip -dc {path} | iconv -f UTF-16 -t UTF-8 > utf8-rows.csv"
        with pytest.raises(RequestError, match=re.escape(cure)):
            open_table(path, str(path), ".csv")

    def test_what_parts_the_values_may_be_said(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.csv"
        path.write_text("a;b\n1,5;2\n")
        table = open_table(path, path.name, ".csv", ";")
        assert [dict(row.values) for row in table] == [{"a": "1,5", "b": "2"}]
        assert [dict(row.values) for row in open_table(path, path.name, ".csv", ",")] == [
            {"a;b": "1"}
        ]

    @pytest.mark.parametrize("pack", [gzip.compress, partial(pa.compress, codec="zstd")])
    @pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
    def test_compressed_files_are_read(self, tmp_path: Path, pack: Any, suffix: str) -> None:
        path = tmp_path / "rows"
        texts = (
            ("a,b\n1,é\n", "2,y\n")
            if suffix == ".csv"
            else ('{"a": "1", "b": "é"}\n', '{"a": "2", "b": "y"}')
        )
        # In two members, as `cat` of two files has them.
        path.write_bytes(b"".join(bytes(pack(text.encode())) for text in texts))
        rows = [dict(row.values) for row in open_table(path, path.name, suffix)]
        assert rows == [{"a": "1", "b": "é"}, {"a": "2", "b": "y"}]

    def test_a_missing_column_is_named_before_any_row_is_read(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.csv"
        path.write_text("a,b\n")
        with pytest.raises(RequestError, match=r"names 'c', which rows\.csv does not have"):
            templated(path, "{a} {c}")


class TestJsonLines:
    def test_rows_bring_their_own_columns(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_text('{"a": 1}\n\n{"b": 2}\nnot json\n')
        lines = templated(path, "{a}")
        assert [(line.number, line.fault and line.fault.code) for line in lines] == [
            (1, None),
            (3, "missing_column"),
            (4, "invalid_json_line"),
        ]

    def test_a_key_that_occurs_twice_is_an_error_of_its_row(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_text('{"a": 1, "a": 2}\n{"a": {"b": 1, "b": 2}}\n{"a": 1}\n{}\n')
        faults = [str(line.fault) for line in templated(path, "{a}")]
        unparseable = "This line is not parseable as valid JSON:"
        assert faults == [
            f"{unparseable} the key 'a' occurs twice in one object.",
            f"{unparseable} the key 'b' occurs twice in one object.",
            "None",
            "'--prompt' names 'a', which the row does not have. It has none.",
        ]

    def test_what_is_no_row_brings_no_columns(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_text('{"a": 1}\nnot json\n{}\n')
        assert [line.row for line in templated(path, "{a}")] == [{"a": 1}, {}, {}]

    def test_half_of_a_surrogate_pair_anywhere_is_an_error_of_its_row(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        rows = [
            {"a": 1},
            {"a": 1, "b": {"c": ["\udfff"]}},
            {"a": 1, "\ud800": 2},
            {"a": "\U0001f600"},
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) + r'{"a": "\\ud800"}')
        lines = templated(path, "{a}")
        assert [line.fault and line.fault.code for line in lines] == [
            None,
            "invalid_row",
            "invalid_row",
            None,
            None,  # a backslash and some letters
        ]
        assert lines[1].row == {"a": 1, "b": {"c": ["?"]}}
        assert lines[4].body["messages"][0]["content"] == r"\ud800"

    def test_a_number_that_would_be_endless_is_an_error_of_its_row(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.jsonl"
        path.write_text('{"a": [{"b": -1e400}]}\n{"a": 1e300}\n{"a": NaN}\n')
        lines = templated(path, "{a}")
        assert [line.fault and str(line.fault) for line in lines] == [
            "The number -1e400 is larger than any that is read; write it as a text.",
            None,
            None,
        ]

    def test_a_value_that_cannot_be_written_is_an_error_of_its_row(self, tmp_path: Path) -> None:
        for depth in range(900, 1000):  # read, but not written again, at some depth
            path = tmp_path / "rows.jsonl"
            path.write_text(f'{{"a": {"[" * depth}{"]" * depth}}}\n')
            (line,) = templated(path, "{a}")
            if line.fault is not None:
                assert line.fault.code in ("invalid_row", "invalid_json", "invalid_json_line")


class TestParquet:
    def test_values_keep_their_types(self, tmp_path: Path) -> None:
        rows = [{"a": 1, "b": [1.5]}, {"a": None, "b": None}]
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
        assert rows_of(path) == rows
        assert [line.body["messages"][0]["content"] for line in templated(path, "{a} {b}")] == [
            "1 [1.5]",
            " ",
        ]

    def test_a_name_that_occurs_twice_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]), path)
        with pytest.raises(RequestError, match=r"rows\.parquet: the schema repeats 'a'"):
            rows_of(path)

    def test_text_that_is_stored_as_bytes_is_read_or_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.table({"a": [b"M\xc3\xbcller", b"\xff"]}), path)
        one, two = templated(path, "{a}", "a")
        assert (one.body["messages"][0]["content"], one.custom_id) == ("Müller", "Müller")
        assert two.fault is not None
        assert "The column 'a' holds bytes here that are no UTF-8 text" in str(two.fault)
        assert [line.fault for line in templated(path, "x")] == [None, None]

    def test_text_that_is_not_utf8_is_an_error_of_the_file(self, tmp_path: Path) -> None:
        bad = pa.array([b"fine", b"\xff\xfe"], pa.binary()).view(pa.string())
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.table({"a": bad}), path)
        with pytest.raises(RequestError, match=r"rows\.parquet, after row 0: .*utf-8"):
            templated(path, "{a}")

    def test_another_file_of_that_name_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "rows.parquet"
        path.write_text("no parquet at all")
        with pytest.raises(RequestError, match="is not a Parquet file"):
            rows_of(path)
        path.write_bytes(gzip.compress(b"PAR1"))
        with pytest.raises(RequestError, match=r"is compressed as a whole\. .* unpack it first"):
            rows_of(path)


@pytest.mark.parametrize("suffix", [".xlsx", ".ods"])
def test_a_workbook_is_refused_with_the_way(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(
        RequestError, match=f"soffice --headless --convert-to csv 'my rows{suffix}'"
    ):
        open_table(tmp_path / f"my rows{suffix}", f"my rows{suffix}", suffix)


def test_another_ending_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"\.csv, \.tsv, \.jsonl, \.ndjson, \.parquet"):
        open_table(tmp_path / "rows.xlsx", "rows.xlsx", ".xlsx")


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("my rows.json", r"by: jq -c '\.\[\]' 'my rows.json' > 'my rows.jsonl'"),
        ("rows.csv.xz", r"may be compressed \(\.gz, \.zst\)\. Unpack it first\."),
    ],
)
def test_endings_that_are_nearly_right_are_refused_with_the_way(name: str, way: str) -> None:
    with pytest.raises(RequestError, match=way):
        open_table(Path(name), name, Path(name).suffix)


class TestTheNameOfARow:
    def path(self, tmp_path: Path) -> Path:
        path = tmp_path / "rows.jsonl"
        rows = [{"sku": 17}, {"sku": "a"}, {"sku": None}, {"sku": ""}, {"other": 1}]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def test_is_its_number(self, tmp_path: Path) -> None:
        lines = templated(self.path(tmp_path), "x")
        assert [line.custom_id for line in lines] == ["row-1", "row-2", "row-3", "row-4", "row-5"]

    def test_or_what_a_column_says(self, tmp_path: Path) -> None:
        lines = templated(self.path(tmp_path), "x", "sku")
        assert [line.custom_id for line in lines] == ["17", "a", None, None, None]
        assert all(line.fault is not None for line in lines[2:])


class Pandas(pandas.DataFrame):
    """A frame; iterated, it gives the names of its columns."""

    def iterrows(self) -> Any:
        raise AssertionError("slow, and it loses the types")


class HuggingFace:
    """As much of a Hugging Face dataset as matters: its `to_dict` gives columns."""

    def __iter__(self) -> Any:
        return iter([{"a": 1}, {"a": 2}])

    def to_dict(self) -> Any:
        return {"a": [1, 2]}


class TestTablesInMemory:
    @pytest.mark.parametrize(
        "rows",
        [
            [{"a": 1}, {"a": 2}],
            ({"a": number} for number in (1, 2)),
            polars.DataFrame({"a": [1, 2]}),
            Pandas({"a": [1, 2]}),
            pandas.DataFrame({"a": [1, 2]}, dtype="int64[pyarrow]"),
            HuggingFace(),
            pa.table({"a": [1, 2]}),
        ],
        ids=lambda rows: type(rows).__name__,
    )
    def test_all_give_the_same_rows(self, rows: Any) -> None:
        assert list(iterate_rows(rows)) == [{"a": 1}, {"a": 2}]

    @pytest.mark.parametrize(
        "rows",
        [
            pandas.DataFrame([[1, 2]], columns=["a", "a"]),
            pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]),
        ],
        ids=["pandas", "pyarrow"],
    )
    def test_a_name_that_occurs_twice_is_refused(self, rows: Any) -> None:
        with pytest.raises(RequestError, match=r"'rows': the \w+ repeats 'a'"):
            iterate_rows(rows)

    @pytest.mark.parametrize("rows", [{"a": [1, 2]}, 7])
    def test_what_has_no_rows_is_refused(self, rows: Any) -> None:
        with pytest.raises(TypeError, match="expected an iterable of mappings"):
            iterate_rows(rows)

    def test_a_row_that_is_no_mapping_is_named(self) -> None:
        rows = iterate_rows([{"a": 1}, "b"])
        assert next(rows) == {"a": 1}
        with pytest.raises(TypeError, match="expected mappings, but row 2 is a str"):
            next(rows)
