"""The worker's process: its supervisor, and what a failing Redis means to it."""
