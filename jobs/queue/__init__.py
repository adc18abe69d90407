"""How a job lies in Redis: key names, enqueueing, its end, streams, webhooks."""
