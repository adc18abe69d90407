"""One way in: whoever brings a body, it is validated once and encoded once."""

import inspect
import json
import math
import zlib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from batch_helpers import CHAT, batch_line, write_jsonl
from hypothesis import given
from hypothesis import strategies as st
from redis import Redis
from rq import Queue, Retry
from rq.job import Job as RQJob

from mlx_rq import RequestError, submit, submit_many
from mlx_rq.jobs.batch.batch import BatchOptions
from mlx_rq.jobs.batch.flight import Flight
from mlx_rq.jobs.batch.lines import BatchFile, digest, good_line, parse_object
from mlx_rq.jobs.openai import validation
from mlx_rq.jobs.openai.validation import encode_body
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.options import RECOVERY_RETRIES, JobOptionFields, JobOptions
from mlx_rq.jobs.queue.payload import FUNCTION, SERIALIZER, read_payload, write_payload
from mlx_rq.jobs.queue.prepare import check_encoded, prepare
from mlx_rq.worker.cli.batch_forecast import forecast

MARK = "Say a word that nobody else says."
SOON = {"background": True, "background_options": {"completion_window": "soonest"}}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": MARK}], "model": "m"},
    "completion": {"prompt": MARK},
    "responses": {"input": MARK, **SOON},
    "token_count": {"count_tokens": {"prompt": MARK}},
}
every_kind = pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)

texts = st.text(st.characters(codec=None, exclude_categories=()), max_size=20)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
)
bodies = st.dictionaries(texts, values, max_size=4)


@pytest.fixture
def validated(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The bodies that were validated, by whomever."""
    seen: list[Any] = []
    whole = validation.validate_as

    def counting(model: Any, body: Any) -> Any:
        seen.append(body)
        return whole(model, body)

    monkeypatch.setattr(validation, "validate_as", counting)
    return seen


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The JSON with MARK in it that was written by `json`."""
    seen: list[str] = []
    whole = json.JSONEncoder.encode

    def counting(self: json.JSONEncoder, value: Any) -> str:
        text = whole(self, value)
        if MARK in text:
            seen.append(text)
        return text

    monkeypatch.setattr(json.JSONEncoder, "encode", counting)
    return seen


class TestOnce:
    @every_kind
    @pytest.mark.parametrize("way", [submit, lambda body: submit_many([body])])
    def test_what_is_submitted(
        self,
        redis_url: str,
        validated: list[Any],
        encoded: list[str],
        body: dict[str, Any],
        way: Callable[[Any], Any],
    ) -> None:
        way(body)
        assert (len(validated), len(encoded)) == (1, 1)

    def test_a_schema_is_written_out_once_for_all_bodies(
        self, redis_url: str, validated: list[Any], encoded: list[str]
    ) -> None:
        submit_many([BODIES["chat"]] * 3, schema={"type": "object"})
        assert (len(validated), len(encoded)) == (3, 3)

    @pytest.fixture
    def source(self, tmp_path: Path) -> BatchFile:
        lines = [batch_line("a", MARK, model="m"), batch_line("b", MARK, schema="none such")]
        path = write_jsonl(tmp_path / "in.jsonl", lines)
        return BatchFile(path, path.name, {})

    def test_a_line_of_a_batch(
        self,
        redis_url: str,
        connection: Redis,
        source: BatchFile,
        validated: list[Any],
        encoded: list[str],
    ) -> None:
        turns = Flight(JobOptions(), redis_url=redis_url, ordered=False).run(source)
        (ended,) = next(turns)
        assert ended.line.custom_id == "b"
        assert (len(validated), len(encoded)) == (2, 2)
        (job_id,) = Queue(keys.queue_name("m", "default"), connection=connection).job_ids
        data: Any = connection.hget(RQJob.key_for(job_id), "data")
        assert read_payload(data) == ("chat", batch_line("a", MARK, model="m")["body"])

    def test_a_line_that_is_only_looked_at(
        self,
        nobody_listens: str,
        source: BatchFile,
        validated: list[Any],
        encoded: list[str],
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        forecast(source, BatchOptions(redis_url=nobody_listens), as_json=False)
        assert "2 lines, would be refused: 1 unknown_parameter" in capsys.readouterr().out
        assert (len(validated), len(encoded)) == (2, 2)


class TestTheRecord:
    """What `enqueue` writes is what RQ would have written."""

    @pytest.mark.parametrize(
        ("options", "timeout"),
        [
            (JobOptions(), -1),
            (JobOptions("low", 77, 1.5, 5, True, "https://example.org/hook", "ann"), 2),
        ],
        ids=["default", "all"],
    )
    @every_kind
    def test_it_equals_rqs(
        self,
        redis_url: str,
        connection: Redis,
        body: dict[str, Any],
        options: JobOptions,
        timeout: int,
    ) -> None:
        given: Any = {field.name: getattr(options, field.name) for field in fields(options)}
        # Neighbours of other kinds and models, so that the job is not the first of its step.
        jobs = submit_many([*BODIES.values(), body, {**body, "model": "another"}], **given)
        job_id = jobs[len(BODIES)].id
        written: dict[bytes, bytes] = connection.hgetall(RQJob.key_for(job_id))

        prepared = prepare(body)
        queue = Queue(
            keys.queue_name(prepared.model, prepared.priority or options.priority),
            connection=connection,
            serializer=SERIALIZER,
        )
        job = queue.create_job(
            FUNCTION,
            kwargs={"kind": prepared.kind, "body": body},
            job_id=job_id,
            description=f"{prepared.kind} for {prepared.model}",
            timeout=timeout,
            result_ttl=options.result_ttl,
            failure_ttl=options.result_ttl,
            retry=Retry(max=options.max_attempts - 1 + RECOVERY_RETRIES),
            meta={"max_attempts": options.max_attempts},
        )
        job.enqueued_at = job.created_at
        expected = connection.connection_pool.get_encoder()
        rqs = {name.encode(): expected.encode(value) for name, value in job.to_dict().items()}

        assert written.keys() == rqs.keys()
        apart = (b"data", b"meta", b"created_at", b"enqueued_at")
        assert {name: written[name] for name in rqs if name not in apart} == {
            name: rqs[name] for name in rqs if name not in apart
        }
        assert json.loads(zlib.decompress(written[b"data"])) == json.loads(
            zlib.decompress(rqs[b"data"])
        )
        fetched = RQJob.fetch(job_id, connection=connection, serializer=SERIALIZER)
        assert (fetched.kwargs, fetched.args, fetched.instance) == (job.kwargs, [], None)
        assert fetched.created_at <= fetched.enqueued_at
        assert fetched.meta == {
            "max_attempts": options.max_attempts,
            "timeout": options.timeout,
            "stream": options.stream,
            "submitted_at": pytest.approx(fetched.created_at.timestamp(), abs=5),
            "prefix": "",
            "path": prepared.path,
            **({} if options.webhook is None else {"webhook": options.webhook}),
            **({} if options.owner is None else {"owner": options.owner}),
        }
        assert queue.job_ids.count(job_id) == 1

    def test_each_has_a_time_of_its_own_by_which_recovery_puts_them_back_in_order(
        self, redis_url: str, connection: Redis
    ) -> None:
        jobs = submit_many([BODIES["chat"]] * 100)
        times = [connection.hget(RQJob.key_for(job.id), "enqueued_at") for job in jobs]
        assert times == sorted(set(times))

    @given(bodies)
    def test_the_data_is_what_rqs_serializer_writes(self, body: dict[str, Any]) -> None:
        whole = [FUNCTION, None, [], {"kind": "chat", "body": body}]
        data = write_payload("chat", json.dumps(body).encode())
        assert zlib.decompress(data) == SERIALIZER.dumps(whole)


@given(bodies)
def test_what_is_encoded_already_is_refused_where_encoding_it_would_be(
    body: dict[str, Any],
) -> None:
    def fault(check: Callable[[], Any]) -> str | None:
        try:
            check()
        except RequestError as error:
            return f"{error.code}: {error}"
        return None

    encoded = json.dumps(body).encode()
    assert fault(lambda: check_encoded(encoded, body)) == fault(lambda: encode_body(body))


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"prompt": "a\ud800"}, "prompt"),
        ({"messages": [{"role": "user", "content": "\udcff"}]}, "messages[0].content"),
        ({"input": "x", "metadata": {"a": "b", "\ud800": "c"}}, r"metadata.\ud800"),
        ({"prompt": "x", "model": "\ud800"}, "model"),
        ({"prompt": "x", "\ud800": 1}, r"\ud800"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_and_where_it_stands_is_said(
    body: dict[str, Any], place: str
) -> None:
    with pytest.raises(RequestError) as refused:
        prepare(body)
    assert str(refused.value) == (
        f"Invalid '{place}': expected a text, but got one with half of a surrogate pair in it "
        r'(as "\ud800" is, or a byte that is no UTF-8).'
    )
    assert (refused.value.code, refused.value.param) == ("invalid_value", place)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "\ud800", "a\udfff"])
def test_what_is_no_json_is_found_in_what_is_encoded_already(value: Any) -> None:
    body = {"x": [value]}
    with pytest.raises(RequestError, match=r"^The body is not JSON|^Invalid 'x\[0\]': expected"):
        check_encoded(json.dumps(body).encode(), body)


@given(bodies)
def test_a_line_is_named_as_it_was_in_earlier_versions(body: dict[str, Any]) -> None:
    # The outputs of unfinished batches hold these names.
    line = good_line(1, 'ü"1', CHAT, body, {})
    assert line.fingerprint == digest(json.dumps(['ü"1', CHAT, body]).encode())


@given(
    bodies.map(json.dumps)
    | bodies.map(lambda body: json.dumps(body, ensure_ascii=False))
    | st.text().map("{{{}}}".format)
    | st.integers(1, 2000).map(lambda depth: '{"a":' * depth + "1" + "}" * depth)
    | st.from_regex(r'\A\{"a":-?[0-9]{0,25}(\.[0-9]{0,25})?([eE][-+]?[0-9]{1,3})?\}\Z')
)
def test_lines_are_read_as_json_reads_them(text: str) -> None:
    raw = text.encode(errors="replace")
    try:
        expected = json.loads(raw.decode())
    except (ValueError, RecursionError):
        with pytest.raises(RequestError):
            parse_object(raw)
    else:
        assert repr(parse_object(raw)) == repr(expected)


class TestOptions:
    def test_they_are_the_same_as_fields_and_as_keyword_arguments(self) -> None:
        assert get_type_hints(JobOptionFields) == get_type_hints(JobOptions)

    def test_submit_has_all_of_them_with_their_defaults(self) -> None:
        parameters = inspect.signature(submit).parameters
        for field in fields(JobOptions):
            assert parameters[field.name].default == field.default
            assert f"\n    {field.name}: " in str(submit.__doc__)
            assert f"`{field.name}`" in str(submit_many.__doc__)
