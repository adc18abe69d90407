"""What the fields of every kind of body are made of."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
TokenId = Annotated[int, Field(ge=0)]


class Strict(BaseModel):
    """Refuses unknown fields and does not turn `"1"` into 1."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
