"""Finds what the references of a schema lead to, within the document; nothing is ever fetched.

References of references can be looked through again and again: whoever reasons about a schema does
so within so many steps (`at_most_steps`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from mlx_rq.jobs.openai.schemas import Schema, subschemas, target

IN_PLACE = ("allOf", "anyOf", "oneOf")
"""The keywords whose schemas apply to the same value as the schema that they stand in."""


_steps_left: ContextVar[list[int] | None] = ContextVar("steps_left", default=None)


class TooManySteps(ValueError):
    """A schema is too much to reason about."""


@contextmanager
def at_most_steps(most: int) -> Iterator[None]:
    """Has what is called within raise TooManySteps after so many schemas looked at."""
    token = _steps_left.set([most])
    try:
        yield
    finally:
        _steps_left.reset(token)


def _step(left: list[int] | None) -> None:
    if left is not None:
        left[0] -= 1
        if left[0] < 0:
            raise TooManySteps


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
    left = _steps_left.get()
    while todo:
        _step(left)
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


def looked_at(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields a schema and every schema within it, each a step."""
    left = _steps_left.get()
    for node in subschemas(schema):
        _step(left)
        yield node


def circular(root: Schema) -> set[str]:
    """Finds the references of a document that lead back to themselves, or lie between such."""
    onward = {
        reference: {inner["$ref"] for inner in _referring(target(root, reference))}
        for reference in {node["$ref"] for node in _referring(root)}
    }
    for _ in range(2):  # those that lead to none, or to which none leads, are on no circle
        backward: dict[str, set[str]] = {reference: set() for reference in onward}
        for reference, inner in onward.items():
            for one in inner & onward.keys():
                backward[one].add(reference)
        count = {reference: len(inner & onward.keys()) for reference, inner in onward.items()}
        done = [reference for reference, inner in count.items() if not inner]
        while done:
            for before in backward[done.pop()]:
                count[before] -= 1
                done += [before] if count[before] == 0 else []
        onward = {one: backward[one] for one, inner in count.items() if inner}
    return set(onward)


def endless(root: Schema) -> str | None:
    """Finds a reference that leads back to itself whatever the value is; None where there is none.

    To validate a value that it applies to never ends.
    """
    done: set[int] = set()
    for start in looked_at(root) if has_one_base(root) else ():
        path = {id(start): (start, _always(root, start))}
        while path:
            node, onward = next(reversed(path.values()))
            step = next((one for one in onward if id(one) not in done), None)
            if step is None:
                done.add(id(node))
                del path[id(node)]
            elif id(step) in path:
                return next(str(one["$ref"]) for one, _ in reversed(path.values()) if "$ref" in one)
            else:
                path[id(step)] = step, _always(root, step)
    return None


def _always(root: Schema, node: Schema) -> Iterator[dict[str, Any]]:
    """Yields the schemas that a value is held against next, whatever it is."""
    inner = [target(root, node["$ref"])] if "$ref" in node else []
    for key in ("allOf", "oneOf"):
        inner += node[key] if isinstance(node.get(key), list) else ()
    inner += [node.get("not"), node.get("if")]
    return (one for one in inner if isinstance(one, dict))


def _referring(schema: Any) -> Iterator[dict[str, Any]]:
    return (node for node in looked_at(schema) if isinstance(node.get("$ref"), str))
