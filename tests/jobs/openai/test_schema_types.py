"""What may be given as `schema=`, what it is called, and what of it comes back."""

import dataclasses
import re
from enum import Enum
from typing import Any, Generic, Optional, TypeVar

import pytest
from pydantic import BaseModel, SecretStr
from typing_extensions import TypedDict

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.schema_types import read_value, response_format
from mlx_rq.jobs.openai.validation import validate

X = TypeVar("X")


class Colour(Enum):
    RED = "red"


class Größe(BaseModel):
    a: int


class Box(BaseModel, Generic[X]):
    inside: X


@dataclasses.dataclass
class Point:
    x: int


class Row(TypedDict):
    n: int


class Secret(BaseModel):
    word: SecretStr


# The type, the name that it gets, a text, and the value that the text is read as.
TYPES: list[tuple[Any, str, str, Any]] = [
    (Größe, "Gr_e", '{"a": 1}', Größe(a=1)),
    (Box[int], "Box_int", '{"inside": 2}', Box[int](inside=2)),
    (Point, "Point", '{"x": 3}', Point(3)),
    (Row, "Row", '{"n": 4}', {"n": 4}),
    (list[Point], "list", '[{"x": 5}]', [Point(5)]),
    (Optional[Point], "Optional", "null", None),  # noqa: UP045, as callers write it
    (Point | int, "answer", "7", 7),
    (set[int], "set", "[1, 2]", {1, 2}),
    (dict[Colour, int], "dict", '{"red": 1}', {Colour.RED: 1}),
    (dict[int, str], "dict", '{"-1": "a"}', {-1: "a"}),
    (bytes, "bytes", '"ab"', b"ab"),
    (Secret, "Secret", '{"word": "w"}', Secret(word=SecretStr("w"))),
    (type("N" * 100, (Größe,), {}), "N" * 64, '{"a": 1}', None),
    ({"type": "array"}, "answer", "[1]", [1]),
]


@pytest.mark.parametrize(("schema", "name", "text", "value"), TYPES)
def test_types_are_described_and_read(schema: Any, name: str, text: str, value: Any) -> None:
    written = response_format(schema)
    assert written["json_schema"]["name"] == name
    assert written["json_schema"]["strict"] is True
    validate("chat", {"messages": [{"role": "user", "content": "x"}], "response_format": written})
    read = read_value(text, schema)
    assert read == value or (value is None and isinstance(read, schema))


def test_keys_that_are_integers_are_described_as_such() -> None:
    schema = response_format(dict[int, list[dict[str, int]]])["json_schema"]["schema"]
    pattern = schema["propertyNames"]["pattern"]
    keys = ["0", "-5", "123", "1.0", "a", "", "01", "-0"]
    assert [key for key in keys if re.search(pattern, key)] == ["0", "-5", "123"]
    assert "propertyNames" not in schema["additionalProperties"]["items"]


def test_not_strict_is_said() -> None:
    assert response_format(Point, strict=False)["json_schema"]["strict"] is False


@pytest.mark.parametrize("schema", [5, "Person", list[5]])
def test_what_is_no_type_is_refused(schema: Any) -> None:
    with pytest.raises(RequestError, match="Invalid 'schema'") as refused:
        response_format(schema)
    assert refused.value.param == "schema"
