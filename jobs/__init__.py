"""What a job is and how it travels. Knows Redis, RQ and pydantic; never MLX."""
