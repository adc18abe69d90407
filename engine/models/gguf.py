"""One GGUF file in, one ordinary MLX model folder out.

A GGUF carries everything a model needs in a single file: quantised tensors under llama.cpp's names,
and metadata with the sizes, the vocabulary and the chat template. `convert` writes the same model
as a folder that `mlx_lm.load` reads.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

Dtype = Literal["float32", "bfloat16", "4bit"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)

GROUP = 32  # weights that share one scale, in every GGUF quantisation that MLX keeps packed
CONTROL_TOKEN = 3  # GGUF's token type for special tokens (LLAMA_TOKEN_TYPE_CONTROL in llama.cpp)
END_OF_TEXT = "<|endoftext|>"

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


@lru_cache(maxsize=1)
def default_dtype() -> Dtype:
    """The dtype that computes fastest here: bfloat16 on Metal, on a CPU what a short trial says.

    The trial (0.1 s) is needed because it depends on the BLAS that MLX finds. Measured on smollm2:
    with the reference BLAS of the Linux wheel bfloat16 prefills, and decodes 16 sequences, twice as
    fast as float32; with OpenBLAS preloaded float32 prefills 15 times as fast as bfloat16. 4bit is
    no faster than float32 in the first case and far slower in the second.
    """
    if mx.metal.is_available():
        return "bfloat16"
    return "float32" if _matmul_seconds(mx.float32) < _matmul_seconds(mx.bfloat16) else "bfloat16"


def _matmul_seconds(dtype: mx.Dtype) -> float:
    """Time 16 sequences in an MLP projection of smollm2; best of three, as the CPU is shared."""
    sequences, weight = mx.ones((16, 576), dtype), mx.ones((1536, 576), dtype)
    mx.eval(sequences, weight)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        mx.eval(sequences @ weight.T)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def convert(
    gguf: Path,
    folder: Path,
    dtype: Dtype,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write the llama-shaped model in `gguf` into the existing `folder`, its weights as `dtype`.

    ``4bit`` keeps the file's own quantisation; the others compute the weights it stands for.
    `progress` gets (modules done, modules in all). Raises ValueError for another architecture or
    tokenizer, OSError or RuntimeError when the folder cannot be written.
    """
    loaded = mx.load(str(gguf), return_metadata=True)
    assert isinstance(loaded, tuple)
    weights, raw = loaded
    meta = {key: value.item() if _is_scalar(value) else value for key, value in raw.items()}
    kinds = (meta.get("general.architecture"), meta.get("tokenizer.ggml.model"))
    if kinds != ("llama", "gpt2"):
        raise ValueError(f"{gguf.name} holds a model of kind {kinds}, not ('llama', 'gpt2')")

    modules = _modules(weights)
    tensors: dict[str, mx.array] = {}
    bits: dict[str, int] = {}
    for done, (name, stored) in enumerate(modules.items(), start=1):
        mlx_name = _mlx_name(name)
        parts = _unpermute(name, stored, meta)
        if "scales" in parts:
            bits[mlx_name] = _bits(parts)
        for suffix, tensor in _as_dtype(parts, dtype):
            mx.eval(tensor)
            tensors[f"{mlx_name}.{suffix}"] = tensor
        progress(done, len(modules))

    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    config = _config(meta, tied="output" not in modules)
    if dtype == "4bit":
        config["quantization"] = _quantization(bits)
    else:
        config["torch_dtype"] = dtype
    _write_json(folder / "config.json", config)
    _write_tokenizer(folder, meta)


def _is_scalar(value: object) -> bool:
    return isinstance(value, mx.array) and value.ndim == 0


def _modules(weights: dict[str, mx.array]) -> dict[str, dict[str, mx.array]]:
    """Group ``blk.0.attn_q.weight``, ``….scales``, ``….biases`` under ``blk.0.attn_q``."""
    modules: dict[str, dict[str, mx.array]] = {}
    for key, tensor in weights.items():
        name, _, suffix = key.rpartition(".")
        modules.setdefault(name, {})[suffix] = tensor
    return modules


def _mlx_name(name: str) -> str:
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)", name):
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}"
    return _TOP_NAMES[name]


def _unpermute(name: str, parts: dict[str, mx.array], meta: dict[str, Any]) -> dict[str, mx.array]:
    """Put the sequences of q and k back in the order of the original model.

    For its rotary embedding llama.cpp pairs neighbouring sequences, the original pairs sequence i
    of a head with sequence i + half: see `permute` in llama.cpp's convert_hf_to_gguf.py, of which
    this is the inverse. The scales of a sequence move with it.
    """
    if not name.endswith(("attn_q", "attn_k")):
        return parts
    key = "head_count" if name.endswith("attn_q") else "head_count_kv"
    heads: int = meta[f"llama.attention.{key}"]

    def restore(tensor: mx.array) -> mx.array:
        sequences, columns = tensor.shape
        halves = tensor.reshape(heads, sequences // heads // 2, 2, columns)
        return halves.swapaxes(1, 2).reshape(sequences, columns)

    return {suffix: restore(tensor) for suffix, tensor in parts.items()}


def _bits(parts: dict[str, mx.array]) -> int:
    """Bits per weight: a group of 32 weights fills as many uint32 words as one weight has bits."""
    return parts["weight"].shape[-1] // parts["scales"].shape[-1]


def _as_dtype(parts: dict[str, mx.array], dtype: Dtype) -> Iterator[tuple[str, mx.array]]:
    if dtype == "4bit":
        # One float type throughout: a float32 norm would widen every activation after it. Metal
        # gets the file's own float16, a CPU float32: there MLX is some 40 times slower in float16.
        floating = mx.float16 if mx.metal.is_available() else mx.float32
        for suffix, tensor in parts.items():
            is_float = mx.issubdtype(tensor.dtype, mx.floating)
            yield suffix, tensor.astype(floating) if is_float else tensor
        return
    weight = parts["weight"]
    if "scales" in parts:
        scales, biases = parts["scales"].astype(mx.float32), parts["biases"].astype(mx.float32)
        weight = mx.dequantize(weight, scales, biases, group_size=GROUP, bits=_bits(parts))
    yield "weight", weight.astype(mx.float32 if dtype == "float32" else mx.bfloat16)


def _quantization(bits: dict[str, int]) -> dict[str, Any]:
    """The quantization entry of config.json: what most modules have, each exception by name."""
    widths = list(bits.values())
    common = max(set(widths), key=widths.count)
    exceptions = {
        name: {"group_size": GROUP, "bits": width}
        for name, width in bits.items()
        if width != common
    }
    return {"group_size": GROUP, "bits": common, "mode": "affine", **exceptions}


def _config(meta: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": meta["llama.attention.head_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "max_position_embeddings": meta["llama.context_length"],
        # The GGUF keeps 1e-5 as the float32 9.999999747e-06: round back to what was meant.
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": meta["llama.rope.freq_base"],
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "tie_word_embeddings": tied,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(folder: Path, meta: dict[str, Any]) -> None:
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    bos, eos, pad = (meta[f"tokenizer.ggml.{kind}_token_id"] for kind in ("bos", "eos", "padding"))
    _tokenizer(meta).save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            # The class that takes tokenizer.json as it is. A named one (GPT2Tokenizer) would
            # rebuild the pre-tokenizer from its own defaults and lose the digit splitting.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[bos],
            "eos_token": tokens[eos],
            "pad_token": tokens[pad],
            "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
            "model_max_length": meta["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "chat_template": meta["tokenizer.chat_template"],
        },
    )
    # An instruct model ends its turn with eos; a plain completion may end the document instead.
    ends = [eos] + [i for i, token in enumerate(tokens) if token == END_OF_TEXT and i != eos]
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": bos, "eos_token_id": ends, "pad_token_id": pad},
    )


def _tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE as GPT-2's, but every digit stands alone (GGUF's pre-tokenizer ``smollm``)."""
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    # No unknown token here: the vocabulary lacks a few control bytes, and a stray one in a prompt
    # must vanish rather than turn into <|endoftext|>, the unknown token by this file's metadata.
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types: list[int] = meta["tokenizer.ggml.token_type"].tolist()
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return tokenizer


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
