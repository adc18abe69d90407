"""Tokens in, tokens out: model, prompts, plan, trunks, decode, answers. Never Redis."""
