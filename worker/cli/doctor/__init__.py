"""What `mlx-rq doctor` looks at: each finding says what is so, and what to do about it."""
