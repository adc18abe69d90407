"""Finds a short way to the end of a text that has begun, with llguidance's matcher as the guide.

It tells how many tokens an answer needs at least, and what to write when the budget runs out.
"""

import time
from collections.abc import Sequence
from functools import partial

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

_CLOSERS = ("}", "]", '"', ",", ":", "0", "1", "null", "true", "[", "{", "-", "T", "Z")
"""Tokens that bring JSON to its end, the most wanted first. White space is not among them."""

_LONGEST_END = 2_000
_LONGEST_SEARCH = 0.25
"""Tokens, and seconds of CPU, after which the search is given up: some texts have no end for it.

Such a text may still be written: that no end is known of a grammar is no fault of it.
"""

_WRONG_TOKEN = "doesn't satisfy"
"""What the engine says where it is the search that went astray."""

_BEGINNING = 32
"""Tokens within which the engine's giving up is the grammar's fault: nobody could write a text."""


class Closer:
    """Searches greedily: at each place the most wanted token that may stand there.

    `end_marks` are the special tokens that end a part of an answer: reasoning, a tool call, an
    argument. `end_text` ends an argument where the model's format spells that in ordinary text.
    """

    def __init__(
        self, tokenizer: LLTokenizer, end_marks: Sequence[int], end_text: str = ""
    ) -> None:
        # Of a word its first token: where JSON allows that, the rest of the word is forced.
        first = {text: tokenizer.greedy_tokenize(text)[0] for text in _CLOSERS}
        self._order = [*end_marks, *first.values()]
        self._brackets = {first["}"], first["]"]}
        self._quote = first['"']
        self._zero, self._one = first["0"], first["1"]
        self._newline = tokenizer.greedy_tokenize("\n")[0]
        self._end_text = tokenizer.tokenize_str(end_text)

    def shortest_end(self, matcher: LLMatcher, most: int = _LONGEST_END) -> list[int] | None:
        """Gives tokens after which the text may end, about as many as `most`; empty where at once.

        Greedy, so there may be fewer. None where none were found. Raises ValueError where the
        engine gives up as soon as a text begins.
        """
        matcher = matcher.deep_copy()
        tokens: list[int] = []
        given_up = time.thread_time() + _LONGEST_SEARCH
        while not matcher.is_accepting():
            if len(tokens) > most or time.thread_time() > given_up:
                return None
            step = matcher.compute_ff_tokens() or self._next(matcher, tokens)
            if matcher.is_error() or not matcher.consume_tokens(step):
                error = matcher.get_error()
                if len(tokens) <= _BEGINNING and _WRONG_TOKEN not in error:
                    raise ValueError(error)
                return None
            tokens += step
        return tokens

    def _next(self, matcher: LLMatcher, before: Sequence[int]) -> list[int]:
        words = _words(matcher)
        may_come = partial(_is_set, words)
        best = next(filter(may_come, self._order), None)
        if best is None:
            return [_lowest(words)]
        # Where both an object and an array could end, it is text that we are in: its end is wanted.
        # Only text that is no JSON has line breaks.
        if best in self._brackets and all(map(may_come, self._brackets)):
            if may_come(self._newline) and self._end_text:
                return self._end_text
            if may_come(self._quote):
                return [self._quote]
        if best == self._zero and may_come(self._one) and before[-8:].count(self._one) < 4:
            # No number begins with two digits, the first 0. But a date does, and has no year 0000:
            # four times 1, then. More would never end where a multiple of something is wanted.
            ahead = matcher.deep_copy()
            if ahead.consume_token(best) and _is_set(_words(ahead), self._one):
                return [self._one]
        return [best]


def _words(matcher: LLMatcher) -> NDArray[np.uint32]:
    return np.frombuffer(matcher.compute_bitmask(), np.uint32)


def _is_set(words: NDArray[np.uint32], token: int) -> bool:
    return bool(words[token >> 5] >> (token & 31) & 1)


def _lowest(words: NDArray[np.uint32]) -> int:
    """The first token that may come next, of the bits in these words; 0 where there is none."""
    index = int(words.astype(bool).argmax())
    word = int(words[index])
    return index * 32 + (word & -word).bit_length() - 1 if word else 0
