"""Counts the tokens of a prompt: all that there is to a task of that kind."""

from mlx_rq.engine.formats.model_format import ModelFormat
from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.engine.output.writer import Answer, Writer
from mlx_rq.engine.prompts.render import render
from mlx_rq.engine.prompts.truncation import generated_from
from mlx_rq.jobs.openai.token_count import TokenCountRequest


class TokenCountWriter(Writer[TokenCountRequest]):
    """Writes the count: of several prompts the sum, as usage tells it."""

    def at_once(
        self, request: TokenCountRequest, model: LoadedModel, model_format: ModelFormat
    ) -> Answer:
        generated = generated_from(request, model, model_format)
        prompts = render(generated, model.tokenizer, model.vocab_size, model_format)
        return {"object": request.object_name, "input_tokens": sum(map(len, prompts))}
