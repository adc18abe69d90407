"""From a CSV to a dataset of typed records, with real parts: processes, valkey-server, SmolLM2."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from batch_helpers import BatchProcess
from models import quick_smollm2_folder

pytestmark = pytest.mark.slow

ROWS = 6
TRADES = ("baker", "doctor", "farmer", "pilot", "poet")
PERSON = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 18, "maximum": 90},
        "married": {"type": "boolean"},
    },
    "required": ["age", "married"],
    "additionalProperties": False,
}


@pytest.fixture
def worker(redis_url: str) -> Iterator[None]:
    """A worker with SmolLM2 in a process of its own."""
    command = [sys.executable, "-P", "-m", "mlx_rq.worker", "worker"]
    process = subprocess.Popen(
        [*command, "--model", str(quick_smollm2_folder()), "--batch", "4"],
        env={**os.environ, "MLX_RQ_REDIS_URL": redis_url},
    )
    yield
    process.send_signal(signal.SIGTERM)
    process.wait()


@pytest.mark.usefixtures("worker")
def test_rows_become_typed_records(tmp_path: Path, redis_url: str) -> None:
    rows = tmp_path / "people.csv"
    lines = [f"{number},{TRADES[number % len(TRADES)]}\n" for number in range(ROWS)]
    rows.write_text("number,trade\n" + "".join(lines))
    schema = tmp_path / "person.json"
    schema.write_text(json.dumps(PERSON))
    output = tmp_path / "people.parquet"

    code, out, err = BatchProcess(
        redis_url,
        [
            *(rows, "--prompt", "Number {number}, a {trade}.", "--schema", schema),
            *("--system", 'Answer like {{"age": 30, "married": true}}.'),
            *("-p", "max_completion_tokens=24", "-p", "temperature=0", "-o", output),
        ],
    ).end(timeout=600)

    assert (code, out) == (0, f"{ROWS} in: {ROWS} answered, 0 errors, 0 missing\n"), err
    table = pq.read_table(output)
    assert {name: str(table.schema.field(name).type) for name in ("age", "married")} == {
        "age": "int64",
        "married": "bool",
    }
    assert table["number"].to_pylist() == [str(number) for number in range(ROWS)]
    assert table["error"].null_count == table["age"].length() == ROWS
    assert all(18 <= age <= 90 for age in table["age"].to_pylist())
    assert set(table["finish_reason"].to_pylist()) == {"stop"}
