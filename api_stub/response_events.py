"""The events of a streamed response: items are added, grow, and are done, then the whole is.

An item is opened by its first text, and closed when the next one begins or the response ends. The
calls of functions, the summary of the reasoning and logprobs are known at the end only.

Source: OpenAI's API reference for the streaming events of Responses; its client's own types.
"""

from collections.abc import Mapping
from typing import Any

from mlx_rq.api_stub.streaming import DONE, Sent, StartedOver, data_event
from mlx_rq.jobs.client.job import Job
from mlx_rq.jobs.openai.requests import asked_model
from mlx_rq.jobs.openai.response_object import response_object
from mlx_rq.jobs.openai.responses import ResponsesRequest
from mlx_rq.jobs.queue.stream import Delta, Kind

_KINDS: Mapping[str, Kind] = {"reasoning": "reasoning", "message": "content"}
"""Which text of the answer an item's text is."""


class ResponseEvents:
    """Writes the events of one response, without those whose numbers the client has seen."""

    def __init__(
        self, job: Job, request: ResponsesRequest, created_at: float, *, seen: int = -1
    ) -> None:
        """`seen` is the number of the last event that the client has."""
        self._job_id = job.id
        self._seen = seen
        self._request = request
        self._created_at = created_at
        self._sent = Sent()
        self._number = 0
        self._opened: list[str] = []
        """The types of the items that were added, in order."""
        self._closed = 0
        """How many of them are done."""

    def begin(self) -> list[str]:
        """Writes that the response was created, and that it is on its way."""
        if self._number:
            return []
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def more(self, delta: Delta) -> list[str]:
        """Writes what a delta adds to what was sent; raises StartedOver where it contradicts."""
        new = self._sent.new(delta)
        if not new:
            return []
        item = "reasoning" if delta.kind == "reasoning" else "message"
        return [*self.begin(), *self._open(item), self._text_delta(item, new)]

    def end(self, result: Mapping[str, Any]) -> list[str]:
        """Writes what is missing of every item, and the response as it stands in the result."""
        items = result["output"]
        if self._opened != [item["type"] for item in items[: len(self._opened)]]:
            raise StartedOver
        events = self.begin()
        for index, item in enumerate(items):
            if item["type"] == "function_call":
                events += self._call(item)
            else:
                events += self._text_item(index, item)
        events.append(self._event(f"response.{result['status']}", response=result))
        return [*events, DONE]

    def failed(self, error: Mapping[str, Any]) -> list[str]:
        """Writes the response as one that failed; also a cancelled one, with why."""
        return [
            *self.begin(),
            self._event("response.failed", response=self._response("failed", error)),
            DONE,
        ]

    def _response(self, status: Any, error: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return response_object(
            self._request,
            self._job_id,
            status=status,
            model=asked_model(self._request.model, self._request.adapters),
            created_at=self._created_at,
            error=error,
        )

    def _event(self, name: str, /, **fields: Any) -> str:
        number, self._number = self._number, self._number + 1
        if number <= self._seen:
            return ""
        return data_event({"type": name, "sequence_number": number, **fields}, name)

    def _open(self, item: str) -> list[str]:
        """Adds an item where it is not the one that grows; raises StartedOver where it was done."""
        if item in self._opened:
            if self._opened.index(item) < self._closed:
                raise StartedOver
            return []
        events = self._close_sent() if self._closed < len(self._opened) else []
        self._opened.append(item)
        empty: dict[str, Any] = {"role": "assistant", "content": []}
        if item == "reasoning":
            empty = {"summary": [], "content": []}
        added = {"id": self._item_id(item), "type": item, "status": "in_progress", **empty}
        place = {"item_id": added["id"], "output_index": len(self._opened) - 1}
        return [
            *events,
            self._added(added),
            self._event("response.content_part.added", **place, content_index=0, part=_part(item)),
        ]

    def _added(self, item: Mapping[str, Any]) -> str:
        index = len(self._opened) - 1
        return self._event("response.output_item.added", output_index=index, item=item)

    def _item_id(self, item: str) -> str:
        """Names an item as the worker does."""
        return f"{'rs' if item == 'reasoning' else 'msg'}_{self._job_id}"

    def _text_delta(self, item: str, text: str) -> str:
        place = {**self._place(item, self._opened.index(item)), "delta": text}
        if item == "reasoning":
            return self._event("response.reasoning_text.delta", **place)
        return self._event("response.output_text.delta", **place, logprobs=[])

    def _place(self, item: str, index: int) -> dict[str, Any]:
        return {"item_id": self._item_id(item), "output_index": index, "content_index": 0}

    def _close_sent(self) -> list[str]:
        """Ends the item that grew with what was sent of it: the next one begins."""
        item = self._opened[-1]
        text = self._sent.text(0, _KINDS[item])
        part = _part(item, text)
        summary: dict[str, Any] = {"summary": []} if item == "reasoning" else {}
        whole = {"id": self._item_id(item), "type": item, "status": "completed", "content": [part]}
        if item == "reasoning" and self._request.reasoning and self._request.reasoning.summary:
            summary = {"summary": [{"type": "summary_text", "text": text}]}
        return self._close(len(self._opened) - 1, {**whole, **summary})

    def _text_item(self, index: int, item: Mapping[str, Any]) -> list[str]:
        """Writes what is missing of an item that holds text."""
        kind = item["type"]
        rest = self._sent.rest(0, _KINDS[kind], item["content"][0]["text"])
        if index < self._closed:
            if rest:
                raise StartedOver  # it was told as done, without this
            return []
        events = self._open(kind)
        if rest:
            events.append(self._text_delta(kind, rest))
        return [*events, *self._close(index, item)]

    def _close(self, index: int, item: Mapping[str, Any]) -> list[str]:
        kind, part = item["type"], item["content"][0]
        place = self._place(kind, index)
        if kind == "reasoning":
            events = [self._event("response.reasoning_text.done", **place, text=part["text"])]
        else:
            told = {"text": part["text"], "logprobs": part["logprobs"]}
            events = [self._event("response.output_text.done", **place, **told)]
        events.append(self._event("response.content_part.done", **place, part=part))
        for number, summary in enumerate(item.get("summary", ())):
            events += self._summary(index, number, summary)
        return [*events, self._done(index, item)]

    def _done(self, index: int, item: Mapping[str, Any]) -> str:
        self._closed += 1
        return self._event("response.output_item.done", output_index=index, item=item)

    def _summary(self, index: int, number: int, part: Mapping[str, Any]) -> list[str]:
        place = {
            "item_id": self._item_id("reasoning"),
            "output_index": index,
            "summary_index": number,
        }
        text, name = part["text"], "response.reasoning_summary"
        return [
            self._event(f"{name}_part.added", **place, part={**part, "text": ""}),
            self._event(f"{name}_text.delta", **place, delta=text),
            self._event(f"{name}_text.done", **place, text=text),
            self._event(f"{name}_part.done", **place, part=part),
        ]

    def _call(self, item: Mapping[str, Any]) -> list[str]:
        """Writes a call of a function, which is known as a whole."""
        self._opened.append("function_call")
        index = len(self._opened) - 1
        place = {"item_id": item["id"], "output_index": index}
        name, arguments = "response.function_call_arguments", item["arguments"]
        return [
            self._added({**item, "arguments": "", "status": "in_progress"}),
            self._event(f"{name}.delta", **place, delta=arguments),
            self._event(f"{name}.done", **place, name=item["name"], arguments=arguments),
            self._done(index, item),
        ]


def _part(item: str, text: str = "") -> dict[str, Any]:
    """A part of an item that holds text."""
    if item == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
