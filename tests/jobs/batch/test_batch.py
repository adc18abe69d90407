"""A whole batch: the files that people send, resuming, changed inputs, and the reckoning."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from batch_helpers import (
    batch_line,
    batch_lines,
    content_of,
    contents,
    echo,
    echoes,
    generated,
    prompt_of,
    read_jsonl,
    write_jsonl,
)
from fakes import CASES, FakeEngine, RunningWorker, failure
from redis import Redis

from mlx_rq import RequestError
from mlx_rq.engine.interface import Task
from mlx_rq.jobs.batch.batch import Batch, BatchOptions, Tally
from mlx_rq.jobs.batch.files import Outputs
from mlx_rq.jobs.batch.flight import FORGET_SECONDS
from mlx_rq.jobs.batch.lines import BatchFile
from mlx_rq.jobs.batch.records import code_of
from mlx_rq.jobs.batch.state import open_state
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.trace import trace

Worker = Callable[..., AbstractContextManager[RunningWorker]]


class Desk:
    """A folder with an input and what comes of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = folder / "in.jsonl"
        self.answers = folder / "out.jsonl"
        self.errors = folder / "out.errors.jsonl"

    def run(
        self, source: Path | None = None, *, settings: dict[str, Any] | None = None, **options: Any
    ) -> Tally:
        """Runs to the end, or until `watch` stops it."""
        watch = options.pop("watch", lambda batch: None)
        path = source or self.source
        with open_state(self.folder / "out.jsonl.state", "out.jsonl") as state:
            batch = Batch(
                BatchFile(path, path.name, settings or {}),
                Outputs(self.answers, self.errors),
                state,
                BatchOptions(**options),
            )
            batch.run(watch)
            return batch.tally

    def write(self, records: list[dict[str, Any]]) -> None:
        write_jsonl(self.source, records)


@pytest.fixture
def desk(tmp_path: Path, redis_url: str) -> Desk:
    return Desk(tmp_path)


@pytest.fixture
def engine(running_worker: Worker) -> Iterator[FakeEngine]:
    """An engine at work that refuses what is too long and echoes the rest."""

    def refuse(task: Task) -> dict[str, Any] | None:
        too_long = len(prompt_of(task)) > 10_000
        return failure("context_length_exceeded") if too_long else None

    engine = FakeEngine("smollm2", answer_with=echo, refuse=refuse)
    with running_worker(engine):
        yield engine


class TestTheFilesThatPeopleSend:
    @pytest.mark.parametrize(
        ("name", "answers"),
        [
            ("bom.jsonl", 3),
            ("crlf_blank_tail.jsonl", 3),
            ("no_final_newline.jsonl", 2),
            ("mixed_kinds.jsonl", 4),
        ],
    )
    def test_are_answered(self, desk: Desk, engine: FakeEngine, name: str, answers: int) -> None:
        tally = desk.run(CASES / name)
        assert (tally.answered, tally.errors.total(), tally.exit_code) == (answers, 0, 0)
        assert len(read_jsonl(desk.answers)) == answers
        assert not desk.errors.exists()

    def test_what_is_in_the_files_redis_keeps_for_an_hour_and_counts_as_fetched(
        self, desk: Desk, engine: FakeEngine, connection: Redis
    ) -> None:
        desk.write([*batch_lines(2), batch_line("long", "x" * 10_001)])
        desk.run(window=1)  # so that they end one after the other
        job_ids = [fields[b"job"].decode() for _, fields in connection.xrange(keys.COMPLETIONS)]
        ends = [trace(connection, job_id)[-1].name for job_id in job_ids]
        assert ends == ["fetched"] * 3
        lives = [connection.ttl(keys.result(job_id)) for job_id in job_ids]
        assert [life <= FORGET_SECONDS for life in lives] == [True, True, False]

    @pytest.mark.parametrize(
        ("name", "line", "code"),
        [
            ("duplicate_custom_id.jsonl", "line 3", "duplicate_custom_id"),
            ("one_bad_line.jsonl", "line 2", "invalid_json_line"),
        ],
    )
    def test_are_refused_before_anything_runs(
        self, desk: Desk, engine: FakeEngine, name: str, line: str, code: str
    ) -> None:
        with pytest.raises(RequestError, match=f"{name}, {line}: .* Nothing was run") as refused:
            desk.run(CASES / name)
        assert refused.value.code == code
        assert engine.added == []
        assert list(desk.folder.iterdir()) == []

    @pytest.mark.parametrize(
        ("bad", "words"),
        [(1, ""), (2, " 1 other is wrong, too."), (3, " 2 others are wrong, too.")],
    )
    def test_how_many_others_are_wrong_is_said(
        self, desk: Desk, tmp_path: Path, bad: int, words: str
    ) -> None:
        (tmp_path / "bad.jsonl").write_text("{\n" * bad)
        with pytest.raises(RequestError, match=rf"line 1: [^.]*\.{words} Nothing was run\."):
            desk.run(tmp_path / "bad.jsonl")

    def test_a_bad_line_is_skipped_where_that_is_wanted(
        self, desk: Desk, engine: FakeEngine
    ) -> None:
        tally = desk.run(CASES / "one_bad_line.jsonl", skip_bad_lines=True)
        assert list(contents(desk.answers)) == ["good1", "good2"]
        (error,) = read_jsonl(desk.errors)
        assert (error["error"]["code"], error["error"]["line"]) == ("invalid_json_line", 2)
        assert tally.exit_code == 1

    def test_one_that_is_too_long_leaves_the_others_alone(
        self, desk: Desk, engine: FakeEngine
    ) -> None:
        desk.run(CASES / "over_long_among_good.jsonl")
        assert list(contents(desk.answers)) == ["good1", "good2"]
        (error,) = read_jsonl(desk.errors)
        assert error["custom_id"] == "long"
        assert error["response"]["status_code"] == 400
        assert error["response"]["body"]["error"]["code"] == "context_length_exceeded"

    def test_bad_parameters_are_told_one_by_one_and_nothing_is_generated(
        self, desk: Desk, engine: FakeEngine
    ) -> None:
        tally = desk.run(CASES / "bad_parameters.jsonl")
        told = {
            record["custom_id"]: (
                record["response"]["status_code"],
                record["response"]["body"]["error"]["param"],
                record["response"]["body"]["error"]["code"],
            )
            for record in read_jsonl(desk.errors)
        }
        assert told == {
            "temp": (400, "temperature", "decimal_above_max_value"),
            "top_p": (400, "top_p", "decimal_below_min_value"),
            "n0": (400, "n", "integer_below_min_value"),
            "empty": (400, "messages", "empty_array"),
            "role": (400, "messages[0].role", "invalid_value"),
            "stream": (400, "stream", "unsupported_parameter"),
            "zero": (400, "max_completion_tokens", "integer_below_min_value"),
            "image": (400, "messages[0].content[0].type", "invalid_value"),
            "stop5": (400, "stop", "array_above_max_length"),
            "unknown": (400, "frobnicate", "unknown_parameter"),
        }
        assert (tally.answered, tally.missing, tally.exit_code) == (0, 0, 1)
        assert engine.added == []

    @pytest.mark.parametrize("content", ["", "\n\n", "\ufeff\n"])
    def test_an_empty_one_is_refused(self, desk: Desk, content: str) -> None:
        desk.source.write_text(content)
        with pytest.raises(RequestError, match=r"in\.jsonl holds no requests"):
            desk.run()

    def test_completions_are_answered_too(self, desk: Desk, running_worker: Worker) -> None:
        line = batch_line("a")
        desk.write([{**line, "url": "/v1/completions", "body": {"prompt": "Once"}}])
        with running_worker():
            assert desk.run().exit_code == 0
        (record,) = read_jsonl(desk.answers)
        assert record["response"]["body"]["object"] == "text_completion"


def stop_after(lines: int) -> Callable[[Batch], None]:
    """A watch that stops the run once so many lines are done."""

    def watch(batch: Batch) -> None:
        if batch.tally.done >= lines:
            batch.stop()

    return watch


class TestGoingOn:
    def test_finished_lines_are_not_generated_again(self, desk: Desk, engine: FakeEngine) -> None:
        desk.write(batch_lines(40))
        stopped = desk.run(watch=stop_after(10), window=8)
        assert stopped.missing > 0
        assert stopped.exit_code == 2

        tally = desk.run()

        assert (tally.resumed, tally.missing) == (stopped.done, 0)
        assert contents(desk.answers) == echoes(40)
        assert list(contents(desk.answers)) == [f"r{number}" for number in range(40)]
        assert set(generated(engine).values()) == {1}

    def test_a_run_that_is_complete_has_nothing_to_do(self, desk: Desk, engine: FakeEngine) -> None:
        desk.write(batch_lines(5))
        desk.run()
        before = desk.answers.read_bytes()
        tally = desk.run()
        assert (tally.resumed, tally.answered, tally.exit_code) == (5, 5, 0)
        assert desk.answers.read_bytes() == before
        assert len(engine.added) == 5

    def test_only_what_changed_runs_again_and_takes_its_place(
        self, desk: Desk, engine: FakeEngine
    ) -> None:
        desk.write(batch_lines(6))
        desk.run()
        records = batch_lines(6)
        records[2] = batch_line("r2", "Something else.")
        records.insert(4, batch_line("new", "A new one."))
        del records[0]
        desk.write(records)

        tally = desk.run()

        assert (tally.resumed, tally.outdated, tally.total) == (4, 2, 6)
        answers = contents(desk.answers)
        assert list(answers) == ["r1", "r2", "r3", "new", "r4", "r5"]
        assert answers["r2"] == "You said: Something else."
        assert len(engine.added) == 6 + 2
        replaced = contents(desk.folder / "out.jsonl.replaced")
        assert replaced == {"r0": "You said: Say 0.", "r2": "You said: Say 2."}

    @pytest.mark.parametrize("settings", [{"model": "smollm2"}, {"temperature": 0}])
    def test_another_model_or_parameter_runs_everything_again(
        self, desk: Desk, engine: FakeEngine, settings: dict[str, Any]
    ) -> None:
        desk.write(batch_lines(3))
        desk.run()
        assert desk.run(settings=settings).outdated == 3
        assert set(generated(engine).values()) == {2}
        assert list(contents(desk.answers)) == ["r0", "r1", "r2"]

    def test_an_output_that_was_removed_starts_all_over(
        self, desk: Desk, engine: FakeEngine
    ) -> None:
        desk.write(batch_lines(3))
        desk.run()
        desk.answers.unlink()
        desk.run()
        assert set(generated(engine).values()) == {2}

    def test_a_lost_state_loses_no_answers(self, desk: Desk, engine: FakeEngine) -> None:
        desk.write(batch_lines(3))
        desk.run()
        (desk.folder / "out.jsonl.state").unlink()
        assert desk.run().resumed == 3
        assert len(engine.added) == 3

    def test_the_order_of_finishing_is_put_right_when_the_input_s_is_asked_for(
        self, desk: Desk, running_worker: Worker
    ) -> None:
        desk.write(batch_lines(3))
        engine = FakeEngine(answer_with=echo, hold=True)

        def watch(batch: Batch) -> None:
            if len(engine.added) == 3:
                engine.release(*([engine.added[2].id] if not batch.tally.done else []))

        with running_worker(engine):
            desk.run(order="finished", watch=watch)
            assert next(iter(contents(desk.answers))) == "r2"
            desk.run()
        assert list(contents(desk.answers)) == ["r0", "r1", "r2"]


class TestErrors:
    @pytest.fixture
    def moody(self, running_worker: Worker) -> Iterator[FakeEngine]:
        """An engine that fails on odd numbers until it is told to be well."""
        engine = FakeEngine(answer_with=echo)
        engine.refuse = lambda task: failure("bad_mood") if int(prompt_of(task)[4:-1]) % 2 else None
        with running_worker(engine):
            yield engine

    def test_stand_until_a_retry_is_asked_for(self, desk: Desk, moody: FakeEngine) -> None:
        desk.write(batch_lines(4))
        assert desk.run().errors == {"bad_mood": 2}
        moody.refuse = lambda task: None
        assert desk.run().errors == {"bad_mood": 2}
        assert len(moody.added) == 4

        tally = desk.run(retry_errors=True)

        assert (tally.answered, tally.exit_code) == (4, 0)
        assert contents(desk.answers) == echoes(4)
        assert list(contents(desk.answers)) == ["r0", "r1", "r2", "r3"]
        assert not desk.errors.exists()
        assert len(moody.added) == 6

    def test_a_retry_that_fails_again_can_be_retried_again(
        self, desk: Desk, moody: FakeEngine
    ) -> None:
        desk.write(batch_lines(2))
        for attempt in (1, 2, 3):
            assert desk.run(retry_errors=True).errors == {"bad_mood": 1}
            assert generated(moody)["Say 1."] == attempt
        assert len(read_jsonl(desk.errors)) == 1

    def test_a_retry_that_is_interrupted_does_not_generate_twice(
        self, desk: Desk, moody: FakeEngine
    ) -> None:
        desk.write(batch_lines(8))
        desk.run()
        moody.refuse = lambda task: None
        desk.run(retry_errors=True, watch=stop_after(5), window=1)
        desk.run(retry_errors=True)
        assert contents(desk.answers) == echoes(8)
        assert sum(generated(moody).values()) == 8 + 4

    def test_together_in_the_order_of_the_input(self, tmp_path: Path, moody: FakeEngine) -> None:
        source = write_jsonl(tmp_path / "in.jsonl", batch_lines(4))
        with open_state(tmp_path / "out.jsonl.state", "out.jsonl") as state:
            outputs = Outputs(tmp_path / "out.jsonl", None)
            lines = BatchFile(source, "in.jsonl", {})
            Batch(lines, outputs, state, BatchOptions()).run(lambda batch: None)
        records = read_jsonl(tmp_path / "out.jsonl")
        assert [code_of(record) for record in records] == [None, "bad_mood", None, "bad_mood"]
        assert content_of(records[2]) == "You said: Say 2."


class TestTheReckoning:
    def test_accounts_for_every_line(self) -> None:
        tally = Tally(total=5000, answered=4991)
        tally.errors.update({"invalid_json_line": 2, "context_length_exceeded": 7})
        assert str(tally) == (
            "5,000 in: 4,991 answered, 9 errors (7 context_length_exceeded, 2 invalid_json_line), "
            "0 missing"
        )

    @pytest.mark.parametrize(
        ("answered", "errors", "exit_code"), [(3, 0, 0), (2, 1, 1), (0, 3, 1), (2, 0, 2), (1, 1, 2)]
    )
    def test_the_exit_code_says_how_it_went(
        self, answered: int, errors: int, exit_code: int
    ) -> None:
        tally = Tally(total=3, answered=answered)
        tally.errors.update(["some"] * errors)
        assert tally.exit_code == exit_code
