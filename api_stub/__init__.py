"""A thin HTTP door that only enqueues and lets clients poll. Never loads a model."""
