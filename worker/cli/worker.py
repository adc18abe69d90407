"""The command `worker`, which generates."""

import os
import secrets
from pathlib import Path
from typing import Any

import click

from mlx_rq.jobs.openai.errors import RedisUnavailable
from mlx_rq.jobs.openai.requests import ANY_MODEL
from mlx_rq.jobs.queue.connection import new_connection, reachable, resolve_url
from mlx_rq.jobs.queue.discovery import default_data_dir
from mlx_rq.jobs.queue.eviction import warn_of_eviction
from mlx_rq.worker.cli.common import needs_extra, option, redis_option
from mlx_rq.worker.cli.living_line import living_line
from mlx_rq.worker.cli.models import AskedModel, asked_models, served_models
from mlx_rq.worker.cli.pause_options import awake_unless, pause_of
from mlx_rq.worker.cli.processes import environment_with, program_of
from mlx_rq.worker.cli.value_types import WholeNumber
from mlx_rq.worker.cli.worker_options import data_dir_option, worker_options
from mlx_rq.worker.options import WorkerOptions
from mlx_rq.worker.pause import QuietHours
from mlx_rq.worker.process.supervisor_pipe import FD_VARIABLE, NAME_TAKEN, REDIS_AWAY


@click.command()
@worker_options
@option("--burst", is_flag=True, help="Stop when the queues are empty.")
@option("--max-jobs", type=WholeNumber(1), default=None, help="Stop after so many jobs.")
@option("--name", default=None, help="The worker's name in RQ.", show_default="random")
@data_dir_option("Where answers are kept that Redis does not take.")
@option(
    "--unsupervised",
    is_flag=True,
    help="Run without the parent process that starts the worker again after a crash.",
)
@redis_option
@click.pass_context
def worker(
    context: click.Context, /, unsupervised: bool, redis_url: str | None, **options: Any
) -> None:
    """Generate the jobs of one model, or of several, until told to stop (Ctrl-C or SIGTERM).

    Exits with 0 where it was told to, or has done what --burst or --max-jobs asked for; 73 where
    another worker has its --name; else with 1.
    """
    with needs_extra("worker"):
        import mlx_lm  # noqa: F401 (found missing here, not in a child)
    try:
        connection = new_connection(redis_url)
        with reachable(connection):
            connection.ping()  # before minutes are spent on loading a model
            if FD_VARIABLE not in os.environ:  # else its supervisor has said so
                warn_of_eviction(connection)
        if unsupervised:
            _generate(redis_url, **options)
    except RedisUnavailable as error:
        if not unsupervised:
            raise
        click.echo(f"Error: {error}", err=True)
        context.exit(REDIS_AWAY)
    if not unsupervised:
        context.exit(_supervise(context, resolve_url(redis_url), **options))


def _supervise(context: click.Context, redis_url: str, name: str | None, **options: Any) -> int:
    """Runs the same command as a child, without supervision, again after each crash."""
    from mlx_rq.worker.leases.machine import machine
    from mlx_rq.worker.process.supervisor import Supervisor, SupervisorOptions

    name = name or secrets.token_hex(16)
    log_level = context.parent.params["log_level"] if context.parent else "info"
    program = program_of("worker", {**options, "name": name, "unsupervised": True}, log_level)
    with living_line(redis_url, name):
        return Supervisor(
            program,
            new_connection(redis_url),
            name,
            machine=machine(options["data_dir"] or default_data_dir()),
            environment=environment_with(redis_url, "worker"),
            options=SupervisorOptions(stall=options["stall"]),
        ).run()


def _generate(
    redis_url: str | None,
    model: tuple[str, ...],
    served_name: tuple[str, ...],
    models_from: Path | None,
    adapter: tuple[str, ...],
    draft_model: str | None,
    trust_remote_code: bool,
    batch: int | str,
    kv_budget: int | None,
    kv_bits: str | None,
    memory: int | None,
    wired_limit: int | str,
    max_wait: float,
    close_json: bool,
    pause_on: str | None,
    quiet_hours: tuple[QuietHours, ...],
    no_keep_awake: bool,
    name: str | None,
    data_dir: Path | None,
    **options: Any,
) -> None:
    """Loads the model, where there is only one, and works."""
    from mlx_rq.engine.engine import MLXEngine
    from mlx_rq.engine.interface import DeviceExhausted
    from mlx_rq.engine.models.calibrate import best_batch_size, known_share_from, share_from
    from mlx_rq.engine.models.device import MLXDevice, tried, weight_bytes
    from mlx_rq.engine.models.draft import check_draft
    from mlx_rq.engine.models.load import ModelError, load
    from mlx_rq.engine.options import EngineOptions
    from mlx_rq.engine.scheduling.budget import default_kv_bytes
    from mlx_rq.engine.scheduling.lengths import halfway
    from mlx_rq.worker.leases.machine import machine
    from mlx_rq.worker.leases.name import NameTaken
    from mlx_rq.worker.models.switch import EngineSwitch
    from mlx_rq.worker.process.supervisor_pipe import SupervisorPipe
    from mlx_rq.worker.results.spool import spool_folder
    from mlx_rq.worker.tasks import waiting_requests
    from mlx_rq.worker.worker import MLXWorker

    supervisor_pipe = SupervisorPipe.from_environment()
    supervisor_pipe.stop_with_supervisor()
    folder = data_dir or default_data_dir()
    device = MLXDevice(memory)
    device.limit()
    usual = EngineOptions()
    connection = new_connection(redis_url)

    def engine_of(asked: AskedModel) -> MLXEngine:
        loaded = load(asked.model, trust_remote_code=trust_remote_code)
        draft, beside = None, []
        if asked.draft is not None:
            draft = load(asked.draft, trust_remote_code=trust_remote_code)
            check_draft(loaded, draft)
            beside = [draft.model]
        weights = sum(map(weight_bytes, (loaded.model, *beside)))
        if memory is not None and weights >= memory:
            raise ModelError(
                f"model {asked.model}: its weights take {weights / 1e9:,.2f} GB, and --memory is "
                f"{memory / 1e9:,.2f} GB. Allow more, or choose a smaller one."
            )
        device.wire(wired_limit if isinstance(wired_limit, int) else None, loaded.model, *beside)
        rows, kv_bytes = asked.batch or batch, asked.kv_budget or kv_budget
        shares_from = known_share_from(loaded, folder) or usual.share_from
        if not isinstance(rows, int):
            room = kv_bytes or default_kv_bytes(loaded.model, device, *beside)
            names = dict.fromkeys([loaded.model_id, *asked.known_as, ANY_MODEL])
            tokens = halfway(waiting_requests(connection, names), loaded)
            rows = tried(
                device,
                lambda: best_batch_size(loaded, folder, room=room, tokens=tokens),
                usual.batch_size,
                "the batch size",
            )
            shares_from = tried(
                device, lambda: share_from(loaded, folder), usual.share_from, "sharing"
            )
        options = EngineOptions(
            batch_size=rows,
            kv_bytes=kv_bytes,
            kv_bits=None if kv_bits is None else int(kv_bits),
            max_wait=max_wait,
            close_json=close_json,
            share_from=shares_from,
        )
        engine = tried(
            device,
            lambda: MLXEngine(loaded, options, draft=draft, device=device),
            None,
            asked.model,
        )
        if engine is None:
            raise ModelError(
                f"model {asked.model}: there is no memory to compute a single token with it. "
                "Choose a smaller one, or end other programs."
            )
        return engine

    asked = asked_models(model, served_name, models_from, adapter, draft_model)
    switch = EngineSwitch(served_models(asked, engine_of, device.ceiling or device.physical))
    if len(asked) == 1:
        switch.load(switch.model_id)  # at once: what is wrong with it is to be seen now
    spool = spool_folder(folder, connection)
    mlx_worker = MLXWorker(
        switch,
        connection,
        new_connection(redis_url),
        options=WorkerOptions(
            max_wait=max_wait,
            spool=spool,
            loading=folder / "loading",
            machine=machine(folder),
            **options,
        ),
        name=name,
        supervisor_pipe=supervisor_pipe,
        pause=pause_of(pause_on, quiet_hours),
        awake=awake_unless(no_keep_awake),
    )
    with reachable(connection):
        try:
            mlx_worker.run()
        except NameTaken as error:
            click.echo(f"Error: {error}: choose another --name", err=True)
            raise SystemExit(NAME_TAKEN) from None
        except DeviceExhausted as error:
            raise click.ClickException(f"nothing can be computed now: {error}") from None


COMMANDS = (worker,)
