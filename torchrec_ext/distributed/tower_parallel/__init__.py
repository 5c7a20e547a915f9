"""Towers on ranks of their own, at the same time."""
