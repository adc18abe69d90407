"""Writes the Homebrew formula of a release: python packaging/homebrew.py SDIST URL HOMEPAGE.

SDIST is the release's source archive as it lies here, URL where it can be got by everybody. The
formula goes to standard output, for `Formula/mlx-rq.rb` of a tap.
"""

import hashlib
import re
import sys
from pathlib import Path

TEMPLATE = Path(__file__).with_name("mlx-rq.rb.in")


def formula(sdist: Path, url: str, homepage: str) -> str:
    """Fills in the template; raises ValueError where an archive or a URL is none of a release."""
    if not url.endswith(f"/{sdist.name}") or not re.fullmatch(r"mlx_rq-.+\.tar\.gz", sdist.name):
        # Homebrew reads the version there.
        raise ValueError(f"SDIST and URL must end in the same mlx_rq-<version>.tar.gz: {url!r}")
    values = {
        "URL": _https(url),
        "HOMEPAGE": _https(homepage),
        "SHA256": hashlib.sha256(sdist.read_bytes()).hexdigest(),
    }
    return re.sub(r"@(\w+)@", lambda place: values[place[1]], TEMPLATE.read_text())


def _https(url: str) -> str:
    if not re.fullmatch(r"https://[\w./%+:~-]+", url):
        raise ValueError(f"{url!r} is no https URL, as in https://example.org/mlx_rq-1.0.tar.gz")
    return url


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    try:
        print(formula(Path(sys.argv[1]), *sys.argv[2:]), end="")
    except (OSError, ValueError) as error:
        sys.exit(f"Error: {error}")
