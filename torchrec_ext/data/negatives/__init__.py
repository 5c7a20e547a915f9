"""Negative sampling: uniform, by popularity, hard and mixed, on the host and on a device."""
