"""llguidance behind the seam of `mlx_rq.engine.structured.constraint`.

It never raises for a bad grammar, a used-up limit or a wrong token: its matcher goes into an error
state and from then on allows only the end of the sequence. So the state is asked after every step.
"""

import threading
from collections import deque
from collections.abc import Sequence
from itertools import islice

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from llguidance.numpy import fill_next_token_bitmask_par

from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.engine.structured.constraint import Constraint, GrammarFault, Masks
from mlx_rq.engine.structured.grammar import Grammar
from mlx_rq.engine.structured.json_schema import Check, SchemaFault
from mlx_rq.engine.structured.matchers import Matchers, begun, forced, matcher_of
from mlx_rq.engine.structured.messages import plain
from mlx_rq.engine.structured.shortest_end import Closer
from mlx_rq.engine.structured.unfolding import MOST_UNFOLDED, unfolded
from mlx_rq.jobs.openai.schemas import Schema, subschemas
from mlx_rq.jobs.openai.words import in_a_sentence

_TOO_MANY = (
    f"its alternatives multiply to more than {MOST_UNFOLDED:,} schemas ('anyOf' in 'allOf', "
    "conditions, dependencies); make it simpler."
)
_COUNTED = ("maxLength", "minLength", "pattern")
_MOST_TRIED = 20
"""Strings of a schema that are begun when it is compiled."""

_CLOSE_MARGIN = 24
"""Tokens to spare when a text is steered to its end: one choice can add that many to the rest."""


class Guidance:
    """Compiles grammars for one model. Safe to use from several threads."""

    def __init__(
        self, model: LoadedModel, end_marks: Sequence[int] = (), end_text: str = ""
    ) -> None:
        """`end_marks` and `end_text` as Closer has them."""
        # Not the model: a thread that compiles would keep its weights.
        self._of_model = model.tokenizer, sorted(model.eos_token_ids)
        # The tokenizer's tokens or the logits', whichever are more: neither holds for all models.
        self.vocabulary = max(model.vocab_size, len(model.tokenizer))
        self._ends = end_marks, end_text
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._executor = LLExecutor()
        self._closer: Closer | None = None

    def compile(self, grammar: Grammar) -> "CompiledGrammar":
        """Compiles a grammar and what validates its parts; raises GrammarFault."""
        tokenizer, closer = self.set_up()
        sizes = [unfolded(part.enforced) for part in grammar.parts]
        if sum(sizes) > MOST_UNFOLDED:
            raise GrammarFault(sizes.index(max(sizes)), _TOO_MANY)
        checks = []
        for index, part in enumerate(grammar.parts):
            try:
                checks.append(None if part.schema is None else Check(part.schema))
                self._try_strings(part.enforced)
            except SchemaFault as fault:
                raise GrammarFault(index, str(fault)) from None
            except ValueError as error:
                raise GrammarFault(index, plain(str(error))) from None
        try:
            matchers = None if grammar.lark is None else Matchers(tokenizer, grammar.lark)
            shortest = () if matchers is None else closer.shortest_end(matchers.after())
        except ValueError as error:
            raise self._blame(grammar, error) from None
        if matchers is None:
            warnings = [w for p in grammar.parts for w in _warnings(matcher_of(tokenizer, p.lark))]
        else:
            warnings = _warnings(matchers.after())
        warnings += [what for part in grammar.parts for what in part.unenforced]
        beginning = () if matchers is None else forced(matchers.after())
        return CompiledGrammar(self, closer, matchers, checks, warnings, shortest, beginning)

    def set_up(self) -> tuple[LLTokenizer, Closer]:
        """Sets the tokenizer up the first time, which takes a second or more.

        Raises GrammarFault where the engine cannot work with it.
        """
        with self._lock:
            if self._tokenizer is None or self._closer is None:
                tokenizer, ends = self._of_model
                try:
                    self._tokenizer = from_tokenizer(
                        tokenizer._tokenizer, n_vocab=self.vocabulary, eos_token=ends
                    )
                except ValueError as error:
                    message = (
                        f"this model's tokenizer cannot be constrained: {in_a_sentence(error)}."
                    )
                    raise GrammarFault(0, message) from None
                self._closer = Closer(self._tokenizer, *self._ends)
            return self._tokenizer, self._closer

    def tokens_of(self, text: str) -> list[int]:
        """Gives tokens that make up a text, in which nothing is special."""
        tokens: list[int] = self.set_up()[0].tokenize_bytes(text.encode())
        return tokens

    def _try_strings(self, schema: Schema | None) -> None:
        """Begins the strings of a schema that are counted; raises ValueError where one cannot be.

        The engine compiles a pattern whose lengths are counted, and gives up once it is written.
        """
        tokenizer, closer = self.set_up()
        tried: list[dict[str, object]] = []
        for node in subschemas(schema):
            string = {key: node[key] for key in _COUNTED if key in node}
            if "pattern" in string and len(string) > 1 and string not in tried[:_MOST_TRIED]:
                tried.append(string)
        for string in tried[:_MOST_TRIED]:
            lark = LLMatcher.grammar_from_json_schema({"type": "string", **string})
            matcher = begun(tokenizer, lark)
            if not matcher.is_error():  # else the whole grammar says so, if it is enforced at all
                closer.shortest_end(matcher)

    def _blame(self, grammar: Grammar, error: ValueError) -> GrammarFault:
        """Finds the part that does not compile by itself; the first where all of them do."""
        tokenizer, closer = self.set_up()
        for index, part in enumerate(grammar.parts):
            if part.lark == grammar.lark:  # it is this part that was compiled
                return GrammarFault(index, plain(str(error)))
            try:
                closer.shortest_end(matcher_of(tokenizer, part.lark))
            except ValueError as fault:
                return GrammarFault(index, plain(str(fault)))
        return GrammarFault(0, plain(str(error)))

    def fill(self, sequences: list[tuple[LLMatcher, int]], masks: Masks) -> None:
        """Fills the masks of many matchers at once, on all cores and without the GIL."""
        if sequences:
            fill_next_token_bitmask_par(self._executor, sequences, masks)


def _warnings(matcher: LLMatcher) -> list[str]:
    return [plain(warning) for warning in matcher.get_grammar_warnings()]


class CompiledGrammar:
    """A grammar ready for use."""

    def __init__(
        self,
        guidance: Guidance,
        closer: Closer,
        matchers: Matchers | None,
        checks: Sequence[Check | None],
        warnings: Sequence[str],
        shortest: Sequence[int] | None,
        beginning: Sequence[int],
    ) -> None:
        self._guidance = guidance
        self._closer = closer
        self._matchers = matchers
        self.checks = checks
        self.warnings = warnings
        self.shortest = shortest
        self._beginning = beginning

    def start(self, budget: int, *, close: bool) -> Constraint | None:
        if self._matchers is None:
            return None
        # What may end at once is no structure: free text, from which calls may follow.
        structured = self.shortest is None or len(self.shortest) > 0
        closer = self._closer if close and structured else None
        close_from = budget - len(self.shortest or ()) - 3 * _CLOSE_MARGIN
        return GuidanceConstraint(
            self._guidance, self._matchers, self._beginning, budget, closer, close_from
        )


class GuidanceConstraint:
    """One sequence's place in its grammar, and the tokens that are decided already."""

    def __init__(
        self,
        guidance: Guidance,
        matchers: Matchers,
        beginning: Sequence[int],
        budget: int,
        closer: Closer | None,
        close_from: int,
    ) -> None:
        self._guidance = guidance
        self._matchers = matchers
        self._matcher = matchers.after()
        self.beginning = beginning
        self._budget = budget
        self._tokens: list[int] = []
        self._closer = closer
        self._close_from = close_from
        self._decided: deque[int] = deque()
        self._run: deque[int] = deque()
        """What was found to follow. Not to be found again by every step of a long run."""
        self._shortest_end = False

    @property
    def vocabulary(self) -> int:
        return self._guidance.vocabulary

    @property
    def taken(self) -> int:
        return len(self._tokens)

    @property
    def done(self) -> bool:
        closed = self._shortest_end and not self._decided
        return closed or bool(self._matcher.is_stopped())

    @property
    def complete(self) -> bool:
        if self._matcher.is_accepting():
            return self.fault is None
        return self._goes_on() and bool(self._matcher.is_accepting())

    @property
    def fault(self) -> str | None:
        return plain(self._matcher.get_error()) if self._matcher.is_error() else None

    @property
    def cut(self) -> bool:
        return self._shortest_end

    @property
    def captures(self) -> list[dict[str, str]]:
        return [
            {"name": name, "text": text.decode(errors="replace")}
            for name, text in self._matcher.get_captures()
        ]

    def accept(self, token: int) -> None:
        if not self._matcher.consume_token(token) and self._matcher.is_error():
            self._matcher = self._matchers.after([*self._tokens, token])
        self._tokens.append(token)
        if self._run and self._run.popleft() != token:
            self._run.clear()
        if self._decided:
            self._decided.popleft()
        elif self._closer and self.taken >= self._close_from and not self.done:
            self._steer_to_end(self._closer)

    def cut_to(self, tokens: Sequence[int], rest: str) -> None:
        self._decided.clear()
        self._run.clear()
        self._tokens = [*tokens, *self._guidance.tokens_of(rest)]
        self._matcher = self._matchers.after(self._tokens)

    def _goes_on(self) -> bool:
        """Says whether the engine can go on here, if need be with another matcher."""
        self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._matcher = self._matchers.after(self._tokens)
        return not self._matcher.is_error()

    def _steer_to_end(self, closer: Closer) -> None:
        """Decides all that is left once the way to the end takes about what the budget allows."""
        left = self._budget - self.taken
        try:
            end = closer.shortest_end(self._matcher, left)
        except ValueError:
            return  # the engine gave up: this sequence's own next step tells of it
        if end and len(end) <= left <= len(end) + _CLOSE_MARGIN:
            self._shortest_end = True
            self._decided.extend(end)

    def ahead(self, most: int) -> Sequence[int]:
        if not self._decided and not self._run:
            self._run.extend(forced(self._matcher))
        decided = len(self._decided) - 1 if self._decided else len(self._run)
        return list(islice(self._decided or self._run, 1, min(decided, most + 1)))

    def fill(self, others: Sequence[tuple[Constraint, int]], masks: Masks) -> None:
        open_ones = []
        for constraint, index in others:
            assert isinstance(constraint, GuidanceConstraint)
            if constraint._decided:
                masks[index] = 0
                token = constraint._decided[0]
                masks[index, token >> 5] = np.uint32(1 << (token & 31)).view(np.int32)
            else:
                open_ones.append((constraint, index))
        self._guidance.fill([(one._matcher, index) for one, index in open_ones], masks)
        failed = [(one, index) for one, index in open_ones if one._matcher.is_error()]
        again = [(one._matcher, index) for one, index in failed if one._goes_on()]
        self._guidance.fill(again, masks)
