"""Says what the constraint engine says in words for who wrote the schema."""

import re

_GAVE_UP = ("lexer error: ", "panic: ", "parser error: ")
_CIRCLE = "circular references with sibling keys"
_ANCHOR = re.compile(r"not supported yet; (Start|End) in regex (/.{1,300}?/)(?: while|\n|$)")
_ANCHORS = {"Start": "'^' can stand only at the start", "End": "'$' can stand only at the end"}
_NO_RANGE = "Failed to generate regex for "
_NOT_AN_OPTION = " Enable 'coerce_one_of'"
_QUOTED = re.compile(r"\d+ \|")
"""How a line of the grammar looks that the engine quotes in a message."""


def plain(message: str) -> str:
    """Takes the engine's message out of its frame: the place, and the grammar that it quotes."""
    if "NoExtension" in message:
        return "no value can satisfy it."
    if _CIRCLE in message:
        return (
            "a '$ref' leads back to itself, and other keywords apply to the same value; write "
            "what applies to it as one schema."
        )
    if anchor := _ANCHOR.search(message):
        return f"{_ANCHORS[anchor[1]]} of a pattern; in {anchor[2]} it stands within."
    if _NO_RANGE in message:
        return "its bounds leave no numbers but those beyond 64 bits, which cannot be enforced."
    lines = [line.strip() for line in message.partition("<backtrace>")[0].splitlines()]
    wanted = [line for line in lines if line.strip("^") and not _QUOTED.match(line)]
    text = " ".join(wanted)
    for frame in ("failed to compile JSON schema: ", "failed to parse grammar: "):
        text = text.rpartition(frame)[2]
    if text.startswith(_GAVE_UP):
        return f"it is too much for the constraint engine; count less in it ({text[:200]})."
    place, colon, rest = text.partition(": ")
    text = rest if colon and place.startswith("at ") else text
    text = text.partition(_NOT_AN_OPTION)[0]
    return text.removesuffix("<non-verbose/>").strip()[:500].rstrip(".") + "."
