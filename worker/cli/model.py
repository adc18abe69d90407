"""Commands that get models: `model pull` and `model list`."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from mlx_rq.worker.cli.common import json_option, needs_extra, option, print_json

if TYPE_CHECKING:
    from mlx_rq.engine.models.gguf import Dtype


def ensure_model(name: str) -> None:
    """Gets a known model that is not there yet, showing progress; leaves other names alone."""
    with needs_extra("worker"):
        from mlx_rq.engine.models.load import KNOWN_MODELS, find_pulled
    if name in KNOWN_MODELS and find_pulled(name) is None:
        _pull(name, None)


def _pull(name: str, dtype: "Dtype | None") -> Path:
    from mlx_rq.engine.models.pull import pull

    with Progress(TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()) as bar:
        task = bar.add_task(name, total=None)

        def show(stage: str, done: int, total: int) -> None:
            bar.update(task, description=f"{name}: {stage}", completed=done, total=total or None)

        return pull(name, dtype=dtype, progress=show)


@click.group()
def model() -> None:
    """Get models, and see which are here."""


@model.command("pull")
@click.argument("name")
@option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "4bit"]),
    default=None,
    show_default="what is fastest on this machine",
    help="Of a known model; those of the hub come as they are.",
)
@json_option
def pull_command(name: str, dtype: "Dtype | None", as_json: bool) -> None:
    """Get a known model (smollm2) once and convert it to MLX, or one of the hub (OWNER/NAME).

    OWNER/NAME@REVISION is a certain commit, branch or tag of it; --model takes that, too. What was
    broken off goes on, and files are compared with the hub's checksums.
    """
    with needs_extra("worker"):
        from mlx_rq.engine.models.hub import HUB_ID
        from mlx_rq.engine.models.pull import pull_from_hub

        if HUB_ID.fullmatch(name):
            if dtype is not None:
                raise click.ClickException(
                    f"--dtype {dtype}: {name} comes as it is; mlx_lm.convert makes others of it"
                )
            pulled = pull_from_hub(name)
            path, more = pulled.path, {"revision": pulled.revision, "checked": pulled.checked}
        else:
            path, more = _pull(name, dtype), {}
    if as_json:
        print_json({"name": name, "path": str(path), **more})
    else:
        click.echo(path)


@model.command("list")
@option(
    "--folder",
    "folders",
    envvar=None,
    multiple=True,
    type=click.Path(file_okay=False, exists=True, path_type=Path),
    help="Look for models and adapters here, too.",
)
@json_option
def list_command(folders: tuple[Path, ...], as_json: bool) -> None:
    """List the known models, and those in the hub's cache and LM Studio's folders.

    What stands in the first column is what --model takes, or --adapter behind a name; then how
    weights are held, their size, the context, what can be batched, and in which layers a prefix is
    held once.
    """
    with needs_extra("worker"):
        from mlx_rq.engine.models.local import local_models, read_model
        from mlx_rq.engine.models.pull import list_models
    entries: list[dict[str, Any]] = []
    for known in list_models():
        found = read_model(known.path, known.name, "known")
        told = dict.fromkeys(("context_length", "batches", "shares"))
        told |= {name: getattr(found, name, None) for name in told}
        entries.append({**asdict(known), **told, "source": "known"})
    entries += [{**asdict(one), "pulled": True} for one in local_models(folders)]
    if as_json:
        print_json([{**entry, "path": str(entry["path"])} for entry in entries])
        return
    for entry in entries:
        size = f"{entry['size_bytes'] / 1e6:,.0f} MB" if entry["pulled"] else "not pulled"
        tokens = f"{entry['context_length']:,}" if entry["context_length"] else ""
        where = f"{entry['source']}: {entry['path']}"
        known = entry["batches"]
        ways = f"batches {known}, shares {entry['shares']}" if known else ""
        click.echo(
            f"{entry['name']:10} {entry['dtype']:9} {size:>12} {tokens:>9}  {ways:26}  {where}"
        )


COMMANDS = (model,)
