"""Tiny random models of many architectures over a byte tokenizer: quick, and as wrong as can be.

Random weights make every numerical slip visible: nothing in the text hides it.
"""

import json
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_rq.engine.models.load import LoadedModel

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% if not (loop.last and continue_final_message) %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 259

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "num_hidden_layers": 3,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
MIXTURE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    # Two of three layers see a window of 16 tokens only: their caches wrap around.
    "gemma3_text": {"sliding_window": 16, "sliding_window_pattern": 3},
    # Convolution state beside attention.
    "lfm2": {
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "block_ff_dim": 96,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    # Gated delta-net state beside attention, and a mixture of experts.
    "qwen3_next": {
        **MIXTURE,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
        "shared_expert_intermediate_size": 48,
        "partial_rotary_factor": 0.5,
        "full_attention_interval": 3,
    },
    "qwen3_moe": MIXTURE,
    # Attention sinks, beside layers with windows.
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    # The last layer attends to the keys and values of the first, and gives no cache with them.
    "gemma4_text": {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 16,
        "num_kv_shared_layers": 1,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
    },
    # Multi-head latent attention.
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 48,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "qk_nope_head_dim": 16,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}
# What mlx-lm itself cannot batch: caches that do not merge, attention that takes one length only.
SEQUENTIAL_FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {},
    "llama4": {
        "text_config": {
            **COMMON,
            "num_hidden_layers": 4,
            "model_type": "llama4_text",
            "attention_bias": False,
            "attention_chunk_size": 16,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 96,
            "num_experts_per_tok": 1,
            "num_local_experts": 2,
            "rope_scaling": None,
            "use_qk_norm": True,
            "attn_temperature_tuning": 4,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        }
    },
}


@cache
def byte_tokenizer() -> TokenizerWrapper:
    """A tokenizer with one token for each byte, and ChatML's special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    # Bytes are shown as one character each, so that a text tells its tokens exactly.
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIALS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", clean_up_tokenization_spaces=False
    )
    fast.chat_template = TEMPLATE
    return TokenizerWrapper(fast, eos_token_ids=[258])


@cache
def tiny_model(family: str, seed: int = 0, head_dim: int = COMMON["head_dim"]) -> LoadedModel:
    """A random model of one architecture, three layers deep, in float32."""
    config = {
        **COMMON,
        "head_dim": head_dim,
        **{**FAMILIES, **SEQUENTIAL_FAMILIES}[family],
    }
    return random_model(family, config, seed)


def random_model(family: str, config: dict[str, Any], seed: int = 0) -> LoadedModel:
    """A random model over the byte tokenizer, of mlx-lm's module `family`."""
    module = import_module(f"mlx_lm.models.{family}")
    args = module.ModelArgs.from_dict({"model_type": family, **config})
    mx.random.seed(seed)
    network = module.Model(args)
    # Stock initialisation gives nearly equal logits; wider weights make the choices clear.
    network.update(
        tree_map(
            lambda p: mx.random.normal(p.shape) * 0.3 if p.ndim > 1 else p, network.parameters()
        )
    )
    mx.eval(network.parameters())
    return LoadedModel(
        model=network,
        tokenizer=byte_tokenizer(),
        model_id=f"tiny-{family}",
        path=Path(),
        context_length=2048,
        eos_token_ids=frozenset([258]),
        vocab_size=VOCABULARY,
        fingerprint="fp_tiny",
    )


def model_folder(folder: Path, family: str = "llama", seed: int = 0, **config: Any) -> Path:
    """Writes a random model as a folder that can be loaded, here and by mlx-lm."""
    whole = {**COMMON, **FAMILIES[family], **config}
    network = random_model(family, whole, seed).model
    folder.mkdir(parents=True)
    weights: Any = tree_flatten(network.parameters())
    mx.save_safetensors(str(folder / "model.safetensors"), dict(weights))
    about = {"model_type": family, "eos_token_id": 258, **whole}
    (folder / "config.json").write_text(json.dumps(about))
    tokenizer: Any = byte_tokenizer()
    tokenizer.save_pretrained(str(folder))
    return folder


class Nested:
    """A model of two layers. The first has caches of two kinds: what they hold is not shared."""

    def make_cache(self) -> list[Any]:
        return [CacheList(KVCache(), RotatingKVCache(4096)), KVCache()]

    def __call__(self, tokens: mx.array, cache: list[Any]) -> None:
        for leaf in (*cache[0].caches, cache[1]):
            leaf.update_and_fetch(mx.zeros((1, 1, 1, 4)), mx.zeros((1, 1, 1, 4)))
