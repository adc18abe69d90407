"""Completion in the shell: the command `completion`, and what Redis and the disk offer.

Nothing here may be slow or say anything but words: the shell waits for it at each press of a key.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from click.shell_completion import CompletionItem, get_completion_class
from redis import Redis
from redis.exceptions import RedisError

from mlx_rq.jobs.openai.errors import RequestError
from mlx_rq.jobs.queue import keys, reading
from mlx_rq.jobs.queue.connection import has_sentinels, resolve_url
from mlx_rq.jobs.queue.job_ids import ids_that_begin
from mlx_rq.worker.cli.models import DEMO_MODEL

_SECONDS = 0.5
_MOST = 50

_SHELLS = ("bash", "zsh", "fish")


def complete_served(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Offers the models that workers serve, or served lately."""
    with _quick_redis(context) as connection:
        found = reading.texts(reading.ask(connection.zrevrange, keys.MODELS, 0, _MOST))
        return sorted(name for name in found if name.startswith(incomplete))
    return []


def complete_model(
    context: click.Context, _: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Offers the models that can be loaded: the demo's, those in the hub's cache, and folders."""
    names = [DEMO_MODEL, *cached_models()]
    offered = [CompletionItem(name) for name in names if name.startswith(incomplete)]
    return [*offered, CompletionItem(incomplete, type="dir")]


def complete_job(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Offers ids of jobs."""
    if not all(sign in "0123456789abcdef" for sign in incomplete):
        return []
    with _quick_redis(context) as connection:
        return ids_that_begin(connection, incomplete, most=_MOST)
    return []


def hub_cache() -> Path:
    """Says where models from the hub lie on this machine."""
    if given := os.environ.get("HF_HUB_CACHE"):
        return Path(given)
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(home) / "hub"


def cached_models() -> list[str]:
    """Names the models in the hub's cache."""
    folders = hub_cache().glob("models--*--*")
    return sorted("/".join(folder.name.split("--")[1:]) for folder in folders)


@contextmanager
def _quick_redis(context: click.Context) -> Iterator[Redis]:
    """Gives a client that does not wait; a Redis that fails ends the block without a word."""
    url = resolve_url(context.params.get("redis_url"))
    if has_sentinels(url):
        url = "unix:///"  # finding the primary takes too long: nobody answers there
    try:
        with Redis.from_url(
            url, socket_timeout=_SECONDS, socket_connect_timeout=_SECONDS
        ) as connection:
            yield connection
    except (RedisError, RequestError, ValueError, OSError):
        pass


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS))
def completion(shell: str) -> None:
    """Print what makes a shell complete words of mlx-rq.

    Commands, options, files, models, ids of jobs.

    \b
        eval "$(mlx-rq completion bash)"       in ~/.bashrc (bash 4.4 or later)
        eval "$(mlx-rq completion zsh)"        in ~/.zshrc
        mlx-rq completion fish > ~/.config/fish/completions/mlx-rq.fish
    """
    group = click.get_current_context().find_root().command
    kind = get_completion_class(shell)
    assert kind is not None
    # Not source(), which runs a bash to look at its version.
    made = kind(group, {}, "mlx-rq", "_MLX_RQ_COMPLETE")
    click.echo(made.source_template % made.source_vars())


COMMANDS = (completion,)
