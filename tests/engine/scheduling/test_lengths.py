"""How long sequences are taken to be, by the requests that wait."""

from typing import Any

import pytest
from tiny import tiny_model

from mlx_rq.engine.scheduling.lengths import halfway
from mlx_rq.jobs.openai.job_request import JobRequest
from mlx_rq.jobs.openai.validation import validate


def completion(tokens: int, answer: int) -> JobRequest:
    return validate("completion", {"prompt": [1] * tokens, "max_tokens": answer})


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x" * 100}]}


@pytest.mark.parametrize(
    ("requests", "tokens"),
    [
        ([], None),
        ([completion(30, 10)], 35),
        ([completion(5, 2), completion(900, 20), completion(50, 4)], 52),
        ([completion(30, 1900)], 30 + 512),  # most answers end before
        ([completion(3000, 1)], None),  # longer than the context of 2,048
        ([completion(3000, 1), completion(30, 10)], 35),
        ([validate("completion", {"prompt": [[1] * 30, [1] * 70, [1] * 80], "max_tokens": 2})], 71),
        ([validate("chat", {**CHAT, "max_completion_tokens": 8})], 119 + 4),  # 19 are marks
    ],
)
def test_the_median_counts_with_half_of_its_answer(
    requests: list[JobRequest], tokens: int | None
) -> None:
    assert halfway(requests, tiny_model("llama")) == tokens
