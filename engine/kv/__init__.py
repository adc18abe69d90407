"""The prefix cache: KV of shared prefixes, computed once and held once."""
