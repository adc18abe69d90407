"""The command `serve`: the HTTP server. It needs Redis and the extra `http`, not MLX."""

from pathlib import Path

import click

from mlx_rq.api_stub.settings import ApiKeys, Settings, read_keys
from mlx_rq.jobs.queue.connection import connect
from mlx_rq.jobs.queue.eviction import warn_of_eviction
from mlx_rq.jobs.queue.webhooks import read_networks, read_secrets
from mlx_rq.worker.cli.common import data_folder, default_of, needs_extra, option, redis_option
from mlx_rq.worker.cli.ports import OLD_NAMES, http_port_option, is_answered
from mlx_rq.worker.cli.value_types import WholeNumber


@click.command(context_settings=OLD_NAMES)
@option("--host", default="127.0.0.1", help="The address to listen on.")
@http_port_option(0)
@option(
    "--api-key-file",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="A file with one key a line, as KEY or NAME: KEY; needed to listen on more than loopback.",
)
@option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="Where uploaded files and the outputs of batches last.",
    show_default="the system's place for user data",
)
@option(
    "--allow-origin",
    multiple=True,
    metavar="ORIGIN",
    help="A web origin whose pages may use the server, as https://app.example.org.",
)
@option(
    "--requests-per-minute",
    type=WholeNumber(1),
    default=None,
    help="How often each key may ask.",
    show_default="no limit",
)
@option(
    "--jobs-per-key",
    type=WholeNumber(1),
    default=None,
    help="Jobs of one key that may be on their way at once.",
    show_default="no limit",
)
@option(
    "--max-queued",
    type=WholeNumber(1),
    default=default_of(Settings, "max_queued"),
    help="Jobs that may wait for a model.",
)
@option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME",
    help="A model that background jobs are taken for though no worker has served it yet.",
)
@option(
    "--queue-unserved",
    is_flag=True,
    help="Take background jobs for models of any name.",
)
@option("--keep-on-disconnect", is_flag=True, help="Finish the jobs of clients that hang up.")
@option("--show-content", is_flag=True, help="Have the page at / show prompts and answers.")
@option(
    "--webhook-secret-file",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="A file with the secret that webhooks are signed with; without it none are sent.",
)
@option(
    "--webhook-allow",
    multiple=True,
    metavar="NETWORK",
    help="A network that webhooks may go to though it is private, as 10.0.0.0/8.",
)
@redis_option
@click.pass_context
def serve(
    context: click.Context,
    host: str,
    port: int,
    api_key_file: Path | None,
    data_dir: Path | None,
    allow_origin: tuple[str, ...],
    requests_per_minute: int | None,
    jobs_per_key: int | None,
    max_queued: int,
    models: tuple[str, ...],
    queue_unserved: bool,
    keep_on_disconnect: bool,
    show_content: bool,
    webhook_secret_file: Path | None,
    webhook_allow: tuple[str, ...],
    redis_url: str | None,
) -> None:
    """Run the HTTP server: OpenAI's clients, or curl, put jobs into the queue and read results."""
    with needs_extra("http"):
        from mlx_rq.api_stub.server import make_server
    settings = Settings(
        data_dir=data_folder(data_dir),
        redis_url=redis_url,
        keys=read_keys(api_key_file) if api_key_file else ApiKeys(),
        allowed_origins=allow_origin,
        requests_per_minute=requests_per_minute,
        jobs_per_key=jobs_per_key,
        max_queued=max_queued,
        models=models,
        queue_unserved=queue_unserved,
        keep_on_disconnect=keep_on_disconnect,
        show_content=show_content,
        webhook_secrets=read_secrets(webhook_secret_file) if webhook_secret_file else (),
        webhook_networks=read_networks(webhook_allow),
    )
    log_level = (context.parent.params if context.parent else {}).get("log_level", "info")
    warn_of_eviction(connect(redis_url))
    server = make_server(settings, host, port, log_level)
    if port and is_answered(port, host):
        raise click.ClickException(
            f"--port {port} is taken, perhaps by an HTTP server that runs already: "
            "choose another port."
        )
    server.run()
    if not server.started:
        raise click.ClickException(f"the HTTP server did not open on {host}:{port}")


COMMANDS = (serve,)
