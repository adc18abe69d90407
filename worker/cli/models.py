"""Which models a worker is to serve: `--model`, `--served-name`, and a file that lists them.

[models.fast]                                # a name that jobs may ask for
model = "mlx-community/Qwen3-4B-4bit"        # a known name, a folder, or a hub id
names = ["qwen", "small"]                    # more names
batch = 16                                   # as --batch and --kv-budget, for this one
kv_budget = "4GB"
"""

import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from mlx_rq.engine.interface import Engine
from mlx_rq.jobs.openai.requests import ANY_MODEL
from mlx_rq.jobs.openai.sizes import parse_bytes
from mlx_rq.worker.models.switch import ServedModel

DEMO_MODEL = "smollm2"

_KEYS = ("model", "names", "batch", "kv_budget")


@dataclass(frozen=True)
class AskedModel:
    """A model as the user named it; None stands for what all models have."""

    model: str
    names: tuple[str, ...] = ()
    batch: int | None = None
    kv_budget: int | None = None


def asked_models(
    model: Sequence[str], served_name: Sequence[str], models_from: Path | None
) -> list[AskedModel]:
    """Puts together what the options ask for; raises ClickException."""
    listed = [] if models_from is None else list(_read(models_from))
    given = list(dict.fromkeys(model)) or ([] if listed else [DEMO_MODEL])
    if len(given) + len(listed) == 1:
        names = {given[0] if given else listed[0].model: tuple(served_name)}
    else:
        names = _names_by_model(served_name, given)
    asked = [AskedModel(one, names.get(one, ())) for one in given]
    asked += [
        AskedModel(one.model, (*one.names, *names.get(one.model, ())), one.batch, one.kv_budget)
        for one in listed
    ]
    return asked


def served_models(
    asked: Sequence[AskedModel], engine_of: Callable[[AskedModel], Engine]
) -> list[ServedModel]:
    """Says under which names each model is served: its id, as it was given, and its own.

    The first is also for jobs that name none. Raises ModelError where a model is not here, and
    ClickException where two have a name in common.
    """
    from mlx_rq.engine.models.load import locate

    served: list[ServedModel] = []
    of: dict[str, str] = {}
    for number, one in enumerate(asked):
        model_id, _ = locate(one.model)
        names = dict.fromkeys([model_id, one.model, *one.names, *([] if number else [ANY_MODEL])])
        for name in names:
            if (other := of.setdefault(name, one.model)) != one.model:
                raise click.ClickException(
                    f"{other} and {one.model} would both be called {name!r}: jobs could not tell "
                    "them apart"
                )
        served.append(ServedModel(tuple(names), partial(engine_of, one)))
    return served


def _names_by_model(
    served_names: Iterable[str], models: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    names: dict[str, tuple[str, ...]] = {}
    for one in served_names:
        name, _, model = one.partition("=")
        if not name or model not in models:
            raise click.ClickException(
                f"--served-name {one}: with several models, say whose it is: "
                f"--served-name {name or 'NAME'}={models[0] if models else 'MODEL'}"
            )
        names[model] = (*names.get(model, ()), name)
    return names


def _read(file: Path) -> Iterator[AskedModel]:
    try:
        models = tomllib.loads(file.read_text()).get("models")
    except (OSError, ValueError) as error:
        raise click.ClickException(f"--models-from {file}: {error}") from None
    if not isinstance(models, dict) or not models:
        raise click.ClickException(
            f"--models-from {file}: it lists no models, as [models.NAME] with model = …"
        )
    for name, settings in models.items():
        yield _asked(settings, name, f"--models-from {file}: models.{name}")


def _asked(settings: Any, name: str, where: str) -> AskedModel:
    def refuse(what: str) -> click.ClickException:
        return click.ClickException(f"{where}{what}")

    if not isinstance(settings, dict):
        raise refuse(f" is {settings!r}; it must be a table")
    for key in settings:
        if key not in _KEYS:
            raise refuse(f".{key} is no setting of a model; there are {', '.join(_KEYS)}")
    model, names = settings.get("model", name), settings.get("names", [])
    batch, budget = settings.get("batch"), settings.get("kv_budget")
    if not isinstance(model, str) or not model:
        raise refuse(f".model is {model!r}; it must be a known name, a folder, or a hub id")
    if not isinstance(names, list) or not all(isinstance(one, str) and one for one in names):
        raise refuse(f'.names is {names!r}; it must be a list of names, as ["fast", "small"]')
    if batch is not None and (type(batch) is not int or batch < 1):
        raise refuse(f".batch is {batch!r}; it must be a number of sequences, 1 or more")
    try:
        nbytes = None if budget is None else parse_bytes(str(budget))
    except ValueError as error:
        raise refuse(f".kv_budget: {error}") from None
    return AskedModel(model, (name, *names), batch, nbytes)
