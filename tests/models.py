"""The models of the tests: SmolLM2, got from its package once, and a small random one."""

import atexit
import json
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from mlx_rq.engine.models.gguf import default_dtype
from mlx_rq.engine.models.load import LoadedModel, load
from mlx_rq.engine.models.pull import pull

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": 49_152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


@cache
def smollm2_folder() -> Path:
    """The folder of SmolLM2 in float32, in which greedy answers are the same in every batch."""
    return pull("smollm2", dtype="float32")


@cache
def quick_smollm2_folder() -> Path:
    """The folder of SmolLM2 in what computes fastest here, for tests that compare no answers."""
    return pull("smollm2", dtype=default_dtype())


@cache
def small_folder() -> Path:
    """A folder with SmolLM2's tokenizer and a small random network, for tests of all around it."""
    folder = Path(mkdtemp(prefix="mlx-rq-small-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(quick_smollm2_folder() / name, folder)
    mx.random.seed(0)
    network = llama.Model(llama.ModelArgs.from_dict(SMALL))
    weights = dict(tree_flatten(network.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(SMALL))
    return folder


@cache
def smollm2() -> LoadedModel:
    """SmolLM2, loaded once for all tests."""
    return load(str(smollm2_folder()))
