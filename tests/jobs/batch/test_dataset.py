"""Datasets: columns, their types, and rows that are never misaligned."""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import yaml
from batch_helpers import answered

from mlx_rq import RequestError
from mlx_rq.jobs.batch import dataset as datasets_out
from mlx_rq.jobs.batch import parquet_writer
from mlx_rq.jobs.batch.dataset import Dataset
from mlx_rq.jobs.batch.lines import Line
from mlx_rq.jobs.batch.records import Ended, encode_record, record
from mlx_rq.jobs.batch.tables import TemplatedRows, open_table
from mlx_rq.jobs.batch.templates import ChatTemplate, Template
from mlx_rq.jobs.openai.answers import Usage, finish_reason_of, text_of, usage_of
from mlx_rq.jobs.openai.errors import error_object

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "height": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "home": {"type": "object"},
        "married": {"type": ["boolean", "null"]},
    },
}
ADA = {
    "name": "Ada",
    "age": 36,
    "height": 2,
    "tags": ["x"],
    "home": {"city": "London"},
    "married": None,
}


def source_of(tmp_path: Path, rows: list[dict[str, Any]]) -> TemplatedRows:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = ChatTemplate(Template("x", "--prompt"), None, {})
    return TemplatedRows(open_table(path, path.name, path.suffix), path.name, template)


def failed(line: Line) -> Ended:
    error = error_object("It is too long.", code="context_length_exceeded")
    return Ended(line, {"error": error}, "2" * 32)


def dataset(
    tmp_path: Path,
    rows: list[dict[str, Any]],
    answers: list[str | None],
    schema: Mapping[str, Any] | None = None,
) -> Dataset:
    """A dataset of rows and the texts of their answers; None stands for an error."""
    source = source_of(tmp_path, rows)
    ended = [
        failed(line) if text is None else answered(line, text)
        for line, text in zip(source, answers, strict=True)
    ]
    records = tmp_path / "answers.jsonl"
    records.write_bytes(b"".join(encode_record(record(item)) for item in ended))
    return Dataset(source, records, schema)


def types(table: pa.Table) -> dict[str, str]:
    return {field.name: str(field.type) for field in table.schema}


class TestParquet:
    def test_has_the_input_the_answer_the_error_and_the_tokens(self, tmp_path: Path) -> None:
        rows = [{"a": 1, "b": "x"}, {"a": None, "b": "y"}]
        dataset(tmp_path, rows, ["Hi.", None]).write(tmp_path / "out.parquet")
        table = pq.read_table(tmp_path / "out.parquet")
        beside = {"finish_reason": "stop", "prompt_tokens": 5, "completion_tokens": 7}
        error = "context_length_exceeded: It is too long."
        assert table.to_pylist() == [
            {**rows[0], "answer": "Hi.", "error": None, **beside},
            {**rows[1], "answer": None, "error": error, **dict.fromkeys(beside)},
        ]
        assert types(table)["prompt_tokens"] == "int64"

    def test_structured_answers_are_spread_into_typed_columns(self, tmp_path: Path) -> None:
        made = dataset(tmp_path, [{"n": 1}, {"n": 2}], [json.dumps(ADA), None], PERSON)
        made.write(tmp_path / "out.parquet")
        table = pq.read_table(tmp_path / "out.parquet")
        assert {name: types(table)[name] for name in PERSON["properties"]} == {
            "name": "string",
            "age": "int64",
            "height": "double",
            "tags": "list<element: string>",
            "home": "struct<city: string>",
            "married": "bool",  # though it is null everywhere
        }
        ada, nobody = table.to_pylist()
        assert {name: ada[name] for name in ADA} == ADA
        assert nobody["name"] is None
        assert "answer" not in table.column_names

    def test_an_answer_that_was_cut_off_is_an_error_of_its_row(self, tmp_path: Path) -> None:
        source = source_of(tmp_path, [{"n": 1}, {"n": 2}])
        one, two = source
        ended = [answered(one, '{"name": "A', "length"), answered(two, "[]")]
        records = tmp_path / "answers.jsonl"
        records.write_bytes(b"".join(encode_record(record(item)) for item in ended))
        Dataset(source, records, PERSON).write(tmp_path / "out.parquet")
        errors = pq.read_table(tmp_path / "out.parquet")["error"].to_pylist()
        assert errors[0].startswith("length: ")
        assert errors[1].startswith("invalid_answer: ")

    def test_an_answer_that_is_no_object_has_one_column(self, tmp_path: Path) -> None:
        made = dataset(tmp_path, [{"n": 1}], ["[1, 2]"], {"type": "array"})
        made.write(tmp_path / "out.parquet")
        assert pq.read_table(tmp_path / "out.parquet")["answer"].to_pylist() == [[1, 2]]

    def test_names_that_the_input_has_are_kept_apart(self, tmp_path: Path) -> None:
        made = dataset(tmp_path, [{"name": "in", "error": "e"}], [json.dumps(ADA)], PERSON)
        made.write(tmp_path / "out.parquet")
        (row,) = pq.read_table(tmp_path / "out.parquet").to_pylist()
        assert (row["name"], row["answer_name"]) == ("in", "Ada")
        assert (row["error"], row["answer_error"]) == ("e", None)

    def test_properties_that_are_called_like_the_columns_beside_them_are_kept_apart(
        self, tmp_path: Path
    ) -> None:
        names = ("error", "finish_reason", "prompt_tokens", "completion_tokens", "x", "answer_x")
        schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
        answer = json.dumps({name: f"my {name}" for name in names})
        made = dataset(tmp_path, [{"x": 1}, {"x": 2}], [answer, None], schema)
        for name in ("out.parquet", "out.csv"):
            made.write(tmp_path / name)
        table = pq.read_table(tmp_path / "out.parquet")
        one, two = table.to_pylist()
        assert len(set(table.column_names)) == len(table.column_names) == 1 + len(names) + 4
        assert (one["x"], one["answer_answer_x"], one["answer_x"]) == (1, "my x", "my answer_x")
        for name in names[:4]:
            assert one[f"answer_{name}"] == f"my {name}"
        assert (one["error"], one["finish_reason"]) == (None, "stop")
        assert (one["prompt_tokens"], one["completion_tokens"]) == (5, 7)
        assert two["error"] == "context_length_exceeded: It is too long."
        assert two["answer_error"] is None
        assert types(table)["answer_prompt_tokens"] == "string"
        with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
            assert next(csv.reader(file)) == table.column_names

    def test_names_are_prefixed_until_they_are_free(self, tmp_path: Path) -> None:
        schema = {"properties": {"x": {}, "error": {}}}
        rows = [{"x": 1, "answer_x": 2, "error": 3, "answer": 4}]
        made = dataset(tmp_path, rows, ['{"x": "a", "error": "b"}'], schema)
        made.write(tmp_path / "out.parquet")
        (row,) = pq.read_table(tmp_path / "out.parquet").to_pylist()
        assert {name: row[name] for name in rows[0]} == rows[0]
        assert (row["answer_answer_x"], row["answer_answer_error"]) == ("a", "b")
        assert row["answer_error"] is None

    @pytest.mark.parametrize("name", ["out.parquet", "out.csv", "out"])
    def test_half_of_a_surrogate_pair_in_an_answer_is_replaced(
        self, tmp_path: Path, name: str
    ) -> None:
        schema = {"properties": {"a": {"type": "string"}, "b": True}}
        answer = r'{"a": "\ud800", "b": {"\ud801": ["\udc00"]}}'
        made = dataset(tmp_path, [{"n": 1}], [answer], schema)
        made.write(tmp_path / name)
        if name == "out.parquet":
            (row,) = pq.read_table(tmp_path / name).to_pylist()
            assert (row["a"], row["b"]) == ("?", {"?": ["?"]})

    @pytest.mark.parametrize("properties", [[], ["a"], True, None, 5])
    def test_a_schema_without_real_properties_has_one_column(
        self, tmp_path: Path, properties: Any
    ) -> None:
        made = dataset(tmp_path, [{"n": 1}], ['{"a": 1}'], {"properties": properties})
        made.write(tmp_path / "out.parquet")
        assert pq.read_table(tmp_path / "out.parquet")["answer"].to_pylist() == [{"a": 1}]

    @pytest.mark.parametrize("name", ["out.parquet", "out.csv", "out"])
    def test_a_row_that_no_file_can_hold_is_a_bad_row_of_it(
        self, tmp_path: Path, name: str
    ) -> None:
        rows = [{"a": "x", "b": "y"}, {"a": "x", "b": ["\ud800"]}, {"a": "x", "\ud800": 1}]
        made = dataset(tmp_path, rows, ["Hi.", None, None])
        assert [line.fault and line.fault.code for line in made.source] == [
            None,
            "invalid_row",
            "invalid_row",
        ]
        made.write(tmp_path / name)
        if name == "out.parquet":
            _, two, three = pq.read_table(tmp_path / name).to_pylist()
            assert (two["a"], two["b"]) == ("x", ["?"] if isinstance(two["b"], list) else '["?"]')
            assert three["?"] == 1

    def test_a_column_has_one_type_for_all_its_values(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(parquet_writer, "PART_ROWS", 1)  # types differ from part to part
        rows: list[dict[str, Any]] = [
            {"number": 1, "mixed": 1, "late": None, "big": 1, "nothing": None, "nested": {"a": 1}},
            {"number": 2.5, "mixed": "é", "late": "x", "big": 2**70, "nested": {"b": None}},
        ]
        dataset(tmp_path, rows, ["a", "b"]).write(tmp_path / "out.parquet")
        table = pq.read_table(tmp_path / "out.parquet")
        assert table["number"].to_pylist() == [1.0, 2.5]
        assert table["mixed"].to_pylist() == ["1", '"é"']
        assert table["late"].to_pylist() == [None, "x"]
        assert table["big"].to_pylist() == ["1", str(2**70)]
        assert types(table)["nothing"] == "string"
        assert table["nested"].to_pylist() == [{"a": 1, "b": None}, {"a": None, "b": None}]

    @pytest.mark.parametrize("name", ["out.parquet", "out.csv", "out.csv.gz"])
    def test_what_was_there_stays_where_the_input_has_changed(
        self, tmp_path: Path, name: str
    ) -> None:
        made = dataset(tmp_path, [{"a": 1}, {"a": 2}], ["x", "y"])
        target = tmp_path / name
        target.write_text("as it was")
        before = set(tmp_path.iterdir())
        source_of(tmp_path, [{"a": 2}, {"a": 1}, {"a": 3}])
        with pytest.raises(RequestError, match=r"rows\.jsonl changed"):
            made.write(target)
        assert target.read_text() == "as it was"
        assert set(tmp_path.iterdir()) == before

    def test_a_folder_keeps_nothing_half_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made = dataset(tmp_path, [{"a": 1}, {"a": 2}], ["x", "y"])
        whole = datasets_out.ParquetWriter.write

        def full(self: Any, rows: Any, path: Path) -> None:
            whole(self, rows, path)
            if "00001-of" in path.name:
                raise OSError(28, "No space left on device")

        monkeypatch.setattr(datasets_out, "SHARD_ROWS", 1)
        monkeypatch.setattr(datasets_out.ParquetWriter, "write", full)
        with pytest.raises(OSError, match="No space left"):
            made.write(tmp_path / "out")
        assert list((tmp_path / "out" / "data").iterdir()) == []


class TestCsv:
    def test_can_be_read_again(self, tmp_path: Path) -> None:
        rows = [{"a": 'say "x",\ny'}, {"a": None, "b": [1, True]}]
        dataset(tmp_path, rows, ["Hi.\n", None]).write(tmp_path / "out.csv")
        with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
            one, two = csv.DictReader(file)
        assert (one["a"], one["answer"], one["prompt_tokens"]) == ('say "x",\ny', "Hi.\n", "5")
        assert (two["a"], two["b"], two["answer"]) == ("", "[1, true]", "")
        assert two["error"] == "context_length_exceeded: It is too long."


class TestAFolder:
    def test_has_shards_and_the_card_that_names_them(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(datasets_out, "SHARD_ROWS", 2)
        folder = tmp_path / "out"
        old = folder / "data" / "train-00000-of-00009.parquet"
        old.parent.mkdir(parents=True)
        old.write_text("from a longer run")

        made = dataset(tmp_path, [{"a": n} for n in range(5)], [str(n) for n in range(5)])
        made.write(folder)

        names = sorted(path.name for path in (folder / "data").iterdir())
        assert names == [f"train-{n:05}-of-00003.parquet" for n in range(3)]
        table = pyarrow.dataset.dataset(folder / "data").to_table()
        assert table["answer"].to_pylist() == ["0", "1", "2", "3", "4"]
        card = (folder / "README.md").read_text().split("---")[1]
        (config,) = yaml.safe_load(card)["configs"]
        (files,) = config["data_files"]
        assert sorted(folder.glob(files["path"])) == sorted((folder / "data").iterdir())

    def test_a_card_that_is_there_is_left_alone(self, tmp_path: Path) -> None:
        folder = tmp_path / "out"
        folder.mkdir()
        (folder / "README.md").write_text("mine")
        dataset(tmp_path, [{"a": 1}], ["x"]).write(folder)
        assert (folder / "README.md").read_text() == "mine"


class TestWhatIsReadOfAnAnswer:
    RESPONSE: ClassVar[dict[str, Any]] = {
        "id": "resp_1",
        "object": "response",
        "status": "incomplete",
        "output": [
            {"type": "reasoning", "summary": []},
            {"type": "message", "content": [{"type": "output_text", "text": "Hi "}]},
            {"type": "message", "content": [{"type": "output_text", "text": "there."}]},
        ],
        "usage": {
            "input_tokens": 3,
            "input_tokens_details": {"cached_tokens": 2},
            "output_tokens": 5,
        },
    }

    def test_a_response_has_text_usage_and_an_end(self) -> None:
        assert text_of(self.RESPONSE) == "Hi there."
        assert usage_of(self.RESPONSE) == Usage(prompt=3, cached=2, completion=5)
        assert finish_reason_of(self.RESPONSE) == "length"

    def test_a_completion_too(self) -> None:
        completion = {
            "object": "text_completion",
            "choices": [{"text": "Hi.", "finish_reason": "stop"}],
        }
        assert text_of(completion) == "Hi."
        assert usage_of(completion) == Usage(0, 0, 0)
        assert finish_reason_of(completion) == "stop"
