"""JSON records in a folder, one file each, replaced as a whole: what the server must not forget."""

import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mlx_rq.api_stub.errors import ApiError
from mlx_rq.files import replacing
from mlx_rq.jobs.queue.owners import may_see

Record = Mapping[str, Any]
Order = Literal["asc", "desc"]


def new_id(prefix: str) -> str:
    """Makes an id that cannot be guessed and sorts by the time it was made."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(8)}"


_OWNER = "owner"
"""The field beside those of a record, in its file, that says whose it is."""


class JSONStore:
    """Records by their `id`, in memory and on disk, and whose they are. Used from any thread."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self._lock = threading.RLock()
        self._records: dict[str, Record] = {}
        self._owners: dict[str, str | None] = {}
        for path in sorted(folder.glob("*.json")):
            record: dict[str, Any] = json.loads(path.read_text())
            self._owners[record["id"]] = record.pop(_OWNER, None)
            self._records[record["id"]] = record

    def get(self, identity: str) -> Record | None:
        """Finds a record; None where there is none."""
        return self._records.get(identity)

    def all(self) -> list[Record]:
        """Gives all records, the oldest first."""
        with self._lock:
            return [self._records[identity] for identity in sorted(self._records)]

    def owner(self, identity: str) -> str | None:
        """Says whose a record is; None where it is nobody's."""
        return self._owners.get(identity)

    def seen_by(self, client: str | None, identity: str) -> Record | None:
        """Finds a record that a client may see; None where there is none."""
        return self.get(identity) if may_see(client, self.owner(identity)) else None

    def all_seen_by(self, client: str | None) -> list[Record]:
        """Gives the records that a client may see, the oldest first."""
        return [record for record in self.all() if may_see(client, self.owner(record["id"]))]

    def add(self, record: Record, owner: str | None) -> None:
        """Keeps a new record, which is the owner's; it survives a crash."""
        with self._lock:
            self._owners[record["id"]] = owner
            self._write(record)

    def _write(self, record: Record) -> None:
        owner = self.owner(record["id"])
        whole = record if owner is None else {**record, _OWNER: owner}
        with replacing(self._folder / f"{record['id']}.json") as file:
            file.write(json.dumps(whole).encode())
        self._records[record["id"]] = record

    def update(
        self, identity: str, change: Callable[[Record], Mapping[str, Any]], *, durable: bool = True
    ) -> Record:
        """Puts the fields that `change` gives into a record while nobody else touches it.

        Not `durable`: only in memory, for what a restart finds out again.
        """
        with self._lock:
            record = {**self._records[identity]}
            record.update(change(record))
            if durable:
                self._write(record)
            else:
                self._records[identity] = record
            return record

    def delete(self, identity: str) -> None:
        """Forgets a record."""
        with self._lock:
            self._records.pop(identity, None)
            self._owners.pop(identity, None)
            (self._folder / f"{identity}.json").unlink(missing_ok=True)


def page(records: Sequence[Record], after: str | None, limit: int, order: Order) -> dict[str, Any]:
    """Makes one page of a list of OpenAI's from records that lie oldest first.

    Raises ApiError where `after` is not the id of one of them.
    """
    ordered = list(records) if order == "asc" else list(reversed(records))
    start = 0
    if after is not None:
        ids = [record["id"] for record in ordered]
        if after not in ids:
            raise ApiError(
                400,
                f"Invalid 'after': nothing in this list has the id {after!r}.",
                code="invalid_value",
                param="after",
            )
        start = ids.index(after) + 1
    data = ordered[start : start + limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": start + limit < len(ordered),
    }
