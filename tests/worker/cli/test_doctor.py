"""`mlx-rq doctor`: what it finds in machines, servers and workers, and what it says to do."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fakes import FakeEngine, StartWorker, eventually
from redis import Redis
from servers import run_server
from tiny import tiny_model

from mlx_rq.api_stub.settings import Settings
from mlx_rq.jobs.openai.errors import RedisUnavailable
from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.workers import live_workers
from mlx_rq.worker.cli.doctor import machine as machine_module
from mlx_rq.worker.cli.doctor.finding import Finding
from mlx_rq.worker.cli.doctor.machine import (
    FASTER_BLAS,
    Machine,
    Mlx,
    machine_findings,
    this_machine,
    try_mlx,
)
from mlx_rq.worker.cli.doctor.model import findings_of, model_findings
from mlx_rq.worker.cli.doctor.places import disk_finding
from mlx_rq.worker.cli.doctor.ports import port_finding
from mlx_rq.worker.cli.doctor.queue import clock_finding, queue_findings, worker_findings
from mlx_rq.worker.cli.main import main

MAC = Machine("darwin", "arm64", "3.12.1", "15.2", False, "Apple M4 Pro", 48 << 30, 0, 0)
METAL = Mlx(
    version="0.32.4", device="Apple M4 Pro", metal=True, gigaflops=7e3, recommended=40 << 30
)


def by_area(machine: Machine, mlx: Mlx) -> dict[str, Finding]:
    return {finding.area: finding for finding in machine_findings(machine, mlx)}


def test_a_mac_where_all_is_well() -> None:
    found = by_area(MAC, METAL)
    assert {finding.level for finding in found.values()} == {"ok"}
    assert found["Python"].text == "3.12.1 (arm64), macOS 15.2, Apple M4 Pro"
    assert found["MLX"].text == "0.32.4 on Apple M4 Pro: 7,000.0 GFLOP/s in float32"
    assert found["memory"].text == "51.5 GB, of which Metal may use 42.9 GB"


@pytest.mark.parametrize(
    ("machine", "mlx", "area", "level", "advice"),
    [
        (replace(MAC, translated=True), METAL, "Python", "error", "a native (arm64) Python"),
        (replace(MAC, architecture="x86_64"), METAL, "Python", "error", "needs Apple silicon"),
        (replace(MAC, macos="13.6"), METAL, "Python", "error", "needs macOS ≥ 14"),
        (MAC, Mlx(error="no mlx", missing=True), "MLX", "error", "mlx-rq[worker]"),
        (MAC, Mlx(error="no Metal"), "MLX", "error", "--force-reinstall mlx"),
        (MAC, replace(METAL, metal=False, plain_blas=True), "MLX", "warning", FASTER_BLAS),
        (replace(MAC, wired_limit=47 << 30), METAL, "memory", "error", "iogpu.wired_limit_mb=0"),
        (replace(MAC, memory=4 << 30), METAL, "memory", "warning", "--kv-budget"),
        (replace(MAC, sleeps_after=10), METAL, "sleep", "warning", "sudo pmset -c sleep 0"),
    ],
)
def test_what_is_wrong_with_a_machine(
    machine: Machine, mlx: Mlx, area: str, level: str, advice: str
) -> None:
    found = by_area(machine, mlx)[area]
    assert found.level == level
    assert advice in (found.advice or "")


def test_a_mac_is_asked_by_its_own_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"wired_limit_mb": "1024\n", "-g": " sleep   15 (by x)\n"}
    monkeypatch.setattr(machine_module, "chip", lambda: "Apple M1")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(machine_module, "is_translated", lambda: False)
    machine = this_machine(lambda *words: said[words[-1].rpartition(".")[2].replace("iogpu.", "")])
    assert (machine.chip, machine.wired_limit, machine.sleeps_after) == ("Apple M1", 1 << 30, 15)
    nothing = this_machine(lambda *words: "")
    assert (nothing.wired_limit, nothing.sleeps_after) == (0, None)


def test_mlx_is_tried_for_real() -> None:
    tried = try_mlx()
    assert (tried.error, tried.gigaflops > 0) == ("", True)


def test_a_disk_and_a_clock() -> None:
    assert disk_finding("data", "/data", int(1e9)).level == "warning"
    assert disk_finding("data", "/data", int(3e9)) == Finding("data", "ok", "/data; 3.0 GB free")
    assert clock_finding(-1.9).level == "ok"
    assert clock_finding(-90).text == "that of Redis is 90 s behind this machine's"


def test_a_server_that_may_lose_jobs(connection: Redis, redis_url: str) -> None:
    said = {finding.area: finding for finding in queue_findings(connection)}
    assert said["persistence"].advice == (
        "redis-cli CONFIG SET appendonly yes, and the same in its configuration file."
    )
    assert said["queue"].text.startswith("Valkey ")
    assert (said["queue"].level, said["eviction"].level, said["clock"].level) == ("ok",) * 3
    connection.config_set("maxmemory", 10**9)
    connection.config_set("maxmemory-policy", "allkeys-lru")
    try:
        said = {finding.area: finding for finding in queue_findings(connection)}
    finally:
        connection.config_set("maxmemory-policy", "noeviction")
        connection.config_set("maxmemory", 0)
    assert said["eviction"].level == "error"
    assert "Set it to 'noeviction'" in said["eviction"].text


class Scripted:
    """A server that says of itself what a test wants."""

    def __init__(self, **told: Any) -> None:
        self.told = told

    def __getattr__(self, name: str) -> Any:
        return {"ping": lambda: None, "time": lambda: (0, 0), "info": lambda: self.told}[name]

    @property
    def connection_pool(self) -> Any:
        return Redis().connection_pool


@pytest.mark.parametrize(
    ("told", "area", "advice"),
    [
        ({"redis_version": "6.0.16"}, "queue", "Take Redis 6.2 or later, or any Valkey."),
        ({"redis_version": "7.2", "role": "slave"}, "queue", "It is a replica: name its primary"),
        ({"aof_enabled": 1, "aof_last_write_status": "err"}, "persistence", "Its disk may be full"),
    ],
)
def test_a_server_that_will_not_do(told: dict[str, Any], area: str, advice: str) -> None:
    server: Any = Scripted(**told)
    found = next(one for one in queue_findings(server) if one.area == area)
    assert (found.level, (found.advice or "").startswith(advice)) == ("error", True)


def test_no_server_at_all(nobody_listens: str) -> None:
    with pytest.raises(RedisUnavailable, match="No Redis at"):
        list(queue_findings(Redis.from_url(nobody_listens)))


def completion(text: str) -> dict[str, Any]:
    choices = [{"index": 0, "text": text, "finish_reason": "length"}]
    return {"object": "text_completion", "choices": choices}


def test_a_worker_answers_a_real_job_which_is_gone_then(
    connection: Redis, redis_url: str, start_worker: StartWorker
) -> None:
    (none,) = worker_findings(connection, redis_url, 5)
    assert (none.level, none.advice) == ("warning", "Start one: mlx-rq up, or mlx-rq worker.")
    start_worker(FakeEngine(answer_with=lambda task: completion(" four")))
    eventually(lambda: bool(live_workers(connection)))
    alive, job = worker_findings(connection, redis_url, 60)
    assert (alive.level, job.level, "answered one in" in job.text) == ("ok", "ok", True)
    assert not list(connection.scan_iter("rq:job:*"))
    assert not list(connection.scan_iter(keys.result("*")))
    assert len(list(worker_findings(connection, redis_url, None))) == 1


def test_a_port_says_whose_it_is(redis_url: str, nobody_listens: str, tmp_path: Path) -> None:
    def said(port: int, data: Path) -> str:
        return port_finding(port, "--port", data).text

    settings = Settings(data_dir=tmp_path, redis_url=nobody_listens)
    with run_server(settings) as server:
        port = int(server.url.rpartition(":")[2])
        assert said(port, tmp_path) == f"{port} is your HTTP server's, which runs"
        assert said(port, tmp_path / "other") == f"{port} is the HTTP server's of another mlx-rq"
    assert said(port, tmp_path) == f"{port} is free"
    redis_port = int(redis_url.rpartition(":")[2].partition("/")[0])
    assert said(redis_port, tmp_path) == f"{redis_port} is taken"


def test_the_command_says_it_to_people_and_to_machines(
    connection: Redis, redis_url: str, start_worker: StartWorker, nobody_listens: str
) -> None:
    start_worker(FakeEngine(answer_with=lambda task: completion(" four")))
    eventually(lambda: bool(live_workers(connection)))
    told = CliRunner().invoke(main, ["doctor", "--json"])
    said = json.loads(told.stdout)
    assert (told.exit_code, said["ok"]) == (0, True)
    assert said["findings"][-1]["area"] == "job"
    people = CliRunner().invoke(main, ["doctor", "--redis-url", nobody_listens])
    assert people.exit_code == 1
    assert people.stdout.splitlines()[0].startswith("ok      Python      3.")
    assert "ERROR   queue       No Redis at" in people.stdout
    assert max(map(len, people.stdout.splitlines())) <= 80


def test_a_model_is_loaded_and_its_gates_are_told() -> None:
    model, batching, sharing = findings_of(tiny_model("llama"))
    assert (model.level, batching) == ("ok", Finding("batching", "ok", "sequences of any lengths"))
    assert (sharing.level, "held once (" in sharing.text) == ("ok", True)
    (wrong,) = model_findings("./nowhere/at/all", trust_remote_code=False)
    assert (wrong.area, wrong.level) == ("model", "error")
