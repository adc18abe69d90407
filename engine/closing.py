"""Finds a short way to the end of a text that has begun, with llguidance's matcher as the guide.

It tells how many tokens an answer needs at least, and what to write when the budget runs out.
"""

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

_CLOSERS = ("}", "]", '"', "0", "1", "null", "true", ",", ":", "[", "{", "-", "T", "Z")
"""Tokens that bring JSON to its end, the most wanted first. White space is not among them."""

_LONGEST_END = 2_000
"""Tokens after which the search is given up: some texts (a pattern's) it does not bring to an end."""


class Closer:
    """Searches greedily: at each place the most wanted token that may stand there.

    `end_marks` are the special tokens that end a part of an answer: reasoning, a tool call, an
    argument. `end_text` ends an argument where the model's format spells that in ordinary text.
    """

    def __init__(
        self, tokenizer: LLTokenizer, end_marks: Sequence[int], end_text: str = ""
    ) -> None:
        tokenized = {text: tokenizer.greedy_tokenize(text) for text in _CLOSERS}
        single = {text: tokens[0] for text, tokens in tokenized.items() if len(tokens) == 1}
        self._order = [*end_marks, *single.values()]
        self._brackets = {token for text, token in single.items() if text in ("}", "]")}
        self._quote = single.get('"')
        self._newline = tokenizer.greedy_tokenize("\n")[0]
        self._end_text = tokenizer.tokenize_str(end_text)

    def shortest_end(self, matcher: LLMatcher) -> list[int] | None:
        """Gives tokens after which the text may end; empty where it may end at once.

        Greedy, so there may be fewer. None where none were found.
        """
        matcher = matcher.deep_copy()
        tokens: list[int] = []
        while not matcher.is_accepting():
            if matcher.is_error() or len(tokens) > _LONGEST_END:
                return None
            step = matcher.compute_ff_tokens() or self._next(matcher)
            if not matcher.consume_tokens(step):
                return None
            tokens += step
        return tokens

    def _next(self, matcher: LLMatcher) -> list[int]:
        words = np.frombuffer(matcher.compute_bitmask(), np.uint32)

        def may_come(token: int | None) -> bool:
            return token is not None and bool(words[token >> 5] >> (token & 31) & 1)

        best = next(filter(may_come, self._order), None)
        if best is None:
            return [_lowest(words)]
        # Where both an object and an array could end, it is text that we are in: its end is wanted.
        # Only text that is no JSON has line breaks.
        if best in self._brackets and all(map(may_come, self._brackets)):
            if may_come(self._newline) and self._end_text:
                return self._end_text
            if self._quote is not None and may_come(self._quote):
                return [self._quote]
        return [best]


def _lowest(words: NDArray[np.uint32]) -> int:
    """The first token that may come next, of the bits in these words; 0 where there is none."""
    index = int(words.astype(bool).argmax())
    word = int(words[index])
    return index * 32 + (word & -word).bit_length() - 1 if word else 0
