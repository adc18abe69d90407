"""The Lua scripts that lie beside the code, and what they are told."""

import json
from functools import cache
from importlib.resources import files


@cache
def load_script(package: str, name: str) -> str:
    """Reads a script."""
    return files(package).joinpath(name).read_text()


def by_name(arguments: object) -> str:
    """Writes a dataclass as the one argument that a script reads with `cjson`; None is `nil`."""
    return json.dumps({name: value for name, value in vars(arguments).items() if value is not None})


def tolerant_script(package: str, *names: str) -> str:
    """Reads a script, in pieces, with what stands before each that reads what others have written.

    It also goes by the clock of Redis (`clock.lua`).
    """
    pieces = [load_script(__package__, name) for name in ("any_type.lua", "clock.lua")]
    return "".join(pieces + [load_script(package, name) for name in names])


def backlog_script() -> str:
    """Reads what stands before each script that adds to a queue's backlog or takes from it."""
    return tolerant_script(__package__, "backlog.lua")
