"""Stored completions through OpenAI's client."""

from typing import Any

import openai
import pytest
from fakes import StartWorker
from openai import OpenAI
from servers import RunningServer


def _create(server: RunningServer, text: str, **options: Any) -> Any:
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": text}]},
    ]
    return server.client().chat.completions.create(model="fake", messages=messages, **options)


def test_stored_completions(server: RunningServer, start_worker: StartWorker) -> None:
    start_worker()
    stored = server.client().chat.completions
    _create(server, "not stored", metadata={"n": "0"})
    made = [_create(server, f"text {n}", store=True, metadata={"n": f"{n}"}) for n in range(3)]
    assert [found.id for found in stored.list(limit=2)] == [one.id for one in made]
    assert [found.id for found in stored.list(order="desc", limit=1)] == [
        one.id for one in reversed(made)
    ]
    assert [found.id for found in stored.list(metadata={"n": "1"})] == [made[1].id]
    assert stored.list(model="other").data == []

    found = stored.retrieve(made[1].id)
    assert found.choices == made[1].choices
    assert found.metadata == {"n": "1"}  # type: ignore[attr-defined]
    changed = stored.update(made[1].id, metadata={"n": "one"})
    assert changed.metadata == {"n": "one"}  # type: ignore[attr-defined]
    assert [found.id for found in stored.list(metadata={"n": "one"})] == [made[1].id]

    # The client's own type knows only the role `assistant` here, so this call is not strict.
    lenient = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    messages = list(lenient.chat.completions.messages.list(made[1].id, limit=1))
    assert [message.content for message in messages] == ["Be brief.", "text 1"]
    assert [str(message.role) for message in messages] == ["system", "user"]

    assert stored.delete(made[1].id).deleted
    assert [found.id for found in stored.list()] == [made[0].id, made[2].id]


def test_only_stored_ones_are_there(server: RunningServer, start_worker: StartWorker) -> None:
    start_worker()
    stored = server.client().chat.completions
    unstored = _create(server, "x")
    for identity in (unstored.id, "chatcmpl-nothing", "resp_x"):
        calls: Any = (stored.retrieve, stored.delete, stored.messages.list)
        for call in calls:
            with pytest.raises(openai.NotFoundError, match="No stored completion found"):
                call(identity)
        with pytest.raises(openai.NotFoundError):
            stored.update(identity, metadata={})
