"""Finds what the references of a schema lead to, within the document; nothing is ever fetched."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from mlx_rq.jobs.openai.schemas import Schema, subschemas

IN_PLACE = ("allOf", "anyOf", "oneOf")
"""The keywords whose schemas apply to the same value as the schema that they stand in."""


def target(root: Schema, reference: Any) -> Any:
    """Finds the schema that a reference leads to; None where it is none within the document."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    node: Any = root
    pointer = unquote(reference[1:])
    if not pointer:
        return root
    if not pointer.startswith("/"):
        return None
    for step in pointer[1:].split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and step in node:
            node = node[step]
        elif isinstance(node, list) and step.isdecimal() and int(step) < len(node):
            node = node[int(step)]
        else:
            return None
    return node if isinstance(node, (dict, bool)) else None


def has_one_base(root: Schema) -> bool:
    """Says whether all references mean the document as a whole: no schema within has an id."""
    return not any(
        isinstance(node.get(key), str)
        for node in subschemas(root)
        if node is not root
        for key in ("$id", "id", "$dynamicRef", "$recursiveRef")
    )


def parts_of(root: Schema, schema: Any, *, sure: bool = False) -> Iterator[dict[str, Any]]:
    """Yields a schema and all others that apply to the same value, each once.

    Only those that apply whatever the value is, where they shall be `sure`.
    """
    todo, seen = [schema], set()
    while todo:
        node = todo.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        inner = [node.get(key) for key in (("allOf",) if sure else IN_PLACE)]
        todo += [one for several in inner if isinstance(several, list) for one in several]
        if "$ref" in node:
            todo.append(target(root, node["$ref"]))
        if not sure:
            todo += [node.get(key) for key in ("if", "then", "else")]
            for key in ("dependentSchemas", "dependencies"):
                todo += node[key].values() if isinstance(node.get(key), dict) else ()
