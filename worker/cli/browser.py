"""Pages in the browser of whoever sits before this machine."""

import os
import sys
import webbrowser


def open_page(url: str) -> bool:
    """Opens a page; returns whether there is a browser that can: over ssh, mostly none."""
    return _has_display() and webbrowser.open(url)


def _has_display() -> bool:
    # Without one, a browser for terminals would be taken, which hides what we have said.
    if os.environ.get("BROWSER"):  # as editors set it that are open elsewhere
        return True
    if sys.platform == "darwin":
        return "SSH_CONNECTION" not in os.environ
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
