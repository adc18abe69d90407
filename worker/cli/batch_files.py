"""Where `mlx-rq batch` reads from and writes to."""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click

from mlx_rq.jobs.batch.compression import ENDINGS, open_input, split_ending
from mlx_rq.jobs.batch.files import Outputs
from mlx_rq.jobs.batch.formats import DELIMITERS, check_beginning, refuse_workbook
from mlx_rq.jobs.batch.lines import BatchFile, Source
from mlx_rq.jobs.batch.parquet import needs_pyarrow
from mlx_rq.jobs.batch.state import State, state_of
from mlx_rq.jobs.batch.tables import TemplatedRows, open_table
from mlx_rq.jobs.batch.templates import ChatTemplate, Template
from mlx_rq.jobs.openai.schema_types import response_format
from mlx_rq.jobs.openai.validation import unique_keys
from mlx_rq.worker.cli.submit import parse_parameters

PIPE = "-"


@contextmanager
def open_source_file(name: str) -> Iterator[Path]:
    """Gives the file to read, which is read more than once: a pipe is written down first."""
    if name != PIPE:
        yield Path(name)
        return
    with tempfile.NamedTemporaryFile(prefix="mlx-rq-batch-") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
        file.flush()
        yield Path(file.name)


def source_of(path: Path, input_name: str, options: Mapping[str, Any]) -> Source:
    name = "standard input" if input_name == PIPE else input_name
    suffix = split_ending(Path(input_name))[0].lower() if input_name != PIPE else _sniff(path, name)
    settings = {} if options["model"] is None else {"model": options["model"]}
    # In one order: whoever gives them in another has changed nothing.
    settings |= dict(sorted(parse_parameters(options["parameter"]).items()))
    if options["prompt"] is None:
        for option_name in ("system", "schema", "id_column", "delimiter"):
            if options[option_name] is not None:
                flag = f"--{option_name.replace('_', '-')}"
                raise click.UsageError(f"{flag} goes with --prompt: INPUT then holds rows")
        refuse_workbook(name, suffix)
        if suffix in (*DELIMITERS, ".parquet") and input_name != PIPE:
            raise click.UsageError(f"{name} holds rows: say with --prompt what to ask of each")
        check_beginning(path, name, ".jsonl")
        return BatchFile(path, name, settings, open_input)
    if (schema := schema_of(options)) is not None:
        settings["response_format"] = response_format(schema)
    system = options["system"]
    template = ChatTemplate(
        Template(options["prompt"], "--prompt"),
        None if system is None else Template(system, "--system"),
        settings,
    )
    table = open_table(path, name, suffix, options["delimiter"])
    return TemplatedRows(table, name, template, options["id_column"])


def _sniff(path: Path, name: str) -> str:
    """Tells what came through a pipe: Parquet, JSON lines or CSV."""
    with open_input(path, name) as file:
        head = file.read(16)
    if head.startswith(b"PAR1"):
        return ".parquet"
    return ".jsonl" if head.lstrip(b"\xef\xbb\xbf \r\n").startswith(b"{") else ".csv"


def schema_of(options: Mapping[str, Any]) -> dict[str, Any] | None:
    path: Path | None = options["schema"]
    if path is None:
        return None
    try:
        schema = json.loads(path.read_text("utf-8-sig"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"--schema: {path} is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise click.UsageError(f"--schema: {path} is not a JSON object")
    return schema


class Places(NamedTuple):
    """Where things are written. The output is made of the answers, when all are there, if it is a
    dataset or compressed.
    """

    answers: Path
    errors: Path | None
    state: Path
    dataset: Path | None = None
    compressed: Path | None = None

    def outputs(self) -> Outputs:
        """Gives the files of records."""
        return Outputs(self.answers, self.errors)

    def check_packages(self) -> None:
        """Raises RequestError where what is to be made needs what is not installed."""
        for made in filter(None, (self.dataset, self.compressed)):
            suffix, ending = split_ending(made)
            if ending == ".zst":
                needs_pyarrow("pyarrow", "Zstandard")
            elif suffix in ("", ".parquet"):
                needs_pyarrow("pyarrow")

    def check(self) -> None:
        """Raises RequestError where a run would, and leaves all as it is."""
        self.check_packages()
        ours = False
        if self.state.exists():
            with self.state.open("rb") as file:
                ours = State(file).run is not None
        self.outputs().check(ours=ours)


def places_of(input_name: str, output: str, options: Mapping[str, Any]) -> Places:
    path, errors = Path(output), errors_path(input_name, output, options)
    suffix, ending = split_ending(path)
    if not path.name or not path.parent.is_dir():
        raise click.UsageError(f"-o: there is no folder {path.parent} to write {output} into")
    state = state_of(path)
    records = path.with_name(f"{path.name}.answers.jsonl")
    if suffix == ".jsonl":
        plain = path.with_suffix("") if ending else path
        apart = None if options["together"] else errors or plain.with_suffix(".errors.jsonl")
        for other, name in ((Path(input_name), "INPUT"), (apart, "--errors")):
            if other is not None and _same(other, path):
                raise click.UsageError(f"-o and {name} name the same file, {output}")
        if not ending:
            return Places(path, apart, state)
        _refuse_other(path, state)
        return Places(records, apart, state, compressed=path)
    if suffix not in (("", ".parquet", ".csv") if not ending else (".csv",)):
        packed = " and ".join(ENDINGS)
        raise click.UsageError(
            f"-o: {output} ends in {suffix}{ending}; known are .jsonl, .parquet, .csv, and no "
            f"ending for a dataset folder; {packed} go after .jsonl and .csv"
        )
    if errors is not None or options["order"] == "finished":
        raise click.UsageError("a dataset has its errors in a column, and the order of the input")
    if any(pair.partition("=")[0] == "n" for pair in options["parameter"]):
        raise click.UsageError(
            "a dataset has one answer in a row: leave -p n=… out, or take .jsonl"
        )
    _refuse_other(path, state)
    return Places(records, None, state, dataset=path)


def _refuse_other(path: Path, state: Path) -> None:
    """Raises UsageError where something is there that no run of ours has made."""
    if path.exists() and not state.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise click.UsageError(f"{path} is there already: choose another name, or move it away")


def errors_path(input_name: str, output: str, options: Mapping[str, Any]) -> Path | None:
    """Says where --errors wants the errors; None where it was not given."""
    if options["errors"] is None:
        return None
    path = Path(options["errors"])
    if not path.name or not path.parent.is_dir():
        raise click.UsageError(f"--errors: there is no folder {path.parent} to write {path} into")
    if path.is_dir() or (output != PIPE and path.exists() and not path.is_file()):
        raise click.UsageError(f"--errors: {path} is there already and no regular file")
    if _same(path, Path(input_name)):
        raise click.UsageError(f"--errors and INPUT name the same file, {path}")
    return path


def _same(one: Path, other: Path) -> bool:
    if one.exists() and other.exists():
        return one.samefile(other)
    return one.resolve() == other.resolve()
