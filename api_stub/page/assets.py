"""The files of the page, and what a browser may do with them: run them, and no other script."""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from fastapi.responses import Response

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}

FILES = ("page.css", "page.js", "rows.js", "charts.js", "dom.js")
"""What the page loads; nothing else is served."""

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""No script but ours runs, nothing comes from or goes elsewhere, and no text is read as HTML."""

_HEADERS: Mapping[str, str] = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


@cache
def _content(name: str) -> bytes:
    return files(__package__).joinpath(name).read_bytes()


def file_response(name: str) -> Response:
    """Answers with one of the files."""
    media_type = _TYPES[name.rpartition(".")[2]]
    return Response(_content(name), media_type=media_type, headers=_HEADERS)
