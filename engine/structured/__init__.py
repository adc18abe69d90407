"""Output that must match a schema or grammar: compiled, enforced, checked."""
