"""What the server says of itself: `/openapi.json`, and `/docs` without the internet."""

import re
from typing import Any

import pytest
from servers import RunningServer, StartServer

from mlx_rq.api_stub.settings import ApiKeys


@pytest.fixture
def guarded(start_server: StartServer) -> RunningServer:
    return start_server(keys=ApiKeys(["key"]))


def _description(server: RunningServer) -> Any:
    return server.http.get("/openapi.json").json()


def test_the_page_needs_no_key_and_no_internet(guarded: RunningServer) -> None:
    page = guarded.http.get("/docs")
    urls = re.findall(r"""(?:src|href|url)(?:=|: )["']([^"']+)["']""", page.text)
    assert {"/openapi.json", "/docs/assets/swagger-ui-bundle.js"} <= set(urls)
    for url in urls:
        assert guarded.http.get(url).status_code == 200, url
    assert guarded.http.get("/docs/assets/../../v1/models").status_code == 401
    assert guarded.http.get("/docs/assets/%2e%2e/core.py").status_code == 404


def test_every_answer_has_a_shape(server: RunningServer) -> None:
    paths = _description(server)["paths"]
    without = [
        f"{verb} {path} {status}"
        for path, operations in paths.items()
        for verb, operation in operations.items()
        for status, answer in operation["responses"].items()
        if not answer["content"].get("application/json", {}).get("schema")
    ]
    assert without == ["get /v1/files/{file_id}/content 200", "get /metrics 200"]
    assert "422" not in {
        status
        for operations in paths.values()
        for operation in operations.values()
        for status in operation["responses"]
    }


def test_keys_are_described_where_they_are_asked_for(
    server: RunningServer, guarded: RunningServer
) -> None:
    open_to_all = [
        f"{verb} {path}"
        for path, operations in _description(guarded)["paths"].items()
        for verb, operation in operations.items()
        if "security" not in operation
    ]
    assert open_to_all == ["get /health"]
    schemes = _description(guarded)["components"]["securitySchemes"]
    assert schemes == {"HTTPBearer": {"type": "http", "scheme": "bearer"}}
    assert "securitySchemes" not in _description(server)["components"]
