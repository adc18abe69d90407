"""The workers that are broken, and what they have said."""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fakes import eventually
from harness import Program

LEASE, STALL = 2, 4
"""Seconds."""


@dataclass
class Workers:
    """Supervised workers with a fake engine, on one Redis; the newest of each side lives."""

    folder: Path
    url: str
    pace: float
    """Seconds that a step of an engine takes."""
    programs: dict[str, list[Program]] = field(default_factory=dict)

    @property
    def everyone(self) -> Iterator[Program]:
        """All that ever were."""
        for programs in self.programs.values():
            yield from programs

    def clock(self, side: str) -> Path:
        """The file that says how wrong the wall clock of one side's processes is."""
        return self.folder / f"clock-{side}"

    def spool(self, side: str) -> Path:
        """Where one side keeps answers that Redis does not take."""
        return self.folder / f"spool-{side}"

    def newest(self, side: str) -> Program:
        return self.programs[side][-1]

    def start(self, side: str, role: str = "supervise", **more: Any) -> Program:
        """Starts a supervisor and its worker, as whoever runs it as a service does."""
        programs = self.programs.setdefault(side, [])
        self.clock(side).touch()
        programs.append(
            Program(
                role,
                url=self.url,
                name=f"worker-{side}-{len(programs)}",
                capacity=16,
                pace=self.pace,
                spool=str(self.spool(side)),
                data=str(self.folder / "data"),
                clock=self.clock(side),
                options={
                    "lease": LEASE,
                    "window": 64,
                    "grace": 1.0,
                    "max_wait": 5.0,
                    "stall": STALL,
                },
                supervisor={"stall": STALL, "first_pause": 0.05},
                **more,
            )
        )
        return programs[-1]

    def tend(self, side: str) -> bool:
        """Starts again what has ended by itself (it found no Redis), as a service manager does."""
        if self.newest(side).process.poll() is None:
            return False
        self.start(side)
        return True

    def said(self, pattern: str) -> Iterator[re.Match[str]]:
        """Finds what any of them has said."""
        for program in self.everyone:
            yield from program.said(pattern)

    def heard(self, pattern: str) -> set[str]:
        """Finds the ids of jobs (the second group of a pattern) of which something was said."""
        return {found[2] for found in self.said(pattern)}

    def end(self, job_ids: Collection[str]) -> None:
        """Stops those that live in good order, once they have nothing of these jobs in flight."""
        began, left = r"began (\w+)", r"(?:left|answered) (\w+)"
        eventually(
            lambda: not self.heard(began).intersection(job_ids) - self.heard(left), "their answers"
        )
        for side in self.programs:
            self.newest(side).terminate()
            self.newest(side).wait()

    def keep_log(self, folder: Path) -> None:
        """Writes what each has said, to look at."""
        folder.mkdir(exist_ok=True)
        for program in self.everyone:
            Path(folder, f"{program.process.pid}.log").write_text("\n".join(program.lines))

    def close(self) -> None:
        for program in self.everyone:
            program.close()
