"""A thin HTTP server that only enqueues and lets clients poll. Never loads a model."""
