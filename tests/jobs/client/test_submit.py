"""What `submit()` puts into Redis, and that it puts in nothing when something is wrong."""

import json
import math
import re
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from pydantic import BaseModel
from redis import Redis
from rq import Queue
from rq.job import Job as RQJob

from mlx_rq import IdempotencyConflict, Job, RequestError, fetch, submit, submit_many
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.connection import URL_VARIABLE, resolve_url
from mlx_rq.jobs.queue.enqueue import JOBS_PER_STEP
from mlx_rq.jobs.queue.options import DEFAULT_RESULT_TTL
from mlx_rq.jobs.queue.payload import FUNCTION, SERIALIZER, read_payload

HI = [{"role": "user", "content": "Say hi."}]
A_WEEK = 7 * 24 * 3600


def queue(connection: Redis, model: str = "default", priority: Any = "default") -> Queue:
    return Queue(keys.queue_name(model, priority), connection=connection, serializer=SERIALIZER)


def rq_job(connection: Redis, job: Job) -> RQJob:
    return RQJob.fetch(job.id, connection=connection, serializer=SERIALIZER)


def payload(connection: Redis, job: Job) -> tuple[str, dict[str, Any]]:
    return tuple(read_payload(connection.hget(RQJob.key_for(job.id), "data")))


class TestWhatLiesInRedis:
    def test_a_chat_job_waits_in_the_queue_of_its_model(
        self, redis_url: str, connection: Redis
    ) -> None:
        job = submit(messages=HI, model="org/model", max_completion_tokens=8)

        assert queue(connection, "org/model").job_ids == [job.id]
        assert job.status() == "queued"
        body = {"messages": HI, "model": "org/model", "max_completion_tokens": 8}
        assert payload(connection, job) == ("chat", body)

    def test_a_body_without_model_waits_for_any_worker(
        self, redis_url: str, connection: Redis
    ) -> None:
        job = submit(prompt="Once upon a time")
        assert queue(connection, "default").job_ids == [job.id]
        assert payload(connection, job) == ("completion", {"prompt": "Once upon a time"})

    def test_a_body_whose_tokens_are_to_be_counted_waits_for_the_same_model(
        self, redis_url: str, connection: Redis
    ) -> None:
        body = {"count_tokens": {"messages": HI, "model": "org/model"}}
        job = submit(body)
        assert queue(connection, "org/model").job_ids == [job.id]
        assert payload(connection, job) == ("token_count", body)
        with pytest.raises(RequestError, match="response_format"):
            submit(body, schema={"type": "object"})

    def test_a_body_and_fields_make_one_body(self, redis_url: str, connection: Redis) -> None:
        body = {"messages": HI, "seed": 1}
        job = submit(body, seed=2, temperature=0)
        assert payload(connection, job)[1] == {"messages": HI, "seed": 2, "temperature": 0}
        assert body == {"messages": HI, "seed": 1}

    def test_the_options_reach_rq(self, redis_url: str, connection: Redis) -> None:
        job = submit(messages=HI, priority="high", result_ttl=77, timeout=1.5, max_attempts=5)

        (waiting,) = queue(connection, priority="high").jobs
        assert waiting.id == job.id
        assert (waiting.result_ttl, waiting.failure_ttl) == (77, 77)
        assert waiting.timeout == 2
        assert waiting.meta["max_attempts"] == 5
        assert waiting.meta["timeout"] == 1.5
        assert waiting.retries_left == 5 - 1 + 3
        assert waiting.func_name == FUNCTION

    def test_without_options_a_result_is_kept_for_a_week_and_there_is_no_timeout(
        self, redis_url: str, connection: Redis
    ) -> None:
        waiting = rq_job(connection, submit(messages=HI))
        assert DEFAULT_RESULT_TTL == A_WEEK
        assert (waiting.result_ttl, waiting.timeout) == (A_WEEK, -1)
        assert waiting.meta["max_attempts"] == 3
        assert waiting.meta["timeout"] is None

    def test_dashboards_see_no_prompt(self, redis_url: str, connection: Redis) -> None:
        job = submit(messages=[{"role": "user", "content": "a secret"}], model="m")
        fields = connection.hgetall(RQJob.key_for(job.id))
        assert fields[b"description"] == b"chat for m"
        del fields[b"data"]
        assert b"secret" not in b"".join(fields.values())

    def test_an_idle_worker_is_woken_by_a_bell(self, redis_url: str, connection: Redis) -> None:
        for _ in range(20):
            submit(messages=HI, model="m")
        assert connection.llen(keys.wake_up("m")) == 16

    def test_ids_cannot_be_guessed_and_are_all_different(self, redis_url: str) -> None:
        ids = {job.id for job in submit_many([{"messages": HI}] * 100)}
        assert len(ids) == 100
        assert all(re.fullmatch("[0-9a-f]{32}", job_id) for job_id in ids)

    def test_unicode_comes_back_as_it_went_in(self, redis_url: str, connection: Redis) -> None:
        messages = [{"role": "user", "content": 'Grüße 🌍 \u2028 \x00 "日本語" \\'}]
        job = submit(messages=messages)
        assert payload(connection, job) == ("chat", {"messages": messages})

    def test_a_model_name_with_colons_slashes_and_commas_has_one_queue(
        self, redis_url: str, connection: Redis
    ) -> None:
        name = "a:b/c,d e%é"
        job = submit(messages=HI, model=name)
        assert queue(connection, name).job_ids == [job.id]
        assert job.info()["model"] == name
        assert job.info()["priority"] == "default"

    def test_everything_is_json_and_nothing_is_pickled(
        self, redis_url: str, connection: Redis
    ) -> None:
        submit_many([{"messages": HI}, {"prompt": "Hi"}], timeout=3)
        jobs = list(connection.scan_iter("rq:job:*"))
        assert len(jobs) == 2
        for key in jobs:
            fields = connection.hgetall(key)
            function, instance, arguments, kwargs = json.loads(zlib.decompress(fields[b"data"]))
            assert (function, instance, arguments) == (FUNCTION, None, [])
            assert set(kwargs) == {"kind", "body"}
            assert json.loads(fields[b"meta"])["timeout"] == 3

    def test_a_schema_becomes_the_response_format_that_openais_client_sends(
        self, redis_url: str, connection: Redis
    ) -> None:
        class Person(BaseModel):
            name: str

        as_class = submit(messages=HI, schema=Person)
        as_json_schema = submit(messages=HI, schema=Person.model_json_schema())

        schema = Person.model_json_schema()
        assert payload(connection, as_class)[1]["response_format"] == {
            "type": "json_schema",
            "json_schema": {"name": "Person", "schema": schema, "strict": True},
        }
        assert payload(connection, as_json_schema)[1]["response_format"] == {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": schema, "strict": True},
        }


class TestRefusal:
    @pytest.mark.parametrize(
        ("body", "code", "param"),
        [
            ({"messages": HI, "temperature": 200}, "decimal_above_max_value", "temperature"),
            ({}, "missing_required_parameter", "messages"),
            ({"messages": HI, "prompt": "x"}, "invalid_value", "prompt"),
            (
                {"input": "x", "max_output_tokens": 15},
                "integer_below_min_value",
                "max_output_tokens",
            ),
            (
                {"messages": HI, "chat_template_kwargs": {"x": math.nan}},
                "invalid_json",
                None,
            ),
            (
                {"messages": [{"role": "user", "content": "\ud800"}]},
                "invalid_value",
                "messages[0].content",
            ),
            ({"prompt": "x" * 5_000_000}, "request_too_large", None),
        ],
        ids=["range", "empty", "two kinds", "responses", "nan", "lone surrogate", "too large"],
    )
    def test_a_bad_body_is_refused_and_nothing_is_stored(
        self, redis_url: str, connection: Redis, body: Any, code: str, param: str | None
    ) -> None:
        with pytest.raises(RequestError) as refused:
            submit(body)
        assert (refused.value.code, refused.value.param) == (code, param)
        assert connection.dbsize() == 0

    @pytest.mark.parametrize("body", [[HI], "Hi", 5, [("messages", HI)]])
    def test_a_body_that_is_no_object_is_refused(
        self, redis_url: str, connection: Redis, body: Any
    ) -> None:
        with pytest.raises(RequestError, match=r"^Invalid body: expected an object") as refused:
            submit(body)
        assert refused.value.code == "invalid_type"
        assert connection.dbsize() == 0

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            *(("priority", value) for value in ("urgent", None, 1, [], "High")),
            *(("result_ttl", value) for value in (0, -1, 1.5, "60", True, None, 2**31)),
            *(("timeout", value) for value in (0, -1, "60", True, math.nan, math.inf, 2**31)),
            *(("max_attempts", value) for value in (0, -1, 101, 1.5, "3", True, None)),
            *(("stream", value) for value in ("no", 1, None)),
        ],
    )
    def test_an_option_out_of_its_range_is_refused_by_name(
        self, redis_url: str, connection: Redis, option: str, value: Any
    ) -> None:
        for call in (
            lambda: submit(messages=HI, **{option: value}),
            lambda: submit_many([{"messages": HI}], **{option: value}),
        ):
            with pytest.raises(RequestError) as refused:
                call()
            assert (refused.value.code, refused.value.param) == ("invalid_value", option)
            assert str(refused.value).startswith(f"Invalid '{option}': expected ")
            assert str(refused.value).endswith(f", but got {value!r} instead.")
        assert connection.dbsize() == 0

    @pytest.mark.parametrize("url", [3, b"redis://h", ["redis://h"]])
    def test_what_is_no_url_is_refused_by_name(self, url: Any) -> None:
        with pytest.raises(
            RequestError, match=r"^Invalid 'redis_url': expected a text "
        ) as refused:
            submit(messages=HI, redis_url=url)
        assert refused.value.param == "redis_url"

    @pytest.mark.parametrize(
        ("option", "values"),
        [
            ("priority", ("high", "default", "low")),
            ("result_ttl", (1, 2**31 - 1)),
            ("timeout", (0.001, 1, 2**31 - 1, None)),
            ("max_attempts", (1, 100)),
        ],
    )
    def test_both_ends_of_an_options_range_are_good(
        self, redis_url: str, option: str, values: tuple[Any, ...]
    ) -> None:
        for value in values:
            assert submit(messages=HI, **{option: value}).status() == "queued"


class TestMany:
    def test_jobs_come_in_the_order_of_the_bodies(self, redis_url: str, connection: Redis) -> None:
        bodies: list[dict[str, Any]] = [
            {"prompt": str(number), "model": "ab"[number % 2]} for number in range(10)
        ]
        jobs = submit_many(bodies)
        assert [payload(connection, job)[1] for job in jobs] == bodies
        assert queue(connection, "a").job_ids == [job.id for job in jobs[::2]]
        assert queue(connection, "b").job_ids == [job.id for job in jobs[1::2]]

    def test_more_than_one_transaction_keeps_the_order(
        self, redis_url: str, connection: Redis
    ) -> None:
        count = 2 * JOBS_PER_STEP + 1
        jobs = submit_many({"prompt": str(number)} for number in range(count))
        assert queue(connection).job_ids == [job.id for job in jobs]
        assert payload(connection, jobs[-1]) == ("completion", {"prompt": str(count - 1)})

    def test_nothing_is_nothing(self, redis_url: str, connection: Redis) -> None:
        assert submit_many([]) == []
        assert connection.dbsize() == 0

    def test_one_bad_body_refuses_all_and_is_named(self, redis_url: str, connection: Redis) -> None:
        bodies: list[Any] = [{"messages": HI} for _ in range(JOBS_PER_STEP + 5)]
        bodies[-2] = {"messages": HI, "top_p": 2}
        with pytest.raises(RequestError) as refused:
            submit_many(bodies)
        assert refused.value.error == {
            "message": f"bodies[{len(bodies) - 2}]: Invalid 'top_p': decimal above maximum value. "
            "Expected a value <= 1, but got 2 instead.",
            "type": "invalid_request_error",
            "param": "top_p",
            "code": "decimal_above_max_value",
        }
        assert connection.dbsize() == 0

    def test_a_body_that_is_no_object_is_named(self, redis_url: str, connection: Redis) -> None:
        with pytest.raises(RequestError, match=r"^bodies\[1\]: Invalid body: expected an object"):
            submit_many([{"messages": HI}, "Hi"])  # type: ignore[list-item]
        assert connection.dbsize() == 0

    def test_bodies_that_fail_while_they_are_made_leave_nothing(
        self, redis_url: str, connection: Redis
    ) -> None:
        def bodies() -> Iterator[dict[str, Any]]:
            yield {"messages": HI}
            raise OSError("the file ended")

        with pytest.raises(OSError, match="the file ended"):
            submit_many(bodies())
        assert connection.dbsize() == 0


class TestIdempotency:
    def test_the_same_key_and_body_is_the_same_job(self, redis_url: str, connection: Redis) -> None:
        first = submit(messages=HI, idempotency_key="k")
        second = submit({"messages": HI}, idempotency_key="k")
        assert second == first
        assert queue(connection).job_ids == [first.id]

    def test_the_order_of_a_bodys_fields_makes_no_other_body(
        self, redis_url: str, connection: Redis
    ) -> None:
        first = submit({"messages": HI, "seed": 1}, idempotency_key="k")
        assert submit({"seed": 1, "messages": HI}, idempotency_key="k") == first

    def test_another_key_is_another_job(self, redis_url: str) -> None:
        assert submit(messages=HI, idempotency_key="k") != submit(messages=HI, idempotency_key="l")

    def test_another_body_under_the_same_key_is_refused(
        self, redis_url: str, connection: Redis
    ) -> None:
        first = submit(messages=HI, idempotency_key="k")
        with pytest.raises(IdempotencyConflict) as refused:
            submit(messages=HI, seed=1, idempotency_key="k")
        assert refused.value.code == "idempotency_conflict"
        assert refused.value.param == "idempotency_key"
        assert "'k' was already used for a request with another body" in str(refused.value)
        assert queue(connection).job_ids == [first.id]

    def test_twenty_threads_at_once_make_one_job(self, redis_url: str, connection: Redis) -> None:
        with ThreadPoolExecutor(20) as pool:
            jobs = list(pool.map(lambda _: submit(messages=HI, idempotency_key="k"), range(20)))
        assert len(set(jobs)) == 1
        assert queue(connection).job_ids == [jobs[0].id]

    def test_the_key_is_kept_as_long_as_its_job(self, redis_url: str, connection: Redis) -> None:
        first = submit(messages=HI, idempotency_key="k", result_ttl=60)
        days = 24 * 3600
        assert 29 * days < connection.ttl(keys.idempotency("k")) <= 30 * days + 60
        connection.expire(keys.result(first.id), 1)
        assert submit(messages=HI, idempotency_key="k", result_ttl=60) == first

        first.delete()
        second = submit(messages=HI, seed=1, idempotency_key="k")
        assert second != first
        assert submit(messages=HI, seed=1, idempotency_key="k") == second

    @pytest.mark.parametrize("key", ["", 3, True, b"k", ["k"], "\ud800"])
    def test_what_is_no_key_is_refused_by_name(
        self, redis_url: str, connection: Redis, key: Any
    ) -> None:
        with pytest.raises(RequestError) as refused:
            submit(messages=HI, idempotency_key=key)
        assert str(refused.value) == (
            "Invalid 'idempotency_key': expected a text that is not empty, "
            f"but got {key!r} instead."
        )
        with pytest.raises(RequestError, match=r"^Invalid 'idempotency_keys\[1\]': expected "):
            submit_many([{"messages": HI}] * 2, idempotency_keys=["a", key])
        assert connection.dbsize() == 0

    def test_a_text_is_no_list_of_keys(self, redis_url: str, connection: Redis) -> None:
        with pytest.raises(RequestError, match="'idempotency_keys': expected one key for each "):
            submit_many([{"messages": HI}] * 2, idempotency_keys="ab")
        assert connection.dbsize() == 0

    def test_the_key_itself_is_not_stored(self, redis_url: str, connection: Redis) -> None:
        submit(messages=HI, idempotency_key="customer@example.com")
        assert not [key for key in connection.scan_iter("*") if b"example" in key]


class TestWhere:
    def test_the_argument_comes_before_the_environment_and_that_before_localhost(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(URL_VARIABLE, raising=False)
        assert resolve_url() == "redis://localhost:6379/0"
        monkeypatch.setenv(URL_VARIABLE, "redis://elsewhere:1/2")
        assert resolve_url() == "redis://elsewhere:1/2"
        assert resolve_url("redis://here:3/4") == "redis://here:3/4"

    def test_a_job_is_found_again_where_it_was_put(
        self, redis_url: str, monkeypatch: pytest.MonkeyPatch, nobody_listens: str
    ) -> None:
        monkeypatch.setenv(URL_VARIABLE, nobody_listens)
        job = submit(messages=HI, redis_url=redis_url)
        assert job.status() == "queued"
        assert fetch(job.id, redis_url=redis_url) == job
