"""Which models a worker is to serve, as `--model` and its kin say, and a file of them.

[models.fast]                                # a name that jobs may ask for
model = "mlx-community/Qwen3-4B-4bit"        # a known name, a folder, or a hub id
names = ["qwen", "small"]                    # more names
batch = 16                                   # as --batch and --kv-budget, for this one
kv_budget = "4GB"
adapters = { sql = "~/adapters/sql" }        # names and folders, as --adapter
draft = "mlx-community/Qwen3-0.6B-4bit"      # as --draft-model
"""

import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from mlx_rq.engine.interface import Adapter, ModelEngine
from mlx_rq.jobs.openai.requests import ANY_MODEL, BETWEEN, asked_model
from mlx_rq.jobs.openai.sizes import parse_bytes
from mlx_rq.worker.models.switch import ServedModel

DEMO_MODEL = "smollm2"

MODEL_OPTIONS = ("model", "served_name", "models_from", "adapter", "draft_model")
"""What the commands call the arguments of `asked_models`."""

_KEYS = ("model", "names", "batch", "kv_budget", "adapters", "draft")


@dataclass(frozen=True)
class AskedModel:
    """A model as the user named it; None stands for what all models have."""

    model: str
    names: tuple[str, ...] = ()
    batch: int | None = None
    kv_budget: int | None = None
    adapters: tuple[tuple[str, str], ...] = ()
    """Names and folders."""
    draft: str | None = None
    """The model that drafts for it."""

    @property
    def known_as(self) -> tuple[str, ...]:
        """The names that can be told before the model is looked for; adapters have them, too."""
        folder = Path(self.model).expanduser()
        own = [folder.resolve().name] if folder.is_dir() else []  # as `locate` calls it
        names = dict.fromkeys([*own, self.model, *self.names])
        return (*names, *(asked_model(name, one) for name in names for one, _ in self.adapters))


def asked_models(
    model: Sequence[str],
    served_name: Sequence[str],
    models_from: Path | None,
    adapter: Sequence[str] = (),
    draft_model: str | None = None,
) -> list[AskedModel]:
    """Puts together what the options ask for; raises ClickException."""
    listed = [] if models_from is None else list(_read(models_from))
    given = list(dict.fromkeys(model)) or ([] if listed else [DEMO_MODEL])
    if len(given) + len(listed) == 1:
        only = given[0] if given else listed[0].model
        names = {only: tuple(_name_of_one(name, only) for name in served_name)}
    else:
        names = _names_by_model(served_name, given)
    asked = [AskedModel(one, names.get(one, ())) for one in given]
    asked += [replace(one, names=(*one.names, *names.get(one.model, ()))) for one in listed]
    if draft_model is not None:
        if len(asked) > 1:
            raise click.ClickException(
                f"--draft-model {draft_model}: with several models, say whose it is, in the file "
                f'of --models-from: draft = "{draft_model}"'
            )
        asked = [replace(asked[0], draft=draft_model)]
    return _with_adapters(asked, adapter)


def models_needed(asked: Iterable[AskedModel]) -> list[str]:
    """Names the models, and those that draft for them."""
    return [name for one in asked for name in (one.model, one.draft) if name is not None]


def served_models(
    asked: Sequence[AskedModel],
    engine_of: Callable[[AskedModel], ModelEngine],
    room: int | None = None,
) -> list[ServedModel]:
    """Says under which names each model is served: its id, as it was given, and its own.

    The first is also for jobs that name none. Adapters have the names of their model, with their
    own behind them, or the folder as it was given. Of several models, those are not to be loaded
    whose weights are known to take more than `room` bytes. Raises ModelError where a model, its
    draft or an adapter is not here, and ClickException where two have a name in common.
    """
    from mlx_rq.engine.models.load import locate

    served: list[ServedModel] = []
    of: dict[str, str] = {}
    for number, one in enumerate(asked):
        model_id, _ = locate(one.model)
        if one.draft is not None:
            locate(one.draft)
        names = dict.fromkeys([model_id, one.model, *one.names, *([] if number else [ANY_MODEL])])
        too_large = "" if room is None or len(asked) == 1 else _too_large(one, room)
        base = ServedModel(tuple(names), partial(engine_of, one), too_large=too_large)
        for model, what in ((base, one.model), *_adapted(base, one)):
            for name in model.names:
                if (other := of.setdefault(name, what)) != what:
                    raise click.ClickException(
                        f"{other} and {what} would both be called {name!r}: jobs could not tell "
                        "them apart"
                    )
            served.append(model)
    return served


def _adapted(base: ServedModel, asked: AskedModel) -> Iterator[tuple[ServedModel, str]]:
    """Makes the adapters of a model; gives with each what it was called."""
    from mlx_rq.engine.models.adapters import check_adapter

    for own, folder in asked.adapters:
        names = [asked_model(name, one) for one in (own, folder) for name in base.names]
        adapter = Adapter(names[0], Path(folder).expanduser())
        check_adapter(adapter)
        called = asked_model(asked.model, own)
        own_names = tuple(dict.fromkeys(names))
        yield ServedModel(own_names, base.load, base.id, adapter, base.too_large), called


def _too_large(asked: AskedModel, room: int) -> str:
    """Says why a model cannot be loaded on this machine; empty where it might be."""
    from mlx_rq.engine.models.local import weight_bytes_here

    nbytes = weight_bytes_here(asked.model)
    if nbytes is not None and asked.draft is not None:
        nbytes += weight_bytes_here(asked.draft) or 0
    if nbytes is None or nbytes <= room:
        return ""
    return f"its weights take {nbytes / 1e9:,.1f} GB, and there is room for {room / 1e9:,.1f} GB"


def _with_adapters(asked: Sequence[AskedModel], given: Iterable[str]) -> list[AskedModel]:
    """Adds what `--adapter` says to the models whose they are."""
    adapters = {one.model: list(one.adapters) for one in asked}
    models = {name: one.model for one in reversed(asked) for name in (*one.names, one.model)}
    for value in given:
        called, _, folder = value.partition("=")
        model, _, name = called.rpartition(BETWEEN)
        if not name or not folder:
            raise click.ClickException(
                f"--adapter {value}: say its name and its folder: --adapter {name or 'NAME'}="
                f"{folder or 'FOLDER'}"
            )
        if not model and len(adapters) == 1:
            model = asked[0].model
        if model not in models:
            why = f"there is no model {model}" if model else "with several models"
            raise click.ClickException(
                f"--adapter {value}: {why}, say whose it is: "
                f"--adapter {asked[0].model}{BETWEEN}{name}={folder}"
            )
        adapters[models[model]].append((name, folder))
    for model, pairs in adapters.items():
        for name, times in Counter(name for name, _ in pairs).items():
            if times > 1:
                raise click.ClickException(
                    f"{model} has {times} adapters {name!r}: jobs could not tell them apart"
                )
    return [replace(one, adapters=tuple(adapters[one.model])) for one in asked]


def _name_of_one(served_name: str, model: str) -> str:
    """Reads `--served-name` of a single model, which may be said and need not be."""
    name, said, whose = served_name.partition("=")
    if not name or (said and whose != model):
        raise click.ClickException(
            f"--served-name {served_name}: the model is {model!r}: "
            f"--served-name {name or 'NAME'}={model}"
        )
    return name


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
    adapters = settings.get("adapters", {})
    if not isinstance(adapters, dict) or not all(map(_is_adapter, adapters.items())):
        raise refuse(
            f".adapters is {adapters!r}; it must be a table of names, without {BETWEEN!r}, and "
            'folders, as { sql = "adapters/sql" }'
        )
    draft = settings.get("draft")
    if draft is not None and (not isinstance(draft, str) or not draft):
        raise refuse(f".draft is {draft!r}; it must be a known name, a folder, or a hub id")
    return AskedModel(model, (name, *names), batch, nbytes, tuple(adapters.items()), draft)


def _is_adapter(entry: tuple[str, Any]) -> bool:
    name, folder = entry
    return bool(name) and BETWEEN not in name and isinstance(folder, str) and bool(folder)
