"""`mlx-rq limits` and `mlx-rq url`, for whoever runs the queue."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from redis import Redis

from mlx_rq import submit
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.connection import URL_VARIABLE
from mlx_rq.jobs.queue.limits import Limits, read_limits
from mlx_rq.worker.cli.main import main

HI = [{"role": "user", "content": "Say hi."}]

Run = Callable[..., Result]


@pytest.fixture
def run(redis_url: str) -> Run:
    def run(*arguments: str, **environment: str) -> Result:
        return CliRunner().invoke(main, arguments, env=environment)

    return run


class TestLimits:
    def test_without_any(self, run: Run, connection: Redis) -> None:
        result = run("limits")
        assert result.stdout == "No limits: new jobs are taken for as long as Redis takes them.\n"
        assert connection.dbsize() == 0

    def test_they_are_set_and_shown(self, run: Run, connection: Redis) -> None:
        submit(messages=HI)
        shown = run("limits", "--jobs", "100000", "--bytes", "2GB").stdout
        assert read_limits(connection) == Limits(jobs=100_000, bytes=2_000_000_000)
        jobs, memory = shown.splitlines()
        assert jobs == "limit: 1 of 100,000 jobs wait"
        assert memory.startswith("limit: Redis uses ")
        assert memory.endswith(" of 2,000,000,000 bytes")
        assert run("limits").stdout.splitlines()[0] == jobs

    def test_status_shows_them(self, run: Run) -> None:
        assert "limit:" not in run("status").stdout
        run("limits", "--jobs", "7")
        assert "limit: 0 of 7 jobs wait" in run("status").stdout
        assert json.loads(run("status", "--json").stdout)["limits"]["jobs"] == {
            "limit": 7,
            "waiting": 0,
        }

    def test_one_is_removed_alone(self, run: Run, connection: Redis) -> None:
        run("limits", "--jobs", "5", "--bytes", "1GB")
        run("limits", "--jobs", "none")
        assert read_limits(connection) == Limits(jobs=None, bytes=1_000_000_000)
        run("limits", "--bytes", "none")
        assert not connection.exists(keys.LIMITS)

    def test_with_json(self, run: Run) -> None:
        said = json.loads(run("limits", "--jobs", "5", "--json").stdout)
        assert said["jobs"] == {"limit": 5, "waiting": 0}
        assert said["bytes"]["limit"] is None
        assert said["bytes"]["used"] > 0

    @pytest.mark.parametrize(
        ("option", "value", "fault"),
        [
            ("--jobs", "0", "'0' is no whole number of 1 or more"),
            ("--jobs", "many", "'many' is no whole number of 1 or more"),
            ("--bytes", "2 apples", "'2 apples' is not a number of bytes such as 500MB or 8GB"),
            ("--bytes", "0", "'0' is not a number of bytes"),
            ("--jobs", "1" + "0" * 18, "is above 999999999999999999, the highest limit"),
            ("--bytes", "9999999999999GB", "is above 999999999999999999, the highest limit"),
        ],
    )
    def test_what_is_no_limit_is_refused(
        self, run: Run, connection: Redis, option: str, value: str, fault: str
    ) -> None:
        result = run("limits", option, value)
        assert result.exit_code == 2
        assert fault in result.stderr
        assert not connection.exists(keys.LIMITS)

    def test_the_environment_sets_none(self, run: Run, connection: Redis) -> None:
        run("limits", MLX_RQ_JOBS="5", MLX_RQ_BYTES="1GB")
        assert not connection.exists(keys.LIMITS)

    def test_a_refused_submission_is_one_line(self, run: Run) -> None:
        run("limits", "--jobs", "1")
        run("submit", "Hi")
        refused = run("submit", "Hi")
        assert refused.exit_code == 1
        assert refused.stderr.startswith("Error: The queue is full: 1 job waits, 1 would come")
        assert len(refused.stderr.splitlines()) == 1


class TestUrl:
    def test_it_is_printed_with_its_password(self, run: Run) -> None:
        url = "redis://user:s3cret@queue.example:6379/0"
        assert run("url", **{URL_VARIABLE: url}).stdout == f"{url}\n"

    def test_without_any_server_it_is_localhost(self, run: Run, tmp_path: Path) -> None:
        nowhere = {URL_VARIABLE: "", "MLX_RQ_DATA_DIR": str(tmp_path)}
        assert run("url", **nowhere).stdout == "redis://localhost:6379/0\n"


def test_a_wrong_size_in_the_environment_is_said_before_anything_runs(run: Run) -> None:
    result = run("status", MLX_RQ_MAX_BODY="big")
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: Invalid MLX_RQ_MAX_BODY in the environment: 'big' is not a number of bytes such as "
        "500MB or 8GB.\n"
    )
