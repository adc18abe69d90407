"""A worker's name is a lease too: of two workers that were given one name, one has it."""

import secrets

from redis import Redis

from mlx_rq.jobs.queue import keys, reading
from mlx_rq.worker.leases.scripts import script_of

WITHOUT_END = -1
"""What Redis says of a key that does not expire."""


class NameTaken(ValueError):
    """Another live worker has this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"There exists an active worker named {name!r} already")


class NameLease:
    """The lease on a name; `holder` stays the same where a supervisor starts its worker again."""

    def __init__(
        self, connection: Redis, name: str, holder: str | None = None, *, seconds: int = 0
    ) -> None:
        self._connection = connection
        self._name = name
        self._key = keys.worker_name(name)
        self._holder = holder or new_holder()
        self._seconds = seconds
        self._script = connection.register_script(script_of("name.lua"))
        self.lost = False
        """Another worker has taken it, since nobody renewed it for so long."""

    def take(self) -> None:
        """Takes or renews it; raises NameTaken."""
        if not self._script(keys=[self._key], args=[self._holder, self._seconds]):
            self.lost = True
            raise NameTaken(self._name)

    def give_up(self) -> None:
        """Leaves the name to others."""
        if not self.is_anothers():
            self._connection.delete(self._key)

    def is_anothers(self) -> bool:
        """Tells whether another worker has it now."""
        with self._connection.pipeline() as pipe:
            pipe.get(self._key)
            pipe.ttl(self._key)
            holder, left = reading.ask_all(pipe)
        if holder is None or holder is reading.WRONG_TYPE or left == WITHOUT_END:
            return False  # what does not end by itself is no lease
        return bool(reading.text(holder) != self._holder)


def new_holder() -> str:
    """Makes a text that names one worker among all that ever have its name."""
    return secrets.token_hex(16)
