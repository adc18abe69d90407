"""Which files are read as rows, by their names and beginnings, and what to do with the others."""

import codecs
import csv
import re
from collections.abc import Mapping
from pathlib import Path
from shlex import quote

from mlx_rq.jobs.batch.compression import GZIP, ZSTANDARD, open_input
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.validation import short

DELIMITERS = {".csv": ",", ".tsv": "\t"}
JSON_LINES = (".jsonl", ".ndjson")
_KNOWN = (
    f"Rows are read from files that end in {', '.join((*DELIMITERS, *JSON_LINES, '.parquet'))}; "
    "those of text may be compressed (.gz, .zst)."
)
_WORKBOOKS = (".xlsx", ".xlsm", ".xls", ".ods", ".numbers")
_PACKED = (".bz2", ".xz", ".zip", ".7z", ".lz4", ".br")
_OTHER_DELIMITERS = (";", "\t", "|")
_HEADER_BYTES = 1024 * 1024
_FOR_EXCEL = re.compile('"?sep=(.)"?\\s*')

_PARQUET = b"PAR1"
_DISGUISED: Mapping[bytes, str] = {
    _PARQUET: "holds Parquet. Let its name end in .parquet",
    b"PK\x03\x04": "is a workbook, or another archive, under a name of text. "
    "Save its sheet as CSV: in Excel by File > Save As > CSV UTF-8",
    b"\xd0\xcf\x11\xe0": "is a workbook of an older Excel under a name of text. "
    "Save its sheet as CSV: in Excel by File > Save As > CSV UTF-8",
    b"BZh": "is compressed with bzip2, which is not read. Unpack it",
    b"\xfd7zXZ": "is compressed with xz, which is not read. Unpack it",
}
"""What files begin with that are no text, whatever they are called."""


def refuse_workbook(name: str, suffix: str) -> None:
    """Raises RequestError, naming the way, where a file is one of Excel's or LibreOffice's."""
    if suffix not in _WORKBOOKS:
        return
    raise RequestError(
        f"{name} is a workbook. Save its sheet as CSV: in Excel by File > Save As > CSV UTF-8, "
        f"with LibreOffice by: soffice --headless --convert-to csv {quote(name)}\n{_KNOWN}",
        code="invalid_value",
    )


def unknown_ending(name: str, suffix: str) -> RequestError:
    """The error for a file whose ending is none of those that are read, with the way."""
    refuse_workbook(name, suffix)
    way = ""
    if suffix == ".json":
        lines = quote(str(Path(name).with_suffix(".jsonl")))
        way = f" An array's objects become lines by: jq -c '.[]' {quote(name)} > {lines}"
    elif suffix in _PACKED:
        way = " Unpack it first."
    return RequestError(f"{name}: {_KNOWN}{way}", code="invalid_value")


def check_beginning(path: Path, name: str, suffix: str) -> None:
    """Raises RequestError where a file does not begin as one that is called so."""
    with path.open("rb") as file:
        head = file.read(8)
    if suffix == ".parquet":
        if head.startswith((GZIP, ZSTANDARD)):
            raise RequestError(
                f"{name} is compressed as a whole. Parquet is compressed within: unpack it first.",
                code="invalid_value",
            )
        return
    for mark, told in _DISGUISED.items():
        if head.startswith(mark):
            raise RequestError(f"{name} {told}.", code="invalid_value")


def check_delimiter(path: Path, name: str, usual: str) -> None:
    """Raises RequestError where the header of a CSV file seems to be parted by something else."""
    with open_input(path, name) as raw:
        header = raw.readline(_HEADER_BYTES).removeprefix(codecs.BOM_UTF8).decode(errors="replace")
    header = header.rstrip("\r\n")
    if for_excel := _FOR_EXCEL.fullmatch(header):
        raise RequestError(
            f"{name}: the first line, {header!r}, is no header but a word to Excel. Take the line "
            f"away (tail -n +2), and add: --delimiter {_written(for_excel[1])}",
            code="invalid_value",
        )
    if _columns(header, usual) > 1:
        return
    for mark in _OTHER_DELIMITERS:
        if mark != usual and _columns(header, mark) > 1:
            raise RequestError(
                f"{name}: the header is one column, {short(header)!r}. Where {mark!r} parts "
                f"its columns, as Excel writes it in many countries, add: "
                f"--delimiter {_written(mark)}",
                code="invalid_value",
            )


def _columns(header: str, delimiter: str) -> int:
    """Counts the columns of a header; 0 where quotes are not as they would be then."""
    try:
        return len(next(csv.reader([header], delimiter=delimiter, strict=True), []))
    except csv.Error:
        return 0


def _written(delimiter: str) -> str:
    """Writes a delimiter for a shell."""
    return "$'\\t'" if delimiter == "\t" else quote(delimiter)
