"""What the fields of every kind of body are made of."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
TokenId = Annotated[int, Field(ge=0)]
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=64)],
        Annotated[str, StringConstraints(max_length=512)],
    ],
    Field(max_length=16),
]
"""The producer's own notes; nothing here reads them, and they stay with the job's body."""


def string_or_array(value: Any) -> str:
    """Tells a string from an array, so that an error speaks of the one that was meant."""
    return "array" if isinstance(value, list) else "string"


class Strict(BaseModel):
    """Refuses unknown fields and does not turn `"1"` into 1."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
