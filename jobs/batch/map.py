"""`mlx_rq.map`: a prompt over the rows of any table, answers beside their rows."""

from collections.abc import Iterator, Mapping
from typing import Any

from mlx_rq.jobs.batch.flight import DEFAULT_WINDOW, Flight
from mlx_rq.jobs.batch.lines import Line, bad_line, good_line
from mlx_rq.jobs.batch.records import Ended
from mlx_rq.jobs.batch.tables import ROW_URL, iterate_rows
from mlx_rq.jobs.batch.templates import ChatTemplate, Template
from mlx_rq.jobs.openai.answers import text_of, value_of
from mlx_rq.jobs.openai.errors import JobFailed, RequestError
from mlx_rq.jobs.openai.plain import plain
from mlx_rq.jobs.openai.priority import Priority
from mlx_rq.jobs.openai.schema_types import Schema, response_format
from mlx_rq.jobs.queue.options import (
    BATCH_PRIORITY,
    DEFAULT_MAX_ATTEMPTS,
    DEFAULT_RESULT_TTL,
    JobOptions,
)

Row = Mapping[str, Any]


def map(
    rows: Any,
    prompt: str,
    *,
    system: str | None = None,
    schema: Schema | None = None,
    strict: bool = True,
    ordered: bool = True,
    concurrency: int | None = None,
    priority: Priority = BATCH_PRIORITY,
    result_ttl: int = DEFAULT_RESULT_TTL,
    timeout: float | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    redis_url: str | None = None,
    **fields: Any,
) -> Iterator[tuple[Row, Any]]:
    """Asks the model about every row; yields each row with its answer, or with what went wrong.

    `rows` is any iterable of mappings, a pandas or polars frame, a pyarrow table or a Hugging Face
    dataset. `prompt` and `system` are templates: `"Review {product}"`; `fields` are further fields
    of the body, as `model` and `max_completion_tokens`. The answer is a text, with a `schema` (as
    `submit` takes it, `strict` too) a value of its type or the plain value. Where there is none,
    the second of the pair is the RequestError or JobFailed that says why: `isinstance(answer,
    Exception)`.

    Rows come in their order, or with `ordered=False` as they end. They are read as jobs end: at
    most `concurrency` (default 2,000) are on the way at once. Leaving the loop cancels those.
    Raises RequestError where a template or an option is wrong, RedisUnavailable without Redis.
    """
    if concurrency is not None and concurrency < 1:
        raise RequestError(
            f"Invalid 'concurrency': expected at least 1, but got {concurrency} instead.",
            code="integer_below_min_value",
            param="concurrency",
        )
    settings = plain(fields)
    if schema is not None:
        settings["response_format"] = response_format(schema, strict=strict)
    template = ChatTemplate(
        Template(prompt, "prompt"), Template(system, "system") if system else None, settings
    )
    flight = Flight(
        JobOptions(priority, result_ttl, timeout, max_attempts),
        redis_url=redis_url,
        window=concurrency or DEFAULT_WINDOW,
        ordered=ordered,
    )
    lines = (_line(number, row, template) for number, row in enumerate(iterate_rows(rows), 1))
    return _answers(flight, lines, schema)


def _line(number: int, row: Row, template: ChatTemplate) -> Line:
    try:
        return good_line(number, f"row-{number}", ROW_URL, template.body(row), row)
    except RequestError as error:
        return bad_line(number, error, b"", row=row)


def _answers(
    flight: Flight, lines: Iterator[Line], schema: Schema | None
) -> Iterator[tuple[Row, Any]]:
    try:
        for some in flight.run(lines):
            for ended in some:
                yield ended.line.row, _answer(ended, schema)
            flight.forget(some)
    finally:
        flight.cancel()


def _answer(ended: Ended, schema: Schema | None) -> Any:
    if (error := ended.error) is not None:
        if ended.job_id is not None:
            return JobFailed(ended.job_id, dict(error))
        return RequestError(error["message"], code=error["code"], param=error["param"])
    try:
        return text_of(ended.result) if schema is None else value_of(ended.result, schema)
    except JobFailed as failure:
        return failure
