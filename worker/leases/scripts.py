"""The worker's Lua scripts: what stands before each of them, and the names that they go by."""

from collections.abc import Mapping
from functools import cache

from rq.executions import ExecutionRegistry
from rq.job import Job as RQJob

from mlx_rq.jobs.queue import keys
from mlx_rq.jobs.queue.finish import execution_key_parts, key_names
from mlx_rq.jobs.queue.scripts import backlog_script, load_script


def script_of(*names: str) -> str:
    """Reads one of the worker's scripts, in pieces, with what stands before each of them."""
    pieces = (load_script(__package__, name) for name in ("lease.lua", *names))
    return backlog_script() + load_script(keys.__package__, "ended.lua") + "".join(pieces)


@cache
def key_prefixes() -> Mapping[str, str]:
    """Tells how the keys begin that `lease.lua` makes of the names of jobs, queues and workers."""
    probe = "name"
    registries = {name: key.removesuffix(probe) for name, key in key_names(probe).items()}
    return {
        **registries,
        "job": RQJob.key_for(""),
        "result": keys.result(""),
        "executions": ExecutionRegistry.key_template.format(""),
        "execution": execution_key_parts().execution_prefix,
        "in_flight": keys.IN_FLIGHT,
        "owner": keys.OWNER,
        "worker": keys.worker(""),
    }
