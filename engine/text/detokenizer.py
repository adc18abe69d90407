"""Turns a sequence's tokens into its text, and finds its stop strings in that text.

Stop strings are matched on decoded text, not on tokens: "beta gamma" must be found whether the
model writes it as two tokens or as ten.
"""

from collections.abc import Sequence

from mlx_lm.tokenizer_utils import TokenizerWrapper

_INCOMPLETE = "\ufffd"
"""What a decoder shows for bytes that are not a whole character (yet)."""

_CONTEXT_TOKENS = 4
"""Prompt tokens that are decoded before a continuation, for the sake of its leading space."""


def held_back(text: str, marks: Sequence[str]) -> str:
    """Cuts a text before what may be the beginning of one of the marks."""
    longest = max((_overlap(text, mark) for mark in marks), default=0)
    return text[:-longest] if longest else text


def _overlap(text: str, mark: str) -> int:
    """Counts how many characters of the mark's beginning, not all, the text ends with."""
    tail = text[-(len(mark) - 1) :] if len(mark) > 1 else ""
    at = tail.find(mark[:1])
    while at >= 0:
        if mark.startswith(tail[at:]):
            return len(tail) - at
        at = tail.find(mark[:1], at + 1)
    return 0


class SequenceText:
    """The text of one sequence: token by token where it has stop strings, else when asked for.

    `prompt` is given for continuations of plain text: SentencePiece decoders drop the leading space
    of what they take for the beginning of a text. With `marks`, special tokens stay in the text,
    for `mlx_rq.engine.formats.parser` to see.
    """

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        stops: Sequence[str] = (),
        prompt: Sequence[int] = (),
        *,
        marks: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._marks = marks
        self._stops = tuple(stops)
        self._context = list(prompt[-_CONTEXT_TOKENS:])
        self._tokens: list[int] = []
        self._done = 0  # tokens whose text is in self._text
        self._window = 0  # first token that is decoded again for the sake of the next ones
        self._text = ""
        self._searched = 0  # characters of self._text that cannot begin a new stop
        self._stopped_at: int | None = None
        self._stop_ends = 0  # place in self._text

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens

    @property
    def marks(self) -> bool:
        """Whether special tokens are in the text."""
        return self._marks

    @property
    def uncut(self) -> str:
        """The text with the stop in it, as far as it was decoded."""
        return self._text

    @property
    def stopped_at(self) -> int | None:
        """The place in `uncut` where the stop begins; None where there was none."""
        return self._stopped_at

    def add(self, token: int) -> bool:
        """Takes one more token; returns whether a stop string is now complete."""
        self._tokens.append(token)
        if self._stops and self._stopped_at is None:
            self._search(self._extend_text())
        return self._stopped_at is not None

    def finish(self) -> str:
        """Gives the text, cut at the earliest stop; half a character at the end is left out."""
        if self._stopped_at is None:
            self._text = self._decode_all()
            self._searched = 0
            self._search(self._text)
        return self._text[: self._stopped_at]

    def up_to_stop(self, *, with_it: bool = False) -> tuple[Sequence[int], str]:
        """Gives the tokens that end before the stop, or in it, and the text from there up to it."""
        text = self.finish()
        if with_it:
            text = self._text[: self._stop_ends]
        for count in range(len(self._tokens), 0, -1):
            before = self._decoded(self._tokens[:count])
            if text.startswith(before):
                return self._tokens[:count], text[len(before) :]
        return (), text

    def partial(self) -> str:
        """Gives the text so far, without what may change: half a character, the start of a stop."""
        if self._stopped_at is not None:
            return self._text[: self._stopped_at]
        return held_back(self._extend_text(), self._stops)

    def decode(self, tokens: Sequence[int]) -> str:
        """Gives the text of tokens by themselves."""
        text = self._tokenizer.decode(list(tokens), skip_special_tokens=not self._marks)
        return str(text)

    def _decode_all(self) -> str:
        text = self._decoded(self._tokens)
        return text.rstrip(_INCOMPLETE) if text.endswith(_INCOMPLETE) else text

    def _decoded(self, tokens: Sequence[int]) -> str:
        """Gives the text of tokens behind the prompt."""
        if self._context:
            before = self.decode(self._context)
            joined = self.decode([*self._context, *tokens])
            if joined.startswith(before):
                return joined[len(before) :]
        return self.decode(tokens)

    def _extend_text(self) -> str:
        """Appends the text of new tokens once they end in a whole character; gives the text so far.

        A few tokens before are decoded with them, since a token's text can depend on those.
        """
        tokens = [*self._context, *self._tokens]
        offset = len(self._context)
        start = offset + self._window if self._done or not offset else 0
        known = self.decode(tokens[start : offset + self._done])
        text = self.decode(tokens[start:])
        if not text.startswith(known):
            return self._text
        if text.endswith(_INCOMPLETE):
            return self._text + text[len(known) :].rstrip(_INCOMPLETE)
        if len(text) > len(known):  # else the window would begin with tokens that show nothing
            self._text += text[len(known) :]
            self._window = self._done
        self._done = len(self._tokens)
        return self._text

    def _search(self, text: str) -> None:
        """Finds the stop that is complete first; of those, the one that begins first."""
        found: list[tuple[int, int]] = []
        for stop in self._stops:
            at = text.find(stop, max(0, self._searched - len(stop) + 1))
            if at >= 0:
                found.append((at + len(stop), at))
        if found:
            self._stop_ends = min(found)[0]
            self._stopped_at = min(at for end, at in found if end == self._stop_ends)
            self._text = text
        self._searched = len(self._text)
