"""The options of all commands that start a worker: `worker`, `up` and `demo`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mlx_rq.jobs.openai.sizes import parse_bytes
from mlx_rq.worker.cli.common import Command, default_of, option
from mlx_rq.worker.cli.completion import complete_model
from mlx_rq.worker.cli.models import DEMO_MODEL
from mlx_rq.worker.cli.pause_options import pause_options
from mlx_rq.worker.cli.value_types import ByteCount, Duration, NumberOrWord, WholeNumber
from mlx_rq.worker.options import WorkerOptions

MIN_STALL = 60.0
"""Longer than Redis may take to answer: waiting for it is no stall."""


class _RowCount(NumberOrWord):
    """A number of sequences, or `auto`."""

    name = "sequences"

    def convert(self, value: Any, param: Any, context: Any) -> int | str:
        if isinstance(value, int):
            return value
        if value == "auto":
            return "auto"
        if not str(value).isdecimal() or int(value) < 1:
            self.fail(f"{value!r} is neither a number of sequences nor 'auto'", param, context)
        return int(value)


class _WiredLimit(NumberOrWord):
    """A number of bytes, or `auto`."""

    name = "bytes"

    def convert(self, value: Any, param: Any, context: Any) -> int | str:
        if isinstance(value, int):
            return value
        if value in ("auto", "0"):
            return "auto" if value == "auto" else 0
        try:
            return parse_bytes(str(value))
        except ValueError as error:
            self.fail(f"{error}, nor 0 or 'auto'", param, context)


class _ModelName(NumberOrWord):
    """What names a model: in the environment, several stand with commas between them."""

    name = "model"
    envvar_list_splitter = ","

    def convert(self, value: Any, param: Any, context: Any) -> str:
        return str(value)


_LEAST_MEMORY = 2**20
"""Fewer bytes are a number whose unit was forgotten."""

_worker_options = (
    option(
        "--model",
        type=_ModelName(),
        multiple=True,
        show_default=DEMO_MODEL,
        shell_complete=complete_model,
        help="A known name, a folder, or a hub id. Of several, one is loaded at a time.",
    ),
    option(
        "--served-name",
        multiple=True,
        metavar="NAME[=MODEL]",
        help="Another name that it answers to; of several models, the one that is said.",
    ),
    option(
        "--adapter",
        type=_ModelName(),
        multiple=True,
        metavar="[MODEL:]NAME=FOLDER",
        help="An adapter (LoRA, DoRA) that jobs ask for as MODEL:NAME; of several models, whose.",
    ),
    option(
        "--models-from",
        type=click.Path(dir_okay=False, exists=True, path_type=Path),
        default=None,
        metavar="FILE",
        help="A TOML file that lists models, each with names, batch, kv_budget, adapters, draft.",
    ),
    option(
        "--draft-model",
        type=_ModelName(),
        default=None,
        show_default="none",
        shell_complete=complete_model,
        help="A small model of the same family that drafts for a job which runs alone, as long as "
        "that is faster; answers stay the model's.",
    ),
    option(
        "--unload-after",
        type=Duration(1),
        default=None,
        show_default="never",
        help="Free the model's memory when there was nothing to do for so long, as in 10m.",
    ),
    option("--trust-remote-code", is_flag=True, help="Run code that comes with the model."),
    option(
        "--batch",
        type=_RowCount(),
        default="auto",
        help="Sequences that decode together; auto measures once what is best here, for prompts as "
        "long as those that wait, and says so.",
    ),
    option(
        "--kv-budget",
        type=ByteCount(least=_LEAST_MEMORY),
        default=None,
        metavar="BYTES",
        help="Memory for KV, as in 8GB.",
        show_default="what the machine has beside the weights",
    ),
    option(
        "--kv-bits",
        type=click.Choice(["8", "4"]),
        default=None,
        help="Hold shared prefixes in so many bits: less memory, slightly other answers.",
        show_default="as they are computed",
    ),
    option(
        "--memory",
        type=ByteCount(least=_LEAST_MEMORY),
        default=None,
        metavar="BYTES",
        help="Memory for all that MLX holds, weights included, as in 48GB.",
        show_default="what Metal recommends",
    ),
    option(
        "--wired-limit",
        type=_WiredLimit(),
        default="auto",
        help="Memory that the system may not page out, as in 20GB or 0; auto is the weights'.",
    ),
    option(
        "--window",
        type=WholeNumber(1),
        default=default_of(WorkerOptions, "window"),
        help="Jobs that are claimed and planned together, at most.",
    ),
    option(
        "--window-tokens",
        type=WholeNumber(1),
        default=default_of(WorkerOptions, "window_tokens"),
        help="Tokens of the prompts that wait in the worker, at most (about).",
    ),
    option(
        "--lease",
        type=Duration(2, whole=True),
        default=default_of(WorkerOptions, "lease"),
        help="After so long a dead worker's jobs go back to the queue: seconds, or as in 2m.",
    ),
    option(
        "--grace",
        type=Duration(),
        default=default_of(WorkerOptions, "grace"),
        help="How long jobs may finish after a stop signal: seconds, or as in 10m; what is left "
        "goes back to the queue.",
    ),
    option(
        "--max-wait",
        type=Duration(),
        default=default_of(WorkerOptions, "max_wait"),
        help="A job that waited so long goes before all others: seconds, or as in 10m, 2h.",
    ),
    option(
        "--stall",
        type=Duration(MIN_STALL),
        default=default_of(WorkerOptions, "stall"),
        help="A worker without progress for so long is killed and started again: seconds, or as "
        "in 10m.",
    ),
    option(
        "--close-json",
        is_flag=True,
        help="Steer structured answers to their end when their token budget runs out.",
    ),
    option(
        "--check",
        is_flag=True,
        help="Check that nothing is lost track of, when idle and now and then; else start afresh.",
    ),
    *pause_options,
)


def data_dir_option(help_text: str) -> Callable[[Command], Command]:
    """Declares `--data-dir`."""
    return option(
        "--data-dir",
        type=click.Path(file_okay=False, path_type=Path),
        default=None,
        help=help_text,
        show_default="the system's place for user data",
    )


def worker_options(function: Command) -> Command:
    """Adds the options that `worker`, `up` and `demo` have in common."""
    for decorate in reversed(_worker_options):
        function = decorate(function)
    return function
