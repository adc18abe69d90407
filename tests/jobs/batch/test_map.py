"""`mlx_rq.map`: rows in, rows with answers out."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from batch_helpers import echo, prompt_of, says
from fakes import FakeEngine, RunningWorker, eventually, failure
from pydantic import BaseModel

import mlx_rq
from mlx_rq import Job, JobFailed, RedisUnavailable, RequestError
from mlx_rq.jobs.openai.requests import ChatRequest

Worker = Callable[..., AbstractContextManager[RunningWorker]]

ROWS = [{"word": word} for word in ("one", "two", "three")]


class Person(BaseModel):
    name: str


def test_rows_come_back_in_order_with_their_answers(redis_url: str, running_worker: Worker) -> None:
    with running_worker(FakeEngine(answer_with=echo)):
        pairs = list(mlx_rq.map(ROWS, "Spell {word}", system="Be brief."))
    assert pairs == [(row, f"You said: Spell {row['word']}") for row in ROWS]


def test_fields_reach_the_body(redis_url: str, running_worker: Worker) -> None:
    with running_worker() as worker:
        list(mlx_rq.map(ROWS[:1], "{word}", max_completion_tokens=7, temperature=0))
        (task,) = worker.engine.added
    assert isinstance(task.request, ChatRequest)
    assert (task.request.max_completion_tokens, task.request.temperature) == (7, 0)


def test_or_as_they_are_completed(redis_url: str, running_worker: Worker) -> None:
    engine = FakeEngine(answer_with=echo, hold=True)
    with running_worker(engine):
        pairs = mlx_rq.map(ROWS, "{word}", ordered=False)
        first: list[Any] = []
        # The generator works only while it is asked; somebody else has to let the last one go.
        engine.refuse = lambda task: engine.release(task.id) if prompt_of(task) == "three" else None
        first.append(next(pairs))
        engine.release()
        rest = [row["word"] for row, _ in pairs]
    assert first == [({"word": "three"}, "You said: three")]
    assert sorted(rest) == ["one", "two"]


def test_what_went_wrong_stands_in_the_place_of_the_answer(
    redis_url: str, running_worker: Worker
) -> None:
    engine = FakeEngine(answer_with=echo)
    engine.refuse = lambda task: failure("too_odd") if prompt_of(task) == "1" else None
    rows = [{"n": 0}, {"n": 1}, {"other": 2}, {"n": "\ud800"}, {"\ud800": 1, 5: 2}]
    with running_worker(engine):
        answers = [answer for _, answer in mlx_rq.map(rows, "{n}")]
    assert answers[0] == "You said: 0"
    assert isinstance(answers[1], JobFailed)
    assert answers[1].error["code"] == "too_odd"
    assert isinstance(answers[2], RequestError)
    assert answers[2].code == "missing_column"
    assert isinstance(answers[3], RequestError)
    assert isinstance(answers[4], RequestError)


@pytest.mark.parametrize(
    ("text", "finish_reason", "code"),
    [
        ('{"name": "Ada"}', "stop", None),
        ('{"name": "A', "length", "length"),
        ('{"age": 3}', "stop", "invalid_answer"),
    ],
)
def test_structured_answers_are_read(
    redis_url: str, running_worker: Worker, text: str, finish_reason: str, code: str | None
) -> None:
    engine = FakeEngine(answer_with=lambda task: says(text, task, finish_reason))
    with running_worker(engine):
        ((_, answer),) = mlx_rq.map(ROWS[:1], "Who is {word}?", schema=Person)
    if code is None:
        assert answer == Person(name="Ada")
    else:
        assert isinstance(answer, JobFailed)
        assert answer.error["code"] == code
        assert Job(answer.job_id, redis_url).status() == "completed"


def test_a_json_schema_gives_plain_values(redis_url: str, running_worker: Worker) -> None:
    with running_worker(FakeEngine(answer_with=lambda task: says("[1, 2]", task))):
        ((_, answer),) = mlx_rq.map(ROWS[:1], "{word}", schema={"type": "array"})
    assert answer == [1, 2]


def test_no_more_rows_are_read_than_are_on_the_way(redis_url: str, running_worker: Worker) -> None:
    read = []
    with running_worker(FakeEngine(answer_with=echo)):
        rows = ({"n": read.append(n) or n} for n in range(50))  # type: ignore[func-returns-value]
        for number, (row, _) in enumerate(mlx_rq.map(rows, "{n}", concurrency=4)):
            assert row["n"] == number
            assert len(read) <= number + 2 * 4


def test_leaving_the_loop_cancels_what_is_on_the_way(
    redis_url: str, running_worker: Worker
) -> None:
    engine = FakeEngine(answer_with=echo)
    engine.refuse = lambda task: None if prompt_of(task) == "one" else engine.hold()
    with running_worker(engine, window=1):
        pairs = mlx_rq.map(ROWS, "{word}")
        next(pairs)
        engine.wait_for_tasks(2)
        pairs.close()  # type: ignore[attr-defined]
        eventually(lambda: len(engine.cancelled) == 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prompt": "{"}, "'prompt'"),
        ({"prompt": "x", "concurrency": 0}, "'concurrency'"),
        ({"prompt": "x", "priority": "urgent"}, "'priority'"),
    ],
)
def test_what_is_wrong_is_said_at_once(redis_url: str, options: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        mlx_rq.map(ROWS, **options)


def test_without_redis_it_says_so(nobody_listens: str) -> None:
    with pytest.raises(RedisUnavailable):
        next(mlx_rq.map(ROWS, "{word}", redis_url=nobody_listens))


def test_a_star_import_leaves_the_builtin_alone() -> None:
    assert "map" not in mlx_rq.__all__
