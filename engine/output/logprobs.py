"""Writes logprobs as OpenAI's chat and legacy completions do."""

from collections.abc import Sequence
from typing import Any

from mlx_rq.engine.sampling.logprobs import TokenLogprobs
from mlx_rq.engine.scheduling.sequence import TokenSequence
from mlx_rq.engine.text.token_bytes import TokenBytes

_LEAST = -9999.0
"""What stands for minus infinity, which JSON cannot say; OpenAI's own choice."""


def chat_logprobs(sequence: TokenSequence, token_bytes: TokenBytes) -> dict[str, Any]:
    """Writes a chat's logprobs: of all tokens up to the stop, also of reasoning and tool calls."""
    return {
        "content": [
            {
                **_entry(token_bytes.spell(token), known.logprob),
                "top_logprobs": [_entry(token_bytes.spell(id), value) for id, value in known.top],
            }
            for token, known in zip(_shown(sequence, token_bytes), sequence.logprobs, strict=False)
        ],
        "refusal": None,
    }


def legacy_logprobs(
    sequence: TokenSequence, token_bytes: TokenBytes, text: str, prompt_text: str
) -> dict[str, Any]:
    """Writes a completion's logprobs; with echo, its prompt's tokens come first.

    `text` is the continuation alone. Offsets count characters of the text that is returned.
    """
    shown = _shown(sequence, token_bytes)
    offsets = [len(prompt_text) + at for at in token_bytes.offsets(shown, text)]
    known: list[TokenLogprobs | None] = [*sequence.logprobs[: len(shown)]]
    if sequence.score is not None:
        offsets = token_bytes.offsets(sequence.prompt, prompt_text) + offsets
        shown, known = [*sequence.prompt, *shown], [*sequence.score.scores, *known]
    names = [_name(token_bytes.spell(token)) for token in shown]
    return {
        "tokens": names,
        "token_logprobs": [one and max(one.logprob, _LEAST) for one in known],
        "top_logprobs": [
            one and _with_chosen(name, one, token_bytes)
            for name, one in zip(names, known, strict=True)
        ],
        "text_offset": offsets,
    }


def _shown(sequence: TokenSequence, token_bytes: TokenBytes) -> list[int]:
    """The tokens of which something is in the text: those before the stop string."""
    tokens = list(sequence.text.tokens)
    cut = sequence.text.stopped_at
    if cut is None:
        return tokens
    whole = sequence.text.uncut
    offsets = token_bytes.offsets(tokens, whole, marks=sequence.text.marks)
    return [token for token, at in zip(tokens, offsets, strict=True) if at < cut]


def _entry(spelled: bytes, logprob: float) -> dict[str, Any]:
    """A part of a character is shown as `\\xe2\\x82`."""
    token = spelled.decode(errors="backslashreplace")
    return {"token": token, "logprob": max(logprob, _LEAST), "bytes": list(spelled)}


def _name(spelled: bytes) -> str:
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _with_chosen(name: str, known: TokenLogprobs, token_bytes: TokenBytes) -> dict[str, float]:
    """The likeliest tokens, and the chosen one in any case. Of tokens of one name, the likelier."""
    likeliest: dict[str, float] = {}
    for token, value in known.top:
        likeliest.setdefault(_name(token_bytes.spell(token)), max(value, _LEAST))
    return likeliest | {name: max(known.logprob, _LEAST)} if name not in likeliest else likeliest


def mean_logprob(sequence: TokenSequence) -> float:
    """How likely an answer is, a token; one without tokens comes last."""
    values: Sequence[float] = [one.logprob for one in sequence.logprobs]
    return sum(values) / len(values) if values else _LEAST
