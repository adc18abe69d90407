"""What single tokens are made of: bytes, which may be only a part of a character."""

import codecs
import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""How SentencePiece writes a byte that is no character by itself."""

_SPACE = "\u2581"
"""How SentencePiece writes a space."""


class TokenBytes:
    """Spells the tokens of one tokenizer."""

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer
        self._added: dict[int, tuple[str, bool]] = {
            token: (added.content, added.special)
            for token, added in tokenizer.added_tokens_decoder.items()
        }
        self._decoders = _decoders(tokenizer)

    def hidden(self, token: int) -> bool:
        """Says whether a token is special, so that texts do not show it."""
        return self._added.get(token, ("", False))[1]

    def spell(self, token: int) -> bytes:
        """Gives a token's bytes; of a special token, those of its name."""
        if token in self._added:
            return self._added[token][0].encode()
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # the logits are wider than the vocabulary
            return b""
        if "ByteLevel" in self._decoders:
            known = _bytes_by_character()
            return b"".join(
                bytes([known[character]]) if character in known else character.encode()
                for character in piece
            )
        if _SPACE in self._decoders:
            byte = _BYTE.fullmatch(piece)
            return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode()
        return str(self._tokenizer.decode([token])).encode()

    def offsets(self, tokens: Sequence[int], text: str, *, marks: bool = False) -> list[int]:
        """Gives the place in `text`, counted in characters, at which each token begins.

        A token that goes on with a character begins where that character does. `marks`: special
        tokens are in the text.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # Decoders of SentencePiece drop the space before what they take for a text's beginning.
        dropped = bool(tokens) and self.spell(tokens[0])[:1] == b" " and text[:1] != " "
        at = -1 if dropped else 0
        offsets = []
        for token in tokens:
            offsets.append(min(max(at, 0), len(text)))
            if marks or not self.hidden(token):
                at += len(decoder.decode(self.spell(token)))
        return offsets


def _decoders(tokenizer: TokenizerWrapper) -> frozenset[str]:
    """Names the steps by which a tokenizer decodes, and what they replace by a space."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return frozenset()
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps = state.get("decoders", [state])
    spaced = any(step["type"] == "Metaspace" for step in steps) or any(
        step.get("pattern", {}).get("String") == _SPACE for step in steps
    )
    return frozenset([step["type"] for step in steps] + [_SPACE] * spaced)


@cache
def _bytes_by_character() -> dict[str, int]:
    """The characters that stand for bytes in byte-level vocabularies, as GPT-2 chose them."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }
