"""Gathers in `$defs` what the references of a schema lead to in other places.

    {$ref: "#/paypal/item", paypal: {item: {oneOf: ...}}}

Nobody looks for schemas there: they would be neither closed nor rewritten. And where others are
rewritten (`#/then/properties/x`), what a reference leads to would be gone.
"""

import copy
from typing import Any

from mlx_rq.engine.structured.references import has_one_base, looked_at
from mlx_rq.jobs.openai.schemas import subschemas, target

_PLACE = "mlx-rq-place-"
"""How definitions begin that were in other places."""
_REWRITTEN = frozenset(
    (
        *("contains", "dependencies", "dependentSchemas", "else", "if", "items", "not", "oneOf"),
        *("propertyNames", "then"),
    )
)
"""Keywords within which nothing stays where it is."""


def gathered(root: dict[str, Any]) -> dict[str, Any]:
    """Gives a schema whose references lead only to where schemas are looked for.

    Changes the one that it is given. Where references have several bases, it stays as it is.
    """
    if not has_one_base(root):
        return root
    known = set(map(id, subschemas(root)))
    names: dict[str, str] = {}
    places: dict[str, Any] = {}
    todo = [("", root)]
    while todo:
        name, place = todo.pop()
        if name:  # not at once: whoever copies so much is stopped by the steps that it takes
            place = places[name] = copy.deepcopy(place)
        for node in looked_at(place):
            reference: Any = node.get("$ref")
            found = target(root, reference)
            if not isinstance(found, dict) or (id(found) in known and _stays(reference)):
                continue
            if reference not in names:
                names[reference] = f"{_PLACE}{len(names)}"
                todo.append((names[reference], found))
            node["$ref"] = f"#/$defs/{names[reference]}"
    return {**root, "$defs": {**root.get("$defs", {}), **places}} if places else root


def _stays(reference: str) -> bool:
    return _REWRITTEN.isdisjoint(reference.split("/"))
