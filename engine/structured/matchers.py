"""Matchers of one grammar, each unharmed by what the others use up.

llguidance's copies share what they find out about the texts of a grammar. Where that comes to more
than its limits for one of them, all copies fail from their next step on: those of other jobs, and
those that are still to come. So all then go on with another matcher, as far as they were.
"""

from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_LIMITS = LLParserLimits(
    max_items_in_row=50_000,  # the default of 2,000 ends at 500 optional properties
    max_lexer_states=50_000,  # at 1-2 kB each
    verbose_errors=False,
)


def begun(tokenizer: LLTokenizer, lark: str) -> LLMatcher:
    """Compiles a grammar; without a look at whether any text can begin, or at an error."""
    return LLMatcher(tokenizer, lark, log_level=0, limits=_LIMITS)


def matcher_of(tokenizer: LLTokenizer, lark: str) -> LLMatcher:
    """Compiles a grammar; raises ValueError. The first mask shows what no text can satisfy."""
    matcher = begun(tokenizer, lark)
    tried = matcher.deep_copy()  # a mask that was made once is not made again, and tells of nothing
    if not tried.is_error():
        tried.compute_bitmask()
    if tried.is_error():
        raise ValueError(tried.get_error())
    return matcher


class Matchers:
    """The matchers of one grammar. Where it does not compile, raises ValueError."""

    def __init__(self, tokenizer: LLTokenizer, lark: str) -> None:
        self._tokenizer = tokenizer
        self._lark = lark
        self._first = matcher_of(tokenizer, lark)

    def after(self, tokens: Sequence[int] = ()) -> LLMatcher:
        """Gives a matcher that has taken in some tokens; in error, where it takes one of them not.

        A mask for each of them: with it, the engine's limits of a step begin anew.
        """
        matcher = self._first.deep_copy()
        matcher.compute_bitmask()
        if matcher.is_error():
            self._first = matcher_of(self._tokenizer, self._lark)
            matcher = self._first.deep_copy()
            matcher.compute_bitmask()
        for token in tokens:
            if not matcher.consume_token(token):
                break
            matcher.compute_bitmask()
        return matcher


def forced(matcher: LLMatcher) -> list[int]:
    """Gives the tokens that have to come next, but for one that completes the text.

    Where the engine knows of only one text that may follow, its masks allow only the first token of
    that text, as it is spelled canonically: it names the very tokens that a masked walk takes.
    """
    tokens: list[int] = []
    wanted = matcher.compute_ff_tokens()
    ahead = matcher.deep_copy() if wanted else matcher
    for token in wanted:
        if not ahead.consume_token(token) or ahead.is_stopped():
            break
        tokens.append(token)
    return tokens
