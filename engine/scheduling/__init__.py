"""Which sequences wait, which run, and what each step computes."""
