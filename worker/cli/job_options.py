"""The options of a job as options of a command: those that `JobOptions` says are offered there."""

from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import Any, Literal, get_args, get_origin

import click

from mlx_rq.jobs.queue.options import JobOptions
from mlx_rq.worker.cli.common import Command, option
from mlx_rq.worker.cli.value_types import Duration, WholeNumber


def _offered() -> list[Field[Any]]:
    """The options of a job that the command line has."""
    return [field for field in fields(JobOptions) if field.metadata["command"] is not None]


def job_options(**settings: Mapping[str, Any]) -> Callable[[Command], Command]:
    """Declares the options of a job; `settings` changes how some are declared, by their names."""

    def declare(command: Command) -> Command:
        for field in reversed(_offered()):
            flag = f"--{field.name.replace('_', '-')}"
            declared = {
                "type": _click_type(field),
                "default": field.default,
                "help": field.metadata["command"],
                **settings.get(field.name, {}),
            }
            command = option(flag, **declared)(command)
        return command

    return declare


def take_job_options(given: Mapping[str, Any]) -> JobOptions:
    """Reads the options of a job from what a command was called with."""
    return JobOptions(**{field.name: given[field.name] for field in _offered()})


def _click_type(field: Field[Any]) -> Any:
    """Gives the type of an option: a choice for a literal, a length of time, or a number."""
    if get_origin(field.type) is Literal:
        return click.Choice(get_args(field.type))
    # What is too little or too much, JobOptions says itself.
    if field.metadata["seconds"]:
        return Duration(None, whole=field.type is int)
    return WholeNumber()
