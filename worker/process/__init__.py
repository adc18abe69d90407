"""The worker's process: its supervisor, their line, and how much of the batch is used."""
