"""Tokens become text, and which texts must never become control tokens."""
