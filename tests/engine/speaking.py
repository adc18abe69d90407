"""Tiny random models over a small trained tokenizer: real text, tool calls and reasoning.

Two layers, 64 wide: what they say is noise, so only the constraint makes it valid.
"""

import copy
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models import llama
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mlx_rq.engine.models.load import LoadedModel

CORPUS = [
    '{"name": "Ann", "age": 31, "tags": ["a", "b"], "ok": true, "none": null, "x": -1.5}',
    "The quick brown fox jumps over the lazy dog. Then it sleeps, and dreams of the sea.",
    '{"city": "Paris", "unit": "C"}\n\n{"values": [[1, 2], [3, 4]], "id": "2024-01-01"}',
    "def add(a, b):\n    return a + b\n\n<function=add>\n<parameter=a>\n1\n</parameter>",
    "Grüße aus Köln, 日本語 and more: émigré, naïve, façade.",
] * 4
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "%s{% endif %}"
)
THINKING = (
    "{% if open_thinking %}<think>\n"
    "{% elif not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@cache
def tokenizer(
    parser: str | None = "json_tools", marks: tuple[str, ...] = (), thinking: bool = False
) -> TokenizerWrapper:
    """A tokenizer whose model calls tools as `parser` reads them; `marks` are single tokens."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIALS),
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS, trainer)
    thoughts = ("<think>", "</think>") if thinking else ()
    raw.add_tokens(
        [
            # As real tokenizers have it: only what looks like no tag is flagged special.
            AddedToken(mark, normalized=False, special=not mark.startswith("<"))
            for mark in (*marks, *thoughts)
        ]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", clean_up_tokenization_spaces=False
    )
    fast.chat_template = TEMPLATE.replace("%s", THINKING if thinking else "")
    module = import_module(f"mlx_lm.tool_parsers.{parser}") if parser else None
    return TokenizerWrapper(
        fast,
        eos_token_ids=[fast.convert_tokens_to_ids("<|im_end|>")],
        tool_parser=module and module.parse_tool_call,
        tool_call_start=module and module.tool_call_start,
        tool_call_end=module and module.tool_call_end,
    )


def with_template(template: str | None, marks: tuple[str, ...] = ()) -> TokenizerWrapper:
    """A tokenizer with a chat template of its own, or none."""
    wrapped = copy.copy(tokenizer(marks=marks))
    wrapped._tokenizer = copy.deepcopy(wrapped._tokenizer)
    wrapped._tokenizer.chat_template = template
    wrapped.has_chat_template = template is not None
    return wrapped


@cache
def model(
    parser: str | None = "json_tools",
    marks: tuple[str, ...] = ("<tool_call>", "</tool_call>"),
    thinking: bool = False,
    seed: int = 0,
) -> LoadedModel:
    """A random llama that speaks with `tokenizer`."""
    wrapped = tokenizer(parser, marks, thinking)
    size = len(wrapped) + 5  # wider than the vocabulary, as many models are
    args: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": size,
        "tie_word_embeddings": False,
    }
    mx.random.seed(seed)
    network = llama.Model(llama.ModelArgs.from_dict(args))
    network.update(
        tree_map(
            lambda p: mx.random.normal(p.shape) * 0.3 if p.ndim > 1 else p, network.parameters()
        )
    )
    mx.eval(network.parameters())
    return LoadedModel(
        model=network,
        tokenizer=wrapped,
        model_id="speaking",
        path=Path(),
        context_length=8192,
        eos_token_ids=frozenset(wrapped.eos_token_ids),
        vocab_size=size,
        fingerprint="fp_speaking",
    )
