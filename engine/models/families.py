"""What models of a type do in a batch, as docs/families.md has it: `make families` writes both."""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_name("families.json")


class Family(NamedTuple):
    """How models of one type are computed together."""

    batches: str
    """What is: sequences of "any" lengths, prompts of "equal" length, or each sequence "alone"."""
    shares: str
    """In which layers a prefix is held once: "all", "some", or "none", where it is copied.

    While there is memory for that, where copies are quicker.
    """


def family_of(model_type: str) -> Family | None:
    """Gives what was found of a type that a model's config names; None for one not tried."""
    return _families().get(model_type)


@cache
def _families() -> dict[str, Family]:
    return {name: Family(*found) for name, found in json.loads(TABLE.read_text()).items()}
