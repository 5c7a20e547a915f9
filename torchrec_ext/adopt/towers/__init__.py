"""Sub-networks of a user's model that run at the same time on ranks of their own."""
