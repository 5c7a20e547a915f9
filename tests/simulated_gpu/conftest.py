"""Keeps what belongs into processes with a simulated GPU out of all others: test_laws.py names each file."""

collect_ignore_glob = ["site/*", "laws/*"]
