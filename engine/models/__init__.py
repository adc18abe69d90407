"""Loading models, and measuring what suits them on this machine."""
