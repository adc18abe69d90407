"""Opens input that may be compressed, and writes compressed output.

Input is told by its first bytes, not by its name: a pipe has none. gzip is Python's, Zstandard
comes with pyarrow (the extra `datasets`); both go piece by piece.
"""

import codecs
import gzip
import io
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO, cast

from mlx_rq.files import put_in_place, removed_on_error, temporary
from mlx_rq.jobs.batch.parquet import needs_pyarrow
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.words import in_a_sentence

ENDINGS = (".gz", ".zst")

GZIP = b"\x1f\x8b"
ZSTANDARD = b"\x28\xb5\x2f\xfd"
_UNPACK = {".gz": "gzip -dc", ".zst": "zstd -dc"}
_MARKS = {
    # The longer ones first: UTF-32's begins with UTF-16's.
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def split_ending(path: Path) -> tuple[str, str]:
    """Gives what a file's name ends in without its compression, and that: .csv and .gz."""
    if path.suffix.lower() not in ENDINGS:
        return path.suffix, ""
    return path.with_suffix("").suffix, path.suffix.lower()


@contextmanager
def open_input(path: Path, name: str) -> Iterator[BinaryIO]:
    """Opens a file to be read as the bytes of UTF-8 text, whether or not it is compressed.

    Raises RequestError where it is UTF-16 or UTF-32, and in the block where what is compressed is
    damaged.
    """
    try:
        with path.open("rb") as raw, _decompressed(raw, name) as file:
            _refuse_wide(file.peek(4)[:4], name)
            yield cast(BinaryIO, file)
    except (EOFError, zlib.error, gzip.BadGzipFile, _DamagedError) as error:
        raise RequestError(
            f"{name} is damaged: {in_a_sentence(error)}.", code="invalid_value"
        ) from None


def _decompressed(raw: io.BufferedReader, name: str) -> io.BufferedReader:
    head = raw.peek(4)[:4]
    if head.startswith(GZIP):
        return io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=raw)))
    if head == ZSTANDARD:
        return io.BufferedReader(_Zstandard(raw))
    return raw


class _DamagedError(Exception):
    """Zstandard cannot be read on."""


class _Zstandard(io.RawIOBase):
    """The decompressed bytes of a file."""

    def __init__(self, raw: BinaryIO) -> None:
        self._stream = needs_pyarrow("pyarrow", "Zstandard").CompressedInputStream(raw, "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            return int(self._stream.readinto(buffer))
        except OSError as error:
            raise _DamagedError(str(error)) from None


def _refuse_wide(head: bytes, name: str) -> None:
    encoding = next((told for mark, told in _MARKS.items() if head.startswith(mark)), None)
    if encoding is None and len(head) == 4 and 0 == head[1] == head[3]:
        encoding = "UTF-16LE"
    elif encoding is None and len(head) == 4 and 0 == head[0] == head[2]:
        encoding = "UTF-16BE"
    if encoding is not None:
        raise RequestError(
            f"{name} is {encoding}, as Excel and PowerShell write text; what is read is UTF-8. "
            f"Convert it: {to_utf8(encoding, name)}",
            code="invalid_value",
        )


def to_utf8(encoding: str, name: str) -> str:
    """Gives the command that converts a file."""
    command, path = f"iconv -f {encoding} -t UTF-8", Path(name)
    if not path.exists():
        return command
    if unpack := _UNPACK.get(path.suffix.lower()):
        return f"{unpack} {quote(name)} | {command} > {quote(f'utf8-{path.stem}')}"
    return f"{command} {quote(name)} > {quote(f'utf8-{path.name}')}"


@contextmanager
def open_output(path: Path, ending: str) -> Iterator[BinaryIO]:
    """Opens a file to be written, compressed as its ending says (empty: not at all)."""
    with path.open("wb") as file:
        if ending == ".gz":
            # Without a name and a time, so that the same answers give the same file.
            with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
                yield cast(BinaryIO, packed)
        elif ending == ".zst":
            pa = needs_pyarrow("pyarrow", "Zstandard")
            with pa.CompressedOutputStream(file, "zstd") as stream:
                yield cast(BinaryIO, stream)
        else:
            yield file


def compress(source: Path, target: Path) -> None:
    """Writes a compressed copy of a file; what was there before stays whole until the new is."""
    _, ending = split_ending(target)
    fresh = temporary(target)
    with removed_on_error(fresh), source.open("rb") as plain, open_output(fresh, ending) as file:
        shutil.copyfileobj(plain, file)
    put_in_place(fresh, target)
