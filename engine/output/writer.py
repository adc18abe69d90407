"""What writes the answers of one kind of job, and what it writes them from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mlx_rq.engine.formats.model_format import ModelFormat
from mlx_rq.engine.interface import Task
from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.engine.scheduling.sequence import TokenSequence
from mlx_rq.engine.structured.output_format import Reading
from mlx_rq.engine.text.token_bytes import TokenBytes
from mlx_rq.jobs.openai.job_request import JobRequest

RequestType = TypeVar("RequestType", bound=JobRequest)
Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Finished:
    """A task whose sequences are done."""

    task: Task
    chosen: Sequence[tuple[TokenSequence, Reading]]
    """What is answered with, in the order of the choices."""
    usage: dict[str, Any]
    """As a chat's answer tells it."""
    token_bytes: TokenBytes
    model: str
    fingerprint: str


class Writer(Generic[RequestType]):
    """Writes the answers of one kind of job."""

    def at_once(
        self, request: RequestType, model: LoadedModel, model_format: ModelFormat
    ) -> Answer | None:
        """Writes an answer for which nothing is generated; None for kinds that generate."""
        return None

    def write(self, request: RequestType, finished: Finished) -> Answer:
        """Writes the response object. Ids are made of the task's, so that it names its job."""
        raise NotImplementedError
