"""The engine: takes tasks, plans them, keeps the batch full, gives outcomes.

The way of a sequence: `add` renders it → `_start_compiled` has it wait, once its grammar is there →
`step` has it admitted to the batch with its prefix, and decoded (`scheduling/step.py`) → `_answers`
makes its task's outcome. `SequenceTable` knows where each one is; `Recovery` what follows an error.
"""

import gc
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

from mlx_rq.engine.errors import ended_by, failure
from mlx_rq.engine.interface import Adapter, Outcome, Partial, Task, Totals
from mlx_rq.engine.kv.trial import Batching, Verdict, verdict_on
from mlx_rq.engine.models.adapted import AdaptedModel
from mlx_rq.engine.models.device import Device, MLXDevice, NotFinite, once_more, tried, weight_bytes
from mlx_rq.engine.models.load import LoadedModel
from mlx_rq.engine.options import EngineOptions
from mlx_rq.engine.output.partial import partials
from mlx_rq.engine.output.response import WRITERS, response_of
from mlx_rq.engine.recovery import Recovery
from mlx_rq.engine.scheduling.choices import sequences_of, steps_of
from mlx_rq.engine.scheduling.drafting import Drafting
from mlx_rq.engine.scheduling.integrity import check
from mlx_rq.engine.scheduling.pressure import Pressure
from mlx_rq.engine.scheduling.running_batch import RunningBatch
from mlx_rq.engine.scheduling.scheduler import Scheduler
from mlx_rq.engine.scheduling.sequence import TokenSequence
from mlx_rq.engine.scheduling.sequences import SequenceTable, TaskSequences
from mlx_rq.engine.scheduling.state import State
from mlx_rq.engine.scheduling.step import Step
from mlx_rq.engine.scheduling.step_size import StepSize
from mlx_rq.engine.structured.output_format import OutputFormats
from mlx_rq.engine.text.token_bytes import TokenBytes

logger = logging.getLogger("mlx_rq.engine")

_ADAPTER_SHARE = 4
"""Adapters that are mixed take at most this part (1/4) of what there is for KV."""


class MLXEngine:
    """Generates with one MLX model. Make and use it on one thread (MLX streams demand that)."""

    def __init__(
        self,
        model: LoadedModel,
        options: EngineOptions = EngineOptions(),  # noqa: B008 (frozen)
        *,
        draft: LoadedModel | None = None,
        device: Device | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`draft` is a small model that can draft for the other one (`check_draft`)."""
        self._adapted = AdaptedModel(model, mix=options.mix_adapters)
        self._device = device = device or MLXDevice()
        self._weights = weight_bytes(model.model)
        verdict = _verdict_on(model, device)
        if verdict.batching is Batching.ALONE:
            options = replace(options, batch_size=1)
        self._step_size = StepSize(options.batch_size, options.chunk)
        self._clock = clock
        self._output_formats = OutputFormats(model, close_json=options.close_json)
        self._token_bytes = TokenBytes(model.tokenizer)
        scheduler = Scheduler(
            batch_size=options.batch_size,
            min_prefix_tokens=options.min_prefix_tokens,
            max_wait=options.max_wait,
            pads=verdict.batching is Batching.ANY,
        )
        self._totals = Totals()
        drafting = None
        if draft is not None:
            self._weights += weight_bytes(draft.model)
            drafting = Drafting(draft, model.vocab_size, self._totals, clock=clock)
        self._running = RunningBatch(
            model.model,
            options,
            self._totals,
            verdict=verdict,
            drafting=drafting,
            device=device,
            clock=clock,
        )
        self._sequences = SequenceTable(scheduler, self._running, self._totals)
        self._pressure = Pressure(device, self._sequences, self._step_size, clock)
        self.on_progress: Callable[[], None] = lambda: None
        self._step = Step(
            self._sequences,
            self._step_size,
            self._pressure,
            self._totals,
            on_progress=lambda: self.on_progress(),
            clock=clock,
        )
        self._recovery = Recovery(
            self._sequences, self._step_size, device, rendered=self._rendered, clock=clock
        )

    @property
    def model_id(self) -> str:
        return self._adapted.model.model_id

    @property
    def fingerprint(self) -> str:
        return self._adapted.model.system_fingerprint

    @property
    def prefix_sharing(self) -> str:
        return str(self._running.sharing)

    @property
    def drafting(self) -> str:
        return "" if self._running.drafting is None else str(self._running.drafting)

    @property
    def capacity(self) -> int:
        return self._step_size.rows

    def throttle(self, share: float) -> None:
        """Uses only a part (0 to 1) of the sequences and the memory that there are, from now on."""
        self._step_size.allow(share)

    @property
    def in_flight(self) -> set[str]:
        """Ids of the tasks that the next step may compute for: the suspects, should it abort."""
        in_flight = self._sequences.in_flight(self._step_size.rows, self._clock())
        return {sequence.task_id for sequence in in_flight}

    @property
    def task_ids(self) -> Collection[str]:
        """Ids of the tasks that have not ended."""
        return self._sequences.tasks.keys()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return self._sequences.waiting

    @property
    def waiting_tokens(self) -> int:
        return self._sequences.waiting_tokens

    @property
    def totals(self) -> Totals:
        return self._running.computed

    def memory(self) -> dict[str, int | None]:
        """Bytes that MLX holds in arrays, keeps to use again, held at most, and may hold.

        Of the arrays, `weights` are the model's, and its draft's.
        """
        held = asdict(self._device.memory())
        return {**held, "ceiling": self._device.ceiling, "weights": self._weights}

    def kv_in_use(self) -> tuple[int, int]:
        """Bytes of KV held now, and the least that would do: each token held once."""
        return self._running.kv_in_use()

    def add(self, tasks: Sequence[Task]) -> list[Outcome]:
        """Takes tasks in; returns the outcomes of those for which there is nothing to generate."""
        ended = []
        for task in tasks:
            sequences = self._rendered(task)
            if isinstance(sequences, Outcome):
                ended.append(sequences)
            else:
                self._sequences.add(task, sequences)
        return ended + self._start_compiled()

    def spare(self, count: int) -> Collection[str]:
        return self._sequences.spare(count, batch_size=self._step_size.rows)

    def cancel(self, task_id: str) -> None:
        """Forgets a task; a running sequence goes on as long as duplicates wait for its answer."""
        self._sequences.cancel(task_id)

    def step(self) -> list[Outcome]:
        """Does a bounded piece of work and returns the tasks that ended by it."""
        if not self._running and not self.waiting:
            self._pressure.rest()
            return []
        ended = self._score_prompt()
        if not self._running and self.waiting == len(self._sequences.compiling) > 0:
            self._output_formats.wait()
        try:
            finished = self._step.compute()
        except Exception as error:
            return ended + self._recovery.recover(error)
        complete = [entry for one in finished for entry in self._sequences.finish(one)]
        ended += self._answers(complete)
        # Last, so that `in_flight` knows of them before the next step.
        return ended + self._start_compiled()

    def partial(self, task_ids: Collection[str]) -> Mapping[str, Sequence[Partial]]:
        """Tells what tasks have said so far, but for those that said nothing yet or ended."""
        return partials(task_ids, self._sequences)

    def generated(self) -> dict[str, int]:
        """Tells how many tokens each task of the batch has generated so far, all choices taken."""
        return self._sequences.generated()

    def check(self) -> None:
        """Raises IntegrityError where tasks, states, indexes, KV and counters do not agree."""
        check(self._sequences, self.totals)

    def adapt(self, adapter: Adapter | None) -> None:
        """Puts an adapter on the model in place of another, or takes it off; no tasks may be left.

        No KV is kept: what was computed belongs to the adapter that it was computed with.
        """
        assert not self._sequences.tasks, "what has begun is finished with its own adapter"
        self._running.adapted("")
        self._adapted.take_off()
        if adapter is not None:
            put_on = partial(self._adapted.put_on, adapter)
            once_more(self._device, put_on, f"putting on {adapter.model_id}")
            self._running.adapted(adapter.model_id)
        self._device.clear_cache()

    def mix(self, adapters: Mapping[str, Adapter]) -> Collection[str]:
        """Has tasks of the model and its adapters computed together; says which, by their ids.

        None, where that is not right, or not quicker. It is done once, before there are tasks.
        """
        memory = self._running.memory
        none: Collection[str] = ()
        mixed = tried(
            self._device,
            lambda: self._adapted.mix(
                adapters,
                rows=self._step_size.most_rows,  # it may be throttled now
                most_bytes=memory.nbytes // _ADAPTER_SHARE,
            ),
            none,
            "adapters",
        )
        memory.nbytes -= self._adapted.mixed_bytes
        self._device.clear_cache()
        return mixed

    def close(self) -> None:
        """Frees the memory of the model and of all that was computed with it."""
        self._output_formats.close()
        device = self._device
        vars(self).clear()  # nearly all of it refers to the model
        gc.collect()  # models refer to themselves
        device.clear_cache()

    # What comes before and after a sequence's steps, in the order of its way.

    def _rendered(self, task: Task) -> list[TokenSequence] | Outcome:
        """Makes a task's sequences; its outcome where there is nothing to generate."""
        model_format = self._output_formats.model_format
        adapter, model = self._adapted.row_of(task.model)
        try:
            writer = WRITERS[task.request.kind]
            if (told := writer.at_once(task.request, model, model_format)) is not None:
                return Outcome(task.id, told)
            sequences = sequences_of(
                task, model, self._output_formats, now=self._clock(), adapter=adapter
            )
            self._running.memory.check(sequences)
        except Exception as error:  # a template, a tokenizer: it is this request's alone
            return ended_by(error, task)
        return sequences

    def _start_compiled(self) -> list[Outcome]:
        """Has the sequences wait for the batch whose grammars are compiled by now."""
        refused = []
        for sequence in [one for one in self._sequences.compiling if one.output_format.ready]:
            if sequence.state is not State.COMPILING:
                continue  # another choice of the same task was refused
            try:
                sequence.start()
            except Exception as error:  # a grammar, a tokenizer: it is this request's alone
                refused.append(ended_by(error, self._sequences.tasks[sequence.task_id].task))
                self.cancel(sequence.task_id)
            else:
                self._sequences.compiled(sequence)
        return refused

    def _score_prompt(self) -> list[Outcome]:
        """Scores a chunk of a prompt whose own logprobs are asked for, where there is one."""
        sequence = self._step.next_to_score()
        if sequence is None:
            return []
        try:
            self._step.score()
        except Exception as error:
            if self._device.fault_of(error) is not None or isinstance(error, NotFinite):
                return self._recovery.recover(error, sequence)
            logger.error("the engine raised at a prompt's logprobs", exc_info=error)
            self.cancel(sequence.task_id)
            return [failure(sequence.task_id, error)]
        return self._answers(self._sequences.complete(sequence.task_id))

    def _answers(self, complete: Iterable[TaskSequences]) -> list[Outcome]:
        """Writes the answers of tasks that are complete."""
        outcomes = []
        for task, sequences in complete:
            model = self._adapted.row_of(task.model).model
            names = {"model_id": model.model_id, "fingerprint": model.system_fingerprint}
            try:
                result = response_of(task, sequences, self._token_bytes, **names)
                outcomes.append(Outcome(task.id, result, steps_of(sequences, self._clock())))
            except Exception as error:  # its text cannot be taken apart: it is this task's alone
                outcomes.append(ended_by(error, task))
        return outcomes


def _verdict_on(model: LoadedModel, device: Device) -> Verdict:
    """Finds out how a model may be batched, and says so where it is not as any other."""
    failed = Verdict(Batching.ALONE, "the device failed when it was tried")
    verdict = tried(device, lambda: verdict_on(model.model), failed, "batching")
    if verdict.batching is Batching.ALONE:
        why = verdict.why
        logger.warning("%s cannot be batched, one sequence at a time: %s", model.model_id, why)
    elif verdict.batching is Batching.EQUAL:
        logger.warning("%s: only prompts of equal length are prefilled together", model.model_id)
    return verdict
