"""The form of a sequence's answer: its constraint before, and the reading of its text after."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_rq.engine.formats.model_format import (
    ModelFormat,
    model_format_of,
    reasoning_is_open,
    without_reasoning,
)
from mlx_rq.engine.formats.parser import (
    ParsedCall,
    ParseFault,
    count_reasoning,
    split_calls,
    split_reasoning,
)
from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.engine.structured.compilers import Compilation, Compilers
from mlx_rq.engine.structured.constraint import Compiled, Constraint, GrammarFault
from mlx_rq.engine.structured.grammar import Grammar, Tools, grammar_of, tools_of
from mlx_rq.engine.structured.json_schema import Check, shape_fault
from mlx_rq.engine.structured.llguidance_backend import Guidance
from mlx_rq.jobs.openai.errors import ErrorObject, RequestError, error_object
from mlx_rq.jobs.openai.requests import Request


@dataclass(slots=True)
class Reading:
    """What a sequence's text says."""

    content: str | None
    reasoning: str | None = None
    calls: list[ParsedCall] = field(default_factory=list)
    named_call: bool = False
    warnings: list[dict[str, str]] = field(default_factory=list)


class InvalidAnswer(ValueError):
    """A finished text is not what was asked for: never a result."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.error: ErrorObject = error_object(
            message, code="invalid_structured_output", type="server_error"
        )


class OutputFormats:
    """Makes the forms of the sequences of one model."""

    def __init__(self, model: LoadedModel, *, close_json: bool = False) -> None:
        self._tokenizer = model.tokenizer
        self._close_json = close_json
        self.model_format = model_format_of(model.tokenizer)
        self._text_format = without_reasoning(self.model_format)
        guidance = Guidance(model, self.model_format.end_marks, self.model_format.end_text)
        self._compilers = Compilers(guidance.compile, set_up=guidance.set_up)

    def close(self) -> None:
        """Has the compiling threads end: they hold on to the model's tokenizer."""
        self._compilers.close()

    def wait(self, seconds: float = 0.005) -> None:
        """Lets the compiling threads have the processor, for a caller who has nothing to do."""
        time.sleep(seconds)

    def output_format_of(
        self,
        request: Request,
        prompt: Sequence[int],
        *,
        budget_field: str = "max_completion_tokens",
    ) -> "OutputFormat":
        """Says what the answers to a prompt must look like, and has the grammar compiled.

        `budget_field` is what the budget is called in the request as it was sent. Raises
        RequestError where the model cannot do what is asked.
        """
        in_turns = request.in_turns
        model_format = self.model_format if in_turns else self._text_format
        reasoning = reasoning_is_open(self._tokenizer, prompt) if in_turns else False
        grammar = grammar_of(request, model_format, reasoning)
        return OutputFormat(
            request,
            model_format,
            reasoning,
            tools_of(request),
            grammar,
            None if grammar is None else self._compilers.submit(grammar),
            self._close_json,
            budget_field,
        )


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What one sequence's answer must look like."""

    request: Request
    model_format: ModelFormat
    reasoning: bool | None
    tools: Tools
    grammar: Grammar | None
    compilation: Compilation | None
    close_json: bool
    budget_field: str

    @property
    def key(self) -> tuple[object, ...]:
        """What of the form shapes the answer."""
        return (self.grammar and self.grammar.lark, self.reasoning, self.shows_marks)

    @property
    def ready(self) -> bool:
        """Whether `start` need not wait."""
        return self.compilation is None or self.compilation.ready

    @property
    def shows_marks(self) -> bool:
        """Whether special tokens mean something in the text."""
        return bool(self.tools.usable) or self.model_format.think_start is not None

    def reasoning_tokens(
        self, tokens: Sequence[int], decode: Callable[[Sequence[int]], str]
    ) -> int:
        """Counts the tokens of the reasoning, its marks not counted."""
        model_format = self.model_format
        if model_format.think_start is None:
            return 0
        marks = model_format.think_start_tokens, model_format.think_end_tokens
        return count_reasoning(tokens, *marks, is_open=self.reasoning is True, decode=decode)

    def start(self, budget: int) -> Constraint | None:
        """Gives a sequence its constraint; raises RequestError where its grammar has a fault."""
        if self.compilation is None or self.grammar is None:
            return None
        try:
            return self.compilation.result().start(budget, close=self.close_json)
        except GrammarFault as fault:
            if not self.grammar.parts:
                raise RequestError(f"Invalid request: {fault}", code=None) from None
            raise self.grammar.parts[fault.part].error(str(fault)) from None

    @property
    def _compiled(self) -> Compiled | None:
        """What the grammar came to; None where there is none, or none yet. Never waits."""
        return None if self.compilation is None else self.compilation.compiled

    def read(
        self, text: str, finish_reason: str, constraint: Constraint | None, budget: int
    ) -> Reading:
        """Takes a sequence's text apart and validates it; raises InvalidAnswer.

        A text that its budget cut off (`length`) is not validated, and warns. Never waits for the
        grammar: of a sequence that did not start, nothing is validated, and nothing warned of.
        """
        if constraint is not None and constraint.fault is not None:
            raise InvalidAnswer(f"The constraint could not go on: {constraint.fault}")
        finished = finish_reason == "stop"
        start, end = self.model_format.think_start, self.model_format.think_end
        reasoning, rest = split_reasoning(text, start, end, is_open=self.reasoning is True)
        reasoning = None if reasoning is None else self.without_specials(reasoning)
        reading = self._read_calls(rest, finished)
        reading.reasoning = reasoning
        if finished:
            self._validate(reading, constraint)
        reading.warnings += self._warnings(finished, constraint, budget)
        return reading

    def _read_calls(self, text: str, finished: bool) -> Reading:
        model_format = self.model_format
        if self.request.shape is not None:
            calls = self.tools.usable and text.lstrip().startswith(model_format.call_start)
            if not calls:  # a shape's text is all its own: what looks like a mark is none
                return Reading(text)
        if not self.tools.usable:
            return Reading(self.without_specials(text))
        try:
            found = split_calls(
                text,
                model_format.call_start,
                model_format.call_end,
                self._calls_in,
                finished=finished,
                names=[tool.function.name for _, tool in self.tools.usable],
                argument=model_format.argument,
            )
        except ParseFault as fault:
            raise InvalidAnswer(f"The model's tool call is not valid: {fault}.") from None
        content = self.without_specials(found.before)
        if found.calls or found.cut:
            content = content.strip()
        reading = Reading(content or None if found.calls or found.cut else content)
        reading.calls = found.calls
        reading.named_call = self.tools.mode == "named"
        if found.cut:
            message = "A tool call was cut off by the token budget and left out."
            reading.warnings.append(_warning("tool_call_cut", message))
        return reading

    def _calls_in(self, body: str) -> Any:
        """Reads what stands between the marks of a call."""
        form, grammar = self.model_format.format, self.grammar
        read = form.read(body, grammar.calls) if form and grammar else None
        if read is not None:
            return read
        tools = [tool.model_dump() for _, tool in self.tools.usable]
        return self.model_format.parse_call(body, tools)

    def without_specials(self, text: str) -> str:
        """Takes out of a text the special tokens that mean nothing to who reads the answer."""
        if self.shows_marks:
            for token in self.model_format.hidden:
                text = text.replace(token, "")
        return text

    def _validate(self, reading: Reading, constraint: Constraint | None) -> None:
        """Raises InvalidAnswer where a finished text is not what was asked for."""
        compiled = self._compiled
        if self.compilation is not None and compiled is None:
            raise InvalidAnswer("The text cannot be validated: its grammar was not compiled.")
        checks = list(compiled.checks) if compiled else []
        shape = self.request.shape
        shape_check = checks.pop(0) if shape is not None else None
        if reading.calls:
            self._validate_calls(reading.calls, checks)
        elif self.tools.mode in ("required", "named"):
            raise InvalidAnswer("The model called no tool, though 'tool_choice' demands a call.")
        elif shape is not None:
            text = reading.content or ""
            complete = constraint is not None and constraint.complete
            stops = self.request.stops
            if fault := shape_fault(shape, text, shape_check, complete, stops):
                raise InvalidAnswer(f"The text does not fit {shape.what}: {fault}: {_short(text)}")

    def _validate_calls(self, calls: Sequence[ParsedCall], checks: Sequence[Check | None]) -> None:
        by_name = {
            tool.function.name: check
            for (_, tool), check in zip(self.tools.usable, checks, strict=True)
        }
        for call in calls:
            check = by_name[call.name]
            if check and (fault := check.fault(call.arguments)):
                raise InvalidAnswer(
                    f"The model's call of '{call.name}' does not fit its parameters: {fault}."
                )

    def _warnings(
        self, finished: bool, constraint: Constraint | None, budget: int
    ) -> list[dict[str, str]]:
        compiled = self._compiled
        begun = constraint is not None or self.grammar is None or self.grammar.lark is None
        # A sequence that generates nothing never waits for its grammar. By chance it may be there.
        if compiled is None or not begun:
            return []
        warnings = [
            _warning("not_enforced", f"Not enforced, at most checked at the end: {warning}")
            for warning in compiled.warnings
        ]
        if constraint is None:
            return warnings
        least = len(compiled.shortest or ())
        if constraint.cut:
            message = "The token budget ran out: the text was steered to its end."
            warnings.append(_warning("closed_early", message))
        if least > budget:
            given = self.request.budget is not None  # else it is what the context leaves
            advice = f"Raise {self.budget_field}." if given else "Shorten the prompt."
            message = (
                f"The token budget is {budget}, but a valid answer needs about {least} tokens. "
                + advice
            )
            warnings.append(_warning("budget_too_small", message))
        elif not finished and not constraint.complete:
            message = f"The token budget of {budget} ended before the answer was complete."
            warnings.append(_warning("cut_off", message))
        return warnings


def _warning(code: str, message: str) -> dict[str, str]:
    return {"code": code, "message": message}


def _short(text: str, most: int = 200) -> str:
    return text if len(text) <= most else text[:most] + "…"
