"""Models that other programs have put on this machine are found, and told from other folders."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from mlx_rq.engine.models import local
from mlx_rq.engine.models.local import LocalModel, local_models

CONFIG = {"model_type": "llama", "max_position_embeddings": 4096, "dtype": "bfloat16"}
KNOWN = ("any", "all")
"""How llamas batch, and share."""
ODD_LENGTHS = ('"x"', "[1]", "NaN", "Infinity")


def model_folder(path: Path, config: dict[str, Any] | None = None, weights: int = 10) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    if weights:
        (path / "model.safetensors").write_bytes(b"x" * weights)
    return path


@pytest.fixture(autouse=True)
def nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(local, "LM_STUDIO", (str(tmp_path / "lmstudio"),))


def test_where_there_is_nothing_none_is_found(tmp_path: Path) -> None:
    assert local_models([tmp_path / "not-there"]) == []


def test_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "hub" / "models--org--tiny"
    path = model_folder(repository / "snapshots" / "abc", {"quantization": {"bits": 4}})
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    model_folder(tmp_path / "hub" / "models--org--empty" / "snapshots" / "abc", weights=0)
    scan = huggingface_hub.scan_cache_dir
    monkeypatch.setattr(huggingface_hub, "scan_cache_dir", lambda: scan(tmp_path / "hub"))
    assert local_models() == [LocalModel("org/tiny", "4bit", path, 10, 4096, "hub", *KNOWN)]


def test_lm_studios_folders_and_others(tmp_path: Path) -> None:
    theirs = model_folder(tmp_path / "lmstudio" / "org" / "tiny")
    other = {"dtype": None, "torch_dtype": "float16", "model_type": "nobody's"}
    ours = model_folder(tmp_path / "models" / "mine", other)
    model_folder(tmp_path / "models" / "a" / "b" / "too-deep")
    (tmp_path / "models" / "notes").mkdir()
    model_folder(tmp_path / "models" / "no-weights", weights=0)
    adapter = tmp_path / "models" / "sql"
    adapter.mkdir()
    parameters = {"rank": 8, "scale": 20.0, "dropout": 0.0}
    config = {"fine_tune_type": "dora", "num_layers": 4, "lora_parameters": parameters}
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "model": "org/tiny"}))
    (adapter / "adapters.safetensors").write_bytes(b"x" * 7)
    folders = [tmp_path / "models", ours]
    assert local_models(folders) == [
        LocalModel(str(theirs), "bfloat16", theirs, 10, 4096, "LM Studio", *KNOWN),
        LocalModel(str(adapter), "dora", adapter, 7, 0, "adapter of org/tiny"),
        LocalModel(str(ours), "float16", ours, 10, 4096, str(tmp_path / "models")),
    ]


@pytest.mark.parametrize(
    "config",
    [
        *(f'{{"model_type": "llama", "max_position_embeddings": {odd}}}' for odd in ODD_LENGTHS),
        '{"model_type": "llama", "text_config": [1]}',
        "[" * 100_000,
    ],
)
def test_what_makes_no_sense_is_no_model(tmp_path: Path, config: str) -> None:
    (model_folder(tmp_path / "odd") / "config.json").write_text(config)
    assert local_models([tmp_path]) == []
