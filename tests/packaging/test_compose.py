"""docker-compose.yml and the Dockerfile, as far as they can be checked where no engine runs."""

import json
import re
import shlex
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from jsonschema import Draft202012Validator

from mlx_rq.jobs.queue.connection import URL_VARIABLE
from mlx_rq.worker.cli.main import main

ROOT = Path(__file__).parents[2]
QUEUE_URL = "redis://:${MLX_RQ_QUEUE_PASSWORD}@queue:6379/0"
SPECIFICATION = files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


@pytest.fixture(scope="module")
def dockerfile() -> str:
    return (ROOT / "Dockerfile").read_text()


def _validator() -> Draft202012Validator:
    schema = json.loads(SPECIFICATION.read_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def test_fits_the_compose_specification(compose: dict[str, Any]) -> None:
    assert [error.message for error in _validator().iter_errors(compose)] == []


@pytest.mark.parametrize(
    "change", [{"comand": ["x"]}, {"ports": {"8000": 8000}}, {"restart": True}, {"depends_on": 1}]
)
def test_the_check_sees_faults(compose: dict[str, Any], change: dict[str, Any]) -> None:
    server = {**compose["services"]["server"], **change}
    broken = {**compose, "services": {**compose["services"], "server": server}}
    assert list(_validator().iter_errors(broken))


def test_what_is_referred_to_is_there(compose: dict[str, Any], dockerfile: str) -> None:
    stages = set(re.findall(r"^FROM \S+ AS (\w+)$", dockerfile, re.MULTILINE))
    for service in compose["services"].values():
        for other in service.get("depends_on", {}):
            assert "healthcheck" in compose["services"][other]
        for volume in service.get("volumes", []):
            assert volume.partition(":")[0] in compose["volumes"]
        for secret in service.get("secrets", []):
            assert secret in compose["secrets"]
        assert service["build"]["target"] in stages if "build" in service else service["image"]


def test_the_servers_command_is_one_that_the_command_line_takes(compose: dict[str, Any]) -> None:
    server = compose["services"]["server"]
    program, name, *arguments = server["command"]
    assert program == "mlx-rq"
    command = main.get_command(click.Context(main), name)
    assert command is not None
    settings = command.make_context(name, arguments).params
    assert settings["host"] == "0.0.0.0"
    # Open to the network of the containers, so it has to ask for keys, which come as a secret.
    (secret,) = server["secrets"]
    assert settings["api_key_file"] == Path("/run/secrets") / secret
    assert server["volumes"][0].endswith(f":{settings['data_dir']}")
    assert server["environment"] == {URL_VARIABLE: QUEUE_URL}
    port = settings["port"]
    assert server["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert f":{port}/health" in server["healthcheck"]["test"][-1]


def test_nothing_is_published_beyond_loopback(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_the_queue_keeps_what_it_accepted(compose: dict[str, Any]) -> None:
    queue = compose["services"]["queue"]
    options = dict(zip(queue["command"][1::2], queue["command"][2::2], strict=True))
    assert options["--appendonly"] == "yes"
    assert options["--maxmemory-policy"] == "noeviction"
    assert queue["volumes"] == ["queue:/data"]


def test_the_queue_asks_for_a_password(compose: dict[str, Any]) -> None:
    services = compose["services"]
    flags = services["queue"]["environment"]["VALKEY_EXTRA_FLAGS"]
    assert flags.startswith("--requirepass ${MLX_RQ_QUEUE_PASSWORD:?")  # unset, nothing starts
    assert services["dashboard"]["environment"] == {"RQ_DASHBOARD_REDIS_URL": QUEUE_URL}
    for service in services.values():
        assert "PASSWORD" not in " ".join(service["command"])


def test_the_dashboard_reads_json_only(compose: dict[str, Any], dockerfile: str) -> None:
    command = compose["services"]["dashboard"]["command"]
    assert command[:2] == ["rq-dashboard", "--json"]
    assert "rq-dashboard==" in dockerfile


def test_the_image_installs_extras_and_files_that_are_there(dockerfile: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installs = [line for line in dockerfile.splitlines() if "pip install" in line]
    extras = [extra for line in installs for extra in re.findall(r"\.\[(\w+)\]", line)]
    assert extras == ["http"]
    assert set(extras) <= set(project["optional-dependencies"])
    words = [word for line in installs for word in shlex.split(line)]
    constraints = words[words.index("--constraint") + 1]
    included = (ROOT / ".dockerignore").read_text()
    for name in (constraints, "pyproject.toml", project["readme"], "jobs", "api_stub", "worker"):
        assert (ROOT / name).exists()
        assert f"!{name}" in included
