"""mlx-rq as a service of the system: a launchd agent on macOS, a systemd user unit on Linux."""
