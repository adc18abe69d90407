"""How fast a worker says that it is."""

from mlx_rq.engine.interface import Totals
from mlx_rq.worker.rates import Rates


class Work:
    """A worker's counts and clock, as a test moves them."""

    def __init__(self) -> None:
        self.now = 100.0
        self.totals = Totals()
        self.ended = 0
        self.rates = Rates(lambda: self.totals, lambda: self.ended, lambda: self.now)

    def go_on(self, seconds: int, *, prompt: int = 0, generated: int = 0, jobs: int = 0) -> None:
        """Does so much in each second."""
        for _ in range(seconds):
            self.now += 1
            self.totals.prompt_tokens += prompt
            self.totals.decoded_tokens += generated
            self.ended += jobs
            self.rates.look(busy=bool(prompt + generated + jobs))


def speed(prompt: float, generated: float, jobs: float) -> dict[str, float]:
    return {"prompt_tokens": prompt, "generated_tokens": generated, "jobs": jobs}


def test_at_the_start_nothing_is_known() -> None:
    nothing = speed(0, 0, 0)
    assert Work().rates.said() == {"now": nothing, "recent": nothing, "jobs_at_work": None}


def test_now_is_ten_seconds_and_recent_all_that_is_kept() -> None:
    work = Work()
    work.go_on(30, prompt=40, generated=100, jobs=2)
    work.go_on(10, generated=500)
    assert work.rates.said()["now"] == speed(0, 500, 0)
    assert work.rates.said()["recent"] == speed(30, 200, 1.5)


def test_the_pace_of_jobs_leaves_out_the_time_without_any() -> None:
    work = Work()
    work.go_on(20, jobs=3)
    work.go_on(80)
    said = work.rates.said()
    assert said["recent"] == speed(0, 0, 0.6)
    assert said["jobs_at_work"] == 3


def test_what_is_older_than_a_quarter_of_an_hour_is_forgotten() -> None:
    work = Work()
    work.go_on(20, jobs=3)
    work.go_on(900, generated=1)
    said = work.rates.said()
    assert said["recent"] == speed(0, 1, 0)
    assert said["jobs_at_work"] is None
