"""Models of the hub, named OWNER/NAME, or OWNER/NAME@REVISION for a commit, a branch or a tag.

The hub's own client does the work: downloads go on where they were broken off, and what is in its
cache is not fetched again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlx_rq.jobs.openai.words import one_line

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w.-]+(/[\w.-]+)*)?")

_SHOWN = 3
"""Files that an error names."""


class HubError(Exception):
    """The hub did not give what was asked for; the message says why, and what to do."""


@dataclass(frozen=True)
class HubModel:
    """A model in the hub's cache: all its files are there, and so many were `checked`."""

    path: Path
    revision: str
    checked: int


def fetch_file(model: str, name: str) -> Path:
    """Gets one file of a model; raises HubError."""
    from huggingface_hub import hf_hub_download

    repository, revision = _parts(model)
    with _hub_errors():
        return Path(hf_hub_download(repository, name, revision=revision))


def fetch_snapshot(model: str) -> Path:
    """Gets all files of a model that mlx-lm reads, showing progress; raises HubError."""
    from huggingface_hub import snapshot_download
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    repository, revision = _parts(model)
    with _hub_errors():
        return Path(
            snapshot_download(repository, revision=revision, allow_patterns=DEFAULT_ALLOW_PATTERNS)
        )


def cached_file(model: str, name: str) -> Path | None:
    """Finds a file of a model in the hub's cache; None where it is not there."""
    from huggingface_hub import try_to_load_from_cache

    repository, revision = _parts(model)
    found = try_to_load_from_cache(repository, name, revision=revision)
    return Path(found) if isinstance(found, str) else None


def check_snapshot(model: str, path: Path) -> HubModel:
    """Compares the files of a snapshot with the hub's checksums; raises HubError.

    One that differs is taken out of the cache, so that the next download gets it anew. None is
    checked where the hub is not to be asked.
    """
    from huggingface_hub import HfApi, is_offline_mode

    if is_offline_mode():
        return HubModel(path, path.name, 0)
    repository, _ = _parts(model)
    with _hub_errors():
        found = HfApi().verify_repo_checksums(repository, revision=path.name)
    if wrong := [mismatch["path"] for mismatch in found.mismatches]:
        for name in wrong:
            (path / name).resolve().unlink(missing_ok=True)
            (path / name).unlink(missing_ok=True)
        raise HubError(f"{_some(wrong)}: not as the hub has it, and was removed: pull again")
    return HubModel(path, path.name, found.checked_count)


def _parts(model: str) -> tuple[str, str | None]:
    repository, _, revision = model.partition("@")
    return repository, revision or None


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


@contextmanager
def _hub_errors() -> Iterator[None]:
    """Says in one line why the hub did not give what was asked for."""
    from huggingface_hub import errors

    try:
        yield
    except Exception as error:  # transports and download backends bring exceptions of their own
        reason = f"the hub did not give it ({one_line(error)}): try again"
        # The order matters: each is a kind of the one that is asked for after it.
        if isinstance(error, errors.RepositoryNotFoundError):
            reason = "the hub shows no such repository: check the name, or log in if it is private"
        elif isinstance(error, errors.RevisionNotFoundError):
            reason = "the hub has no such revision of it: check what stands behind the @"
        elif isinstance(error, errors.IncompleteSnapshotError):
            missing = re.search(r"are missing \((.*?)\)", str(error))
            what = missing[1] if missing else "some of its files"
            reason = (
                f"the hub cannot be reached, or HF_HUB_OFFLINE is set; missing here: {what}. Check "
                "the network, then pull it once more"
            )
        elif isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
            reason = (
                "the hub cannot be reached, or HF_HUB_OFFLINE is set: "
                "check the network, or give the path of a model folder"
            )
        elif isinstance(error, errors.EntryNotFoundError):
            reason = "its hub repository has no config.json: choose one that mlx-lm can load"
        raise HubError(reason) from error
