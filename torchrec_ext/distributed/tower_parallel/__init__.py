"""Tower parallelism: towers that run at the same time on ranks of their own."""
