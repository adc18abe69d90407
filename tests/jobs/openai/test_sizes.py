"""How large a body may be: 4 MiB, or what the environment says, wherever bodies come in."""

from pathlib import Path
from typing import Any

import pytest
from batch_helpers import batch_line, refusal, write_jsonl
from redis import Redis

from mlx_rq import Job, RequestError, submit, submit_many
from mlx_rq.jobs.batch.lines import BatchFile
from mlx_rq.jobs.openai.sizes import (
    DEFAULT_MAX_BODY,
    MAX_BODY_VARIABLE,
    max_body_bytes,
    parse_bytes,
)
from mlx_rq.jobs.queue.payload import read_payload

SMALL = {"prompt": "x"}
LARGE = {"prompt": "x" * 100}
TOO_LARGE = "The body has 113 bytes; the limit is 100."


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MAX_BODY_VARIABLE, "100")


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1", 1),
        ("500MB", 500_000_000),
        ("1.5 gb", 1_500_000_000),
        (" 2kb ", 2000),
    ],
)
def test_numbers_of_bytes(text: str, number: int) -> None:
    assert parse_bytes(text) == number


@pytest.mark.parametrize(
    "text", ["", "0", "0.4", "-1", "1 apple", "MB", "1TB", "nan", "1e9", "9" * 400]
)
def test_what_is_no_number_of_bytes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of bytes such as 500MB or 8GB"):
        parse_bytes(text)


def test_the_environment_sets_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max_body_bytes() == DEFAULT_MAX_BODY == 4_194_304
    monkeypatch.setenv(MAX_BODY_VARIABLE, "16MB")
    assert max_body_bytes() == 16_000_000
    monkeypatch.setenv(MAX_BODY_VARIABLE, "much")
    with pytest.raises(RequestError, match=f"Invalid {MAX_BODY_VARIABLE} .* 'much' is not a") as no:
        max_body_bytes()
    assert (no.value.code, no.value.param) == ("invalid_value", "max_body")


def refused_with(error: RequestError | None) -> tuple[str, str | None]:
    assert error is not None
    return str(error), error.code


@pytest.mark.usefixtures("limit")
class TestAboveIt:
    def test_submit_refuses(self, redis_url: str, connection: Redis) -> None:
        submit(SMALL)
        with pytest.raises(RequestError) as error:
            submit(LARGE)
        assert refused_with(error.value) == (TOO_LARGE, "request_too_large")

    def test_submit_many_refuses_all(self, redis_url: str, connection: Redis) -> None:
        with pytest.raises(RequestError) as error:
            submit_many([SMALL, LARGE])
        assert refused_with(error.value) == (f"bodies[1]: {TOO_LARGE}", "request_too_large")
        assert connection.dbsize() == 0

    def test_a_batch_line_gets_an_error_record(self, tmp_path: Path) -> None:
        lines = [batch_line("a", "x"), batch_line("b", "x" * 100)]
        path = write_jsonl(tmp_path / "in.jsonl", lines)
        good, bad = map(refusal, BatchFile(path, path.name, {}))
        assert good is None
        assert refused_with(bad)[1] == "request_too_large"

    def test_what_was_put_in_by_hand_is_refused_where_it_is_read(
        self, redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(MAX_BODY_VARIABLE)
        job = submit(LARGE)
        monkeypatch.setenv(MAX_BODY_VARIABLE, "100")
        with pytest.raises(RequestError) as error:
            read_payload(_data(connection, job))
        assert refused_with(error.value) == (TOO_LARGE, "request_too_large")

    def test_escapes_do_not_count_where_it_is_read(self, redis_url: str, connection: Redis) -> None:
        body = {"prompt": "ü" * 43}  # 99 bytes, which RQ stores as six for each ü
        assert read_payload(_data(connection, submit(body))).body == body


def test_a_larger_limit_holds_for_producer_and_worker(
    redis_url: str, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MAX_BODY_VARIABLE, "20MB")
    body = {"prompt": "ü" * 9_000_000}
    assert read_payload(_data(connection, submit(body))).body == body


def _data(connection: Redis, job: Job) -> Any:
    return connection.hget(f"rq:job:{job.id}", "data")
