"""The life of a job on this machine: claim, plan, generate, commit; and the command line."""
