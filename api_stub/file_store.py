"""Files: what clients upload and what batches write, on the disk of the server.

<data dir>/http/files/<id>.json     the File object
<data dir>/http/files/<id>.data     its content
<data dir>/http/batches/            see `batch_runner.py`
<data dir>/http/lock                held by the one server that uses the folder
"""

import codecs
import os
import time
from pathlib import Path
from typing import IO, Any, BinaryIO

from mlx_rq.api_stub.bodies import MAX_UPLOAD_BYTES
from mlx_rq.api_stub.errors import ApiError, not_found
from mlx_rq.api_stub.json_store import JSONStore, Record, new_id
from mlx_rq.files import lock, sync
from mlx_rq.jobs.batch.lines import parse_object, read_lines
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.queue.discovery import LOCK_FILE

LEFT_OVER_SECONDS = 3600
"""Uploads and batches that are being made have no record yet; after that long, none will come."""

_CHUNK_BYTES = 1 << 20


def lock_folder(folder: Path) -> IO[bytes]:
    """Takes the data folder for this server until the file is closed; only its user can open it.

    Raises RequestError where another server has it.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)  # prompts and answers lie in it
    file = (folder / LOCK_FILE).open("ab")
    if not lock(file):
        file.close()
        raise RequestError(
            f"Another server uses {folder}. Stop it first, or choose another --data-dir.",
            code="data_dir_in_use",
            param="data_dir",
        )
    return file


class FileStore:
    """The files that there are. An expired one is gone at once, its bytes with the next sweep."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._records = JSONStore(folder)

    def create(
        self,
        content: BinaryIO,
        filename: str,
        purpose: str,
        lifetime: int | None,
        owner: str | None = None,
    ) -> Record:
        """Copies an upload to the disk and checks it on the way; returns its File object.

        Raises ApiError where it is empty, too large, or no file of requests.
        """
        identity = new_id("file-")
        path = self.path(identity)
        try:
            size = _copy_checked(content, path)
            if purpose == "batch":
                _check_first_line(path)
            return self._record(identity, size, filename, purpose, lifetime, owner)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def adopt(self, source: Path, filename: str, lifetime: int | None, owner: str | None) -> Record:
        """Makes a File object of what a batch wrote; it stays where it is, too."""
        identity = new_id("file-")
        os.link(source, self.path(identity))
        size = source.stat().st_size
        return self._record(identity, size, filename, "batch_output", lifetime, owner)

    def _record(
        self,
        identity: str,
        size: int,
        filename: str,
        purpose: str,
        lifetime: int | None,
        owner: str | None,
    ) -> Record:
        created_at = int(time.time())
        record: dict[str, Any] = {
            "id": identity,
            "object": "file",
            "bytes": size,
            "created_at": created_at,
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
        }
        if lifetime is not None:
            record["expires_at"] = created_at + lifetime
        self._records.add(record, owner)
        return record

    def path(self, identity: str) -> Path:
        """Says where the content of a file lies."""
        return self._folder / f"{identity}.data"

    def find(self, client: str | None, identity: str) -> Record | None:
        """Finds a file that a client may see and that has not expired; None where there is none."""
        record = self._records.seen_by(client, identity)
        return None if record is None or _has_expired(record) else record

    def get(self, client: str | None, identity: str) -> Record:
        """Finds a file as `find` does; raises ApiError (404) where there is none."""
        if (record := self.find(client, identity)) is None:
            raise not_found("File", identity)
        return record

    def all(self, client: str | None) -> list[Record]:
        """Gives the files that a client may see and that have not expired, the oldest first."""
        seen = self._records.all_seen_by(client)
        return [record for record in seen if not _has_expired(record)]

    def delete(self, identity: str) -> None:
        """Deletes a file. A batch that reads it has a link of its own."""
        self._records.delete(identity)
        self.path(identity).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Deletes what has expired, and content that a crash left without a record."""
        for record in self._records.all():
            if _has_expired(record):
                self.delete(record["id"])
        for path in self._folder.glob("*.data"):
            if self._records.get(path.stem) is None and is_left_over(path):
                path.unlink(missing_ok=True)


def is_left_over(path: Path) -> bool:
    """Tells whether nothing was done to a file or folder for so long that nobody is at it."""
    try:
        # Not mtime: what a batch wrote long ago may have been linked a moment ago.
        changed_at = path.stat().st_ctime
    except FileNotFoundError:
        return False
    return changed_at + LEFT_OVER_SECONDS <= time.time()


def _has_expired(record: Record) -> bool:
    # By this machine's clock: the files lie on its disk, and nobody else judges them.
    return bool(record.get("expires_at", float("inf")) <= time.time())


def _copy_checked(content: BinaryIO, path: Path) -> int:
    """Copies bytes that must be UTF-8; returns their number. They survive a crash."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = 0
    with path.open("xb") as file:
        while chunk := content.read(_CHUNK_BYTES):
            size += len(chunk)
            if size > MAX_UPLOAD_BYTES:
                raise _invalid_file(f"It has more than {MAX_UPLOAD_BYTES:,} bytes.")
            try:
                decoder.decode(chunk)
            except UnicodeDecodeError:
                raise _invalid_file("It is not UTF-8.") from None
            file.write(chunk)
        try:
            decoder.decode(b"", final=True)
        except UnicodeDecodeError:
            raise _invalid_file("It is not UTF-8: its last character is cut off.") from None
        sync(file)
    if not size:
        raise _invalid_file("It is empty.")
    return size


def _check_first_line(path: Path) -> None:
    """Raises ApiError where a file is not JSON lines at all. Single bad lines are a batch's."""
    for _, raw in read_lines(path):
        try:
            parse_object(raw)
        except RequestError as error:
            raise _invalid_file(f"It is not in the JSON lines format: {error}") from None
        return
    raise _invalid_file("It holds no lines.")


def _invalid_file(why: str) -> ApiError:
    return ApiError(400, f"Invalid file. {why}", code="invalid_value", param="file")
