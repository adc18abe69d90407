"""What a benchmark has found, so far: the shape of `mlx-rq bench --json`."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

VERSION = 1
"""Of the shape. Within a version fields are added, but none changes its meaning or goes."""

Kind = Literal["decode", "prefill"]


@dataclass(frozen=True)
class Speed:
    """Tokens a second of all rows together, each of which holds so many tokens of context."""

    kind: Kind
    rows: int
    context: int
    tokens_per_second: float


@dataclass(frozen=True)
class SharedPrefix:
    """A beginning that prompts have in common, beyond that which they share with still more.

    `begins` is its text, which is for the user's own terminal only.
    """

    tokens: int
    prompts: int
    begins: str

    @property
    def saved_tokens(self) -> int:
        """Tokens that need not be computed, because it is computed once."""
        return self.tokens * (self.prompts - 1)


@dataclass(frozen=True)
class Work:
    """The jobs of a file, as one plan of the engine has them.

    `computed_tokens` are those of prompts that are computed by that plan, `distinct_tokens` the
    least that would do. `left_out` are requests beyond those that are planned. `prefixes` are those
    that save most.
    """

    source: str
    jobs: int
    refused: int
    left_out: int
    prompts: int
    duplicates: int
    prompt_tokens: int
    distinct_tokens: int
    computed_tokens: int
    prefixes: tuple[SharedPrefix, ...]


@dataclass(frozen=True)
class Run:
    """How long one way took over the sample; what is not known of a peer is None."""

    way: str
    seconds: float
    computed_tokens: int | None = None
    answer_tokens: int | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None


@dataclass(frozen=True)
class Sample:
    """The jobs that were tried: `cut` answers were ended after `answer_limit` tokens."""

    jobs: int
    prompt_tokens: int
    answer_limit: int
    answer_tokens: int
    cut: int
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class JobsPerHour:
    """An estimate for the whole file: prompts by its plan, answers and speeds by the sample."""

    shared: float
    unshared: float


@dataclass
class Report:
    """All of it. `complete` where nothing was interrupted."""

    model: str
    chip: str
    versions: dict[str, str]
    complete: bool = False
    seconds: float = 0.0
    speeds: list[Speed] = field(default_factory=list)
    best_batch: int | None = None
    share_from: int | None = None
    work: Work | None = None
    sample: Sample | None = None
    jobs_per_hour: JobsPerHour | None = None
    notes: list[str] = field(default_factory=list)

    def speed(self, kind: Kind, rows: int, context: int) -> float | None:
        """Finds a speed; None where it was not measured."""
        for one in self.speeds:
            if (one.kind, one.rows, one.context) == (kind, rows, context):
                return one.tokens_per_second
        return None

    def best_speed(self, kind: Kind) -> float:
        """Gives the highest speed; 0 where none was measured."""
        return max((one.tokens_per_second for one in self.speeds if one.kind == kind), default=0.0)

    def as_json(self) -> dict[str, Any]:
        """Gives what --json prints, which holds nothing of any prompt."""
        told = {"version": VERSION, **asdict(self)}
        if self.work is not None:
            for prefix in told["work"]["prefixes"]:
                del prefix["begins"]
        return told
