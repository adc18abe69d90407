"""Every default of an option stands in one place: the dataclass that the option goes to."""

import dataclasses
import re

import pytest
from click.testing import CliRunner

from mlx_rq.api_stub.settings import Settings
from mlx_rq.engine.options import EngineOptions
from mlx_rq.jobs.batch.batch import BatchOptions
from mlx_rq.jobs.queue.options import JobOptions
from mlx_rq.worker.cli.main import main
from mlx_rq.worker.options import WorkerOptions
from mlx_rq.worker.process.supervisor import SupervisorOptions

OF_A_WORKER = {
    "--window": (WorkerOptions, "window"),
    "--lease": (WorkerOptions, "lease"),
    "--grace": (WorkerOptions, "grace"),
    "--max-wait": (WorkerOptions, "max_wait"),
    "--stall": (WorkerOptions, "stall"),
}
OF_A_JOB = {
    "--result-ttl": (JobOptions, "result_ttl"),
    "--max-attempts": (JobOptions, "max_attempts"),
}
OPTIONS = {
    "worker": OF_A_WORKER,
    "up": OF_A_WORKER,
    "demo": OF_A_WORKER,
    "serve": {"--max-queued": (Settings, "max_queued")},
    "submit": {"--priority": (JobOptions, "priority"), **OF_A_JOB},
    "batch": {
        "--in-flight": (BatchOptions, "window"),
        "--order": (BatchOptions, "order"),
        **OF_A_JOB,
    },
}


def default(options: type, name: str) -> object:
    return next(field.default for field in dataclasses.fields(options) if field.name == name)


def shown_defaults(command: str) -> dict[str, str]:
    """Reads the defaults by their options, as the help shows them."""
    result = CliRunner().invoke(main, [command, "--help"], terminal_width=500)
    assert result.exit_code == 0, result.output
    shown = {}
    for part in re.split(r"\n  (?=-)", result.output):
        text = " ".join(part.split())
        if found := re.search(r"(--[\w-]+).*\[.*?default: ([^;\]]+)", text):
            shown[found[1]] = found[2]
    return shown


@pytest.mark.parametrize("command", OPTIONS)
def test_the_help_shows_the_defaults_of_the_dataclasses(command: str) -> None:
    shown = shown_defaults(command)
    for flag, (options, name) in OPTIONS[command].items():
        assert shown[flag] == str(default(options, name)), flag


def test_the_priority_of_a_batch_is_that_of_its_options() -> None:
    assert shown_defaults("batch")["--priority"] == BatchOptions().job.priority


def test_what_two_dataclasses_have_in_common_has_one_default() -> None:
    worker = WorkerOptions()
    assert worker.stall == SupervisorOptions().stall
    assert worker.max_wait == EngineOptions().max_wait


def test_a_wired_limit_is_a_number_of_bytes_or_0_or_auto() -> None:
    result = CliRunner().invoke(main, ["worker", "--wired-limit", "-3"])
    assert result.exit_code == 2
    assert "'-3' is not a number of bytes such as 500MB or 8GB, nor 0 or 'auto'" in result.output
    (option,) = (one for one in main.commands["worker"].params if one.name == "wired_limit")
    assert [option.type.convert(value, None, None) for value in ("auto", "0", "20GB", 7)] == [
        *("auto", 0, 20_000_000_000, 7)
    ]
