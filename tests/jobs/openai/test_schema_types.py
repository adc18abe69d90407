"""What may be given as `schema=`, what it is called, and what of it comes back."""

import dataclasses
import re
from decimal import Decimal
from enum import Enum, IntEnum
from typing import Annotated, Any, Generic, Optional, TypeVar

import pytest
from pydantic import AnyUrl, BaseModel, Field, FileUrl, HttpUrl, RedisDsn, SecretStr
from typing_extensions import TypedDict

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.schema_types import read_value, response_format
from mlx_rq.jobs.openai.validation import validate

X = TypeVar("X")


class Colour(Enum):
    RED = "red"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


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


PRICE = Annotated[Decimal, Field(max_digits=5, decimal_places=2, ge=0)]
BELOW_A_LINE = Annotated[Decimal, Field(decimal_places=0, lt=5, multiple_of=2)]


@pytest.mark.parametrize(
    ("type_", "described"),
    [
        (Decimal, {"type": "number"}),
        (
            PRICE,
            {
                "type": "number",
                "minimum": 0,
                "multipleOf": 0.01,
                "exclusiveMaximum": 1000,
                "exclusiveMinimum": -1000,
            },
        ),
        (BELOW_A_LINE, {"type": "number", "multipleOf": 2, "exclusiveMaximum": 5}),
        (HttpUrl, {"type": "string", "format": "uri", "pattern": "^(?:http|https)://[A-Za-z0-9]"}),
        (FileUrl, {"type": "string", "format": "uri", "pattern": "^(?:file)://"}),
        (
            RedisDsn,
            {"type": "string", "format": "uri", "pattern": "^(?:redis|rediss)://[A-Za-z0-9]"},
        ),
        (AnyUrl, {"type": "string", "format": "uri", "minLength": 1}),
    ],
)
def test_numbers_and_urls_are_described_as_they_are_read(type_: Any, described: Any) -> None:
    """Any text would be a Decimal by pydantic's own description, and any URI a link."""
    assert response_format(type_)["json_schema"]["schema"] == described


def test_keys_of_an_enum_of_integers_are_texts() -> None:
    """Of such a dict, only the empty one was valid."""
    schema = response_format(dict[Level, int])["json_schema"]["schema"]
    assert schema["propertyNames"] == {"enum": ["1", "2"]}
    assert read_value('{"2": 5}', dict[Level, int]) == {Level.HIGH: 5}


def test_not_strict_is_said() -> None:
    assert response_format(Point, strict=False)["json_schema"]["strict"] is False


@pytest.mark.parametrize("schema", [5, "Person", list[5]])
def test_what_is_no_type_is_refused(schema: Any) -> None:
    with pytest.raises(RequestError, match="Invalid 'schema'") as refused:
        response_format(schema)
    assert refused.value.param == "schema"
