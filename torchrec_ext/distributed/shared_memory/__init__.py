"""Collectives of the ranks of one host through shared memory: a compiled library, and the groups that use it."""
