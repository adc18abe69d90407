"""The formats of strings that are enforced, beside those that the constraint engine knows.

What the check at the end accepts, and nothing else: the engine's own dates have a 29 February in
every year, and its minutes 60 seconds.
"""

_FEW = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = f"(?:{_YEAR}-(?:{_FEW}|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
_ZONE = "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?{_ZONE}"
_HEX = "%[0-9A-Fa-f]{2}"
_PATH = rf"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/]|{_HEX})"
_FIRST = rf"(?:[A-Za-z0-9\-._~!$&'()*+,;=@]|{_HEX})"
_NAME = "[A-Za-z0-9_]+"
_SCHEME = r"[A-Za-z][A-Za-z0-9+\-.]*"
_HOST = r"[A-Za-z0-9](?:[A-Za-z0-9\-.]*[A-Za-z0-9])?(?::[0-9]{1,5})?"


def _base64(char: str) -> str:
    """Writes the pattern of base64 whose padding has no bits that are lost."""
    return f"^(?:{char}{{4}})*(?:{char}[AQgw]==|{char}{{2}}[AEIMQUYcgkosw048]=)?$"


PATTERNS = {
    "base64": _base64("[A-Za-z0-9+/]"),
    "base64url": _base64("[A-Za-z0-9_-]"),
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[tT]{_TIME}$",
    "json-pointer": "^(?:/(?:[^~/]|~[01])*)*$",
    "uuid": "^[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$",
    "relative-json-pointer": "^(?:0|[1-9]{1,8}0?)(?:#|(?:/(?:[^~/]|~[01])*)*)$",
    "uri-template": rf"^(?:[A-Za-z0-9\-._~:/?#@!$&()*+,;=]|\{{{_NAME}(?:,{_NAME})*\}})*$",
    "uri-reference": (
        rf"^(?:{_SCHEME}:)?(?://{_HOST}(?:/{_PATH}*)?|(?:/?{_FIRST}+(?:/{_PATH}*)?)?)"
        rf"(?:\?{_PATH}*)?(?:#{_PATH}*)?$"
    ),
}
"""By the name of a format, the pattern of its texts; of the looser ones, of some of them."""

SAME = {
    "iri": "uri",
    "iri-reference": "uri-reference",
    "idn-email": "email",
    "idn-hostname": "hostname",
}
"""Formats of which those texts are enforced that are ASCII."""

OF_THE_ENGINE = frozenset(("duration", "email", "hostname", "ipv4", "ipv6", "uri"))
