"""How many tokens sequences hold, by the requests that they are to come from."""

import logging
from collections.abc import Iterable
from statistics import median_low

from mlx_rq.engine.formats.model_format import model_format_of
from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.engine.prompts.render import render
from mlx_rq.engine.prompts.truncation import generated_from
from mlx_rq.engine.scheduling.choices import budget_of
from mlx_rq.jobs.openai.job_request import JobRequest

logger = logging.getLogger("mlx_rq.engine")

_LONGEST_ANSWER = 1024
"""Most answers end before their budget does; this much of it counts."""


def halfway(requests: Iterable[JobRequest], model: LoadedModel) -> int | None:
    """Says how many tokens a sequence of such requests holds when half its answer is written.

    The median of those that can be rendered; None where there are none.
    """
    model_format = model_format_of(model.tokenizer)
    lengths = []
    for request in requests:
        try:
            generated = generated_from(request, model, model_format)
            for prompt in render(generated, model.tokenizer, model.vocab_size, model_format):
                budget = budget_of(generated, len(prompt), model.context_length)
                lengths.append(len(prompt) + min(budget, _LONGEST_ANSWER) // 2)
        except Exception as error:  # it is that request's alone, which will be told
            logger.debug("a request that waits has no length: %s", error)
    return median_low(lengths) if lengths else None
