"""This machine: Python, system, chip, MLX and how fast it is, memory, sleep."""

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlx_rq.worker.cli.doctor.finding import Finding, gigabytes
from mlx_rq.worker.cli.machine import is_translated, unfit
from mlx_rq.worker.process.chip import chip

_PROGRAM_SECONDS = 5.0
_TRIAL_SECONDS = 0.3
_SIDE = 256
"""Of the matrices of the trial: small, since the plain BLAS takes a second for ones of 1024."""

_LITTLE_MEMORY = 8e9

FASTER_BLAS = (
    "Matrices in float32 are about 20 times faster with OpenBLAS: install it (Debian, Ubuntu: "
    "apt install libopenblas0-pthread), and start the worker with "
    "LD_PRELOAD=$(ldconfig -p | awk '/libopenblas.so.0/{print $NF; exit}')"
)


@dataclass(frozen=True)
class Machine:
    """What is known of a machine; on others than Macs, `macos` is empty."""

    system: str
    architecture: str
    python: str
    macos: str
    translated: bool
    chip: str
    memory: int
    wired_limit: int
    sleeps_after: int | None
    """Minutes; 0 never, None where it is not told."""


@dataclass(frozen=True)
class Mlx:
    """What MLX says of itself: its error, or its device, speed and memory."""

    error: str = ""
    missing: bool = False
    version: str = ""
    device: str = ""
    metal: bool = False
    gigaflops: float = 0.0
    plain_blas: bool = False
    recommended: int | None = None


def this_machine(run: Callable[..., str] | None = None) -> Machine:
    """Asks the system; `run` gives the output of a program, empty where it fails."""
    said = run or _output
    mac = sys.platform == "darwin"
    wired = said("sysctl", "-n", "iogpu.wired_limit_mb") if mac else ""
    asleep = re.search(r"^\s*sleep\s+(\d+)", said("pmset", "-g") if mac else "", re.MULTILINE)
    return Machine(
        system=sys.platform,
        architecture=platform.machine(),
        python=platform.python_version(),
        macos=platform.mac_ver()[0],
        translated=is_translated(),
        chip=chip(),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        wired_limit=int(wired) << 20 if wired.strip().isdecimal() else 0,
        sleeps_after=int(asleep[1]) if asleep else None,
    )


def _output(*program: str) -> str:
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            program, capture_output=True, text=True, timeout=_PROGRAM_SECONDS, check=True
        ).stdout
    return ""


def try_mlx() -> Mlx:
    """Has MLX multiply for a moment."""
    try:
        mx = importlib.import_module("mlx.core")
    except ModuleNotFoundError as error:
        return Mlx(error=str(error), missing=True)
    except ImportError as error:
        return Mlx(error=str(error))
    try:
        matrix = mx.random.normal((_SIDE, _SIDE))
        mx.eval(matrix @ matrix)
        rounds, start = 0, time.perf_counter()
        while (seconds := time.perf_counter() - start) < _TRIAL_SECONDS:
            mx.eval(matrix @ matrix)
            rounds += 1
        metal = mx.metal.is_available()
        info = mx.device_info()
    except (RuntimeError, ValueError) as error:
        return Mlx(error=str(error))
    return Mlx(
        version=mx.__version__,
        device=str(info.get("device_name", mx.default_device())),
        metal=metal,
        gigaflops=2 * _SIDE**3 * rounds / seconds / 1e9,
        plain_blas=not metal and "openblas" not in _libraries(),
        recommended=int(info["max_recommended_working_set_size"]) if metal else None,
    )


def _libraries() -> str:
    """Names what is loaded into this process, where Linux tells."""
    with suppress(OSError):
        return Path("/proc/self/maps").read_text(errors="replace").lower()
    return ""


def machine_findings(machine: Machine, mlx: Mlx) -> Iterator[Finding]:
    """Says what is to be known of a machine."""
    system = f"macOS {machine.macos}" if machine.macos else machine.system
    named = "" if machine.chip == machine.architecture else f", {machine.chip}"
    where = f"{machine.python} ({machine.architecture}), {system}{named}"
    why_not = unfit(machine.system, machine.architecture, machine.macos, machine.translated)
    if why_not:
        yield Finding("Python", "error", where, why_not)
    else:
        yield Finding("Python", "ok", where)
        yield _of_mlx(mlx)
    yield from _of_memory(machine, mlx)
    if machine.macos:
        yield _of_sleep(machine)
    elif machine.system != "darwin" and shutil.which("systemd-inhibit") is None:
        yield Finding(
            "sleep",
            "warning",
            "there is no systemd-inhibit: the worker cannot keep this machine awake",
            "See to it that the machine does not sleep while jobs run.",
        )


def _of_mlx(mlx: Mlx) -> Finding:
    if mlx.missing:
        return Finding("MLX", "error", mlx.error, "pip install 'mlx-rq[worker]'")
    if mlx.error:
        return Finding("MLX", "error", mlx.error, "pip install --force-reinstall mlx")
    said = f"{mlx.version} on {mlx.device}: {mlx.gigaflops:,.1f} GFLOP/s in float32"
    if mlx.plain_blas:
        return Finding("MLX", "warning", f"{said}, with the plain BLAS", FASTER_BLAS)
    if not mlx.metal:
        said += "; without Metal: good for trying, not for work"
    return Finding("MLX", "ok", said)


def _of_memory(machine: Machine, mlx: Mlx) -> Iterator[Finding]:
    said = gigabytes(machine.memory)
    if mlx.recommended is not None:
        said += f", of which Metal may use {gigabytes(mlx.recommended)}"
    if machine.wired_limit:
        said += f" (iogpu.wired_limit_mb is set: {gigabytes(machine.wired_limit)})"
    if machine.wired_limit > 0.9 * machine.memory:
        advice = "Leave the system more; the default: sudo sysctl iogpu.wired_limit_mb=0"
        yield Finding("memory", "error", said, advice)
    elif machine.memory < _LITTLE_MEMORY:
        advice = "Take a model of up to 1B parameters in 4 bits, and --kv-budget 500MB."
        yield Finding("memory", "warning", said, advice)
    else:
        yield Finding("memory", "ok", said)


def _of_sleep(machine: Machine) -> Finding:
    awake = "the worker keeps this Mac awake while jobs are in work"
    if machine.sleeps_after is None or machine.sleeps_after == 0:
        return Finding("sleep", "ok", awake)
    return Finding(
        "sleep",
        "warning",
        f"{awake}; idle, it sleeps after {machine.sleeps_after} minutes and takes no jobs then",
        "Where others submit from afar: sudo pmset -c sleep 0",
    )
