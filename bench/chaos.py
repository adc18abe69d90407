"""Everything is broken on purpose while jobs are answered; then each job is looked up by its id.

    python bench/chaos.py [--jobs 2000] [--seed 1] [--seconds 120] [--json]

Three parts, each with servers, workers and jobs of its own; a fake engine answers slowly, wrongly,
raises, aborts or hangs, as the jobs say.

    killing    three quarters of the jobs, for so many `--seconds` (`breaking/killing.py`)
    eviction   an eighth: a Redis that evicts (`breaking/eviction.py`)
    failover   an eighth: primaries that die, replicas that lag (`breaking/failover.py`)

The seed decides the jobs and the schedule. Ends with exit code 1 where a job has no end, two ends,
another answer than its own, or was lost and that was not told.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "reliability")]

from breaking.blows import schedule  # noqa: E402
from breaking.eviction import evict  # noqa: E402
from breaking.failover import fail_over  # noqa: E402
from breaking.killing import kill, other_namespace  # noqa: E402
from breaking.ledger import FAULTS  # noqa: E402

PARTS = ("killing", "eviction", "failover")
NONE_OF = ("left_in_lists", "falsely_said_lost", "errors_of_renewals", "attempts_lost_unbegun")
"""Further figures that must be 0."""


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs the parts and adds up what they found."""
    jobs, seed, pace, logs = arguments.jobs, arguments.seed, arguments.pace, Path(arguments.logs)
    eighth = jobs // 8
    done, found, faults, figures = Counter[str](), Counter[str](), list[str](), dict[str, Any]()
    began = time.monotonic()
    for part in arguments.parts:
        place = folder / part
        match part:
            case "killing":
                some = kill(place, jobs - 2 * eighth, seed, arguments.seconds, pace, logs)
            case "eviction":
                some = evict(place, eighth, seed, pace, logs)
            case "failover":
                some = fail_over(place, eighth, seed, pace, logs)
        done += some[0]
        found += some[1]
        faults += some[2]
        figures |= some[3]
    return {
        "seed": seed,
        "seconds": round(time.monotonic() - began, 1),
        "injected": dict(sorted(done.items(), key=lambda item: item[0].strip("("))),
        "jobs": found.total(),
        "became": {name: found[name] for name in sorted({*found, *FAULTS})},
        "faults": faults,
        "figures": figures,
    }


def show(told: dict[str, Any]) -> None:
    """Prints the table."""
    print(f"\nseed {told['seed']}, {told['seconds']} s\n\nfault injected                times")
    for kind, times in told["injected"].items():
        print(f"{kind:28} {times:6,}")
    if not other_namespace():
        print("other PID namespace: not tried, this system does not allow it")
    print(f"\n{told['jobs']:,} jobs, by their ids")
    for name, count in told["became"].items():
        print(f"{name:28} {count:6,}")
    print()
    for name, count in told["figures"].items():
        print(f"{name.replace('_', ' '):28} {count:6,}")
    print(*told["faults"], sep="\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--pace", type=float, default=0.05, help="seconds that a step takes")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--logs", default="chaos-logs", help="folder for logs, where faults are")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not arguments.json and "killing" in arguments.parts:
        print(*schedule(arguments.seed, arguments.seconds), sep="\n")
    with TemporaryDirectory() as folder:
        told = run(arguments, Path(folder))
    if arguments.json:
        print(json.dumps(told, indent=1))
    else:
        show(told)
    wrong = [told["figures"].get(name) for name in NONE_OF]
    return int(bool(told["faults"]) or any(wrong))


if __name__ == "__main__":
    sys.exit(main())
