"""Keeps the text of users from being read as the model's own control tokens.

A user may write `<|im_end|>` in a message; tokenised with the template around it, that would end
the turn, and what follows could pass for another role's. So a private-use character is put into
such a text before the template sees it, and its tokens are taken out again afterwards: what is left
spells the same text, but as ordinary tokens. Only tokens that are flagged special count; marks like
`<think>` are text that answers show too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_rq.jobs.openai.errors import RequestError

_PRIVATE_USE = range(0xE000, 0xF8FF)

_REFUSAL = RequestError(
    "Invalid 'messages': they hold the text of one of the model's control tokens, which its "
    "tokenizer cannot write as plain text.",
    code="invalid_value",
    param="messages",
)


@dataclass(frozen=True, slots=True)
class SpecialTokenGuard:
    """Breaks the special tokens in texts with a character that these do not have."""

    specials: tuple[str, ...]
    breaker: str

    def protect(self, value: Any) -> Any:
        """Copies JSON with every special token in its texts broken."""
        match value:
            case str():
                for special in self.specials:
                    value = value.replace(special, special[0] + self.breaker + special[1:])
                return value
            case Mapping():
                return {self.protect(key): self.protect(item) for key, item in value.items()}
            case list() | tuple():
                return [self.protect(item) for item in value]
            case _:
                return value

    def encode(self, text: str, tokenizer: TokenizerWrapper) -> list[int]:
        """Tokenises text without its breakers; what they broke stays ordinary text."""
        if not self.specials or self.breaker not in text:
            return list(tokenizer.encode(text, add_special_tokens=False))
        try:
            encoded = tokenizer._tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=True
            )
        except NotImplementedError:  # a tokenizer that does not say where its tokens lie
            raise _REFUSAL from None
        tokens = []
        for token, (start, end) in zip(
            encoded["input_ids"], encoded["offset_mapping"], strict=True
        ):
            if self.breaker not in text[start:end]:
                tokens.append(token)
            elif text[start:end] != self.breaker:
                raise _REFUSAL
        return tokens


def guard_for(values: Sequence[Any], tokenizer: TokenizerWrapper) -> SpecialTokenGuard:
    """Makes a guard for JSON values that go into a chat template; it breaks nothing if none is due.

    Longer tokens come first: one may be a part of another.
    """
    specials = {added.content for added in tokenizer.added_tokens_decoder.values() if added.special}
    texts = [text for value in values for text in _texts(value)]
    found = [special for special in specials if any(special in text for text in texts)]
    used = {character for text in texts for character in text} if found else set()
    breaker = next(character for code in _PRIVATE_USE if (character := chr(code)) not in used)
    return SpecialTokenGuard(tuple(sorted(found, key=len, reverse=True)), breaker)


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case Mapping():
            for key, item in value.items():
                yield from _texts(key)
                yield from _texts(item)
        case list() | tuple():
            for item in value:
                yield from _texts(item)
