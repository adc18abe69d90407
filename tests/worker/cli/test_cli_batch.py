"""The command `mlx-rq batch`: killed, stopped, piped, and used wrongly."""

import csv
import gzip
import io
import json
import logging
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from batch_helpers import (
    BatchProcess,
    batch_line,
    batch_lines,
    contents,
    echo,
    echoes,
    full_disk_at,
    generated,
    line_count,
    prompt_of,
    read_jsonl,
    says,
    write_jsonl,
)
from click.testing import CliRunner, Result
from fakes import CASES, FakeEngine, StartWorker, eventually, failure, ignored
from models import small_folder
from redis import Redis

from mlx_rq.jobs.queue.keys import queue_name
from mlx_rq.jobs.queue.status import status
from mlx_rq.jobs.queue.workers import live_workers
from mlx_rq.worker.cli.main import main

ROWS = 60


def packed(text: bytes, ending: str) -> bytes:
    """Compresses as a file's ending says."""
    return gzip.compress(text) if ending == ".gz" else pa.compress(text, "zstd", asbytes=True)


def unpacked(path: Path) -> str:
    """Reads a compressed file."""
    if path.suffix == ".gz":
        return gzip.decompress(path.read_bytes()).decode()
    with pa.input_stream(path, compression="zstd") as file:
        return str(file.read(), "utf-8")


class PacedEngine(FakeEngine):
    """Echoes so many of the oldest tasks as it was told to, no more."""

    def __init__(self) -> None:
        super().__init__(answer_with=echo, hold=True)
        self._let_go = 0

    def let_go(self, count: int) -> None:
        """Answers so many more tasks, once they are there."""
        self._let_go += count
        self.release(*self.wait_for_tasks(self._let_go)[: self._let_go])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "in.jsonl", batch_lines(ROWS))


@pytest.fixture
def start_batch(redis_url: str) -> Iterator[Callable[..., BatchProcess]]:
    """Starts the command; what still runs at the end of the test is killed."""
    started: list[BatchProcess] = []

    def start(*arguments: Any) -> BatchProcess:
        started.append(BatchProcess(redis_url, arguments))
        return started[-1]

    yield start
    for process in started:
        process.kill()


StartBatch = Callable[..., BatchProcess]


def run(*arguments: Any, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["batch", *map(str, arguments)], input=stdin)


def under_way(connection: Redis) -> tuple[int, int]:
    """Counts the jobs that decode, and those that have not ended."""
    seen = status(connection)
    unfinished = sum(queue["queued"] + queue["in_progress"] for queue in seen["queues"])
    return sum(len(worker["rows"]) for worker in seen["workers"]), unfinished


class TestKilled:
    @pytest.mark.parametrize(("order", "kills"), [("input", (0, 9, 20)), ("finished", (12,))])
    def test_again_and_again_the_output_is_that_of_an_unbroken_run(
        self,
        tmp_path: Path,
        source: Path,
        start_worker: StartWorker,
        start_batch: StartBatch,
        order: str,
        kills: tuple[int, ...],
    ) -> None:
        engine = PacedEngine()
        start_worker(engine)
        output = tmp_path / "out.jsonl"
        arguments = (source, "-o", output, "--order", order, "--in-flight", 16)

        for lines in kills:  # how much of the output is there when the kill comes
            process = start_batch(*arguments)
            engine.let_go(max(0, lines + 3 - engine._let_go))
            process.wait_for_lines(output, lines)
            process.kill()
        engine.release()
        code, out, err = start_batch(*arguments).end()

        assert (code, out) == (0, f"{ROWS} in: {ROWS} answered, 0 errors, 0 missing\n"), err
        assert contents(output) == echoes(ROWS)
        if order == "input":
            assert list(contents(output)) == list(echoes(ROWS))
        assert set(generated(engine).values()) == {1}

    def test_a_torn_line_is_healed_and_its_job_found_again(
        self, tmp_path: Path, source: Path, start_worker: StartWorker, start_batch: StartBatch
    ) -> None:
        engine = PacedEngine()
        start_worker(engine)
        output = tmp_path / "out.jsonl"
        process = start_batch(source, "-o", output)
        engine.let_go(10)
        process.wait_for_lines(output, 10)
        process.kill()
        output.write_bytes(output.read_bytes()[:-7])

        engine.release()
        code, _, err = start_batch(source, "-o", output).end()

        assert code == 0
        assert "9 of 60 were done before" in err
        assert contents(output) == echoes(ROWS)
        assert set(generated(engine).values()) == {1}


class TestStopped:
    @pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
    def test_it_says_what_is_left_and_the_same_command_goes_on(
        self,
        tmp_path: Path,
        source: Path,
        start_worker: StartWorker,
        start_batch: StartBatch,
        sent: signal.Signals,
    ) -> None:
        engine = PacedEngine()
        start_worker(engine)
        output = tmp_path / "out.jsonl"
        as_json = ["--json"] if sent is signal.SIGTERM else []
        process = start_batch(source, "-o", output, *as_json)
        engine.let_go(20)
        process.wait_for_lines(output, 20)
        process.send(sent)
        code, out, err = process.end()

        assert code == 2
        if as_json:
            left = json.loads(out)
            counts = [left[name] for name in ("answered", "missing", "held", "unsubmitted")]
            assert counts == [20, 40, 0, 0]
            assert left["running"] + left["waiting"] == 40
        else:
            assert out == "60 in: 20 answered, 0 errors, 40 missing\n"
        assert re.search(
            r"Stopped: 20 of 60 are done, (16 run, 24|40) wait\. Jobs go on without this command; "
            r"the same command takes them up again\.\n",
            err,
        )
        engine.release()
        assert start_batch(source, "-o", output).end()[0] == 0
        assert contents(output) == echoes(ROWS)

    def test_in_the_background_of_a_script_it_goes_on_when_ctrl_c_ends_what_is_in_front(
        self, tmp_path: Path, source: Path, start_worker: StartWorker, start_batch: StartBatch
    ) -> None:
        engine = PacedEngine()
        start_worker(engine)
        output = tmp_path / "out.jsonl"
        with ignored(signal.SIGINT):  # as a shell does there
            process = start_batch(source, "-o", output)
        engine.let_go(20)
        process.wait_for_lines(output, 20)
        process.send(signal.SIGINT)
        engine.release()
        assert process.end()[0] == 0
        assert contents(output) == echoes(ROWS)

    def test_answers_that_came_before_an_earlier_line_s_are_in_the_output_and_counted(
        self,
        tmp_path: Path,
        source: Path,
        start_worker: StartWorker,
        start_batch: StartBatch,
        connection: Redis,
    ) -> None:
        engine = PacedEngine()
        start_worker(engine, window=16)
        output = tmp_path / "out.jsonl"
        process = start_batch(source, "-o", output, "--in-flight", 30)
        engine.release(*engine.wait_for_tasks(16)[1:11])
        process.wait_for_lines(output, 10)
        eventually(lambda: under_way(connection) == (16, 30), "the next lines")
        process.send(signal.SIGINT)
        code, out, err = process.end()

        assert (code, out) == (2, "60 in: 10 answered, 0 errors, 50 missing\n")
        assert "10 of 60 are done, 16 run, 14 wait, 20 are not submitted yet. Jobs go on" in err
        engine.release()
        assert start_batch(source, "-o", output).end()[0] == 0
        assert list(contents(output)) == list(echoes(ROWS))

    def test_a_second_run_on_the_same_output_is_refused(
        self, tmp_path: Path, source: Path, start_worker: StartWorker, start_batch: StartBatch
    ) -> None:
        engine = PacedEngine()
        start_worker(engine)
        output = tmp_path / "out.jsonl"
        first = start_batch(source, "-o", output)
        engine.wait_for_tasks(1)

        second = run(source, "-o", output)

        assert second.exit_code == 2
        assert second.stderr == (
            f"Error: Another `mlx-rq batch` is writing {output}. Wait for it, or stop it first.\n"
        )
        engine.release()
        assert first.end()[0] == 0


class TestAnOrdinaryRun:
    def test_with_errors_apart(self, tmp_path: Path, start_worker: StartWorker) -> None:
        start_worker(FakeEngine("smollm2", answer_with=echo))
        result = run(
            *(CASES / "one_bad_line.jsonl", "-o", tmp_path / "out.jsonl"),
            *("--skip-bad-lines", "--errors", tmp_path / "mine.jsonl"),
        )
        assert result.exit_code == 1
        assert result.stdout == "3 in: 2 answered, 1 error (1 invalid_json_line), 0 missing\n"
        assert f"errors: {tmp_path / 'mine.jsonl'}" in result.stderr
        assert line_count(tmp_path / "mine.jsonl") == 1

    def test_with_errors_together_and_json_for_machines(
        self, tmp_path: Path, start_worker: StartWorker
    ) -> None:
        start_worker(FakeEngine("smollm2", answer_with=echo))
        output = tmp_path / "out.jsonl"
        result = run(
            *(CASES / "one_bad_line.jsonl", "-o", output),
            *("--skip-bad-lines", "--together", "--json", "--quiet"),
        )
        assert json.loads(result.stdout) == {
            "total": 3,
            "answered": 2,
            "errors": {"invalid_json_line": 1},
            "missing": 0,
            **dict.fromkeys(("held", "running", "waiting", "unsubmitted"), 0),
            "resumed": 0,
            "prompt_tokens": 6,
            "cached_tokens": 0,
            "completion_tokens": 4,
        }
        assert result.stderr == ""
        assert [record["custom_id"] for record in read_jsonl(output)] == ["good1", None, "good2"]

    @pytest.mark.parametrize(
        "schema", ['{"type": "object", "type": "array"}', "[" * 100_000], ids=["twice", "deep"]
    )
    def test_a_schema_that_cannot_be_read_is_refused(self, tmp_path: Path, schema: str) -> None:
        (tmp_path / "schema.json").write_text(schema)
        rows = write_jsonl(tmp_path / "in.jsonl", [{"a": 1}])
        options = ["--prompt", "{a}", "--schema", tmp_path / "schema.json"]
        result = run(rows, "-o", tmp_path / "out.jsonl", *options)
        assert result.exit_code == 2
        assert f"--schema: {tmp_path}/schema.json is not JSON: " in result.stderr
        assert not (tmp_path / "out.jsonl").exists()

    def test_a_schema_that_cannot_be_measured_is_an_error_of_its_line(
        self, tmp_path: Path, start_worker: StartWorker
    ) -> None:
        start_worker(FakeEngine(answer_with=echo))
        lines = batch_lines(4)
        lines[1]["body"]["guided_json"] = {"multipleOf": 10**400}
        lines[2]["body"]["guided_json"] = {"properties": {"\ud800": {}}}
        result = run(write_jsonl(tmp_path / "in.jsonl", lines), "-o", tmp_path / "out.jsonl")
        assert result.exit_code == 1
        assert list(contents(tmp_path / "out.jsonl")) == ["r0", "r3"]
        assert line_count(tmp_path / "out.errors.jsonl") == 2

    def test_through_pipes(self, tmp_path: Path, start_worker: StartWorker) -> None:
        start_worker(FakeEngine(answer_with=echo))
        lines = "".join(json.dumps(line) + "\n" for line in batch_lines(3))
        result = run("-", "-o", "-", stdin=lines)
        records = [json.loads(line) for line in result.stdout.splitlines()]
        assert [record["custom_id"] for record in records] == ["r0", "r1", "r2"]
        assert result.stderr.endswith("3 in: 3 answered, 0 errors, 0 missing\n")

    @pytest.mark.parametrize("ending", [".gz", ".zst"])
    def test_compressed_in_and_out_and_again(
        self, tmp_path: Path, start_worker: StartWorker, ending: str
    ) -> None:
        worker = start_worker(FakeEngine(answer_with=echo))
        lines = [*batch_lines(2), batch_line("bad", temperature=200)]
        text = "".join(json.dumps(line) + "\n" for line in lines).encode()
        source, output = tmp_path / f"in.jsonl{ending}", tmp_path / f"out.jsonl{ending}"
        source.write_bytes(packed(text, ending))

        result = run(source, "-o", output)

        assert (result.exit_code, result.stdout) == (
            1,
            "3 in: 2 answered, 1 error (1 decimal_above_max_value), 0 missing\n",
        )
        records = [json.loads(line) for line in unpacked(output).splitlines()]
        assert [record["custom_id"] for record in records] == ["r0", "r1"]
        (error,) = read_jsonl(tmp_path / "out.errors.jsonl")
        assert error["custom_id"] == "bad"
        before = output.read_bytes()
        assert run(source, "-o", output).exit_code == 1
        assert (output.read_bytes(), len(worker.engine.added)) == (before, 2)

    @pytest.mark.parametrize("ending", [".gz", ".zst"])
    def test_rows_may_be_compressed(
        self, tmp_path: Path, start_worker: StartWorker, ending: str
    ) -> None:
        start_worker(FakeEngine(answer_with=echo))
        source, output = tmp_path / f"rows.csv{ending}", tmp_path / f"out.csv{ending}"
        source.write_bytes(packed(TABLE.encode(), ending))
        result = run(source, "--prompt", PROMPT, "-o", output)
        assert result.exit_code == 0, result.stderr
        first = next(csv.DictReader(io.StringIO(unpacked(output))))
        assert (first["product"], first["answer"]) == (
            "tea",
            "You said: Write a short review of tea",
        )

    def test_no_line_is_cut_by_whoever_splits_at_other_line_ends(
        self, tmp_path: Path, start_worker: StartWorker
    ) -> None:
        said = "a\u2028b\u2029c\x85d\x0be\x0cf\x1c"
        start_worker(FakeEngine(answer_with=lambda task: says(said, task)))
        output = tmp_path / "out.jsonl"
        assert run(write_jsonl(tmp_path / "in.jsonl", batch_lines(2)), "-o", output).exit_code == 0
        assert contents(output) == {"r0": said, "r1": said}

    def test_settings_go_into_every_body(self, tmp_path: Path, start_worker: StartWorker) -> None:
        worker = start_worker(FakeEngine("tiny", answer_with=echo))
        source = write_jsonl(tmp_path / "in.jsonl", batch_lines(2))
        run(source, "-o", tmp_path / "out.jsonl", "--model", "tiny", "-p", "seed=7")
        assert [(task.request.model, task.request.seed) for task in worker.engine.added] == [
            ("tiny", 7),
            ("tiny", 7),
        ]

    def test_several_workers_share_a_file(self, tmp_path: Path, start_worker: StartWorker) -> None:
        engines = [FakeEngine(answer_with=echo, hold=True, capacity=2) for _ in range(2)]
        for engine in engines:
            start_worker(engine, window=4)
        source = write_jsonl(tmp_path / "in.jsonl", batch_lines(8))

        def both_have_some(task: Any) -> None:
            if all(engine.added for engine in engines):
                for engine in engines:
                    engine.release()

        for engine in engines:
            engine.refuse = both_have_some
        assert run(source, "-o", tmp_path / "out.jsonl").exit_code == 0
        assert contents(tmp_path / "out.jsonl") == echoes(8)

    def test_what_is_asked_does_not_come_from_the_environment(
        self,
        tmp_path: Path,
        start_worker: StartWorker,
        connection: Redis,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        # given what somebody exported for a worker, or for submit
        exported = {"MODEL": "x", "PRIORITY": "high", "TIMEOUT": "1", "SYSTEM": "y"}
        for name, value in exported.items():
            monkeypatch.setenv(f"MLX_RQ_{name}", value)
        worker = start_worker(FakeEngine("m", answer_with=echo))
        source = write_jsonl(tmp_path / "in.jsonl", [batch_line("a", model="m")])
        result = run(source, "-o", tmp_path / "out.jsonl")
        assert result.exit_code == 0, result.output
        assert [task.request.model for task in worker.engine.added] == ["m"]
        (job,) = connection.keys("rq:job:*")
        meta, origin = connection.hmget(job, "meta", "origin")
        assert json.loads(meta)["timeout"] is None
        assert origin.decode() == queue_name("m", "low")

    def test_without_a_worker_it_says_so_and_waits(
        self,
        tmp_path: Path,
        source: Path,
        start_batch: StartBatch,
        start_worker: StartWorker,
    ) -> None:
        process = start_batch(source, "-o", tmp_path / "out.jsonl", "--model", "tiny")
        eventually(lambda: "no live worker serves the model 'tiny'" in process.said())
        start_worker(FakeEngine("tiny", answer_with=echo))
        assert process.end()[0] == 0


TABLE = "product,style\ntea,short\ncoffee,long\nwater,dry\n"
PROMPT = "Write a {style} review of {product}"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    path.write_text(TABLE)
    return path


class TestDatasets:
    def test_from_csv_to_parquet_with_an_error_in_its_row(
        self, tmp_path: Path, rows: Path, start_worker: StartWorker
    ) -> None:
        engine = FakeEngine(answer_with=echo)
        engine.refuse = lambda task: failure("no_coffee") if "coffee" in prompt_of(task) else None
        start_worker(engine)
        output = tmp_path / "out.parquet"

        result = run(rows, "--prompt", PROMPT, "--system", "Be brief.", "-o", output)

        assert result.exit_code == 1
        table = pq.read_table(output).to_pylist()
        assert [(row["product"], row["style"]) for row in table] == [
            ("tea", "short"),
            ("coffee", "long"),
            ("water", "dry"),
        ]
        assert table[0]["answer"] == "You said: Write a short review of tea"
        assert (table[1]["answer"], table[1]["error"]) == (None, "no_coffee: The engine would not.")

        engine.refuse = lambda task: None
        again = run(
            rows, "--prompt", PROMPT, "--system", "Be brief.", "-o", output, "--retry-errors"
        )
        assert again.exit_code == 0
        assert pq.read_table(output)["answer"].null_count == 0
        assert len(engine.added) == 4

    def test_structured_answers_are_typed(
        self, tmp_path: Path, rows: Path, start_worker: StartWorker
    ) -> None:
        schema = {"type": "object", "properties": {"stars": {"type": "integer"}}}
        schema |= {"required": ["stars"], "additionalProperties": False}
        (tmp_path / "schema.json").write_text(json.dumps(schema))
        worker = start_worker(FakeEngine(answer_with=lambda task: says('{"stars": 4}', task)))
        output = tmp_path / "out"

        result = run(rows, "--prompt", PROMPT, "--schema", tmp_path / "schema.json", "-o", output)

        assert result.exit_code == 0, result.stderr
        (shard,) = (output / "data").iterdir()
        assert pq.read_table(shard)["stars"].to_pylist() == [4, 4, 4]
        assert all(task.request.shape is not None for task in worker.engine.added)

    def test_rows_through_a_pipe(self, tmp_path: Path, start_worker: StartWorker) -> None:
        start_worker(FakeEngine(answer_with=echo))
        output = tmp_path / "out.csv"
        for stdin in (TABLE, '{"product": "tea", "style": "short"}\n'):
            assert run("-", "--prompt", PROMPT, "-o", output, stdin=stdin).exit_code == 0
            first = next(csv.DictReader(io.StringIO(output.read_text())))
            assert first["answer"] == "You said: Write a short review of tea"

    def test_rows_to_batch_records_are_called_by_a_column(
        self, tmp_path: Path, rows: Path, start_worker: StartWorker
    ) -> None:
        start_worker(FakeEngine(answer_with=echo))
        run(rows, "--prompt", PROMPT, "-o", tmp_path / "out.jsonl", "--id-column", "product")
        assert list(contents(tmp_path / "out.jsonl")) == ["tea", "coffee", "water"]

    def test_a_dataset_that_was_there_before_is_not_overwritten(
        self, tmp_path: Path, rows: Path, redis_url: str
    ) -> None:
        output = tmp_path / "out.parquet"
        output.write_text("precious")
        result = run(rows, "--prompt", PROMPT, "-o", output)
        assert result.exit_code == 2
        assert "is there already" in result.stderr
        assert output.read_text() == "precious"


class TestADryRun:
    def test_shows_prompts_and_shares_and_runs_nothing(
        self, tmp_path: Path, rows: Path, start_worker: StartWorker
    ) -> None:
        worker = start_worker()
        result = run(rows, "--prompt", PROMPT, "--system", "Be brief.", "--dry-run")
        assert result.exit_code == 0, result.stderr
        assert "--- row 1 ---\nsystem: Be brief.\nuser: Write a short review of tea\n" in (
            result.stdout
        )
        assert "3 rows\n" in result.stdout
        assert "% distinct" in result.stdout
        assert worker.engine.added == []

    def test_tells_what_is_shared_over_all_lines_not_only_over_those_that_it_counts(
        self, tmp_path: Path, nobody_listens: str
    ) -> None:
        # Each document comes twice, the second time far behind the lines that are counted.
        texts = [f"{number} ".ljust(640, "x") for number in range(1200)] * 2
        lines = [batch_line(str(n), text) for n, text in enumerate(texts)]
        source = write_jsonl(tmp_path / "in.jsonl", lines)
        result = run(source, "--dry-run", "--json", "--redis-url", nobody_listens)
        assert json.loads(result.stdout)["distinct_share"] == pytest.approx(0.5, abs=0.01)

    def test_tells_the_time_from_what_workers_have_shown(
        self, rows: Path, connection: Redis, start_worker: StartWorker
    ) -> None:
        engine = FakeEngine()
        engine.totals.tasks, engine.totals.decoded_tokens = 10, 1000
        engine.totals.prefilled_tokens, engine.totals.prefill_seconds = 1000, 1.0
        engine.totals.decode_seconds = 10.0
        start_worker(engine)
        eventually(lambda: bool(live_workers(connection)))
        result = run(rows, "--prompt", "x", "-p", "max_completion_tokens=60", "--dry-run", "--json")
        forecast = json.loads(result.stdout)
        # 3 answers of at most 60 tokens, at 100 tokens a second, and next to nothing to prefill.
        assert forecast["answer_tokens"] == 180
        assert forecast["seconds"] == pytest.approx(1.8, abs=0.1)

    def test_without_redis_it_still_tells_the_rest(self, rows: Path, nobody_listens: str) -> None:
        result = run(rows, "--prompt", PROMPT, "--dry-run", "--redis-url", nobody_listens)
        assert result.exit_code == 0
        assert "time: unknown" in result.stdout

    def test_counts_what_would_be_refused(self, redis_url: str) -> None:
        result = run(CASES / "bad_parameters.jsonl", "--dry-run")
        assert "10 lines, would be refused: 2 " in result.stdout

    def test_ends_as_the_run_would_where_all_lines_are_refused(
        self, tmp_path: Path, redis_url: str
    ) -> None:
        source = write_jsonl(tmp_path / "in.jsonl", [batch_line("a", temperature=200, top_p=7)])
        result = run(source, "--dry-run")
        assert result.exit_code == run(source, "-o", tmp_path / "out.jsonl").exit_code == 1
        (error,) = read_jsonl(tmp_path / "out.errors.jsonl")
        message = error["response"]["body"]["error"]["message"]
        assert f"line 1: decimal_above_max_value: {message}\n" in result.stdout

    @pytest.mark.parametrize("case", ["one_bad_line.jsonl", "duplicate_custom_id.jsonl"])
    def test_refuses_an_input_as_the_run_does(
        self, tmp_path: Path, redis_url: str, case: str
    ) -> None:
        dry = run(CASES / case, "--dry-run")
        wet = run(CASES / case, "-o", tmp_path / "out.jsonl")
        assert (dry.exit_code, dry.stderr) == (wet.exit_code, wet.stderr)
        assert wet.exit_code == 2
        assert run(CASES / "one_bad_line.jsonl", "--dry-run", "--skip-bad-lines").exit_code == 1

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("-o", "out.xlsx"), "ends in .xlsx"),
            (("-o", "taken.parquet"), "is there already"),
            (("-o", "taken.jsonl"), "its line 1 is no record of a batch"),
            (("-o", "-", "--errors", "taken.jsonl"), "its line 1 is no record of a batch"),
            (("--timeout", "-1"), "Invalid 'timeout'"),
        ],
    )
    def test_refuses_outputs_and_options_as_the_run_does(
        self,
        rows: Path,
        redis_url: str,
        monkeypatch: pytest.MonkeyPatch,
        arguments: tuple[str, ...],
        words: str,
    ) -> None:
        monkeypatch.chdir(rows.parent)
        for name in ("taken.parquet", "taken.jsonl"):
            Path(name).write_text("precious\n")
        dry = run("rows.csv", "--prompt", "x", *arguments, "--dry-run")
        assert (dry.exit_code, words in dry.stderr) == (2, True)
        assert len(list(rows.parent.iterdir())) == 3
        if "-o" in arguments:
            wet = run("rows.csv", "--prompt", "x", *arguments)
            assert (wet.exit_code, wet.stderr) == (dry.exit_code, dry.stderr)

    def test_shows_the_ends_of_long_prompts(self, tmp_path: Path, nobody_listens: str) -> None:
        source = write_jsonl(tmp_path / "in.jsonl", [batch_line("a", "x" * 5000 + "The end.")])
        result = run(source, "--dry-run", "--redis-url", nobody_listens)
        assert "x\n[… 4,014 characters …]\nx" in result.stdout
        assert "The end.\n" in result.stdout
        assert len(result.stdout) < 1500

    def test_refuses_what_the_model_would_and_warns_of_nothing_else(
        self, tmp_path: Path, nobody_listens: str
    ) -> None:
        said: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = said.append  # type: ignore[method-assign]
        logging.getLogger("transformers").addHandler(handler)
        lines = [batch_line("a", "x " * 9000), batch_line("b", "x", max_completion_tokens=9000)]
        source = write_jsonl(tmp_path / "in.jsonl", [*lines, batch_line("c")])
        model = small_folder()
        result = run(source, "--dry-run", "--model", model, "--redis-url", nobody_listens)
        logging.getLogger("transformers").removeHandler(handler)
        assert (result.exit_code, result.stderr, said) == (1, "", [])
        assert "3 lines, would be refused: 2 context_length_exceeded\n" in result.stdout
        assert "line 1: context_length_exceeded: This model's maximum context length" in (
            result.stdout
        )
        assert "--- line 3 ---" in result.stdout

    def test_counts_by_the_folder_that_the_worker_was_given(
        self, tmp_path: Path, connection: Redis, start_worker: StartWorker
    ) -> None:
        start_worker(served_names=[str(small_folder())])
        eventually(lambda: bool(live_workers(connection)))
        source = write_jsonl(tmp_path / "in.jsonl", [batch_line("a", "x " * 9000)])
        result = run(source, "--dry-run", "--json")
        assert (result.exit_code, result.stderr) == (1, "")
        assert json.loads(result.stdout)["errors"] == {"context_length_exceeded": 1}


class TestUsedWrongly:
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ((), "say where the answers go with -o"),
            (("out 1.jsonl",), "with -o (--output): mlx-rq batch rows.csv -o 'out 1.jsonl'"),
            (("more.csv", "-o", "out.jsonl"), "'more.csv' is one argument too many: INPUT is one"),
            (("-o", "out.xlsx", "--prompt", "x"), "out.xlsx ends in .xlsx"),
            (("-o", "out.parquet.gz", "--prompt", "x"), "out.parquet.gz ends in .parquet.gz"),
            (("-o", "out.jsonl", "--prompt", "x", "--delimiter", "::"), "expected one character"),
            (
                ("-o", "nowhere/out.jsonl", "--prompt", "x"),
                "no folder nowhere",
            ),
            (("-o", "rows.csv", "--prompt", "x"), "is there already"),
            (("-o", "out.jsonl"), "say with --prompt what to ask"),
            (("-o", "out.jsonl", "--prompt", "{colour}"), "names 'colour', which rows.csv"),
            (("-o", "out.jsonl", "--prompt", "{a!r}"), "asks for a format"),
            (("-o", "out.jsonl", "--prompt", "x", "--id-column", "sku"), "'--id-column' names"),
            (("-o", "out.jsonl", "--prompt", "x", "--errors", "out.jsonl"), "name the same file"),
            (
                ("-o", "out.jsonl", "--prompt", "x", "--errors", "rows.csv"),
                "and INPUT name the same",
            ),
            (("-o", "-", "--prompt", "x", "--errors", "./rows.csv"), "and INPUT name the same"),
            (("-o", "out.jsonl", "--prompt", "x", "--errors", "nowhere/e"), "no folder nowhere"),
            (("-o", "-", "--prompt", "x", "--errors", "nowhere/e"), "no folder nowhere"),
            (("-o", "out.jsonl", "--prompt", "x", "--errors", "/dev/null"), "no regular file"),
            (("-o", "-", "--prompt", "x", "--errors", "."), "no folder"),
            (("-o", "-", "--prompt", "x", "--errors", "/tmp"), "no regular file"),
            (("-o", "out.parquet", "--prompt", "x", "--order", "finished"), "order of the input"),
            (("-o", "out.parquet", "--prompt", "x", "-p", "n=2"), "one answer in a row"),
            (("-o", "out.jsonl", "--prompt", "x", "-p", "seed"), "is not name=value"),
            (("-o", "out.jsonl", "--prompt", "x", "--schema", "rows.csv"), "is not JSON"),
            (("-o", "out.jsonl", "--prompt", "x", "--timeout", "-1"), "Invalid 'timeout'"),
        ],
    )
    def test_says_so_in_a_line_and_leaves_nothing_behind(
        self,
        rows: Path,
        redis_url: str,
        monkeypatch: pytest.MonkeyPatch,
        arguments: tuple[str, ...],
        words: str,
    ) -> None:
        monkeypatch.chdir(rows.parent)
        result = run("rows.csv", *arguments)
        assert result.exit_code == 2
        assert words in " ".join(result.stderr.split())
        assert [path.name for path in rows.parent.iterdir()] == ["rows.csv"]

    @pytest.mark.parametrize("output", ["-", "out.jsonl"])
    def test_errors_go_into_no_file_of_another_kind(
        self, source: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, output: str
    ) -> None:
        monkeypatch.chdir(source.parent)
        notes = source.with_name("notes.txt")
        notes.write_text("remember")
        result = run(source, "-o", output, "--errors", notes)
        assert (result.exit_code, notes.read_text()) == (2, "remember")
        assert "notes.txt is there already" in result.stderr

    def test_the_input_as_output_is_refused(self, source: Path, redis_url: str) -> None:
        before = source.read_bytes()
        result = run(source, "-o", source)
        assert (result.exit_code, source.read_bytes()) == (2, before)

    def test_template_options_need_a_template(self, source: Path, redis_url: str) -> None:
        result = run(source, "-o", "x.jsonl", "--system", "Be brief.")
        assert "--system goes with --prompt" in result.stderr

    def test_without_redis_nothing_is_left_behind(
        self, tmp_path: Path, source: Path, nobody_listens: str
    ) -> None:
        result = run(source, "-o", tmp_path / "out.jsonl", "--redis-url", nobody_listens)
        assert result.exit_code == 2
        assert result.stderr.startswith("Error: No Redis at ")

    def test_errors_are_json_where_that_is_wanted(self, tmp_path: Path, redis_url: str) -> None:
        output = tmp_path / "out.jsonl"
        result = run(CASES / "duplicate_custom_id.jsonl", "-o", output, "--json")
        assert result.exit_code == 2
        assert json.loads(result.stdout)["error"]["code"] == "duplicate_custom_id"

    def test_a_full_disk_is_said_and_not_the_end(
        self,
        tmp_path: Path,
        source: Path,
        start_worker: StartWorker,
    ) -> None:
        start_worker(FakeEngine(answer_with=echo))
        output = tmp_path / "out.jsonl"
        with full_disk_at("r30"):
            result = run(source, "-o", output)
        assert result.exit_code == 2
        assert result.stderr.endswith(
            f"Error: {output}: No space left on device: make room, and run the same command again: "
            "it goes on where it was\n"
        )
        assert run(source, "-o", output).exit_code == 0
        assert contents(output) == echoes(ROWS)
