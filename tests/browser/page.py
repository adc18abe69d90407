"""The page in a real browser: `make test-page`. Writes its screenshots to docs/images/.

Not among the tests that every run has, because a browser is not a Python package: it takes the
Chromium of the system. It fails where there is none.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import PATIENCE, FakeEngine, StartWorker, failure
from playwright.sync_api import Browser, Page, expect, sync_playwright
from redis import Redis
from servers import RunningServer, answer_any, as_client, run_server

from mlx_rq import submit
from mlx_rq.api_stub.settings import ApiKeys, Settings
from mlx_rq.engine.interface import Task
from mlx_rq.jobs.queue.clock import redis_time
from mlx_rq.jobs.queue.history import Sample, write_sample

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
SCREENSHOTS = Path(__file__).parents[2] / "docs" / "images"
HOSTILE = '</script><img src=x onerror=document.title="taken"><b>bold</b>'
WIDE = {"width": 1280, "height": 900}

expect.set_options(timeout=1000 * PATIENCE)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    assert found, f"none of {', '.join(BROWSERS)} is installed, and CHROMIUM names none"
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])


@pytest.fixture
def start_server(redis_url: str, tmp_path: Path) -> Iterator[Callable[..., RunningServer]]:
    running = []

    def start(**fields: Any) -> RunningServer:
        server = run_server(Settings(data_dir=tmp_path, redis_url=redis_url, **fields))
        running.append(server)
        return server.__enter__()

    yield start
    for server in running:
        server.__exit__(None, None, None)


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens pages, and sees that none says a word of an error, or asks anybody else."""
    faults: list[str] = []
    contexts = []

    def open_(server: RunningServer, **options: Any) -> Page:
        context = browser.new_context(**{"viewport": WIDE, **options})
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda told: faults.append(told.text) if told.type == "error" else None)
        page.on(
            "request",
            lambda asked: (
                faults.append(asked.url) if not asked.url.startswith(server.url) else None
            ),
        )
        page.goto(server.url)
        return page

    yield open_
    for context in contexts:
        context.close()
    # Before the key was typed; a download; what was refused on purpose; a server that went.
    expected = re.compile(r"status of 401|^blob:|requires 'Trusted|net::ERR")
    assert [fault for fault in faults if not expected.search(fault)] == []


def refuse(task: Task) -> Any:
    return failure("no", f"No: {HOSTILE}") if getattr(task.request, "max_tokens", 0) == 13 else None


def fill_history(connection: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hours of a night's work, with a gap in it."""
    now = redis_time(connection)
    for slot in range(720):
        if 300 <= slot < 340:
            continue
        at = now - 7200 + 10 * slot
        waves = (slot * 7919) % 97 / 97
        sample = Sample(
            workers=2,
            queued=max(0, 5000 - 7 * slot),
            in_progress=64,
            jobs_ended=0.7,
            prompt_tokens=900 + 150 * waves,
            prefilled_tokens=300 + 90 * waves,
            decoded_tokens=410 + 60 * waves,
            memory_active=int(21e9 + 2e9 * waves),
            memory_cache=0,
            memory_ceiling=int(48e9),
        )
        with monkeypatch.context() as patch:
            patch.setattr("mlx_rq.jobs.queue.history.redis_time", lambda _, at=at: at)
            write_sample(connection, sample)


def batch_of(server: RunningServer, lines: int, name: str = HOSTILE) -> str:
    http = as_client(server, "any")
    body = {"model": "default", "messages": [{"role": "user", "content": "Hi"}]}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    content = "\n".join(json.dumps({"custom_id": str(n), **line}) for n in range(lines))
    file = http.post("/v1/files", files={"file": ("f", content)}, data={"purpose": "batch"})
    wanted = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    wanted |= {"input_file_id": file.json()["id"], "metadata": {"night": name}}  # type: ignore[dict-item]
    return str(http.post("/v1/batches", json=wanted).json()["id"])


def job_row(page: Page, job_id: str) -> Any:
    return page.locator("#jobs tr").filter(has=page.get_by_label(f"Open job {job_id}"))


def test_an_empty_queue(start_server: Any, open_page: Any) -> None:
    server = start_server()
    page = open_page(server)
    expect(page.locator("#workers")).to_contain_text("No worker is alive")
    expect(page.locator("#jobs")).to_contain_text("No jobs here.")
    expect(page.locator("#connection")).to_have_text("Live")
    expect(page.locator("figcaption").first).to_contain_text("no samples yet")
    page.screenshot(path=SCREENSHOTS / "page-empty.png", full_page=True)


def test_a_night_of_work(
    start_server: Any,
    start_worker: StartWorker,
    open_page: Any,
    connection: Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hostile texts everywhere, which stay texts; a job comes, fails, is found, opened, retried."""
    fill_history(connection, monkeypatch)
    engine = FakeEngine(hold=True, refuse=refuse, answer_with=answer_any)
    engine.totals.prompt_tokens, engine.totals.prefilled_tokens = 4_200_000, 1_300_000
    engine.totals.decoded_tokens = 2_345_678
    server = start_server(show_content=True, queue_unserved=True)
    start_worker(engine)
    batch = batch_of(server, 3)
    engine.wait_for_tasks(3)
    engine.release(*engine.task_ids[:2])
    chat: Any = {"messages": [{"role": "user", "content": HOSTILE}]}
    done = submit(**chat, store=True, metadata={"project": HOSTILE})
    engine.wait_for_tasks(4)
    engine.release(done.id)
    done.result(PATIENCE)
    failed = submit(prompt=HOSTILE, max_tokens=13)
    submit(prompt="x", model=HOSTILE)
    dark = open_page(server, color_scheme="dark")
    page = open_page(server)
    expect(job_row(page, failed.id)).to_contain_text(f"No: {HOSTILE}")
    expect(page.locator("#batches")).to_contain_text("2 of 3")
    expect(page.locator("#batches")).to_contain_text(HOSTILE)
    expect(page.locator("#queues")).to_contain_text(HOSTILE)
    expect(page.locator("#notes")).to_contain_text(HOSTILE)
    expect(page.locator("#charts path").first).to_be_visible()
    expect(page.locator("figcaption").first).to_contain_text("out 4")
    expect(job_row(dark, failed.id)).to_be_visible()

    # Found by its metadata, with the keyboard alone; opened, read, closed.
    page.keyboard.press("/")
    page.keyboard.type("project")
    expect(page.locator("#jobs tr")).to_have_count(1)
    page.get_by_label(f"Open job {done.id}").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Prompt", exact=True)).to_contain_text(HOSTILE)
    expect(page.get_by_label("Answer", exact=True)).to_have_text(f"chat for {done.id}")
    expect(page.get_by_label("The job's life").locator("li")).to_have_count(4)
    with page.expect_download() as download:
        page.get_by_role("button", name="Download").press("Enter")
    answer = json.loads(Path(download.value.path()).read_text())
    assert answer["result"]["choices"][0]["message"]["content"] == f"chat for {done.id}"
    page.keyboard.press("Escape")
    expect(page.locator("#job")).not_to_be_visible()
    page.locator("#search").fill("")

    # One that failed is retried; the new one runs, and is cancelled.
    page.locator("#status").select_option("failed")
    expect(page.locator("#jobs tr")).to_have_count(1)
    page.get_by_label(f"Open job {failed.id}").click()
    page.get_by_role("button", name="Retry").click()
    expect(page.locator("#job-title")).not_to_have_text(failed.id)
    expect(page.locator("#job-body")).to_contain_text("failed")  # it fails as the first one did
    page.get_by_role("button", name="Close").click()
    held = submit(**chat)
    page.locator("#status").select_option("in_progress")
    page.get_by_label(f"Open job {held.id}").click()
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Cancel the job").click()
    expect(page.locator("#job-body")).to_contain_text("Statuscancelled")
    assert held.status() == "cancelled"
    page.get_by_role("button", name="Close").click()

    # The batch moves by itself, and its answers are downloaded.
    engine.release()
    output = page.get_by_label(f"Output of {batch}")
    expect(output).to_be_visible()
    with page.expect_download() as download:
        output.click()
    assert len(Path(download.value.path()).read_text().splitlines()) == 3

    for open_ in (page, dark):
        assert open_.title() == "mlx-rq"
        assert open_.locator("img").count() == open_.locator("td b").count() == 0


def test_the_pictures_of_the_docs(
    start_server: Any,
    start_worker: StartWorker,
    open_page: Any,
    connection: Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill_history(connection, monkeypatch)
    engine = FakeEngine("Qwen3-4B-4bit", hold=True, refuse=refuse, answer_with=answer_any)
    engine.totals.prompt_tokens, engine.totals.prefilled_tokens = 4_200_000, 1_300_000
    engine.totals.decoded_tokens = 2_345_678
    server = start_server(show_content=True)
    start_worker(engine)
    batch_of(server, 30, "reviews, second pass")
    done = [submit(prompt=f"Name a colour of autumn, the {n}th.") for n in range(4)]
    engine.wait_for_tasks(20)
    engine.release(*(job.id for job in done), *engine.task_ids[:12])
    for job in done:
        job.result(PATIENCE)
    page = open_page(server)
    expect(page.locator("#batches")).to_contain_text("of 30")
    expect(job_row(page, done[0].id)).to_contain_text("completed")
    page.screenshot(path=SCREENSHOTS / "page-light.png", full_page=False)
    phone = open_page(server, color_scheme="dark", viewport={"width": 420, "height": 900})
    expect(phone.locator("figcaption").first).to_contain_text("out 4")
    phone.screenshot(path=SCREENSHOTS / "page-dark.png")
    assert phone.evaluate("document.documentElement.scrollWidth") == 420
    page.get_by_label(f"Open job {done[0].id}").click()
    expect(page.get_by_label("Answer", exact=True)).to_be_visible()
    page.screenshot(path=SCREENSHOTS / "page-job.png")


def test_no_text_becomes_html_even_by_a_fault_of_ours(start_server: Any, open_page: Any) -> None:
    """Chromium itself refuses: by the policy it takes trusted types only, and there are none."""
    page = open_page(start_server())
    for fault in (
        "document.getElementById('jobs').innerHTML = '<b>bold</b>'",
        "document.body.setAttribute('onclick', 'document.title = 1')",
        "document.createElement('script').text = 'document.title = 1'",
    ):
        tried = page.evaluate(
            f"() => {{ try {{ {fault} }} catch (error) {{ return error.name }} }}"
        )
        assert tried == "TypeError", fault


def test_a_key_is_asked_for_and_opens_what_is_ones_own(start_server: Any, open_page: Any) -> None:
    server = start_server(keys=ApiKeys(["ann: a", "bob: b"]), queue_unserved=True)
    job_id = as_client(server, "a").post("/v1/jobs", json={"prompt": "x"}).json()["id"]
    page = open_page(server)
    expect(page.locator("#key")).to_be_focused()
    expect(page.locator("#main")).not_to_be_visible()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key-note")).to_contain_text("Incorrect API key")
    page.keyboard.type("b")
    page.keyboard.press("Enter")
    expect(page.locator("#client")).to_have_text("bob")
    expect(page.locator("#jobs")).to_contain_text("No jobs here.")
    page.get_by_role("button", name="Forget the key").click()
    page.locator("#key").fill("a")
    page.keyboard.press("Enter")
    expect(page.get_by_label(f"Open job {job_id}")).to_be_visible()
    page.get_by_label(f"Open job {job_id}").click()
    expect(page.locator("#job-body")).to_contain_text("started without --show-content")


def test_it_says_so_when_the_server_is_gone(
    start_server: Any, open_page: Any, redis_url: str, tmp_path: Path
) -> None:
    with run_server(Settings(data_dir=tmp_path / "first", redis_url=redis_url)) as server:
        page = open_page(server)
        expect(page.locator("#connection")).to_have_text("Live")
    expect(page.locator("#connection")).to_contain_text("No connection")
