"""What is known of the device: which of its errors mean what, and the limits that MLX is told."""

import sys

import mlx.core as mx
import pytest
from mlx_lm.generate_utils import BatchCounters
from scripted_device import OUT_OF_MEMORY, ScriptedDevice, watched
from tiny import tiny_model

from mlx_rq.engine.engine import MLXEngine
from mlx_rq.engine.models.device import (
    Fault,
    MLXDevice,
    finite_rows,
    settle,
    tried,
    weight_bytes,
)
from mlx_rq.engine.scheduling.generator import SharingBatchGenerator

METAL = "[METAL] Command buffer execution failed: "
CODE = "kIOGPUCommandBufferCallbackError"
TOO_LARGE = (
    "Attempting to allocate 21474836480 bytes which is greater than the maximum allowed buffer "
    "size of 17179869184 bytes."
)


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (RuntimeError(OUT_OF_MEMORY), Fault.MEMORY),
        (RuntimeError("[malloc] Unable to allocate 1073741824 bytes."), Fault.MEMORY),
        (RuntimeError("[metal::malloc] Resource limit (499000) exceeded."), Fault.MEMORY),
        (RuntimeError(f"[metal::malloc] {TOO_LARGE}"), Fault.MEMORY),
        (MemoryError("std::bad_alloc"), Fault.MEMORY),
        (RuntimeError(f"{METAL}Caused GPU Timeout Error (00000002:{CODE}Timeout)"), Fault.TIME),
        (
            RuntimeError(f"{METAL}Impacting Interactivity (0000000e:{CODE}ImpactingInteractivity)"),
            Fault.TIME,
        ),
        (RuntimeError(f"{METAL}Invalid Resource (00000009:{CODE}InvalidResource)"), Fault.OTHER),
        (RuntimeError("cudaMallocManaged failed: out of memory."), Fault.MEMORY),
        (RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory"), Fault.MEMORY),
        (RuntimeError("cudaGraphLaunch(graph, stream) failed: the launch timed out"), Fault.TIME),
        (RuntimeError("cublasLtMatmul(...) failed: CUBLAS_STATUS_INTERNAL_ERROR"), Fault.OTHER),
        (RuntimeError("bad kernel"), None),
        (RuntimeError("the custom check failed: out of memory"), None),
        (ValueError("[reshape] Cannot reshape array of size 6 into shape (4)."), None),
        (ValueError(f"a text that says {OUT_OF_MEMORY}"), None),
    ],
)
def test_errors_are_known_by_what_they_say(error: Exception, fault: Fault | None) -> None:
    assert MLXDevice().fault_of(error) is fault


def test_rows_of_no_numbers_are_found() -> None:
    nan, inf = float("nan"), float("inf")
    rows = [[1.0, 2.0], [nan, 2.0], [1.0, -inf], [inf, 1.0], [-inf, -inf]]
    for dtype in (mx.float32, mx.bfloat16, mx.float16):
        found = finite_rows(mx.array(rows).astype(dtype)).tolist()
        assert found == [True, False, True, False, False]


def test_what_is_held_is_read() -> None:
    device = MLXDevice()
    before = device.memory()
    held = mx.zeros((1000, 1000))
    mx.eval(held)

    assert device.memory().active - before.active == 4_000_000
    assert device.memory().peak >= device.memory().active
    assert device.name
    assert device.physical > 2**30


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What MLX was told, on a machine with Metal."""
    told: dict[str, int] = {}
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_recommended_working_set_size": 1_000_000})
    for name in ("memory", "cache", "wired"):
        monkeypatch.setattr(
            mx, f"set_{name}_limit", lambda n, name=name: told.__setitem__(name, n) or 0
        )
    return told


def test_mlx_is_told_the_ceiling(limits: dict[str, int]) -> None:
    MLXDevice().limit()
    assert limits == {"memory": 1_000_000, "cache": 125_000}
    MLXDevice(memory=800_000).limit()
    assert limits == {"memory": 800_000, "cache": 100_000}


def test_the_weights_are_wired_unless_somebody_says_otherwise(limits: dict[str, int]) -> None:
    network = tiny_model("llama").model
    device, weights = MLXDevice(), weight_bytes(network)
    assert 0 < weights < 750_000
    assert device.wire(None, network) == weights == limits["wired"]
    assert device.wire(0, network) == 0 == limits["wired"]
    assert device.wire(400_000, network) == 400_000 == limits["wired"]
    assert device.wire(2_000_000, network) == 1_000_000  # more is an error
    device._recommended = weights
    assert device.wire(None, network) == int(0.75 * weights)


def test_without_metal_there_is_no_limit() -> None:
    if mx.metal.is_available():
        pytest.skip("there is one here")
    device = MLXDevice()
    device.limit()
    assert device.ceiling is None
    assert device.wire(None, tiny_model("llama").model) == 0


def test_a_batch_does_not_wire_all_that_there_is(
    limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = sys.modules["mlx_lm.generate"]  # the package's attribute is a function
    monkeypatch.setattr(generate, "maybe_set_recommended_wired_limit", lambda: 4711)

    SharingBatchGenerator(tiny_model("llama").model, batch_size=2, counters=BatchCounters())

    assert limits == {"wired": 4711}  # as it was before


class _Failing:
    """Fails so often, and then gives an answer."""

    def __init__(self, times: int, error: Exception) -> None:
        self.left, self.error = times, error

    def __call__(self) -> str:
        if self.left:
            self.left -= 1
            raise self.error
        return "found"


@pytest.mark.parametrize(("times", "given"), [(0, "found"), (1, "found"), (2, "otherwise")])
def test_a_trial_at_which_the_device_fails_ends_nothing(times: int, given: str) -> None:
    device = ScriptedDevice()
    trial = _Failing(times, RuntimeError(OUT_OF_MEMORY))

    assert tried(device, trial, "otherwise", "it") == given
    assert device.cleared == times


def test_a_trial_that_fails_by_itself_is_heard_of() -> None:
    with pytest.raises(ValueError, match="a fault"):
        tried(ScriptedDevice(), _Failing(1, ValueError("a fault")), "", "it")


def test_what_the_device_says_twice_is_known_already() -> None:
    device = ScriptedDevice()
    device.said = RuntimeError(OUT_OF_MEMORY)
    settle(device)
    assert device.cleared == 1

    device.said = RuntimeError("something else")
    with pytest.raises(RuntimeError, match="something else"):
        settle(device)


@pytest.mark.parametrize("failing", range(6))
def test_an_engine_is_made_though_the_device_fails_at_a_trial(failing: int) -> None:
    device = ScriptedDevice()
    scripted, network = watched(tiny_model("llama"), device)
    network.fails = lambda rows, tokens, before: before == failing
    engine = MLXEngine(scripted, device=device)

    assert (device.cleared, engine.capacity) == (1, 16)
    assert "held once" in engine.prefix_sharing
