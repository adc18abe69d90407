"""Writes alternatives of which a value fits only one, and that several schemas fit together."""

import copy
from itertools import compress
from typing import Any

from mlx_rq.engine.structured.negation import Document, disjoint, negated
from mlx_rq.jobs.openai.schemas import Schema, said_of

_MOST_ALTERNATIVES = 12
"""Alternatives of which each is written with the others excluded."""


def excluding_each_other(
    document: Document, branches: list[Any], base: Schema
) -> tuple[list[Any], bool]:
    """Writes the branches of a `oneOf` without what fits another one as well.

    Says whether that is so of all; else they are as they were. `base` applies to all of them.
    """
    said = [said_of(branch) for branch in branches]
    alone = [said.count(one) == 1 for one in said]  # what fits a twin as well is no answer
    typed = [both(base, branch) for branch in branches]
    meets = [
        [other is not one and not disjoint(document, one, other) for other in typed]
        for one in typed
    ]
    exclusive: list[Any] = []
    for one, others in compress(zip(branches, meets, strict=True), alone):
        meeting = list(compress(branches, others))
        excluded = [negated(document, other) for other in meeting[:_MOST_ALTERNATIVES]]
        if len(meeting) > _MOST_ALTERNATIVES or None in excluded:
            return copy.deepcopy(list(compress(branches, alone))), False
        whole = one
        for schema in excluded:
            whole = both(whole, schema)
        exclusive += [] if whole is False else [whole]
    return copy.deepcopy(exclusive), True


def both(one: Any, other: Any) -> Any:
    """Writes that two schemas fit."""
    if one is False or other is False:
        return False
    wanted = [schema for schema in (one, other) if schema is not True and schema != {}]
    return copy.deepcopy({"allOf": wanted} if len(wanted) > 1 else wanted[0] if wanted else True)
