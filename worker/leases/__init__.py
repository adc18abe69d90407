"""Which jobs this worker holds: claims, leases, and giving back."""
