"""Lets `python -m mlx_rq.worker` stand for the command `mlx-rq`."""

from mlx_rq.worker.cli.main import main

main(prog_name="mlx-rq")
