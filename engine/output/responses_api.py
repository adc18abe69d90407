"""Turns the finished sequence of a responses task into OpenAI's Response object."""

import time
from typing import Any

from mlx_rq.engine.output.logprobs import chat_logprobs
from mlx_rq.engine.output.tool_calls import tool_calls
from mlx_rq.engine.output.writer import Answer, Finished, Writer
from mlx_rq.engine.scheduling.sequence import TokenSequence
from mlx_rq.engine.structured.output_format import Reading
from mlx_rq.engine.text.token_bytes import TokenBytes
from mlx_rq.jobs.openai.response_object import response_object
from mlx_rq.jobs.openai.responses import ResponsesRequest


class ResponsesWriter(Writer[ResponsesRequest]):
    """Writes Response objects: reasoning, message and function calls are items of their own.

    An answer that its budget cut off is `incomplete`, and so is the last item of it.
    """

    def write(self, request: ResponsesRequest, finished: Finished) -> Answer:
        now, submitted_at = time.time(), finished.task.submitted_at
        ((sequence, reading),) = finished.chosen
        cut = sequence.finish_reason == "length"
        output = _items(request, sequence, reading, finished.token_bytes)
        if cut and output:
            output[-1]["status"] = "incomplete"
        return response_object(
            request,
            sequence.task_id,
            status="incomplete" if cut else "completed",
            model=finished.model,
            created_at=now if submitted_at is None else submitted_at,
            completed_at=None if cut else now,
            output=output,
            usage=finished.usage,
        )


def _items(
    request: ResponsesRequest, sequence: TokenSequence, reading: Reading, token_bytes: TokenBytes
) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if reading.reasoning is not None:
        items.append(_reasoning(request, sequence.task_id, reading.reasoning))
    unsaid = bool(reading.calls) or (bool(items) and sequence.finish_reason == "length")
    if reading.content or not unsaid:
        logprobs = chat_logprobs(sequence, token_bytes)["content"] if request.wants_logprobs else []
        part = {
            "type": "output_text",
            "text": reading.content or "",
            "annotations": [],
            "logprobs": logprobs,
        }
        items.append(
            {
                "id": f"msg_{sequence.task_id}",
                "type": "message",
                "status": "completed",
                "role": "assistant",
                "content": [part],
            }
        )
    items += [
        {
            "id": call["id"].replace("call_", "fc_", 1),
            "type": "function_call",
            "status": "completed",
            "call_id": call["id"],
            **call["function"],
        }
        for call in tool_calls(reading, sequence.task_id, sequence.index)
    ]
    return items


def _reasoning(request: ResponsesRequest, task_id: str, text: str) -> dict[str, Any]:
    summary = request.reasoning and request.reasoning.summary
    return {
        "id": f"rs_{task_id}",
        "type": "reasoning",
        "status": "completed",
        "summary": [{"type": "summary_text", "text": text}] if summary else [],
        "content": [{"type": "reasoning_text", "text": text}],
    }
