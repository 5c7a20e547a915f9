"""Placements that are measured before one is chosen."""
