"""What is asked of several clients."""

from typing import Any

from pydantic import BaseModel

ADD: Any = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


class City(BaseModel):
    name: str
    people: int
