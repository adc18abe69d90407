"""The page at `/`: its files, and what it shows to each client."""
