"""`mlx-rq bench`: how fast a model is here, and what sharing gains on somebody's own file."""
