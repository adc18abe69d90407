"""Which machines can generate at all; the others are told so in a sentence."""

import ctypes
import platform
import sys

LEAST_MACOS = 14


def why_not_here() -> str | None:
    """Says why MLX cannot run in this Python; None where it can."""
    return unfit(sys.platform, platform.machine(), platform.mac_ver()[0], is_translated())


def unfit(system: str, machine: str, macos: str, translated: bool) -> str | None:
    """Says it of any machine. `translated`: its Python is run by Rosetta."""
    if system != "darwin":
        return None  # where MLX has no wheel, its absence says so
    if translated:
        return (
            "This Python was made for Intel and is run by Rosetta, where there is no MLX: install "
            "a native (arm64) Python ≥ 3.11, and mlx-rq with it."
        )
    if machine != "arm64":
        return f"MLX needs Apple silicon; this Mac is {machine}. Its jobs can go to another Mac."
    if macos and int(macos.split(".")[0]) < LEAST_MACOS:
        return f"MLX needs macOS ≥ {LEAST_MACOS}; this is macOS {macos}."
    return None


def is_translated() -> bool:
    """Asks macOS whether Rosetta runs this process."""
    if sys.platform != "darwin":
        return False
    answer, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    asked = ctypes.CDLL(None).sysctlbyname(
        b"sysctl.proc_translated", ctypes.byref(answer), ctypes.byref(size), None, ctypes.c_size_t()
    )
    return bool(asked == 0 and answer.value == 1)
