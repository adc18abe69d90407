"""What `bench/chaos.py` does to jobs, and how it looks afterwards what became of each."""
