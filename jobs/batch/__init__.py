"""Files and tables of requests in, answers out, resumable."""
