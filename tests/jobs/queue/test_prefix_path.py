"""Paths: what begins alike lies together, in the order of a depth-first walk."""

import random
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_rq.jobs.queue.prefix_path import LEVEL, path_of


def chat(system: str, user: str) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": user}]}


def text(seed: object, length: int) -> str:
    return "".join(random.Random(str(seed)).choices("abcdefgh ", k=length))


def runs(order: list[tuple[str, str]]) -> int:
    """Into how many runs of neighbours the groups are cut in the order of their paths."""
    return len(list(groupby(sorted(order), key=lambda pair: pair[1])))


@pytest.mark.parametrize("header", [0, 40, 300, 1500, 5000])
def test_documents_behind_one_header_lie_together(header: int) -> None:
    """Eight questions about each of 50 documents, as long as the header, under one system text."""
    bodies = [
        (path_of(chat("Be brief.", text("header", header) + text(doc, 400 + header) + str(n))), doc)
        for doc in map(str, range(50))
        for n in range(8)
    ]
    assert runs(bodies) == 50


def test_systems_lie_together_whatever_follows() -> None:
    bodies = [
        (path_of(chat(system, text(n, 50 * n))), system) for system in "ABC" for n in range(30)
    ]
    assert runs(bodies) == 3


@given(st.text(max_size=600), st.text(max_size=600), st.text(max_size=600))
def test_paths_agree_as_far_as_the_texts_do(shared: str, one: str, other: str) -> None:
    ways = {"prompt": lambda t: {"prompt": t}, "chat": lambda t: chat("S", t)}
    for way in ways.values():
        first, second = path_of(way(shared + one)), path_of(way(shared + other))
        points = sum(len(shared) >= 128 * 2**n for n in range(9))
        whole = min(len(first), len(second)) // LEVEL - 1  # the last level is of all the text
        levels = min(1 + points, whole)
        assert first[: levels * LEVEL] == second[: levels * LEVEL]


def test_equal_bodies_have_equal_paths_and_others_mostly_do_not() -> None:
    bodies = [chat("S", text(n, 700)) for n in range(200)]
    assert [path_of(body) for body in bodies] == [path_of(body) for body in bodies]
    assert len({path_of(body) for body in bodies}) == 200


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["first", "second"]},
        {"prompt": [1, 2, 3]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": "\ud800"},
        {"input": "plain", "instructions": "be kind"},
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
        {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}]},
        {"messages": [{"role": "system", "content": "only that"}], "tools": [{"type": "function"}]},
    ],
)
def test_every_form_of_a_body_has_one(body: dict[str, Any]) -> None:
    path = path_of(body)
    assert len(path) % LEVEL == 0
    assert set(path) <= set("0123456789abcdef")
    assert path != path_of({"prompt": "something else"})
