"""How answers get into Redis, and where they wait while it is away."""
