"""Texts of all scripts, and the kinds of tokenizers that must read and write them alike."""

from functools import cache

import pytest
import speaking
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer
from models import quick_smollm2_folder
from tiny import byte_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = ["the cat sat on the mat and the dog sat on the cat", "beta gamma delta, alpha: 12"] * 8


@cache
def sentencepiece() -> TokenizerWrapper:
    """A tokenizer as SentencePiece makes them: spaces are marked, other bytes fall back."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    raw = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=byte_tokens[:1],
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS, trainer)
    learned = raw.get_vocab()
    pieces = sorted(learned, key=lambda piece: learned[piece])
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *byte_tokens,
        *(p for p in pieces[3:] if p not in byte_tokens),
    ]
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces[259:]
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    raw.model = models.BPE(
        vocab={piece: index for index, piece in enumerate(dict.fromkeys(pieces))},
        merges=merges,
        byte_fallback=True,
        unk_token="<unk>",
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    return TokenizerWrapper(fast, eos_token_ids=[2])


@cache
def smollm2() -> TokenizerWrapper:
    wrapped: TokenizerWrapper = load_tokenizer(quick_smollm2_folder())
    return wrapped


TOKENIZERS = {
    "bytes": byte_tokenizer,
    "byte-level": speaking.tokenizer,
    "sentencepiece": sentencepiece,
    "smollm2": smollm2,
}
EACH = pytest.mark.parametrize("name", TOKENIZERS)
WORDS = st.lists(
    st.sampled_from(
        ["the", " cat", " beta", " gamma", "\n", " 12", "日本", "🌍", "é", " ", "\u2581"]
    ),
    max_size=12,
).map("".join)
TEXTS = st.text(max_size=40) | WORDS
