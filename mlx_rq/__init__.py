"""Asynchronous language-model jobs on Apple silicon: the names that a producer needs.

The rooms behind these names: `mlx_rq.jobs` (what a job is and how it travels), `mlx_rq.engine`
(tokens in, tokens out), `mlx_rq.worker` (the life of a job on this machine) and
`mlx_rq.api_stub` (a thin HTTP server). Importing this package never imports MLX, and nothing at all
until a name is asked for: the command line has begun before.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (Apple's own python3 is 3.9, and a checkout is no wheel)
    raise ImportError(
        "mlx-rq needs Python 3.11 or newer, on a Mac a native (arm64) one; "
        f"this is Python {sys.version_info[0]}.{sys.version_info[1]}."
    )

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlx_rq.public import *  # noqa: F403
    from mlx_rq.public import __version__ as __version__
    from mlx_rq.public import map as map
else:

    def __getattr__(name: str) -> Any:
        """Gives a public name."""
        try:
            return getattr(import_module("mlx_rq.public"), name)
        except AttributeError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None

    def __dir__() -> list[str]:
        return [*globals(), *__getattr__("__all__"), "map", "__version__"]
