"""How a body may be encoded, and what its JSON may not say."""

import asyncio
import gzip
import json
import zlib
from typing import Any

import pytest
from fakes import StartWorker
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import RunningServer

from mlx_rq.api_stub import bodies
from mlx_rq.api_stub.bodies import BodyLimit
from mlx_rq.jobs.openai.sizes import MAX_BODY_VARIABLE

JSON = {"content-type": "application/json"}
PROMPT = b'{"prompt": "x"}'


def test_gzip_is_decoded_and_other_encodings_are_refused(
    server: RunningServer, start_worker: StartWorker
) -> None:
    start_worker()
    two_parts = gzip.compress(PROMPT[:5]) + gzip.compress(PROMPT[5:])
    deflated = zlib.compress(PROMPT)
    for encoding, content, status, code in (
        ("gzip", gzip.compress(PROMPT), 202, None),
        ("X-GZIP", two_parts, 202, None),
        ("identity", PROMPT, 202, None),
        ("gzip", gzip.compress(PROMPT)[:-3], 400, "invalid_encoding"),
        ("gzip", PROMPT, 400, "invalid_encoding"),
        ("gzip", b"", 400, "invalid_encoding"),
        ("deflate", deflated, 415, "unsupported_content_encoding"),
        ("gzip, gzip", gzip.compress(gzip.compress(PROMPT)), 415, "unsupported_content_encoding"),
    ):
        headers = {**JSON, "content-encoding": encoding}
        answer = server.http.post("/v1/jobs", content=content, headers=headers)
        assert answer.status_code == status, (encoding, answer.text)
        assert code is None or answer.json()["error"]["code"] == code
        assert (answer.headers.get("accept-encoding") == "gzip") == (status == 415)
    lines = b'{"custom_id": "1"}\n'
    form = server.http.build_request(
        "POST", "/v1/files", files={"file": ("f", lines)}, data={"purpose": "user_data"}
    )
    upload = server.http.post(
        "/v1/files",
        content=gzip.compress(form.read()),
        headers={"content-type": form.headers["content-type"], "content-encoding": "gzip"},
    )
    assert upload.json()["bytes"] == len(lines)


def test_what_a_small_body_becomes_has_the_limit(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MAX_BODY_VARIABLE, "1000")
    for length, status in ((1990, 400), (2001, 413), (20_000_000, 413)):
        bomb = gzip.compress(b" " * length)
        headers = {**JSON, "content-encoding": "gzip"}
        answer = server.http.post("/v1/jobs", content=bomb, headers=headers)
        assert answer.status_code == status, length


@settings(max_examples=30)
@given(
    st.lists(st.binary(max_size=50) | st.just(b"0" * 500), min_size=1, max_size=4),
    st.integers(1, 300),
    st.integers(1, 300),
)
def test_pieces_make_the_whole_however_they_come(parts: list[bytes], size: int, piece: int) -> None:
    encoded = b"".join(map(gzip.compress, parts))
    chunks = [encoded[at : at + size] for at in range(0, len(encoded), size)]
    messages: list[Any] = [
        {"type": "http.request", "body": chunk, "more_body": number < len(chunks)}
        for number, chunk in enumerate(chunks, 1)
    ]
    messages.append({"type": "http.disconnect"})
    seen: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while not seen or seen[-1]["type"] == "http.request":
            seen.append(await receive())

    scope = {"type": "http", "path": "/", "headers": [(b"content-encoding", b"gzip")]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "_PIECE_BYTES", piece)
        asyncio.run(BodyLimit(app)(scope, receive, lambda _: None))  # type: ignore[arg-type]
    *come, last = seen
    assert b"".join(message["body"] for message in come) == b"".join(parts)
    assert [message["more_body"] for message in come] == [True] * (len(come) - 1) + [False]
    assert max(len(message["body"]) for message in come) <= piece
    assert last == {"type": "http.disconnect"}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"prompt": "x", "prompt": "x"}', "prompt"),
        ('{"messages": [{"role": "user", "role": "system", "content": "x"}]}', "role"),
        ('{"prompt": "x", "metadata": {"\\u0061": "1", "b": "2", "a": "3"}}', "a"),
    ],
)
def test_a_key_that_occurs_twice(server: RunningServer, text: str, key: str) -> None:
    error = server.http.post("/v1/jobs", content=text, headers=JSON).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_json", key)
    assert error["message"].endswith(f"the key {key!r} occurs twice in one object.")
    json.loads(text)  # it is what many a reader takes
