"""How model families write tool calls and reasoning, and how that is read back."""
