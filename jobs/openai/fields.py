"""What the fields of every kind of body are made of."""

from collections.abc import Mapping, Set
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
CalledName = Annotated[str, StringConstraints(min_length=1, max_length=256)]
"""What a model called: other servers take more names than `Name` for their functions."""

SpeakerName = Annotated[str, StringConstraints(max_length=64)]
"""Who said something, in any script."""

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

_NO_TEMPLATE_OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(
        ("conversation", "conversations", "messages"), "the request's own messages are rendered"
    ),
    "tools": "give them as the request's own 'tools'",
    "documents": "write them into a message",
    "chat_template": "the model's own template is used",
    **dict.fromkeys(
        ("add_generation_prompt", "continue_final_message"), "the last message's role decides that"
    ),
    **dict.fromkeys(
        (
            *("self", "tokenize", "tokenizer_kwargs", "sanitize_control_tokens"),
            *("padding", "truncation", "max_length"),
            *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token"),
            *("cls_token", "mask_token", "additional_special_tokens"),
        ),
        "the worker sets that itself",
    ),
}
"""Names that mean something to the function which renders a chat, and what to do instead.

Source: `apply_chat_template` of transformers; there, names of special tokens replace these."""


def _template_options(options: dict[str, Any]) -> dict[str, Any]:
    """Refuses what is no variable of the template's, but would change what is done with it."""
    for name in options:
        instead = _NO_TEMPLATE_OPTIONS.get(name)
        if name.startswith("return_"):
            instead = "the worker sets that itself"
        if instead is not None:
            raise PydanticCustomError(
                "no_template_option",
                "expected variables of the model's chat template, but got '{name}': {instead}",
                {"name": name, "instead": instead},
            )
    return options


TemplateOptions = Annotated[dict[str, Any], AfterValidator(_template_options)]
"""What a chat's template gets as variables of its own, `enable_thinking` for example."""


def string_or_array(value: Any) -> str:
    """Tells a string from an array, so that an error speaks of the one that was meant."""
    return "array" if isinstance(value, list) else "string"


class Strict(BaseModel):
    """Refuses unknown fields and does not turn `"1"` into 1."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class History(Strict):
    """A part of what was said before, as some client or server wrote it.

    What these are known to write beside, and no prompt has a place for, is `left_out`. Any other
    unknown field is refused: it may be one that was meant and is misspelt.
    """

    left_out: ClassVar[Set[str]] = frozenset()

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or cls.left_out.isdisjoint(value):
            return value
        return {name: one for name, one in value.items() if name not in cls.left_out}
