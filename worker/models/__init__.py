"""Several models on one machine: which of them is loaded, and how another one is."""
