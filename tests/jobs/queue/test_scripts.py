"""The Lua scripts read what Python writes, under the same names."""

import re
from dataclasses import dataclass, fields
from typing import Any

import pytest
from redis import Redis

from mlx_rq.jobs.queue.finish import FinishArguments
from mlx_rq.jobs.queue.scripts import by_name, load_script
from mlx_rq.worker.leases.claim import ClaimArguments
from mlx_rq.worker.leases.keeper import RenewArguments
from mlx_rq.worker.leases.recovery import GiveBackArguments

CLAIM = ["claim_job.lua", "claim_mend.lua", "claim_walk.lua", "claim.lua"]


@pytest.mark.parametrize(
    ("package", "names", "arguments"),
    [
        ("mlx_rq.jobs.queue", ["finish.lua"], FinishArguments),
        ("mlx_rq.worker.leases", ["renew.lua"], RenewArguments),
        ("mlx_rq.worker.leases", CLAIM, ClaimArguments),
        ("mlx_rq.worker.leases", ["give_back.lua"], GiveBackArguments),
    ],
)
def test_a_script_reads_what_it_is_given_and_nothing_else(
    package: str, names: list[str], arguments: Any
) -> None:
    text = "".join(load_script(package, name) for name in names)
    read = set(re.findall(r"\bgiven\.(\w+)", text))
    assert read == {field.name for field in fields(arguments)}


@dataclass(frozen=True)
class Arguments:
    whole: int
    time: float
    yes: bool
    no: bool
    text: str
    none: str | None
    some: list[str]


def test_values_arrive_as_they_were(connection: Redis) -> None:
    text = "ä\U0001f600 \"'\0"
    arguments = Arguments(2**31 - 1, 1764344811.123456, True, False, text, None, ["a"])
    script = connection.register_script(
        """local given = cjson.decode(ARGV[1])
        return {given.whole, string.format('%.6f', given.time), given.yes and 1 or 0,
          given.no and 1 or 0, given.text, given.none == nil and 1 or 0, given.some[1], #given.some}
        """
    )
    expected = [2**31 - 1, b"1764344811.123456", 1, 0, text.encode(), 1, b"a", 1]
    assert script(args=[by_name(arguments)]) == expected
