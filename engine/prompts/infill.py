"""Writes the prompt for a text in the middle of another, as models that were taught it want it."""

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_rq.jobs.openai.errors import RequestError

_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen coder, Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Refact
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<|fim_begin|>", "<|fim_end|>", "<|fim_hole|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)
"""Before the prefix, before the suffix, before the middle that is to be written."""


def infill(prompt: list[int], suffix: str, tokenizer: TokenizerWrapper) -> list[int]:
    """Puts a prompt and a suffix around the place that is to be filled.

    Raises RequestError where the model has no tokens for that.
    """
    vocabulary = tokenizer.get_vocab()
    for marks in _MARKS:
        if all(mark in vocabulary for mark in marks):
            before, between, after = (vocabulary[mark] for mark in marks)
            ending = tokenizer.encode(suffix, add_special_tokens=False)
            # What a tokenizer puts before every text stays before it.
            start = 1 if prompt[:1] == [tokenizer.bos_token_id] else 0
            return [*prompt[:start], before, *prompt[start:], between, *ending, after]
    raise RequestError(
        "Unsupported parameter: 'suffix'. This model has no tokens for filling in the middle.",
        code="unsupported_parameter",
        param="suffix",
    )
