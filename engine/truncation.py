"""Shortens a conversation that does not fit the context, where the request allows it."""

from bisect import bisect_left

from mlx_rq.engine.dialect import Dialect
from mlx_rq.engine.models import LoadedModel
from mlx_rq.engine.prompt import render
from mlx_rq.jobs.messages import SystemMessage, ToolMessage
from mlx_rq.jobs.requests import ChatRequest

_LEAST_ANSWER = 16
"""Tokens that are left for an answer that has no budget of its own."""


def fitted(request: ChatRequest, model: LoadedModel, dialect: Dialect) -> ChatRequest:
    """Drops the oldest turns, as few as will do, so that prompt and answer fit the context.

    System messages and the last turn stay; a tool's result goes with the call that asked for it.
    Where even that does not fit, the shortest is given.
    """
    turns = [m for m in request.messages if not isinstance(m, SystemMessage)]
    begins = [i for i, turn in enumerate(turns) if not isinstance(turn, ToolMessage)] or [0]

    def beginning_at(begin: int) -> ChatRequest:
        dropped = {id(turn) for turn in turns[:begin]}
        kept = [message for message in request.messages if id(message) not in dropped]
        return request.model_copy(update={"messages": kept})

    def fits(begin: int) -> bool:
        (prompt,) = render(beginning_at(begin), model.tokenizer, model.vocab_size, dialect)
        return len(prompt) + (request.budget or _LEAST_ANSWER) <= model.context_length

    first = bisect_left(begins, True, key=fits)
    return beginning_at(begins[min(first, len(begins) - 1)])
