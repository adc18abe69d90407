"""What people expect of any command line: beginnings of ids, `-`, NO_COLOR, ports, exit codes."""

import json
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from fakes import FakeEngine, StartWorker
from redis import Redis
from rq.job import Job as RQJob

from mlx_rq import Job, submit
from mlx_rq.jobs.queue import stream
from mlx_rq.jobs.queue.payload import read_payload
from mlx_rq.worker.cli.main import main

IDS = [f"abcd{number:028x}" for number in (1, 2, 2**40)]


def run(*arguments: str, input: str | bytes | None = None, **settings: Any) -> Result:
    result = CliRunner().invoke(main, arguments, input=input, **settings)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result


@pytest.fixture
def named(redis_url: str, connection: Redis) -> list[str]:
    """Three jobs whose ids begin alike."""
    for job_id in IDS:
        job = submit(prompt=job_id, model="m")
        connection.rename(RQJob.key_for(job.id), RQJob.key_for(job_id))
    connection.set(f"{RQJob.key_for(IDS[2])}:dependents", "no job")
    return IDS


def test_the_beginning_of_an_id_names_its_job(named: list[str]) -> None:
    beginning = named[2][:22]
    assert json.loads(run("status", beginning, "--json").stdout)["id"] == named[2]
    assert run("cancel", beginning).stdout == f"{named[2]} cancelled\n"
    result = run("result", beginning, "--no-wait")
    assert (result.exit_code, "cancelled" in result.stderr) == (1, True)


def test_a_beginning_of_several_is_refused_and_they_are_listed(named: list[str]) -> None:
    result = run("cancel", named[0], "abcd")
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        "Error: 'abcd' is how 3 ids begin:",
        *(f"  {job_id}  queued, m" for job_id in named),
    ]
    assert Job(named[0]).status() == "queued"  # not cancelled either


def test_what_no_id_begins_with_is_not_found(named: list[str]) -> None:
    assert "job 'abce' not found" in run("status", "abce").stderr
    assert "'abc' is too short for a job's id: give its first 4" in run("status", "abc").stderr


def test_without_the_right_to_search_the_whole_id_is_asked_for(
    named: list[str], connection: Redis, redis_url: str
) -> None:
    rights = ["reset", "on", ">p", "+@all", "-scan", "~*", "&*"]
    connection.execute_command("ACL", "SETUSER", "searcher", *rights)
    url = redis_url.replace("redis://", "redis://searcher:p@")
    assert "give all 32 characters" in run("status", "abcd", "--redis-url", url).stderr
    assert run("status", named[0], "--redis-url", url).exit_code == 0


def test_ids_come_from_a_pipe(named: list[str]) -> None:
    result = run("cancel", "-", input=f"{named[0]}\n{named[1]}\n")
    assert result.stdout == f"{named[0]} cancelled\n{named[1]} cancelled\n"
    assert "Error: Standard input is empty." in run("cancel", "-", input=" \n").stderr
    assert "standard input names 2" in run("status", "-", input="\n".join(named[:2])).stderr


def test_the_text_of_a_job_comes_from_a_pipe(connection: Redis, redis_url: str) -> None:
    def body(*arguments: str) -> Any:
        job_id = run("submit", *arguments, input="Two\nlines\n").stdout.strip()
        return read_payload(connection.hget(RQJob.key_for(job_id), "data"))[1]

    assert body("-")["messages"] == [{"role": "user", "content": "Two\nlines"}]
    assert body("-", "--completion") == {"prompt": "Two\nlines\n"}
    assert "not UTF-8" in run("submit", "-", input=b"\xff").stderr


def chat(*texts: str) -> dict[str, Any]:
    choices = [
        {"index": i, "message": {"content": text}, "finish_reason": "stop"}
        for i, text in enumerate(texts)
    ]
    return {"object": "chat.completion", "choices": choices}


def test_followed_text_is_printed_as_it_comes_and_what_is_missing_at_the_end(
    start_worker: StartWorker, connection: Redis
) -> None:
    def answer(task: Any) -> dict[str, Any]:
        deltas = [("content", 0, "One, "), ("reasoning", 0, "Hm."), ("content", 5, "two")]
        deltas += [("content", 3, ", two, "), ("content", 20, "beyond a gap")]
        stream.publish(connection, task.id, [stream.Delta(0, *delta) for delta in deltas])
        return chat("One, two, three.", "Another.")

    start_worker(FakeEngine(answer_with=answer))
    result = run("submit", "Count", "--follow", "-p", "n=2")
    assert (result.stdout, result.stderr) == ("One, two, three.\nAnother.\n", "")


def test_followed_text_that_begins_anew_is_printed_anew(
    start_worker: StartWorker, connection: Redis
) -> None:
    def answer(task: Any) -> dict[str, Any]:
        said = [stream.Delta(0, "content", 0, "Bl"), stream.Delta(0, "content", 0, "Gre")]
        stream.publish(connection, task.id, said)
        return chat("Green.")

    start_worker(FakeEngine(answer_with=answer))
    result = run("submit", "A colour", "--follow")
    assert result.stdout == "Bl\nGreen.\n"
    assert result.stderr == "note: it was begun again, and says something else now\n"


def test_a_job_without_text_to_follow_says_so(start_worker: StartWorker, redis_url: str) -> None:
    job = submit(messages=[{"role": "user", "content": "Hi"}])
    start_worker(FakeEngine(answer_with=lambda task: chat("Blue.")))
    result = run("result", job.id[:12], "--follow")
    assert (result.stdout, result.stderr.count("without --follow")) == ("Blue.\n", 1)
    assert run("result", job.id, "--follow", "--json").exit_code == 2


@pytest.mark.parametrize("command", ["serve", "up"])
def test_the_port_is_the_http_servers_under_its_old_name_too(command: str) -> None:
    (help_text, made) = (main.commands[command].get_help, main.commands[command].make_context)
    assert "--http-port" not in help_text(click.Context(main.commands[command]))
    for given in (["--port", "8123"], ["--http-port", "8123"], ["--http-port=8123"]):
        assert made(command, given, parent=None).params["port"] == 8123


@pytest.mark.parametrize("variable", ["MLX_RQ_PORT", "MLX_RQ_HTTP_PORT"])
def test_the_environment_names_it_either_way(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "8124")
    assert main.commands["up"].make_context("up", []).params["port"] == 8124


def test_without_colour_where_it_is_not_wanted() -> None:
    @click.command()
    def coloured() -> None:
        click.secho("red", fg="red")

    main.add_command(coloured, "coloured")
    try:
        assert run("coloured", color=True).stdout == "\x1b[31mred\x1b[0m\n"
        assert run("coloured", color=True, env={"NO_COLOR": "1"}).stdout == "red\n"
        assert run("coloured", color=True, env={"NO_COLOR": ""}).stdout.startswith("\x1b")
    finally:
        del main.commands["coloured"]


@pytest.mark.parametrize("command", [[], ["submit"], ["result"], ["cancel"], ["worker"], ["batch"]])
def test_the_help_tells_the_exit_codes(command: list[str]) -> None:
    assert "Exits with 0" in run(*command, "--help").stdout
