"""Writes Lark grammars in llguidance's dialect, piece by piece.

A piece is a fragment of a rule's right-hand side. The one thing to know: free text (`TEXT`) never
matches a special token, so a marker that is a special token ends it cleanly. A marker that is
spelled in ordinary text has to be excluded from the text, or waited for.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"
"""Legal between JSON's tokens. Bounded, or a model can write whitespace until its budget ends."""

_ANY_TEXT = r"(.|\n)*"


def special_tokens(tokenizer: TokenizerWrapper) -> dict[str, int]:
    """Lists the tokens that llguidance takes for special: flagged so, or written like `<this>`."""
    return {
        token.content: number
        for number, token in tokenizer.added_tokens_decoder.items()
        if token.special or (token.content[:1] == "<" and token.content[-1:] == ">")
    }


class Lark:
    """A grammar in the making: gives pieces, and remembers the rules that they refer to."""

    def __init__(self, specials: Mapping[str, int]) -> None:
        self._specials = specials
        longest_first = sorted(specials, key=len, reverse=True)
        self._split = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._rules: list[str] = []

    def grammar(self, start: str) -> str:
        """Gives the whole grammar, which begins with the piece `start`."""
        lines = [f"start: {start}", f"TEXT: /{_ANY_TEXT}/", *self._rules]
        options = {"no_forcing": True} if self._spells_special(lines) else {}
        return "\n".join([f"%llguidance {json.dumps(options)}", *lines])

    def _spells_special(self, lines: Iterable[str]) -> bool:
        """Says whether a special token may have to be spelled out as ordinary text.

        The engine would then force the token itself, which does not fit the grammar.
        """
        spelled = {json.dumps(token)[1:-1] for token in self._specials} | self._specials.keys()
        texts = [text for line in lines for text in (line, line.replace("\\", ""))]
        return any(token in text for token in spelled for text in texts)

    def rule(self, body: str, *, attributes: str = "", terminal: bool = False) -> str:
        """Makes a rule of its own of a piece; the piece returned stands for it."""
        name = f"{'T' if terminal else 'r'}{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def literal(self, text: str) -> str:
        """A piece for exactly this text; special tokens in it are matched as such."""
        return " ".join(self._pieces(text))

    def several(self, one: str, between: str) -> str:
        """A piece for another one, once or more, with this text in between."""
        return f"{one} ({self.literal(between)} {one})*"

    def _pieces(self, text: str) -> list[str]:
        pieces = []
        end = 0
        for match in self._split.finditer(text):
            pieces += [quoted(text[end : match.start()])] if match.start() > end else []
            pieces.append(f"<[{self._specials[match[0]]}]>")
            end = match.end()
        return pieces + ([quoted(text[end:])] if end < len(text) else [])

    def one_of(self, pieces: Iterable[str]) -> str:
        """A piece for any of the pieces."""
        return f"({' | '.join(pieces)})"

    def until(self, marker: str, least: int = 0, most: int | None = None) -> str:
        """A piece for free text, `least` to `most` characters, and then the marker."""
        counts = f"{{{least},{'' if most is None else most}}}" if least or most is not None else "*"
        first, *rest = self._pieces(marker)
        if first.startswith("<["):
            text = self.rule(f"/(.|\\n){counts}/", terminal=True)
            return " ".join([text, first, *rest])
        text = self.rule(f"/(.|\\n){counts}/", attributes=f"[suffix={first}]")
        return " ".join([text, *rest])

    def without(self, marker: str) -> str:
        """A piece for free text in which the marker does not occur."""
        first = self._pieces(marker)[0]
        if first.startswith("<["):
            return "TEXT"
        excluded = re.escape(marker).replace("/", r"\/")
        body = f"/{_ANY_TEXT}/ & ~/{_ANY_TEXT}{excluded}{_ANY_TEXT}/"
        return self.rule(body, terminal=True)

    def anything(self) -> str:
        """A piece for any tokens at all, special ones too."""
        return self.rule("(TEXT | <[*]>)*")

    def json(self, schema: Mapping[str, Any], *, lenient: bool = False, **options: Any) -> str:
        """A piece for a JSON value that fits the schema.

        Leniently, keywords that the engine cannot enforce are passed over (it warns of them).
        """
        guidance = {"whitespace_pattern": _WHITESPACE, "lenient": lenient, **options}
        return self.rule("%json " + json.dumps({**schema, "x-guidance": guidance}))

    def regex(self, regex: str) -> str:
        """A piece for text that fits a regular expression as a whole, anchored or not."""
        from llguidance import regex_to_lark

        body = regex.removeprefix("^")
        if body.endswith("$") and not re.search(r"(?<!\\)(\\\\)*\\\$\Z", body):
            body = body[:-1]
        return self.rule(f"/{regex_to_lark(body, 'd')}/", terminal=True)

    def nested(self, grammar: str) -> str:
        """A piece for a whole Lark grammar, with rules and a `start` of its own."""
        return self.rule(f"%lark {{\n{grammar}\n}}")


def quoted(text: str) -> str:
    """Writes text as a Lark string."""
    return json.dumps(text)
