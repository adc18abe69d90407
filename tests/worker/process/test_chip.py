"""What a processor is called."""

from pathlib import Path

from mlx_rq.worker.process.chip import linux_chip


def test_linux_names_it_for_each_core(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: A: Chip\n\nprocessor\t: 1\nmodel name\t: B\n")
    assert linux_chip(file) == "A: Chip"
    file.write_text("processor\t: 0\nBogoMIPS\t: 48.00\n")
    assert linux_chip(file) == ""
