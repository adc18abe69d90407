"""`mlx-rq submit`, `result`, `cancel` and `status`: for people, and with --json for machines."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from batch_helpers import batch_lines, write_jsonl
from click.testing import CliRunner, Result
from fakes import PATIENCE, FakeEngine, StartWorker, failure
from redis import Redis
from rq import Queue
from rq.job import Job as RQJob

from mlx_rq import Job, RedisUnavailable, fetch, submit
from mlx_rq.jobs.batch.batch import Batch, BatchOptions
from mlx_rq.jobs.batch.files import Outputs
from mlx_rq.jobs.batch.lines import BatchFile
from mlx_rq.jobs.batch.state import open_state, state_of
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.connection import URL_VARIABLE
from mlx_rq.jobs.queue.payload import read_payload
from mlx_rq.worker.cli import answers
from mlx_rq.worker.cli.main import main

HI = [{"role": "user", "content": "Say hi."}]
NOTE = "note: no live worker serves the model 'default': start one with `mlx-rq worker`"

Run = Callable[..., Result]


@pytest.fixture
def run(redis_url: str) -> Run:
    """Runs the command line; nothing that it raises may get through."""

    def run(*arguments: str, input: str | bytes | None = None, **environment: str) -> Result:
        result = CliRunner().invoke(main, arguments, input=input, env=environment)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.output
        assert "Traceback" not in result.output
        return result

    return run


def body_of(connection: Redis, job_id: str) -> tuple[str, dict[str, Any]]:
    kind, body = read_payload(connection.hget(RQJob.key_for(job_id), "data"))
    return kind, body


def refused(result: Result) -> str:
    """The one line with which a command failed."""
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: ")
    return line.removeprefix("Error: ")


class TestSubmit:
    def test_the_id_is_printed_and_what_the_job_waits_for(
        self, run: Run, connection: Redis
    ) -> None:
        result = run("submit", "Name a colour")
        assert result.exit_code == 0
        (job_id,) = result.stdout.splitlines()
        assert re.fullmatch("[0-9a-f]{32}", job_id)
        assert result.stderr.splitlines() == [NOTE]
        body = {"messages": [{"role": "user", "content": "Name a colour"}]}
        assert body_of(connection, job_id) == ("chat", body)

    def test_with_json_all_that_is_known(self, run: Run) -> None:
        result = run("submit", "Hi", "--json", "--model", "m", "--priority", "high")
        info = json.loads(result.stdout)
        assert Job(info["id"]).info() == info
        assert (info["status"], info["model"], info["priority"]) == ("queued", "m", "high")

    def test_a_system_message_and_parameters(self, run: Run, connection: Redis) -> None:
        result = run(
            *("submit", "Hi", "--system", "Be brief.", "--model", "m"),
            *("-p", "temperature=0.5", "-p", 'stop=["a", "b"]', "-p", "seed=1"),
            *("--parameter", "max_completion_tokens=20"),
        )
        kind, body = body_of(connection, result.stdout.strip())
        assert kind == "chat"
        assert body == {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Hi"},
            ],
            "model": "m",
            "temperature": 0.5,
            "stop": ["a", "b"],
            "seed": 1,
            "max_completion_tokens": 20,
        }

    def test_a_value_that_is_no_json_is_a_string(self, run: Run, connection: Redis) -> None:
        result = run("submit", "Hi", "-p", "stop=The end", "-p", "user=a=b")
        body = body_of(connection, result.stdout.strip())[1]
        assert body["stop"] == "The end"
        assert body["user"] == "a=b"

    def test_a_completion(self, run: Run, connection: Redis) -> None:
        result = run("submit", "Once upon a time", "--completion")
        expected = ("completion", {"prompt": "Once upon a time"})
        assert body_of(connection, result.stdout.strip()) == expected

    @pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte order mark"])
    def test_a_whole_body_from_a_file(
        self, run: Run, connection: Redis, tmp_path: Path, start: bytes
    ) -> None:
        body = {"messages": [{"role": "user", "content": "Grüße 🌍"}], "seed": 1}
        file = tmp_path / "body.json"
        file.write_bytes(start + json.dumps(body, ensure_ascii=False).encode())
        result = run("submit", "--body", str(file), "-p", "seed=2")
        assert body_of(connection, result.stdout.strip()) == ("chat", {**body, "seed": 2})

    def test_a_whole_body_from_a_pipe(self, run: Run, connection: Redis) -> None:
        result = run("submit", "--body", "-", input='\ufeff{"prompt": "Hi"}')
        assert body_of(connection, result.stdout.strip()) == ("completion", {"prompt": "Hi"})

    def test_the_options_reach_the_job(self, run: Run, connection: Redis) -> None:
        result = run(
            *("submit", "Hi", "--result-ttl", "77", "--timeout", "1.5", "--max-attempts", "5"),
            *("--priority", "low"),
        )
        job_id = result.stdout.strip()
        ttl, meta, origin = connection.hmget(RQJob.key_for(job_id), "result_ttl", "meta", "origin")
        assert ttl == b"77"
        assert json.loads(meta)["max_attempts"] == 5
        assert json.loads(meta)["timeout"] == 1.5
        assert origin.decode() == keys.queue_name("default", "low")

    def test_every_option_can_come_from_the_environment(self, run: Run, connection: Redis) -> None:
        environment = {"MLX_RQ_MODEL": "m", "MLX_RQ_PRIORITY": "high", "MLX_RQ_JSON": "1"}
        info = json.loads(run("submit", "Hi", **environment).stdout)
        assert (info["model"], info["priority"]) == ("m", "high")

    def test_the_same_key_is_the_same_job(self, run: Run) -> None:
        first, second = (run("submit", "Hi", "--idempotency-key", "k").stdout for _ in range(2))
        assert first == second
        conflict = run("submit", "Bye", "--idempotency-key", "k")
        assert "'k' was already used for a request with another body" in refused(conflict)

    def test_waiting_prints_the_answer(self, run: Run, start_worker: StartWorker) -> None:
        start_worker(FakeEngine(answer_with=lambda task: chat("Blue.")))
        assert run("submit", "Name a colour", "--wait").stdout == "Blue.\n"
        response = json.loads(run("submit", "Name a colour", "--wait", "--json").stdout)
        assert response == chat("Blue.")

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                ["Hi", "-p", "temperature=200"],
                "Invalid 'temperature': decimal above maximum value. "
                "Expected a value <= 2, but got 200 instead.",
            ),
            (["Hi", "-p", "frobnicate=1"], "Unrecognized request argument supplied: frobnicate"),
            (["Hi", "-p", "seed=NaN"], None),
            (["Hi", "--result-ttl", "0"], "Invalid 'result_ttl': expected whole seconds, "),
            (
                ["Hi", "--result-ttl", "2147483648"],
                "Invalid 'result_ttl': expected whole seconds, at least 1, at most 2147483647, ",
            ),
            (
                ["Hi", "--timeout", "1e30"],
                "Invalid 'timeout': expected seconds above 0, at most 2147483647, ",
            ),
            (["Hi", "--timeout", "nan"], "Invalid 'timeout': expected seconds above 0, "),
            (["Hi", "--max-attempts", "0"], "Invalid 'max_attempts': expected "),
            (["\udcff"], "Invalid 'messages[0].content': expected a text, but got one with half "),
            (["Hi", "--idempotency-key", "\udcff"], "Invalid 'idempotency_key': expected a text "),
            (["Hi", "--idempotency-key", ""], "Invalid 'idempotency_key': expected a text that "),
            (["Hi", "--redis-url", "redis://\udcff"], r"Invalid Redis URL 'redis://\udcff': "),
        ],
    )
    def test_a_bad_request_is_one_line_and_nothing_is_stored(
        self, run: Run, connection: Redis, arguments: list[str], message: str | None
    ) -> None:
        line = refused(run("submit", *arguments))
        assert message is None or line.startswith(message)
        assert connection.dbsize() == 0

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "The body is not JSON: "),
            (b"{", "The body is not JSON: "),
            (b"\xff\xfe{", "The body is not JSON: "),
            (b"[" * 100_000, "The body is not JSON: "),
            (b"[]", "The body is not a JSON object."),
            (
                b'{"prompt": "a", "prompt": "b"}',
                "The body is not JSON: the key 'prompt' occurs twice in one object.",
            ),
            (b'"Hi"', "The body is not a JSON object."),
            (b"{}", "Missing required parameter: 'messages'."),
        ],
    )
    def test_a_bad_body_is_one_line(
        self, run: Run, connection: Redis, tmp_path: Path, content: bytes, message: str
    ) -> None:
        file = tmp_path / "body.json"
        file.write_bytes(content)
        assert refused(run("submit", "--body", str(file))).startswith(message)
        assert connection.dbsize() == 0

    def test_with_json_an_error_is_an_object(self, run: Run) -> None:
        result = run("submit", "Hi", "-p", "top_p=7", "--json")
        assert result.exit_code == 1
        assert json.loads(result.stdout) == {
            "error": {
                "message": "Invalid 'top_p': decimal above maximum value. "
                "Expected a value <= 1, but got 7 instead.",
                "type": "invalid_request_error",
                "param": "top_p",
                "code": "decimal_above_max_value",
            }
        }
        assert result.stderr == ""

    def test_with_json_an_error_is_one_line_for_all_readers(self, run: Run) -> None:
        result = run("submit", "Hi", "-p", "top\u2028p=7", "--json")
        (line,) = result.stdout.splitlines()
        assert json.loads(line)["error"]["param"] == "top\u2028p"

    def test_with_json_from_the_environment_an_error_is_an_object_too(self, run: Run) -> None:
        result = run("submit", "Hi", "-p", "top_p=7", MLX_RQ_JSON="1")
        assert json.loads(result.stdout)["error"]["param"] == "top_p"

    @pytest.mark.parametrize(
        "arguments",
        [
            [],
            ["Hi", "-p", "nonsense"],
            ["Hi", "-p", "=1"],
            ["Hi", "-p", 'metadata={"a": "1", "a": "2"}'],
            ["Hi", "-p", "stop=" + "[" * 100_000],
            ["Hi", "--completion", "--system", "x"],
            ["Hi", "--priority", "urgent"],
            ["Hi", "--timeout", "soon"],
            ["--body", "/nowhere/at/all.json"],
            ["--body", "-", "--system", "x"],
            ["--body", "-", "--completion"],
            ["Hi", "--body", "-"],
        ],
    )
    def test_a_wrong_use_says_how_it_is_used(
        self, run: Run, connection: Redis, arguments: list[str]
    ) -> None:
        result = run("submit", *arguments, input='{"messages": [], "prompt": "Hi"}')
        assert result.exit_code == 2
        assert result.stderr.startswith("Usage: ")
        assert connection.dbsize() == 0

    def test_a_text_without_quotes_is_shown_with_them(self, run: Run, connection: Redis) -> None:
        result = run("submit", "What", "is it?", "-p", "seed=1")
        assert (result.exit_code, connection.dbsize()) == (2, 0)
        assert "put it in quotes: mlx-rq submit 'What is it?'" in result.stderr


def chat(text: str) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    return {"object": "chat.completion", "choices": [{"index": 0, "message": message}]}


def response(*output: dict[str, Any]) -> dict[str, Any]:
    return {"object": "response", "status": "completed", "output": list(output)}


def message(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": list(parts)}


class TestResult:
    def test_the_text_is_printed(self, run: Run, start_worker: StartWorker) -> None:
        start_worker(FakeEngine(answer_with=lambda task: chat("Grüße 🌍")))
        assert run("result", submit(messages=HI).id).stdout == "Grüße 🌍\n"

    def test_every_choice_is_printed(self, run: Run, start_worker: StartWorker) -> None:
        choices = [{"index": 0, "text": "one"}, {"index": 1, "text": "two"}]
        start_worker(
            FakeEngine(answer_with=lambda task: {"object": "text_completion", "choices": choices})
        )
        assert run("result", submit(prompt="Hi").id).stdout == "one\ntwo\n"

    def test_a_count_of_tokens_is_printed(self, run: Run, start_worker: StartWorker) -> None:
        count = {"object": "response.input_tokens", "input_tokens": 42}
        start_worker(FakeEngine(refuse=lambda task: count))
        body = json.dumps({"count_tokens": {"prompt": "Hi"}})
        assert run("submit", "--body", "-", "--wait", input=body).stdout == "42\n"

    @pytest.mark.parametrize("wait", [True, False])
    def test_the_text_of_a_response_is_printed(
        self, run: Run, start_worker: StartWorker, wait: bool
    ) -> None:
        parts = [{"type": "output_text", "text": text} for text in ("Blue, ", "or green.")]
        start_worker(FakeEngine(answer_with=lambda task: response(message(*parts))))
        body = {"input": "Name a colour."}
        if wait:
            printed = run("submit", "--body", "-", "--wait", input=json.dumps(body))
        else:
            printed = run("result", submit(body).id)
        assert printed.stdout == "Blue, or green.\n"

    def test_the_tool_calls_of_a_response_are_printed(
        self, run: Run, start_worker: StartWorker
    ) -> None:
        call = {"type": "function_call", "call_id": "c", "name": "mix", "arguments": '{"ü": 1}'}
        start_worker(FakeEngine(answer_with=lambda task: response(call)))
        printed = run("result", submit(input="Mix.").id)
        assert json.loads(printed.stdout) == [call]
        assert "ü" in printed.stdout

    def test_the_tool_calls_of_a_chat_are_printed(
        self, run: Run, start_worker: StartWorker
    ) -> None:
        function = {"name": "mix", "arguments": "{}"}
        calls = [{"id": "c", "type": "function", "function": function}]
        messages = [{"content": None, "tool_calls": calls}, {"content": "", "tool_calls": calls}]
        messages += [{"content": "Mixing.", "tool_calls": calls}, {"content": None}]
        choices = [{"index": at, "message": message} for at, message in enumerate(messages)]
        start_worker(
            FakeEngine(answer_with=lambda task: {"object": "chat.completion", "choices": choices})
        )
        printed = json.dumps(calls, indent=2)
        assert run("result", submit(messages=HI).id).stdout == (
            f"{printed}\n{printed}\nMixing.\n\n"
        )

    def test_how_long_to_wait_does_not_come_from_the_environment(
        self, run: Run, start_worker: StartWorker
    ) -> None:
        job = submit(messages=HI)
        start_worker()
        assert run("result", job.id, MLX_RQ_TIMEOUT="0").exit_code == 0

    def test_with_json_the_whole_object(self, run: Run, start_worker: StartWorker) -> None:
        start_worker()
        job = submit(messages=HI)
        assert json.loads(run("result", job.id, "--json").stdout) == job.result(PATIENCE)

    def test_only_looking(self, run: Run) -> None:
        job = submit(messages=HI)
        line = refused(run("result", job.id, "--no-wait"))
        assert line.startswith(f"job {job.id} has no result within 0 s: queued")

    def test_waiting_no_longer_than_so_long(self, run: Run) -> None:
        job = submit(messages=HI)
        line = refused(run("result", job.id, "--timeout", "0.05"))
        assert line.startswith(f"job {job.id} has no result within 0.05 s: queued")

    def test_a_failed_job(self, run: Run, start_worker: StartWorker) -> None:
        start_worker(FakeEngine(answer_with=lambda task: failure("no_luck", "No such luck.")))
        job = submit(messages=HI)
        assert refused(run("result", job.id)) == f"job {job.id}: No such luck. [no_luck]"
        result = run("result", job.id, "--json")
        assert result.exit_code == 1
        assert json.loads(result.stdout) == failure("no_luck", "No such luck.")
        shown = run("status", job.id).stdout.splitlines()
        assert shown[-1] == "error:       No such luck. [no_luck]"

    @pytest.mark.parametrize("command", ["result", "cancel", "status", "trace"])
    def test_an_id_that_is_no_utf8(self, run: Run, command: str) -> None:
        assert refused(run(command, "\udcff")).startswith(r"job '\udcff' not found: ")

    @pytest.mark.parametrize("command", ["result", "cancel", "status"])
    def test_an_unknown_id(self, run: Run, command: str) -> None:
        assert refused(run(command, "none")) == (
            "job 'none' not found: no such id, or its result has passed its time to live"
        )
        result = run(command, "none", "--json")
        assert result.exit_code == 1
        error = json.loads(result.stdout)["error"]
        assert list(error) == ["message", "type", "param", "code"]
        assert "not found" in error["message"]

    @pytest.mark.parametrize("command", ["result", "status"])
    def test_another_programs_job(self, run: Run, connection: Redis, command: str) -> None:
        foreign = Queue("emails", connection=connection).enqueue("smtplib.send")
        arguments = ["--no-wait"] if command == "result" else []
        assert "not found" in refused(run(command, foreign.id, *arguments))


class TestCancel:
    def test_what_was_ended_and_what_had_ended_before(self, run: Run) -> None:
        first, second = submit(messages=HI), submit(messages=HI)
        second.cancel()
        assert run("cancel", first.id, second.id).stdout.splitlines() == [
            f"{first.id} cancelled",
            f"{second.id} had ended before",
        ]
        assert first.status() == "cancelled"

    def test_with_json(self, run: Run) -> None:
        first, second = submit(messages=HI), submit(messages=HI)
        second.cancel()
        assert json.loads(run("cancel", first.id, second.id, "--json").stdout) == [
            {"id": first.id, "cancelled": True},
            {"id": second.id, "cancelled": False},
        ]

    def test_an_unknown_id_among_others_does_not_keep_the_others(self, run: Run) -> None:
        job = submit(messages=HI)
        result = run("cancel", "none", job.id)
        assert result.exit_code == 1
        assert result.stdout == f"{job.id} cancelled\n"
        assert result.stderr.startswith("Error: job 'none' not found")
        assert job.status() == "cancelled"
        # with --json, those that are known are listed; the exit code says that some were not
        result = run("cancel", "none", job.id, "--json")
        assert result.exit_code == 1
        assert json.loads(result.stdout) == [{"id": job.id, "cancelled": False}]


class TestCancelMany:
    def test_all_that_wait_once_it_was_asked(self, run: Run) -> None:
        jobs = [submit(messages=HI, model=model) for model in ("a", "a", "b")]
        refused = run("cancel", "--queued", input="n\n")
        assert refused.exit_code == 1
        assert "Cancel 3 jobs that wait? [y/N]" in refused.stderr
        assert [job.status() for job in jobs] == ["queued"] * 3
        assert run("cancel", "--queued", input="y\n").stdout == "3 jobs cancelled\n"
        assert [job.status() for job in jobs] == ["cancelled"] * 3
        assert run("cancel", "--queued").stdout == "0 jobs cancelled\n"

    def test_those_of_a_model(self, run: Run) -> None:
        jobs = [submit(messages=HI, model=model) for model in ("a", "a", "b")]
        cancelled = run("cancel", "--model", "a", "--yes", "--json")
        assert json.loads(cancelled.stdout) == {"cancelled": 2}
        assert jobs[2].status() == "queued"

    def test_those_of_a_batch(self, run: Run, tmp_path: Path) -> None:
        alone = submit(messages=HI)
        lines = write_jsonl(tmp_path / "in.jsonl", batch_lines(3))
        output = tmp_path / "out.jsonl"
        with open_state(state_of(output), "out") as state:
            batch = Batch(BatchFile(lines, "in", {}), Outputs(output, None), state, BatchOptions())
            running = run("cancel", "--batch", str(output), "--yes")
            batch.run(Batch.stop)
        assert "Another `mlx-rq batch` is writing" in running.stderr
        assert run("cancel", "--batch", str(output), "--yes").stdout == "3 jobs cancelled\n"
        assert alone.status() == "queued"

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ([], "name jobs by their ids, or many with --queued, --model or --batch"),
            (["x", "--queued"], "name jobs by their ids, or many with"),
            (["--queued", "--json"], "--json asks nothing: add --yes"),
            (["--batch", "none.jsonl", "--yes"], "there is no none.jsonl.state; name the file"),
        ],
    )
    def test_what_cannot_be_meant_is_said(self, run: Run, arguments: list[str], words: str) -> None:
        result = run("cancel", *arguments)
        assert result.exit_code == 2
        assert words in result.stderr


class TestStatus:
    def test_of_one_job(self, run: Run) -> None:
        job = submit(messages=HI)
        lines = run("status", job.id).stdout.splitlines()
        assert f"id:          {job.id}" in lines
        assert "status:      queued" in lines
        assert "model:       default" in lines
        assert NOTE.replace("note: ", "note:        ") in lines
        assert not any("None" in line for line in lines)

    def test_of_one_job_with_json(self, run: Run) -> None:
        job = submit(messages=HI)
        assert json.loads(run("status", job.id, "--json").stdout) == job.info()

    def test_of_an_empty_server(self, run: Run) -> None:
        assert run("status").stdout.splitlines() == [
            "No live worker: start one with `mlx-rq worker`.",
            "No queue yet: nothing was submitted.",
        ]
        state = json.loads(run("status", "--json").stdout)
        assert state.pop("limits").keys() == {"jobs", "bytes"}
        tokens = dict.fromkeys(
            ("prompt_tokens", "distinct_tokens", "prefilled_tokens", "saved_tokens"), 0
        )
        assert state == {
            "version": 1,
            "queues": [],
            "workers": [],
            "sharing": {**tokens, "ratio": None},
            "failures": [],
            "notes": [],
        }

    def test_of_queues_and_workers(self, run: Run, start_worker: StartWorker) -> None:
        engine = FakeEngine("m")
        engine.drafting = "by small (fake)"
        start_worker(engine, name="mac-1")
        submit(messages=HI).result(PATIENCE)
        submit(messages=HI, model="other")
        result = run("status")
        text = result.stdout
        assert result.exit_code == 0
        assert re.search(r"^default +normal +0 +0 +1 +0 +0 +- +-$", text, re.M), text
        assert re.search(r"^other +normal +1 +0 +0 +0 +0 +\d+ s +-$", text, re.M), text
        assert "worker mac-1 · m\n" in text
        assert "0 of 16 rows run · 0 wait in it · " in text
        assert "held once (fake)" in text
        assert "  drafts by small (fake)\n" in text
        assert "  memory 6.0 of 8.0 GB · weights 4.2 · rows 1.8\n" in text
        assert "jobs wait for 'other', which no live worker serves" in text
        state = json.loads(run("status", "--json").stdout)
        assert [worker["name"] for worker in state["workers"]] == ["mac-1"]
        assert state["workers"][0]["prefix_sharing"] == "held once (fake)"
        assert state["workers"][0]["drafting"] == "by small (fake)"
        assert state["workers"][0]["memory"]["peak"] == 7_000
        assert state["notes"] == ["jobs wait for 'other', which no live worker serves"]

    @pytest.mark.parametrize("name", ["[/b]", "[bold]m[/bold]", ":cat:", "[link=x]m"])
    def test_of_names_that_look_like_markup(
        self, run: Run, start_worker: StartWorker, name: str
    ) -> None:
        start_worker(FakeEngine(name))
        submit(messages=HI, model=name).result(PATIENCE)
        submit(messages=HI, model=f"{name}!")
        result = run("status", COLUMNS="300")
        assert result.exit_code == 0
        lines = result.stdout.splitlines()
        queues = [line for line in lines if " normal " in line]
        assert sorted(queue.split()[0] for queue in queues) == [name, f"{name}!"]
        assert lines[0].endswith(f" · {name}")
        assert f"jobs wait for {f'{name}!'!r}, which no live worker serves" in result.stdout


COMMANDS_WITH_DATA = {"serve": ["serve"], "up": ["up", "--model", "/nowhere"]}


class TestNoRedis:
    @pytest.mark.parametrize(
        "arguments",
        [
            ["submit", "Hi"],
            ["submit", "Hi", "--idempotency-key", "k"],
            ["submit", "Hi", "--wait"],
            ["result", "x"],
            ["cancel", "x"],
            ["status"],
            ["status", "x"],
        ],
        ids=" ".join,
    )
    def test_one_line_says_what_was_tried_and_how_to_start_one(
        self, run: Run, nobody_listens: str, arguments: list[str]
    ) -> None:
        for how in (
            lambda: run(*arguments, "--redis-url", nobody_listens),
            lambda: run(*arguments, **{URL_VARIABLE: nobody_listens}),
        ):
            line = refused(how())
            assert line.startswith(f"No Redis at {nobody_listens}: ")
            assert "refused. Start one with `mlx-rq up`" in line

    def test_with_json(self, run: Run, nobody_listens: str) -> None:
        result = run("submit", "Hi", "--json", "--redis-url", nobody_listens)
        assert result.exit_code == 1
        error = json.loads(result.stdout)["error"]
        assert list(error) == ["message", "type", "param", "code"]
        assert error["message"].startswith(f"No Redis at {nobody_listens}: ")

    @pytest.mark.parametrize(
        ("options", "asks"), [(["--wait"], "result"), (["--follow"], "result"), ([], "info")]
    )
    def test_a_job_that_was_accepted_before_is_named(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, options: list[str], asks: str
    ) -> None:
        def away(self: Job, *arguments: Any, **named: Any) -> None:
            raise RedisUnavailable(f"No Redis for {self.id}.")

        async def nothing(*arguments: Any) -> None:
            """Follows no text."""

        with monkeypatch.context() as patch:
            patch.setattr(answers, "_follow", nothing)
            patch.setattr(Job, asks, away)
            line = refused(run("submit", "Hi", *options))
        job_id = line.split()[3].rstrip(".")
        assert line == (
            f"No Redis for {job_id}. The job was accepted: `mlx-rq result {job_id}` has its answer."
        )
        assert fetch(job_id).status() == "queued"

    def test_a_url_that_is_none(self, run: Run) -> None:
        line = refused(run("status", "--redis-url", "localhost:6379"))
        assert line.startswith("Invalid Redis URL 'localhost:6379': ")

    def test_a_url_with_an_option_that_is_none(self, run: Run) -> None:
        line = refused(run("submit", "Hi", **{URL_VARIABLE: "redis://h/0?foo=1"}))
        assert line.startswith(
            "Invalid Redis URL 'redis://h/0?foo=1': the option 'foo' cannot be set; those that can "
            "are client_name, db, "
        )


class TestFiles:
    """What the system refuses is one line, whichever command asked."""

    @pytest.mark.parametrize("command", ["serve", "up"])
    def test_a_data_folder_that_cannot_be_written_to(
        self, run: Run, tmp_path: Path, command: str
    ) -> None:
        (tmp_path / "file").touch()
        folder = tmp_path / "file" / "data"  # as unwritable as can be, also for root
        line = refused(run(*COMMANDS_WITH_DATA[command], "--data-dir", str(folder)))
        assert line == (
            f"--data-dir {folder}: Not a directory. Choose a folder that you may write to."
        )

    def test_something_below_the_data_folder_that_cannot_be_written_to(
        self, run: Run, tmp_path: Path
    ) -> None:
        (tmp_path / "http").touch()
        line = refused(run("serve", "--data-dir", str(tmp_path)))
        assert line == f"{tmp_path / 'http'}: File exists"


class TestCtrlC:
    """It says what becomes of the work."""

    def test_while_an_answer_is_waited_for(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(Job, "result", interrupt)
        waiting = run("submit", "Hi", "--wait")
        (job_id,) = re.findall("mlx-rq result ([0-9a-f]{32})", waiting.stderr)
        again = run("result", job_id)
        words = f"\nStopped waiting. The job goes on: `mlx-rq result {job_id}` has its answer.\n"
        for result in (waiting, again):
            assert (result.exit_code, result.stdout, result.stderr) == (130, "", words)

    @pytest.mark.parametrize(
        ("what", "words"),
        [
            ("read_stdin", "\nStopped. Nothing was submitted.\n"),
            (
                "submit_module.submit",
                "\nStopped before it was known whether the job is in the queue.\n",
            ),
        ],
    )
    def test_while_a_job_is_submitted(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, what: str, words: str
    ) -> None:
        def interrupt(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(f"mlx_rq.worker.cli.submit.{what}", interrupt)
        result = run("submit", "-", input="Hi")
        assert (result.exit_code, result.stdout, result.stderr) == (130, "", words)

    @pytest.mark.parametrize("command", [name for name in main.commands if name != "batch"])
    def test_nowhere_is_it_called_aborted(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, command: str
    ) -> None:
        def interrupt(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(main.commands[command], "make_context", interrupt)
        result = run(command)
        assert result.exit_code == 130
        assert result.stderr.startswith("\nStopped")

    def test_at_a_question(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        job = submit(messages=HI)
        result = run("cancel", "--queued", input="")  # an end of the input is the same to click
        assert (result.exit_code, job.status()) == (130, "queued")
        assert result.stderr.endswith("\nNothing was cancelled.\n")


def test_the_version_is_printed(run: Run) -> None:
    from mlx_rq import __version__

    assert __version__ in run("--version").stdout


def test_what_a_terminal_cannot_write_is_written_in_ascii(redis_url: str) -> None:
    job = submit(messages=HI, model="模型é")
    command = [sys.executable, "-P", "-m", "mlx_rq.worker", "status", job.id]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "model:       \\u6a21\\u578bé" in done.stdout.decode("latin-1")


def test_click_before_8_4_will_do() -> None:
    program = """
import click
def refuse(cls, item):
    raise TypeError("type 'ParamType' is not subscriptable")
click.ParamType.__class_getitem__ = classmethod(refuse)
from mlx_rq.worker.cli import answers
from mlx_rq.worker.cli.main import main
main(["up", "--help"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--kv-budget" in done.stdout


@pytest.mark.parametrize("command", [[], ["submit"], ["result"], ["cancel"], ["status"]])
def test_help_is_printed(run: Run, command: list[str]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: ")
