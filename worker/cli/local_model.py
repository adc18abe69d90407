"""What of a model's judgement needs no weights: its tokenizer, its template and its context."""

import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_rq.jobs.openai.job_request import JobRequest
from mlx_rq.jobs.openai.requests import Request


@dataclass(frozen=True)
class LocalModel:
    """The tokenizer of a model that lies on this machine."""

    tokenizer: Any
    context_length: int

    def prompts(self, request: JobRequest, generated_from: Request) -> Sequence[Sequence[int]]:
        """Gives the prompts of a request as tokens; raises RequestError where a worker would."""
        from mlx_rq.engine.formats.model_format import model_format_of
        from mlx_rq.engine.prompts.render import render
        from mlx_rq.engine.scheduling.choices import budget_of

        with _quiet():
            # All of its tokens: `vocab_size` leaves out those that templates write.
            model_format = model_format_of(self.tokenizer)
            prompts = render(generated_from, self.tokenizer, len(self.tokenizer), model_format)
        if not request.truncates:
            for prompt in prompts:
                budget_of(generated_from, len(prompt), self.context_length)
        return prompts


def find_local_model(model: str) -> LocalModel | None:
    """Finds a model on this machine; None where it, or the engine, is not installed here."""
    try:
        from huggingface_hub import snapshot_download
        from mlx_lm.utils import load_tokenizer

        from mlx_rq.engine.models.load import KNOWN_MODELS, context_length_of, find_pulled
    except ModuleNotFoundError:
        return None
    try:
        path = find_pulled(model) if model in KNOWN_MODELS else Path(model)
        if path is not None and not path.is_dir():
            path = Path(snapshot_download(model, local_files_only=True))
        if path is None:
            return None
        config = json.loads((path / "config.json").read_text())
        with _quiet():
            return LocalModel(load_tokenizer(path), context_length_of(config))
    except (OSError, ValueError):  # not here, or not a model; the hub's errors are among these
        return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps libraries from warning of what is none of the user's business, as of long prompts."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)
