"""The page's routes: what a browser gets, what is told to whom, and what buttons do."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from fakes import PATIENCE, FakeEngine, StartWorker, failure
from redis import Redis
from servers import RunningServer, StartServer, answer_any, as_client

from mlx_rq import submit
from mlx_rq.api_stub.page.assets import FILES
from mlx_rq.api_stub.page.events import COLUMNS
from mlx_rq.api_stub.settings import ApiKeys
from mlx_rq.engine.interface import Steps
from mlx_rq.jobs.queue.history import Sample, read_history, write_sample
from mlx_rq.jobs.queue.owners import owner_of

FROM_THE_PAGE = {"x-mlx-rq-page": "1"}
BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
HOSTILE = "</script><img src=x onerror=alert(1)>"


@contextmanager
def events(http: httpx.Client, **params: Any) -> Iterator[Iterator[tuple[str, Any]]]:
    """Follows the page's events, each with its name and its data."""
    with http.stream("GET", "/page/events", params=params, headers=FROM_THE_PAGE) as answer:
        assert answer.status_code == 200, answer.read()

        def read() -> Iterator[tuple[str, Any]]:
            name = ""
            for line in answer.iter_lines():
                field, _, value = line.partition(": ")
                if field == "event":
                    name = value
                elif field == "data":
                    yield name, json.loads(value)

        yield read()


def first(http: httpx.Client, **params: Any) -> dict[str, Any]:
    """What a page that was just opened is told, by the names of the events."""
    told = {}
    with events(http, **params) as came:
        for name, data in came:
            told[name] = data
            if name == "away":
                return told
    raise AssertionError("the stream ended")


def page_post(http: httpx.Client, path: str, **headers: str) -> httpx.Response:
    return http.post(path, headers={**FROM_THE_PAGE, **headers})


class TestFiles:
    def test_browsers_get_a_page_without_a_key_that_runs_nothing_but_its_own(
        self, start_server: StartServer
    ) -> None:
        http = start_server(keys=ApiKeys(["key"])).http
        page = http.get("/", headers=BROWSER)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = dict(
            rule.strip().partition(" ")[::2]
            for rule in page.headers["content-security-policy"].split(";")
        )
        assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["require-trusted-types-for"] == "'script'"
        loaded = re.findall(r'(?:src|href)="(/page[^"]+)"', page.text)
        for name in FILES:
            asset = http.get(f"/page/assets/{name}")
            assert asset.headers["x-content-type-options"] == "nosniff"
            loaded += re.findall(r'from "([^"]+)"', asset.text)
            for sink in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("):
                assert sink not in asset.text
        assert {*loaded} == {f"/page/assets/{name}" for name in FILES}
        assert not re.search(r"<script>|style=|\son\w+=|https?://", page.text)
        assert http.get("/page/assets/view.py").status_code == 404

    @pytest.mark.parametrize("accept", ["application/json", "*/*"])
    def test_api_clients_are_told_where_to_go(self, server: RunningServer, accept: str) -> None:
        answer = server.http.get("/", headers={"accept": accept})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")

    def test_api_clients_need_their_key_there(self, start_server: StartServer) -> None:
        assert start_server(keys=ApiKeys(["key"])).http.get("/").status_code == 401


class TestEvents:
    def test_tell_all_that_there_is_and_then_what_changes(
        self, server: RunningServer, start_worker: StartWorker, connection: Redis
    ) -> None:
        engine = FakeEngine(hold=True)
        start_worker(engine)
        job = submit(messages=[{"role": "user", "content": HOSTILE}])
        engine.wait_for_tasks(1)
        told = first(server.http)
        (worker,) = told["state"]["workers"]
        assert (worker["model"], worker["rates"]["now"]["generated_tokens"]) == ("fake", 0.0)
        (queue,) = told["state"]["queues"]
        assert (queue["model"], queue["in_progress"]) == ("default", 1)
        assert (queue["oldest_seconds"], queue["eta_seconds"]) == (None, None)
        assert [(row["id"], row["status"]) for row in told["jobs"]] == [(job.id, "in_progress")]
        assert (told["batches"], told["history"]["rows"], told["away"]) == ([], [], None)
        assert HOSTILE not in json.dumps(told)
        with events(server.http) as came:
            assert [next(came)[0] for _ in range(5)] == [
                *("state", "jobs", "batches", "history", "away")
            ]
            engine.release()
            job.result(timeout=PATIENCE)
            jobs = next(data for name, data in came if name == "jobs" and data[0]["ended_at"])
            assert jobs[0]["status"] == "completed"

    def test_the_history_comes_as_far_as_the_page_has_none(
        self, server: RunningServer, connection: Redis
    ) -> None:
        write_sample(connection, Sample(**dict(zip(COLUMNS[1:], range(1, 11), strict=True))))
        history = first(server.http)["history"]
        ((at, _),) = read_history(connection)
        assert history["columns"][:3] == ["at", "workers", "queued"]
        assert history["rows"] == [[at, *range(1, 11)]]
        assert "history" not in first(server.http, after=at)

    def test_jobs_are_found_by_status_id_model_and_metadata(
        self, server: RunningServer, start_worker: StartWorker
    ) -> None:
        def refuse(task: Any) -> Any:
            return failure("no") if task.request.max_tokens == 13 else None

        start_worker(FakeEngine(refuse=refuse))
        http = server.http
        chat: Any = {"messages": [{"role": "user", "content": "Hi"}]}
        tagged = submit(**chat, store=True, metadata={"project": "Bluebird"})
        failed, waits = submit(prompt="x", max_tokens=13), submit(prompt="x", model="Nobody's")
        tagged.result(timeout=PATIENCE)
        with pytest.raises(Exception, match="would not"):
            failed.result(timeout=PATIENCE)

        def found(**params: Any) -> list[str]:
            return [row["id"] for row in first(http, **params)["jobs"]]

        assert set(found()) == {tagged.id, failed.id, waits.id}
        assert found(status="failed") == [failed.id]
        assert found(search="bluebird") == [tagged.id]
        assert found(search=waits.id[:9]) == found(search="nobody") == [waits.id]
        assert found(search=failed.id, status="completed") == found(search="nothing") == []
        (row,) = first(http, status="failed")["jobs"]
        assert row["error"] == "The engine would not."

    @pytest.mark.parametrize("show_content", [False, True])
    def test_prompts_and_answers_are_told_only_where_the_operator_wants_that(
        self, start_server: StartServer, start_worker: StartWorker, show_content: bool
    ) -> None:
        server = start_server(show_content=show_content)
        start_worker()
        job = submit(messages=[{"role": "user", "content": HOSTILE}])
        job.result(timeout=PATIENCE)
        told = first(server.http, job=job.id)
        detail = told["job"]
        assert (HOSTILE in json.dumps(told)) is show_content
        assert detail["answer"] == (f"chat for {job.id}" if show_content else None)
        assert (detail["status"], detail["kind"], detail["finish_reason"]) == (
            *("completed", "chat", "stop"),
        )
        assert detail["usage"] == {"prompt": 3, "cached": 0, "completion": 2}
        assert told["state"]["shows_content"] is show_content
        assert first(server.http, job="none")["job"] == {"id": "none", "missing": True}

    def test_each_client_is_told_of_its_own_jobs_and_batches(
        self, start_server: StartServer
    ) -> None:
        server = start_server(
            keys=ApiKeys(["ann: a", "bob: b", "operator: o"]), queue_unserved=True
        )
        ann = as_client(server, "a")
        job_id = ann.post("/v1/jobs", json={"prompt": "x"}).json()["id"]
        file = ann.post("/v1/files", files={"file": ("f", "{}")}, data={"purpose": "batch"})
        body = {"endpoint": "/v1/responses", "completion_window": "24h"}
        batch = ann.post("/v1/batches", json={**body, "input_file_id": file.json()["id"]}).json()

        def seen(key: str) -> tuple[list[str], list[str], bool]:
            told = first(as_client(server, key), job=job_id, search=job_id)
            batches = first(as_client(server, key), search=batch["id"][:12])["batches"]
            jobs, batches = ([one["id"] for one in found] for found in (told["jobs"], batches))
            assert told["batches"] == []
            return jobs, batches, "missing" not in told["job"]

        there = [job_id], [batch["id"]], True
        assert {key: seen(key) for key in "abo"} == {"a": there, "b": ([], [], False), "o": there}

    def test_whose_prefix_a_job_shared_is_told_to_who_may_see_all_jobs(
        self, start_server: StartServer, start_worker: StartWorker
    ) -> None:
        engine = FakeEngine()
        engine.took = Steps(0.0, 0.0, 0.0, preempted=1, first_with="0123456789abcdef")
        start_worker(engine, name="mac (first for tests)")
        server = start_server(keys=ApiKeys(["ann: a", "operator: o"]))
        ann = as_client(server, "a")
        job_id = ann.post("/v1/jobs", json={"prompt": "x"}).json()["id"]
        assert ann.get(f"/v1/jobs/{job_id}?wait=50").json()["status"] == "completed"
        lives = {key: first(as_client(server, key), job=job_id)["job"]["life"] for key in "ao"}
        admitted = {key: life[3] for key, life in lives.items()}
        detail = "0 tokens computed for others, put back 1 x to make room"
        assert admitted["o"].pop("first_for") == "0123456789ab"
        assert admitted["a"] == admitted["o"]
        assert (admitted["a"]["name"], admitted["a"]["detail"]) == ("admitted", detail)
        assert {life[1]["detail"] for life in lives.values()} == {
            "by mac (first for tests), attempt 1"
        }

    def test_the_last_failures_are_told_to_who_may_see_all_jobs(
        self, start_server: StartServer, start_worker: StartWorker
    ) -> None:
        start_worker(FakeEngine(refuse=lambda task: failure("too_much", "No.")))
        server = start_server(keys=ApiKeys(["ann: a", "operator: o"]))
        ann = as_client(server, "a")
        job_id = ann.post("/v1/jobs", json={"prompt": "x"}).json()["id"]
        assert ann.get(f"/v1/jobs/{job_id}?wait=50").json()["status"] == "failed"
        failures = {key: first(as_client(server, key))["state"]["failures"] for key in "ao"}
        assert failures["a"] == []
        assert [(one["id"], one["code"]) for one in failures["o"]] == [(job_id, "too_much")]
        refused = server.http.get("/page/events", headers=FROM_THE_PAGE)
        assert refused.status_code == 401


class TestButtons:
    def test_work_from_the_page_only(self, start_server: StartServer) -> None:
        """An origin that may use the API may not press the operator's buttons."""
        server = start_server(allowed_origins=("http://friend.example",))
        http = server.http
        job = submit(prompt="x")
        path = f"/page/jobs/{job.id}/cancel"
        refused: list[tuple[dict[str, str], int]] = [
            ({"x-mlx-rq-page": "2"}, 400),
            ({"sec-fetch-site": "cross-site"}, 403),
            ({"sec-fetch-site": "same-site", "origin": "http://friend.example"}, 403),
            ({"origin": "http://friend.example"}, 403),
        ]
        for headers, status in refused:
            assert page_post(http, path, **headers).status_code == status, headers
        assert http.post(path).status_code == 400
        assert job.status() == "queued"
        own: list[dict[str, str]] = [{}, {"sec-fetch-site": "same-origin"}, {"origin": server.url}]
        for headers in own:
            assert page_post(http, path, **headers).status_code == 200, headers
            assert job.status() == "cancelled"

    def test_retry_asks_the_same_again_for_whom_it_was(
        self, start_server: StartServer, start_worker: StartWorker, redis_url: str
    ) -> None:
        server = start_server(keys=ApiKeys(["ann: a", "operator: o"]))
        engine = FakeEngine(answer_with=answer_any)
        start_worker(engine)
        ann, operator = as_client(server, "a"), as_client(server, "o")
        said = {"model": "default", "input": "And now?"}
        earlier = ann.post("/v1/responses", json={**said, "input": "Once"}).json()["id"]
        engine.hold()
        going_on = {**said, "previous_response_id": earlier}
        job_id = ann.post("/v1/jobs", params={"priority": "high"}, json=going_on).json()["id"]
        engine.wait_for_tasks(2)
        path = f"/page/jobs/{job_id}"
        refused = page_post(operator, f"{path}/retry")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "job_not_failed")
        assert page_post(ann, f"{path}/cancel").json()["status"] == "cancelled"
        engine.release()
        again = page_post(operator, f"{path}/retry")
        assert (again.status_code, again.json()["priority"]) == (202, "high")
        assert again.json()["id"] != job_id
        assert owner_of(redis_url, again.json()["id"]) == "ann"
        ended = ann.get(f"/v1/jobs/{again.json()['id']}?wait=50").json()
        assert ended["status"] == "completed"
        first_try, second_try = (
            task.request.input for task in engine.added if task.request.input != "Once"
        )
        assert second_try == first_try  # what came before is in it once
