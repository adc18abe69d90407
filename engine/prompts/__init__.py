"""Requests become token ids."""
