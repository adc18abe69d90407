"""`mlx-rq bench`: what it measures, what it keeps, how it says it, and where it stops."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from batch_helpers import batch_line
from click.testing import CliRunner
from rich.console import Console
from tiny import tiny_model

from mlx_rq.engine.models import calibrate
from mlx_rq.engine.models.device import MLXDevice
from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.worker.cli.bench import peers, speeds
from mlx_rq.worker.cli.bench.report import (
    JobsPerHour,
    Report,
    Run,
    Sample,
    SharedPrefix,
    Speed,
    Work,
)
from mlx_rq.worker.cli.bench.sample import SHARED, UNSHARED, choose, estimate, run_sample
from mlx_rq.worker.cli.bench.view import markdown, view
from mlx_rq.worker.cli.bench.work import EXAMPLE, read_work
from mlx_rq.worker.cli.main import main

SYSTEM = "You sell tea. " * 10


@pytest.fixture
def model() -> LoadedModel:
    return tiny_model("llama")


@pytest.fixture
def batch_file(tmp_path: Path) -> Path:
    """Six jobs of which five share a system message, two are the same, and a line that is bad."""
    lines = [batch_line(f"r{n}", f"Tea {n}?", max_tokens=4 + n, temperature=0) for n in range(5)]
    for line in lines:
        line["body"]["messages"].insert(0, {"role": "system", "content": SYSTEM})
    lines.append({**lines[0], "custom_id": "again"})
    lines.append(batch_line("lone", "x" * 40, max_tokens=2))
    file = tmp_path / "batch.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + "{broken\n")
    return file


def report_of(**found: Any) -> Report:
    return Report("tea", "Chip", {"mlx": "1"}, **found)


MEASURED = [Speed("decode", 4, 1024, 1000.0), Speed("prefill", 1, 0, 10_000.0)]


def test_a_file_is_counted_as_the_engine_plans_it(model: LoadedModel, batch_file: Path) -> None:
    work, jobs = read_work(batch_file, model)

    assert (work.jobs, work.refused, work.prompts, work.duplicates) == (7, 1, 7, 1)
    lengths = [job.tokens for job in jobs]
    assert work.prompt_tokens == sum(lengths)
    (prefix,) = work.prefixes
    assert prefix.prompts == 5
    assert SYSTEM[:20] in prefix.begins.replace("Ġ", " ")
    # The prefix once, of each job what follows it; the last of the six is the first one's double.
    assert work.computed_tokens == sum(lengths[:5]) - 4 * prefix.tokens + lengths[6]
    assert work.distinct_tokens <= work.computed_tokens < 1.05 * work.distinct_tokens


def test_a_file_without_a_good_line_is_refused(model: LoadedModel, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text("{broken\n")

    with pytest.raises(RequestError, match="not parseable"):
        read_work(file, model)


def test_both_ways_answer_the_same_jobs(model: LoadedModel, batch_file: Path) -> None:
    work, jobs = read_work(batch_file, model)
    report = report_of(speeds=MEASURED, best_batch=4, share_from=0, work=work)
    chosen = choose(jobs, report, answer_limit=6, seconds=60.0)
    said: list[str] = []

    run_sample(chosen, report, model, MLXDevice(), said.append)

    sample = report.sample
    assert sample is not None
    assert [run.way for run in sample.runs] == [SHARED, UNSHARED]
    shared, unshared = sample.runs
    assert (sample.jobs, sample.prompt_tokens) == (7, work.prompt_tokens)
    assert shared.computed_tokens == work.computed_tokens
    assert unshared.computed_tokens == work.prompt_tokens - jobs[0].tokens  # but for the double
    assert shared.answer_tokens == unshared.answer_tokens == sample.answer_tokens
    assert sample.cut == 7
    assert chosen.budgets == [4, 5, 6, 6, 6, 4, 2]
    assert report.jobs_per_hour is not None
    assert said == [f"7 jobs: {way}" for way in (UNSHARED, SHARED)]


def test_no_more_jobs_are_tried_than_there_is_time_for(
    model: LoadedModel, batch_file: Path
) -> None:
    work, jobs = read_work(None, model)
    assert (work.source, work.jobs, len(work.prefixes)) == (EXAMPLE, 200, 3)
    report = report_of(speeds=MEASURED, best_batch=4)
    each = sum(job.tokens for job in jobs) / 200 / 10_000 + 32 / 1000

    def count(seconds: float) -> int:
        return len(choose(jobs, report, answer_limit=64, seconds=seconds).jobs)

    assert count(2 * 5.5 * each) == 5
    assert count(2 * 3.5 * each) == 0
    assert count(3600.0) == 4 * 4
    assert len(choose(jobs[:3], report, answer_limit=64, seconds=3600.0).jobs) == 3


def test_jobs_per_hour_take_prompts_from_the_plan_and_speeds_from_the_sample() -> None:
    work = Work("f", 100, 0, 0, 100, 0, 100_000, 10_000, 10_000, ())
    shared = Run(SHARED, 5.0, 1000, 400, prefill_seconds=1.0, decode_seconds=4.0)
    unshared = Run(UNSHARED, 14.0, 10_000, 400, prefill_seconds=10.0, decode_seconds=4.0)
    sample = Sample(10, 10_000, 64, 400, 0, (shared, unshared))

    # 100 tokens of each prompt at 1,000 a second, 0.4 s for its answer; unshared 1,000 of them.
    assert estimate(work, sample) == JobsPerHour(shared=3600 / 0.5, unshared=round(3600 / 1.4, 1))
    assert estimate(work, replace(sample, runs=(unshared,))) is None


@pytest.fixture
def quick_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take 10 ms for each row; nothing is measured."""

    class Trial:
        def __init__(self, model: Any, *tokens: int, room: int, context: int) -> None:
            pass

        def seconds(self, rows: int) -> float:
            return 0.01 * (rows + 4)

    for module, name in (
        (calibrate, "DecodeTrial"),
        (speeds, "DecodeTrial"),
        (speeds, "PrefillTrial"),
    ):
        monkeypatch.setattr(module, name, Trial)
    monkeypatch.setattr(calibrate, "measure_share_from", lambda model: 512)


def test_it_refreshes_what_batch_auto_goes_by(
    quick_trials: None, model: LoadedModel, tmp_path: Path
) -> None:
    key = calibrate._key(model)
    old = {key: {"decode_speeds": {"1024": {"1": 1.0}}, "share_from": 1}}
    (tmp_path / calibrate.FILE).write_text(json.dumps(old))
    report = report_of()

    speeds.measure_batch(report, model, tmp_path, MLXDevice(), lambda _: None)

    kept = json.loads((tmp_path / calibrate.FILE).read_text())[key]
    assert kept["share_from"] == report.share_from == 512
    assert kept["decode_speeds"]["1024"]["16"] == report.speed("decode", 16, 1024) == 80.0
    assert calibrate.best_batch_size(model, tmp_path) == report.best_batch == 32
    speeds.measure_others(report, model, MLXDevice(), lambda _: None, 1.0, lambda: 0.0)
    assert report.speed("decode", 16, 0) == 80.0
    # As many as are decoded in a second; both in one step of 50 ms.
    assert report.speed("prefill", 1, 1024) == round(64 / 0.05, 2)
    assert report.speed("decode", 16, 4096) is None  # beyond the model's context
    out_of_time = report_of(speeds=[Speed("decode", 1, 1024, 1.0)], best_batch=4)
    speeds.measure_others(out_of_time, model, MLXDevice(), lambda _: None, 1.0, lambda: 2.0)
    assert out_of_time.notes == ["some speeds were left out, for want of time"]


@pytest.fixture
def tiny_command(
    quick_trials: None, monkeypatch: pytest.MonkeyPatch, model: LoadedModel, tmp_path: Path
) -> list[str]:
    """The command, with a tiny model behind any name."""
    monkeypatch.setattr("mlx_rq.engine.models.load.load", lambda name, **_: model)
    return ["bench", "tiny", "--quick", "--answer-tokens", "2", "--data-dir", str(tmp_path)]


def test_the_command_prints_json_with_peers_and_draws(
    tiny_command: list[str], batch_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[peers.Prompt] = []

    def run_server(folder: Path, prompts: list[peers.Prompt], *, rows: int) -> float:
        asked.extend(prompts)
        return 8.0

    monkeypatch.setattr(peers, "run_server", run_server)
    picture = tmp_path / "plot.png"
    options = ["--file", str(batch_file), "--peers", "--plot", str(picture), "--json"]

    done = CliRunner().invoke(main, [*tiny_command, *options])

    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["version"], told["complete"], told["best_batch"]) == (1, True, 32)
    ways = [run["way"] for run in told["sample"]["runs"]]
    assert ways == [SHARED, UNSHARED, peers.BATCH_GENERATE, peers.SERVER]
    assert told["sample"]["runs"][3]["seconds"] == 8.0
    assert [one.max_tokens for one in asked] == [2] * 7
    assert "TeaĠ0?<|im_end|>" in str(asked[0].prompt)
    assert set(told["work"]["prefixes"][0]) == {"tokens", "prompts"}
    assert "sell" not in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_page_tells_every_field() -> None:
    page = (Path(__file__).parents[3] / "docs" / "performance.md").read_text()
    shapes = (Report, Speed, Work, SharedPrefix, Sample, Run, JobsPerHour)
    names = {field.name for shape in shapes for field in fields(shape)} - {"begins"}

    assert {name for name in names if not re.search(rf"`[\w.]*\b{name}\b", page)} == set()


def test_ctrl_c_says_what_was_measured_so_far(
    tiny_command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(speeds, "measure_others", interrupted)

    done = CliRunner().invoke(main, tiny_command)

    assert done.exit_code == 130
    assert "Best batch: 32 rows" in done.stdout
    assert "Stopped: that is what was measured so far." in done.stderr


@pytest.mark.parametrize(
    ("file", "words"), [("plot.jpgg", "its ending must be one of"), ("none/plot.png", "no folder")]
)
def test_a_picture_that_could_not_be_written_is_refused_at_once(
    tmp_path: Path, file: str, words: str
) -> None:
    done = CliRunner().invoke(main, ["bench", "tiny", "--plot", str(tmp_path / file)])

    assert done.exit_code == 1
    assert words in done.stderr


def test_the_table_fits_a_terminal_and_markdown_shows_no_prompt(
    model: LoadedModel, batch_file: Path
) -> None:
    work, _ = read_work(batch_file, model)
    runs = tuple(
        Run(way, 1.5, 10) for way in (SHARED, UNSHARED, peers.BATCH_GENERATE, peers.SERVER)
    )
    report = report_of(
        speeds=[
            Speed(kind, rows, context, 12345.678)
            for kind in ("decode", "prefill")
            for rows in (1, 16)
            for context in speeds.CONTEXTS
        ],
        best_batch=16,
        work=work,
        sample=Sample(7, 1000, 64, 400, 2, runs),
        jobs_per_hour=JobsPerHour(1200.0, 300.0),
        notes=["something else"],
    )
    console = Console(width=80, record=True)

    console.print(view(report))

    told = console.export_text()
    assert max(map(len, told.splitlines())) <= 80
    assert "\n  16   12.3k     12.3k     12.3k    12.3k     12.3k     12.3k\n" in told
    assert f"\n{UNSHARED}      1.5                      10  1.00 x\n" in told
    assert "tokens x 5: <|im_start|>system" in told
    written = markdown(report)
    assert "sell" not in written
    assert "| rows | decode at 0 | decode at 1,024 |" in written
    assert "| 16 | 12.3k | 12.3k |" in written
    assert f"| {SHARED} | 1.5 | 10 | 1.00 x |" in written
    assert "About 1,200 jobs an hour; 300 if nothing were shared." in written
