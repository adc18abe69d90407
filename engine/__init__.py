"""Tokens in, tokens out: model, prompts, plan, prefixes, decode, answers. Never Redis."""
