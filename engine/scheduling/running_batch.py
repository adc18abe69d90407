"""The rows that are being generated: the batch, the trunks that they stand on, and their memory.

The engine decides which rows come in, and when; here is whether there is room for them, on what
they stand, and what a step makes of them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import finalize

from mlx.nn.layers.base import Module
from mlx_lm.generate_utils import BatchCounters

from mlx_rq.engine.interface import Totals
from mlx_rq.engine.kv.prefix_cache import Key, Trunk, Trunks, key_of
from mlx_rq.engine.kv.sharing import Sharing
from mlx_rq.engine.options import EngineOptions
from mlx_rq.engine.scheduling.budget import KVBudget, referred_to
from mlx_rq.engine.scheduling.generator import RowGenerator
from mlx_rq.engine.scheduling.sequence import Row
from mlx_rq.engine.scheduling.sequential import SoloGenerator


class Running:
    """Rows in the order in which they came in. What they compute is added to `totals`."""

    def __init__(
        self,
        model: Module,
        options: EngineOptions,
        totals: Totals,
        *,
        batches: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without `batches`, rows are generated one after the other."""
        self._model = model
        self._options = options
        self._totals = totals
        self._batches = batches
        self._rows: dict[int, Row] = {}  # by the generator's uid
        self.memory = KVBudget(model, options.kv_bytes, options.reserve)
        off = "" if options.share_trunks else "switched off"
        self.sharing = Sharing(model, off=off if batches else "rows are not batched")
        finalize(self, self.sharing.remove)
        share_from = options.share_from if self.sharing.on else None
        self.trunks = Trunks(model, chunk=options.chunk, share_from=share_from, clock=clock)
        self.counters = BatchCounters()  # they outlive a generator that an error ended
        self._generator = self._new_generator()

    def _new_generator(self) -> RowGenerator | SoloGenerator:
        options = self._options
        if self._batches:
            return RowGenerator(
                self._model,
                rows=options.rows,
                prefill_step=options.chunk,
                counters=self.counters,
                share=self.sharing.on,
            )
        return SoloGenerator(self._model, prefill_step=options.chunk, counters=self.counters)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    @property
    def takes_rows(self) -> bool:
        """Whether those that came in before are prefilled, so that others may follow."""
        return not self._generator.prefilling

    def kv_in_use(self) -> tuple[int, int]:
        """Bytes of KV held now, and the least that would do: each token of trunks and rows once."""
        rows = sum(len(row.tokens) - row.depth for row in self)
        least = self.memory.cost.bytes(1, rows + self.trunks.distinct_tokens)
        return self.trunks.nbytes + self._generator.prompt_cache_nbytes, least

    def room_for(
        self, rows: Sequence[Row], trunk: Trunk | None, keep: frozenset[Key]
    ) -> tuple[int, Trunk | None]:
        """Counts the rows for which there is memory; says to what of their trunk they are to refer.

        Trunks are evicted for them, except those to `keep`.
        """
        running = self._rows.values()
        shared = self._worth_referring(trunk, len(rows))
        room = self.memory.fitting(running, rows, self.trunks, keep, shared)
        if room < len(rows) and shared is not trunk and self.sharing.on:
            shared = trunk  # slower than copies, but more rows at once
            room = self.memory.fitting(running, rows, self.trunks, keep, shared)
        return room, shared

    def held_for(self, rows: Sequence[Row]) -> tuple[Trunk | None, Trunk | None]:
        """A trunk of an earlier window that a lone row begins with, and what of it to refer to."""
        if len(rows) != 1:
            return None, None
        tokens = rows[0].tokens
        trunk = self.trunks.deepest(key_of(tokens), at_most=len(tokens) - 1)
        return trunk, self._worth_referring(trunk, 1)

    def _worth_referring(self, trunk: Trunk | None, rows: int) -> Trunk | None:
        return self.trunks.worth_referring(trunk, rows, referred_to(self))

    def add(self, rows: Sequence[Row], trunk: Trunk | None, shared: Trunk | None = None) -> None:
        """Takes rows in that stand on `trunk`; of its KV, they refer to that of `shared`."""
        depth = 0 if trunk is None else trunk.depth
        suffixes = [row.tokens[depth:] for row in rows]
        for row in rows:
            row.depth, row.shared = depth, shared
            row.cached_tokens = min(depth, len(row.prompt))
        if trunk is not None:
            # The first to use a new trunk is the one that it was computed for.
            rows[0].cached_tokens = max(0, rows[0].cached_tokens - trunk.uncharged)
            self.trunks.use(trunk, len(rows))
        uids = self._generator.insert_rows(
            suffixes,
            samplers=[row.sampler for row in rows],
            max_tokens=[row.remaining for row in rows],
            end_tokens=[row.end_tokens for row in rows],
            caches=None if trunk is None else trunk.caches_for(shared),
        )
        self._rows.update(zip(uids, rows, strict=True))
        totals = self._totals
        totals.rows_sharing += 0 if shared is None else len(rows)
        totals.prompt_tokens += sum(len(one.prompt) for row in rows for one in (row, *row.twins))
        totals.prefilled_tokens += sum(map(len, suffixes))
        totals.positions_computed += len(rows) * max(map(len, suffixes))

    def keep(self, asked_for: Callable[[Row], bool]) -> None:
        """Takes out the rows whose answer nobody asks for, neither for itself nor for a twin."""
        for row in self:
            row.twins = [twin for twin in row.twins if asked_for(twin)]
        gone = [uid for uid, row in self._rows.items() if not row.twins and not asked_for(row)]
        self._take_out(gone)

    def _take_out(self, uids: Sequence[int]) -> list[Row]:
        if uids:
            self._generator.remove(uids)
        return self._let_go(uids)

    def _let_go(self, uids: Sequence[int]) -> list[Row]:
        rows = [self._rows.pop(uid) for uid in uids]
        for row in rows:
            row.shared = None  # else the trunk's memory would be held as long as the task
        return rows

    def make_room(self) -> list[Row]:
        """Takes out the rows that the memory is too small for by now, the newest first."""
        out = []
        while self.memory.outgrown(self._rows.values(), self.trunks):
            (row,) = self._take_out([max(self._rows)])
            row.sampler.rewind(row.text.tokens)
            out.append(row)
        self._totals.rows_put_back += len(out)
        return out

    def decode(self) -> list[Row]:
        """Does one decode step, beside a piece of prefill; returns the rows that ended by it."""
        _, responses = self._generator.next()
        finished: list[int] = []
        stopped: list[int] = []
        for response in responses:
            row = self._rows[response.uid]
            self._totals.decoded_tokens += 1
            row.finish_reason = response.finish_reason
            measured: Any = response.logprobs  # ours: TokenLogprobs, or None
            # A stop token is not part of the text; the last token of a spent budget is.
            if response.finish_reason != "stop" and row.add(response.token, measured):
                row.finish_reason = "stop"
                if response.finish_reason is None:
                    stopped.append(response.uid)
                    continue
            if row.finish_reason is not None:
                finished.append(response.uid)
        return self._let_go(finished) + self._take_out(stopped)

    def give_up(self) -> None:
        """Forgets all rows, with the KV that an error may have left half written."""
        self._let_go(list(self._rows))
        self._generator.close()  # first: it puts back the wired limit that the next one sets
        self._generator = self._new_generator()
        self.trunks.abandon()
