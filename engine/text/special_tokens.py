"""Keeps the text of users from being read as the model's own control tokens.

A user may write `<|im_end|>` in a message; tokenised with the template around it, that would end
the turn, and what follows could pass for another role's. So a private-use character is put into
such a text before the template sees it, and its tokens are taken out again afterwards: what is left
spells the same text, but as ordinary tokens.

A control token is one that is flagged special, one that ends or begins a text, and any other added
one that the template writes: some tokenizers flag none at all. Those are found in the template and
in what it makes of the same conversation without a sign in its texts. The latter also tells whether
a control token came about in another way: put together from pieces, or out of characters that the
tokenizer takes for others. Such a conversation is refused.
"""

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_rq.jobs.openai.errors import RequestError

_PRIVATE_USE = range(0xE000, 0xF8FF)

_NEUTRAL = "\ufffd"
"""Stands for a sign that a control token has, in texts that shall hold none."""


def _refusal(why: str) -> RequestError:
    return RequestError(f"Invalid 'messages': {why}", code="invalid_value", param="messages")


_UNWRITABLE = _refusal(
    "they hold the text of one of the model's control tokens, which its tokenizer cannot write as "
    "plain text."
)


@dataclass(frozen=True, slots=True)
class _AddedToken:
    """One that may be a control token; `sure` where it is one whether or not it is written."""

    id: int
    content: str
    sure: bool


@dataclass(frozen=True, slots=True)
class _AddedTokens:
    """All that may be control tokens of one tokenizer, and the signs at their two ends."""

    tokens: tuple[_AddedToken, ...]
    signs: frozenset[str]

    def may_come_of(self, text: str) -> bool:
        """Says whether a text has anything in it of which a template could make one."""
        return not self.signs.isdisjoint(text) or not unicodedata.is_normalized("NFKC", text)


@lru_cache(maxsize=4)
def _added_tokens(tokenizer: TokenizerWrapper, template: str) -> _AddedTokens:
    ends = {*tokenizer.eos_token_ids, tokenizer.bos_token_id}
    tokens = []
    for number, added in tokenizer.added_tokens_decoder.items():
        flagged = added.special or number in ends
        if flagged or _is_mark(added.content):
            sure = flagged or added.content in template
            tokens.append(_AddedToken(number, added.content, sure))
    # Longer tokens come first: one may be a part of another.
    tokens.sort(key=lambda token: len(token.content), reverse=True)
    signs = {sign for token in tokens for sign in _ends(token.content) or token.content[:1]}
    return _AddedTokens(tuple(tokens), frozenset(signs))


def _is_mark(content: str) -> bool:
    """Tells a mark from words, white space and single signs that are added for shorter texts."""
    return len(content.strip()) > 1 and bool(_signs(content))


def _signs(content: str) -> set[str]:
    return {sign for sign in content if not (sign.isalnum() or sign.isspace() or sign == "_")}


def _ends(content: str) -> set[str]:
    """Gives the signs with which a token begins and ends; a slash says other things in texts."""
    inner = content.strip("".join(_signs(content)))
    before, _, after = content.partition(inner) if inner else (content, "", "")
    return {*before, *after} - {"/"}


@dataclass(frozen=True, slots=True)
class SpecialTokenGuard:
    """Breaks the special tokens in texts with a character that these do not have."""

    specials: tuple[str, ...]
    breaker: str

    def protect(self, value: Any) -> Any:
        """Copies JSON with every special token in its texts broken."""

        def broken(text: str) -> str:
            for special in self.specials:
                text = text.replace(special, special[0] + self.breaker + special[1:])
            return text

        return _mapped(value, broken)

    def encode(self, text: str, tokenizer: TokenizerWrapper) -> list[int]:
        """Tokenises text without its breakers; what they broke stays ordinary text."""
        if not self.specials or self.breaker not in text:
            return list(tokenizer.encode(text, add_special_tokens=False))
        try:
            encoded = tokenizer._tokenizer(
                text, add_special_tokens=False, return_offsets_mapping=True
            )
        except NotImplementedError:  # a tokenizer that does not say where its tokens lie
            raise _UNWRITABLE from None
        tokens = []
        for token, (start, end) in zip(
            encoded["input_ids"], encoded["offset_mapping"], strict=True
        ):
            if self.breaker not in text[start:end]:
                tokens.append(token)
            elif text[start:end] != self.breaker:
                raise _UNWRITABLE
        return tokens


def tokenise(
    write: Callable[..., str], values: Sequence[Any], tokenizer: TokenizerWrapper, template: str
) -> list[int]:
    """Tokenises what `write` makes of JSON values, whose own texts become no control tokens.

    `template` is what is known of the one that writes: an added token in it is a control token.
    Raises RequestError where a text cannot be kept from becoming one.
    """
    texts = list(_texts(values))
    added = _added_tokens(tokenizer, template)
    if not any(map(added.may_come_of, texts)):
        return list(tokenizer.encode(write(*values), add_special_tokens=False))
    neutral = str.maketrans(dict.fromkeys(added.signs, _NEUTRAL))
    templates_own = write(*_mapped(values, lambda text: text.translate(neutral)))
    control = [t for t in added.tokens if t.sure or t.content in templates_own]
    guard = _guard(texts, [token.content for token in control])
    tokens = guard.encode(write(*guard.protect(values)), tokenizer)
    if forged := _surplus(control, tokens, templates_own, tokenizer):
        raise _refusal(
            f"together with the model's chat template they make {forged.content!r}, one of its "
            "control tokens."
        )
    return tokens


def _surplus(
    control: Iterable[_AddedToken], tokens: Iterable[int], text: str, tokenizer: TokenizerWrapper
) -> _AddedToken | None:
    """Finds a control token that is more often among tokens than in a text."""
    counts = Counter(tokens)
    more = [t for t in control if t.id in counts and counts[t.id] > text.count(t.content)]
    # Nearly always none. The tokenizer itself may see more of them than are spelled out.
    seen = Counter(tokenizer.encode(text, add_special_tokens=False) if more else ())
    return next((token for token in more if counts[token.id] > seen[token.id]), None)


def _guard(texts: Sequence[str], specials: Sequence[str]) -> SpecialTokenGuard:
    """Makes a guard for texts that go into a chat template; it breaks nothing if none is due."""
    found = tuple(special for special in specials if any(special in text for text in texts))
    used = set().union(*texts) if found else set()
    breaker = next(character for code in _PRIVATE_USE if (character := chr(code)) not in used)
    return SpecialTokenGuard(found, breaker)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Copies JSON with each of its texts changed."""
    match value:
        case str():
            return change(value)
        case Mapping():
            return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
        case list() | tuple():
            return [_mapped(item, change) for item in value]
        case _:
            return value


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
