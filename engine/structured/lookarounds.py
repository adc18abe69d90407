"""Writes patterns that look ahead or back as patterns that do not, which the engine demands.

^(?=.*[A-Z])(?=.*[0-9]).{8,}$    is    ^(?:.*[A-Z]), ^(?:.*[0-9]) and ^.{8,}$
"""

import re

_PART = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\((?:\?(?:=|!|<=|<!))?|[)|]", re.DOTALL)
"""An escape, a class, the beginning or the end of a group, or of an alternative."""
_LOOKING = ("(?=", "(?!", "(?<=", "(?<!", "\\b", "\\B")
_AHEAD = "^(?="
_OF_SETS = re.compile(r"\\.|\[|&&|~~", re.DOTALL)
"""What the engine reads in a class as another one, or as what two have in common; or an escape."""


def plain_patterns(pattern: str) -> tuple[list[str], bool]:
    """Gives patterns that all match where this one does; and whether nowhere else."""
    patterns, rest = [], pattern
    while rest.startswith(_AHEAD) and not _has_alternatives(rest):
        end = _end_of_group(rest, 1)
        if end is None or rest[end : end + 1] in ("*", "+", "?", "{"):
            break
        patterns.append(f"^(?:{rest[len(_AHEAD) : end - 1]})")
        rest = "^" + rest[end:]
    given = [*patterns, rest]
    plain = [_without_looking(one) for one in given]
    return plain, plain == given


def with_plain_classes(pattern: str) -> str:
    """Escapes what stands for itself in a class, but not for the engine: `[[a]` are two letters."""
    return _PART.sub(lambda part: _plain(part[0]) if part[0][0] == "[" else part[0], pattern)


def _plain(of_class: str) -> str:
    def escaped(found: re.Match[str]) -> str:
        return found[0] if found[0][0] == "\\" else "".join(f"\\{char}" for char in found[0])

    return "[" + _OF_SETS.sub(escaped, of_class[1:])


def _without_looking(pattern: str) -> str:
    """Takes what looks ahead or back out of a pattern, which matches no less then."""
    kept, done = "", 0
    for part in _PART.finditer(pattern):
        if part.start() < done or part[0] not in _LOOKING:
            continue
        end = _end_of_group(pattern, part.start()) if part[0][0] == "(" else part.end()
        if end is None:
            return pattern
        kept += pattern[done : part.start()] + "(?:)"
        done = end
    return kept + pattern[done:]


def _end_of_group(pattern: str, begin: int) -> int | None:
    """Finds where the group ends that begins there; None where it does not."""
    depth = 0
    for part in _PART.finditer(pattern, begin):
        depth += part[0].startswith("(") - (part[0] == ")")
        if depth == 0:
            return part.end()
    return None


def _has_alternatives(pattern: str) -> bool:
    """Says whether a pattern as a whole is one of several, not a group in it."""
    depth = 0
    for part in _PART.finditer(pattern):
        depth += part[0].startswith("(") - (part[0] == ")")
        if depth == 0 and part[0] == "|":
            return True
    return False
