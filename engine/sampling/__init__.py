"""Logits become tokens, each sequence by its own parameters."""
