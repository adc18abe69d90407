"""The models and adapters that lie on this machine, wherever other programs have put them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_rq.engine.interface import Adapter
from mlx_rq.engine.models.adapters import WEIGHTS, check_adapter
from mlx_rq.engine.models.families import family_of
from mlx_rq.engine.models.hub import cached_file
from mlx_rq.engine.models.load import ModelError, context_length_of, locate

LM_STUDIO = ("~/.lmstudio/models", "~/.cache/lm-studio/models")
"""Where LM Studio keeps models, as <owner>/<name>: now, and in its older versions."""

_DEPTH = 2


@dataclass(frozen=True)
class LocalModel:
    """A model's folder: `name` is what `--model` takes for it, `dtype` how its weights are held.

    Of an adapter, `--adapter` takes it, the type is "lora" or "dora", and no context is told.
    `batches` and `shares` are those of its `Family`, empty where that is not known.
    """

    name: str
    dtype: str
    path: Path
    size_bytes: int
    context_length: int
    source: str
    batches: str = ""
    shares: str = ""


def local_models(folders: Iterable[Path] = ()) -> list[LocalModel]:
    """Lists what is in the hub's cache, in LM Studio's folders, and in `folders`."""
    found = list(_of_hub())
    for place in LM_STUDIO:
        found += _under(Path(place).expanduser(), "LM Studio")
    for folder in folders:
        found += _under(folder.expanduser(), str(folder))
    return list({model.path.resolve(): model for model in reversed(found)}.values())[::-1]


def read_model(path: Path, name: str, source: str) -> LocalModel | None:
    """Describes a model by its folder; None where it is not one that could be loaded."""
    weights = list(path.glob("model*.safetensors"))
    try:
        config = json.loads((path / "config.json").read_bytes())
        size = sum(file.stat().st_size for file in weights)
        if not weights or not isinstance(config, dict) or "model_type" not in config:
            return None
        context = context_length_of(config)
    except (OSError, ValueError, TypeError, OverflowError, RecursionError):
        return None  # whatever another program has written there
    family = family_of(str(config["model_type"])) or ("", "")
    return LocalModel(name, _dtype_of(config), path, size, context, source, *family)


def weight_bytes_here(model: str) -> int | None:
    """Says how many bytes of weights a model has; None where it is not on this machine yet."""
    _, folder = locate(model)
    if folder is None:
        config = cached_file(model, "config.json")
        if config is None:
            return None
        folder = config.parent
    return sum(file.stat().st_size for file in folder.glob("model*.safetensors"))


def read_adapter(folder: Path) -> LocalModel | None:
    """Describes an adapter by its folder; None where it is not one that could be put on a model."""
    name = str(folder)
    try:
        config = check_adapter(Adapter(name, folder))
        size = (folder / WEIGHTS).stat().st_size
    except (ModelError, OSError):
        return None
    source = f"adapter of {config['model']}" if config.get("model") else "adapter"
    return LocalModel(name, config.get("fine_tune_type", "lora"), folder, size, 0, source)


def _dtype_of(config: dict[str, Any]) -> str:
    quantised = config.get("quantization") or config.get("quantization_config")
    if isinstance(quantised, dict) and "bits" in quantised:
        return f"{quantised['bits']}bit"
    text = config.get("text_config")
    stated = config.get("dtype") or config.get("torch_dtype")
    if stated is None and isinstance(text, dict):
        stated = text.get("dtype") or text.get("torch_dtype")
    return str(stated or "unknown")


def _of_hub() -> Iterator[LocalModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repository in sorted(repositories, key=lambda one: one.repo_id):
        revisions = sorted(repository.revisions, key=lambda one: one.last_modified, reverse=True)
        for revision in revisions if repository.repo_type == "model" else ():
            model = read_model(revision.snapshot_path, repository.repo_id, "hub")
            if model is not None:
                yield model
                break


def _under(folder: Path, source: str, depth: int = _DEPTH) -> Iterator[LocalModel]:
    model = read_model(folder, str(folder), source) or read_adapter(folder)
    if model is not None:
        yield model
        return
    try:
        inside = sorted(entry.path for entry in os.scandir(folder) if entry.is_dir())
    except OSError:
        return
    for path in inside if depth else ():
        yield from _under(Path(path), source, depth - 1)
