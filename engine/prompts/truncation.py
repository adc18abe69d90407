"""Shortens a conversation that does not fit the context, where the request allows it."""

from bisect import bisect_left
from functools import cache

from mlx_rq.engine.formats.model_format import ModelFormat
from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.engine.prompts.render import render
from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.openai.job_request import JobRequest
from mlx_rq.jobs.openai.messages import (
    FunctionMessage,
    SystemMessage,
    ToolMessage,
    UserMessage,
)
from mlx_rq.jobs.openai.requests import ChatRequest, Request

_LEAST_ANSWER = 16
"""Tokens that are left for an answer that has no budget of its own."""


def generated_from(request: JobRequest, model: LoadedModel, model_format: ModelFormat) -> Request:
    """Gives what a job is generated from, shortened to the context where it may be."""
    generated = request.generated_from()
    if request.truncates and isinstance(generated, ChatRequest):
        return fitted(generated, model, model_format)
    return generated


def fitted(request: ChatRequest, model: LoadedModel, model_format: ModelFormat) -> ChatRequest:
    """Drops the oldest turns, as few as will do, so that prompt and answer fit the context.

    System messages and the last turn stay; a tool's result goes with the call that asked for it.
    Where the template demands that a user begins, a conversation begins at a user's turn. Where
    even the shortest does not fit, that is given.
    """
    turns = [m for m in request.messages if not isinstance(m, SystemMessage)]
    results = ToolMessage | FunctionMessage
    begins = [i for i, turn in enumerate(turns) if not isinstance(turn, results)] or [0]
    by_user = [i for i, turn in enumerate(turns) if isinstance(turn, UserMessage)]

    def beginning_at(begin: int) -> ChatRequest:
        dropped = {id(turn) for turn in turns[:begin]}
        kept = [message for message in request.messages if id(message) not in dropped]
        return request.model_copy(update={"messages": kept})

    @cache
    def length(begin: int) -> int | None:
        """Counts the tokens of the conversation from a turn on; None where it is refused."""
        try:
            (prompt,) = render(beginning_at(begin), model.tokenizer, model.vocab_size, model_format)
        except RequestError:
            return None
        return len(prompt)

    def allowed(begin: int) -> int | None:
        """Gives the turn, else the next of a user's, at which a conversation may begin."""
        places = [begin, *(i for i in by_user if i > begin)][:2]
        return next((place for place in places if length(place) is not None), None)

    def fits(begin: int) -> bool:
        place = allowed(begin)
        # Behind the last turn at which it may begin: what fits must be sought before.
        tokens = 0 if place is None else length(place) or 0
        return tokens + (request.budget or _LEAST_ANSWER) <= model.context_length

    first = bisect_left(begins, True, key=fits)
    place = allowed(begins[min(first, len(begins) - 1)])
    if place is None:
        place = by_user[-1] if by_user else 0
    return beginning_at(place)
